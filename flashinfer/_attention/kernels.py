"""Selection of attention's kernels: portable kernels (``fa2``), or kernels for the GPU's arch (``fa3``: 9.0a).

A family has kernels for an arch if ``csrc/<family>_<arch>.cu`` exists. Prefill and decode have kernels for 9.0a. Those
of decode are the portable kernels with merges in the same launch. ``"auto"`` never selects them. As a name of kernels,
``""`` means the portable kernels of the tensors' device, or those of a custom variant.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch
from torch.compiler import is_compiling

from .._ops.configured import has_dispatching_module
from .._ops.dtypes import is_fp8
from ..jit.machine.arch import Arch
from ..jit.modules._attention import (
    COMMON_HEAD_DIMS,
    KERNELS,
    attention_spec,
    dtypes_value,
    head_dims_value,
    variant_value,
)
from ..jit.modules._family import arch_kernels
from ..jit.modules.prefill import check_kernels
from ..jit.probe import probe
from ..jit.spec import BACKENDS

# Cached, because each plan calls them.
_arch, _arch_kernels = cache(Arch.of), cache(arch_kernels)
CUSTOM = 2  # mask_mode of the operators: a bit for each element
MAX_GROUP = 64  # query heads for each key head
FEW_ROWS = 64  # up to this many rows per request, the portable kernels are as fast


@dataclass(frozen=True)
class CallProperties:
    """Properties of a call that select its kernels."""

    family: str
    device: torch.device
    dtypes: tuple[torch.dtype, torch.dtype, torch.dtype]
    head_dims: tuple[int, int]
    pos_encoding_mode: int
    use_logits_soft_cap: bool
    mask_mode: int
    group: int

    @property
    def eight_bits(self) -> bool:
        """Return True if queries have 8 bits. Portable kernels do not support them."""
        return is_fp8(self.dtypes[0])

    def unsupported_reason(self, kernels: str) -> str | None:
        """Return why kernels for one arch do not support the call, or ``None``. Portable kernels support every call."""
        if kernels in ("", *BACKENDS):  # "": those of a custom variant, see Planner._kernels()
            return None
        arch = _arch(kernels)
        if self.device.type != "cuda":
            return f"got tensors on {self.device.type}, wanted a GPU of compute capability {arch.major}.{arch.minor}"
        if not arch.runs_on(capability(self.device)):
            return f"got a GPU of compute capability {capability(self.device)}, wanted {arch.capability}"
        if head_dims_value(*self.head_dims, "cuda") not in COMMON_HEAD_DIMS:
            return f"got head_dims {self.head_dims}, wanted one of {', '.join(COMMON_HEAD_DIMS)}"
        if self.family == "decode" and self.eight_bits:
            return f"got {self.dtypes[0]} queries, wanted 16 bits"
        if self.family != "decode" and self.dtypes[0] != self.dtypes[1]:
            return f"got {self.dtypes[1]} keys and {self.dtypes[0]} queries, wanted one dtype for both"
        if self.eight_bits and self.head_dims[0] != self.head_dims[1]:
            return f"got head_dims {self.head_dims} of {self.dtypes[0]}, wanted one for keys and values"
        if self.pos_encoding_mode == 1:
            return "got pos_encoding_mode 'ROPE_LLAMA', wanted 'NONE' or 'ALIBI'"
        if self.mask_mode == CUSTOM:
            return "got a custom mask, wanted no mask, a causal one or multi-item scoring"
        if self.family != "decode" and self.group > MAX_GROUP:
            return f"got {self.group} query heads for a key head, wanted at most {MAX_GROUP}"
        return None


@cache
def capability(device: torch.device) -> tuple[int, int]:
    """Return the compute capability of a GPU. Cached, because torch's call takes microseconds."""
    return torch.cuda.get_device_capability(device)


def choose(backend: str, call: CallProperties, rows: int) -> str:
    """Return the kernels of a call: ``"cpu"``, ``"cuda"`` or ``"sm90a"``.

    Args:
        backend: the caller's: ``"auto"``, ``"fa2"`` or ``"fa3"``.
        call: its properties.
        rows: mean number of queries of a request, times ``group``.

    Raises:
        ValueError: an unknown backend, or a backend whose kernels do not support the call. The text has the reason.
    """
    check_kernels(backend)
    portable, archs = call.device.type, _arch_kernels(call.family)
    if KERNELS[backend] in archs:
        reason = call.unsupported_reason(KERNELS[backend])
        if reason is not None:
            raise ValueError(f"backend: got {backend!r}, whose kernels do not support this call: {reason}")
        return KERNELS[backend]
    # Multi-item scoring uses kernels for one arch only if the backend names them.
    portable_is_as_fast = (rows <= FEW_ROWS or call.mask_mode > CUSTOM) and not call.eight_bits
    if KERNELS[backend] or portable_is_as_fast or call.family == "decode" or portable != "cuda":
        return portable
    supported = (kernels for kernels in archs if call.unsupported_reason(kernels) is None)
    return next((kernels for kernels in supported if can_be_loaded(call, kernels)), portable)


# Kernels of a plan by number. A graph passes the number as a size. The portable kernels have number 0 and the name ""
# here, for CPU and CUDA.
KERNELS_BY_NUMBER = ("", *sorted({*_arch_kernels("prefill"), *_arch_kernels("decode")}))
NUMBERS_OF_KERNELS = {kernels: number for number, kernels in enumerate(KERNELS_BY_NUMBER)}


def kernels_of_request(
    backend: str,
    family: str,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    layout: int,
    mask_mode: int,
    pos_encoding_mode: int,
    use_logits_soft_cap: bool,
    o_dtype: torch.dtype,
) -> str:
    """Return the kernels of one request as :func:`choose` does, or ``""`` if tensors do not fit."""
    heads = k.shape[1 - layout] if q.dim() == k.dim() == v.dim() == 3 else 0
    if family != "prefill" or heads < 1 or q.shape[1] % heads != 0:
        return ""  # the portable kernels, whose operator raises the detailed error
    group = q.shape[1] // heads
    call = CallProperties(
        family, q.device, (q.dtype, k.dtype, o_dtype), (q.shape[2], v.shape[2]), pos_encoding_mode,
        use_logits_soft_cap, mask_mode, group,
    )  # fmt: skip
    return choose(backend, call, q.shape[0] * group)


def size_class(q: torch.Tensor, k: torch.Tensor, kv_layout: str) -> int:
    """Return 2 if the group exceeds ``MAX_GROUP``, 1 if the rows exceed ``FEW_ROWS``, otherwise 0.

    The number is part of a cache key. It is 0 on the CPU and under ``torch.compile``.
    """
    try:
        if not q.is_cuda or is_compiling() or q.dim() != 3 or k.dim() != 3:
            return 0
        group = q.shape[1] // max(k.shape[kv_layout == "NHD"], 1)
    except AttributeError:
        return 0  # arguments that are no tensors
    return 2 if group > MAX_GROUP else int(q.shape[0] * group > FEW_ROWS)


@cache
def can_be_loaded(call: CallProperties, kernels: str) -> bool:
    """Return True if the module of kernels for one arch exists or can be built. Building needs a compiler."""
    spec = attention_spec(
        call.family, kernels, dtypes_value(*call.dtypes, kernels), head_dims_value(*call.head_dims, "cuda"),
        variant_value(call.pos_encoding_mode, call.use_logits_soft_cap),
    )  # fmt: skip
    return probe(spec).state != "impossible" or has_dispatching_module(spec)
