"""``import flashinfer`` writes nothing, starts nothing, connects to nothing and touches no GPU.

How long it takes is measured in ``benchmarks/``.
"""

from __future__ import annotations

import subprocess
import sys

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
    after = "assert not torch.cuda.is_initialized()\nassert 'flashinfer.norm' in sys.modules"
    # Torch's compiler takes seconds, and makes a directory of its own where it is not there yet.
    traced("import torch", f"{after}\nassert 'torch._dynamo' not in sys.modules")


def test_import_without_torch_leaves_no_trace_and_does_not_import_it():
    traced("", "assert 'torch' not in sys.modules")


def test_the_trace_sees_what_it_must_see():
    """The check fails where there is something to see."""
    for deed in ("open('/dev/null', 'w')", "__import__('subprocess').run(['true'])", "__import__('socket').socket()"):
        done = trace("", deed)
        assert done.returncode == 1 and "AssertionError" in done.stderr, deed
