"""Collectives between GPUs of one host, and names of FlashInfer that engines import without a guard.

The submodules ``allreduce`` and ``workspace`` have the all-reduce, also fused with residual, RMSNorm and FP8
quantisation. This package does not export ``allreduce_fusion`` and ``create_allreduce_fusion_workspace`` yet, because
engines would then use fusion, and the kernels have not run on several GPUs. Other functions of FlashInfer 0.2.7 raise
``UnsupportedError``. Enumerations have FlashInfer's values.
"""

from __future__ import annotations

from . import mnnvl, trtllm_ar, vllm_ar

# FlashInfer also has every name of the submodules here.
for _module in (mnnvl, trtllm_ar, vllm_ar):
    globals().update({name: getattr(_module, name) for name in _module.__all__})

__all__ = sorted([*mnnvl.__all__, *trtllm_ar.__all__, *vllm_ar.__all__])
