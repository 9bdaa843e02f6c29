"""Python calls that a function makes."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable
from typing import Any


def files_of_calls(function: Callable[[], object]) -> list[str]:
    """Return the file of each Python call that a function makes, finalizers of earlier garbage not counted."""
    files = []

    def note(frame: Any, event: str, argument: object) -> None:
        if event == "call":
            files.append(frame.f_code.co_filename)

    before = sys.getprofile()
    gc.collect()
    gc.disable()
    sys.setprofile(note)
    try:
        function()
    finally:
        sys.setprofile(before)
        gc.enable()
    return files
