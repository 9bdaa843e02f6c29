"""Measure the warm artifact store: 20 modules in a new process, torch's extension loader, keys, look-ups."""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from timing import Report

ROOT = Path(__file__).resolve().parents[1]
SOURCE = """#include <torch/csrc/stable/library.h>

static void answer(StableIValue* stack, uint64_t, uint64_t) {{ stack[0] = torch::stable::detail::from(int64_t({number})); }}
STABLE_TORCH_LIBRARY({name}, m) {{ m.def("answer() -> int"); }}
STABLE_TORCH_LIBRARY_IMPL({name}, CompositeExplicitAutograd, m) {{ m.impl("answer", &answer); }}
"""
# Runs in its own process after the import of torch: milliseconds, started processes, locks.
MEASURE = """
import json, os, sys, time, torch
sources = json.loads(sys.argv[1])
started, locks = [], []
sys.addaudithook(lambda event, _: started.append(event) if event in ("subprocess.Popen", "os.posix_spawn", "os.fork")
                 else locks.append(event) if event in ("fcntl.flock", "fcntl.lockf") else None)
{prepare}
begin = time.perf_counter()
for name, source in sources.items():
    {load}
took = time.perf_counter() - begin
answers = [getattr(torch.ops, name).answer() for name in sources]
assert answers == list(range(len(sources))), answers
print(json.dumps([took * 1e3, len(started), len(locks)]))
"""
OURS = MEASURE.format(
    prepare="from flashinfer.jit import gen_jit_spec", load="gen_jit_spec(name, [source]).build_and_load()"
)
# The peer creates and checks a lock file next to its library (without an audit event): one for each load.
PEER = MEASURE.format(
    prepare="from torch.utils.cpp_extension import load",
    load="load(name, [source], is_python_module=False, extra_cflags=['-O3'])",
)
BUILD = """
import json, sys
from flashinfer.jit import build_jit_specs, gen_jit_spec
build_jit_specs([gen_jit_spec(name, [source]) for name, source in json.loads(sys.argv[1]).items()])
"""
KEYS = """
import json, sys, time
from flashinfer.jit import resolve
from flashinfer.jit.modules import Matrix, matrix_specs
from flashinfer.jit.modules._family import family_spec
begin = time.perf_counter()
families = [spec.name.rsplit("_", 1) for spec in matrix_specs(Matrix())]
names = sorted({(name.split("_")[0], backend) for name, backend in families})
specs = [family_spec(*names[number % len(names)], variant=f"v{number}", config={"HEAD_DIM": number}) for number in range(1000)]
made = time.perf_counter()
keys = {spec.key for spec in specs}
keyed = time.perf_counter()
assert len(keys) == len(specs)
looked = []
for spec in specs:
    start = time.perf_counter()
    resolve.look_up(spec)
    looked.append((time.perf_counter() - start) * 1e3)
print(json.dumps([made - begin, keyed - made, looked[0], sorted(looked)[len(looked) // 2], max(looked[1:])]))
"""
FOUND = """
import json, sys, time
from flashinfer.jit import resolve
from flashinfer.jit import gen_jit_spec
specs = [gen_jit_spec(name, [source]) for name, source in json.loads(sys.argv[1]).items()]
looked = []
for spec in specs:
    start = time.perf_counter()
    assert resolve.look_up(spec).artifact is not None
    looked.append((time.perf_counter() - start) * 1e3)
print(json.dumps([looked[0], sorted(looked)[len(looked) // 2]]))
"""


def run(program: str, folder: str, *arguments: str) -> list[float]:
    environment = {
        **os.environ,
        "FLASHINFER_WORKSPACE_DIR": f"{folder}/ours",
        "TORCH_EXTENSIONS_DIR": f"{folder}/peer",
        "PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]),
    }
    command = [sys.executable, "-W", "ignore", "-c", program, *arguments]
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1]) if done.stdout else []


def median(program: str, folder: str, repeats: int, *arguments: str) -> list[float]:
    return [
        statistics.median(column)
        for column in zip(*(run(program, folder, *arguments) for _ in range(repeats)), strict=True)
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--modules", type=int, default=20)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--json", metavar="FILE", help="also write the rows to FILE")
    options = parser.parse_args()
    report = Report("artifact store")
    with tempfile.TemporaryDirectory() as folder:
        sources = {}
        for number in range(options.modules):
            path = Path(folder) / f"tiny_{number}.cc"
            path.write_text(SOURCE.format(name=f"tiny_{number}", number=number))
            sources[path.stem] = str(path)
        given = json.dumps(sources)
        for name, program in (("ours", BUILD), ("torch.utils.cpp_extension", PEER)):
            start = time.perf_counter()
            run(program, folder, given)
            report.add("s", time.perf_counter() - start, name=f"{name}: {options.modules} modules, cold")
        # Alternate, so that both see the same machine.
        taken: dict[str, list[list[float]]] = {OURS: [], PEER: []}
        for _ in range(options.repeats):
            for program, results in taken.items():
                results.append(run(program, folder, given))
        ours, peer = (
            [statistics.median(column) for column in zip(*results, strict=True)] for results in taken.values()
        )
        for name, (ms, started, locks) in (("ours", ours), ("torch.utils.cpp_extension", peer)):
            report.add("ms", ms, {"torch.utils.cpp_extension": peer[0]}, name=f"{name}: {options.modules} modules, warm",
                       processes=int(started), locks=int(locks))  # fmt: skip
        first, later = median(FOUND, folder, options.repeats, given)
        report.add("ms", first, more={"later": later}, name="lookup and verification of a hit")
        _, keys, first, later, worst = median(KEYS, folder, options.repeats)
        report.add("s", keys, name="keys of 1,000 specs")
        report.add("ms", first, more={"later": later, "worst": worst}, name="lookup of a miss")
    report.write(options.json)


if __name__ == "__main__":
    main()
