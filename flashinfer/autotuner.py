"""FlashInfer's tuner of kernels. Nothing here is tuned at run time: the plan decides from sizes, so all of this does nothing.

Engines wrap their warm-up in :func:`autotune` and keep what was tuned in files; both work, and files hold nothing.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

__all__ = ["AutoTuner", "autotune", "get_autotune_process_group", "set_autotune_process_group"]

_FORMAT = {"format": "flashinfer: nothing is tuned at run time"}
_group: Any = None


class AutoTuner:
    """The tuner of the process, with nothing to tune: :meth:`get` returns it."""

    _instance: AutoTuner | None = None

    @classmethod
    def get(cls) -> AutoTuner:
        """Returns the one tuner of this process."""
        cls._instance = cls._instance or cls()
        return cls._instance

    def save_configs(self, path: str | Path) -> None:
        """Writes a file that says that nothing was tuned, so that an engine finds one to share between ranks."""
        Path(path).write_text(json.dumps(_FORMAT))

    def load_configs(self, path: str | Path) -> bool:
        """Returns whether the file is one of :meth:`save_configs`; there is nothing in it to take over."""
        try:
            return bool(json.loads(Path(path).read_text()) == _FORMAT)
        except (OSError, ValueError):
            return False

    def clear_cache(self) -> None:
        """Does nothing: no configuration is kept."""


@contextmanager
def autotune(
    tune_mode: bool = True,
    cache: str | Path | None = None,
    skip_ops: Iterable[str] | None = None,
    **options: Any,
) -> Iterator[None]:
    """Runs the block within as it is. Nothing is tuned; every argument is accepted and ignored."""
    yield


def set_autotune_process_group(group: Any) -> None:
    """Keeps the group that ranks would tune in together, for :func:`get_autotune_process_group`; nothing is tuned."""
    global _group
    _group = group


def get_autotune_process_group() -> Any:
    """Returns what :func:`set_autotune_process_group` was given last, at first ``None``."""
    return _group
