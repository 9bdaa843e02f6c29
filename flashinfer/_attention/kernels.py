"""Selection of attention's kernels: the portable ones (``fa2``) or those for Hopper (``fa3``).

A family has kernels for Hopper if ``csrc/<family>_sm90a.cu`` exists: prefill and decode. Decode's are the
portable kernels with merges in the same launch. Only ``"fa3"`` selects them, never ``"auto"``.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch
from torch.compiler import is_compiling

from .._ops.configured import covered
from .._ops.dtypes import is_fp8
from ..jit.modules._attention import HOPPER, attention_spec, dtypes_value, head_dims_value, variant_value
from ..jit.modules.prefill import check_kernels
from ..jit.probe import probe

CUSTOM = 2  # mask_mode of the operators: a bit for each element
MOST_HEADS = 64  # query heads of a key head
FEW_ROWS = 64  # up to this many rows of queries a request, the portable kernels are as fast


@dataclass(frozen=True)
class Wanted:
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

    def why_not_hopper(self) -> str | None:
        """Return the reason that excludes the kernels for Hopper, or ``None``."""
        if self.device.type != "cuda":
            return f"got tensors on {self.device.type}, wanted a GPU of compute capability 9.0"
        if capability(self.device) != (9, 0):
            return f"got a GPU of compute capability {capability(self.device)}, wanted (9, 0)"
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
        if self.family != "decode" and self.group > MOST_HEADS:
            return f"got {self.group} query heads for a key head, wanted at most {MOST_HEADS}"
        return None


@cache
def capability(device: torch.device) -> tuple[int, int]:
    """Return the compute capability of a GPU. Cached, because torch's call takes microseconds."""
    return torch.cuda.get_device_capability(device)


def choose(backend: str, wanted: Wanted, rows: int) -> str:
    """Return the kernels of a call: ``"cpu"``, ``"cuda"`` or ``"sm90a"``.

    Args:
        backend: the caller's: ``"auto"``, ``"fa2"`` or ``"fa3"``.
        wanted: the properties of the call.
        rows: queries times ``group``, the mean of the requests.

    Raises:
        ValueError: another backend, or ``"fa3"`` for a call that its kernels cannot serve, with the reason.
    """
    check_kernels(backend)
    if backend == "fa3":
        reason = wanted.why_not_hopper()
        if reason is not None:
            raise ValueError(f"backend: got 'fa3', whose kernels cannot serve this call: {reason}")
        return HOPPER
    # Multi-item scoring uses Hopper's kernels only with backend="fa3".
    slow = (rows <= FEW_ROWS or wanted.mask_mode > CUSTOM) and not wanted.eight_bits
    if (
        backend == "fa2"
        or slow
        or wanted.family == "decode"
        or wanted.device.type != "cuda"
        or wanted.why_not_hopper() is not None
    ):
        return wanted.device.type
    return HOPPER if _can_be_loaded(wanted) else wanted.device.type


def kernels_of_one(
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
    wanted = Wanted(
        family, q.device, (q.dtype, k.dtype, o_dtype), (q.shape[2], v.shape[2]), pos_encoding_mode,
        use_logits_soft_cap, mask_mode, group,
    )  # fmt: skip
    return choose(backend, wanted, q.shape[0] * group)


def size_class(q: torch.Tensor, k: torch.Tensor, kv_layout: str) -> int:
    """Return the part of the sizes that selects kernels, or 0 if there is no choice."""
    try:
        if not q.is_cuda or is_compiling() or q.dim() != 3 or k.dim() != 3:
            return 0
        group = q.shape[1] // max(k.shape[kv_layout == "NHD"], 1)
    except AttributeError:
        return 0  # arguments that are no tensors
    return 2 if group > MOST_HEADS else int(q.shape[0] * group > FEW_ROWS)


@cache
def _can_be_loaded(wanted: Wanted) -> bool:
    """Return True if the module for Hopper exists or can be built.

    Machines without a compiler have AOT modules only.
    """
    spec = attention_spec(
        wanted.family, HOPPER, dtypes_value(*wanted.dtypes, HOPPER), head_dims_value(*wanted.head_dims, "cuda"),
        variant_value(wanted.pos_encoding_mode, wanted.use_logits_soft_cap),
    )  # fmt: skip
    return probe(spec).state != "impossible" or covered(spec)
