"""Build of one module on a worker: ``python -m flashinfer.jit.cluster.child DESCRIPTOR``, with the job on stdin.

It is a separate process, because it builds the client's sources, not those of the installed package. When the worker
ends, the other end of DESCRIPTOR closes. This process then ends together with its compilers.
"""

from __future__ import annotations

import errno
import json
import os
import re
import sys
import threading
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ... import env
from ...errors import BuildError, FlashInferError
from ..build import make_request
from ..machine.target import Target
from ..machine.workspace import workspace
from ..module import JitSpec
from ..resolve import resolve
from ..spec import digest
from ..specjson import from_json
from .job import mark_paths, tool_paths
from .tasks import store, tree_of

# Errors of a full disk in a compiler's output. They are errors of this worker, so another worker gets the module.
_FULL = (os.strerror(errno.ENOSPC), os.strerror(errno.EDQUOT))


def main() -> int:
    alive, job = int(sys.argv[1]), json.load(sys.stdin)
    os.set_inheritable(alive, False)
    threading.Thread(target=_exit_with_worker, args=(alive,), daemon=True).start()
    try:
        answer = _build(job)
    except (FlashInferError, OSError, ValueError) as err:
        answer = {"again": str(err), "unfit": True}
    print(json.dumps(answer))
    return 0


def _exit_with_worker(alive: int) -> None:
    os.read(alive, 1)
    os._exit(1)


def _build(job: dict[str, Any]) -> dict[str, Any]:
    tree, folder = tree_of(job["tree"]), workspace() / "sources"
    setattr(env, "data_root", lambda: str(tree))  # noqa: B010 (mypy: a function is no variable)
    own = {
        name: (store() / sha256).read_bytes().decode("utf-8", "surrogateescape") for name, sha256 in job["own"].items()
    }
    spec = from_json(JitSpec, {**job["spec"], "own": own}, folder)
    if spec.key != job["key"]:
        return {"again": f"the files of {spec.name!r} in its workspace differ from those of the client", "unfit": True}
    request = make_request(spec, target=Target(spec.backend, tuple(job["archs"]), True), key=job["key"])
    if request.build_key != job["build_key"]:
        return {"again": "its compiler has changed since it reported its tools", "unfit": True}
    (outcome,) = resolve([request], jobs=job["jobs"], watch=lambda progress: None)
    if outcome.artifact is not None:
        timeline = asdict(outcome.timeline) if outcome.timeline is not None else None
        return {"how": outcome.how, "directory": str(outcome.artifact.directory), "timeline": timeline}
    assert outcome.error is not None
    return _failure_answer(
        outcome.error, {"<root>": str(tree), "<own>": f"{folder}/{digest(own)[:32]}", **tool_paths(request.toolchain)}
    )


def _failure_answer(error: BuildError, paths: dict[str, str]) -> dict[str, Any]:
    text = f"{error.reason}\n{error.output}"
    if not error.command or any(word in text for word in _FULL):
        return {"again": error.reason, "unfit": True}
    # The worker may be shutting down: a shutdown kills its compilers first.
    if re.search(r"was killed by signal|Killed signal", text):
        return {"again": error.reason, "unfit": False}
    log = error.log.read_text(errors="replace") if error.log is not None and Path(error.log).is_file() else ""
    texts = {"reason": error.reason, "command": error.command, "output": error.output, "log": log}
    return {"error": {name: mark_paths(text, paths) for name, text in texts.items()}}


if __name__ == "__main__":
    sys.exit(main())
