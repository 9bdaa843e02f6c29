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
    ) -> None:
        self.qo_lens, self.kv_lens, self.heads, self.page_size = list(qo_lens), list(kv_lens), heads, page_size
        self.dtype, self.device, self.causal = dtype, device, causal
        self.kv_dtype = kv_dtype or dtype
        self.kv_scale = self.kpe_scale = 1.0 if self.kv_dtype == dtype else random.uniform(0.3, 2)
        self.paged = Paged(
            kv_lens, page_size, 1, 512, self.kv_dtype, device, form="pair", head_dim_vo=64, shared=shared
        )
        k, v = self.paged.k[:, :, 0], self.paged.v[:, :, 0]
        self.ckv, self.kpe = (x.contiguous().to(device) for x in (k, v))
        if form == "joined":
            parts = (x.view(torch.uint8) for x in (self.ckv, self.kpe))
            joined = torch.cat(list(parts), -1).view(self.kv_dtype)
            self.ckv, self.kpe = joined.split([512, 64], -1)
        rows = sum(qo_lens)
        self.q_nope, self.q_pe = drawn((rows, heads, 512), dtype, device), drawn((rows, heads, 64), dtype, device)
        self.qo_indptr, self.lens = indptr_of(qo_lens).to(device), int32(kv_lens).to(device)

    @property
    def inputs(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        return self.q_nope, self.q_pe, self.ckv, self.kpe

    @property
    def tables(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        indptr, indices, _ = self.paged.tables_on(self.device)
        return self.qo_indptr, indptr, indices, self.lens

    def plan(self, wrapper: Any, **changes: Any) -> None:
        given = dict(
            num_heads=self.heads, head_dim_ckv=512, head_dim_kpe=64, page_size=self.page_size, causal=self.causal,
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
            ckv, kpe = ckv * self.kv_scale, kpe * self.kpe_scale
            requests.append((torch.cat([ckv, kpe], -1), ckv))
        return batch_attention(q, self.qo_lens, requests, causal=self.causal, sm_scale=SCALE)

    def check(self, out: torch.Tensor, lse: torch.Tensor | None = None) -> None:
        want, want_lse = self.expected()
        assert_near(out, want, lse, want_lse)


def drawn_batch(dtype: torch.dtype, device: str, most_keys: int, kv_dtype: torch.dtype | None = None) -> Batch:
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
    )  # fmt: skip


def sentinels(batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
    """Return an output and an lse filled with values that no result has."""
    shape = batch.q_nope.shape
    out = torch.full(shape, math.nan, dtype=batch.dtype, device=batch.device)
    return out, torch.full(shape[:2], math.nan, dtype=torch.float32, device=batch.device)
