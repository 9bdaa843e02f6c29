"""Attention of a batch of equally long requests: one launch, no plan, any masks.

The kernel sees one request that has the heads of the whole batch. Query head ``b * num_qo_heads + h`` reads key head
``b * num_kv_heads + h // group``. If requests have different masks, a table holds the offset of each mask. A call depends
on shapes only. The host reads no tensor, so a CUDA graph can capture the call.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F

from .._ops.declare import define_in_python
from ..quantization import packbits
from .arguments import CAUSAL, CUSTOM, NON_CAUSAL, Logits, as_kernel_input, parameters_of, variant_of
from .backward import differentiable
from .operators import builtin_operators, call
from .signature import CallArguments


def attend_batch(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor | None,
    causal: bool,
    window_left: int,
    logits_soft_cap: float,
    sm_scale: float,
) -> torch.Tensor:
    """Compute attention of a batch whose requests all have the same numbers of queries and keys.

    Args:
        q: ``[batch_size, num_qo_heads, qo_len, head_dim]``.
        k, v: ``[batch_size, num_kv_heads, kv_len, head_dim]`` of ``q``'s dtype.
        mask: bool, ``[batch_size or 1, 1, qo_len or 1, kv_len]``, True if a query sees a key. It replaces
            ``causal`` and ``window_left``.
        causal, window_left, logits_soft_cap, sm_scale: as for
            :func:`flashinfer.single_prefill_with_kv_cache`. The last query has the position of the last key.

    Returns:
        ``[batch_size, qo_len, num_qo_heads, head_dim]``, contiguous. A query that sees no key has output 0.
    """
    if torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad):
        return _differentiable(q, k, v, mask, causal, window_left, logits_soft_cap, sm_scale)
    out: torch.Tensor = torch.ops.flashinfer.attend_batch.default(
        q, k, v, mask, causal, window_left, logits_soft_cap, sm_scale, False
    )[0]
    return out


def _attend_batch(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor | None,
    causal: bool,
    window_left: int,
    logits_soft_cap: float,
    sm_scale: float,
    return_lse: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    batch_size, num_qo_heads, qo_len, _ = q.shape
    out, all_lse = _fake(q, k, v, mask, causal, window_left, logits_soft_cap, sm_scale, return_lse)
    if out.numel() == 0:
        return out, all_lse.fill_(-math.inf)
    family = "decode" if qo_len == 1 else "prefill"
    dtypes, head_dims = (q.dtype, k.dtype, q.dtype), (q.shape[3], v.shape[3])
    packed = mask_indptr = None
    mode = CAUSAL if causal else NON_CAUSAL
    if mask is not None:
        (packed, mask_indptr), mode, window_left = _packed(mask, qo_len, k.shape[2]), CUSTOM, -1
    logits = Logits(0, window_left, logits_soft_cap, sm_scale, 1.0, 1e4)
    operators = builtin_operators(family, q.device.type, dtypes, head_dims, variant_of(logits))
    arguments = CallArguments(
        custom_mask=packed, mask_indptr=mask_indptr, kv_layout=1, mask_mode=mode, window_left=window_left,
        variant=variant_of(logits),
    )  # fmt: skip
    parameters = parameters_of(logits, batch_size * num_qo_heads, q.device)
    # [queries, heads of the batch, head_dim]. For one query or one request, the result is a view of this tensor.
    folded = torch.empty((qo_len, batch_size * num_qo_heads, v.shape[3]), dtype=q.dtype, device=q.device)
    lse = torch.empty(folded.shape[:2], dtype=torch.float32, device=q.device) if return_lse else None
    rows = (as_kernel_input(x) for x in (q.permute(2, 0, 1, 3).flatten(1, 2), k.flatten(0, 1), v.flatten(0, 1)))
    call("attend_batch", operators.run, *rows, folded, lse, *arguments, *parameters)
    if lse is not None:
        all_lse.copy_(lse.unflatten(1, (batch_size, num_qo_heads)).transpose(0, 1))
    if batch_size == 1 or qo_len == 1:
        return folded.view(out.shape), all_lse
    return out.copy_(folded.unflatten(1, (batch_size, num_qo_heads)).transpose(0, 1)), all_lse


def _fake(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *options: object) -> tuple[torch.Tensor, torch.Tensor]:
    batch_size, num_qo_heads, qo_len, _head_dim = q.shape
    rows = (batch_size, qo_len, num_qo_heads)
    return q.new_empty((*rows, v.shape[3])), q.new_empty(rows if options[-1] else (0,), dtype=torch.float32)


def _packed(mask: torch.Tensor, qo_len: int, kv_len: int) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return the bits of all masks, and a table of their first bytes. A single mask needs no table."""
    if mask.stride(0) == 0:
        mask = mask[:1]
    bits = _bits(mask, mask.shape[0], qo_len, kv_len)
    if mask.shape[0] == 1:
        return bits, None
    step = bits.shape[0] // mask.shape[0]
    indptr = torch.arange(0, bits.shape[0] + 1, step, dtype=torch.int32, device=mask.device)
    return bits, indptr


def _bits(mask: torch.Tensor, batch_size: int, qo_len: int, kv_len: int) -> torch.Tensor:
    """Return the bits of one mask for each request. Each mask starts at a new byte."""
    bits = mask.expand(batch_size, 1, qo_len, kv_len).flatten(1)
    return packbits(F.pad(bits, (0, -bits.shape[1] % 8)).flatten(), bitorder="little")


def _differentiable(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor | None,
    causal: bool,
    window_left: int,
    logits_soft_cap: float,
    sm_scale: float,
) -> torch.Tensor:
    """Compute :func:`attend_batch` with gradients, as a ragged batch. One graph serves any number of requests."""
    batch_size, _heads, qo_len, _head_dim = q.shape
    kv_len, packed, mode = k.shape[2], None, CAUSAL if causal else NON_CAUSAL
    if mask is not None:
        packed, mode, window_left = _bits(mask, batch_size, qo_len, kv_len), CUSTOM, -1

    def infer() -> tuple[torch.Tensor, torch.Tensor]:
        out, lse = torch.ops.flashinfer.attend_batch.default(
            q, k, v, mask, causal, window_left, logits_soft_cap, sm_scale, True
        )
        return out.flatten(0, 1), lse.flatten(0, 1)

    q_rows, k_rows, v_rows = (x.transpose(1, 2).flatten(0, 1) for x in (q, k, v))
    starts = torch.arange(batch_size + 1, dtype=torch.int32, device="cpu") * qo_len
    lengths = torch.ones(batch_size, dtype=torch.int32, device="cpu") * kv_len
    logits = Logits(0, window_left, logits_soft_cap, sm_scale, 1.0, 1e4)
    out, _ = differentiable(
        "attend_batch", q_rows, k_rows, v_rows, infer, 0, mode, logits, packed, starts, lengths
    )  # fmt: skip
    return torch.unflatten(out, 0, (batch_size, qo_len))


define_in_python(
    "attend_batch(Tensor q, Tensor k, Tensor v, Tensor? mask, bool causal, int window_left, float logits_soft_cap,"
    " float sm_scale, bool return_lse) -> (Tensor, Tensor)",
    _attend_batch,
    _fake,
)
