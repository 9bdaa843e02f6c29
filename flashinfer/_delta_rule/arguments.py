"""Checks of the arguments of the delta rule's functions; gates, beta and indices in the form that kernels read."""

from __future__ import annotations

import math

import torch

from .._ops.errors import called
from .._ops.indices import INTEGERS, narrowed
from .._ops.tensors import check_tensor, is_readable

CHUNK_SIZES = (16, 32, 64)


def mistake(function: str, argument: str, text: str) -> ValueError:
    return ValueError(f"{called(function)}: {argument}: {text}")


PACKED = "flashinfer.chunk_gated_delta_rule, whose layout is packed"


def check_rank(function: str, rank: int, elsewhere: str, **tensors: torch.Tensor) -> None:
    """Check numbers of dimensions; ``elsewhere`` names the function that takes the other layout."""
    for name, tensor in tensors.items():
        check_tensor(function, name, tensor)
        if tensor.dim() != rank:
            raise mistake(function, name, f"got {tensor.dim()} dimensions, wanted {rank}{elsewhere}")


def check_tokens(function: str, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
    """Check that q, k and v are ``[B, T, heads, n]``."""
    check_rank(function, 4, f", or three in {PACKED}", q=q, k=k, v=v)


def checked_scale(function: str, q: torch.Tensor, scale: float | None) -> float:
    """Return the scale as a number; ``None`` is ``K ** -0.5``."""
    if scale is None:
        number: float = max(q.shape[-1], 1) ** -0.5
        return number
    if isinstance(scale, torch.Tensor):
        raise TypeError(f"{function}: scale: got a Tensor, wanted a number")
    return scale


def promoted(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Return floating tensors in the dtype that torch promotes them to. The operator refuses others."""
    dtype = tensors[0].dtype
    for one in tensors:
        if not one.is_floating_point() or one.element_size() < 2:
            return tensors
        dtype = torch.promote_types(dtype, one.dtype)
    return tuple(one.to(dtype) for one in tensors)


def dense(tensor: torch.Tensor) -> torch.Tensor:
    return tensor if tensor.stride(-1) == 1 or tensor.shape[-1] == 1 else tensor.contiguous()


def check_floats(function: str, name: str, tensor: torch.Tensor) -> None:
    """Check for floats of at least 16 bits: numbers of 8 bits mean nothing without a scale, which no argument gives."""
    check_tensor(function, name, tensor)
    if not tensor.is_floating_point() or tensor.element_size() < 2:
        why = ": there is no scale for 8 bits" if tensor.is_floating_point() else ""
        raise TypeError(f"{function}: {name}: got {tensor.dtype}, wanted float32, float16, bfloat16 or float64{why}")


def numbers(function: str, name: str, tensor: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor | None:
    """Return floats of any width as contiguous ``dtype``."""
    if tensor is None:
        return None
    check_floats(function, name, tensor)
    return tensor.to(dtype).contiguous()


def indices(function: str, name: str, tensor: torch.Tensor | None) -> torch.Tensor | None:
    """Return integers of any dtype and strides as kernels read them: contiguous int32 or int64.

    Raises:
        TypeError: no integers.
    """
    if tensor is None:
        return None
    check_tensor(function, name, tensor)
    if tensor.dtype not in INTEGERS:
        raise TypeError(f"{function}: {name}: got {tensor.dtype}, wanted torch.int32, torch.int64 or other integers")
    if tensor.dtype not in (torch.int32, torch.int64):
        tensor = narrowed(function, name, tensor, torch.int64 if tensor.dtype in WIDE else torch.int32)
    return tensor.contiguous()


WIDE = (torch.uint32, torch.uint64)  # with numbers that int32 lacks


def gate(
    function: str, g: torch.Tensor | None, use_gate: bool, A_log: torch.Tensor | None, dt_bias: torch.Tensor | None,
    dtype: torch.dtype,
) -> torch.Tensor | None:  # fmt: skip
    """Return g in ``dtype``. It is small next to q and k: torch computes it, with gradients of A_log and dt_bias."""
    if not use_gate:
        if A_log is not None or dt_bias is not None:
            raise mistake(function, "use_gate_in_kernel", "got False, wanted True with A_log or dt_bias")
        return numbers(function, "g", g, dtype)
    if A_log is None or g is None:
        raise mistake(function, "A_log" if A_log is None else "g", "got None, wanted it for use_gate_in_kernel")
    for name, tensor in (("g", g), ("A_log", A_log), ("dt_bias", dt_bias)):
        if tensor is not None:
            check_floats(function, name, tensor)
    raw = g.to(dtype) if dt_bias is None else g.to(dtype) + dt_bias.to(dtype)
    return (-A_log.to(dtype).exp() * torch.nn.functional.softplus(raw)).contiguous()


def row_gate(
    function: str, g: torch.Tensor, use_gate: bool, A_log: torch.Tensor | None, dt_bias: torch.Tensor | None,
    lower_bound: float | None, dtype: torch.dtype,
) -> torch.Tensor:  # fmt: skip
    """Return the logarithms ``[B, T, HV, K]`` in ``dtype``, from raw numbers with ``use_gate``; gradients pass through."""
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
    """Check the gates of rows, and the tables that raw ones come with."""
    check_floats(function, "g", g)
    if g.dim() != 4:
        raise mistake(function, "g", f"got {g.dim()} dimensions, wanted 4: one number for each row of the state")
    check_bound(function, lower_bound)
    if not use_gate:
        if A_log is not None or dt_bias is not None:
            raise mistake(function, "use_gate_in_kernel", "got False, wanted True with A_log or dt_bias")
        return
    if A_log is None:
        raise mistake(function, "A_log", "got None, wanted it for use_gate_in_kernel")
    heads, keys = g.shape[2:]
    for name, tensor, shape in (("A_log", A_log, (heads,)), ("dt_bias", dt_bias, (heads, keys))):
        if tensor is None:
            continue
        check_floats(function, name, tensor)
        check_table(function, name, tensor, shape)


def check_table(function: str, name: str, tensor: torch.Tensor, shape: tuple[int, ...]) -> None:
    """Check for this shape, flat or not, with dimensions of 1 or without: ``[K, HV]`` is not ``[HV, K]``."""
    if [size for size in tensor.shape if size != 1] not in ([n for n in shape if n != 1], [math.prod(shape)]):
        raise mistake(function, name, f"got shape {list(tensor.shape)}, wanted {list(shape)}")


def sigmoid_of(
    function: str, beta: torch.Tensor | None, sigmoid: bool, negative: bool, dtype: torch.dtype
) -> torch.Tensor | None:
    if negative and not sigmoid:
        raise mistake(function, "allow_neg_eigval", "got True, wanted use_beta_sigmoid_in_kernel with it")
    if not sigmoid:
        return numbers(function, "beta", beta, dtype)
    if beta is None:
        raise mistake(function, "beta", "got None, wanted logits for use_beta_sigmoid_in_kernel")
    check_floats(function, "beta", beta)
    return (beta.to(dtype).sigmoid() * (2 if negative else 1)).contiguous()


def check_logarithms(function: str, name: str, gate: torch.Tensor | None) -> None:
    """Refuse decays in the place of their logarithms, on the CPU. On CUDA a look would wait for the device."""
    if gate is not None and is_readable(gate) and bool((gate > 0).any()):
        text = (
            "got numbers above 0, wanted natural logarithms of decays; flashinfer.chunk_gated_delta_rule takes decays"
        )
        raise mistake(function, name, text)


def check_bound(function: str, lower_bound: float | None) -> None:
    """Check the least logarithm of a gate."""
    if lower_bound is not None and not lower_bound < 0:
        raise mistake(function, "lower_bound", f"got {lower_bound}, wanted a number below 0")


def check_chunk(function: str, chunk_size: int, sizes: tuple[int, ...] = CHUNK_SIZES) -> None:
    if chunk_size not in sizes:
        raise mistake(function, "chunk_size", f"got {chunk_size}, wanted one of {', '.join(map(str, sizes))}")
