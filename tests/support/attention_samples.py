"""Sample calls with random inputs of every public function and wrapper of attention, for general tests.

A function or wrapper that is missing here fails ``tests/torch/test_compile_attention.py``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

import flashinfer
from flashinfer._attention import equal_batch as _attend_batch  # noqa: F401 - its operator
from flashinfer._attention.plan import from_shape
from flashinfer._attention.signature import CallArguments, Parameters
from tests.support.attention_oracle import indptr_of, int32, workspace
from tests.support.plans import plan_of

HEADS, KV_HEADS, DIM, PAGE = 6, 2, 64, 8
# The CPU uses float32, because other tests compile modules with soft caps, slopes and RoPE for it too.
DTYPE = torch.float16 if torch.cuda.is_available() else torch.float32
SIGMOID_DECL = r"""
struct SampleSigmoid : AttentionVariantBase {
  static constexpr bool use_softmax = false;
  uint32_t window_left, qo_len, kv_len;

  template <typename Params>
  FLASHINFER_HD SampleSigmoid(const Params& params, uint32_t batch_idx, uint8_t*)
      : qo_len(params.get_qo_len(batch_idx)), kv_len(params.get_kv_len(batch_idx)) { window_left = kv_len; }

  REGISTER_LOGITS_TRANSFORM(params, logits, batch_idx, qo_idx, kv_idx, qo_head_idx, kv_head_idx, {
    return math::ptx_rcp(1.f + math::ptx_exp2(-float(logits * params.logits_scale * math::log2e)));
  })
};
"""
SIGMOID = (
    "auto",
    "sample_sigmoid",
    DTYPE,
    DTYPE,
    DTYPE,
    DIM,
    DIM,
    [],
    [],
    ["logits_scale"],
    ["double"],
    "SampleSigmoid",
)


@dataclass(frozen=True)
class Sample:
    """``function(**inputs(n))`` after ``plan(n)``, for n queries, or n requests with one query each.

    ``numbers`` are numbers that users vary between calls, ``plan_numbers`` between plans.
    """

    function: Callable[..., Any]
    inputs: Callable[[int], dict[str, Any]]
    plan: Callable[..., None] = lambda n, **_: None
    numbers: tuple[str, ...] = ()
    plan_numbers: tuple[str, ...] = ()
    graph: bool = True  # its work may be captured into a CUDA graph and replayed with new inputs


def values(number: str, count: int) -> list[float]:
    """Return distinct values of a number that users vary. The first two are neither 0 nor 1."""
    if number.startswith("window_left"):
        return [2 + i for i in range(count)]
    if number.startswith("rope_theta"):
        return [1e4 + 500.0 * i for i in range(count)]
    return [(20.0 if number == "logits_soft_cap" else 0.2) + 0.15 * i for i in range(count)]


def _randn(*shape: int, device: str) -> torch.Tensor:
    return torch.randn(shape, device=device).to(DTYPE)


def samples(device: str) -> dict[str, Sample]:
    """Return calls of functions and wrappers, by name and form."""
    return {**_functions(device), **_paged(device), **_others(device)}


def _functions(device: str) -> dict[str, Sample]:
    def prefill(n: int) -> dict[str, Any]:
        q, keys = _randn(n, HEADS, DIM, device=device), 3 * n + 1
        return dict(q=q, k=_randn(keys, KV_HEADS, DIM, device=device), v=_randn(keys, KV_HEADS, DIM, device=device))

    def decode(n: int) -> dict[str, Any]:
        return prefill(n) | dict(q=_randn(HEADS, DIM, device=device))

    def masked(n: int) -> dict[str, Any]:
        return prefill(n) | dict(custom_mask=torch.rand(n, 3 * n + 1, device=device) < 0.6)

    def packed(n: int) -> dict[str, Any]:
        size = (n * (3 * n + 1) + 7) // 8
        bits = torch.randint(0, 256, (size,), dtype=torch.uint8, device=device)
        return prefill(n) | dict(packed_custom_mask=bits, return_lse=True)

    def blocks(n: int) -> dict[str, Any]:
        indptr = int32([0, n // 2, n // 2, n], device)
        return dict(mask=torch.rand(n, 3, 5, device=device) < 0.5, indptr=indptr)

    single, one = flashinfer.single_prefill_with_kv_cache, flashinfer.single_decode_with_kv_cache
    rope = ("rope_scale", "rope_theta")
    cases = {
        "single_prefill_with_kv_cache": Sample(
            single, prefill, numbers=("sm_scale", "window_left", "scale_q", "scale_k", "scale_v")
        ),
        "single_prefill_with_kv_cache mask": Sample(single, masked),
        "single_prefill_with_kv_cache packed": Sample(single, packed, numbers=("sm_scale",)),
        "single_prefill_with_kv_cache rope": Sample(
            single, lambda n: prefill(n) | dict(pos_encoding_mode="ROPE_LLAMA"), numbers=rope
        ),
        "single_prefill_with_kv_cache cap": Sample(
            single, lambda n: prefill(n) | dict(causal=True, logits_soft_cap=20.0), numbers=("logits_soft_cap",)
        ),
        "single_prefill_with_kv_cache alibi": Sample(single, lambda n: prefill(n) | dict(pos_encoding_mode="ALIBI")),
        "single_decode_with_kv_cache": Sample(
            one, decode, numbers=("sm_scale", "window_left", "q_scale", "k_scale", "v_scale")
        ),
        "convert_bsr_mask_layout": Sample(flashinfer.convert_bsr_mask_layout, blocks, graph=False),
    }
    return cases


def own_variants(device: str) -> dict[str, Sample]:
    """Return calls of the functions that take a user's module, which is built here."""
    functions = _functions(device)
    modules = {
        "single_prefill_with_kv_cache": flashinfer.gen_customize_single_prefill_module(
            *SIGMOID, SIGMOID_DECL, device=device
        ),
        "single_decode_with_kv_cache": flashinfer.gen_customize_single_decode_module(
            *SIGMOID[1:], SIGMOID_DECL, device=device
        ),
    }

    def call(name: str, module: Any) -> Callable[..., Any]:
        function = getattr(flashinfer, f"{name}_with_jit_module")
        return lambda q, k, v: function(module, q, k, v, 0.3)

    return {
        f"{name}_with_jit_module": Sample(call(name, spec.build_and_load()), functions[name].inputs)
        for name, spec in modules.items()
    }


def operator_calls(device: str) -> dict[str, list[tuple[Any, ...]]]:
    """Return calls of graphs' operators: one request, a plan, a user's module, with and without numbers."""
    q, k, v = (_randn(n, h, DIM, device=device) for n, h in ((5, HEADS), (11, KV_HEADS), (11, KV_HEADS)))
    numbers = torch.tensor([0.2, 0.0, 1.0, 1e4], dtype=torch.float64, device=device)
    lse = torch.empty(5, HEADS, device=device)
    mask = torch.full((7,), 255, dtype=torch.uint8, device=device)
    one = ("prefill", "sample", "auto", q, k, v, torch.empty_like(q))
    batch = tuple(_randn(2, h, n, DIM, device=device) for n, h in ((5, HEADS), (11, KV_HEADS), (11, KV_HEADS)))
    wrapper = flashinfer.BatchPrefillWithRaggedKVCacheWrapper(workspace(device))
    wrapper.plan(indptr_of([2, 3]), indptr_of([6, 5]), HEADS, KV_HEADS, DIM, causal=True, q_data_type=DTYPE)
    planned = plan_of(wrapper)
    assert planned is not None
    sizes = from_shape(planned.sizes_as_shape)
    plan = ("prefill", "sample", q, k, v, torch.empty_like(q), lse, *sizes[:3])
    plan = (*plan, *planned.arguments._replace(float_workspace=None))
    causal, masked = CallArguments(mask_mode=1), CallArguments(mask_mode=2, custom_mask=mask, window_left=3)
    module = flashinfer.gen_customize_single_prefill_module(*SIGMOID, SIGMOID_DECL, device=device).build_and_load()
    return {
        "attend": [
            (*one, lse, *causal, *Parameters(sm_scale=0.2)),
            (*one, None, *masked, *Parameters(maybe_numbers=numbers)),
        ],
        "attend_planned": [(*plan, *Parameters(sm_scale=0.2)), (*plan, *Parameters(maybe_numbers=numbers))],
        "attend_batch": [
            (*batch, None, True, 3, 0.0, 0.2, False),
            (*batch, torch.rand(2, 1, 5, 11, device=device) < 0.5, False, -1, 5.0, 0.2, True),
        ],
        "attend_custom": [(module.name, "sample", q, k, v, torch.empty_like(q), lse, 0, 1, -1, [], [0.3])],
    }


def tables(n: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, list[int]]:
    """Return pages of n requests of n and more keys: indptr, indices, last_page_len, and the lengths."""
    lens = [n + 5 * b for b in range(n)]
    counts = [-(-length // PAGE) for length in lens]
    last = [length - (count - 1) * PAGE for length, count in zip(lens, counts, strict=True)]
    return indptr_of(counts), torch.randperm(sum(counts)).int(), int32(last), lens


def cache_for(n: int, device: str) -> torch.Tensor:
    """Return a cache with an odd number of pages: torch merges equal sizes, and a plan has even ones."""
    return _randn((int(tables(n)[0][-1]) + 3) | 1, 2, PAGE, KV_HEADS, DIM, device=device)


def queries(n: int) -> torch.Tensor:
    """Return the indptr of n requests with 2, 3, 2, 3, ... queries."""
    return indptr_of([2 + b % 2 for b in range(n)])


def _paged(device: str) -> dict[str, Sample]:
    shape, types = (HEADS, KV_HEADS, DIM, PAGE), dict(q_data_type=DTYPE)
    decode = flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace(device))
    paged = flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace(device))
    sunk = flashinfer.BatchAttentionWithAttentionSinkWrapper(workspace(device))
    both, pod = flashinfer.BatchAttention(), flashinfer.PODWithPagedKVCacheWrapper(workspace(device))
    cascade = flashinfer.MultiLevelCascadeAttentionWrapper(2, workspace(device))
    shared_decode = flashinfer.BatchDecodeWithSharedPrefixPagedKVCacheWrapper(workspace(device))
    shared_prefill = flashinfer.BatchPrefillWithSharedPrefixPagedKVCacheWrapper(workspace(device))

    def one_each(n: int) -> dict[str, Any]:
        return dict(q=_randn(n, HEADS, DIM, device=device), paged_kv_cache=cache_for(n, device))

    def some_each(n: int) -> dict[str, Any]:
        rows = int(queries(n)[-1])
        return dict(q=_randn(rows, HEADS, DIM, device=device), paged_kv_cache=cache_for(n, device))

    def shared(inputs: Callable[[int], dict[str, Any]]) -> Callable[[int], dict[str, Any]]:
        def with_prefix(n: int) -> dict[str, Any]:
            given = inputs(n)
            k, v = (_randn(4 * n + 3, KV_HEADS, DIM, device=device) for _ in range(2))
            return dict(q=given["q"], k_shared=k, v_shared=v, unique_kv_cache=given["paged_kv_cache"])

        return with_prefix

    def mixed(n: int) -> dict[str, Any]:
        given = one_each(n)
        k, v = (_randn(4 * n + 3, KV_HEADS, DIM, device=device) for _ in range(2))
        q = _randn(2 * n + 1, HEADS, DIM, device=device)
        return dict(q_p=q, k_p=k, v_p=v, q_d=given["q"], paged_kv_cache_d=given["paged_kv_cache"])

    def plan_attention(n: int, **numbers: Any) -> None:
        indptr, indices, _, lens = tables(n)
        both.plan(queries(n), indptr, indices.to(device), int32(lens), HEADS, KV_HEADS, DIM, DIM, PAGE, causal=True,
                  kv_data_type=DTYPE, **types, **numbers)  # fmt: skip

    def plan_cascade(n: int) -> None:
        indptr, indices, last, _ = tables(n)
        cascade.plan([queries(n)[[0, -1]], queries(n)], [int32([0, 2]), indptr], [int32([0, 1]), indices],
                     [int32([5]), last], *shape, causal=True, **types)  # fmt: skip

    def plan_shared_prefill(n: int) -> None:
        shared_prefill.begin_forward(queries(n), *tables(n)[:3], *shape)
        shared_prefill.forward(**shared(some_each)(n))  # makes the plan, which needs the dtypes

    return {
        "BatchDecodeWithPagedKVCacheWrapper": Sample(
            decode.run, one_each, lambda n, **numbers: decode.plan(*tables(n)[:3], *shape, **types, **numbers),
            ("q_scale", "k_scale", "v_scale"), ("sm_scale", "window_left"),
        ),
        "BatchPrefillWithPagedKVCacheWrapper": Sample(
            lambda **inputs: paged.run(return_lse=True, **inputs), some_each,
            lambda n, **numbers: paged.plan(queries(n), *tables(n)[:3], *shape, causal=True, **types, **numbers),
            ("k_scale", "v_scale"), ("sm_scale",),
        ),
        "BatchAttentionWithAttentionSinkWrapper": Sample(
            lambda **inputs: sunk.run(return_lse=True, **inputs),
            lambda n: dict(some_each(n), sinks=torch.randn(HEADS, device=device)),
            lambda n, **numbers: sunk.plan(queries(n), *tables(n)[:3], *shape, causal=True, **types, **numbers),
            ("k_scale", "v_scale"), ("sm_scale",),
        ),
        "BatchAttention": Sample(
            lambda q, kv_cache: both.run(q, kv_cache),
            lambda n: (lambda q, paged_kv_cache: dict(q=q, kv_cache=paged_kv_cache))(**some_each(n)),
            plan_attention, (), ("sm_scale",),
        ),
        "PODWithPagedKVCacheWrapper": Sample(
            lambda **inputs: (lambda p, d: (*p, *d))(*pod.run(return_lse_p=True, return_lse_d=True, **inputs)), mixed,
            lambda n: pod.plan(*tables(n)[:3], *shape, **types), ("sm_scale_p", "window_left_p", "q_scale"),
        ),
        "MultiLevelCascadeAttentionWrapper": Sample(
            lambda q, paged_kv_cache: cascade.run(q, paged_kv_cache), some_each, plan_cascade
        ),
        "BatchDecodeWithSharedPrefixPagedKVCacheWrapper": Sample(
            lambda **inputs: shared_decode.forward(**inputs), shared(one_each),
            lambda n: shared_decode.begin_forward(*tables(n)[:3], *shape, DTYPE),
        ),
        "BatchPrefillWithSharedPrefixPagedKVCacheWrapper": Sample(
            lambda **inputs: shared_prefill.forward(**inputs), shared(some_each), plan_shared_prefill
        ),
    }  # fmt: skip


def _others(device: str) -> dict[str, Sample]:
    shape, types = (HEADS, KV_HEADS, DIM), dict(q_data_type=DTYPE)
    ragged = flashinfer.BatchPrefillWithRaggedKVCacheWrapper(workspace(device))
    sparse = flashinfer.BlockSparseAttentionWrapper(workspace(device))
    variable = flashinfer.VariableBlockSparseAttentionWrapper(workspace(device))

    def keys(n: int) -> list[int]:
        return [4 + 3 * b for b in range(n)]

    def qkv(rows: int, columns: int) -> dict[str, Any]:
        q, k, v = (_randn(count, heads, DIM, device=device)
                   for count, heads in ((rows, HEADS), (columns, KV_HEADS), (columns, KV_HEADS)))  # fmt: skip
        return dict(q=q, k=k, v=v)

    def plan_sparse(n: int) -> None:
        indptr = indptr_of([1 + b % 3 for b in range(n)])
        indices = int32([(b + i) % (n + 2) for b in range(n) for i in range(1 + b % 3)])
        sparse.plan(indptr, indices, 3 * n, 4 * (n + 2), 3, 4, *shape, o_data_type=DTYPE, **types)

    def plan_variable(n: int) -> None:
        there = torch.ones(KV_HEADS, n, 3, dtype=torch.bool)
        there[:, ::2, 1] = False
        rows, columns = int32([2] * n).expand(KV_HEADS, n), int32([4, 2 * n, 6]).expand(KV_HEADS, 3)
        variable.plan(there, rows, columns, *shape, **types)

    def by_head(n: int) -> dict[str, Any]:
        given = qkv(2 * n, 2 * n + 10)
        return {name: x.transpose(0, 1).contiguous() for name, x in given.items()}

    return {
        "BatchPrefillWithRaggedKVCacheWrapper": Sample(
            lambda **inputs: ragged.run(return_lse=True, **inputs),
            lambda n: qkv(int(queries(n)[-1]), sum(keys(n))),
            lambda n, **numbers: ragged.plan(
                queries(n), indptr_of(keys(n)), *shape, causal=True, **types, **numbers
            ),
            (), ("sm_scale", "window_left"),
        ),
        "BlockSparseAttentionWrapper": Sample(
            sparse.run, lambda n: qkv(3 * n, 4 * (n + 2)), plan_sparse, ("scale_q", "scale_k", "scale_v")
        ),
        "VariableBlockSparseAttentionWrapper": Sample(
            lambda **inputs: variable.run(return_lse=True, **inputs), by_head, plan_variable
        ),
    }  # fmt: skip
