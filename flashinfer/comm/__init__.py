"""Communication between GPUs: FlashInfer's names, so that engines which import them keep what else is here.

This library has no kernels that span several GPUs yet. Every function and class here raises ``UnsupportedError`` when it is
called or made; enumerations hold their values. Engines reduce over ``torch.distributed`` then.
"""

from __future__ import annotations

from .. import _unsupported
from . import mnnvl, trtllm_alltoall, trtllm_ar, vllm_ar

# Every name of the submodules is found here too, as in FlashInfer.
for _module in (mnnvl, trtllm_alltoall, trtllm_ar, vllm_ar):
    globals().update({name: getattr(_module, name) for name in _module.__all__})

__all__ = sorted([
    *_unsupported.declare(
        globals(),
        _unsupported.SEVERAL_GPUS,
        functions=(
            "allreduce_fusion",
            "create_allreduce_fusion_workspace",
            "create_shared_buffer",
            "free_shared_buffer",
            "pack_strided_memory",
        ),
        classes=("CudaRTLibrary", "Mapping"),
    ),
    *mnnvl.__all__,
    *trtllm_alltoall.__all__,
    *trtllm_ar.__all__,
    *vllm_ar.__all__,
])  # fmt: skip
