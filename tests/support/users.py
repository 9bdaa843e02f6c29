"""Other users for programs that a test starts as root, and namespaces that the kernel may refuse."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from functools import cache
from pathlib import Path

SOMEBODY = 12345  # without an account

# Arguments are pairs of a folder that others cannot enter, such as /root, and an entry of it that they need.
# In the mount namespace of the program the folder has only these entries.
_OPEN = """
set -e
leave() { test -z "$real" || { umount "$real"; rmdir "$real"; }; }
while [ "$1" != -- ]; do
  if [ "$1" != "$parent" ]; then
    leave
    parent=$1 real=$(mktemp -d)
    mount --bind "$parent" "$real"; mount -t tmpfs -o mode=755 tmpfs "$parent"
  fi
  mkdir "$parent/$2"; mount --bind "$real/$2" "$parent/$2"
  shift 2
done
leave
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
    # The interpreter is a link in a virtual environment, and the libraries are next to the link.
    ways = [Path(os.path.abspath(sys.executable)), Path(os.path.realpath(sys.executable)), Path(__file__).parents[2]]
    steps = {
        (parent, child.name) for way in ways for child, parent in zip((way, *way.parents), way.parents, strict=False)
    }
    closed = sorted(step for step in steps if not step[0].stat().st_mode & 0o001)
    words = [str(word) for pair in closed for word in pair]
    return ("unshare", "-m", "sh", "-c", _OPEN, "sh", *words, "--", *become)


def open_to_all(folder: Path) -> Path:
    """Make a folder, and let every user reach it."""
    folder.mkdir(parents=True, exist_ok=True)
    for one in (folder, *folder.parents):
        if one.stat().st_uid == os.geteuid() and not one.stat().st_mode & 0o001:
            one.chmod(one.stat().st_mode | 0o055)
    return folder
