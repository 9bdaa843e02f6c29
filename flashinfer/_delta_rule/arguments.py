"""Checks of the delta rule's arguments, and conversion of gates, beta and indices to the kernels' form."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch

from .._ops.arguments import check_present
from .._ops.errors import type_error, value_error
from .._ops.indices import INTEGERS, narrowed
from .._ops.numbers import check_option, check_range, whole
from .._ops.tensors import check_metadata, check_tensor, is_readable

CHUNK_SIZES = (16, 32, 64)


PACKED = "flashinfer.chunk_gated_delta_rule, whose layout is packed"


def check_rank(function: str, rank: int, elsewhere: str, **tensors: torch.Tensor) -> None:
    """Check numbers of dimensions. ``elsewhere`` ends the error: it names the function with another layout."""
    for name, tensor in tensors.items():
        check_tensor(function, name, tensor)
        check_range(function, name, tensor.dim(), rank, rank, "dimensions", elsewhere)


def check_tokens(function: str, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
    """Check that q, k and v are ``[B, T, heads, n]``."""
    check_rank(function, 4, f", or three in {PACKED}", q=q, k=k, v=v)


def checked_scale(function: str, q: torch.Tensor, scale: float | None) -> float:
    """Return the scale as a number; ``None`` means ``K ** -0.5``."""
    if scale is None:
        number: float = max(q.shape[-1], 1) ** -0.5
        return number
    if isinstance(scale, torch.Tensor):
        raise type_error(function, "scale", "a Tensor", "a number")
    return scale


def promoted(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Convert floating-point tensors to their common dtype by torch's promotion. The operator rejects other tensors."""
    dtype = tensors[0].dtype
    for one in tensors:
        if not one.is_floating_point() or one.element_size() < 2:
            return tensors
        dtype = torch.promote_types(dtype, one.dtype)
    return tuple(one.to(dtype) for one in tensors)


def dense(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor with a contiguous last dimension."""
    return tensor if tensor.stride(-1) == 1 or tensor.shape[-1] == 1 else tensor.contiguous()


def check_floats(function: str, name: str, tensor: torch.Tensor) -> None:
    """Check for floating-point numbers of at least 16 bits. Numbers of 8 bits would need a scale."""
    check_tensor(function, name, tensor)
    if not tensor.is_floating_point() or tensor.element_size() < 2:
        why = ": there is no scale for 8 bits" if tensor.is_floating_point() else ""
        raise type_error(function, name, tensor.dtype, f"float32, float16, bfloat16 or float64{why}")


def numbers(function: str, name: str, tensor: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor | None:
    """Return floating-point numbers as a contiguous tensor of ``dtype``."""
    if tensor is None:
        return None
    check_floats(function, name, tensor)
    return tensor.to(dtype).contiguous()


def indices(function: str, name: str, tensor: torch.Tensor | None) -> torch.Tensor | None:
    """Return integers as a contiguous int32 or int64 tensor.

    Raises:
        TypeError: the tensor does not contain integers.
    """
    if tensor is None:
        return None
    check_tensor(function, name, tensor)
    if tensor.dtype not in INTEGERS:
        raise type_error(function, name, tensor.dtype, "torch.int32, torch.int64 or other integers")
    if tensor.dtype not in (torch.int32, torch.int64):
        tensor = narrowed(function, name, tensor, torch.int64 if tensor.dtype in WIDE else torch.int32)
    return tensor.contiguous()


WIDE = (torch.uint32, torch.uint64)  # some values do not fit into int32


def gate(
    function: str, g: torch.Tensor | None, use_gate: bool, A_log: torch.Tensor | None, dt_bias: torch.Tensor | None,
    dtype: torch.dtype,
) -> torch.Tensor | None:  # fmt: skip
    """Return the logarithms of decays in ``dtype``, computed from raw gates with ``use_gate``.

    Gates are small compared with q and k, so torch's functions compute them. A_log and dt_bias then have gradients.
    """
    if not use_gate:
        if A_log is not None or dt_bias is not None:
            raise value_error(function, "use_gate_in_kernel", False, "True with A_log or dt_bias")
        return numbers(function, "g", g, dtype)
    A_log = check_present(function, "A_log", A_log, "a tensor for use_gate_in_kernel")
    g = check_present(function, "g", g, "a tensor for use_gate_in_kernel")
    check_floats(function, "g", g)
    heads = g.shape[-1:]
    for name, tensor in (("A_log", A_log), ("dt_bias", dt_bias)):
        if tensor is not None:
            check_floats(function, name, tensor)
            check_table(function, name, tensor, heads)
    raw = g.to(dtype) if dt_bias is None else g.to(dtype) + dt_bias.to(dtype).reshape(heads)
    return (-A_log.to(dtype).reshape(heads).exp() * torch.nn.functional.softplus(raw)).contiguous()


def channel_gate(
    function: str, g: torch.Tensor, use_gate: bool, A_log: torch.Tensor | None, dt_bias: torch.Tensor | None,
    lower_bound: float | None, dtype: torch.dtype,
) -> torch.Tensor:  # fmt: skip
    """Return the logarithms of decays per channel, ``[B, T, HV, K]`` in ``dtype``, as :func:`gate` does."""
    check_rows(function, g, use_gate, A_log, dt_bias, lower_bound)
    if A_log is None:
        return g.to(dtype).contiguous()
    heads, keys = g.shape[2:]
    raw = g.to(dtype) if dt_bias is None else g.to(dtype) + dt_bias.to(dtype).reshape(heads, keys)
    rate = A_log.to(dtype).reshape(heads, 1).exp()
    if lower_bound is not None:
        return (lower_bound * (rate * raw).sigmoid()).contiguous()
    return (-rate * torch.nn.functional.softplus(raw)).contiguous()


def check_rows(
    function: str, g: torch.Tensor, use_gate: bool, A_log: torch.Tensor | None, dt_bias: torch.Tensor | None,
    lower_bound: float | None,
) -> None:  # fmt: skip
    """Check decays per channel and, with ``use_gate``, A_log and dt_bias."""
    check_floats(function, "g", g)
    if g.dim() != 4:
        raise value_error(function, "g", f"{g.dim()} dimensions", "4: one number for each row of the state")
    check_bound(function, lower_bound)
    if not use_gate:
        if A_log is not None or dt_bias is not None:
            raise value_error(function, "use_gate_in_kernel", False, "True with A_log or dt_bias")
        return
    check_present(function, "A_log", A_log, "a tensor for use_gate_in_kernel")
    heads, keys = g.shape[2:]
    for name, tensor, shape in (("A_log", A_log, (heads,)), ("dt_bias", dt_bias, (heads, keys))):
        if tensor is None:
            continue
        check_floats(function, name, tensor)
        check_table(function, name, tensor, shape)


def check_table(function: str, name: str, tensor: torch.Tensor, shape: tuple[int, ...]) -> None:
    """Check that a tensor has ``shape`` or is its flat vector. Dimensions of 1 are ignored."""
    if [size for size in tensor.shape if size != 1] not in ([n for n in shape if n != 1], [math.prod(shape)]):
        raise value_error(function, name, f"shape {list(tensor.shape)}", list(shape))


def sigmoid_of(
    function: str, beta: torch.Tensor | None, sigmoid: bool, negative: bool, dtype: torch.dtype
) -> torch.Tensor | None:
    """Return beta in ``dtype``. ``sigmoid``: apply the sigmoid first. ``negative``: multiply the result by 2."""
    if negative and not sigmoid:
        raise value_error(function, "allow_neg_eigval", True, "use_beta_sigmoid_in_kernel with it")
    if not sigmoid:
        return numbers(function, "beta", beta, dtype)
    beta = check_present(function, "beta", beta, "logits for use_beta_sigmoid_in_kernel")
    check_floats(function, "beta", beta)
    return (beta.to(dtype).sigmoid() * (2 if negative else 1)).contiguous()


def check_logarithms(function: str, name: str, gate: torch.Tensor | None) -> None:
    """Reject decays in the place of their logarithms, on the CPU. The host must not wait for values of a GPU."""
    if gate is not None and is_readable(gate) and bool((gate > 0).any()):
        wanted = "natural logarithms of decays; flashinfer.chunk_gated_delta_rule takes decays"
        raise value_error(function, name, "numbers above 0", wanted)


def check_bound(function: str, lower_bound: float | None) -> None:
    """Check the lower bound of a gate's logarithm."""
    if lower_bound is not None and not lower_bound < 0:
        raise value_error(function, "lower_bound", lower_bound, "a number below 0")


class Checkpoints(NamedTuple):
    """States within sequences: after every ``every`` tokens, from row ``starts[n]`` on for sequence n."""

    states: torch.Tensor  # [C, HV, ...]
    starts: torch.Tensor  # [N]
    every: int


def checkpoints_of(
    function: str, states: torch.Tensor | None, starts: torch.Tensor | None, every: int,
    shape: tuple[int, ...], sequences: int, dtype: torch.dtype, device: torch.device,
) -> Checkpoints | None:  # fmt: skip
    """Return the checkpoints of a call, or ``None`` with ``every`` = 0. ``shape`` is the shape of a state."""
    if whole(function, "checkpoint_every_n_tokens", every) < 0 or every % 64:
        raise value_error(function, "checkpoint_every_n_tokens", every, "0 or a positive multiple of 64")
    for name, tensor in (("state_checkpoints", states), ("checkpoint_cu_starts", starts)):
        if (tensor is None) != (every == 0):
            wanted = "None with checkpoint_every_n_tokens=0" if every == 0 else f"a tensor for every {every} tokens"
            raise value_error(function, name, type(tensor).__name__, wanted)
    if states is None or starts is None:
        return None
    check_rank(function, 4, "", state_checkpoints=states)
    check_metadata(function, "state_checkpoints", states, (states.shape[0], *shape), device, dtype)
    if not states.is_contiguous():
        raise value_error(function, "state_checkpoints", f"strides {list(states.stride())}", "a contiguous tensor")
    rows = indices(function, "checkpoint_cu_starts", starts)
    assert rows is not None
    check_metadata(function, "checkpoint_cu_starts", rows, (sequences + 1,), device, torch.int32, torch.int64)
    return Checkpoints(states, rows[:-1].contiguous(), every)


def check_chunk(function: str, chunk_size: int, sizes: tuple[int, ...] = CHUNK_SIZES) -> None:
    """Check the size of a chunk."""
    check_option(function, "chunk_size", chunk_size, sizes)
