"""Names that engines import without a guard, for hardware or machines without kernels in this library.

An engine looks for a package called ``flashinfer`` and then imports such names on every GPU and for every
model. The import succeeds, and a call raises :class:`flashinfer.errors.UnsupportedError`. Names that engines
import with a guard are missing, so the engine takes another path.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, NoReturn

from .errors import UnsupportedError


@dataclass(frozen=True)
class Reason:
    """A missing requirement of a name, and its replacement for callers."""

    needs: str
    instead: str

    def __str__(self) -> str:
        return f"needs {self.needs}, which this library does not have; {self.instead}"


FP4 = Reason("tensor cores for 4-bit and block-scaled types (SM100 or newer)", "use bfloat16, float16 or fp8 weights")
TRTLLM_GEN = Reason(
    "TensorRT-LLM's prebuilt kernels (SM100 or newer)",
    "use BatchDecodeWithPagedKVCacheWrapper and BatchPrefillWithPagedKVCacheWrapper",
)
TRTLLM_MOE = Reason("TensorRT-LLM's prebuilt kernels (SM100 or newer)", "use torch's products for the experts")
SEVERAL_GPUS = Reason("kernels that span several GPUs", "use torch.distributed")


def function(name: str, reason: Reason) -> Callable[..., NoReturn]:
    """Return a function of this name that raises ``UnsupportedError``."""

    def call(*args: Any, **kwargs: Any) -> NoReturn:
        raise UnsupportedError(f"{name}: {reason}")

    call.__name__ = call.__qualname__ = name
    call.__doc__ = f"Raise ``UnsupportedError``: it {reason}."
    return call


def kind(name: str, reason: Reason) -> type:
    """Return a class of this name that can be subclassed but not instantiated."""

    def __new__(cls: type, *args: Any, **kwargs: Any) -> NoReturn:
        raise UnsupportedError(f"{cls.__name__}: {reason}")

    members: dict[str, Any] = {
        "__new__": __new__,
        "__doc__": f"Raise ``UnsupportedError`` when instantiated: it {reason}.",
    }
    if name.endswith("Wrapper"):  # FlashInfer's tests wrap the methods of the class
        members |= {method: function(f"{name}.{method}", reason) for method in ("plan", "run")}
    return type(name, (), members)


def declare(
    module: dict[str, Any], reason: Reason, functions: Iterable[str] = (), classes: Iterable[str] = ()
) -> list[str]:
    """Put such functions and classes into a module's globals. Return their names, sorted, for ``__all__``."""
    made: dict[str, Any] = {name: function(name, reason) for name in functions}
    made |= {name: kind(name, reason) for name in classes}
    for name, what in made.items():
        what.__module__ = module["__name__"]
        module[name] = what
    return sorted(made)


# vLLM imports it from flashinfer.prefill.
trtllm_batch_context_with_kv_cache = function("trtllm_batch_context_with_kv_cache", TRTLLM_GEN)
