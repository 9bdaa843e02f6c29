"""A layer with the shape of DeepSeek-V2-Lite and random weights: expanded prefill, absorbed decode.

    python examples/latent_attention.py [--device cuda] [--prompt 700] [--steps 8]

The cache has 512 + 64 numbers per token: a latent, and a rotary key that all heads share. A prompt's latents
are expanded to keys of 192 and values of 128 numbers for each head, which is cheapest for many queries and
many keys. A decoded token reads the cache directly: the matrix that would expand keys is applied to the
query, and the one that would expand values to the output. Both give the same logits, which this program
compares.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional as F

import flashinfer


@dataclass(frozen=True)
class Sizes:
    """Sizes of DeepSeek-V2-Lite, except the vocabulary and the number of layers."""

    hidden: int = 2048
    heads: int = 16
    nope: int = 128  # of a key, without its rotary part
    rope: int = 64
    value: int = 128
    latent: int = 512
    intermediate: int = 10944
    vocabulary: int = 1000

    @property
    def scale(self) -> float:
        return float((self.nope + self.rope) ** -0.5)


class Cache:
    """Latents and rotary keys of several requests, in pages in any order."""

    def __init__(self, sizes: Sizes, requests: int, room: int, page_size: int, like: torch.Tensor) -> None:
        self.page_size, pages = page_size, -(-room // page_size)
        self.ckv = like.new_empty(requests * pages, page_size, sizes.latent)
        self.kpe = like.new_empty(requests * pages, page_size, sizes.rope)
        self.table = torch.randperm(requests * pages, dtype=torch.int32).view(requests, pages).to(like.device)
        self.lens = torch.zeros(requests, dtype=torch.int32)

    def grow(self, new: list[int]) -> tuple[torch.Tensor, ...]:
        """Reserve slots for new tokens of each request.

        Return the bounds of the requests, the request and position of each token, and the tables of all used
        pages.
        """
        self.lens += torch.tensor(new, dtype=torch.int32)
        starts = torch.tensor([0, *new], dtype=torch.int32).cumsum(0, dtype=torch.int32)
        used = (self.lens + self.page_size - 1) // self.page_size
        indptr = F.pad(used.cumsum(0, dtype=torch.int32), (1, 0))
        indices = torch.cat([row[:n] for row, n in zip(self.table, used.tolist(), strict=True)])
        batch, positions = flashinfer.get_batch_indices_positions(starts, self.lens, int(starts[-1]))
        return starts, batch.to(indices.device), positions.to(indices.device), indptr, indices

    def append(self, ckv: torch.Tensor, kpe: torch.Tensor, at: tuple[torch.Tensor, ...]) -> None:
        _, batch, positions, indptr, indices = at
        last = (self.lens - 1) % self.page_size + 1
        flashinfer.append_paged_mla_kv_cache(
            ckv, kpe, batch, positions, self.ckv, self.kpe, indices, indptr.to(batch.device), last.to(batch.device)
        )


class Layer(nn.Module):
    def __init__(self, sizes: Sizes, device: str, dtype: torch.dtype) -> None:
        super().__init__()
        self.sizes, s = sizes, sizes

        def weight(*shape: int) -> nn.Parameter:
            return nn.Parameter(torch.randn(shape, dtype=dtype, device=device) * shape[-1] ** -0.5, requires_grad=False)

        def ones(size: int) -> nn.Parameter:
            return nn.Parameter(torch.ones(size, dtype=dtype, device=device), requires_grad=False)

        self.embedding, self.head = weight(s.vocabulary, s.hidden), weight(s.vocabulary, s.hidden)
        self.norms = nn.ParameterList([ones(s.hidden), ones(s.hidden), ones(s.hidden)])
        self.q = weight(s.heads * (s.nope + s.rope), s.hidden)
        self.kv_a, self.kv_norm = weight(s.latent + s.rope, s.hidden), ones(s.latent)
        self.k_b, self.v_b = weight(s.heads, s.nope, s.latent), weight(s.heads, s.value, s.latent)
        self.out = weight(s.hidden, s.heads * s.value)
        self.up, self.down = weight(2 * s.intermediate, s.hidden), weight(s.hidden, s.intermediate)
        room = torch.empty(64 << 20, dtype=torch.uint8, device=device)
        self.expanded = flashinfer.BatchPrefillWithRaggedKVCacheWrapper(room)
        self.absorbed = flashinfer.BatchMLAPagedAttentionWrapper(room.clone())

    def forward(self, tokens: torch.Tensor, new: list[int], cache: Cache, absorb: bool) -> torch.Tensor:
        """Return logits of ``tokens``, ``new`` of each request; their latents are appended to the cache."""
        s, x = self.sizes, self.embedding[tokens]
        at = cache.grow(new)
        h = flashinfer.rmsnorm(x, self.norms[0])
        q_nope, q_pe = F.linear(h, self.q).view(-1, s.heads, s.nope + s.rope).split([s.nope, s.rope], -1)
        ckv, kpe = F.linear(h, self.kv_a).split([s.latent, s.rope], -1)
        ckv = flashinfer.rmsnorm(ckv.contiguous(), self.kv_norm)
        q_pe, kpe = flashinfer.apply_rope_pos_ids(q_pe.contiguous(), kpe[:, None].contiguous(), at[2], interleave=True)
        cache.append(ckv, kpe[:, 0], at)
        attend = self.attend_absorbed if absorb else self.attend_expanded
        x = x + F.linear(attend(q_nope, q_pe, ckv, kpe, cache, at).flatten(1), self.out)
        h = F.linear(flashinfer.rmsnorm(x, self.norms[1]), self.up)
        x = x + F.linear(flashinfer.silu_and_mul(h), self.down)
        return F.linear(flashinfer.rmsnorm(x, self.norms[2]), self.head)

    def attend_expanded(
        self,
        q_nope: torch.Tensor,
        q_pe: torch.Tensor,
        ckv: torch.Tensor,
        kpe: torch.Tensor,
        cache: Cache,
        at: tuple[torch.Tensor, ...],
    ) -> torch.Tensor:
        """Compute attention of prompts with an empty cache: keys of 192, values of 128 numbers per head."""

        s, starts = self.sizes, at[0]
        k_nope = torch.einsum("tl,hnl->thn", ckv, self.k_b)
        v = torch.einsum("tl,hvl->thv", ckv, self.v_b)
        q, k = torch.cat([q_nope, q_pe], -1), torch.cat([k_nope, kpe.expand(-1, s.heads, -1)], -1)
        self.expanded.plan(
            starts, starts, s.heads, s.heads, s.nope + s.rope, head_dim_vo=s.value, causal=True, sm_scale=s.scale,
            q_data_type=q.dtype,
        )  # fmt: skip
        return self.expanded.run(q, k, v.contiguous())

    def attend_absorbed(
        self,
        q_nope: torch.Tensor,
        q_pe: torch.Tensor,
        ckv: torch.Tensor,
        kpe: torch.Tensor,
        cache: Cache,
        at: tuple[torch.Tensor, ...],
    ) -> torch.Tensor:
        """Compute attention of any tokens: all heads read the cache's latents."""
        s, (starts, _, _, indptr, indices) = self.sizes, at
        self.absorbed.plan(
            starts, indptr, indices, cache.lens, s.heads, s.latent, s.rope, cache.page_size, True, s.scale,
            q_nope.dtype, q_nope.dtype,
        )  # fmt: skip
        q = torch.einsum("thn,hnl->thl", q_nope, self.k_b)
        latents = self.absorbed.run(q, q_pe, cache.ckv, cache.kpe)
        assert isinstance(latents, torch.Tensor)  # run() returns a pair only if an lse is requested
        return torch.einsum("thl,hvl->thv", latents, self.v_b)


def compare(layer: Layer, tokens: list[torch.Tensor], prompts: list[int], page_size: int = 64) -> float:
    """Return the largest difference, relative to the norm, between two computations of the same logits.

    One decodes tokens absorbed after prompts; the other has the same tokens as parts of longer prompts.
    """
    like, lens = layer.embedding, [len(t) for t in tokens]
    whole = Cache(layer.sizes, len(tokens), max(lens), page_size, like)
    want = layer(torch.cat(tokens), lens, whole, absorb=False).split(lens)
    cache = Cache(layer.sizes, len(tokens), max(lens), page_size, like)
    first = [t[:n] for t, n in zip(tokens, prompts, strict=True)]
    layer(torch.cat(first), prompts, cache, absorb=False)
    worst = 0.0
    for step in range(min(n - p for n, p in zip(lens, prompts, strict=True))):
        now = torch.stack([t[p + step] for t, p in zip(tokens, prompts, strict=True)])
        got = layer(now, [1] * len(tokens), cache, absorb=True).double()
        wanted = torch.stack([w[p + step] for w, p in zip(want, prompts, strict=True)]).double()
        worst = max(worst, float(((got - wanted).norm(dim=-1) / wanted.norm(dim=-1)).max()))
    return worst


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--prompt", type=int, default=700)
    parser.add_argument("--steps", type=int, default=8)
    given = parser.parse_args()
    dtype = torch.bfloat16 if given.device != "cpu" else torch.float32
    layer, sizes = Layer(Sizes(), given.device, dtype), Sizes()
    prompts = [given.prompt, given.prompt // 2, 1]
    tokens = [torch.randint(sizes.vocabulary, (n + given.steps,), device=given.device) for n in prompts]
    worst = compare(layer, tokens, prompts)
    print(f"{given.device}, {dtype}: {given.steps} tokens of {len(prompts)} requests, logits differ by {worst:.1e}")


if __name__ == "__main__":
    main()
