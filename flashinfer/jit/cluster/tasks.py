"""Tasks that the client runs on Dask's workers. They store files in the worker's workspace."""

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
from ..worker import file_digest
from .job import PROTOCOL, tools_of

POLL = 0.1  # seconds between two checks that a client still waits for the module


def store() -> Path:
    """Return the directory of files from clients. Their names are their digests."""
    return workspace() / "sources" / "files"


def tree_of(tree: str) -> Path:
    """Return the directory of a client's tree, which contains the files of its modules."""
    return workspace() / "sources" / tree


def offer(digests: Iterable[str]) -> dict[str, Any]:
    """Return this worker's tools, and the digests of missing or damaged files."""
    tools = {backend: tools_of(backend) for backend in BACKENDS}
    return {
        "protocol": PROTOCOL,
        "tools": tools,
        "lacks": [name for name in digests if not _is_whole(store() / name, name)],
    }


def store_tree(contents: Mapping[str, bytes], files: Mapping[str, str]) -> str:
    """Store files by digest, write the tree ``files`` (name -> digest), and return the tree's name.

    Raises:
        OSError: this worker cannot write the files.
        ValueError: a name leads out of the tree, or the bytes do not match their digest.
    """
    for name, data in contents.items():
        write_atomically(store() / Path(name).name, data)
    tree = tree_of(tree_name := digest(dict(files))[:32])
    for name, sha256 in files.items():
        if os.path.isabs(name) or ".." in Path(name).parts:
            raise ValueError(f"files: got the name {name!r}, wanted a path inside the tree")
        if not _is_whole(tree / name, sha256):
            write_atomically(tree / name, (store() / sha256).read_bytes())
            if not _is_whole(tree / name, sha256):
                raise ValueError(f"{name}: the received bytes do not match their digest")
    for folder in (store(), tree):
        folder.mkdir(parents=True, exist_ok=True)
        os.utime(folder)  # in use: see gc
    return tree_name


def _is_whole(path: Path, sha256: str) -> bool:
    return path.is_file() and file_digest(path) == sha256


def make(job: dict[str, Any]) -> dict[str, Any]:
    """Build one module and return its manifest and library.

    After a compile error, return it as ``error``. After any other failure, return the reason as ``again``: the client
    then sends the module again, and to another worker if ``unfit`` is true.
    """
    from distributed import get_worker

    worker = get_worker()
    key = worker.get_current_task()
    child_end, own_end = process.pipe()
    command = [find_python(), "-m", "flashinfer.jit.cluster.child", str(child_end)]
    pipe = subprocess.PIPE
    try:
        with process.start(
            command, stdin=pipe, stdout=pipe, stderr=pipe, text=True, pass_fds=[child_end], start_new_session=True
        ) as child:
            stdin: str | None = json.dumps(job)
            while True:
                with suppress(subprocess.TimeoutExpired):
                    stdout, stderr = child.communicate(stdin, timeout=POLL)
                    break
                stdin = None
                if not _has_client(worker, key):
                    os.killpg(child.pid, signal.SIGKILL)
    finally:
        os.close(child_end)
        own_end.close()
    try:
        answer: dict[str, Any] = json.loads(stdout)
    except ValueError:
        last = (stderr.strip().splitlines() or [f"it ended with {child.returncode}"])[-1]
        return {"again": f"the build failed: {last}", "unfit": True}
    answer["said"] = stderr
    if (directory := answer.pop("directory", None)) is not None:
        (library,) = Path(directory).glob("*.so")
        manifest = json.loads((Path(directory) / "manifest.json").read_text())
        answer |= {"manifest": manifest, "library": library.read_bytes()}
    return answer


def _has_client(worker: Any, key: str) -> bool:
    """Return whether a client still waits for a task. Threads of lost clients' tasks continue."""
    task = worker.state.tasks.get(key)
    return task is not None and task.state != "cancelled" and worker.status.name in ("running", "paused")
