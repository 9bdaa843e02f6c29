"""Build modules ahead of time into data/aot.

This is ``flashinfer build`` of this tree; see ``flashinfer/cli/aot.py``.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # build this tree, even if another one is installed

from flashinfer.cli.main import main

if __name__ == "__main__":
    sys.exit(main(["build", *sys.argv[1:]]))
