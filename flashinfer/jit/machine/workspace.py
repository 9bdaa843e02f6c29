"""The workspace: the writable cache that modules are built in and found in again."""

from __future__ import annotations

import atexit
import os
import shutil
import tempfile
import warnings
from contextlib import suppress
from pathlib import Path

from ... import env
from ...errors import WorkspaceError
from . import trust

# What the project makes in the workspace, and may remove.
PARTS = ("artifacts", "build", "history", "answers", "sources", "traces", "trash")

_fallbacks: dict[Path, Path] = {}


def workspace_root() -> Path:
    """``FLASHINFER_WORKSPACE_DIR``, or this user's directory in it where others can write there (a volume of Kubernetes)."""
    root = env.WORKSPACE_DIR.get()
    return root if refused(root) is None else root / f"user-{os.geteuid()}"


def refused(root: Path) -> str | None:
    """Why a root is not to be trusted; ``None`` where it is, or where there is none yet."""
    with suppress(OSError):
        return trust.refusal(root)
    return None


def workspace() -> Path:
    """The root of the cache, which exists and can be written, or a temporary one of this process alone, with a warning.

    Raises:
        WorkspaceError: neither can be written.
    """
    root = workspace_root()
    if root in _fallbacks or (reason := _why_not_writable(root)) is None:
        return roots()[-1]
    try:
        _fallbacks[root] = Path(tempfile.mkdtemp(prefix="flashinfer-"))
    except OSError as err:
        raise WorkspaceError(
            f"the workspace {root} cannot be written ({reason}), and neither can a temporary directory ({err}):"
            " set FLASHINFER_WORKSPACE_DIR to a directory that can be written"
        ) from None
    atexit.register(_remove_if_ours, _fallbacks[root], os.getpid())
    warnings.warn(
        f"the flashinfer workspace {root} cannot be written ({reason}): modules built now go to {_fallbacks[root]}"
        " and are lost when this process ends; set FLASHINFER_WORKSPACE_DIR to a directory that can be written",
        stacklevel=2,
    )
    return _fallbacks[root]


def roots() -> tuple[Path, ...]:
    """Every directory that may hold cached artifacts of this process, in the order of search."""
    root = workspace_root()
    return (root, _fallbacks[root]) if root in _fallbacks else (root,)


def write_atomically(path: Path, data: bytes) -> None:
    """Write a small file so that nobody ever sees half of it."""
    trust.make_directories(path.parent)
    with tempfile.NamedTemporaryFile(dir=path.parent, prefix=f".{path.name}.", delete=False) as file:
        try:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
            os.replace(file.name, path)
        except BaseException:
            Path(file.name).unlink(missing_ok=True)
            raise


def _why_not_writable(root: Path) -> str | None:
    try:
        trust.make_directories(root)
        # Objects that an interrupted build left are linked by the next one.
        if (refusal := trust.refusal(root) or refused(root / "build")) is not None:
            return refusal
        # Only a file tells: access(2) says yes to root where a mount is read-only, and a full file system makes files
        # all the same, of which a network's drops the bytes later.
        write_atomically(root / ".probe", bytes(65536))
        (root / ".probe").unlink(missing_ok=True)
    except OSError as err:
        return err.strerror or str(err)
    return None


def _remove_if_ours(path: Path, pid: int) -> None:
    if os.getpid() == pid:  # a forked child leaves its parent's directory alone
        shutil.rmtree(path, ignore_errors=True)
