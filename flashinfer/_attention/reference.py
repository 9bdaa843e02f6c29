"""Attention and its gradients as compositions of torch's functions, for calls without a kernel, such as float64.

Calls with float64 inputs are computed in float64, all others in float32. One block of logits for all heads is in
memory at a time. Sums have a fixed order. The host reads no tensor of a GPU.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

import torch

from .arguments import CAUSAL, CUSTOM, POS_ENCODINGS

LOG2E = 1 / math.log(2)
BLOCK_KEYS = 1024
BLOCK_ELEMENTS = 1 << 22  # logits of all heads


class CallOptions(NamedTuple):
    """Options of a call, with the same meanings as for the operators of attention."""

    layout: int
    mask_mode: int
    window_left: int
    pos_encoding_mode: int
    logits_soft_cap: float
    sm_scale: float
    rope_scale: float
    rope_theta: float

    @property
    def rope(self) -> bool:
        """Return True if the call applies RoPE."""
        return self.pos_encoding_mode == POS_ENCODINGS["ROPE_LLAMA"]


class Request(NamedTuple):
    """Offsets of one request's queries, keys and mask."""

    qo_start: int
    qo_len: int
    kv_start: int
    kv_len: int
    mask_start: int  # in bytes


class Block(NamedTuple):
    """Ranges of queries and keys of one request."""

    q_from: int
    q_to: int
    k_from: int
    k_to: int


def requests_of(
    q: torch.Tensor, k: torch.Tensor, layout: int, qo_indptr: torch.Tensor | None, kv_lens: torch.Tensor | None
) -> list[Request]:
    """Return the requests of a batch, from tables on the host. Without tables there is one request."""
    if qo_indptr is None or kv_lens is None:
        return [Request(0, q.shape[0], 0, k.shape[layout], 0)]
    starts, lengths = qo_indptr.tolist(), kv_lens.tolist()
    requests, kv_start, mask_start = [], 0, 0
    for start, stop, kv_len in zip(starts[:-1], starts[1:], lengths, strict=True):
        requests.append(Request(start, stop - start, kv_start, kv_len, mask_start))
        kv_start += kv_len
        mask_start += ((stop - start) * kv_len + 7) // 8
    return requests


def work_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of computations on inputs of ``dtype``."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def rotated(
    x: torch.Tensor, requests: list[Request], keys: bool, options: CallOptions, back: bool = False
) -> torch.Tensor:
    """Apply RoPE to ``x`` ``[tokens, heads, head_dim]`` as the kernels do. ``back``: apply the inverse."""
    half = x.shape[-1] // 2
    positions = torch.zeros(x.shape[0], dtype=torch.float64, device=x.device)
    for request in requests:
        start, length = (request.kv_start, request.kv_len) if keys else (request.qo_start, request.qo_len)
        first = request.kv_len - length  # queries are the last tokens
        positions[start : start + length] = torch.arange(first, first + length, device=x.device)
    exponents = torch.arange(half, dtype=torch.float64, device=x.device) / -half
    angles = (positions / options.rope_scale)[:, None, None] * options.rope_theta**exponents
    cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
    sin = -sin if back else sin
    a, b = x[..., :half], x[..., half:]
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)


class _Attention:
    """Attention of one request by blocks, with keys and values as ``[num_kv_heads, kv_len, head_dim]``."""

    def __init__(
        self,
        request: Request,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        options: CallOptions,
        packed_mask: torch.Tensor | None,
        slopes: torch.Tensor | None,
    ) -> None:
        work = work_dtype(q.dtype)
        self.request, self.options, self.packed_mask = request, options, packed_mask
        k, v = (x if options.layout else x.transpose(0, 1) for x in (k, v))
        keys = slice(request.kv_start, request.kv_start + request.kv_len)
        self.k, self.v = k[:, keys].to(work), v[:, keys].to(work)
        self.q = q[request.qo_start : request.qo_start + request.qo_len]
        self.kv_heads, self.work = k.shape[0], work
        self.group = q.shape[1] // self.kv_heads
        self.slopes = None if slopes is None else slopes.to(work).view(self.kv_heads, self.group, 1, 1)

    def first_key(self, query: int) -> int:
        """Return the first key that a query sees."""
        if self.options.window_left < 0:
            return 0
        start = self.request.kv_len - self.request.qo_len + query - self.options.window_left
        return min(max(start, 0), self.request.kv_len)

    def end_key(self, query: int) -> int:
        """Return the end of the keys that a query sees: one more than the last."""
        if self.options.mask_mode != CAUSAL:
            return self.request.kv_len
        return min(max(self.request.kv_len - self.request.qo_len + query + 1, 0), self.request.kv_len)

    def queries(self, keys: int) -> Iterator[tuple[int, int]]:
        """Yield ranges of queries. Each range times ``keys`` keys is a block of bounded size."""
        step = max(1, BLOCK_ELEMENTS // max(1, self.kv_heads * self.group * keys))
        for start in range(0, self.request.qo_len, step):
            yield start, min(start + step, self.request.qo_len)

    def blocks(self, q_from: int, q_to: int, step: int) -> Iterator[Block]:
        """Yield the blocks that hold visible keys of these queries."""
        stop = self.end_key(q_to - 1)
        for start in range(self.first_key(q_from), stop, step):
            yield Block(q_from, q_to, start, min(start + step, stop))

    def rows(self, x: torch.Tensor, q_from: int, q_to: int) -> torch.Tensor:
        """Transpose ``[tokens, num_qo_heads, ...]`` into ``[num_kv_heads, group * tokens, ...]``."""
        part: torch.Tensor = x[q_from:q_to].to(self.work).unflatten(1, (self.kv_heads, self.group))
        return part.movedim(0, 2).flatten(1, 2)

    def tokens(self, rows: torch.Tensor) -> torch.Tensor:
        """Invert :meth:`rows`."""
        part: torch.Tensor = rows.unflatten(1, (self.group, -1))
        return part.movedim(2, 0).flatten(1, 2)

    def hidden(self, at: Block) -> torch.Tensor | None:
        """Return the mask ``[queries, keys]`` of hidden keys, or ``None`` if all are visible."""
        request, options = self.request, self.options
        custom = options.mask_mode == CUSTOM
        if not custom and at.k_to <= self.end_key(at.q_from) and at.k_from >= self.first_key(at.q_to - 1):
            return None
        device = self.k.device
        query = torch.arange(at.q_from, at.q_to, device=device)[:, None]
        key = torch.arange(at.k_from, at.k_to, device=device)
        ahead = key - query - (request.kv_len - request.qo_len)  # distance from the query's position to the key
        hidden = torch.zeros_like(ahead, dtype=torch.bool)
        if options.mask_mode == CAUSAL:
            hidden |= ahead > 0
        if options.window_left >= 0:
            hidden |= ahead < -options.window_left
        if custom:
            assert self.packed_mask is not None
            bit = query * request.kv_len + key
            hidden |= (self.packed_mask[request.mask_start + (bit >> 3)] >> (bit & 7)) & 1 == 0
        return hidden

    def logits(self, q: torch.Tensor, at: Block) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return the unmasked logits of rows ``q`` and the derivative of the soft cap, if there is one."""
        cap = self.options.logits_soft_cap
        x = torch.bmm(q, self.k[:, at.k_from : at.k_to].transpose(1, 2)).mul_(self.options.sm_scale)
        if self.slopes is not None:
            key = torch.arange(at.k_from, at.k_to, device=x.device)
            query = torch.arange(at.q_from, at.q_to, device=x.device)[:, None]
            distance = key - query - (self.request.kv_len - self.request.qo_len)
            self._by_head(x, at).add_(self.slopes * distance)
        if cap <= 0:
            return x, None
        capped = torch.tanh(x / cap)
        return capped * cap, 1 - capped.square()

    def weights(self, logits: torch.Tensor, lse: torch.Tensor, hidden: torch.Tensor | None, at: Block) -> torch.Tensor:
        """Return ``P`` of the block, from the logits and the lse of the rows."""
        finite_lse = torch.where(lse == -math.inf, 0.0, lse)
        weights = torch.exp2(logits.mul_(LOG2E).sub_(finite_lse.unsqueeze(-1)))
        if hidden is not None:
            self._by_head(weights, at).masked_fill_(hidden, 0.0)
        return weights

    def _by_head(self, x: torch.Tensor, at: Block) -> torch.Tensor:
        """Return a view ``[num_kv_heads, group, queries, keys]``."""
        return x.view(self.kv_heads, self.group, at.q_to - at.q_from, at.k_to - at.k_from)

    def attend(self, out: torch.Tensor, lse: torch.Tensor) -> None:
        """Write the request's results to its rows of ``out`` and ``lse``."""
        for q_from, q_to in self.queries(self.request.kv_len):
            q = self.rows(self.q, q_from, q_to)
            for at in self.blocks(q_from, q_to, self.request.kv_len):
                logits, _ = self.logits(q, at)
                hidden = self.hidden(at)
                if hidden is not None:
                    self._by_head(logits, at).masked_fill_(hidden, -math.inf)
                total = torch.logsumexp(logits, -1) * LOG2E
                weights = self.weights(logits, total, hidden, at)
                out[q_from:q_to] = self.tokens(torch.bmm(weights, self.v[:, at.k_from : at.k_to]))
                lse[q_from:q_to] = self.tokens(total)

    def add_gradients(
        self, grad: torch.Tensor, delta: torch.Tensor, lse: torch.Tensor, dq: torch.Tensor, dk: torch.Tensor,
        dv: torch.Tensor,
    ) -> None:  # fmt: skip
        """Write dQ of the request's queries. Add to dK and dV.

        ``dV += P^T dO``, ``dS = P * (dO V^T - delta)``, ``dQ = sm_scale * dS K`` and
        ``dK += sm_scale * dS^T Q``.
        """
        scale = self.options.sm_scale
        for q_from, q_to in self.queries(min(BLOCK_KEYS, self.request.kv_len)):
            q = self.rows(self.q, q_from, q_to)
            d_out = self.rows(grad, q_from, q_to)
            row_delta = self.rows(delta, q_from, q_to).unsqueeze(-1)
            row_lse = self.rows(lse, q_from, q_to)
            d_q = torch.zeros_like(q)
            for at in self.blocks(q_from, q_to, BLOCK_KEYS):
                keys = slice(at.k_from, at.k_to)
                logits, d_cap = self.logits(q, at)
                hidden = self.hidden(at)
                weights = self.weights(logits, row_lse, hidden, at)
                dv[:, keys].baddbmm_(weights.transpose(1, 2), d_out)
                d_logits = torch.bmm(d_out, self.v[:, keys].transpose(1, 2)).sub_(row_delta).mul_(weights)
                if d_cap is not None:
                    d_logits.mul_(d_cap)
                if hidden is not None:
                    self._by_head(d_logits, at).masked_fill_(hidden, 0.0)
                d_q.baddbmm_(d_logits, self.k[:, keys], alpha=scale)
                dk[:, keys].baddbmm_(d_logits.transpose(1, 2), q, alpha=scale)
            dq[q_from:q_to] = self.tokens(d_q)


def attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    requests: list[Request],
    options: CallOptions,
    packed_mask: torch.Tensor | None,
    slopes: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return output and lse in the dtype of :func:`work_dtype`. RoPE must have been applied to the inputs."""
    work = work_dtype(q.dtype)
    out = q.new_zeros((*q.shape[:2], v.shape[2]), dtype=work)
    lse = q.new_full(q.shape[:2], -math.inf, dtype=work)
    for request in requests:
        if not (request.qo_len and request.kv_len):
            continue
        rows = slice(request.qo_start, request.qo_start + request.qo_len)
        _Attention(request, q, k, v, options, packed_mask, slopes).attend(out[rows], lse[rows])
    return out, lse


def gradients(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    grad: torch.Tensor,
    delta: torch.Tensor,
    lse: torch.Tensor,
    requests: list[Request],
    options: CallOptions,
    packed_mask: torch.Tensor | None,
    slopes: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the gradients of q, k and v in the dtype of :func:`work_dtype`.

    ``delta`` ``[tokens, num_qo_heads]`` is ``rowsum(dO * O) - d(lse) / ln 2``.
    """
    work = work_dtype(q.dtype)
    dq = q.new_zeros(q.shape, dtype=work)
    head_axis, token_axis = 1 - options.layout, options.layout
    dk, dv = (x.new_zeros((x.shape[head_axis], x.shape[token_axis], x.shape[2]), dtype=work) for x in (k, v))
    for request in requests:
        if not (request.qo_len and request.kv_len):
            continue
        rows = slice(request.qo_start, request.qo_start + request.qo_len)
        keys = slice(request.kv_start, request.kv_start + request.kv_len)
        _Attention(request, q, k, v, options, packed_mask, slopes).add_gradients(
            grad[rows], delta[rows], lse[rows], dq[rows], dk[:, keys], dv[:, keys]
        )
    if options.layout:
        return dq, dk, dv
    return dq, dk.transpose(0, 1).contiguous(), dv.transpose(0, 1).contiguous()
