"""Communication between GPUs: names of FlashInfer that engines import without a guard.

This library has no kernels that span several GPUs yet. So the names by which engines decide are missing:
``allreduce_fusion``, ``create_allreduce_fusion_workspace``, the exchange of tokens between experts' ranks.
Engines then use their own kernels. Functions of 0.2.7 raise ``UnsupportedError``. Enumerations have
FlashInfer's values.
"""

from __future__ import annotations

from . import mnnvl, trtllm_ar, vllm_ar

# FlashInfer also has every name of the submodules here.
for _module in (mnnvl, trtllm_ar, vllm_ar):
    globals().update({name: getattr(_module, name) for name in _module.__all__})

__all__ = sorted([*mnnvl.__all__, *trtllm_ar.__all__, *vllm_ar.__all__])
