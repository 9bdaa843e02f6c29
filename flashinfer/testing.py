"""Times of functions on a GPU or a CPU, as engines' benchmarks ask for them."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from itertools import cycle
from typing import Any

import torch

from ._ops.numbers import check_option, whole

__all__ = ["bench_gpu_time"]

_FLUSH_BYTES = 256 << 20  # five times the L2 of a Hopper GPU
_Call = Callable[[], Any]


def _copies(args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[list[Any], dict[str, Any]]:
    """Return the arguments with other memory for each tensor."""
    return (
        [arg.clone() if isinstance(arg, torch.Tensor) else arg for arg in args],
        {name: arg.clone() if isinstance(arg, torch.Tensor) else arg for name, arg in kwargs.items()},
    )


def _bytes(args: Sequence[Any], kwargs: Mapping[str, Any]) -> int:
    return sum(arg.nbytes for arg in (*args, *kwargs.values()) if isinstance(arg, torch.Tensor))


def _captured(calls: Sequence[_Call], count: int) -> _Call:
    """Return the replay of a CUDA graph of so many calls."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        calls[0]()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call, _ in zip(cycle(calls), range(count), strict=False):
            call()
    return graph.replay


def _rounds(asked: int | None, milliseconds: float, one: float) -> int:
    return asked if asked is not None else max(1, int(milliseconds / max(one, 1e-6)))


def bench_gpu_time(
    fn: Callable[..., Any],
    dry_run_iters: int | None = None,
    repeat_iters: int | None = None,
    dry_run_time_ms: float = 25,
    repeat_time_ms: float = 100,
    l2_flush: bool | None = None,
    enable_cupti: bool = False,
    use_cuda_graph: bool = False,
    num_iters_within_graph: int = 10,
    input_args: Sequence[Any] = (),
    input_kwargs: Mapping[str, Any] | None = None,
    cold_l2_cache: bool = True,
) -> list[float]:
    """Return the milliseconds of each iteration of ``fn(*input_args, **input_kwargs)``.

    On a GPU they are the time between two events of the current stream. Without a GPU they are the time of the host.

    Args:
        fn: the function.
        dry_run_iters, repeat_iters: numbers of iterations before and during the measurement; ``None``: as many as fit
            into ``dry_run_time_ms`` and ``repeat_time_ms``, at least one.
        l2_flush: older name of ``cold_l2_cache``.
        enable_cupti: accepted; events measure.
        use_cuda_graph: measure replays of a CUDA graph of ``num_iters_within_graph`` calls, and divide.
        cold_l2_cache: a cache of the GPU is cold for each iteration: a buffer of 256 MiB is written before it. Calls
            inside a graph take turns with copies of the tensors among the arguments instead; without such tensors
            they find a warm cache.

    Raises:
        ValueError: a number of iterations below 1; a CUDA graph without a GPU.
    """
    numbers = dict(
        dry_run_iters=dry_run_iters, repeat_iters=repeat_iters, num_iters_within_graph=num_iters_within_graph
    )
    for name, number in numbers.items():
        least = 0 if name == "dry_run_iters" else 1
        if number is not None:
            whole("bench_gpu_time", name, number, least)
    on_gpu = torch.cuda.is_available()
    if not on_gpu:
        check_option("bench_gpu_time", "use_cuda_graph", use_cuda_graph, (False,), " without a GPU")
    kwargs = dict(input_kwargs or {})
    cold = cold_l2_cache if l2_flush is None else l2_flush
    call: _Call = lambda: fn(*input_args, **kwargs)  # noqa: E731
    per_call = 1
    if use_cuda_graph:
        calls, per_call = [call], num_iters_within_graph
        size = _bytes(input_args, kwargs)
        if cold and size:
            for _ in range(min(num_iters_within_graph, _FLUSH_BYTES // size + 1) - 1):
                args, more = _copies(input_args, kwargs)
                calls.append(lambda args=args, more=more: fn(*args, **more))  # type: ignore[misc]
        call = _captured(calls, per_call)
    flushed = torch.empty(_FLUSH_BYTES, dtype=torch.uint8, device="cuda") if cold and on_gpu else None
    one = max(_measure(call, flushed, 2, on_gpu)[1:])
    _measure(call, flushed, _rounds(dry_run_iters, dry_run_time_ms, one), on_gpu)
    times = _measure(call, flushed, _rounds(repeat_iters, repeat_time_ms, one), on_gpu)
    return [milliseconds / per_call for milliseconds in times]


def _measure(call: _Call, flushed: torch.Tensor | None, count: int, on_gpu: bool) -> list[float]:
    """Return the milliseconds of each of ``count`` calls."""
    if not on_gpu:
        times = []
        for _ in range(count):
            start = time.perf_counter()
            call()
            times.append((time.perf_counter() - start) * 1e3)
        return times
    events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(count)]
    for start_event, end_event in events:
        if flushed is not None:
            flushed.zero_()
        start_event.record()
        call()
        end_event.record()
    torch.cuda.synchronize()
    return [begin.elapsed_time(end) for begin, end in events]
