"""Modules of the mla family: attention over a cache of latents with 512 elements and a rotary key of 64.

A value of the axis ``dtypes`` is one element type, or ``queries:cache`` for two.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace

from ..module import JitSpec
from ..spec import BACKENDS as MODULE_BACKENDS
from ..spec import DTYPES, Scalar
from . import DTYPE_AXIS, PROFILER_AXIS, Matrix, device_of, subset
from ._family import arch_kernels, family_spec, kernels_of

AXES = (DTYPE_AXIS, PROFILER_AXIS)
HEAD_DIM_CKV, HEAD_DIM_KPE = 512, 64
NUM_SCALES = HEAD_DIM_CKV // 128  # scales of a token: one for each group of 128 latents of 8 bits
FP8 = "float8_e4m3fn"  # element type of 8-bit caches. Queries may have any type
FP8_CACHES = ("cpu", "cuda")  # kernels that support 8-bit caches
SCALED = "scaled"  # name of the operators for 8-bit caches with scales per token, on CUDA
# Public name of a backend -> its kernels on a GPU. "": the portable kernels of the device.
BACKENDS = {"auto": "", "fa2": "cuda", "fa3": "sm90a", "cutlass": ""}


def mla_dtypes(kernels: str) -> tuple[str, ...]:
    """Return the element types that some kernels support."""
    return DTYPES if kernels == "cpu" else tuple(dtype for dtype in DTYPES if dtype != "float32")


def dtypes_value(dtype_q: str, dtype_kv: str) -> str:
    """Return the axis value for the element types of queries and cache."""
    return dtype_q if dtype_kv == dtype_q else f"{dtype_q}:{dtype_kv}"


def mla_values(kernels: str, dtypes: Iterable[str]) -> tuple[str, ...]:
    """Return all axis values of some kernels for the element types ``dtypes`` of queries."""
    caches = (FP8,) if kernels in FP8_CACHES else ()
    return tuple(dtypes_value(dtype, cache) for dtype in dtypes for cache in (dtype, *caches))


def operators_of(kernels: str, profiler: bool) -> str:
    """Return ``kernels`` of ``define()``: the suffix of the operators' namespace.

    Kernels for one arch, and kernels that write events, have separate operators.
    """
    arch = "" if kernels in ("", *MODULE_BACKENDS) else kernels
    return "_".join(part for part in (arch, "profiler" if profiler else "") if part)


def mla_spec(
    kernels: str, values: Iterable[str] | None = None, profiler: bool = False, scaled: bool = False
) -> JitSpec:
    """Return the module of ``cpu``, ``cuda`` or ``sm90a`` kernels, for some values of the axis or all.

    Args:
        profiler: the kernels write events. Their operators have a separate namespace.
        scaled: the kernels multiply latents of 8 bits by scales per token. On ``cuda`` this is a separate module with
            a separate namespace, built on first use. ``cpu`` kernels always support such scales.
    """
    known = (dtypes_value("bfloat16", FP8),) if scaled else mla_values(kernels, mla_dtypes(kernels))
    values = known if values is None else subset("dtypes", values, known)
    config: dict[str, Scalar] = {"PROFILER": profiler, "SCALED": scaled, "dtypes": "T:KV"}
    variant = SCALED if scaled else "profiler" if profiler else ""
    spec = family_spec("mla", kernels, variant=variant, config=config, coverage={"dtypes": values})
    operators = operators_of(SCALED if scaled else kernels, profiler)
    return replace(spec, namespace="_".join(filter(None, ("flashinfer", operators))), split=True)


def check_head_dims(head_dim_ckv: int, head_dim_kpe: int, of: str = "", ckv_name: str = "head_dim_ckv") -> None:
    """Check that the sizes are 512 and 64, as in DeepSeek's models, or 512 and 0, without rotary keys.

    Errors begin with ``of``.
    """
    if head_dim_ckv != HEAD_DIM_CKV:
        raise ValueError(f"{of}{ckv_name}: got {head_dim_ckv}, wanted {HEAD_DIM_CKV}")
    if head_dim_kpe not in (HEAD_DIM_KPE, 0):
        raise ValueError(f"{of}head_dim_kpe: got {head_dim_kpe}, wanted {HEAD_DIM_KPE} or 0")


def check_backend(backend: str, of: str = "") -> None:
    """Check ``backend`` of a public function. FlashInfer's ``cutlass`` is accepted and means ``auto``."""
    if backend not in BACKENDS:
        raise ValueError(f"{of}backend: got {backend!r}, wanted one of {', '.join(BACKENDS)}")


def gen_batch_mla_module(
    backend: str,
    dtype_q: object,
    dtype_kv: object,
    dtype_o: object,
    dtype_idx: object,
    head_dim_ckv: int,
    head_dim_kpe: int,
    use_profiler: bool = False,
    device: object = None,
) -> JitSpec:
    """Return the module of ``BatchMLAPagedAttentionWrapper`` for one element type.

    Args:
        backend: ``fa3`` selects the kernels for 9.0a, every other value the portable kernels.
        dtype_q, dtype_o: must be equal.
        dtype_kv: equal to ``dtype_q``, or float8_e4m3fn. For 8-bit caches, ``fa3`` also uses the portable kernels.
        dtype_idx: int32.
        head_dim_ckv, head_dim_kpe: 512, and 64 or 0. Both have the same kernels.
        use_profiler: the kernels write events for :mod:`flashinfer.profiler`.
        device: ``cpu`` or ``cuda``. The default is ``cuda`` if a GPU is visible.

    Raises:
        ValueError: a configuration without kernels.
    """
    check_backend(backend)
    check_head_dims(head_dim_ckv, head_dim_kpe)
    q, kv, o = (str(dtype).removeprefix("torch.") for dtype in (dtype_q, dtype_kv, dtype_o))
    if o != q or kv not in (q, FP8):
        raise ValueError(f"dtype_q, dtype_kv, dtype_o: got {q}, {kv}, {o}, wanted one for all, or {FP8} of the cache")
    values = (dtypes_value(q, kv),)
    if str(dtype_idx).removeprefix("torch.") != "int32":
        raise ValueError(f"dtype_idx: got {dtype_idx}, wanted int32")
    kernels = BACKENDS[backend]
    if kernels in arch_kernels("mla") and (kv == q or kernels in FP8_CACHES):
        if device is not None and device_of(device) != "cuda":
            raise ValueError(
                f"backend: got {backend!r} for device {str(device)!r}, wanted 'auto' or 'fa2': {backend} is for GPUs"
            )
        return mla_spec(kernels, values, use_profiler)
    return mla_spec(device_of(device), values, use_profiler)


def gen_batch_decode_mla_module(
    dtype_q: object,
    dtype_kv: object,
    dtype_o: object,
    dtype_idx: object,
    head_dim_ckv: int,
    num_qo_heads: int,
    use_sliding_window: bool = False,
    use_logits_soft_cap: bool = False,
    use_tensor_cores: bool = False,
    device: object = None,
) -> JitSpec:
    """Return the module of ``BatchDecodeMlaWithPagedKVCacheWrapper``, from :func:`gen_batch_mla_module`.

    ``num_qo_heads`` and ``use_tensor_cores`` have no effect.

    Raises:
        ValueError: a configuration without kernels, such as a window or a soft cap.
    """
    for name, value in (("use_sliding_window", use_sliding_window), ("use_logits_soft_cap", use_logits_soft_cap)):
        if value:
            raise ValueError(f"{name}: got True, wanted False")
    return gen_batch_mla_module(
        "auto", dtype_q, dtype_kv, dtype_o, dtype_idx, head_dim_ckv, HEAD_DIM_KPE, device=device
    )


def aot_specs(matrix: Matrix) -> Iterator[JitSpec]:
    for kernels in kernels_of("mla", matrix["backends"]):
        dtypes = [dtype for dtype in matrix["dtypes"] if dtype in mla_dtypes(kernels)]
        if dtypes:
            values = mla_values(kernels, dtypes)
            yield from (mla_spec(kernels, values, value == "on") for value in matrix["profiler"])
