"""Builds modules ahead of time into data/aot: ``python scripts/build_aot.py --help``, see ``flashinfer/cli/aot.py``."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # this tree is built, whichever one is installed

from flashinfer.cli.aot import main

if __name__ == "__main__":
    sys.exit(main())
