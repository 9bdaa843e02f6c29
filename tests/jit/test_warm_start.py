"""Warm starts: a process starts no other, takes no lock, writes nothing and imports no part of a build."""

from __future__ import annotations

import json

from flashinfer.jit import build_jit_specs
from flashinfer.jit import spec as spec_module
from flashinfer.jit.machine import toolchain
from flashinfer.jit.modules.norm import gen_norm_module

MODULES = 20
USE = """
    import os, sys, json, torch
    from flashinfer.jit import gen_jit_spec
    effects = []
    writes = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
    kinds = ("subprocess.Popen", "os.posix_spawn", "os.fork", "os.mkdir", "os.rename", "os.remove", "os.utime",
             "fcntl.flock", "fcntl.lockf")
    on = True
    def watch(event, arguments):
        if on and (event in kinds or (event == "open" and (arguments[2] or 0) & writes)):
            effects.append((event, str(arguments[0])))
    sys.addaudithook(watch)
    specs = [gen_jit_spec(f"warm_{number}", [path]) for number, path in enumerate(json.loads(sys.argv[1]))]
    for spec in specs:
        spec.build_and_load()
    on = False
    tools = ("flashinfer.jit.build", "flashinfer.jit.ninja", "flashinfer.jit.lock", "filelock", "jinja2", "flashinfer.jit.elf")
    loaded = sum(1 for path in torch.ops.loaded_libraries if "/warm_" in path)
    print(json.dumps([effects, [name for name in tools if name in sys.modules], loaded]))
"""


def test_twenty_modules(make_spec, python, tmp_path, monkeypatch):
    # As in a new process, the compiler's version is asked and stored in this workspace.
    monkeypatch.setattr(toolchain, "_versions", {})
    specs = []
    for number in range(MODULES):
        name = f"warm_{number}"
        text = f'#include "../shared.h"\nextern "C" int {name}() {{ return {number}; }}\n'
        specs.append(make_spec(name, {"unit.cc": text}))
    (tmp_path / "src" / "shared.h").write_text("#pragma once\n")
    build_jit_specs(specs)
    done = python(USE, json.dumps([spec.source_paths()[0] for spec in specs]))
    effects, tools, loaded = json.loads(done.stdout)
    assert effects == [] and tools == [] and loaded == MODULES and done.stderr == ""


def test_a_shared_header_is_read_once(monkeypatch):
    """A thousand specs of one family share a few dozen files."""
    monkeypatch.setattr(spec_module, "_digest_cache", {})
    monkeypatch.setattr(spec_module, "_SETTLED", -1e18)
    read, real = list[str](), spec_module._read

    def counting(path):
        read.append(path)
        return real(path)

    monkeypatch.setattr(spec_module, "_read", counting)
    wide = gen_norm_module("cpu")
    keys = {
        wide.covering({"dtype": [dtype], "head_dim": [number]}).key
        for dtype in ("float16", "float32")
        for number in range(50)
    }
    assert len(keys) == 100
    # The template is among them, although its digest does not come from the scan.
    assert sorted(read) == sorted(set(read)) and 10 < len(read) == len(wide.files())
