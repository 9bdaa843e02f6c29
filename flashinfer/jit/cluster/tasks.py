"""What the client runs as tasks of Dask's workers. All of it lives in the worker's own workspace."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from .. import process
from ..machine.toolchain import find_python
from ..machine.workspace import workspace, write_atomically
from ..spec import BACKENDS, digest
from ..worker.notes import file_digest
from .job import PROTOCOL, tools_of

LOOK = 0.1  # seconds between two looks whether a module is still wanted


def store() -> Path:
    """Where files that clients sent are kept, named by their digests."""
    return workspace() / "sources" / "files"


def tree_of(tree: str) -> Path:
    """The client's tree, as far as its modules are made of it."""
    return workspace() / "sources" / tree


def offer(digests: Iterable[str]) -> dict[str, Any]:
    """What this worker builds with, and which files it lacks; a spoiled one too is lacking."""
    tools = {backend: tools_of(backend) for backend in BACKENDS}
    return {
        "protocol": PROTOCOL,
        "tools": tools,
        "lacks": [name for name in digests if not _is_whole(store() / name, name)],
    }


def keep(contents: Mapping[str, bytes], files: Mapping[str, str]) -> str:
    """Keep files by digest, and lay out the tree that they make (name -> digest); what it is called.

    Raises:
        OSError: they cannot be written here.
        ValueError: a name leads out of the tree, or bytes are not what their digest says.
    """
    for name, data in contents.items():
        write_atomically(store() / Path(name).name, data)
    tree = tree_of(called := digest(dict(files))[:32])
    for name, sha256 in files.items():
        if os.path.isabs(name) or ".." in Path(name).parts:
            raise ValueError(f"a file is called {name!r}")
        if not _is_whole(tree / name, sha256):
            write_atomically(tree / name, (store() / sha256).read_bytes())
            if not _is_whole(tree / name, sha256):
                raise ValueError(f"{name} arrived damaged")
    for place in (store(), tree):
        place.mkdir(parents=True, exist_ok=True)
        os.utime(place)  # in use: see gc
    return called


def _is_whole(path: Path, sha256: str) -> bool:
    return path.is_file() and file_digest(path) == sha256


def make(job: dict[str, Any]) -> dict[str, Any]:
    """Build one module: its manifest and library; or its ``error``; or why to try ``again``, ``unfit`` if not here."""
    from distributed import get_worker

    worker = get_worker()
    key = worker.get_current_task()
    theirs, ours = process.pipe()
    command = [find_python(), "-m", "flashinfer.jit.cluster.child", str(theirs)]
    pipe = subprocess.PIPE
    try:
        with process.start(
            command, stdin=pipe, stdout=pipe, stderr=pipe, text=True, pass_fds=[theirs], start_new_session=True
        ) as child:
            given: str | None = json.dumps(job)
            while True:
                with suppress(subprocess.TimeoutExpired):
                    said, complaints = child.communicate(given, timeout=LOOK)
                    break
                given = None
                if not _is_wanted(worker, key):
                    os.killpg(child.pid, signal.SIGKILL)
    finally:
        os.close(theirs)
        ours.close()
    try:
        answer: dict[str, Any] = json.loads(said)
    except ValueError:
        last = (complaints.strip().splitlines() or [f"it ended with {child.returncode}"])[-1]
        return {"again": f"the build broke down: {last}", "unfit": True}
    answer["said"] = complaints
    if (place := answer.pop("directory", None)) is not None:
        (library,) = Path(place).glob("*.so")
        answer |= {"manifest": json.loads((Path(place) / "manifest.json").read_text()), "library": library.read_bytes()}
    return answer


def _is_wanted(worker: Any, key: str) -> bool:
    """Whether anybody waits for a task: Dask lets go of it when its client is gone, but no thread ends by that."""
    task = worker.state.tasks.get(key)
    return task is not None and task.state != "cancelled" and worker.status.name in ("running", "paused")
