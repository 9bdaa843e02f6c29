"""Communication between GPUs: names of FlashInfer that engines import without a guard, or that older ones import.

This library has no kernels that span several GPUs yet, so what engines look for to decide is absent:
``allreduce_fusion``, ``create_allreduce_fusion_workspace``, the exchange of tokens between experts' ranks. Engines then
use their own. Functions of 0.2.7 raise ``UnsupportedError`` when they are called. Enumerations hold their values.
"""

from __future__ import annotations

from . import mnnvl, trtllm_ar, vllm_ar

# Every name of the submodules is found here too, as in FlashInfer.
for _module in (mnnvl, trtllm_ar, vllm_ar):
    globals().update({name: getattr(_module, name) for name in _module.__all__})

__all__ = sorted([*mnnvl.__all__, *trtllm_ar.__all__, *vllm_ar.__all__])
