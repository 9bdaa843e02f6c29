"""Attention in random configurations against float64: masks, windows, caps, positions, layouts, schedules.

``FLASHINFER_TEST_EXAMPLES=N`` draws N configurations per device, of all modules. The default is 2,000 on a
GPU, and 100 of ``MODULES`` on a CPU, because compilation takes most of a module's time.
"""

from __future__ import annotations

import os
import random
from dataclasses import dataclass, field

import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import flashinfer
from flashinfer._attention.arguments import POS_ENCODINGS
from flashinfer._attention.kernels import CallProperties
from tests.support.attention_oracle import (
    FLOAT8,
    LSE_TOLERANCE,
    Paged,
    assert_near,
    attention,
    batch_attention,
    drawn,
    indptr_of,
    multi_item_mask,
    token_positions,
    workspace,
)

F32, F16, BF16, (E4M3, E5M2) = torch.float32, torch.float16, torch.bfloat16, FLOAT8
# One module each: family, dtypes of queries and of keys, head_dims, pos_encoding_mode, soft cap. These are built
# ahead of time, or other tests need them too.
MODULES = [
    ("decode", F32, F32, (64, 64), "NONE", False),
    ("decode", F16, F16, (64, 64), "NONE", False),
    ("decode", BF16, BF16, (128, 128), "NONE", False),
    ("decode", F16, E4M3, (64, 64), "NONE", False),
    ("decode", F32, F32, (64, 64), "ROPE_LLAMA", False),
    ("prefill", F32, F32, (64, 64), "NONE", False),
    ("prefill", F16, F16, (64, 64), "NONE", False),
    ("prefill", BF16, BF16, (128, 128), "NONE", False),
    ("prefill", F16, E4M3, (64, 64), "NONE", False),
    ("prefill", F32, F32, (64, 64), "NONE", True),
    ("prefill", F16, F16, (256, 256), "NONE", False),
]
MORE_MODULES = [
    ("decode", BF16, E5M2, (128, 128), "NONE", True),
    ("decode", F32, F32, (64, 64), "ALIBI", False),
    ("decode", F16, F16, (256, 256), "ALIBI", True),
    ("decode", F16, F16, (64, 64), "ROPE_LLAMA", False),
    ("prefill", F16, E5M2, (64, 64), "NONE", False),
    ("prefill", BF16, BF16, (192, 128), "NONE", False),
    ("prefill", BF16, E4M3, (128, 128), "NONE", False),
    ("prefill", F16, F16, (64, 64), "ALIBI", False),
    ("prefill", BF16, BF16, (128, 128), "ROPE_LLAMA", True),
]
EXAMPLES = os.environ.get("FLASHINFER_TEST_EXAMPLES")
# Queries times keys times heads. The float64 oracle computes them in a fraction of a second.
WORK = 1_500_000


@dataclass
class Case:
    """One configuration. ``seed`` draws its tensors."""

    module: tuple
    form: str  # single, ragged, or a form of a paged cache
    heads: tuple[int, int]
    qo_lens: list[int]
    kv_lens: list[int]
    layout: str
    page_size: int
    mask: str
    scales: tuple[float | None, float | None]
    split: bool
    near: bool
    hopper: bool  # prefill with backend="fa3", if there is a Hopper GPU and its kernels serve the call
    seed: int
    options: dict = field(default_factory=dict)


@st.composite
def cases(draw: st.DrawFn, modules: list[tuple]) -> Case:
    module = draw(st.sampled_from(modules))
    family, _, dtype_kv, head_dims, pos, cap = module
    paged_forms = ["pair", "torn"] if head_dims[0] != head_dims[1] else ["one", "pair", "torn"]
    form = draw(st.sampled_from(["single", *(["ragged"] if family == "prefill" else []), *paged_forms]))
    kv_heads = draw(st.sampled_from([1, 2, 3]))
    heads = (kv_heads * draw(st.sampled_from([1, 2, 3, 4, 5, 8, 17])), kv_heads)
    # Lengths come from the seed, because hypothesis would make most of them 0.
    seed = draw(st.integers(0, 2**31))
    lengths = random.Random(seed)
    batch = 1 if form == "single" else lengths.choice([1, 2, 3, 5])
    longest = draw(st.sampled_from([20, 150, 150, 150, 600, 600, 600, 2000, 8192]))
    kv_lens = [lengths.choice([0, 1, *[lengths.randint(1, longest)] * 6]) for _ in range(batch)]
    limits = [max(1, min(n + 2, 200, WORK // (heads[0] * batch * max(n, 1)))) for n in kv_lens]
    qo_lens = [1 if family == "decode" else lengths.choice([0, *[lengths.randint(1, n)] * 7]) for n in limits]
    masks = ["none"] if family == "decode" else ["none", "causal", "causal", "custom"]
    if family == "prefill" and form != "single" and longest <= 600:
        masks.append("items")
    options: dict = {"pos_encoding_mode": pos}
    if cap:
        options["logits_soft_cap"] = draw(st.sampled_from([1.0, 8.0, 30.0]))
    if pos == "ROPE_LLAMA" and draw(st.booleans()):
        options |= {"rope_scale": draw(st.sampled_from([0.5, 4.0])), "rope_theta": draw(st.sampled_from([1e3, 5e5]))}
    if draw(st.booleans()):
        options["window_left"] = draw(st.integers(0, longest))
    if draw(st.booleans()):
        options["sm_scale"] = draw(st.sampled_from([0.05, 0.125, 0.3]))
    return Case(
        module, form, heads, qo_lens, kv_lens, draw(st.sampled_from(["NHD", "HND"])),
        draw(st.sampled_from([1, 3, 5, 16, 64])), draw(st.sampled_from(masks)),
        draw(st.sampled_from([(None, None), (0.5, 3.0)])) if dtype_kv in FLOAT8 and form != "ragged" else (None, None),
        draw(st.booleans()), draw(st.booleans()), draw(st.booleans()), seed, options,
    )  # fmt: skip


def backend_of(case: Case, device: str) -> str:
    if not case.hopper:
        return "fa2"
    _, dtype, dtype_kv, head_dims, pos, cap = case.module
    mask_mode = {"none": 0, "causal": 1, "custom": 2, "items": 3}[case.mask]
    wanted = CallProperties(
        "prefill", torch.device(device), (dtype, dtype_kv, dtype), head_dims, POS_ENCODINGS[pos], cap, mask_mode,
        case.heads[0] // case.heads[1],
    )  # fmt: skip
    return "fa3" if wanted.unsupported_reason("sm90a") is None else "auto"


def masks_of(case: Case, device: str) -> tuple[list[torch.Tensor] | None, dict]:
    """Return the masks of all requests, and the arguments of ``plan`` for them."""
    if case.mask == "custom":
        masks = [torch.rand(n, m) < random.random() for n, m in zip(case.qo_lens, case.kv_lens, strict=True)]
        flat = torch.cat([torch.zeros(0, dtype=torch.bool), *(mask.view(-1) for mask in masks)]).to(device)
        if random.random() < 0.5:
            return masks, {"custom_mask": flat}
        bits = indptr_of([mask.numel() for mask in masks]).to(device)
        return masks, {"packed_custom_mask": flashinfer.segment_packbits(flat, bits, bitorder="little")[0]}
    if case.mask == "items":
        prefixes = [random.randint(0, n) for n in case.kv_lens]
        items = []
        for prefix, length in zip(prefixes, case.kv_lens, strict=True):
            lens, left = [], length - prefix
            while left > 0:
                lens.append(random.randint(0, left - 1))
                left -= lens[-1] + 1
            items.append(lens)
        longest = max((n - p for n, p in zip(case.kv_lens, prefixes, strict=True)), default=0)
        positions = [token_positions(lens, longest) for lens in items]
        most = [max(lens, default=0) for lens in items]
        masks = [multi_item_mask(*one) for one in zip(case.qo_lens, case.kv_lens, prefixes, items, strict=True)]
        return masks, {
            "prefix_len_ptr": torch.tensor(prefixes, dtype=torch.int32).to(torch.uint32).to(device),
            "token_pos_in_items_ptr": torch.cat([torch.zeros(0, dtype=torch.uint16), *positions]).to(device),
            "token_pos_in_items_len": longest,
            "max_item_len_ptr": torch.tensor(most, dtype=torch.int32).to(torch.uint16).to(device),
        }
    return None, {"causal": True} if case.mask == "causal" else {}


def scaled(requests, scales):
    k_scale, v_scale = (1.0 if scale is None else scale for scale in scales)
    return [(k.double() * k_scale, v.double() * v_scale) for k, v in requests]


def lse_tolerance(case: Case) -> float:
    """The rounding of rotated halves grows with the scale. A window of one key averages none of it."""
    spread = case.options.get("sm_scale", 0) * case.module[3][0] ** 0.5
    rotated = case.options.get("pos_encoding_mode") == "ROPE_LLAMA"
    return LSE_TOLERANCE * max(1.0, spread if rotated and case.module[1] != torch.float32 else 0.0)


def run_single(case: Case, device: str) -> None:
    family, dtype, dtype_kv, (head_dim, head_dim_vo), *_ = case.module
    (qo_len,), (kv_len,) = case.qo_lens, case.kv_lens
    q = drawn((qo_len, case.heads[0], head_dim), dtype, device)
    k, v = (drawn((kv_len, case.heads[1], dim), dtype_kv) for dim in (head_dim, head_dim_vo))
    masks, arguments = masks_of(case, device)
    mask = None if masks is None else masks[0]
    want, want_lse = attention(
        q, *scaled([(k.float(), v.float())], case.scales)[0], mask=mask, causal=case.mask == "causal", **case.options
    )
    k, v = (x if case.layout == "NHD" else x.transpose(0, 1) for x in (k.to(device), v.to(device)))
    k_scale, v_scale = case.scales
    if family == "decode":
        out, lse = flashinfer.single_decode_with_kv_cache(
            q[0], k, v, case.layout, k_scale=k_scale, v_scale=v_scale, return_lse=True, **case.options
        )
        out, lse = out[None], lse[None]
    else:
        out, lse = flashinfer.single_prefill_with_kv_cache(
            q, k, v, None, k_scale, v_scale, kv_layout=case.layout, return_lse=True, backend=backend_of(case, device),
            **arguments, **case.options,
        )  # fmt: skip
    assert_near(out, want, lse, want_lse, lse_tolerance=lse_tolerance(case))


def run_batch(case: Case, device: str) -> None:
    family, dtype, dtype_kv, (head_dim, head_dim_vo), *_ = case.module
    q = drawn((sum(case.qo_lens), case.heads[0], head_dim), dtype, device)
    far = "cpu" if case.near else device
    options = {"q_data_type": dtype, "kv_data_type": dtype_kv, "disable_split_kv": not case.split} | case.options
    if case.form == "ragged":
        k, v = (drawn((sum(case.kv_lens), case.heads[1], dim), dtype_kv) for dim in (head_dim, head_dim_vo))
        requests = list(zip(*(x.float().split(case.kv_lens) for x in (k, v)), strict=True)) if case.kv_lens else []
        inputs = [x.to(device) if case.layout == "NHD" else x.transpose(0, 1).contiguous().to(device) for x in (k, v)]
        wrapper = flashinfer.BatchPrefillWithRaggedKVCacheWrapper(
            workspace(device), case.layout, backend=backend_of(case, device)
        )
        tables, shape = [indptr_of(case.kv_lens).to(far)], (*case.heads, head_dim, head_dim_vo)
    else:
        paged = Paged(case.kv_lens, case.page_size, case.heads[1], head_dim, dtype_kv, device, case.layout, case.form,
                      head_dim_vo, shared=random.random() < 0.5)  # fmt: skip
        requests, inputs = [paged.request(b) for b in range(len(case.kv_lens))], [paged.cache]
        tables, shape = list(paged.tables_on(far)), (*case.heads, head_dim, case.page_size)
        kind, chosen = ("Decode", {}) if family == "decode" else ("Prefill", {"backend": backend_of(case, device)})
        wrapper = getattr(flashinfer, f"Batch{kind}WithPagedKVCacheWrapper")(workspace(device), case.layout, **chosen)
        shape = shape if family == "decode" else (*shape, head_dim_vo)
    masks, arguments = masks_of(case, device)
    if family == "prefill":
        tables.insert(0, indptr_of(case.qo_lens).to(far))
    wrapper.plan(*tables, *shape, **arguments, **options)
    scales = {} if case.scales == (None, None) else dict(zip(("k_scale", "v_scale"), case.scales, strict=True))
    out, lse = wrapper.run(q, *inputs, return_lse=True, **scales)
    want, want_lse = batch_attention(
        q, case.qo_lens, scaled(requests, case.scales), masks, causal=case.mask == "causal", **case.options
    )
    if case.kv_lens:
        assert_near(out, want, lse, want_lse, lse_tolerance=lse_tolerance(case))
    again, lse_again = wrapper.run(q, *inputs, return_lse=True, **scales)
    assert torch.equal(again, out) and torch.equal(lse_again, lse), "the same inputs, other bits"


def test_any_configuration(device):
    examples = int(EXAMPLES) if EXAMPLES else 100 if device == "cpu" else 2000
    every = MODULES if device == "cpu" and not EXAMPLES else MODULES + MORE_MODULES
    modules = [one for one in every if device == "cpu" or one[1] != F32]

    @settings(max_examples=examples, database=None, print_blob=True, suppress_health_check=list(HealthCheck))
    @given(cases(modules))
    def check(case: Case) -> None:
        torch.manual_seed(case.seed)
        random.seed(case.seed)
        (run_single if case.form == "single" else run_batch)(case, device)

    check()
