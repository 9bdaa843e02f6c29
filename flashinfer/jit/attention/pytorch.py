"""Generators and names of attention modules, under FlashInfer's import path.

A URI is the name of a module: ``get_single_decode_uri(...)`` returns ``gen_single_decode_module(...).name``. POD and
``BatchAttention`` have no modules of their own. Their generators return modules of prefill.
"""

from __future__ import annotations

import re
from typing import Any

from ..module import JitSpec
from ..modules import decode, mla, prefill
from ..modules._attention import profiled_spec


def gen_pod_module(
    dtype_q: object,
    dtype_kv: object,
    dtype_o: object,
    head_dim: int,
    pos_encoding_mode_p: int = 0,
    use_sliding_window_p: bool = False,
    use_logits_soft_cap_p: bool = False,
    use_fp16_qk_reduction: bool = False,
    dtype_idx: object = "int32",
    pos_encoding_mode_d: int = 0,
    use_sliding_window_d: bool = False,
    use_logits_soft_cap_d: bool = False,
    device: object = None,
) -> JitSpec:
    """Return the prefill module of POD. Use :func:`gen_batch_decode_module` for its decode module.

    Raises:
        ValueError: prefill or decode has no kernels for the device, a dtype, a size or a mode.
    """
    sizes = (head_dim, head_dim)
    # This call only checks the arguments of decode.
    decode.gen_batch_decode_module(
        dtype_q, dtype_kv, dtype_o, dtype_idx, *sizes, pos_encoding_mode_d, use_sliding_window_d, use_logits_soft_cap_d,
        device,
    )  # fmt: skip
    return prefill.gen_batch_prefill_module(
        "auto", dtype_q, dtype_kv, dtype_o, dtype_idx, *sizes, pos_encoding_mode_p, use_sliding_window_p,
        use_logits_soft_cap_p, use_fp16_qk_reduction, device,
    )  # fmt: skip


def gen_batch_attention_module(
    dtype_q: object,
    dtype_kv: object,
    dtype_o: object,
    dtype_idx: object,
    head_dim_qk: int,
    head_dim_vo: int,
    pos_encoding_mode: int = 0,
    use_profiler: bool = False,
    device: object = None,
) -> JitSpec:
    """Return the module of ``BatchAttention``, which is a module of prefill.

    Raises:
        ValueError: there are no kernels for the device, a dtype, a size or the mode.
    """
    spec = prefill.gen_batch_prefill_module(
        "auto", dtype_q, dtype_kv, dtype_o, dtype_idx, head_dim_qk, head_dim_vo, pos_encoding_mode, device=device
    )
    return profiled_spec(spec, "prefill") if use_profiler else spec


_GENERATORS = {
    name: function
    for names in (vars(decode), vars(prefill), vars(mla), dict(globals()))
    for name, function in names.items()
    if re.fullmatch(r"gen_\w+_module", name)
}
__all__ = sorted([*_GENERATORS, *(f"get_{name[4:-7]}_uri" for name in _GENERATORS if "customize" not in name)])


def __getattr__(name: str) -> Any:
    if name in _GENERATORS:
        return _GENERATORS[name]
    if name in __all__:
        generator = _GENERATORS[f"gen_{name[4:-4]}_module"]
        return lambda *args, **kwargs: generator(*args, **kwargs).name
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
