"""RoPE with 8-bit results, alone and into paged caches, against float64."""

from __future__ import annotations

import math
import random
from typing import Any

import pytest
import torch

from flashinfer.errors import GradientError, UnsupportedError
from flashinfer.rope import (
    mla_rope_quantize_fp8,
    rope_quantize_fp8,
    rope_quantize_fp8_append_paged_kv_cache,
)

from ..support.oracle import rounding
from .test_rope import rotate_oracle

DTYPES = [torch.float16, torch.bfloat16, torch.float32]
EIGHT = [torch.float8_e4m3fn, torch.float8_e5m2]
# tokens, heads of q, heads of k (None: k has no heads), rotated elements, others
SHAPES = [
    (5, 8, 2, 64, 64), (3, 16, None, 64, 512), (19, 3, 3, 128, 0), (4, 2, None, 32, 96), (7, 5, 1, 6, 5),
    (1, 130, 1, 64, 128), (2, 1, 1, 2, 1), (6, 4, 2, 48, 16), (0, 2, 2, 16, 16), (300, 1, 1, 16, 0),
]  # fmt: skip


class Inputs:
    """Random heads with strides of a wider tensor, a cache of angles and positions."""

    def __init__(self, shape: tuple[int, ...], dtype: torch.dtype, device: str) -> None:
        self.tokens, self.q_heads, self.k_heads, self.rope, self.nope = shape
        self.device, self.dtype = device, dtype
        self.q, self.k = self.heads(self.q_heads), self.heads(self.k_heads)
        self.cache = torch.randn(50, self.rope, device=device)
        self.pos_ids = torch.randint(
            0, 50, (self.tokens,), device=device, dtype=random.choice([torch.int32, torch.int64])
        )

    def heads(self, heads: int | None, dim: int | None = None) -> torch.Tensor:
        whole = (self.tokens,) if heads is None else (self.tokens, heads)
        dim = self.rope + self.nope if dim is None else dim
        wide = torch.randn(*whole, dim + random.choice([0, 16, 3]), device=self.device).mul_(4).to(self.dtype)
        return wide[..., :dim]

    @property
    def parts(self) -> tuple[torch.Tensor | None, ...]:
        """Return q_rope, k_rope, q_nope, k_nope."""
        rotated, rest = slice(self.rope), slice(self.rope, None)
        nope = (self.q[..., rest], self.k[..., rest]) if self.nope else (None, None)
        return self.q[..., rotated], self.k[..., rotated], *nope

    def want(self, x: torch.Tensor, scale: float, is_neox: bool) -> tuple[torch.Tensor, torch.Tensor]:
        """Return heads of q or k scaled in float64, and the largest error before they have eight bits."""
        with_heads = x if x.dim() == 3 else x[:, None]
        angles = self.cache[self.pos_ids.long()]
        cos, sin = angles[:, : self.rope // 2], angles[:, self.rope // 2 :]
        want, terms = rotate_oracle(with_heads, cos, sin, not is_neox)
        rotated = torch.arange(x.shape[-1]) < self.rope
        error = torch.where(rotated, rounding(want, self.dtype) + terms * 4e-7, 0.0) + want.abs() * 1e-7
        return (want * scale).reshape(x.shape), (error * scale).reshape(x.shape)


def assert_eight_bits(got: torch.Tensor, want: torch.Tensor, error: torch.Tensor) -> None:
    """Check rounding to nearest within the finite numbers of the format, after an error of the input."""
    info = torch.finfo(got.dtype)
    bound = rounding(want.abs() + error, got.dtype) + error
    off = (got.cpu().double() - want.clamp(info.min, info.max)).abs()
    assert bool((off <= bound).all()), f"off by {(off / bound).max()} bounds"


def sentinels(like: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return a tensor of NaN, which no result has."""
    return torch.full(like.shape, float("nan"), device=like.device).to(dtype)


@pytest.mark.parametrize("is_neox", [True, False])
@pytest.mark.parametrize("quantized", EIGHT)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_values(shape, dtype, quantized, is_neox, device):
    x = Inputs(shape, dtype, device)
    q_out, k_out = sentinels(x.q, quantized), sentinels(x.k, quantized)
    outs = q_out[..., : x.rope], k_out[..., : x.rope], q_out[..., x.rope :], k_out[..., x.rope :]
    given = dict(zip(("q_rope_out", "k_rope_out", "q_nope_out", "k_nope_out"), outs, strict=True))
    before = x.q.clone(), x.k.clone()
    result = rope_quantize_fp8(
        *x.parts, x.cache, x.pos_ids, is_neox, quant_scale_q=0.3, quant_scale_kv=1.7, enable_pdl=True, **given
    )
    assert all(one is other for one, other in zip(result, outs, strict=True))
    assert_eight_bits(q_out, *x.want(x.q, 0.3, is_neox))
    assert_eight_bits(k_out, *x.want(x.k, 1.7, is_neox))
    assert torch.equal(x.q, before[0]) and torch.equal(x.k, before[1])
    new = rope_quantize_fp8(*x.parts, x.cache, x.pos_ids, is_neox, quantized, 0.3, 1.7)
    for one, other in zip(new, outs, strict=True):
        assert one.dtype == quantized and one.is_contiguous() and one.shape == other.shape
        assert torch.equal(one.view(torch.uint8), other.contiguous().view(torch.uint8))


def test_outputs_of_sglang(device):
    """Queries of MLA go into one buffer, the rotated part last."""
    x = Inputs((9, 16, None, 64, 512), torch.bfloat16, device)
    q_rope, k_rope, q_nope, k_nope = x.parts
    q_out = sentinels(x.q, torch.float8_e4m3fn)
    k_nope_out, k_rope_out = sentinels(k_nope, torch.float8_e4m3fn), sentinels(k_rope, torch.float8_e4m3fn)
    mla_rope_quantize_fp8(
        q_rope=q_rope, k_rope=k_rope, q_nope=q_nope, k_nope=k_nope, cos_sin_cache=x.cache, pos_ids=x.pos_ids,
        is_neox=False, quantize_dtype=torch.float8_e4m3fn, q_rope_out=q_out[..., 512:], k_rope_out=k_rope_out,
        q_nope_out=q_out[..., :512], k_nope_out=k_nope_out, quant_scale_q=1.0, quant_scale_kv=1.0,
    )  # fmt: skip
    want, error = x.want(x.q, 1.0, False)
    order = torch.cat([torch.arange(64, 576), torch.arange(64)])
    assert_eight_bits(q_out, want[..., order], error[..., order])
    assert_eight_bits(torch.cat([k_rope_out.float(), k_nope_out.float()], -1).to(q_out.dtype), *x.want(x.k, 1.0, False))


@pytest.mark.parametrize("quantized", EIGHT)
def test_limits(quantized, device):
    """Numbers beyond the format are clamped, NaN stays NaN, and a scale may be a tensor."""
    q = torch.tensor([[[1e6, -1e6, float("nan"), 0.0]]], device=device)
    cache, pos = torch.tensor([[1.0, 0.0]], device=device), torch.zeros(1, dtype=torch.int64, device=device)
    rope, nope, most = q[..., :2], q[..., 1:], torch.finfo(quantized).max
    for scale in (10.0, torch.tensor([10.0], device=device), torch.tensor(10.0, dtype=torch.float64, device=device)):
        rotated, _, scaled, empty = rope_quantize_fp8(
            rope, rope[0], nope, None, cache, pos, quantize_dtype=quantized, quant_scale_q=scale
        )
        assert rotated.float().tolist() == [[[most, -most]]] and empty.shape == (1, 0)
        first, second, third = scaled.float()[0, 0].tolist()
        assert first == -most and math.isnan(second) and third == 0


class Paged(Inputs):
    """Inputs of an append, and an empty cache with shuffled pages of two requests and of padding."""

    def __init__(
        self, shape: tuple[int, ...], dtype: torch.dtype, quantized: torch.dtype, layout: str, device: str
    ) -> None:
        super().__init__(shape, dtype, device)
        self.page_size, self.layout = random.choice([1, 5, 16]), layout
        first = self.tokens // 2
        lengths = first, self.tokens - first
        pages = [-(-(length + 3) // self.page_size) for length in lengths]
        order = random.sample(range(sum(pages) + 2), sum(pages))
        where = [(b, 3 + i) for b, length in enumerate(lengths) for i in range(length)]
        padding = random.randrange(self.tokens) if self.tokens else None
        if padding is not None:
            where[padding] = (-1, -1)
        starts = [0, pages[0], sum(pages)]
        self.slots = [
            None if b < 0 else (order[starts[b] + at // self.page_size], at % self.page_size) for b, at in where
        ]
        tables: Any = order, starts, [b for b, _ in where], [at for _, at in where]
        self.tables = [torch.tensor(table, dtype=torch.int32, device=device) for table in tables]
        dims = [self.rope + self.nope, self.rope + 2] if self.k_heads else [self.nope, self.rope]
        self.v = self.heads(self.k_heads, self.rope + 2) if self.k_heads else None
        heads = (self.k_heads,) if self.k_heads else ()
        self.caches = [
            sentinels(torch.empty(sum(pages) + 2, *self.order(self.page_size, heads), dim, device=device), quantized)
            for dim in dims
        ]

    def order(self, page_size: int, heads: tuple[int, ...]) -> tuple[int, ...]:
        return (*heads, page_size) if self.layout == "HND" else (page_size, *heads)

    def rows(self, cache: torch.Tensor) -> torch.Tensor:
        """Return the rows of a cache in the order of tokens, without padding; then make them sentinels."""
        by_slot = cache.transpose(1, 2) if self.layout == "HND" and cache.dim() == 4 else cache
        result = []
        for slot in self.slots:
            if slot is not None:
                result.append(by_slot[slot].clone())
                by_slot[slot] = torch.full(by_slot[slot].shape, float("nan"), device=cache.device).to(cache.dtype)
        return torch.stack(result) if result else by_slot[:0, 0]


@pytest.mark.parametrize("quantized", EIGHT)
@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize("is_neox", [True, False])
@pytest.mark.parametrize("shape", SHAPES)
def test_append(shape, is_neox, layout, quantized, device):
    dtype = random.choice(DTYPES)
    x = Paged(shape, dtype, quantized, layout, device)
    got = rope_quantize_fp8_append_paged_kv_cache(
        *x.parts, x.v, x.cache, x.pos_ids, tuple(x.caches), *x.tables, is_neox, None, 0.5, 0.7,
        page_size=x.page_size, kv_layout=layout,
    )  # fmt: skip
    q = torch.cat([part.float() for part in got], -1).to(quantized)
    assert q.shape == x.q.shape
    assert_eight_bits(q, *x.want(x.q, 0.5, is_neox))
    kept = torch.tensor([slot is not None for slot in x.slots], dtype=torch.bool)
    want, error = (part[kept] for part in x.want(x.k, 0.7, is_neox))
    first, second = (x.rows(cache) for cache in x.caches)
    if x.k_heads:
        assert_eight_bits(first, want, error)
        value = x.v.cpu().double()[kept] * 0.7
        assert_eight_bits(second, value, value.abs() * 1e-7)
    else:
        assert_eight_bits(first, want[..., x.rope :], error[..., x.rope :])
        assert_eight_bits(second, want[..., : x.rope], error[..., : x.rope])
    assert all(bool(cache.float().isnan().all()) for cache in x.caches), "another slot was written"


def test_mistakes(device):
    x = Inputs((4, 2, 2, 16, 16), torch.float16, device)
    q, k, q_nope, k_nope = x.parts
    out = torch.zeros(4, 2, 16, device=device).to(torch.float8_e4m3fn)
    good = dict(q_rope=q, k_rope=k, q_nope=q_nope, k_nope=k_nope, cos_sin_cache=x.cache, pos_ids=x.pos_ids)
    for error, message, change in (
        (TypeError, "k_rope: got float32, wanted float16", dict(k_rope=k.float())),
        (TypeError, "cos_sin_cache: got float16", dict(cos_sin_cache=x.cache.half())),
        (TypeError, "pos_ids: got float32", dict(pos_ids=x.pos_ids.float())),
        (TypeError, "quantize_dtype: got torch.int8", dict(quantize_dtype=torch.int8)),
        (TypeError, "quantize_dtype: got torch.float8_e5m2", dict(quantize_dtype=torch.float8_e5m2, q_rope_out=out)),
        (TypeError, "k_rope_out: got float32", dict(q_rope_out=out, k_rope_out=out.float())),
        (ValueError, "k_nope: got 2 dimensions, wanted 3", dict(k_nope=k_nope[:, 0])),
        (ValueError, r"q_nope: got shape \[4, 1, 16\]", dict(q_nope=q_nope[:, :1])),
        (ValueError, "cos_sin_cache: got a last dimension of 15", dict(cos_sin_cache=x.cache[:, :15])),
        (ValueError, "q_rope: got a last dimension of 14", dict(q_rope=q[..., :14])),
        (ValueError, "k_rope: got 3 tokens, wanted 4", dict(k_rope=k[:3], k_nope=k_nope[:3])),
        (ValueError, r"pos_ids: got shape \[3\]", dict(pos_ids=x.pos_ids[:3])),
        (ValueError, "quant_scale_q: got no positive number", dict(quant_scale_q=0.0)),
        (ValueError, "quant_scale_kv: got 2 elements", dict(quant_scale_kv=torch.ones(2, device=device))),
        (ValueError, r"q_rope_out: got shape \[3, 2, 16\]", dict(q_rope_out=out[:3])),
        (ValueError, "overlaps the memory", dict(q_rope_out=out, k_rope_out=out)),
        (ValueError, "backend: got 'cutlass'", dict(backend="cutlass")),
        (UnsupportedError, "backend: got 'cutile'", dict(backend="cutile")),
        (GradientError, "has no gradient", dict(q_rope=q.clone().requires_grad_())),
    ):
        with pytest.raises(error, match=f"^rope_quantize_fp8: .*{message}"):
            rope_quantize_fp8(**{**good, **change})
    with pytest.raises(ValueError, match="mla_rope_quantize_fp8: k_rope: got 3 dimensions, wanted 2"):
        mla_rope_quantize_fp8(**good)
    assert not bool(out.float().any())


def test_mistakes_of_an_append(device):
    x = Paged((4, 2, 2, 16, 16), torch.float16, torch.float8_e4m3fn, "NHD", device)
    names = "kv_indices", "kv_indptr", "batch_indices", "positions"
    good = dict(
        zip(("q_rope", "k_rope", "q_nope", "k_nope"), x.parts, strict=True), v=x.v, cos_sin_cache=x.cache,
        pos_ids=x.pos_ids, paged_kv_cache=tuple(x.caches), page_size=x.page_size, **dict(zip(names, x.tables, strict=True)),
    )  # fmt: skip
    k_cache, v_cache = x.caches
    for error, message, change in (
        (ValueError, "kv_layout: got 'NDH'", dict(kv_layout="NDH")),
        (TypeError, "paged_kv_cache: got Tensor, wanted a pair of tensors", dict(paged_kv_cache=k_cache)),
        (TypeError, r"paged_kv_cache\[1\]: got float32", dict(paged_kv_cache=(k_cache, v_cache.float()))),
        (ValueError, r"paged_kv_cache\[0\]: got shape", dict(paged_kv_cache=(k_cache[..., :31], v_cache))),
        (ValueError, r"paged_kv_cache\[1\]: got shape", dict(paged_kv_cache=(k_cache, v_cache[:1]))),
        (ValueError, r"paged_kv_cache\[0\]: got shape", dict(page_size=x.page_size + 1)),
        (ValueError, "v: got None, wanted Tensor", dict(v=None)),
        (ValueError, "v: got Tensor, wanted None", dict(k_rope=x.k[:, 0, :16], k_nope=x.k[:, 0, 16:])),
        (ValueError, r"v: got shape \[4, 1, 18\]", dict(v=x.v[:, :1])),
        (ValueError, r"positions: got shape \[3\]", dict(positions=x.tables[3][:3])),
        (TypeError, "batch_indices", dict(batch_indices=x.tables[2].float())),
        (TypeError, "quantize_dtype: got torch.float8_e5m2", dict(quantize_dtype=torch.float8_e5m2)),
    ):
        with pytest.raises(error, match=f"^rope_quantize_fp8_append_paged_kv_cache: .*{message}"):
            rope_quantize_fp8_append_paged_kv_cache(**{**good, **change})
    assert all(bool(cache.float().isnan().all()) for cache in x.caches)


def test_indices_outside(device):
    """On the CPU they are errors before any write. On CUDA the token is not rotated, or writes no slot."""
    x = Paged((4, 2, 2, 16, 16), torch.float16, torch.float8_e4m3fn, "NHD", device)
    pos_ids, positions = x.pos_ids.clone(), x.tables[3].clone()
    pos_ids[2] = 50
    at = next(i for i, slot in enumerate(x.slots) if slot is not None)
    positions[at] = 1000

    def call(pos_ids: torch.Tensor, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return rope_quantize_fp8_append_paged_kv_cache(
            *x.parts, x.v, x.cache, pos_ids, tuple(x.caches), *x.tables[:3], positions, page_size=x.page_size
        )

    if device == "cpu":
        with pytest.raises(ValueError, match=r"paged_kv_cache: pos_ids\[2\]: got 50, wanted 0 to 49"):
            call(pos_ids, x.tables[3])
        with pytest.raises(ValueError, match=rf"paged_kv_cache: positions\[{at}\]: got 1000"):
            call(x.pos_ids, positions)
        assert all(bool(cache.float().isnan().all()) for cache in x.caches)
        return
    got = call(pos_ids, positions)[0]
    assert torch.equal(got[2].float(), x.q[2, :, :16].to(got.dtype).float())
    x.slots[at] = None
    for cache in x.caches:
        assert not bool(x.rows(cache).float().isnan().any()) and bool(cache.float().isnan().all())
