"""Many processes, cold modules: each is compiled once, within the machine's limit of compilers."""

from __future__ import annotations

import random

import pytest

from ..support.processes import Compiler, answering, end, start

BUILD = """
    import ctypes, sys
    from flashinfer.jit import build_jit_specs, gen_jit_spec
    sources = dict(pair.split("=") for pair in sys.argv[2:])
    specs = {name: gen_jit_spec(name, [source]) for name, source in sources.items()}
    if sys.argv[1] == "batch":
        found = dict(zip(specs, build_jit_specs(list(specs.values()))))
    else:
        found = {name: spec.build() for name, spec in specs.items()}
    print(*(f"{name}:{ctypes.CDLL(str(found[name].path)).answer()}" for name in sorted(found)))
"""


def modules(make_spec, count: int) -> list[str]:
    """Return ``name=source`` of modules that answer 7, 8, ..."""
    specs = [make_spec(f"m{number}", answering(number + 7)) for number in range(count)]
    return [f"{spec.name}={spec.source_paths()[0]}" for spec in specs]


@pytest.fixture
def compiler(tmp_path, monkeypatch) -> Compiler:
    compiler = Compiler(tmp_path, 0.3)
    monkeypatch.setenv("CXX", str(compiler.path))
    return compiler


def test_eight_processes_build_one_module(make_spec, compiler):
    sources = modules(make_spec, 1)  # written once: a source that changes during its compilation is an error
    processes = [start(BUILD, "single", *sources) for _ in range(8)]
    lines = [end(process).splitlines()[-1] for process in processes]
    assert lines == ["m0:7"] * 8 and compiler.started == 2, "one compiler, one linker, eight right answers"


@pytest.mark.parametrize("how", ["single", "batch"])
def test_eight_processes_build_eight_modules(how, make_spec, compiler, monkeypatch):
    """Each process has another order. A compiler or linker holds one of two slots."""
    monkeypatch.setenv("MAX_JOBS", "2")
    sources = modules(make_spec, 8)
    processes = [start(BUILD, how, *random.sample(sources, len(sources))) for _ in range(8)]
    lines = [end(process).splitlines()[-1] for process in processes]
    assert set(lines) == {" ".join(f"m{number}:{number + 7}" for number in range(8))}
    assert compiler.started == 16, "eight compilers, eight linkers"
    assert max(compiler.runs()) <= 2, "never more at once than the limit"
