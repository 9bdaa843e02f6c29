"""Trusted files: nothing that another user can change is ever loaded.

The check covers the root that a user named and every directory and file of an artifact below it. A file is
checked through the descriptor that is read. The owner of a parent of the root can replace the whole tree, but
no single file in it.

Trusted owners are root, this user, and the owners of this package, of the interpreter and of torch, whose
code runs here anyway. In a user namespace without root (a rootless container) root's files show the overflow
uid, which is then trusted. Nobody else may write. Two groups are excepted: a user's own group without other
members (umask 002 assumes one), and a group that can write this package, the interpreter or torch.
"""

from __future__ import annotations

import os
import stat
import sys
from contextlib import suppress
from functools import cache
from pathlib import Path


def refusal(path: Path | str, status: os.stat_result | None = None) -> str | None:
    """Return why another user may have written the file at ``path``, or ``None``.

    Args:
        status: the status of the open file, if it is open.

    Raises:
        OSError: the file does not exist or cannot be read.
    """
    status = status or os.stat(path)
    if status.st_uid not in (0, os.geteuid()) and not _is_trusted(status.st_uid):
        return f"{path} belongs to user {status.st_uid}, neither to root nor to this user ({os.geteuid()})"
    if status.st_mode & stat.S_IWOTH:
        return f"{path} can be written by everybody (chmod o-w would do)"
    if status.st_mode & stat.S_IWGRP and not _is_trusted_group(status.st_uid, status.st_gid):
        return f"{path} can be written by group {status.st_gid} (chmod g-w would do)"
    return None


def _is_trusted(uid: int) -> bool:
    return uid == _id_of_root("uid") or uid in (one.st_uid for one in code_directories())


@cache
def code_directories() -> tuple[os.stat_result, ...]:
    """Return the status of the directories whose code runs here: this package, the interpreter and torch."""
    import importlib.util

    found, torch = list[os.stat_result](), None
    with suppress(ImportError, ValueError):
        torch = importlib.util.find_spec("torch")
    interpreter = sys.executable or os.__file__
    files = [__file__, interpreter, os.path.realpath(interpreter), os.__file__, (torch and torch.origin) or ""]
    for file in filter(None, files):
        with suppress(OSError):
            found.append(os.stat(os.path.dirname(file)))
    return tuple(found)


@cache
def _id_of_root(kind: str) -> int:
    """Return the uid or gid that root's files show here.

    In a namespace without root it is the overflow id.
    """
    file = f"/proc/sys/kernel/overflow{kind}"  # belongs to root
    with suppress(OSError, ValueError):
        status = os.stat(file)
        shown = status.st_uid if kind == "uid" else status.st_gid
        with open(file) as text:
            if shown == int(text.read()):
                return shown
    return 0


def _is_trusted_group(uid: int, gid: int) -> bool:
    if gid and gid == _id_of_root("gid"):  # stands for every group without a number in this namespace
        return False
    if any(one.st_mode & stat.S_IWGRP and one.st_gid == gid for one in code_directories()):
        return True
    import grp
    import pwd

    with suppress(KeyError):
        group = grp.getgrgid(gid)
        return gid != 0 and group.gr_name == pwd.getpwuid(uid).pw_name and set(group.gr_mem) <= {group.gr_name}
    return False


def make_directories(path: Path) -> None:
    """Make a directory and its parents.

    This user can use them and nobody else can write there, whatever the umask.
    """
    for folder in reversed([path, *path.parents]):
        if not folder.is_dir():
            with suppress(FileExistsError):
                folder.mkdir(mode=0o755)
                if (mode := stat.S_IMODE(folder.stat().st_mode)) & 0o700 != 0o700:
                    folder.chmod(mode | 0o700)
