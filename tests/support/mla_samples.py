"""Random batches over a cache of latents, and their attention in float64."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from typing import Any

import torch

import flashinfer

from .attention_oracle import Paged, assert_near, batch_attention, drawn, indptr_of, int32, workspace

SCALE = (128 + 64) ** -0.5


class Batch:
    """Requests with queries and keys. Unused slots of the cache are NaN.

    ``form``: ``pair`` of tensors, or ``joined``: both parts of a row in one tensor. ``kv_dtype``: of the
    cache, by default ``dtype``. If it differs, the cache has a random ``kv_scale``. ``kpe_scale`` is equal to it.
    ``head_dim_kpe``: 64, or 0 for no rotary keys.
    """

    def __init__(
        self,
        qo_lens: Sequence[int],
        kv_lens: Sequence[int],
        heads: int,
        page_size: int,
        dtype: torch.dtype,
        device: str,
        *,
        causal: bool = False,
        form: str = "pair",
        shared: bool = False,
        kv_dtype: torch.dtype | None = None,
        head_dim_kpe: int = 64,
    ) -> None:
        self.head_dim_kpe = head_dim_kpe
        self.scales: torch.Tensor | None = None
        self.sinks: torch.Tensor | None = None
        self.qo_lens, self.kv_lens, self.heads, self.page_size = list(qo_lens), list(kv_lens), heads, page_size
        self.dtype, self.device, self.causal = dtype, device, causal
        self.kv_dtype = kv_dtype or dtype
        self.kv_scale = self.kpe_scale = 1.0 if self.kv_dtype == dtype else random.uniform(0.3, 2)
        self.paged = Paged(
            kv_lens, page_size, 1, 512, self.kv_dtype, device, form="pair", head_dim_vo=64, shared=shared
        )
        k, v = self.paged.k[:, :, 0], self.paged.v[:, :, 0, :head_dim_kpe]
        self.ckv, self.kpe = (x.contiguous().to(device) for x in (k, v))
        if form == "joined":
            parts = (x.view(torch.uint8) for x in (self.ckv, self.kpe))
            joined = torch.cat(list(parts), -1).view(self.kv_dtype)
            self.ckv, self.kpe = joined.split([512, head_dim_kpe], -1)
        rows = sum(qo_lens)
        self.q_nope, self.q_pe = (
            drawn((rows, heads, 512), dtype, device),
            drawn((rows, heads, head_dim_kpe), dtype, device),
        )
        self.qo_indptr, self.lens = indptr_of(qo_lens).to(device), int32(kv_lens).to(device)

    @property
    def inputs(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        return self.q_nope, self.q_pe, self.ckv, self.kpe

    @property
    def tables(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        indptr, indices, _ = self.paged.tables_on(self.device)
        return self.qo_indptr, indptr, indices, self.lens

    def draw_scales(self) -> None:
        """Draw scales of latents per token and group, in rows with gaps. Unused slots and gaps are NaN."""
        unused = self.paged.k[:, :, 0, :1].float().isnan()
        shape = (*unused.shape[:2], 4)
        room = torch.full((shape[0], shape[1] + 1, 7), math.nan, device=self.device)
        self.scales = room[:, 1:, 2:6]
        self.scales.copy_((torch.rand(shape) * 2 - 1).exp2().masked_fill(unused, math.nan))

    def draw_sinks(self) -> None:
        """Draw a sink of each head: some are large, some have no weight."""
        sinks = torch.randn(self.heads) * 3
        self.sinks = sinks.masked_fill(torch.rand(self.heads) < 0.2, -math.inf).to(self.device)

    @property
    def scale_arguments(self) -> dict[str, Any]:
        """Scales of a run."""
        if self.kv_dtype == self.dtype:
            return {}
        one = dict(ckv_scale=self.kv_scale) if self.scales is None else dict(ckv_scale_arr=self.scales)
        return one | dict(kpe_scale=self.kpe_scale)

    def plan(self, wrapper: Any, **changes: Any) -> None:
        given = dict(
            num_heads=self.heads, head_dim_ckv=512, head_dim_kpe=self.head_dim_kpe, page_size=self.page_size, causal=self.causal,
            sm_scale=SCALE, q_data_type=self.dtype, kv_data_type=self.kv_dtype,
        )  # fmt: skip
        names = ("qo_indptr", "kv_indptr", "kv_indices", "kv_len_arr")
        wrapper.plan(**(dict(zip(names, self.tables, strict=True)) | given | changes))

    def planned(self, backend: str = "auto") -> Any:
        wrapper = flashinfer.BatchMLAPagedAttentionWrapper(workspace(self.device), backend=backend)
        self.plan(wrapper)
        return wrapper

    def expected(self) -> tuple[torch.Tensor, torch.Tensor]:
        q = torch.cat([self.q_nope.double(), self.q_pe.double()], -1)
        requests = []
        for b in range(len(self.kv_lens)):
            ckv, kpe = (x.double() for x in self.paged.request(b))
            kpe = kpe[..., : self.head_dim_kpe] * self.kpe_scale
            ckv = ckv * self.kv_scale if self.scales is None else self.scaled(b, ckv)
            requests.append((torch.cat([ckv, kpe], -1), ckv))
        return batch_attention(q, self.qo_lens, requests, causal=self.causal, sm_scale=SCALE, sinks=self.sinks)

    def scaled(self, b: int, ckv: torch.Tensor) -> torch.Tensor:
        """Return a request's latents times their scales. CUDA kernels round the products."""
        assert self.scales is not None
        scales = self.scales.cpu()[self.paged.tables[b]].flatten(0, 1)[: len(ckv)]
        product = ckv * scales.double().repeat_interleave(128, -1)[:, None]
        return product.float().to(self.dtype).double() if self.device == "cuda" else product

    def check(self, out: torch.Tensor, lse: torch.Tensor | None = None) -> None:
        want, want_lse = self.expected()
        assert_near(out, want, lse, want_lse)


def drawn_batch(
    dtype: torch.dtype,
    device: str,
    most_keys: int,
    kv_dtype: torch.dtype | None = None,
    head_dim_kpe: int = 64,
) -> Batch:
    """Return random heads, pages and lengths.

    Some batches have one long request, no request or an empty one.
    """
    heads = random.choice((8, 16, 24, 32, 64, 96, 128))
    page_size = random.choice((1, 2, 5, 16, 17, 32, 48, 64, 128))
    requests = random.choice((1, 1, 2, 3, 5))
    kv_lens = [random.choice((0, 1, 15, 63, 64, 65, 128, random.randrange(most_keys))) for _ in range(requests)]
    if random.random() < 0.3:
        kv_lens[random.randrange(requests)] = random.randrange(most_keys, 4 * most_keys)
    qo_lens = [random.choice((0, 1, 1, 1, 2, 4, 7)) for _ in range(requests)]
    return Batch(
        qo_lens, kv_lens, heads, page_size, dtype, device, causal=random.random() < 0.5,
        form=random.choice(("pair", "joined")), shared=random.random() < 0.3, kv_dtype=kv_dtype,
        head_dim_kpe=head_dim_kpe,
    )  # fmt: skip


def sentinels(batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
    """Return an output and an lse filled with values that no result has."""
    shape = batch.q_nope.shape
    out = torch.full(shape, math.nan, dtype=batch.dtype, device=batch.device)
    return out, torch.full(shape[:2], math.nan, dtype=torch.float32, device=batch.device)
