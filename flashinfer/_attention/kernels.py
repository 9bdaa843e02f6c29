"""Which kernels compute attention: the portable ones (``fa2``), or those for Hopper alone (``fa3``).

A family has kernels for Hopper where ``csrc/<family>_sm90a.cu`` is: prefill, and decode, whose kernels are the portable
ones with merges of their own and are chosen where they are asked for alone.
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

CUSTOM = 2  # mask_mode of the operators: bits hide element by element
MOST_HEADS = 64  # query heads of a key head
FEW_ROWS = 64  # rows of queries of a request, up to which the portable kernels are as fast


@dataclass(frozen=True)
class Wanted:
    """What of a call the choice depends on."""

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
        """Whether queries have 8 bits, which no portable kernel has."""
        return is_fp8(self.dtypes[0])

    def why_not_hopper(self) -> str | None:
        """Why the kernels for Hopper cannot serve, or ``None`` where they can."""
        if self.device.type != "cuda":
            return f"got tensors on {self.device.type}, wanted a GPU of compute capability 9.0"
        if capability(self.device) != (9, 0):
            return f"got a GPU of compute capability {capability(self.device)}, wanted (9, 0)"
        if self.family == "decode" and self.eight_bits:
            return f"got {self.dtypes[0]} queries, wanted 16 bits"
        if self.family != "decode" and self.dtypes[0] != self.dtypes[1]:
            return f"got {self.dtypes[1]} keys beside {self.dtypes[0]} queries, wanted one dtype for both"
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
    return torch.cuda.get_device_capability(device)


def choose(backend: str, wanted: Wanted, rows: int) -> str:
    """The kernels of a call, ``"cpu"``, ``"cuda"`` or ``"sm90a"``.

    Args:
        backend: ``"auto"``, ``"fa2"`` or ``"fa3"``, the caller's.
        wanted: what is to be computed.
        rows: queries times ``group`` of a request, in the mean.

    Raises:
        ValueError: another backend, or ``"fa3"`` where its kernels cannot serve, with the reason.
    """
    check_kernels(backend)
    if backend == "fa3":
        reason = wanted.why_not_hopper()
        if reason is not None:
            raise ValueError(f"backend: got 'fa3', whose kernels cannot serve this call: {reason}")
        return HOPPER
    # Multi-item scoring: where it was asked for.
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
    """The kernels for one request: as :func:`choose`, and nothing where tensors do not fit each other."""
    heads = k.shape[1 - layout] if q.dim() == k.dim() == v.dim() == 3 else 0
    if family != "prefill" or heads < 1 or q.shape[1] % heads != 0:
        return ""  # those that run everywhere, whose operator finds the words
    group = q.shape[1] // heads
    wanted = Wanted(
        family, q.device, (q.dtype, k.dtype, o_dtype), (q.shape[2], v.shape[2]), pos_encoding_mode,
        use_logits_soft_cap, mask_mode, group,
    )  # fmt: skip
    return choose(backend, wanted, q.shape[0] * group)


def size_class(q: torch.Tensor, k: torch.Tensor, kv_layout: str) -> int:
    """What of the sizes the choice of kernels depends on; nothing where there is no choice."""
    try:
        if not q.is_cuda or is_compiling() or q.dim() != 3 or k.dim() != 3:
            return 0
        group = q.shape[1] // max(k.shape[kv_layout == "NHD"], 1)
    except AttributeError:
        return 0  # no tensors
    return 2 if group > MOST_HEADS else int(q.shape[0] * group > FEW_ROWS)


@cache
def _can_be_loaded(wanted: Wanted) -> bool:
    """Whether the module for Hopper is there or can be built: machines without a compiler have what they were given."""
    spec = attention_spec(
        wanted.family, HOPPER, dtypes_value(*wanted.dtypes, HOPPER), head_dims_value(*wanted.head_dims, "cuda"),
        variant_value(wanted.pos_encoding_mode, wanted.use_logits_soft_cap),
    )  # fmt: skip
    return probe(spec).state != "impossible" or covered(spec)
