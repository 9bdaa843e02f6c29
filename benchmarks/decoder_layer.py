"""A decoder layer like Llama's over a paged cache: with our functions, with torch's, and in float32."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

import flashinfer

EPS, THETA = 1e-5, 5e5


@dataclass(frozen=True)
class Sizes:
    hidden: int
    num_qo_heads: int
    num_kv_heads: int
    head_dim: int
    inner: int
    page_size: int = 16


LLAMA_8B = Sizes(4096, 32, 8, 128, 14336)


class Requests:
    """A batch of requests with the slots of their tokens in a paged cache, the new token last."""

    def __init__(self, lengths: list[int], sizes: Sizes, device: str) -> None:
        self.lengths, self.batch = lengths, len(lengths)
        pages = [-(-length // sizes.page_size) for length in lengths]
        self.num_pages = sum(pages)
        ints = dict(dtype=torch.int32, device=device)
        self.indptr = torch.tensor([0, *pages], **ints).cumsum(0).int()
        self.indices = torch.randperm(self.num_pages, device=device).int()
        self.last = torch.tensor([(length - 1) % sizes.page_size + 1 for length in lengths], **ints)
        self.requests = torch.arange(self.batch, **ints)
        self.positions = torch.tensor(lengths, **ints) - 1
        # Slots in the order of tokens, for torch's attention. After a request's last token, its first is
        # repeated.
        longest, first = max(lengths), self.indptr[:-1, None].long()
        token = torch.arange(longest, device=device)
        seen = token < torch.tensor(lengths, device=device)[:, None]
        # With a mask, torch has no flash attention, so a mask is passed only if it is necessary.
        self.seen = None if min(lengths) == longest else seen[:, None, None]
        at = torch.where(seen, token, 0)
        self.rows = self.indices[first + at // sizes.page_size].long() * sizes.page_size + at % sizes.page_size


class DecoderLayer(nn.Module):
    """Weights, and the cache of one layer ``[num_pages, 2, page_size, num_kv_heads, head_dim]``.

    All are parameters and buffers, which a CUDA graph of ``torch.compile`` reads without copies.
    """

    def __init__(self, sizes: Sizes, requests: Requests, device: str, dtype: torch.dtype) -> None:
        super().__init__()
        self.sizes = sizes
        heads, kv_heads, dim = sizes.num_qo_heads, sizes.num_kv_heads, sizes.head_dim
        self.split = [heads, kv_heads, kv_heads]

        def weight(rows: int, columns: int) -> nn.Parameter:
            return nn.Parameter(torch.randn(rows, columns, device=device, dtype=dtype) / math.sqrt(columns))

        self.qkv, self.o = weight((heads + 2 * kv_heads) * dim, sizes.hidden), weight(sizes.hidden, heads * dim)
        self.gate_and_up, self.down = weight(2 * sizes.inner, sizes.hidden), weight(sizes.hidden, sizes.inner)
        self.norm, self.mlp_norm = (
            nn.Parameter(1 + 0.1 * torch.randn(sizes.hidden, device=device, dtype=dtype)) for _ in range(2)
        )
        cache = torch.randn(requests.num_pages, 2, sizes.page_size, kv_heads, dim, device=device, dtype=dtype)
        self.register_buffer("cache", cache)
        for name in ("indptr", "indices", "last", "requests", "positions", "rows", "seen"):
            self.register_buffer(name, getattr(requests, name))

    def projected(self, normed: torch.Tensor) -> tuple[torch.Tensor, ...]:
        qkv = F.linear(normed, self.qkv).unflatten(-1, (-1, self.sizes.head_dim))  # type: ignore[no-untyped-call]
        return qkv.split(self.split, 1)


class Ours(DecoderLayer):
    """Layer with our functions for every step except projections."""

    def __init__(self, sizes: Sizes, requests: Requests, device: str, dtype: torch.dtype) -> None:
        super().__init__(sizes, requests, device, dtype)
        self.wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(
            torch.empty(128 << 20, dtype=torch.uint8, device=device)
        )
        self.wrapper.plan(
            requests.indptr, requests.indices, requests.last, sizes.num_qo_heads, sizes.num_kv_heads, sizes.head_dim,
            sizes.page_size, q_data_type=dtype,
        )  # fmt: skip

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Compute the layer for ``x``, ``[batch, hidden]``, the residual stream."""
        q, k, v = self.projected(flashinfer.rmsnorm(x, self.norm, eps=EPS))
        q, k = flashinfer.apply_rope_pos_ids(q, k, self.positions, rope_theta=THETA)
        flashinfer.append_paged_kv_cache(
            k, v, self.requests, self.positions, self.cache, self.indices, self.indptr, self.last
        )
        attended = self.wrapper.run(q, self.cache)
        y, residual = F.linear(attended.flatten(1), self.o), x.clone()
        flashinfer.fused_add_rmsnorm(y, residual, self.mlp_norm, eps=EPS)
        return residual + F.linear(flashinfer.silu_and_mul(F.linear(y, self.gate_and_up)), self.down)


class Torchs(DecoderLayer):
    """Layer with torch's functions. Its attention gathers keys and values from the pages."""

    def rotated(self, x: torch.Tensor) -> torch.Tensor:
        half = self.sizes.head_dim // 2
        exponents = torch.arange(half, device=x.device, dtype=torch.float32) / -half
        angles = self.positions[:, None, None] * THETA**exponents
        a, b = x.float().chunk(2, -1)
        turned = torch.cat([a * angles.cos() - b * angles.sin(), b * angles.cos() + a * angles.sin()], -1)
        return turned.to(x.dtype)

    def cached(self, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return all keys and values, including those of the new token."""
        page, row = self.indices[self.indptr[self.requests] + self.positions // self.sizes.page_size], self.positions
        at = (page.long(), row % self.sizes.page_size)
        self.cache[:, 0].index_put_(at, k)
        self.cache[:, 1].index_put_(at, v)
        keys, values = (self.cache[:, one].flatten(0, 1)[self.rows].transpose(1, 2) for one in range(2))
        return keys, values

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = (self.sizes.hidden,)
        q, k, v = self.projected(F.rms_norm(x, hidden, self.norm, EPS))
        q, k = self.rotated(q), self.rotated(k)
        keys, values = self.cached(k, v)
        attended = F.scaled_dot_product_attention(q[:, :, None], keys, values, self.seen, enable_gqa=True)
        residual = x + F.linear(attended.flatten(1), self.o)
        gate, up = F.linear(F.rms_norm(residual, hidden, self.mlp_norm, EPS), self.gate_and_up).chunk(2, -1)
        return residual + F.linear(F.silu(gate) * up, self.down)


@torch.no_grad()
def wanted(layer: DecoderLayer, x: torch.Tensor) -> torch.Tensor:
    """Compute the layer in eager float32 from the same weights and cache, without writing the cache."""
    sizes = layer.sizes
    requests = Requests.__new__(Requests)
    requests.num_pages = 0
    for name in ("indptr", "indices", "last", "requests", "positions", "rows", "seen"):
        setattr(requests, name, getattr(layer, name))
    exact = Torchs(sizes, requests, str(x.device), torch.float32)
    exact.cache = layer.cache.to(torch.float32, copy=True)
    for name, value in layer.named_parameters():
        getattr(exact, name).copy_(value)
    out: torch.Tensor = exact(x.float())
    return out
