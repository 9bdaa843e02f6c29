"""Who may have written a file: nothing that somebody else can change is ever loaded.

Looked at are the root that a person named and every directory and file of an artifact below it, files through the
descriptor that is read. Whoever owns a directory above can put another tree there, but no file of ours in it.

Trusted owners are root, this user and the owner of this package, whose code runs here anyway. Nobody else may write,
save by a group without other members (a user's own, as umask 002 supposes) or one that can write this package too.
"""

from __future__ import annotations

import os
import stat
from contextlib import suppress
from functools import cache
from pathlib import Path


def refusal(path: Path | str, status: os.stat_result | None = None) -> str | None:
    """Why what is at ``path`` may be somebody else's work, or ``None``. ``status``: of the open file, where it is open.

    Raises:
        OSError: there is nothing, or it cannot be seen.
    """
    status = status or os.stat(path)
    if status.st_uid not in (0, os.geteuid(), _package().st_uid):
        return f"{path} belongs to user {status.st_uid}, neither to root nor to this user ({os.geteuid()})"
    if status.st_mode & stat.S_IWOTH:
        return f"{path} can be written by everybody (chmod o-w would do)"
    if status.st_mode & stat.S_IWGRP and not _is_harmless(status.st_uid, status.st_gid):
        return f"{path} can be written by group {status.st_gid} (chmod g-w would do)"
    return None


@cache
def _package() -> os.stat_result:
    return os.stat(os.path.dirname(__file__))


def _is_harmless(uid: int, gid: int) -> bool:
    if _package().st_mode & stat.S_IWGRP and _package().st_gid == gid:
        return True
    import grp
    import pwd

    with suppress(KeyError):
        group = grp.getgrgid(gid)
        return gid != 0 and group.gr_name == pwd.getpwuid(uid).pw_name and set(group.gr_mem) <= {group.gr_name}
    return False


def make_directories(path: Path) -> None:
    """``mkdir -p`` that gives nobody else the right to write, whatever the umask."""
    for folder in reversed([path, *path.parents]):
        if not folder.is_dir():
            with suppress(FileExistsError):
                folder.mkdir(mode=0o755)
