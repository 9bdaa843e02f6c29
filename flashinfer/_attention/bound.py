"""Bound calls of attention: operators with few arguments for eager mode. Also the record of a run's stream.

torch converts every argument of an operator in each call. The conversion takes as long as the operator's own host work.
``run`` of an attention module has thirty arguments, and most of them are equal in all calls. ``bind`` stores the equal
ones once, under a handle (csrc/attention/bound.h). ``run_bound`` takes the handle and the few other arguments.

A bound call either has the result of the full operator, or refuses before it writes anything. After a refusal, the full
operator copies tensors that kernels cannot read, or raises a detailed error.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from contextlib import suppress
from typing import Any

import torch
from torch import is_grad_enabled
from torch.compiler import is_compiling, is_dynamo_compiling
from torch.overrides import has_torch_function_variadic

from .._ops.dtypes import NUMBERS
from .._ops.errors import raise_as_callers_mistake
from .._ops.route import call_handle
from .arguments import Logits, parameters_of, variant_of
from .kernels import kernels_of_request
from .lists import Shape, WorkLists
from .operators import Operators, builtin_operators
from .scales import NO_SCALES, Scale
from .signature import CallArguments, ExpectedArguments, Parameters

Result = torch.Tensor | tuple[torch.Tensor, torch.Tensor]
MOST_REFUSALS = 16  # consecutive refusals before calls use the full operator for a while
PAUSE = 240  # calls to the full operator before the next bound call
MOST_CALLS = 1024
ANY = -1
_PLAIN = (str, int, float, bool, type(None))
# Handles are unique, so the handle of a freed plan is invalid. Dynamo would copy an itertools.count, and Python 3.12
# deprecates the copy. Dynamo cannot trace this iterator: it breaks the graph, as intended.
_handles = iter(itertools.count(1).__next__, None)


class Bound:
    """Handle of the bound calls for one set of arguments. Freeing it frees the arguments in the module."""

    __slots__ = (
        "_handle", "_rebind", "_refusals", "_run", "_run_lse", "_run_out", "_sm_scale", "_stream", "_tensors", "_unbind",
    )  # fmt: skip

    def __init__(
        self, operators: Operators, expected: ExpectedArguments, arguments: CallArguments, parameters: Parameters
    ) -> None:
        """Call the operator ``bind`` with these arguments and a new handle."""
        namespace = operators.namespace
        self._handle, self._sm_scale, self._refusals = next(_handles), parameters.sm_scale, 0
        self._tensors = arguments, parameters  # referenced, because the module stores their addresses
        # Dynamo does not trace the inner operator (_op) into a graph.
        namespace.bind.default._op(*expected._replace(handle=self._handle), *arguments, *parameters)
        self._unbind, self._run, self._run_lse, self._run_out, self._stream, self._rebind = (
            operator.default._handle
            for operator in (
                namespace.unbind, namespace.run_bound, namespace.run_bound_lse, namespace.run_bound_out,
                namespace.stream_of, namespace.rebind,
            )
        )  # fmt: skip

    def rebind(self, arguments: CallArguments, lists: WorkLists, num_queries: int, kv_size: int) -> None:
        """Use the tables of another plan. Every other argument is equal. After an error nothing has changed."""
        call_handle(
            self._rebind, self._handle, lists.plan, arguments.kv_indptr, arguments.kv_indices, *lists[2:], num_queries,
            kv_size,
        )  # fmt: skip
        self._tensors, self._refusals = (arguments, self._tensors[1]), 0

    def stream(self) -> int:
        """Return the handle of the last call's stream, -1 before the first call."""
        return int(call_handle(self._stream, self._handle))

    def __del__(self) -> None:
        with suppress(AttributeError, TypeError):  # partly constructed, or the process ends
            call_handle(self._unbind, self._handle)

    def call(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor | None,
        scales: tuple[Scale, Scale, Scale],
        out: torch.Tensor | None = None,
        lse: torch.Tensor | None = None,
        return_lse: bool = False,
        sm_scale: float | None = None,
    ) -> Result | None:
        """Return the result, or ``None`` if the call needs the full operator.

        ``v`` is ``None`` if ``k`` contains keys and values.
        """
        if self._refusals >= MOST_REFUSALS:  # the caller's inputs always need a copy
            self._refusals = self._refusals + 1 if self._refusals < MOST_REFUSALS + PAUSE else MOST_REFUSALS - 1
            return None
        try:
            if is_grad_enabled() and (q.requires_grad or k.requires_grad or (v is not None and v.requires_grad)):
                return None
            if has_torch_function_variadic(q, k, v, out, lse):
                return None
            o_scale: Scale = None
            if scales != NO_SCALES:
                q_scale, k_scale, o_scale = (1.0 if scale is None else scale for scale in scales)
                if not type(q_scale) is type(k_scale) is type(o_scale) is float:
                    return None
                sm_scale = (self._sm_scale if sm_scale is None else sm_scale) * q_scale * k_scale
        except AttributeError:  # an argument is no tensor: the full operator raises the error
            self._refusals += 1
            return None
        result: Result
        try:
            if out is not None:
                if return_lse and lse is None:
                    lse = torch.empty(out.shape[:-1], dtype=torch.float32, device=out.device)
                call_handle(self._run_out, q, k, v, out, lse, self._handle, sm_scale, o_scale)
                result = (out, lse) if return_lse else out  # type: ignore[assignment]
            elif lse is not None:
                return None
            elif return_lse:
                result = call_handle(self._run_lse, q, k, v, self._handle, sm_scale, o_scale)
            else:
                result = call_handle(self._run, q, k, v, self._handle, sm_scale, o_scale)
        except RuntimeError as err:
            if not is_refusal(err):
                raise_as_callers_mistake(err)
            self._refusals += 1
            return None
        self._refusals = 0
        return result


class LastRun:
    """Stream of the last run through the full operator. Bound calls know their own streams."""

    def __init__(self) -> None:
        self._stream: torch.cuda.Stream | None = None

    def record(self, device: torch.device) -> None:
        """Record the current stream of ``device``."""
        if device.type == "cuda" and not is_dynamo_compiling():
            self._stream = torch.cuda.current_stream(device)

    def wait(self, device: torch.device, bound: Iterable[Bound | None]) -> None:
        """Let the current stream wait for the work of every other stream that ran the plan."""
        if device.type != "cuda":
            return
        handles = {call.stream() for call in bound if call is not None}
        if self._stream is not None:
            handles.add(self._stream.cuda_stream)
        # torch takes 0.1 us for the handle of the current stream, and 2 us for the stream.
        handles -= {-1, torch._C._cuda_getCurrentRawStream(device.index)}
        for handle in handles:
            other = torch.cuda.ExternalStream(handle, device) if handle else torch.cuda.default_stream(device)
            torch.cuda.current_stream(device).wait_stream(other)


def is_refusal(err: RuntimeError) -> bool:
    """Return True if a binding or torch's argument parser refused a call before the launch."""
    if isinstance(err, NotImplementedError):
        return True  # a kind of tensor without a kernel
    text = str(err)
    return text.startswith(("ValueError: ", "TypeError: ")) or "Expected a value of type" in text


def bind_plan(
    operators: Operators, shape: Shape, num_queries: int, allows_more_queries: bool, page_size: int | None,
    kv_size: int, arguments: CallArguments, parameters: Parameters,
) -> Bound | None:  # fmt: skip
    """Return the bound calls of a plan, or ``None`` if it needs the full operator."""
    if shape.dtype_o != shape.dtype_q:
        return None
    expected = ExpectedArguments(
        0, 3, num_queries, allows_more_queries, shape.num_qo_heads, shape.num_kv_heads, shape.head_dim_qk,
        shape.head_dim_vo, NUMBERS[shape.dtype_q], NUMBERS[shape.dtype_kv], page_size or 0, kv_size,
    )  # fmt: skip
    return Bound(operators, expected, arguments, parameters)


class BoundCalls:
    """Cache of the bound calls of a function without a plan.

    A key contains the arguments that select a module or that the host checks.
    """

    def __init__(self, family: str, q_dims: int) -> None:
        self._family, self._q_dims = family, q_dims
        self._calls: dict[tuple[Any, ...], Bound] = {}

    def call(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        options: tuple[Any, ...],
        scales: tuple[Scale, Scale, Scale],
        return_lse: bool,
        sm_scale: float | None,
    ) -> Result | None:
        """Return the result, or ``None`` if the call is not bound yet or needs the full operator."""
        if is_compiling():
            return None
        try:
            bound = self._calls[q.dtype, k.dtype, q.shape[-1], q.is_cpu, q.is_cuda, options]
        except (AttributeError, IndexError, KeyError, TypeError):
            return None
        return bound.call(q, k, v, scales, None, None, return_lse, sm_scale)

    def bind(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, options: tuple[Any, ...], layout: int,
        mask_mode: int, logits: Logits, backend: str = "auto",
    ) -> None:  # fmt: skip
        """Bind calls with these arguments, unless they are bound already or need the full operator."""
        key = (q.dtype, k.dtype, q.shape[-1], q.is_cpu, q.is_cuda, options)
        if (
            is_compiling()
            or key in self._calls
            or not all(type(one) in _PLAIN for one in (q.shape[-1], v.shape[-1], *options))
        ):
            return  # sizes may be symbolic, and a tensor's values may change
        if logits.pos_encoding_mode == 2:
            return  # slopes depend on the number of heads
        dtypes, head_dims = (q.dtype, k.dtype, q.dtype), (q.shape[-1], v.shape[-1])
        try:
            kernels = kernels_of_request(
                backend, self._family, q, k, v, layout, mask_mode, logits.pos_encoding_mode,
                logits.logits_soft_cap > 0, q.dtype,
            )  # fmt: skip
            operators = builtin_operators(self._family, q.device.type, dtypes, head_dims, variant_of(logits), kernels)
        except ValueError:
            return  # the full operator raises the detailed error
        logits = logits._replace(sm_scale=max(q.shape[-1], 1) ** -0.5)
        expected = ExpectedArguments(
            0, self._q_dims, ANY, True, ANY, ANY, q.shape[-1], v.shape[-1], NUMBERS[q.dtype], NUMBERS[k.dtype], ANY, 0
        )
        arguments = CallArguments(
            kv_layout=layout, mask_mode=mask_mode, window_left=logits.window_left, rope_scale=logits.rope_scale,
            rope_theta=logits.rope_theta, variant=operators.variant,
        )  # fmt: skip
        if len(self._calls) >= MOST_CALLS:
            self._calls.clear()
        self._calls[key] = Bound(operators, expected, arguments, parameters_of(logits, 1, q.device))
