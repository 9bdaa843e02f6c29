"""``profile``: run a kernel that writes events, on random inputs, and write its trace."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ..jit.report import write
from .table import show
from .usage import Add, UsageError, json_option

HELP = "Run a kernel that writes events, and write its trace for ui.perfetto.dev."
KERNELS = ("mla", "prefill", "decode", "attention")
RUNS = 3  # only the last run is traced: the first ones load modules and warm caches
MOST_WORDS = 1 << 26  # words of a buffer
DTYPES = ("bfloat16", "float16", "float32")


def arguments(add: Add) -> None:
    """Declare the options."""
    json_option(add)
    add(
        "kernel",
        choices=KERNELS,
        help="kernels of MLA, prefill, paged decode or BatchAttention",
    )
    add("--out", type=Path, required=True, metavar="FILE", help="the trace, JSON")
    add("--html", type=Path, metavar="FILE", help="also write a page with the timeline")
    add("--device", default=None, help="cpu or cuda; by default the GPU, if there is one")
    add("--backend", default="auto", help="auto, fa2 or fa3, for mla and prefill")
    add("--dtype", default="bfloat16", choices=DTYPES)
    add("--batch", type=_positive, default=None, help="requests")
    add("--kv-len", type=_positive, default=None, help="keys per request")
    add("--qo-len", type=_positive, default=None, help="queries per request; 1 for decode")
    add("--heads", type=_positive, default=None, help="query heads")
    add("--kv-heads", type=_positive, default=8, help="KV heads; mla has 1")
    add("--head-dim", type=_positive, default=128, help="head size; mla has 512 and 64")
    add("--page-size", type=_positive, default=None, help="tokens per page")
    add(
        "--words",
        type=_positive,
        default=None,
        help="8-byte words of the buffer; the default suffices for most kernels",
    )


def _positive(text: str) -> int:
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"got {text!r}, wanted a positive number")
    return int(text)


# Sizes on a GPU and on a CPU: requests, keys, queries, heads, tokens per page.
SIZES = {
    "mla": {"cuda": (128, 4096, 1, 128, 64), "cpu": (4, 1024, 1, 16, 64)},
    "prefill": {"cuda": (4, 4096, 4096, 32, 16), "cpu": (2, 512, 512, 8, 16)},
    "decode": {"cuda": (64, 4096, 1, 32, 16), "cpu": (8, 1024, 1, 8, 16)},
    "attention": {"cuda": (64, 4096, 64, 32, 16), "cpu": (6, 512, 16, 8, 16)},
}


def run(options: argparse.Namespace) -> int:
    """Run the kernel and write the files. Raise ``UsageError`` for a kernel or file that cannot be used."""
    import torch

    from .. import profiler
    from .._profiler.buffer import read

    for name, path in (("--out", options.out), ("--html", options.html)):
        if path is not None and not path.absolute().parent.is_dir():
            raise UsageError(f"{name}: {path.absolute().parent} is not a directory")
    gpu = torch.cuda.is_available()
    name = options.device or ("cuda" if gpu else "cpu")
    if name.partition(":")[0] not in (("cpu", "cuda") if gpu else ("cpu",)):
        raise UsageError(f"--device: got {name}, wanted {'cpu or cuda' if gpu else 'cpu'}")
    device = torch.device(name)
    sizes = dict(
        zip(("batch", "kv_len", "qo_len", "heads", "page_size"), SIZES[options.kernel][device.type], strict=True)
    )
    sizes |= {name: getattr(options, name) for name in sizes if getattr(options, name) is not None}
    if options.kernel == "decode" and sizes["qo_len"] != 1:
        raise UsageError(f"--qo-len: got {sizes['qo_len']}, wanted 1 for decode")
    if options.kernel != "mla" and options.dtype == "float32" and device.type == "cuda":
        raise UsageError("--dtype: got float32, wanted bfloat16 or float16 on cuda")
    buffer = torch.zeros(options.words or _words(options.kernel, device, sizes), dtype=torch.int64, device=device)
    try:
        step = _STEPS[options.kernel](torch, device, options, buffer, **sizes)
        for _ in range(RUNS):
            step()
    except (ValueError, TypeError) as err:
        raise UsageError(str(err)) from None
    what = ", ".join(f"{name.replace('_', ' ')} {number}" for name, number in sizes.items())
    profiler.export_to_perfetto_trace(buffer, profiler.EVENT_NAMES, options.out)
    if options.html is not None:
        profiler.export_to_html(
            buffer, profiler.EVENT_NAMES, options.html, f"{options.kernel} on {device.type}: {what}"
        )
    recording = read(buffer)
    rows = [
        {
            "kernel": options.kernel, "device": str(device), "tracks": len(recording.tracks),
            "events": sum(len(track.records) for track in recording.tracks), "dropped": recording.dropped,
        }
    ]  # fmt: skip
    show(rows, options.json)
    write(f"{options.out}: {rows[0]['events']} events; {what}\n")
    return 0


def _words(kernel: str, device: Any, sizes: dict[str, int]) -> int:
    """Return buffer words for a kernel: twice a dozen events per 64 keys and 64 rows."""
    if device.type == "cpu":
        return 1 << 20
    rows = sizes["qo_len"] * sizes["heads"]
    blocks = sizes["batch"] * (rows // 64 + 1) * 8
    return min(MOST_WORDS, max(1 << 22, blocks * (sizes["kv_len"] // 16 + 64) * 4))


def _mla(torch: Any, device: Any, options: argparse.Namespace, buffer: Any, **sizes: int) -> Callable[[], object]:
    import flashinfer

    batch, heads = sizes["batch"], sizes["heads"]
    page, dtype = sizes["page_size"], getattr(torch, options.dtype)
    pages = -(-sizes["kv_len"] // page)
    q = torch.randn(batch * sizes["qo_len"], heads, 576, dtype=dtype, device=device)
    cache = torch.randn(batch * pages, page, 576, dtype=dtype, device=device)
    wrapper = flashinfer.BatchMLAPagedAttentionWrapper(_workspace(torch, device), backend=options.backend)
    starts = torch.arange(batch + 1, dtype=torch.int32)
    wrapper.plan(
        starts * sizes["qo_len"], starts * pages, torch.arange(batch * pages, dtype=torch.int32, device=device),
        torch.full((batch,), sizes["kv_len"], dtype=torch.int32), heads, 512, 64, page, sizes["qo_len"] > 1, 192**-0.5,
        dtype, dtype, use_profiler=True,
    )  # fmt: skip
    return lambda: wrapper.run(q[..., :512], q[..., 512:], cache[..., :512], cache[..., 512:], profiler_buffer=buffer)


def _paged(torch: Any, device: Any, options: argparse.Namespace, sizes: dict[str, int]) -> tuple[Any, ...]:
    """Return queries, a cache, the starts of each request's queries and pages, and the pages."""
    batch, dtype = sizes["batch"], getattr(torch, options.dtype)
    pages = -(-sizes["kv_len"] // sizes["page_size"])
    starts = torch.arange(batch + 1, dtype=torch.int32)
    q = torch.randn(batch * sizes["qo_len"], sizes["heads"], options.head_dim, dtype=dtype, device=device)
    shape = batch * pages, 2, sizes["page_size"], options.kv_heads, options.head_dim
    cache = torch.randn(shape, dtype=dtype, device=device)
    indices = torch.arange(batch * pages, dtype=torch.int32, device=device)
    return q, cache, starts * sizes["qo_len"], starts * pages, indices


def _prefill(torch: Any, device: Any, options: argparse.Namespace, buffer: Any, **sizes: int) -> Callable[[], object]:
    import flashinfer

    q, cache, qo_indptr, kv_indptr, indices = _paged(torch, device, options, sizes)
    wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(_workspace(torch, device), backend=options.backend)
    flashinfer.profiler.attach(wrapper, buffer)
    wrapper.plan(
        qo_indptr, kv_indptr, indices, _last_page_len(torch, sizes), sizes["heads"], options.kv_heads, options.head_dim,
        sizes["page_size"], causal=True, q_data_type=q.dtype,
    )  # fmt: skip
    return lambda: wrapper.run(q, cache)


def _decode(torch: Any, device: Any, options: argparse.Namespace, buffer: Any, **sizes: int) -> Callable[[], object]:
    import flashinfer

    q, cache, _, kv_indptr, indices = _paged(torch, device, options, sizes)
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(_workspace(torch, device))
    flashinfer.profiler.attach(wrapper, buffer)
    wrapper.plan(
        kv_indptr, indices, _last_page_len(torch, sizes), sizes["heads"], options.kv_heads, options.head_dim,
        sizes["page_size"], q_data_type=q.dtype,
    )  # fmt: skip
    return lambda: wrapper.run(q, cache)


def _attention(torch: Any, device: Any, options: argparse.Namespace, buffer: Any, **sizes: int) -> Callable[[], object]:
    import flashinfer

    q, cache, qo_indptr, kv_indptr, indices = _paged(torch, device, options, sizes)
    wrapper, dim = flashinfer.BatchAttention(), options.head_dim
    lens = torch.full((sizes["batch"],), sizes["kv_len"], dtype=torch.int32)
    wrapper.plan(
        qo_indptr, kv_indptr, indices, lens, sizes["heads"], options.kv_heads, dim, dim, sizes["page_size"], True,
        q_data_type=q.dtype, kv_data_type=q.dtype, use_profiler=True,
    )  # fmt: skip
    return lambda: wrapper.run(q, cache, profiler_buffer=buffer)


def _last_page_len(torch: Any, sizes: dict[str, int]) -> Any:
    last = (sizes["kv_len"] - 1) % sizes["page_size"] + 1
    return torch.full((sizes["batch"],), last, dtype=torch.int32)


def _workspace(torch: Any, device: Any) -> Any:
    return torch.empty(128 << 20, dtype=torch.uint8, device=device)


_STEPS = {"mla": _mla, "prefill": _prefill, "decode": _decode, "attention": _attention}
