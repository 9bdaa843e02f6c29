"""Modules of the decode family: one query token for each request."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from ..module import JitSpec
from . import Matrix, device_of
from ._attention import (
    AXES as AXES,
)
from ._attention import (
    attention_aot_specs,
    attention_spec,
    check_index_dtype,
    customize_spec,
    dtypes_value,
    head_dims_value,
    variant_value,
)


def gen_single_decode_module(
    dtype_q: object,
    dtype_kv: object,
    dtype_o: object,
    head_dim_qk: int,
    head_dim_vo: int,
    pos_encoding_mode: int = 0,
    use_sliding_window: bool = False,
    use_logits_soft_cap: bool = False,
    device: object = None,
) -> JitSpec:
    """Return the decode module of one configuration. It serves single requests and batches.

    ``use_sliding_window`` has no effect, because a window is a run-time value. ``device`` is ``cpu`` or
    ``cuda``. The default is ``cuda`` if a GPU is visible.

    Raises:
        ValueError: there are no kernels for the device, a dtype, a size or the mode.
    """
    backend = device_of(device)
    return attention_spec(
        "decode",
        backend,
        dtypes_value(dtype_q, dtype_kv, dtype_o, backend),
        head_dims_value(head_dim_qk, head_dim_vo, backend),
        variant_value(pos_encoding_mode, use_logits_soft_cap),
    )


def gen_batch_decode_module(
    dtype_q: object,
    dtype_kv: object,
    dtype_o: object,
    dtype_idx: object,
    head_dim_qk: int,
    head_dim_vo: int,
    pos_encoding_mode: int = 0,
    use_sliding_window: bool = False,
    use_logits_soft_cap: bool = False,
    device: object = None,
) -> JitSpec:
    """Check that indices are int32, and return the module of :func:`gen_single_decode_module`."""
    check_index_dtype("dtype_idx", dtype_idx)
    return gen_single_decode_module(
        dtype_q, dtype_kv, dtype_o, head_dim_qk, head_dim_vo, pos_encoding_mode, use_sliding_window,
        use_logits_soft_cap, device,
    )  # fmt: skip


def gen_customize_single_decode_module(
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
    device: object = None,
) -> JitSpec:
    """Return the decode module of a user's variant, see ``include/flashinfer/attention/variant.h``.

    Args:
        uri: the module's name, a C++ identifier.
        additional_tensor_names, additional_tensor_dtypes: parameters ``const T* name`` of the variant, with
            C++ types (``float``, ``int32_t``, ``uint8_t``, ``half``, ``nv_bfloat16``, ...). A tensor whose
            name starts with ``maybe`` may be ``None`` in a call.
        additional_scalar_names, additional_scalar_dtypes: parameters by value, ``double`` or ``int64_t``.
        variant_name, variant_decl: the functor's name, and its C++ text or the path of a header that has it.
        use_sliding_window, use_logits_soft_cap: no effect, because the variant decides.
        device: ``cpu`` or ``cuda``. The default is ``cuda`` if a GPU is visible.

    Raises:
        ValueError: invalid names, types or sizes.
    """
    backend = device_of(device)
    return customize_spec(
        "decode",
        backend,
        uri,
        dtypes_value(dtype_q, dtype_kv, dtype_o, backend),
        head_dims_value(head_dim_qk, head_dim_vo, backend),
        (additional_tensor_names, additional_tensor_dtypes),
        (additional_scalar_names, additional_scalar_dtypes),
        variant_name,
        variant_decl,
        pos_encoding_mode,
    )


def gen_customize_batch_decode_module(
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
    device: object = None,
) -> JitSpec:
    """Check that indices are int32, and return the module of :func:`gen_customize_single_decode_module`."""
    check_index_dtype("idtype", idtype)
    return gen_customize_single_decode_module(
        uri, dtype_q, dtype_kv, dtype_o, head_dim_qk, head_dim_vo, additional_tensor_names, additional_tensor_dtypes,
        additional_scalar_names, additional_scalar_dtypes, variant_name, variant_decl, pos_encoding_mode,
        use_sliding_window, use_logits_soft_cap, device,
    )  # fmt: skip


def aot_specs(matrix: Matrix) -> Iterator[JitSpec]:
    return attention_aot_specs("decode", matrix)
