"""What the public functions of attention share: a configuration's operators, and arguments brought into their form."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, NamedTuple

import torch
from torch.compiler import is_compiling, is_dynamo_compiling

from .._ops.configured import load_configured, with_fakes
from .._ops.errors import raise_as_callers_mistake
from .._ops.scalars import as_tensor, is_symbolic
from ..errors import GradientError
from ..jit.module import JitSpec
from ..jit.modules._attention import attention_spec, dtypes_value, head_dims_value, variant_bits
from ..jit.modules._attention import variant_value as variant_of
from ..jit.spec import BACKENDS
from ..utils import get_alibi_slopes

LAYOUTS = {"NHD": 0, "HND": 1}
POS_ENCODINGS = {"NONE": 0, "ROPE_LLAMA": 1, "ALIBI": 2}
NON_CAUSAL, CAUSAL, CUSTOM, MULTI_ITEM = range(4)  # mask_mode of the operators
Scale = float | torch.Tensor | None
NO_SCALES: tuple[Scale, Scale, Scale] = (None, None, None)
PagedCache = torch.Tensor | tuple[torch.Tensor, torch.Tensor]


# The operators' arguments from kv_indptr to max_item_len, for one request without a plan and without a mask of its own.
ONE_REQUEST = (None, None, None, None, 1, 0, 0, 0, 0, 0, None, None, None, None, 0, None)


@dataclass(frozen=True)
class Operators:
    """The operators of one configuration's module, and what of it a call names."""

    run: Callable[..., None]
    plan: Callable[..., None]
    namespace: Any
    variant: int = 0
    custom: bool = False  # a user's variant, which has parameters of its own
    module: str = ""  # its namespace
    kernels: str = ""  # which of the family's: "cpu", "cuda", or "sm90a" and its like


@cache
def own_operators(
    family: str,
    backend: str,
    dtypes: tuple[torch.dtype, torch.dtype, torch.dtype],
    head_dims: tuple[int, int],
    pos_encoding_mode: int,
    use_logits_soft_cap: bool,
    kernels: str = "",
) -> Operators:
    """The operators of a variant of the library's own: found, else built, once in a process.

    ``kernels``: which of the family's on ``backend``, see ``kernels.py``; by default those that run everywhere.
    """
    if backend not in BACKENDS:
        raise ValueError(f"{family}: got tensors on {backend}, wanted one of {', '.join(BACKENDS)}")
    values = dtypes_value(*dtypes, backend), head_dims_value(*head_dims, backend)
    variant = variant_of(pos_encoding_mode, use_logits_soft_cap)
    namespace = load_configured(attention_spec(family, kernels or backend, *values, variant))
    operators = _operators(namespace, variant_bits(variant), custom=False)
    return replace(operators, kernels=kernels or backend)


@cache
def custom_operators(spec: JitSpec) -> Operators:
    """The operators of a user's variant."""
    return _operators(load_configured(spec), 0, custom=True)


def _operators(namespace: Any, variant: int, custom: bool) -> Operators:
    with_fakes(namespace, _FAKES)
    run, plan = namespace.run.default, namespace.plan.default._op  # of the latter dynamo knows nothing: it is no node
    return Operators(run, plan, namespace, variant, custom, namespace.name)


def _fake_run(*args: Any) -> None:
    """Writes to arguments and returns nothing; what torch.compile needs to know."""
    devices = {arg.device.type for arg in args if isinstance(arg, torch.Tensor)}
    if devices != {"meta"}:
        raise ValueError(f"attention: got tensors on {', '.join(sorted(devices))}, wanted one device for all")


def _fake_out(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor | None, *_: Any) -> torch.Tensor:
    _fake_run(q, k, v)
    return q.new_empty((*q.shape[:-1], (k if v is None else v).shape[-1]))


def _fake_out_and_lse(q: torch.Tensor, *args: Any) -> tuple[torch.Tensor, torch.Tensor]:
    return _fake_out(q, *args), q.new_empty(q.shape[:-1], dtype=torch.float32)


_FAKES: dict[str, Callable[..., Any]] = {
    "run": _fake_run,
    "plan": lambda *_: None,
    "bind": lambda *_: None,
    "unbind": lambda *_: None,
    "run_bound": _fake_out,
    "run_bound_lse": _fake_out_and_lse,
    "run_bound_out": _fake_run,
}


def call(op: str, run: Callable[..., None], *args: Any) -> None:
    """Call an operator; a mistake of the caller's becomes a ``ValueError`` or ``TypeError``."""
    try:
        run(*args)
    except RuntimeError as err:
        tensors = [arg for arg in args if isinstance(arg, torch.Tensor)]
        for tensor in tensors:
            if tensor.layout != torch.strided:
                raise ValueError(f"{op}: got a tensor of {tensor.layout}, wanted dense ones") from None
        if len({tensor.device for tensor in tensors}) > 1:
            devices = ", ".join(dict.fromkeys(str(tensor.device) for tensor in tensors))
            raise ValueError(f"{op}: got tensors on {devices}, wanted one device for all") from None
        if "is missing value for argument" in str(err) or "argument(s) but received" in str(err):
            text = str(err).split(" Declaration:")[0]
            raise TypeError(f"{op}: the variant's parameters do not fit the arguments given: {text}") from None
        raise_as_callers_mistake(err)


def check_tensor(op: str, name: str, x: object) -> None:
    if not isinstance(x, torch.Tensor):
        raise TypeError(f"{op}: {name}: got {type(x).__name__}, wanted Tensor")
    if x.layout != torch.strided:
        raise ValueError(f"{op}: {name}: got a tensor of {x.layout} and {x.dtype}, wanted a dense one")


def check_dims(op: str, name: str, x: torch.Tensor, wanted: int) -> None:
    check_tensor(op, name, x)
    if x.dim() != wanted:
        raise ValueError(f"{op}: {name}: got {x.dim()} dimensions, wanted {wanted}")


def no_gradient(op: str, tensors: tuple[object, ...], method: str = "") -> None:
    """Better an error than a gradient that is silently none."""
    if torch.is_grad_enabled():
        for x in tensors:
            if isinstance(x, torch.Tensor) and x.requires_grad:
                raise GradientError(
                    f"{op}{method}: has no gradient, wanted tensors that require none, or torch.no_grad()"
                )


def layout_of(op: str, kv_layout: str) -> int:
    if kv_layout not in LAYOUTS:
        raise ValueError(f"{op}: kv_layout: got {kv_layout!r}, wanted 'NHD' or 'HND'")
    return LAYOUTS[kv_layout]


def caches_of(op: str, paged_kv_cache: PagedCache) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values of a paged cache, given as one tensor or as two."""
    if isinstance(paged_kv_cache, torch.Tensor):
        check_dims(op, "paged_kv_cache", paged_kv_cache, 5)
        if paged_kv_cache.shape[1] != 2:
            raise ValueError(
                f"{op}: paged_kv_cache: got size {paged_kv_cache.shape[1]} of dimension 1, wanted 2 (keys and values)"
            )
        return paged_kv_cache.unbind(1)  # type: ignore[return-value]
    if not isinstance(paged_kv_cache, tuple | list):
        raise TypeError(f"{op}: paged_kv_cache: got {type(paged_kv_cache).__name__}, wanted Tensor or a pair of them")
    if len(paged_kv_cache) != 2:
        raise ValueError(f"{op}: paged_kv_cache: got {len(paged_kv_cache)} tensors, wanted 1 or 2")
    k, v = paged_kv_cache
    check_dims(op, "k_cache", k, 4)
    check_dims(op, "v_cache", v, 4)
    return k, v


def rows_of(x: torch.Tensor) -> torch.Tensor:
    """``x`` with rows as kernels read them, copied where it has others: contiguous, on CUDA at multiples of 16 bytes."""
    # An address cannot be traced: in a graph, rows that start elsewhere are the operator's error.
    aligned = x.is_cpu or is_compiling() or x.data_ptr() % 16 == 0
    if aligned and x.is_contiguous():
        return x
    if x.is_cpu:
        return x if x.stride(-1) == 1 else x.contiguous()
    if aligned and x.stride(-1) == 1:
        size = x.element_size()
        steps = [stride * size % 16 for n, stride in zip(x.shape[:-1], x.stride()[:-1], strict=True) if n > 1]
        if not any(steps):
            return x
    return x.clone(memory_format=torch.contiguous_format)


class Logits(NamedTuple):
    """How a product of a query and a key becomes a logit."""

    pos_encoding_mode: int
    window_left: int
    logits_soft_cap: float
    sm_scale: float
    rope_scale: float
    rope_theta: float


def logits_of(
    op: str,
    head_dim: int,
    pos_encoding_mode: str,
    window_left: int,
    logits_soft_cap: float | None,
    sm_scale: float | None,
    rope_scale: float | None,
    rope_theta: float | None,
) -> Logits:
    """The arguments of those names with their defaults, checked."""
    mode = POS_ENCODINGS.get(pos_encoding_mode)
    if mode is None:
        known = ", ".join(POS_ENCODINGS)
        raise ValueError(f"{op}: pos_encoding_mode: got {pos_encoding_mode!r}, wanted one of {known}")
    cap = 0.0 if logits_soft_cap is None else _finite(op, "logits_soft_cap", logits_soft_cap)
    factor = max(head_dim, 1) ** -0.5 if sm_scale is None else _finite(op, "sm_scale", sm_scale)
    scale = 1.0 if rope_scale is None else _positive(op, "rope_scale", rope_scale)
    theta = 1e4 if rope_theta is None else _positive(op, "rope_theta", rope_theta)
    return Logits(mode, int(window_left), cap if cap > 0 else 0.0, factor, scale, theta)


def _finite(op: str, name: str, value: float) -> float:
    number = float(value)
    if not abs(number) <= sys.float_info.max:  # math.isfinite() cannot be traced, and inf is not looked at there
        raise ValueError(f"{op}: {name}: got {number}, wanted a finite number")
    return number


def _positive(op: str, name: str, value: float) -> float:
    number = float(value)
    if not 0 < number <= sys.float_info.max:
        raise ValueError(f"{op}: {name}: got {number}, wanted a positive number")
    return number


@cache
def _cpu_slopes(num_qo_heads: int) -> torch.Tensor:
    return get_alibi_slopes(num_qo_heads)


def slopes_of(logits: Logits, num_qo_heads: int, device: torch.device) -> torch.Tensor | None:
    """ALiBi's slopes, where they are wanted.

    On CUDA they are computed there, each time anew: a copy from the host cannot be captured into a graph, and what is
    allocated while one is captured, or warmed up, belongs to the graph's memory.
    """
    if logits.pos_encoding_mode != 2:
        return None
    if device.type == "cpu" and not is_dynamo_compiling():
        return _cpu_slopes(num_qo_heads)
    whole = 1
    while 2 * whole <= num_qo_heads:
        whole *= 2
    number = torch.arange(1, num_qo_heads + 1, device=device, dtype=torch.float32)
    return torch.exp2(torch.where(number <= whole, number * 2, (number - whole) * 2 - 1) * (-4 / whole))


def own_parameters(
    logits: Logits,
    num_qo_heads: int,
    device: torch.device,
    factor: float = 1.0,
    numbers: torch.Tensor | None = None,
) -> tuple[torch.Tensor | None, torch.Tensor | None, float, float]:
    """The parameters of the library's own variants, in their order: slopes, ``numbers``, scale of the products, cap.

    ``numbers``: see :func:`flashinfer._ops.route.numbers_of`.
    """
    return slopes_of(logits, num_qo_heads, device), numbers, logits.sm_scale * factor, logits.logits_soft_cap


def scaled_query(
    op: str, q: torch.Tensor, num_kv_heads: int, q_scale: Scale, k_scale: Scale
) -> tuple[torch.Tensor, float]:
    """``q`` and a factor of the logits that together stand for both scales.

    A number is a factor. A tensor on a device is multiplied into the query instead: nothing is read back. In a graph one
    of a single element is a factor too, of ``numbers_of()``.
    """
    factor: Any = 1.0
    for name, scale, heads in (("q_scale", q_scale, q.shape[-2]), ("k_scale", k_scale, num_kv_heads)):
        number = _number(op, name, scale, heads, q.device)
        if isinstance(number, float):
            factor *= number
        elif is_dynamo_compiling() and number.dim() == 0:
            factor = number.to(q.device, torch.float64) * factor
        else:
            per_head = number.repeat_interleave(q.shape[-2] // max(heads, 1)) if number.dim() else number
            q = (q * per_head.to(q.device, torch.float32).unsqueeze(-1)).to(q.dtype)
    return q, factor


def _number(op: str, name: str, scale: Scale, heads: int, device: torch.device) -> float | torch.Tensor:
    if scale is None:
        return 1.0
    if not isinstance(scale, torch.Tensor):
        number = float(scale)
        # A product of numbers would be compiled into the graph by torch 2.11, and so would an operator's argument.
        return as_tensor(number, device) if is_dynamo_compiling() and is_symbolic(number) else number
    if scale.numel() == 1:
        return float(scale) if scale.device.type == "cpu" and not is_dynamo_compiling() else scale.reshape(())
    if tuple(scale.shape) != (heads,):
        raise ValueError(f"{op}: {name}: got shape {list(scale.shape)}, wanted one number or [{heads}]")
    return scale


def value_scale(
    op: str, v_scale: Scale, num_qo_heads: int, num_kv_heads: int, device: torch.device
) -> tuple[float, Callable[[torch.Tensor], None] | None]:
    """The factor that the output gets in the kernel, and what is left to be done to it afterwards."""
    number = _number(op, "v_scale", v_scale, num_kv_heads, device)
    if isinstance(number, float):
        return number, None
    per_head = number.repeat_interleave(num_qo_heads // max(num_kv_heads, 1)) if number.dim() else number

    def multiply(out: torch.Tensor) -> None:
        out.copy_(out * per_head.to(out.device, torch.float32).unsqueeze(-1))

    return 1.0, multiply


def operators_of_module(op: str, jit_module: Any) -> Operators:
    """The operators of what ``JitSpec.build_and_load()`` returned for a user's variant."""
    if not (hasattr(jit_module, "run") and hasattr(jit_module, "plan")):
        raise TypeError(f"{op}: jit_module: got {type(jit_module).__name__}, wanted what build_and_load() returns")
    return _operators(jit_module, 0, custom=True)
