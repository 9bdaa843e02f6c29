"""Compare norm, activation, rope and page with the memory's speed and with torch, in one run.

Bytes count each input and each output once. `of_copy` is the share of the rate of a copy of the same size.
`vs_torch` is torch's time over ours.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from timing import Call, Report, arguments, seconds, sets_for

import flashinfer

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def tensors(count: int, *shape: int, dtype: torch.dtype, device: str) -> list[torch.Tensor]:
    return [torch.randn(*shape, device=device).to(dtype) for _ in range(count)]


def rmsnorm(rows: int, cols: int, dtype: torch.dtype, device: str, n: int) -> tuple[int, Call, Call]:
    x, out = tensors(n, rows, cols, dtype=dtype, device=device), tensors(n, rows, cols, dtype=dtype, device=device)
    w = tensors(1, cols, dtype=dtype, device=device)[0]
    return (
        2 * rows * cols * dtype.itemsize,
        lambda i: flashinfer.rmsnorm(x[i], w, out=out[i]),
        lambda i: F.rms_norm(x[i], (cols,), w, 1e-6),
    )


def fused_add_rmsnorm(rows: int, cols: int, dtype: torch.dtype, device: str, n: int) -> tuple[int, Call, Call]:
    x, r = tensors(n, rows, cols, dtype=dtype, device=device), tensors(n, rows, cols, dtype=dtype, device=device)
    w = tensors(1, cols, dtype=dtype, device=device)[0]

    def torch_way(i: int) -> None:
        r[i].add_(x[i])
        x[i].copy_(F.rms_norm(r[i], (cols,), w, 1e-6))

    return 4 * rows * cols * dtype.itemsize, lambda i: flashinfer.fused_add_rmsnorm(x[i], r[i], w), torch_way


def layernorm(rows: int, cols: int, dtype: torch.dtype, device: str, n: int) -> tuple[int, Call, Call]:
    x, out = tensors(n, rows, cols, dtype=dtype, device=device), tensors(n, rows, cols, dtype=dtype, device=device)
    w, b = tensors(2, cols, dtype=dtype, device=device)
    return (
        2 * rows * cols * dtype.itemsize,
        lambda i: flashinfer.layernorm(x[i], w, b, out=out[i]),
        lambda i: F.layer_norm(x[i], (cols,), w, b),
    )


def eight_bits(x: torch.Tensor, scale: float | torch.Tensor, out: torch.Tensor) -> None:
    """Round to e4m3 with torch."""
    out.copy_((x.float() / scale).clamp_(-448, 448).to(torch.float8_e4m3fn))


def layernorm_quant(rows: int, cols: int, dtype: torch.dtype, device: str, n: int) -> tuple[int, Call, Call]:
    x, w = tensors(n, rows, cols, dtype=dtype, device=device), torch.ones(2, cols, device=device)
    out, scale = [torch.empty_like(one, dtype=torch.float8_e4m3fn) for one in x], torch.full((1,), 0.02, device=device)
    return (
        rows * cols * (dtype.itemsize + 1),
        lambda i: flashinfer.layernorm_quant(out[i], x[i], w[0], w[1], scale),
        lambda i: eight_bits(F.layer_norm(x[i].float(), (cols,), w[0], w[1]), scale, out[i]),
    )


def fused_add_rmsnorm_block_quant(
    rows: int, cols: int, dtype: torch.dtype, device: str, n: int
) -> tuple[int, Call, Call]:
    """Read two tensors, write the residual, the norm, its eight bits and their scales."""
    x, r = tensors(n, rows, cols, dtype=dtype, device=device), tensors(n, rows, cols, dtype=dtype, device=device)
    w, normed = tensors(1, cols, dtype=dtype, device=device)[0], [torch.empty_like(one) for one in x]
    out = [torch.empty_like(one, dtype=torch.float8_e4m3fn) for one in x]
    scale = [torch.empty(cols // 128, rows, device=device) for _ in x]

    def torch_way(i: int) -> None:
        r[i].add_(x[i])
        normed[i].copy_(F.rms_norm(r[i], (cols,), w, 1e-6))
        blocks = normed[i].float().view(rows, -1, 128)
        scales = blocks.abs().amax(-1).clamp_(min=1e-10) / 448
        scale[i].copy_(scales.T)
        eight_bits(blocks, scales[..., None], out[i].view(rows, -1, 128))

    return (
        rows * cols * (4 * dtype.itemsize + 1) + rows * cols // 128 * 4,
        lambda i: flashinfer.fused_add_rmsnorm_fp8_block_quant(out[i], scale[i], normed[i], x[i], r[i], w),
        torch_way,
    )


def group_quant(rows: int, cols: int, dtype: torch.dtype, device: str, n: int) -> tuple[int, Call, Call]:
    """Read a tensor, write its eight bits and a scale for each 128 columns."""
    x = tensors(n, rows, cols, dtype=dtype, device=device)
    out = [torch.empty_like(one, dtype=torch.float8_e4m3fn) for one in x]

    def torch_way(i: int) -> None:
        blocks = x[i].float().view(rows, -1, 128)
        scales = blocks.abs().amax(-1).clamp_(min=1e-10) / 448
        eight_bits(blocks, scales[..., None], out[i].view(rows, -1, 128))

    return (
        rows * cols * (dtype.itemsize + 1) + rows * cols // 128 * 4,
        lambda i: flashinfer.per_token_group_quant_8bit(x[i], 128),
        torch_way,
    )


def silu_and_mul(rows: int, cols: int, dtype: torch.dtype, device: str, n: int) -> tuple[int, Call, Call]:
    x, out = tensors(n, rows, 2 * cols, dtype=dtype, device=device), tensors(n, rows, cols, dtype=dtype, device=device)
    return (
        3 * rows * cols * dtype.itemsize,
        lambda i: flashinfer.silu_and_mul(x[i], out=out[i]),
        lambda i: F.silu(x[i][:, :cols]) * x[i][:, cols:],
    )


def gelu_and_mul(rows: int, cols: int, dtype: torch.dtype, device: str, n: int) -> tuple[int, Call, Call]:
    x, out = tensors(n, rows, 2 * cols, dtype=dtype, device=device), tensors(n, rows, cols, dtype=dtype, device=device)
    return (
        3 * rows * cols * dtype.itemsize,
        lambda i: flashinfer.gelu_and_mul(x[i], out=out[i]),
        lambda i: F.gelu(x[i][:, :cols]) * x[i][:, cols:],
    )


def rope(tokens: int, cols: int, dtype: torch.dtype, device: str, n: int) -> tuple[int, Call, Call]:
    """Rotate q of cols/128 heads and k of a quarter of them in place, by positions."""
    heads, dim = cols // 128, 128
    q, k = (
        tensors(n, tokens, heads, dim, dtype=dtype, device=device),
        tensors(n, tokens, heads // 4, dim, dtype=dtype, device=device),
    )
    pos = torch.randint(0, 32768, (tokens,), dtype=torch.int32, device=device)
    inv = 1e4 ** -(torch.arange(0, dim, 2, device=device) / dim)
    angle = pos[:, None] * inv
    cos, sin = (t.repeat(1, 2)[:, None].to(dtype) for t in (angle.cos(), angle.sin()))

    def torch_way(i: int) -> None:
        for x in (q[i], k[i]):
            half = torch.cat((-x[..., dim // 2 :], x[..., : dim // 2]), -1)
            x.copy_(x * cos + half * sin)

    total = 2 * (q[0].numel() + k[0].numel()) * dtype.itemsize
    return total, lambda i: flashinfer.apply_rope_pos_ids_inplace(q[i], k[i], pos), torch_way


class QuantisedHeads:
    """q of cols/128 heads, k and v of a quarter of them, angles, and torch's rotation to e4m3."""

    def __init__(self, tokens: int, cols: int, dtype: torch.dtype, device: str, n: int) -> None:
        heads, dim = cols // 128, 128
        self.q = tensors(n, tokens, heads, dim, dtype=dtype, device=device)
        self.k, self.v = (tensors(n, tokens, heads // 4, dim, dtype=dtype, device=device) for _ in "12")
        self.outs = [[torch.empty_like(x[i], dtype=torch.float8_e4m3fn) for x in (self.q, self.k)] for i in range(n)]
        self.pos = torch.randint(0, 32768, (tokens,), dtype=torch.int32, device=device)
        self.cache = torch.randn(32768, dim, device=device)
        self.bytes = (self.q[0].numel() + self.k[0].numel()) * (dtype.itemsize + 1) + tokens * dim * 4

    def torch_way(self, i: int) -> None:
        cos, sin = (part.repeat(1, 2)[:, None].to(self.q[i].dtype) for part in self.cache[self.pos.long()].chunk(2, -1))
        for x, out in zip((self.q[i], self.k[i]), self.outs[i], strict=True):
            half = torch.cat((-x[..., 64:], x[..., :64]), -1)
            eight_bits(x * cos + half * sin, 1.0, out)


def rope_quantize(tokens: int, cols: int, dtype: torch.dtype, device: str, n: int) -> tuple[int, Call, Call]:
    """Rotate q and k, by a cache of angles, to new e4m3 tensors."""
    x = QuantisedHeads(tokens, cols, dtype, device, n)

    def ours(i: int) -> None:
        q, k = x.outs[i]
        flashinfer.rope_quantize_fp8(x.q[i], x.k[i], None, None, x.cache, x.pos, q_rope_out=q, k_rope_out=k)

    return x.bytes, ours, x.torch_way


def rope_quantize_append(tokens: int, cols: int, dtype: torch.dtype, device: str, n: int) -> tuple[int, Call, Call]:
    """Rotate q to e4m3, and k and v into pages of 16 of 64 requests."""
    x, page, batch = QuantisedHeads(tokens, cols, dtype, device, n), 16, 64
    each, heads = tokens // batch, cols // 128 // 4
    pages = batch * ((each + page - 1) // page)
    caches = [[torch.zeros(pages, page, heads, 128, device=device).to(torch.float8_e4m3fn) for _ in "12"] for _ in x.q]
    indptr = torch.arange(batch + 1, dtype=torch.int32, device=device) * (pages // batch)
    indices = torch.randperm(pages, device=device).int()
    request = torch.arange(batch, device=device).repeat_interleave(each).int()
    position = torch.arange(each, device=device).repeat(batch).int()
    page_of, slot = indices[(indptr[request.long()] + position // page).long()].long(), (position % page).long()

    def ours(i: int) -> None:
        flashinfer.rope_quantize_fp8_append_paged_kv_cache(
            x.q[i], x.k[i], None, None, x.v[i], x.cache, x.pos, tuple(caches[i]), indices, indptr, request, position,
            page_size=page, q_rope_out=x.outs[i][0],
        )  # fmt: skip

    def torch_way(i: int) -> None:
        x.torch_way(i)
        caches[i][0].view(torch.uint8)[page_of, slot] = x.outs[i][1].view(torch.uint8)
        value = x.v[i].float().clamp_(-448, 448).to(torch.float8_e4m3fn)
        caches[i][1].view(torch.uint8)[page_of, slot] = value.view(torch.uint8)

    return x.bytes + x.v[0].numel() * (dtype.itemsize + 1), ours, torch_way


def append(tokens: int, cols: int, dtype: torch.dtype, device: str, n: int) -> tuple[int, Call, Call]:
    """Append tokens of cols/128 heads to pages of 16, 64 requests."""
    heads, dim, page, batch = cols // 128, 128, 16, 64
    each = tokens // batch
    pages = batch * ((each + page - 1) // page)
    key, value = (
        tensors(n, tokens, heads, dim, dtype=dtype, device=device),
        tensors(n, tokens, heads, dim, dtype=dtype, device=device),
    )
    cache = tensors(n, pages, 2, page, heads, dim, dtype=dtype, device=device)
    indptr = torch.arange(batch + 1, dtype=torch.int32, device=device) * (pages // batch)
    indices = torch.randperm(pages, device=device).int()
    last = torch.full((batch,), (each - 1) % page + 1, dtype=torch.int32, device=device)
    where = (
        torch.arange(batch, device=device).repeat_interleave(each).int(),
        torch.arange(each, device=device).repeat(batch).int(),
    )
    slot = (indices[(indptr[where[0].long()] + where[1] // page).long()].long(), (where[1] % page).long())

    def torch_way(i: int) -> None:
        cache[i][slot[0], 0, slot[1]] = key[i]
        cache[i][slot[0], 1, slot[1]] = value[i]

    return (
        4 * key[0].numel() * dtype.itemsize,
        lambda i: flashinfer.append_paged_kv_cache(key[i], value[i], *where, cache[i], indices, indptr, last),
        torch_way,
    )


def copy_speed(rows: int, cols: int, dtype: torch.dtype, device: str, n: int) -> float:
    """Return the bytes per second of torch's copy of a matrix."""
    source, target = (
        tensors(n, rows, cols, dtype=dtype, device=device),
        tensors(n, rows, cols, dtype=dtype, device=device),
    )
    return 2 * rows * cols * dtype.itemsize / seconds(lambda i: target[i].copy_(source[i]), n, device)


OPERATORS: list[Callable[..., tuple[int, Call, Call]]] = [
    rmsnorm,
    fused_add_rmsnorm,
    layernorm,
    layernorm_quant,
    fused_add_rmsnorm_block_quant,
    group_quant,
    silu_and_mul,
    gelu_and_mul,
    rope,
    rope_quantize,
    rope_quantize_append,
    append,
]
SHAPES = {"cpu": [(4096, 4096)], "cuda": [(4096, 4096), (16384, 8192)]}


def main() -> None:
    options = arguments(__doc__ or "")
    report = Report("memory-bound operators")
    device = options.device
    for rows, cols in SHAPES[device]:
        for name, dtype in DTYPES.items():
            if device == "cuda" and name != "bfloat16":
                continue
            n = sets_for(2 * rows * cols * dtype.itemsize, device)
            copy = copy_speed(rows, cols, dtype, device, n)
            report.add("TB/s", copy / 1e12, name="copy", rows=rows, cols=cols, dtype=name)
            for operator in OPERATORS:
                if options.only not in operator.__name__:
                    continue
                total, ours, theirs = operator(rows, cols, dtype, device, n)
                mine = seconds(ours, n, device)
                peer = seconds(theirs, n, device)
                report.add(
                    "us", mine * 1e6, {"torch": peer * 1e6}, of_floor=total / mine / copy, more={"TB/s": total / mine / 1e12},
                    name=operator.__name__, rows=rows, cols=cols, dtype=name,
                )  # fmt: skip
    report.write(options.json)


if __name__ == "__main__":
    main()
