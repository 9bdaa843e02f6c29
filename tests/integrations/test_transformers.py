"""Models of transformers on our attention: the logits that ``eager`` has in float32, as near as it comes in their dtype.

``sdpa`` is held to the same, where it does what a model asks for: it knows no softcap.
"""

from __future__ import annotations

import copy
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from torch._dynamo.utils import counters
from torch._inductor import config as inductor_config
from transformers import DynamicCache, StaticCache

from flashinfer.integrations.transformers import attention_forward, attention_mask

from ..conftest import no_synchronisation
from ..support.transformers_models import CACHE, FACTOR, KINDS, PADDINGS, VOCABULARY, Pair, longer, tokens_of

pytestmark = [
    # torch's own, where Inductor is imported.
    pytest.mark.filterwarnings(r"ignore:`torch\.jit\.:DeprecationWarning"),
    pytest.mark.filterwarnings(r"ignore:`isinstance\(treespec:FutureWarning"),
]


def half(kind: str, device: str) -> torch.dtype:
    """Return bfloat16, or float32 for soft caps on a CPU: tests of prefill and decode build those modules anyway."""
    return torch.float32 if kind == "gemma2" and device == "cpu" else torch.bfloat16


def of_kinds(*kinds: str) -> pytest.MarkDecorator:
    """Parametrize a test by kinds, each in float32 and in ``half``."""
    cases = [
        pytest.param(kind, dtype, id=f"{kind}-{str(dtype).removeprefix('torch.')}")
        for kind in kinds
        for dtype in (torch.float32, torch.bfloat16)
        if dtype == torch.float32 or torch.cuda.is_available() or half(kind, "cpu") == dtype
    ]
    return pytest.mark.parametrize(("kind", "dtype"), cases)


@pytest.fixture
def place(device, dtype) -> tuple[str, torch.dtype]:
    """Return a device and a dtype. float32 on CUDA becomes float16, because it is an error there."""
    return device, torch.float16 if device == "cuda" and dtype == torch.float32 else dtype


@pytest.mark.slow_beyond(12)
@pytest.mark.parametrize("padding", PADDINGS)
@of_kinds(*KINDS)
def test_prefill(kind, padding, ours, place):
    pair = Pair(kind, place)
    for batch, length in ((1, 1), (1, 21), (3, 21)):
        ids, mask = tokens_of(batch, length, padding if length > 1 else "none", place[0])
        for implementation in (ours, "sdpa") if kind != "gemma2" else (ours,):
            pair.assert_near(pair.logits(implementation, ids, attention_mask=mask, use_cache=False), ids, mask)


def test_other_attention_has_other_logits(ours, device):
    """Other masks, caps and scales change logits by more than the tolerance of the tests above."""
    pair = Pair("gemma2", (device, half("gemma2", device)))
    ids, mask = tokens_of(3, 21, "left", device)
    for change in (dict(attn_logit_softcapping=None), dict(sliding_window=9), dict(query_pre_attn_scalar=32)):
        other = Pair("gemma2", (device, half("gemma2", device)), **change)
        other.model.load_state_dict(pair.model.state_dict())
        with pytest.raises(AssertionError):
            pair.assert_near(other.logits(ours, ids, attention_mask=mask), ids, mask)
    with pytest.raises(AssertionError):
        pair.assert_near(pair.logits(ours, ids), ids, mask)


@pytest.mark.parametrize("padding", PADDINGS)
@pytest.mark.parametrize("cache", ["dynamic", "static"])
@of_kinds("llama", "mistral", "gemma2")
def test_cached_decoding(kind, cache, padding, ours, place):
    """A prompt in two pieces, then token by token."""
    pair = Pair(kind, place)
    ids, mask = tokens_of(3, 17, padding, place[0])
    ids, mask = torch.cat([ids, tokens_of(3, 5, "none", place[0])[0]], 1), longer(mask, 5)
    past = DynamicCache(config=pair.config) if cache == "dynamic" else StaticCache(pair.config, max_cache_len=30)
    got, start = [], 0
    for stop in (8, 17, *range(18, 23)):
        part = None if mask is None else mask[:, :stop]
        got.append(pair.logits(ours, ids[:, start:stop], attention_mask=part, cache=past))
        start = stop
    pair.assert_near(torch.cat(got, 1), ids, mask)


@pytest.mark.parametrize("cache", ["dynamic", "static"])
def test_generate(cache, ours, device):
    pair = Pair("llama", (device, torch.bfloat16))
    ids, mask = tokens_of(3, 11, "left", device)
    pair.model.set_attn_implementation(ours)
    options: dict[str, Any] = dict(max_new_tokens=5, min_new_tokens=5, do_sample=False, cache_implementation=cache)
    made = pair.model.generate(
        ids, attention_mask=mask, output_logits=True, return_dict_in_generate=True, disable_compile=True, **options
    )
    pair.assert_near(torch.stack(made.logits, 1), made.sequences[:, :-1], longer(mask, 4))


def test_an_encoder(ours, device):
    """Bidirectional attention with and without padding."""
    config = transformers.BertConfig(
        vocab_size=VOCABULARY, hidden_size=128, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64,
        initializer_range=0.15,
    )  # fmt: skip
    model = transformers.BertModel(config).eval().to(device, torch.bfloat16)
    reference = copy.deepcopy(model).float()
    for padding in PADDINGS:
        ids, mask = tokens_of(3, 21, padding, device)
        real = torch.ones_like(ids).bool() if mask is None else mask.bool()
        results = []
        for one, implementation in ((model, ours), (model, "sdpa"), (reference, "eager")):
            one.set_attn_implementation(implementation)
            with torch.no_grad():
                results.append(one(ids, attention_mask=mask).last_hidden_state.float()[real])
        got, peer, want = results
        assert (got - want).norm() <= FACTOR * (peer - want).norm()


def test_autocast(ours, device):
    pair = Pair("llama", (device, torch.float32))
    ids, mask = tokens_of(2, 13, "left", device)
    with torch.autocast(device, torch.bfloat16):
        got, peer = (pair.logits(one, ids, attention_mask=mask) for one in (ours, "sdpa"))
    want, real = pair.wanted(ids, mask), mask.bool()
    assert (got - want)[real].norm() <= FACTOR * (peer - want)[real].norm()


# Compiled


def compiled(function: Any, device: str, **options: Any) -> Any:
    """Compile for a test. On a CPU, Inductor would take too long, so only one test uses it there."""
    torch._dynamo.reset()
    counters.clear()
    return torch.compile(function, fullgraph=True, **({} if device == "cuda" else {"backend": "aot_eager"}) | options)


@pytest.mark.slow_beyond(1)
@pytest.mark.parametrize("padding", ["none", "left"])
def test_compiled_prefill_is_one_graph(padding, ours, device):
    pair = Pair("gemma2", (device, half("gemma2", device)))
    pair.model.set_attn_implementation(ours)
    run = compiled(lambda ids, mask: pair.model(ids, attention_mask=mask, use_cache=False).logits, device, dynamic=True)
    # Inductor pads products by their size, which would make more graphs.
    with inductor_config.patch(shape_padding=False):
        for batch, length in ((2, 9), (3, 17), (4, 8), (5, 26)):
            ids, mask = tokens_of(batch, length, padding, device)
            pair.model.set_attn_implementation(ours)
            with torch.no_grad():
                got = run(ids, mask)
            pair.assert_near(got, ids, mask)
    assert counters["stats"]["unique_graphs"] == 1


@pytest.mark.parametrize("kind", ["llama", "mistral"])
def test_compiled_decoding_is_one_graph(kind, ours, device):
    """A step with a static cache makes no plan, reads no tensor and does not synchronise. CUDA replays a graph."""
    pair = Pair(kind, (device, torch.bfloat16), num_hidden_layers=1)
    ids, mask = tokens_of(3, 20, "left", device)
    past = StaticCache(pair.config, max_cache_len=24)
    got = [pair.logits(ours, ids[:, :9], attention_mask=mask[:, :9], cache=past)]

    def step(ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return pair.model(ids, attention_mask=mask, **{CACHE: past}).logits

    mode = {"mode": "reduce-overhead"} if device == "cuda" else {}
    run, full = compiled(step, device, **mode), torch.zeros(3, 24, dtype=mask.dtype, device=device)
    for i in range(9, 20):
        full[:, : i + 1] = mask[:, : i + 1]
        with torch.no_grad():
            got.append(run(ids[:, i : i + 1].clone(), full).clone().float())
    graphs = counters["stats"]["unique_graphs"]
    pair.assert_near(torch.cat(got, 1), ids, mask)
    # A full window changes the results of transformers' cache.
    assert graphs == 1 if kind == "llama" else graphs <= 3


@pytest.mark.slow
def test_inductor(ours, device):
    pair = Pair("llama", (device, torch.bfloat16), num_hidden_layers=1)
    pair.model.set_attn_implementation(ours)
    torch._dynamo.reset()
    run = torch.compile(lambda ids, mask: pair.model(ids, attention_mask=mask).logits, fullgraph=True)
    ids, mask = tokens_of(2, 9, "left", device)
    with torch.no_grad():
        got = run(ids, mask)
    pair.assert_near(got, ids, mask)


# Training


@pytest.mark.parametrize("padding", PADDINGS)
@pytest.mark.parametrize("kind", ["llama", "gemma2"])
def test_gradients(kind, padding, ours, device):
    """Gradients equal those of ``eager`` in float32."""
    dtype = torch.float32 if device == "cpu" else torch.float16
    pair = Pair(kind, (device, dtype))
    ids, mask = tokens_of(2, 13, padding, device)
    real = torch.ones_like(ids).bool() if mask is None else mask.bool()
    pair.model.set_attn_implementation(ours)
    grads = []
    for model in (pair.model, pair.reference):
        logits = model.train()(ids, attention_mask=mask, use_cache=False).logits[real].float()
        torch.nn.functional.cross_entropy(logits, ids[real]).backward()
        grads.append({name: value.grad.float() for name, value in model.named_parameters()})
    limit = 1e-4 if dtype == torch.float32 else 3e-2
    for name, want in grads[1].items():
        assert (grads[0][name] - want).abs().max() <= limit * want.abs().max(), name


@pytest.mark.slow
def test_compiled_training_is_one_graph(ours, device):
    """Under torch.compile models make a mask for each request. The graphs are Dynamo's: Inductor cuts by sizes, too."""
    pair = Pair("llama", (device, torch.float32 if device == "cpu" else torch.float16), num_hidden_layers=1)
    pair.model.set_attn_implementation(ours)
    weight = pair.model.model.layers[0].self_attn.k_proj.weight

    def loss(ids: torch.Tensor) -> torch.Tensor:
        return pair.model(ids, labels=ids, use_cache=False).loss

    run = compiled(loss, device, dynamic=True, backend="aot_eager")
    for batch, length in ((3, 9), (2, 17), (5, 12)):
        ids, _ = tokens_of(batch, length, "none", device)
        got, want = (torch.autograd.grad(function(ids), weight)[0] for function in (run, loss))
        torch.testing.assert_close(got, want, rtol=1e-2, atol=float(1e-3 * want.abs().max()))
    assert counters["stats"]["unique_graphs"] == 1


# Masks


def masks(device: str = "cpu", **change: Any) -> torch.Tensor | None:
    sizes: dict[str, Any] = dict(batch_size=2, q_length=3, kv_length=8, q_offset=5, device=device)
    return attention_mask(**sizes | change)


def test_no_mask_for_causal_attention_and_windows(ours):
    causal = (torch.arange(8)[None, :] <= torch.arange(5, 8)[:, None]).expand(2, 1, 3, 8)
    padded = torch.ones(2, 8, dtype=torch.bool)
    assert masks() is None
    assert masks(attention_mask=padded) is None
    assert torch.equal(masks(allow_is_causal_skip=False), causal)
    padded[1, :2] = False
    assert torch.equal(masks(attention_mask=padded), causal & padded[:, None, None])
    assert torch.equal(masks(attention_mask=padded[:, :6]), causal & (torch.arange(8) < 6) & padded[:, None, None])
    # The attention function serves the window of a configuration. Chunks need a mask.
    assert masks(local_size=8, config=SimpleNamespace(sliding_window=8)) is None
    assert masks(local_size=9) is None
    assert masks(local_size=8) is not None
    assert masks(local_size=8, config=SimpleNamespace(sliding_window=8, attention_chunk_size=8)) is not None
    # Only the written part of a static cache counts.
    static = dict(kv_length=20, q_offset=torch.tensor(5))
    assert torch.equal(masks(**static), causal)
    assert masks(kv_length=3, q_offset=torch.tensor(0)) is None
    # Keys that do not end at the last query need a mask.
    assert masks(kv_length=9) is not None


def test_decoding_reads_nothing():
    """Meta tensors would make a read fail."""
    meta = torch.ones(2, 8, dtype=torch.bool, device="meta")
    step = dict(q_length=1, q_offset=7, device="meta")
    assert masks(**step, attention_mask=meta).shape == (2, 1, 1, 8)
    offset = torch.tensor(7, device="meta")
    assert masks(**step | dict(q_offset=offset), attention_mask=meta).shape == (2, 1, 1, 8)
    with pytest.raises(RuntimeError):
        masks(attention_mask=meta, device="meta")  # prefill


@pytest.mark.parametrize("static", [False, True])
def test_a_decode_step_does_not_synchronise(static, device):
    """A captured step makes no plan, and reads new data and new padding in each replay."""
    q = torch.empty(3, 4, 1, 64, dtype=torch.bfloat16, device=device)
    k, v = (torch.empty(3, 2, 40, 64, dtype=torch.bfloat16, device=device) for _ in range(2))
    padding, out = torch.empty(3, 40, dtype=torch.bool, device=device), torch.empty(3, 1, 4, 64, device=device)
    offset = torch.full((), 39, device=device) if static else 39

    def step() -> None:
        seen = attention_mask(3, 1, 40, offset, 0, padding, device=device)
        out.copy_(attention_forward(SimpleNamespace(is_causal=True), q, k, v, seen)[0])

    def fill() -> torch.Tensor:
        for x in (q, k, v):
            x.normal_()
        padding.copy_(torch.rand(3, 40) < 0.5)
        padding[:, -1] = True
        return torch.nn.functional.scaled_dot_product_attention(
            q.float(), k.float(), v.float(), padding[:, None, None], enable_gqa=True
        ).transpose(1, 2)

    fill()
    step()
    run = step
    if device == "cuda":
        with no_synchronisation(device):
            step()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            step()
        run = graph.replay
    for _ in range(5):
        want = fill()
        run()
        torch.testing.assert_close(out, want, rtol=2e-2, atol=2e-2)


def test_boolean_masks_with_four_dimensions(ours, device):
    """Keys after the mask's last column are masked."""
    pair = Pair("llama", (device, torch.bfloat16))
    ids, _ = tokens_of(3, 12, "none", device)
    mask = torch.rand(3, 1, 12, 12, device=device) < 0.6
    mask |= torch.eye(12, dtype=torch.bool, device=device)
    got = pair.logits(ours, ids, attention_mask=mask)
    with torch.no_grad():
        bias = torch.zeros(mask.shape, device=device).masked_fill_(~mask, torch.finfo(torch.float32).min)
        want = pair.reference(ids, attention_mask=bias).logits
    peer = pair.logits("sdpa", ids, attention_mask=mask)
    assert (got - want).norm() <= FACTOR * (peer - want).norm()


# Errors
