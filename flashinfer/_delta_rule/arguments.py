"""Arguments of the delta rule's functions: what is refused, and gates and beta as numbers of the state."""

from __future__ import annotations

import math

import torch

from .._ops.tensors import can_be_looked_at, check_tensor

CHUNK_SIZES = (16, 32, 64)


def mistake(function: str, argument: str, text: str) -> ValueError:
    return ValueError(f"{function}: {argument}: {text}")


def check_rank(function: str, rank: int, elsewhere: str, **tensors: torch.Tensor) -> None:
    """``elsewhere`` says who takes tensors of the other layout."""
    for name, tensor in tensors.items():
        check_tensor(function, name, tensor)
        if tensor.dim() != rank:
            raise mistake(function, name, f"got {tensor.dim()} dimensions, wanted {rank}{elsewhere}")


def checked_scale(function: str, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float | None) -> float:
    """The scale, of tensors that have four dimensions."""
    check_rank(function, 4, ", or three in flashinfer.chunk_gated_delta_rule, whose layout is packed", q=q, k=k, v=v)
    if scale is None:
        number: float = max(q.shape[-1], 1) ** -0.5
        return number
    if isinstance(scale, torch.Tensor):
        raise TypeError(f"{function}: scale: got a Tensor, wanted a number")
    return scale


def promoted(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Floating tensors in the dtype that torch's operators would compute in. Others are the operator's to refuse."""
    dtype = tensors[0].dtype
    for one in tensors:
        if not one.is_floating_point() or one.element_size() < 2:
            return tensors
        dtype = torch.promote_types(dtype, one.dtype)
    return tuple(one.to(dtype) for one in tensors)


def dense(tensor: torch.Tensor) -> torch.Tensor:
    return tensor if tensor.stride(-1) == 1 or tensor.shape[-1] == 1 else tensor.contiguous()


def numbers(function: str, name: str, tensor: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor | None:
    if tensor is None:
        return None
    check_tensor(function, name, tensor)
    return tensor.to(dtype).contiguous()


def gate(
    function: str, g: torch.Tensor | None, use_gate: bool, A_log: torch.Tensor | None, dt_bias: torch.Tensor | None,
    dtype: torch.dtype,
) -> torch.Tensor | None:  # fmt: skip
    """g in ``dtype``: small beside q and k, so torch computes it, with the gradients of A_log and dt_bias."""
    if not use_gate:
        if A_log is not None or dt_bias is not None:
            raise mistake(function, "use_gate_in_kernel", "got False, wanted True beside A_log or dt_bias")
        return numbers(function, "g", g, dtype)
    if A_log is None or g is None:
        raise mistake(function, "A_log" if A_log is None else "g", "got None, wanted it for use_gate_in_kernel")
    for name, tensor in (("g", g), ("A_log", A_log), ("dt_bias", dt_bias)):
        if tensor is not None:
            check_tensor(function, name, tensor)
    raw = g.to(dtype) if dt_bias is None else g.to(dtype) + dt_bias.to(dtype)
    return (-A_log.to(dtype).exp() * torch.nn.functional.softplus(raw)).contiguous()


def row_gate(
    function: str, g: torch.Tensor, use_gate: bool, A_log: torch.Tensor | None, dt_bias: torch.Tensor | None,
    lower_bound: float | None, dtype: torch.dtype,
) -> torch.Tensor:  # fmt: skip
    """g of each row ``[B, T, HV, K]`` in ``dtype``, of raw numbers where ``use_gate``, with gradients of what makes it."""
    if not isinstance(g, torch.Tensor):
        raise TypeError(f"{function}: g: got {type(g).__name__}, wanted Tensor")
    if g.dim() != 4:
        raise mistake(function, "g", f"got {g.dim()} dimensions, wanted 4: one number for each row of the state")
    if lower_bound is not None and lower_bound >= 0:
        raise mistake(function, "lower_bound", f"got {lower_bound}, wanted a number below 0")
    if not use_gate:
        if A_log is not None or dt_bias is not None:
            raise mistake(function, "use_gate_in_kernel", "got False, wanted True beside A_log or dt_bias")
        return g.to(dtype).contiguous()
    if A_log is None:
        raise mistake(function, "A_log", "got None, wanted it for use_gate_in_kernel")
    heads, keys = g.shape[2:]
    for name, tensor, shape in (("A_log", A_log, (heads,)), ("dt_bias", dt_bias, (heads, keys))):
        if tensor is None:
            continue
        check_tensor(function, name, tensor)
        # Flat, or of this shape, either with dimensions of 1: [keys, heads] has as many elements and is another table.
        if [size for size in tensor.shape if size != 1] not in ([n for n in shape if n != 1], [math.prod(shape)]):
            raise mistake(function, name, f"got shape {list(tensor.shape)}, wanted {list(shape)}")
    raw = g.to(dtype) if dt_bias is None else g.to(dtype) + dt_bias.to(dtype).reshape(heads, keys)
    rate = A_log.to(dtype).reshape(heads, 1).exp()
    if lower_bound is not None:
        return (lower_bound * (rate * raw).sigmoid()).contiguous()
    return (-rate * torch.nn.functional.softplus(raw)).contiguous()


def sigmoid_of(
    function: str, beta: torch.Tensor | None, sigmoid: bool, negative: bool, dtype: torch.dtype
) -> torch.Tensor | None:
    if negative and not sigmoid:
        raise mistake(function, "allow_neg_eigval", "got True, wanted use_beta_sigmoid_in_kernel beside it")
    if not sigmoid:
        return numbers(function, "beta", beta, dtype)
    if beta is None:
        raise mistake(function, "beta", "got None, wanted logits for use_beta_sigmoid_in_kernel")
    check_tensor(function, "beta", beta)
    return (beta.to(dtype).sigmoid() * (2 if negative else 1)).contiguous()


def check_logarithms(function: str, name: str, gate: torch.Tensor | None) -> None:
    """A decay given as such, not as its logarithm, is an error where that can be seen."""
    if gate is not None and can_be_looked_at(gate) and bool((gate > 0).any()):
        raise mistake(function, name, "got numbers above 0, wanted natural logarithms of decays, which are not")


def check_chunk(function: str, chunk_size: int, sizes: tuple[int, ...] = CHUNK_SIZES) -> None:
    if chunk_size not in sizes:
        raise mistake(function, "chunk_size", f"got {chunk_size}, wanted one of {', '.join(map(str, sizes))}")
