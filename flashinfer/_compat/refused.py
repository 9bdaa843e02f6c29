"""Names that engines import without a guard, for hardware or machines without kernels in this library.

An engine looks for a package called ``flashinfer`` and then imports such names on every GPU and for every
model. The import succeeds, and a call raises :class:`flashinfer.errors.UnsupportedError`. Names that engines
import with a guard are missing, so the engine takes another path.

``REFUSED`` lists every such name. Its module calls ``declare(globals())``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NoReturn

from ..errors import UnsupportedError


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

# Module of this package -> why its names are refused, and the names. A capital letter marks a class.
REFUSED: dict[str, tuple[Reason, tuple[str, ...]]] = {
    "decode": (TRTLLM_GEN, ("trtllm_batch_decode_with_kv_cache_mla",)),
    "fp4_quantization": (
        FP4,
        (
            "block_scale_interleave",
            "fp4_quantize",
            "fp4_swizzle_blockscale",
            "mm_mxfp8",
            "mxfp8_quantize",
            "nvfp4_block_scale_interleave",
            "nvfp4_quantize",
            "nvfp4_quantize_append_paged_kv_cache_with_slot_mapping",
            "scaled_fp4_grouped_quantize",
            "shuffle_matrix_a",
            "shuffle_matrix_sf_a",
            "silu_and_mul_scaled_nvfp4_experts_quantize",
        ),
    ),
    "fused_moe.core": (
        TRTLLM_MOE,
        (
            "_maybe_get_cached_w3_w1_permute_indices",
            "convert_to_block_layout",
            "get_w2_permute_indices_with_cache",
            "trtllm_fp4_block_scale_moe",
            "trtllm_fp4_block_scale_routed_moe",
            "trtllm_mxint4_block_scale_moe",
        ),
    ),
    "mla": (TRTLLM_GEN, ("trtllm_batch_decode_with_kv_cache_mla",)),
    "prefill": (TRTLLM_GEN, ("trtllm_batch_context_with_kv_cache",)),  # vLLM imports it from there
    "utils": (TRTLLM_GEN, ("FP4Tensor",)),  # vLLM imports it with its attention backend on every GPU
}


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


def declare(module: dict[str, Any]) -> list[str]:
    """Put the refused names of a module into its globals. Return the public ones, for ``__all__``."""
    place = module["__name__"]
    reason, names = REFUSED[place.removeprefix("flashinfer.")]
    for name in names:
        made = kind(name, reason) if name[0].isupper() else function(name, reason)
        made.__module__ = place
        module[name] = made
    return [name for name in names if name[0] != "_"]
