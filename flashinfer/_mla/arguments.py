"""Arguments of MLA's plans and runs that later FlashInfer releases added: forms of inputs, scales and the lse."""

from __future__ import annotations

from typing import NamedTuple

import torch

from .._ops.arguments import all_or_none, check_as_planned, check_items, check_none, check_not_both, check_present
from .._ops.dtypes import dtype_of
from .._ops.errors import called, value_error
from .._ops.numbers import check_option, positive_real
from .._ops.tensors import check_dims, check_tensor
from ..errors import UnsupportedError
from ..jit.modules.mla import HEAD_DIM_CKV, NUM_SCALES

MOST_SCALE = 1e30  # a product of two scales is a float32
_LSE_MODES = (None, "none", "base2", "basee")
_LAYOUTS = (None, "split", "packed")
_SCALE_MODES = (None, "default", "kv-per-tensor")
_EXACTLY_ONE = (
    "one scale. Exactly one of ckv_scale or ckv_scale_arr goes with kpe_scale, or kv_scale is given, for a cache"
    " of 8 bits"
)


class Options(NamedTuple):
    """Options of a plan that its runs must keep to. ``None`` leaves a choice to each run."""

    lse_mode: str | None = None
    use_sinks: bool | None = None

    def check_run(self, op: str, lse_mode: str, has_sinks: bool) -> None:
        """Check that a run computes the planned lse, and has sinks as planned."""
        if self.lse_mode is not None:
            check_as_planned(op, "lse_mode", lse_mode, self.lse_mode)
        if self.use_sinks is not None:
            check_as_planned(op, "sinks", has_sinks, self.use_sinks)


class Scales(NamedTuple):
    """Scales of a cache: of all latents, of rotary keys by that of latents, and of groups of latents."""

    ckv: float = 1.0
    kpe_by_ckv: float = 1.0
    ckv_arr: torch.Tensor | None = None


UNPLANNED, UNSCALED = Options(), Scales()


def options_of(
    op: str,
    q_data_type: torch.dtype | str,
    lse_mode: str | None,
    use_sinks: bool | None,
    output_dtype: torch.dtype | str | None,
    scale_mode: str | None,
    layouts: dict[str, str | None],
    **tables: object,
) -> Options:
    """Return the checked options of a plan.

    Args:
        layouts: ``query_layout`` and ``kv_cache_layout``. A run may pass either form.
        tables: tables of another form. The library reads those of :class:`BatchMLAPagedAttentionWrapper`.

    Raises:
        ValueError: an option that does not exist.
        UnsupportedError: another output dtype, or other tables.
    """
    check_option(op, "lse_mode", lse_mode, _LSE_MODES)
    check_option(op, "scale_mode", scale_mode, _SCALE_MODES)
    check_option(op, "use_sinks", use_sinks, (None, False, True))
    for name, layout in layouts.items():
        check_option(op, name, layout, _LAYOUTS)
    if output_dtype is not None and dtype_of(op, "output_dtype", output_dtype) != dtype_of(
        op, "q_data_type", q_data_type
    ):
        raise UnsupportedError(f"{op}: output_dtype: got {output_dtype}, wanted {q_data_type} as queries have")
    for name, table in tables.items():
        if table is not None:
            wanted = "None: pass qo_indptr, kv_indptr, kv_indices and kv_len_arr"
            raise UnsupportedError(f"{op}: {name}: got {type(table).__name__}, wanted {wanted}")
    return Options(lse_mode, use_sinks)


def refuse(op: str, **arguments: object) -> None:
    """Refuse arguments that only other libraries' kernels serve."""
    for name, value in arguments.items():
        if value is not None:
            raise UnsupportedError(f"{called(op)}: {name}: got {type(value).__name__}, wanted None")


def parts_of(
    op: str,
    names: tuple[str, str, str],
    joined: torch.Tensor | tuple[torch.Tensor, torch.Tensor] | None,
    first: torch.Tensor | None,
    second: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the latent and the rotary part of an input.

    Args:
        names: names of the joined form and of the two parts.
        joined: a pair of the parts, or one tensor that has both in its last dimension.
        first, second: the parts. Exactly one form is given.
    """
    if joined is None:
        return check_present(op, names[1], first, "a tensor"), check_present(op, names[2], second, "a tensor")
    for name, part in zip(names[1:], (first, second), strict=True):
        check_none(op, name, part, f"{names[0]} has it")
    if isinstance(joined, torch.Tensor):
        check_dims(op, names[0], joined, 3)
        return joined[..., :HEAD_DIM_CKV], joined[..., HEAD_DIM_CKV:]
    check_items(op, names[0], joined, "its two parts", 2)
    return joined


def scales_of(
    op: str,
    dtype: torch.dtype,
    ckv_cache: torch.Tensor,
    eight_bits: bool,
    ckv_scale: float | None,
    ckv_scale_arr: torch.Tensor | None,
    kpe_scale: float | None,
    kv_scale: float | None,
) -> Scales:
    """Return the checked scales of a cache. ``dtype``: of queries."""
    if kv_scale is not None:
        check_not_both(op, "kv_scale", kv_scale, "ckv_scale and kpe_scale", ckv_scale)
        check_not_both(op, "kv_scale", kv_scale, "ckv_scale_arr and kpe_scale", ckv_scale_arr)
        check_not_both(op, "kv_scale", kv_scale, "ckv_scale and kpe_scale", kpe_scale)
        return Scales(positive_real(op, "kv_scale", kv_scale, MOST_SCALE))
    if not eight_bits:
        for name, scale in dict(ckv_scale=ckv_scale, ckv_scale_arr=ckv_scale_arr, kpe_scale=kpe_scale).items():
            check_none(op, name, scale, "the cache is not 8-bit")
        return UNSCALED
    if (ckv_scale is None) == (ckv_scale_arr is None):
        raise value_error(op, "ckv_scale", None if ckv_scale is None else "both", _EXACTLY_ONE)
    if ckv_scale_arr is None:
        all_or_none(op, ckv_scale=ckv_scale, kpe_scale=kpe_scale)
        ckv = positive_real(op, "ckv_scale", ckv_scale, MOST_SCALE)
        return Scales(ckv, positive_real(op, "kpe_scale", kpe_scale, MOST_SCALE) / ckv)
    all_or_none(op, ckv_scale_arr=ckv_scale_arr, kpe_scale=kpe_scale)
    check_tensor(op, "ckv_scale_arr", ckv_scale_arr)
    if dtype != torch.bfloat16:
        raise value_error(op, "ckv_scale_arr", f"a tensor for {dtype} queries", "q_data_type=torch.bfloat16")
    wanted = (*ckv_cache.shape[:2], NUM_SCALES)
    if ckv_scale_arr.shape != wanted:
        raise value_error(op, "ckv_scale_arr", f"shape {list(ckv_scale_arr.shape)}",
                          f"{list(wanted)}. Invalid shape of ckv_scale_arr")  # fmt: skip
    return Scales(1.0, positive_real(op, "kpe_scale", kpe_scale, MOST_SCALE), ckv_scale_arr)
