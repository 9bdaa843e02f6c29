"""Collectives between GPUs of one host, and names of FlashInfer that engines import without a guard.

``create_allreduce_fusion_workspace`` and ``allreduce_fusion`` are the all-reduce, alone or with residual, RMSNorm and
FP8 quantisation. Other functions of FlashInfer 0.2.7 raise ``UnsupportedError``. Enumerations have FlashInfer's
values.
"""

from __future__ import annotations

from . import allreduce, mnnvl, trtllm_ar, vllm_ar, workspace

# FlashInfer also has every name of the submodules here.
for _module in (allreduce, mnnvl, trtllm_ar, vllm_ar, workspace):
    globals().update({name: getattr(_module, name) for name in _module.__all__})

__all__ = sorted([
    *allreduce.__all__, *mnnvl.__all__, *trtllm_ar.__all__, *vllm_ar.__all__, *workspace.__all__
])  # fmt: skip
