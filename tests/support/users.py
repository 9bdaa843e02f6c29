"""Other users for programs that a test starts as root, and namespaces that the kernel may refuse."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from functools import cache
from pathlib import Path

SOMEBODY = 12345  # without an account

# A folder on the way to the interpreter that others cannot enter, such as /root, is replaced by one with only
# that path, in a mount namespace of the program.
_OPEN = """
set -e
while [ "$1" != -- ]; do
  real=$(mktemp -d)
  mount --bind "$1" "$real"; mount -t tmpfs -o mode=755 tmpfs "$1"
  mkdir "$1/$2"; mount --bind "$real/$2" "$1/$2"; umount "$real"; rmdir "$real"
  shift 2
done
shift
exec "$@"
"""


def can(*command: str) -> bool:
    """Return whether a program can be started after a command such as ``unshare -U``."""
    if shutil.which(command[0]) is None:
        return False
    return subprocess.run([*command, "true"], capture_output=True).returncode == 0


@cache
def as_somebody() -> tuple[str, ...] | None:
    """Return the command that runs a program as another user, or ``None`` without root."""
    become = ("setpriv", f"--reuid={SOMEBODY}", f"--regid={SOMEBODY}", "--clear-groups")
    if os.geteuid() != 0 or not can(*become) or not can("unshare", "-m"):
        return None
    way = Path(os.path.realpath(sys.executable))
    closed = [(parent, child.name) for child, parent in zip((way, *way.parents), way.parents, strict=False)
              if not parent.stat().st_mode & 0o001]  # fmt: skip
    words = [str(word) for pair in reversed(closed) for word in pair]
    return ("unshare", "-m", "sh", "-c", _OPEN, "sh", *words, "--", *become)


def open_to_all(folder: Path) -> Path:
    """Make a folder, and let every user reach it."""
    folder.mkdir(parents=True, exist_ok=True)
    for one in (folder, *folder.parents):
        if one.stat().st_uid == os.geteuid() and not one.stat().st_mode & 0o001:
            one.chmod(one.stat().st_mode | 0o055)
    return folder
