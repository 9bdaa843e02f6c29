"""Bound calls of attention: equal results, and errors for tensors that do not fit."""

from __future__ import annotations

import gc
import math
import threading
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import flashinfer
from flashinfer import decode, prefill
from flashinfer._attention import bound as _bound

from ..support.attention_oracle import int32, workspace
from ..support.plans import bound_calls, plan_of

HEADS, KV_HEADS, DIM, PAGE = 4, 2, 64, 16
NO_SCALES = (None, None, None)


def drawn(*shape: int, device: str) -> torch.Tensor:
    return torch.randn(shape, device=device).half()


def planned(device: str, kv_lens: list[int], layout: str = "NHD", **options: Any) -> Any:
    """Return a decode with one page per request."""
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace(device), layout)
    n = len(kv_lens)
    tables = int32(list(range(n + 1))), int32(list(range(n))[::-1]), int32(kv_lens)
    wrapper.plan(*tables, HEADS, KV_HEADS, DIM, PAGE, **options)
    return wrapper


def inputs(device: str, n: int, layout: str = "NHD") -> tuple[torch.Tensor, torch.Tensor]:
    page = (PAGE, KV_HEADS) if layout == "NHD" else (KV_HEADS, PAGE)
    return drawn(n, HEADS, DIM, device=device), drawn(n, 2, *page, DIM, device=device)


def full(wrapper: Any, q: torch.Tensor, cache: torch.Tensor, scales: Any = NO_SCALES) -> Any:
    """Return ``(out, lse)`` of the full operator."""
    return wrapper._run(q, *cache.unbind(1), (), scales, None, None, True)


def assert_equal(got: Any, want: Any) -> None:
    for one, other in zip(got, want, strict=True):
        assert torch.equal(one, other)


def handle_of(bound: Any) -> int:
    return int(bound._handle)


def namespace_of(wrapper: Any) -> Any:
    return plan_of(wrapper).operators.namespace


# Results


@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize("scales", [NO_SCALES, (None, 0.5, 2.0), (1.5, None, None)])
def test_plans(layout, scales, device):
    wrapper = planned(device, [3, 16, 1], layout)
    q, cache = inputs(device, 3, layout)
    want, want_lse = full(wrapper, q, cache, scales)
    bound, pair = bound_calls(wrapper), cache.unbind(1)
    assert torch.equal(bound.call(q, cache, None, scales), want)
    assert torch.equal(bound.call(q, *pair, scales), want)
    assert_equal(bound.call(q, cache, None, scales, return_lse=True), (want, want_lse))
    out, lse = torch.full_like(want, math.nan), torch.full_like(want_lse, math.nan)
    assert bound.call(q, cache, None, scales, out) is out
    assert torch.equal(out, want)
    got = bound.call(q, *pair, scales, out.fill_(math.nan), lse, True)
    assert got[0] is out and got[1] is lse
    assert_equal(got, (want, want_lse))
    assert_equal(bound.call(q, cache, None, scales, out.fill_(math.nan), None, True), (want, want_lse))
    named = dict(zip(("q_scale", "k_scale", "v_scale"), scales, strict=True))
    assert torch.equal(wrapper.run(q, cache, **named), want)
    assert_equal(wrapper.run(q, list(pair), return_lse=True, **named), (want, want_lse))


def test_ragged_keys(device):
    wrapper = flashinfer.BatchPrefillWithRaggedKVCacheWrapper(workspace(device))
    wrapper.plan(int32([0, 2, 5]), int32([0, 7, 16]), HEADS, KV_HEADS, DIM, causal=True)
    q, (k, v) = drawn(5, HEADS, DIM, device=device), (drawn(16, KV_HEADS, DIM, device=device) for _ in range(2))
    want = wrapper._run(q, k, v, (), NO_SCALES, None, None, True)
    assert_equal(bound_calls(wrapper).call(q, k, v, NO_SCALES, return_lse=True), want)
    assert_equal(wrapper.run(q, k, v, return_lse=True), want)
    assert torch.equal(wrapper.run(q, k, v), want[0])


@pytest.mark.parametrize("causal", [False, True])
def test_functions(causal, device, monkeypatch):
    """The first call of a kind runs the full operator. Later ones are bound, for any lengths and scales."""
    # New kinds of calls, because a kind that was refused often backs off.
    monkeypatch.setattr(decode, "_CALLS", _bound.BoundCalls("decode", 2))
    for sm_scale in (None, 0.3):
        for qo_len, kv_len in ((3, 40), (1, 1), (70, 70)):
            q, k = drawn(qo_len, HEADS, DIM, device=device), drawn(kv_len, KV_HEADS, DIM, device=device)
            v, bits = drawn(kv_len, KV_HEADS, DIM, device=device), torch.ones(qo_len, kv_len, device=device)
            mask = bits.tril(kv_len - qo_len).bool() if causal else bits.bool()
            want = flashinfer.single_prefill_with_kv_cache(
                q, k, v, custom_mask=mask, sm_scale=sm_scale, return_lse=True
            )
            for _ in range(2):
                got = flashinfer.single_prefill_with_kv_cache(
                    q, k, v, causal=causal, sm_scale=sm_scale, return_lse=True
                )
                torch.testing.assert_close(got, want, rtol=2e-3, atol=2e-3)
            one = flashinfer.single_decode_with_kv_cache(q[-1], k, v, sm_scale=sm_scale, return_lse=True)
            again = flashinfer.single_decode_with_kv_cache(q[-1], k, v, sm_scale=sm_scale, return_lse=True)
            assert_equal(again, one)
            torch.testing.assert_close(one, (want[0][-1], want[1][-1]), rtol=2e-3, atol=2e-3)
            options = "NHD", "NONE", -1, None, None, None
            assert decode._CALLS.call(q[-1], k, v, options, NO_SCALES, False, sm_scale) is not None


def test_numbers_that_scale_a_function(device):
    q, k, v = (drawn(n, DIM, device=device) for n in (HEADS, 9 * KV_HEADS, 9 * KV_HEADS))
    k, v = k.view(9, KV_HEADS, DIM), v.view(9, KV_HEADS, DIM)
    want = flashinfer.single_decode_with_kv_cache(q, k, v, sm_scale=0.125 * 0.5) * 3
    for scale in (
        3.0,
        torch.tensor(3.0),
        torch.tensor(3.0, device=device),
        torch.full((KV_HEADS,), 3.0, device=device),
    ):
        for _ in range(2):
            got = flashinfer.single_decode_with_kv_cache(q, k, v, k_scale=0.5, v_scale=scale)
            torch.testing.assert_close(got, want, rtol=2e-3, atol=2e-3)


def test_bound_calls_of_a_function_are_limited(device, monkeypatch):
    calls = _bound.BoundCalls("decode", 2)
    monkeypatch.setattr(decode, "_CALLS", calls)
    monkeypatch.setattr(_bound, "MOST_CALLS", 3)
    q, k = drawn(HEADS, DIM, device=device), drawn(5, KV_HEADS, DIM, device=device)
    for window in range(7):
        flashinfer.single_decode_with_kv_cache(q, k, k, window_left=window)
        assert 1 <= len(calls._calls) <= 3
    slopes = dict(pos_encoding_mode="ALIBI"), dict(rope_theta=torch.tensor(1e4))
    calls._calls.clear()
    for options in slopes:  # depends on the number of heads, and may change under its name
        flashinfer.single_decode_with_kv_cache(q, k, k, **options)
        assert not calls._calls


# Errors


def test_numbers_of_nothing(device):
    wrapper = planned(device, [3])
    q, cache = inputs(device, 1)
    operators = namespace_of(wrapper)
    for handle in (0, -1, 1 << 62):
        with pytest.raises(RuntimeError, match=rf"decode: handle: got {handle}, wanted one that is bound"):
            operators.run_bound(q, cache, None, handle, 0.125, 1.0)
        with pytest.raises(RuntimeError, match="handle: got"):
            operators.run_bound_out(q, cache, None, q.clone(), None, handle, 0.125, 1.0)
    operators.unbind(-1)  # no effect, as free() of a null pointer


def test_freed_plans(device):
    q, cache = inputs(device, 2)
    first, second = planned(device, [3, 5]), planned(device, [16, 1])
    wanted = [full(wrapper, q, cache) for wrapper in (first, second)]
    assert not torch.equal(wanted[0][0], wanted[1][0])
    operators, old = namespace_of(first), handle_of(bound_calls(first))
    assert torch.equal(operators.run_bound(q, cache, None, old, DIM**-0.5, 1.0), wanted[0][0])
    first.plan(int32([0, 1, 2]), int32([1, 0]), int32([16, 1]), HEADS, KV_HEADS, DIM, PAGE)
    gc.collect()
    assert handle_of(bound_calls(first)) == old, "a plan with the same options binds its calls again"
    assert torch.equal(operators.run_bound(q, cache, None, old, DIM**-0.5, 1.0), wanted[1][0])
    assert_equal(first.run(q, cache, return_lse=True), wanted[1])
    del first
    gc.collect()
    with pytest.raises(RuntimeError, match=f"handle: got {old}, wanted one that is bound"):
        operators.run_bound(q, cache, None, old, DIM**-0.5, 1.0)
    assert_equal(second.run(q, cache, return_lse=True), wanted[1])
    second.reset_workspace_buffer(workspace(device), workspace(device))
    with pytest.raises(ValueError, match="got no plan, wanted a call of plan"):
        second.run(q, cache)


def test_calls_that_no_longer_fit_a_plan(device):
    """After a correct call, each wrong call is refused, and the next correct one succeeds."""
    wrapper = planned(device, [3, 16])
    q, cache = inputs(device, 2)
    want = wrapper.run(q, cache).clone()
    wrong: list[tuple[type[Exception], str, tuple[Any, ...], dict[str, Any]]] = [
        (ValueError, "q: got 3 queries", (drawn(3, HEADS, DIM, device=device), cache), {}),
        (ValueError, "q: got 1 queries", (q[:1], cache), {}),
        (ValueError, "q: got 8 heads", (drawn(2, 8, DIM, device=device), cache), {}),
        (ValueError, "q: got 2 dimensions", (q[0], cache), {}),
        (TypeError, "q: got torch.bfloat16", (q.bfloat16(), cache), {}),
        (TypeError, "paged_kv_cache: got torch.bfloat16", (q, cache.bfloat16()), {}),
        (TypeError, r"paged_kv_cache\[1\]: got bfloat16, wanted float16", (q, (cache[:, 0], cache[:, 1].bfloat16())), {}),
        (ValueError, "paged_kv_cache: got 1 pages", (q, cache[:1]), {}),
        (ValueError, "got 8 slots in a page", (q, cache[:, :, :8]), {}),
        (ValueError, "paged_kv_cache: got 1 heads", (q, cache[:, :, :, :1]), {}),
        (ValueError, r"paged_kv_cache: got shape .*, wanted \[any, 2, any", (q, cache[:, :1]), {}),
        (ValueError, r"paged_kv_cache\[1\]: got shape", (q, (cache[:, 0], cache[:1, 1])), {}),
        (ValueError, "paged_kv_cache: got stride 2 of the last dimension", (q, cache.repeat_interleave(2, -1)[..., ::2]), {}),
        (ValueError, f"paged_kv_cache: got a tensor on meta, wanted one on {q.device}", (q, cache.to("meta")), {}),
        (ValueError, f"q: got a tensor on meta, wanted one on {q.device}|paged_kv_cache: got a tensor on {q.device}, wanted one on meta as q is", (q.to("meta"), cache), {}),
        (ValueError, "q: got (one|a tensor) on meta, wanted", (q.to("meta"), cache.to("meta")), {}),
        (ValueError, "out: overlaps the memory of q", (q, cache), dict(out=q)),
        (ValueError, "out: overlaps the memory of paged_kv_cache", (q, cache), dict(out=cache.view(-1)[: q.numel()].view_as(q))),
        (ValueError, "out: has elements that share memory", (q, cache), dict(out=q.new_empty(1, 1, DIM).expand_as(q))),
        (ValueError, "out: got shape", (q, cache), dict(out=q[:1])),
        (TypeError, "out: got torch.float32", (q, cache), dict(out=q.float())),
        (TypeError, "lse: got torch.float16", (q, cache), dict(out=q.clone(), lse=q[..., 0].contiguous())),
        (ValueError, "lse: is not contiguous", (q, cache), dict(out=q.clone(), lse=q.float()[..., 0])),
        (TypeError, "q: got NoneType", (None, cache), {}),
    ]  # fmt: skip
    copies = q.clone(), cache.clone()
    for error, message, arguments, options in wrong:
        with pytest.raises(error, match=message):
            wrapper.run(*arguments, **options)
        assert torch.equal(wrapper.run(q, cache), want)
    assert_equal((q, cache), copies)


def test_errors_of_the_full_operator(device):
    """The bound operator's own errors, without the full operator."""
    wrapper = planned(device, [3, 16])
    q, cache = inputs(device, 2)
    operators, handle = namespace_of(wrapper), handle_of(bound_calls(wrapper))
    for message, arguments in (
        ("q: got size 3 of dimension 0, wanted 2 as was bound", (drawn(3, HEADS, DIM, device=device), cache)),
        ("q: got size 8 of dimension 1, wanted 4 as was bound", (drawn(2, 8, DIM, device=device), cache)),
        ("q: got bfloat16, wanted float16", (q.bfloat16(), cache)),
        ("k: got bfloat16, wanted float16", (q, cache.bfloat16())),
        ("k: got size 8 of dimension 1, wanted 16 as was bound", (q, cache[:, :, :8])),
        ("k: has fewer rows or pages than the tables of the plan use", (q, cache[:1])),
        ("k: got 3 dimensions, wanted 5", (q, cache[0, 0])),
    ):
        with pytest.raises(RuntimeError, match=message):
            operators.run_bound(*arguments, None, handle, 0.125, 1.0)
    with pytest.raises(RuntimeError, match="sm_scale: got no finite number"):
        operators.run_bound(q, cache, None, handle, math.nan, 1.0)


def test_a_type_that_the_parser_refuses(device):
    """torch's argument parser refuses a bound call. The full operator then names the argument."""
    wrapper = planned(device, [3, 16])
    q, cache = inputs(device, 2)
    want = wrapper.run(q, cache)
    out = torch.empty_like(want)
    assert bound_calls(wrapper).call(q, cache, None, NO_SCALES, out, 3.0, True) is None
    with pytest.raises(TypeError, match=r"run: lse: got float, wanted Tensor$"):
        wrapper.run(q, cache, out=out, lse=3.0, return_lse=True)
    assert torch.equal(wrapper.run(q, cache), want)


def test_inputs_that_are_copied(device, monkeypatch):
    """Such calls use the full operator.

    After several, bound calls are retried at intervals and succeed again.
    """
    monkeypatch.setattr(_bound, "PAUSE", 5)
    wrapper = planned(device, [3, 16])
    q, cache = inputs(device, 2)
    torn = q.repeat_interleave(2, -1)[..., ::2]
    want = wrapper.run(q, cache)
    for _ in range(_bound.MOST_REFUSALS):
        assert torch.equal(wrapper.run(torn, cache), want)
    bound = bound_calls(wrapper)
    answers = [bound.call(q, cache, None, NO_SCALES) is not None for _ in range(_bound.PAUSE + 4)]
    assert answers == [False] * (_bound.PAUSE + 1) + [True] * 3
    for _ in range(_bound.MOST_REFUSALS + 3 * _bound.PAUSE):
        assert torch.equal(wrapper.run(torn, cache), want)
    assert torch.equal(wrapper.run(q, cache), want)
    k = drawn(5, KV_HEADS, DIM, device=device)
    want = flashinfer.single_decode_with_kv_cache(q[0], k, k)
    torn = k.repeat_interleave(2, -1)[..., ::2]
    assert torch.equal(flashinfer.single_decode_with_kv_cache(q[0], torn, torn), want)


@pytest.mark.parametrize(
    ("error", "kind", "text"),
    [
        (RuntimeError("CUDA error: an illegal memory access"), RuntimeError, "CUDA error: an illegal memory access"),
        (torch.OutOfMemoryError("full"), torch.OutOfMemoryError, "full"),
        (
            RuntimeError("OutOfMemoryError: no memory for an output"),
            torch.OutOfMemoryError,
            r"^BatchDecodeWithPagedKVCacheWrapper\.run: no memory for an output",
        ),
    ],
)
def test_errors_of_a_device_are_raised_unchanged(device, monkeypatch, error, kind, text):
    """The full operator does not repeat a call that failed on the device.

    Engines catch out-of-memory errors.
    """
    wrapper = planned(device, [3, 16])
    q, cache = inputs(device, 2)
    wrapper.run(q, cache)

    call_handle = _bound.call_handle

    def fail(operator: Any, *args: Any) -> Any:
        if operator is bound_calls(wrapper)._run:
            raise error
        return call_handle(operator, *args)  # plans of other tests are freed at any time

    with monkeypatch.context() as broken, pytest.raises(kind, match=text):
        broken.setattr(_bound, "call_handle", fail)
        wrapper.run(q, cache)


@pytest.mark.parametrize("kind", [AttributeError, TypeError, ValueError])
def test_an_error_from_inside_a_bound_call_runs_nothing_twice(kind, device, monkeypatch):
    """An error of a torch dispatch mode must not cause a second run by the full operator."""
    wrapper = planned(device, [3, 16])
    q, cache = inputs(device, 2)
    wrapper.run(q, cache)
    seen = []

    class Failing(TorchDispatchMode):
        def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if "run" in str(function):
                seen.append(function)
                raise kind("from inside")
            return function(*args, **kwargs or {})

    with Failing(), pytest.raises(kind, match="^from inside$"):
        wrapper.run(q, cache)
    assert len(seen) == 1


def test_mistakes_after_a_function_is_bound(device):
    q, k = drawn(HEADS, DIM, device=device), drawn(5, KV_HEADS, DIM, device=device)
    want = flashinfer.single_decode_with_kv_cache(q, k, k)
    one, more = flashinfer.single_decode_with_kv_cache, flashinfer.single_prefill_with_kv_cache
    more(q[None], k, k)
    for error, message, call in (
        (ValueError, "sm_scale: got nan, wanted a finite number", lambda: one(q, k, k, sm_scale=math.nan)),
        (ValueError, "q: got 3 dimensions, wanted 2", lambda: one(q[None], k, k)),
        (ValueError, "q: got 2 dimensions, wanted 3", lambda: more(q, k, k)),
        (ValueError, r"v: got shape \[4, 2, 64\], wanted \[5, 2, any\]", lambda: one(q, k, k[1:])),
        (TypeError, "v: got bfloat16, wanted float16 as k has", lambda: one(q, k, k.bfloat16())),
        (ValueError, "q: got 3 heads, wanted a multiple of the 2 heads of k", lambda: one(q[:3], k, k)),
        (TypeError, "k: got list, wanted Tensor", lambda: one(q, [k], k)),
        (ValueError, "kv_layout: got 'nhd'", lambda: one(q, k, k, "nhd")),
        (ValueError, "v: got a tensor of torch.sparse_coo", lambda: one(q, k, k.float().to_sparse())),
    ):
        with pytest.raises(error, match=message):
            call()
        assert torch.equal(one(q, k, k), want)
    assert one(q, k, drawn(5, KV_HEADS, 2 * DIM, device=device)[..., :DIM]).shape == want.shape


def test_gradients_are_not_lost(device):
    wrapper = planned(device, [3])
    q, cache = inputs(device, 1)
    assert bound_calls(wrapper).call(q.requires_grad_(), cache, None, NO_SCALES) is None
    with torch.no_grad():
        assert bound_calls(wrapper).call(q, cache, None, NO_SCALES) is not None


def test_graphs_have_no_numbers_of_plans(device):
    """A traced call uses the full operator with tables as inputs. A handle is valid in one process only."""
    wrapper = planned(device, [3, 16])
    q, cache = inputs(device, 2)
    want, graphs = wrapper.run(q, cache), []

    def backend(graph: torch.fx.GraphModule, _: Any) -> Any:
        graphs.append(graph.graph)
        return graph.forward

    compiled = torch.compile(wrapper.run, fullgraph=True, backend=backend)
    assert torch.equal(compiled(q, cache), want)

    class Program(torch.nn.Module):
        def forward(self, q: torch.Tensor, cache: torch.Tensor) -> torch.Tensor:
            return wrapper.run(q, cache)

    program = torch.export.export(Program(), (q, cache), strict=False)
    assert torch.equal(program.module()(q, cache), want)
    for graph in (*graphs, program.graph):
        called = {str(node.target) for node in graph.nodes if node.op == "call_function"}
        assert any(name.startswith((f"{namespace_of(wrapper).name}.run", "flashinfer.attend")) for name in called)
        assert not any("bound" in name for name in called)
    wrapper.plan(int32([0, 1, 2]), int32([1, 0]), int32([16, 1]), HEADS, KV_HEADS, DIM, PAGE)
    with torch._dynamo.config.patch(error_on_recompile=True):
        assert torch.equal(compiled(q, cache), full(wrapper, q, cache)[0])


def test_threads(device):
    """Each thread plans its own wrapper repeatedly. All threads share one function."""
    count, rounds, failures = 4, 25, []
    q, cache = inputs(device, 2)
    lens = [[1 + (7 * a + 3 * b) % PAGE for b in range(2)] for a in range(count)]
    wanted = [full(planned(device, one), q, cache)[0] for one in lens]
    k = cache[0, 0]
    want_one = flashinfer.single_decode_with_kv_cache(q[0], k, k)

    def work(number: int) -> None:
        try:
            for turn in range(rounds):
                at = (number + turn) % count
                wrapper = planned(device, lens[at])
                for _ in range(3):
                    assert torch.equal(wrapper.run(q, cache), wanted[at])
                    assert torch.equal(flashinfer.single_decode_with_kv_cache(q[0], k, k), want_one)
        except BaseException as err:
            failures.append(err)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures


def test_single_functions_share_bound_calls(device):
    """A function's bound calls live as long as the process, so calls must share them."""
    q, k = drawn(1, HEADS, DIM, device=device), drawn(5, KV_HEADS, DIM, device=device)
    flashinfer.single_prefill_with_kv_cache(q, k, k)
    before = len(prefill._CALLS._calls)
    for length in (1, 3, 5):
        flashinfer.single_prefill_with_kv_cache(q, k[:length], k[:length])
    assert len(prefill._CALLS._calls) == before
