"""``import flashinfer`` has no side effect and touches no GPU. A name imports only its family.

``benchmarks/bench_start.py`` measures the import time.
"""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

import flashinfer
from flashinfer.jit.modules import families

from ..support.tree import ROOT, clean_environment

TRACE = """
import sys
sys.dont_write_bytecode = True
{before}
seen = []
WRITES = {{"os.mkdir", "os.remove", "os.rename", "os.rmdir", "os.truncate", "os.chmod", "os.link", "os.symlink", "os.utime",
          "shutil.rmtree", "tempfile.mkstemp", "tempfile.mkdtemp"}}
STARTS = {{"subprocess.Popen", "os.system", "os.exec", "os.posix_spawn", "os.fork", "os.forkpty", "pty.spawn"}}

def watch(event, arguments):
    if event == "open":
        path, mode, flags = arguments
        if isinstance(mode, str) and set(mode) & set("wax+") or isinstance(flags, int) and flags & 0o3:
            seen.append((event, str(path)))
    elif event in WRITES or event in STARTS or event.startswith(("socket.", "urllib.")):
        seen.append((event, str(arguments)))
    elif event == "ctypes.dlopen" and "cuda" in str(arguments[0]):
        seen.append((event, str(arguments)))

sys.addaudithook(watch)
import flashinfer
{after}
assert not seen, seen
print("nothing")
"""


def trace(before: str, after: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", TRACE.format(before=before, after=after)]
    return subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=clean_environment(PYTHONPATH=ROOT))


def traced(before: str, after: str = "") -> None:
    done = trace(before, after)
    assert (done.returncode, done.stdout, done.stderr) == (0, "nothing\n", "")


def test_import_after_torch_leaves_no_trace():
    after = "assert not torch.cuda.is_initialized()\nassert 'flashinfer.norm' not in sys.modules"
    # Torch's compiler takes seconds, and creates a directory of its own if it does not exist.
    traced("import torch", f"{after}\nassert 'torch._dynamo' not in sys.modules")


def test_import_without_torch_leaves_no_trace_and_does_not_import_it():
    traced("", "assert 'torch' not in sys.modules")


def test_the_check_detects_effects():
    """The check fails for each side effect."""
    for deed in ("open('/dev/null', 'w')", "__import__('subprocess').run(['true'])", "__import__('socket').socket()"):
        done = trace("", deed)
        assert done.returncode == 1 and "AssertionError" in done.stderr, deed


# Forks once per name, because importing torch takes seconds. Reports the modules of the package, then of each
# name.
LOADED = """
import json, os, sys, torch
before = set(sys.modules)
import flashinfer
print(json.dumps(["", sorted(set(sys.modules) - before)]), flush=True)
for name in sys.argv[1:]:
    if os.fork() == 0:
        getattr(flashinfer, name)
        print(json.dumps([name, sorted(set(sys.modules) - before)]), flush=True)
        os._exit(0)
    os.wait()
"""
# Public modules that every family may import, and those that a family is made of. Addresses of engines import
# families.
SHARED = {"env", "errors", "jit", "tllm_enums", "utils"}
PARTS = {
    "activation": {"activation_backward"},
    "attention": {"quantization"},
    "cascade": {"decode", "prefill", "quantization"},
    "causal_conv1d": {"causal_conv1d_backward"},
    "decode": {"quantization"},
    "delta_rule": {"delta_rule_backward"},
    "fused_moe": {"mxfp4_gemm"},
    "gated_norm": {"gated_norm_backward"},
    "logits_processor": {"sampling"},
    "mla": {"quantization"},
    "norm": {"norm_backward", "norm_quant"},
    "pod": {"decode", "prefill", "quantization"},
    "prefill": {"quantization"},
    "sparse": {"quantization"},
}
# 766ff52, where one name imported every family of its time, had 60 modules for each of these.
MOST = {"": 6, "norm": 50, "activation": 50, "rope": 50, "page": 50, "sampling": 58, "gemm": 58, "fused_moe": 62}
MOST |= {"mla": 78, "decode": 84, "prefill": 88, "cascade": 96}


@pytest.fixture(scope="module")
def loaded() -> dict[str, list[str]]:
    """Map ``""`` to the modules that the package loads, and one public name per module to its modules."""
    one_of_each = {module: name for name, module in flashinfer._names().items() if module != "."}
    modules = [name for name, module in flashinfer._names().items() if module == "."]
    command = [sys.executable, "-c", LOADED, *one_of_each.values(), *modules]
    environment = clean_environment(PYTHONPATH=ROOT)
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=environment, check=True)
    found = dict(json.loads(line) for line in done.stdout.splitlines())
    assert len(found) == 1 + len(one_of_each) + len(modules) > 60
    return found | {module: found[name] for module, name in one_of_each.items()}


def test_import_loads_four_modules(loaded):
    wanted = ["flashinfer", "flashinfer._ops", "flashinfer._ops.registry", "flashinfer._ops.schemas"]
    assert loaded[""] == wanted


@pytest.mark.parametrize("family", [*families(), "attention", "pod", "sparse"])
def test_a_name_imports_its_family_only(family, loaded):
    for modules in (loaded[key] for key in (family, f".{family}") if key in loaded):
        public = {one.split(".")[1] for one in modules if one.startswith("flashinfer.") and "._" not in one}
        assert family in public and public <= SHARED | PARTS.get(family, set()) | {family}


def test_a_name_imports_few_modules(loaded):
    for name, most in MOST.items():
        modules = loaded[f".{name}" if name else ""]
        assert len(modules) <= most, (name, len(modules), modules)
