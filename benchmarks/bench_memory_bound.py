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
    silu_and_mul,
    gelu_and_mul,
    rope,
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
