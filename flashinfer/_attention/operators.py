"""Operators of attention modules. A module is loaded or built once per process."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch

from .._ops.configured import load_configured, with_fakes
from .._ops.errors import called, check_one_device, raise_from_module
from ..errors import FlashInferError
from ..jit.module import JitSpec
from ..jit.modules._attention import POS_ENCODINGS as POS_ENCODING_MODES
from ..jit.modules._attention import (
    VARIANTS,
    attention_spec,
    dtypes_value,
    head_dims_value,
    variant_bits,
    variant_value,
)
from ..jit.spec import BACKENDS
from .signature import CallArguments, Parameters

_VARIANTS = {variant_bits(name): name for name in VARIANTS}
_NUMBERS = {
    (mode, capped): variant_bits(variant_value(mode, capped)) for mode in POS_ENCODING_MODES for capped in (False, True)
}


@dataclass(frozen=True)
class Operators:
    """Operators of one configuration's module, and the properties that calls need."""

    run: Callable[..., None]
    plan: Callable[..., None]
    namespace: Any
    variant: int = 0
    custom: bool = False  # a user's variant with parameters of its own
    module: str = ""  # name of the namespace
    kernels: str = ""  # "cpu", "cuda", or an architecture as "sm90a"
    profiler: bool = False  # kernels write events

    @property
    def traced(self) -> bool:
        """True if graphs use one operator for all modules."""
        return not (self.custom or self.profiler)


@cache
def builtin_operators(
    family: str,
    backend: str,
    dtypes: tuple[torch.dtype, torch.dtype, torch.dtype],
    head_dims: tuple[int, int],
    variant: int,
    kernels: str = "",
    profiler: bool = False,
) -> Operators:
    """Return the operators of a builtin variant by its number, see :func:`number_of_variant`.

    Args:
        kernels: the family's kernels on ``backend``, see kernels.py. By default the portable ones.
        profiler: select kernels that write events.
    """
    if backend not in BACKENDS:
        raise ValueError(f"device: got a tensor on {backend}, wanted one on {' or '.join(BACKENDS)}")
    values = dtypes_value(*dtypes, kernels or backend), head_dims_value(*head_dims, backend)
    namespace = load_configured(
        attention_spec(family, kernels or backend, *values, _VARIANTS[variant], profiler=profiler)
    )
    return replace(_operators(namespace, variant, custom=False), kernels=kernels or backend, profiler=profiler)


# Public names of the arguments that select a module: for plan(), for one request, and for a batch without a plan.
_PLAN_NAMES = {
    "dtype_q": "q_data_type", "dtype_kv": "kv_data_type", "dtype_o": "o_data_type", "device": "float_workspace_buffer",
}  # fmt: skip
_CALL_NAMES = {"dtype_q": "q", "dtype_kv": "k", "dtype_o": "o_dtype", "device": "q"}
BATCH_NAMES = {"dtype_q": "query", "dtype_kv": "kv_cache", "dtype_o": "out", "device": "query"}


def public_error(op: str, err: ValueError, names: Mapping[str, str] | None = None) -> ValueError:
    """Return an error of the selection of modules that names the public function and its argument."""
    public = called(op)
    if isinstance(err, FlashInferError) or str(err).startswith((op, public)):
        return err
    argument, colon, rest = str(err).partition(":")
    names = names or (_PLAN_NAMES if op.endswith(".plan") else _CALL_NAMES)
    return ValueError(f"{public}: {names.get(argument, argument)}{colon}{rest}")


def number_of_variant(pos_encoding_mode: int, use_logits_soft_cap: bool) -> int:
    """Return the operators' number of a builtin variant."""
    return _NUMBERS[pos_encoding_mode, use_logits_soft_cap]


def mode_of_variant(variant: int) -> tuple[int, bool]:
    """Invert :func:`number_of_variant`: return pos_encoding_mode and use_logits_soft_cap."""
    return next(what for what, number in _NUMBERS.items() if number == variant)


@cache
def custom_operators(spec: JitSpec) -> Operators:
    """Return the operators of a custom variant."""
    return _operators(load_configured(spec), 0, custom=True)


def _operators(namespace: Any, variant: int, custom: bool) -> Operators:
    with_fakes(namespace, _FAKES)
    run, plan = namespace.run.default, namespace.plan.default._op  # Dynamo does not trace the inner operator
    return Operators(run, plan, namespace, variant, custom, namespace.name)


# Arguments of ``run`` of the builtin variants.
_RUN = ("q", "k", "v", "out", "lse", *CallArguments._fields, *Parameters._fields)


def _fake_run(*args: Any) -> None:
    """Return nothing. The operator writes to its arguments."""
    check_one_device("attention", _RUN, args)


def _refuse_meta(q: torch.Tensor) -> None:
    """Refuse plain meta tensors in bound calls. Fake tensors, which are a subclass, pass."""
    if type(q) is torch.Tensor:
        raise ValueError(f"{called('attention')}: q: got a tensor on meta, wanted one where the plan's tables are")


def _fake_run_bound(q: torch.Tensor, *args: Any) -> None:
    _fake_run(q, *args)
    _refuse_meta(q)


def _fake_out(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor | None, *_: Any) -> torch.Tensor:
    _fake_run(q, k, v)
    _refuse_meta(q)
    return q.new_empty((*q.shape[:-1], (k if v is None else v).shape[-1]))


def _fake_out_and_lse(q: torch.Tensor, *args: Any) -> tuple[torch.Tensor, torch.Tensor]:
    return _fake_out(q, *args), q.new_empty(q.shape[:-1], dtype=torch.float32)


_FAKES: dict[str, Callable[..., Any]] = {
    "run": _fake_run,
    "plan": lambda *_: None,
    "bind": lambda *_: None,
    "rebind": lambda *_: None,
    "unbind": lambda *_: None,
    "stream_of": lambda *_: -1,
    "run_bound": _fake_out,
    "run_bound_lse": _fake_out_and_lse,
    "run_bound_out": _fake_run_bound,
}


def call(op: str, run: Callable[..., None], *args: Any) -> None:
    """Call an operator. An error of the caller becomes a ``ValueError`` or ``TypeError``."""
    try:
        run(*args)
    except RuntimeError as err:
        if "is missing value for argument" in str(err) or "argument(s) but received" in str(err):
            text = str(err).split(" Declaration:")[0]
            raise TypeError(f"{op}: the call's arguments do not match the variant's parameters: {text}") from None
        schema = getattr(run, "_schema", None)  # the inner operator of a plan has no schema
        names = [argument.name for argument in schema.arguments] if schema else [""] * len(args)
        raise_from_module(op, names, args, err)


def operators_of_module(op: str, jit_module: Any) -> Operators:
    """Return the operators of a custom variant from the result of ``JitSpec.build_and_load()``."""
    if not (hasattr(jit_module, "run") and hasattr(jit_module, "plan")):
        raise TypeError(f"{op}: jit_module: got {type(jit_module).__name__}, wanted the result of build_and_load()")
    return _operators(jit_module, 0, custom=True)
