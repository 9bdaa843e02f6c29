"""Collectives between GPUs of one host, and names of FlashInfer that engines import without a guard.

``create_allreduce_fusion_workspace`` makes the memory that ranks share. ``allreduce_fusion`` is the all-reduce, alone or
with residual, RMSNorm and FP8 quantisation. ``reduce_scatter`` and ``all_gather`` are its halves. ``MoeAlltoAll`` moves
tokens between the ranks of their experts. Functions of FlashInfer 0.2.7 call them. Enumerations have FlashInfer's values.
"""

from __future__ import annotations

from . import allreduce, alltoall, cuda_ipc, mapping, mnnvl, shares, trtllm_ar, vllm_ar, workspace

# FlashInfer also has every name of the submodules here.
_modules = (allreduce, alltoall, cuda_ipc, mapping, mnnvl, shares, trtllm_ar, vllm_ar, workspace)
globals().update({name: getattr(module, name) for module in _modules for name in module.__all__})

__all__ = sorted(name for module in _modules for name in module.__all__)
