"""Attention in float64 by its definition, paged caches with NaN in unused slots, and tolerances."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence

import pytest
import torch

from ..conftest import DEVICES

# Largest error of an output row relative to its norm, and largest error of lse.
TOLERANCE = {torch.float32: 3e-6, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}
LSE_TOLERANCE = 1e-3
FLOAT8 = (torch.float8_e4m3fn, torch.float8_e5m2)
# One type of 8 bits is enough for the desk, because kernels differ only in the conversion.
FLOAT8_CASES = [FLOAT8[0], pytest.param(FLOAT8[1], marks=pytest.mark.slow)]
# Devices, dtypes and head sizes. Only the CPU has float32. One size per dtype limits the number of modules.
PLACES = [
    (device, dtype, head_dim)
    for device in DEVICES
    for dtype, head_dim in ((torch.float32, 64), (torch.float16, 64), (torch.bfloat16, 128))
    if (device, dtype) != ("cuda", torch.float32)
]


def variant_dtype(device: str) -> torch.dtype:
    """Return the dtype of queries in tests of soft caps, ALiBi and RoPE. One dtype limits the number of modules."""
    return torch.float32 if device == "cpu" else torch.float16


def visible(
    qo_len: int, kv_len: int, causal: bool = False, window_left: int = -1, mask: torch.Tensor | None = None
) -> torch.Tensor:
    """Return the keys that each query sees, ``[qo_len, kv_len]``.

    The last query is aligned with the last key.
    """
    position = torch.arange(qo_len)[:, None] + (kv_len - qo_len)
    key = torch.arange(kv_len)[None, :]
    seen = torch.ones(qo_len, kv_len, dtype=torch.bool) if mask is None else mask.cpu().bool().view(qo_len, kv_len)
    if causal and mask is None:
        seen = seen & (key <= position)
    if window_left >= 0:
        seen = seen & (key >= position - window_left)
    return seen


def multi_item_mask(qo_len: int, kv_len: int, prefix_len: int, item_lens: Sequence[int]) -> torch.Tensor:
    """Return the mask of a prefix and delimited items: an item sees the prefix and itself."""
    item_of = [-1] * prefix_len  # the item of a key, or -1 for the prefix
    for number, length in enumerate(item_lens):
        item_of += [-1] + [number] * length
    items = torch.tensor((item_of + [-1] * kv_len)[:kv_len])
    at = torch.arange(qo_len)[:, None] + (kv_len - qo_len)
    of_query = items[at.clamp(min=0)] if kv_len else at
    key = torch.arange(kv_len)[None, :]
    return (key <= at) & ((key < prefix_len) | ((of_query >= 0) & (of_query == items)))


def token_positions(item_lens: Sequence[int], length: int) -> torch.Tensor:
    """Return ``token_pos_in_items`` of one request: 0 at a delimiter, then 1, 2, ... in its item."""
    values = [position for item in item_lens for position in range(item + 1)]
    return torch.tensor((values + [0] * length)[:length], dtype=torch.int32).to(torch.uint16)


def alibi_slopes(heads: int) -> torch.Tensor:
    """Return the slopes of the ALiBi paper, head by head."""
    n = 2 ** math.floor(math.log2(heads))
    first = [2 ** (-8 * (i + 1) / n) for i in range(n)]
    more = [2 ** (-8 * (i + 1) / (2 * n)) for i in range(2 * n)][0::2]
    return torch.tensor((first + more)[:heads], dtype=torch.float64)


def rotated(x: torch.Tensor, positions: torch.Tensor, scale: float, theta: float) -> torch.Tensor:
    half = x.shape[-1] // 2
    frequency = theta ** (-torch.arange(half, dtype=torch.float64, device=x.device) / half)
    angle = (positions.double() / scale)[:, None, None] * frequency
    a, b = x[..., :half], x[..., half:]
    return torch.cat([a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()], -1)


def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    causal: bool = False,
    mask: torch.Tensor | None = None,
    window_left: int = -1,
    logits_soft_cap: float | None = None,
    sm_scale: float | None = None,
    pos_encoding_mode: str = "NONE",
    rope_scale: float | None = None,
    rope_theta: float | None = None,
    weights: Callable[[torch.Tensor], torch.Tensor] | None = None,
    sinks: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (out, lse).

    ``q`` is ``[qo_len, num_qo_heads, head_dim]``, ``k`` and ``v`` are ``[kv_len, num_kv_heads, head_dim]``.
    ``weights``: of a variant without softmax, from the products ``[num_qo_heads, qo_len, kv_len]``.
    ``sinks``: one more logit per head, without a value.
    """
    device = q.device  # a GPU computes faster in float64 too
    q, k, v = (x.to(device).double() for x in (q, k, v))
    (qo_len, heads, dim), kv_len = q.shape, k.shape[0]
    keys = torch.arange(kv_len, device=device)
    position = torch.arange(qo_len, device=device) + (kv_len - qo_len)
    if pos_encoding_mode == "ROPE_LLAMA":
        scale, theta = rope_scale or 1.0, rope_theta or 1e4
        q, k = rotated(q, position, scale, theta), rotated(k, keys, scale, theta)
    group = heads // k.shape[1]
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    logits = torch.einsum("qhd,khd->hqk", q, k)
    seen = visible(qo_len, kv_len, causal, window_left, mask).to(device)
    if weights is not None:
        return torch.einsum("hqk,khd->qhd", weights(logits) * seen, v).cpu(), torch.zeros(qo_len, heads)
    logits = logits * (1 / math.sqrt(dim) if sm_scale is None else sm_scale)
    if pos_encoding_mode == "ALIBI":
        logits = logits + alibi_slopes(heads).to(device)[:, None, None] * (keys[None, :] - position[:, None])
    if logits_soft_cap:
        logits = logits_soft_cap * torch.tanh(logits / logits_soft_cap)
    logits = logits.masked_fill(~seen, -math.inf)
    if sinks is not None:
        logits = torch.cat([logits, sinks.to(device).double()[:, None, None].expand(heads, qo_len, 1)], -1)
        v, kv_len = torch.cat([v, v.new_zeros(1, *v.shape[1:])]), kv_len + 1
    highest = logits.amax(-1, keepdim=True).clamp(min=-1e300) if kv_len else logits.new_zeros(heads, qo_len, 1)
    exp = (logits - highest).exp()
    total = exp.sum(-1, keepdim=True)
    out = torch.einsum("hqk,khd->qhd", exp / total.clamp(min=1e-300), v)
    lse = (
        ((highest + total.clamp(min=1e-300).log()) / math.log(2))
        .squeeze(-1)
        .masked_fill(logits.isneginf().all(-1), -math.inf)
    )
    return out.cpu(), lse.t().cpu()


def assert_near(
    got: torch.Tensor, want: torch.Tensor, lse: torch.Tensor | None = None, want_lse: torch.Tensor | None = None,
    tolerance: float | None = None, lse_tolerance: float = LSE_TOLERANCE,
) -> None:  # fmt: skip
    """Check every row's error relative to its norm against the tolerance of the dtype. NaN never passes.

    A weight is as exact as its logit, a float32 sum of products that are each rounded, about eight half ulps.
    They exceed the tolerance if logits are large, as ALiBi's are for keys far to the right of a query, or are
    spread by a large ``sm_scale``. ``want_lse`` shows their magnitude. A sink can make outputs so small that the dtype
    has subnormal numbers for them: an element is then off by half their distance.
    """
    assert got.shape == want.shape, (got.shape, want.shape)
    limit = torch.tensor(TOLERANCE[got.dtype] if tolerance is None else tolerance)
    if want_lse is not None:
        limit = limit + 2.0**-21 * want_lse.abs().nan_to_num(posinf=0)
    error, norm = (got.detach().cpu().double() - want).norm(dim=-1), want.norm(dim=-1)
    subnormal = torch.finfo(got.dtype).smallest_normal * torch.finfo(got.dtype).eps / 2 * want.shape[-1] ** 0.5
    bad = ~(error <= limit * norm + subnormal)
    if bad.any():
        where = tuple(int(i) for i in bad.nonzero()[0])
        raise AssertionError(f"{int(bad.sum())} of {bad.numel()} rows differ, first {where}: error {error[where].item():.3g} "
                             f"of norm {norm[where].item():.3g}, limit {limit.expand(norm.shape)[where].item():.3g}; NaN: {bool(got.isnan().any())}")  # fmt: skip
    if lse is not None and want_lse is not None:
        assert lse.dtype == torch.float32 and lse.shape == want_lse.shape, (lse.dtype, lse.shape, want_lse.shape)
        lse = lse.detach().cpu().double()
        bad = ~((lse == want_lse) | ((lse - want_lse).abs() <= lse_tolerance))
        if bad.any():
            where = tuple(int(i) for i in bad.nonzero()[0])
            raise AssertionError(f"{int(bad.sum())} of {bad.numel()} lse differ, first {where}: got {lse[where].item()}, "
                                 f"wanted {want_lse[where].item()}")  # fmt: skip


def int32(values: Sequence[int], device: str = "cpu") -> torch.Tensor:
    return torch.tensor(list(values), dtype=torch.int32, device=device)


def workspace(device: str) -> torch.Tensor:
    """Return a float workspace that is large enough."""
    return torch.empty(64 << 20, dtype=torch.uint8, device=device)


def indptr_of(lens: Sequence[int]) -> torch.Tensor:
    return int32([sum(lens[:i]) for i in range(len(lens) + 1)])


def drawn(shape: Sequence[int], dtype: torch.dtype, device: str = "cpu") -> torch.Tensor:
    """Return random normal values."""
    return torch.randn(tuple(shape)).to(dtype).to(device)


class Paged:
    """Requests in a paged cache: pages in random order, some shared by requests, NaN in unused slots.

    ``cache`` is what wrappers take: ``one`` tensor, a ``pair``, or a ``torn`` pair with gaps in every stride.
    """

    def __init__(self, kv_lens: Sequence[int], page_size: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype,
                 device: str, layout: str = "NHD", form: str = "one", head_dim_vo: int | None = None,
                 shared: bool = False) -> None:  # fmt: skip
        self.kv_lens, self.page_size, self.device = list(kv_lens), page_size, device
        counts = [-(-n // page_size) for n in self.kv_lens]
        num_pages = sum(counts) + 2
        free = random.sample(range(num_pages), num_pages)
        tables: list[list[int]] = []
        for count in counts:
            known = sorted({page for table in tables for page in table}) if shared else []
            borrowed = random.sample(known, min(len(known), count // 2)) if shared else []
            tables.append(borrowed + [free.pop() for _ in range(count - len(borrowed))])
        self.tables = tables
        self.indptr, self.indices = indptr_of(counts), int32([page for table in tables for page in table])
        self.last_page_len = int32([n - (c - 1) * page_size if c else 0 for n, c in zip(kv_lens, counts, strict=True)])
        owned = torch.zeros(num_pages, page_size, dtype=torch.bool)
        for length, table in zip(self.kv_lens, tables, strict=True):
            owned[table] |= (torch.arange(len(table) * page_size) < length).view(-1, page_size)
        self.k, self.v = (
            torch.randn(num_pages, page_size, num_kv_heads, d).masked_fill(~owned[..., None, None], math.nan).to(dtype)
            for d in (head_dim, head_dim_vo or head_dim)
        )
        self.cache = self._formed(layout, form, device)

    def _formed(self, layout: str, form: str, device: str) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        k, v = (x if layout == "NHD" else x.transpose(1, 2) for x in (self.k, self.v))
        if form == "one":
            return torch.stack([k.float(), v.float()], 1).to(k.dtype).to(device)
        if form == "pair":
            return k.contiguous().to(device), v.contiguous().to(device)
        assert form == "torn"

        def torn(x: torch.Tensor) -> torch.Tensor:
            pages, a, b, dim = x.shape
            room = torch.full((pages + 1, a + 1, b + 1, dim + 16), math.nan).to(x.dtype)
            inner = room[1:, 1:, :-1, 16:]
            inner.copy_(x)
            return room.to(device)[1:, 1:, :-1, 16:]

        return torn(k), torn(v)

    def request(self, b: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return keys and values of a request, ``[kv_len, num_kv_heads, head_dim]``."""
        pages = torch.tensor(self.tables[b], dtype=torch.int64)
        return tuple(x[pages].float().flatten(0, 1)[: self.kv_lens[b]] for x in (self.k, self.v))  # type: ignore[return-value]

    def tables_on(self, device: str) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        return self.indptr.to(device), self.indices.to(device), self.last_page_len.to(device)


def batch_attention(q: torch.Tensor, qo_lens: Sequence[int], requests: Sequence[tuple[torch.Tensor, torch.Tensor]],
                    masks: Sequence[torch.Tensor] | None = None, **options) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """Return :func:`attention` of every request of a batch, concatenated."""
    outs, lses = [q.new_zeros((0, q.shape[1], 0)).cpu().double()], [torch.zeros(0, q.shape[1]).double()]
    for b, (part, (k, v)) in enumerate(zip(q.split(list(qo_lens)), requests, strict=True)):
        out, lse = attention(part, k, v, mask=None if masks is None else masks[b], **options)
        outs.append(out)
        lses.append(lse)
    outs[0] = outs[0].new_zeros((0, q.shape[1], outs[-1].shape[-1]))
    return torch.cat(outs), torch.cat(lses)
