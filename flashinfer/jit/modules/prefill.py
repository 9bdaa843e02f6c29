"""Modules of the prefill family: any number of query tokens for each request."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from ..module import JitSpec
from . import Matrix, device_of
from ._attention import (
    AXES as AXES,
)
from ._attention import (
    KERNELS,
    attention_aot_specs,
    attention_spec,
    check_index_dtype,
    customize_spec,
    dtype_name,
    dtypes_value,
    head_dims_value,
    variant_value,
)
from ._family import arch_kernels


def check_kernels(backend: str, of: str = "") -> None:
    """Check that ``backend`` is a known name. Errors begin with ``of``."""
    if backend not in KERNELS:
        raise ValueError(f"{of}backend: got {backend!r}, wanted one of {', '.join(KERNELS)}")


def _kernels(
    backend: str, device: object, dtype_q: object, dtype_kv: object, pos_encoding_mode: int
) -> tuple[str, str]:
    """Return the device of a module, and its kernels. Only ``backend`` selects kernels for one arch."""
    check_kernels(backend)
    kernels = KERNELS[backend]
    if kernels not in arch_kernels("prefill"):
        return (device_of(device),) * 2
    if device is not None and device_of(device) != "cuda":
        raise ValueError(
            f"backend: got {backend!r} for device {str(device)!r}, wanted 'auto' or 'fa2': {backend} is for GPUs"
        )
    if dtype_name(dtype_q, "dtype_q") != dtype_name(dtype_kv, "dtype_kv") or int(pos_encoding_mode) == 1:
        raise ValueError(
            f"backend: got {backend!r} with {dtype_kv} keys, {dtype_q} queries and pos_encoding_mode"
            f" {int(pos_encoding_mode)}, wanted one dtype for both, and another mode than RoPE"
        )
    return "cuda", kernels


def gen_single_prefill_module(
    backend: str,
    dtype_q: object,
    dtype_kv: object,
    dtype_o: object,
    head_dim_qk: int,
    head_dim_vo: int,
    pos_encoding_mode: int = 0,
    use_sliding_window: bool = False,
    use_logits_soft_cap: bool = False,
    use_fp16_qk_reduction: bool = False,
    device: object = None,
) -> JitSpec:
    """Return the prefill module of one configuration, for single requests and batches, ragged and paged.

    Args:
        backend: ``auto`` and ``fa2`` select the portable kernels, ``fa3`` the kernels for 9.0a.
        use_sliding_window, use_fp16_qk_reduction: no effect: a window is a run-time value, and products are
            summed in float32.
        device: ``cpu`` or ``cuda``. The default is ``cuda`` if a GPU is visible.

    Raises:
        ValueError: there are no kernels for the device, a dtype, a size or the mode.
    """
    module_backend, kernels = _kernels(backend, device, dtype_q, dtype_kv, pos_encoding_mode)
    return attention_spec(
        "prefill",
        kernels,
        dtypes_value(dtype_q, dtype_kv, dtype_o, kernels),
        head_dims_value(head_dim_qk, head_dim_vo, module_backend),
        variant_value(pos_encoding_mode, use_logits_soft_cap),
    )


def gen_batch_prefill_module(
    backend: str,
    dtype_q: object,
    dtype_kv: object,
    dtype_o: object,
    dtype_idx: object,
    head_dim_qk: int,
    head_dim_vo: int,
    pos_encoding_mode: int = 0,
    use_sliding_window: bool = False,
    use_logits_soft_cap: bool = False,
    use_fp16_qk_reduction: bool = False,
    device: object = None,
) -> JitSpec:
    """Check that indices are int32, and return the module of :func:`gen_single_prefill_module`."""
    check_index_dtype("dtype_idx", dtype_idx)
    return gen_single_prefill_module(
        backend, dtype_q, dtype_kv, dtype_o, head_dim_qk, head_dim_vo, pos_encoding_mode, use_sliding_window,
        use_logits_soft_cap, use_fp16_qk_reduction, device,
    )  # fmt: skip


def gen_customize_single_prefill_module(
    backend: str,
    uri: str,
    dtype_q: object,
    dtype_kv: object,
    dtype_o: object,
    head_dim_qk: int,
    head_dim_vo: int,
    additional_tensor_names: Sequence[str],
    additional_tensor_dtypes: Sequence[str],
    additional_scalar_names: Sequence[str],
    additional_scalar_dtypes: Sequence[str],
    variant_name: str,
    variant_decl: str | Path,
    pos_encoding_mode: int = 0,
    use_sliding_window: bool = False,
    use_logits_soft_cap: bool = False,
    use_fp16_qk_reduction: bool = False,
    fp8_enabled: bool = False,
    device: object = None,
) -> JitSpec:
    """Return the prefill module of a user's variant. Arguments: see ``gen_customize_single_decode_module``.

    Raises:
        ValueError: invalid names, types or sizes, or ``fp8_enabled``: 8-bit queries support only builtin
            variants.
    """
    module_backend, kernels = _kernels(backend, device, dtype_q, dtype_kv, pos_encoding_mode)
    if fp8_enabled:
        raise ValueError("fp8_enabled: got True, wanted False: 8-bit queries support only builtin variants")
    return customize_spec(
        "prefill",
        kernels,
        uri,
        dtypes_value(dtype_q, dtype_kv, dtype_o, module_backend),
        head_dims_value(head_dim_qk, head_dim_vo, module_backend),
        (additional_tensor_names, additional_tensor_dtypes),
        (additional_scalar_names, additional_scalar_dtypes),
        variant_name,
        variant_decl,
        pos_encoding_mode,
    )


def gen_customize_batch_prefill_module(
    backend: str,
    uri: str,
    dtype_q: object,
    dtype_kv: object,
    dtype_o: object,
    idtype: object,
    head_dim_qk: int,
    head_dim_vo: int,
    additional_tensor_names: Sequence[str],
    additional_tensor_dtypes: Sequence[str],
    additional_scalar_names: Sequence[str],
    additional_scalar_dtypes: Sequence[str],
    variant_name: str,
    variant_decl: str | Path,
    pos_encoding_mode: int = 0,
    use_sliding_window: bool = False,
    use_logits_soft_cap: bool = False,
    use_fp16_qk_reduction: bool = False,
    fp8_enabled: bool = False,
    device: object = None,
) -> JitSpec:
    """Check that indices are int32, and return the module of :func:`gen_customize_single_prefill_module`."""
    check_index_dtype("idtype", idtype)
    return gen_customize_single_prefill_module(
        backend, uri, dtype_q, dtype_kv, dtype_o, head_dim_qk, head_dim_vo, additional_tensor_names,
        additional_tensor_dtypes, additional_scalar_names, additional_scalar_dtypes, variant_name, variant_decl,
        pos_encoding_mode, use_sliding_window, use_logits_soft_cap, use_fp16_qk_reduction, fp8_enabled, device,
    )  # fmt: skip


def aot_specs(matrix: Matrix) -> Iterator[JitSpec]:
    return attention_aot_specs("prefill", matrix)
