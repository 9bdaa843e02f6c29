"""The workspace: the writable cache of artifacts and build directories."""

from __future__ import annotations

import atexit
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from ... import env
from ...errors import WorkspaceError
from .. import report
from . import trust

# Directories that the project makes in the workspace, and may remove.
PARTS = ("artifacts", "build", "history", "answers", "sources", "traces", "trash")

_fallbacks: dict[Path, Path] = {}


def workspace_root() -> Path:
    """Return ``FLASHINFER_WORKSPACE_DIR``. If it is not trusted, return this user's directory in it."""
    root = env.WORKSPACE_DIR.get()
    return root if root_refusal(root) is None else root / f"user-{os.geteuid()}"


def root_refusal(root: Path) -> str | None:
    """Return why a root is not trusted, or ``None``. A root that does not exist yet is trusted."""
    with suppress(OSError):
        return trust.refusal(root)
    return None


def workspace() -> Path:
    """Return the writable root of the cache, or a temporary one of this process only, with a warning.

    Raises:
        WorkspaceError: neither can be used.
    """
    root = workspace_root()
    if root in _fallbacks or (reason := _why_not_usable(root)) is None:
        return roots()[-1]
    fix = "set FLASHINFER_WORKSPACE_DIR to a directory that can be written, not on a file system mounted noexec"
    refused = list[str]()
    for base in env.temporary_dirs():
        try:
            if not is_noexec(base):
                _fallbacks[root] = make_private(base, "flashinfer-")
                break
            refused.append(f"{base}: {NOEXEC}")
        except OSError as err:
            refused.append(f"{base}: {err.strerror or err}")
    else:
        also = "; ".join(refused) or "there is none"
        raise WorkspaceError(f"the workspace {root} {reason}, and neither can a temporary directory ({also}): {fix}")
    atexit.register(_remove_if_ours, _fallbacks[root], os.getpid())
    report.warn(
        f"the flashinfer workspace {root} {reason}: modules built now go to {_fallbacks[root]}"
        f" and are lost when this process ends; {fix}"
    )
    return _fallbacks[root]


NOEXEC = "its file system is mounted noexec, so that no library in it can be loaded"


def is_noexec(path: Path) -> bool:
    """Return whether libraries at ``path`` cannot be loaded because its file system is mounted noexec."""
    with suppress(OSError):
        return bool(os.statvfs(path).f_flag & os.ST_NOEXEC)
    return False


def make_private(parent: Path, prefix: str = "") -> Path:
    """Make a directory that only this user can use, whatever the umask."""
    folder = Path(tempfile.mkdtemp(dir=parent, prefix=prefix))
    folder.chmod(0o700)
    return folder


@contextmanager
def scratch(parent: Path | None = None, prefix: str = "flashinfer-") -> Iterator[Path]:
    """Yield a private directory, and remove it afterwards.

    It is in ``parent``, by default in the temporary directory or else in the workspace.
    """
    folder = make_private(parent, prefix) if parent is not None else _temporary(prefix)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _temporary(prefix: str) -> Path:
    if (base := env.temporary_dir()) is not None:
        with suppress(OSError):
            return make_private(base, prefix)
    return make_private(workspace(), f".{prefix}")


def roots() -> tuple[Path, ...]:
    """Return every directory that may hold cached artifacts of this process, in search order."""
    root = workspace_root()
    return (root, _fallbacks[root]) if root in _fallbacks else (root,)


@contextmanager
def name_in_errors(path: Path) -> Iterator[None]:
    """Add ``path`` to an OSError without a file name, such as those of ``write`` and ``fsync``."""
    try:
        yield
    except OSError as err:
        if err.filename is None:
            err.filename = str(path)
        raise


def write_atomically(path: Path, data: bytes) -> None:
    """Write a small file so that no process ever sees half of it."""
    with name_in_errors(path):
        _write_atomically(path, data)


def _write_atomically(path: Path, data: bytes) -> None:
    trust.make_directories(path.parent)
    with tempfile.NamedTemporaryFile(dir=path.parent, prefix=f".{path.name}.", delete=False) as file:
        try:
            os.fchmod(file.fileno(), 0o600)
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
            os.replace(file.name, path)
        except BaseException:
            Path(file.name).unlink(missing_ok=True)
            raise


def _why_not_usable(root: Path) -> str | None:
    if root.is_relative_to(env.NO_HOME):
        return "cannot be written (this user's home directory is not known)"
    try:
        trust.make_directories(root)
        # Nobody else may write to `build`: the next build links objects that an interrupted build left there.
        if (refusal := trust.refusal(root) or root_refusal(root / "build")) is not None:
            return f"cannot be written ({refusal})"
        # Only a write proves that it can be written: access(2) allows root on a read-only mount. A full file system can
        # create files without space for bytes, and a network file system reports this only at fsync. So write bytes.
        write_atomically(root / ".probe", bytes(65536))
        (root / ".probe").unlink(missing_ok=True)
    except OSError as err:
        return f"cannot be written ({err.strerror or err})"
    return f"cannot be used ({NOEXEC})" if is_noexec(root) else None


def _remove_if_ours(path: Path, pid: int) -> None:
    if os.getpid() == pid:  # a forked child must not remove its parent's directory
        shutil.rmtree(path, ignore_errors=True)
