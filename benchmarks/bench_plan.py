"""Measure plans by the number of requests, and host time of run(). Tables are on the host, as in engines.

    python benchmarks/bench_plan.py                                     # this checkout
    python benchmarks/bench_plan.py --before ../before --peer DIRECTORY # also another checkout, and
    FlashInfer

``--before`` is a checkout, ``--peer`` a directory with FlashInfer's ``flashinfer``
(``pip install --target``). They alternate with this checkout, each round in its own process. A row's time is
the minimum over rounds, because other processes only add time. A plan is timed with an idle device, as a
server waits between two steps.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

HEADS, HEAD_DIM, PAGE_SIZE, MLA_HEADS = (32, 8), 128, 16, 16
BATCHES = (1, 64, 256)
Rows = dict[str, float]


def plan_seconds(plan: Callable[[], object], device: str, count: int = 200) -> float:
    """Return the median time of one plan. Its copies are waited for before the next plan."""
    import torch

    taken = []
    for _ in range(count):
        if device == "cuda":
            torch.cuda.synchronize()
        start = time.perf_counter()
        plan()
        taken.append(time.perf_counter() - start)
    return statistics.median(taken)


def plans(batch: int, device: str) -> dict[str, Callable[[], Any]]:
    """Return makers of the plans of a batch by name. A maker returns the call to time."""
    import torch

    import flashinfer
    from flashinfer.decode import fast_decode_plan

    def int32(values: torch.Tensor) -> torch.Tensor:
        return values.to(torch.int32)

    def indptr_of(lens: torch.Tensor) -> torch.Tensor:
        return int32(torch.nn.functional.pad(lens.cumsum(0), (1, 0)))

    torch.manual_seed(batch)
    dtype = torch.bfloat16
    workspace = torch.empty(128 << 20, dtype=torch.uint8, device=device)
    pages = torch.randint(1, 257, (batch,))
    indptr = indptr_of(pages)
    indices = int32(torch.randint(0, 1024, (int(indptr[-1]),))).to(device)
    last = int32(torch.randint(1, PAGE_SIZE + 1, (batch,)))
    qo_indptr = indptr_of(torch.randint(1, 65, (batch,)).minimum((pages - 1) * PAGE_SIZE + last))
    one_each = torch.arange(batch + 1, dtype=torch.int32)
    lens = int32((pages - 1) * PAGE_SIZE) + last
    shape = (*HEADS, HEAD_DIM, PAGE_SIZE)
    if device == "cuda":
        indptr, last, qo_indptr, one_each, lens = (x.pin_memory() for x in (indptr, last, qo_indptr, one_each, lens))

    def decode() -> Callable[[], None]:
        wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace)
        return lambda: wrapper.plan(indptr, indices, last, *shape, q_data_type=dtype)

    def fast() -> Callable[[], None]:
        buffers = [torch.zeros(n, dtype=torch.int32, device=device) for n in (batch + 1, indices.numel(), batch)]
        wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace, "NHD", True, True, *buffers)
        wrapper.plan(indptr, indices, last, *shape, q_data_type=dtype)
        return lambda: fast_decode_plan(
            wrapper, indptr, buffers[1], last, *shape, q_data_type=dtype, kv_data_type=dtype, non_blocking=True,
            global_override_indptr_cpu=indptr,
        )  # fmt: skip

    def prefill() -> Callable[[], None]:
        wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace)
        return lambda: wrapper.plan(qo_indptr, indptr, indices, last, *shape, causal=True, q_data_type=dtype)

    def mla() -> Callable[[], None]:
        from flashinfer.mla import BatchMLAPagedAttentionWrapper

        wrapper = BatchMLAPagedAttentionWrapper(workspace)
        sizes = (MLA_HEADS, 512, 64, PAGE_SIZE, False, 192**-0.5, dtype, dtype)
        return lambda: wrapper.plan(one_each, indptr, indices, lens, *sizes)

    return {"decode.plan": decode, "fast_decode_plan": fast, "prefill.plan": prefill, "mla.plan": mla}


def run_seconds(device: str) -> Rows:
    """Return host times of runs of one request, and of a function of torch."""
    import torch
    from timing import host_seconds

    import flashinfer

    workspace = torch.empty(128 << 20, dtype=torch.uint8, device=device)
    q, cache = (torch.randn(n, device=device).to(torch.bfloat16) for n in ((1, 32, 128), (2, 2, 16, 8, 128)))
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace)
    tables = (torch.tensor(x, dtype=torch.int32) for x in ([0, 1], [0], [1]))
    wrapper.plan(*tables, *HEADS, HEAD_DIM, PAGE_SIZE, q_data_type=torch.bfloat16)
    k, out = cache[0, 0], torch.empty_like(q)
    calls: dict[str, Callable[[], object]] = {
        "decode.run": lambda: wrapper.run(q, cache),
        "decode.run out=": lambda: wrapper.run(q, cache, out=out),
        "single_decode": lambda: flashinfer.single_decode_with_kv_cache(q[0], k, k),
        "torch.add out=": lambda: torch.add(q, q, out=out),
    }
    return {f"{name} batch=1": host_seconds(call, device) * 1e6 for name, call in calls.items()}


def measure(device: str, only: str) -> Rows:
    """Return the microseconds of this process's package, by row."""
    rows: Rows = {}
    for batch in BATCHES:
        for name, make in plans(batch, device).items():
            if only not in name:
                continue
            try:
                plan = make()
                plan()
                rows[f"{name} batch={batch}"] = plan_seconds(plan, device) * 1e6
            except Exception as err:  # another package may not have it, or not on this device
                print(f"{name} batch={batch}: {type(err).__name__}: {err}", file=sys.stderr)
    if only in "decode.run":
        rows |= run_seconds(device)
    return rows


def measured_by(package: Path, device: str, only: str) -> Rows:
    """Return the rows of a package, measured in a process of its own."""
    paths = [str(package), *filter(None, [os.environ.get("PYTHONPATH")])]
    command = [sys.executable, str(Path(__file__).resolve()), "--device", device, "--only", only, "--measure"]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths)}
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    answer = json.loads(done.stdout.splitlines()[-1])
    if not Path(answer["package"]).is_relative_to(package.resolve()):
        raise SystemExit(f"bench_plan.py: got flashinfer of {answer['package']}, wanted that of {package}")
    return dict(answer["rows"])


def main() -> None:
    import torch
    from timing import Report

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--json", metavar="FILE", help="also write the rows to FILE")
    parser.add_argument("--only", default="", help="rows whose name contains this")
    parser.add_argument("--before", type=Path, metavar="CHECKOUT", help="an older checkout, measured alternately")
    parser.add_argument("--peer", type=Path, metavar="DIRECTORY", help="directory with FlashInfer's flashinfer")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--measure", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.measure:
        import flashinfer

        found = str(Path(flashinfer.__file__).resolve())
        print(json.dumps({"package": found, "rows": measure(options.device, options.only)}))
        return
    packages = {"ours": Path(__file__).resolve().parents[1], "before": options.before, "FlashInfer": options.peer}
    times: dict[str, Rows] = {}
    for _ in range(options.rounds):
        for column, package in packages.items():
            if package is None:
                continue
            alone = options.before is None and options.peer is None
            got = measure(options.device, options.only) if alone else measured_by(package, options.device, options.only)
            for name, us in got.items():
                row = times.setdefault(name, {})
                row[column] = min(us, row.get(column, us))
    report = Report("plan() and run() on the host")
    for name, row in times.items():
        if "ours" in row:
            label, batch = name.rsplit(" batch=", 1)
            peers = {column: us for column, us in row.items() if column != "ours"}
            report.add("us", row["ours"], peers, name=label, batch=int(batch))
    report.write(options.json)


if __name__ == "__main__":
    main()
