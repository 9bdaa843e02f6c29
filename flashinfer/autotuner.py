"""FlashInfer's tuner of kernels, for a library that tunes nothing at run time: plans choose kernels from sizes.

Engines wrap their warm-up in :func:`autotune` or :func:`autotune_v2` and share files of tactics between ranks. Contexts
run their block, files hold only the environment, and ranks never differ.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from . import env

__all__ = [
    "AutoTuner",
    "autotune",
    "autotune_v2",
    "autotune_v2_reload",
    "get_autotune_process_group",
    "set_autotune_process_group",
]

_MODES = ("tune", "replay")
_group: Any = None


def _collect_metadata() -> dict[str, str]:
    """Return what changes the meaning of a stored tactic: versions and the GPU. Equal machines give equal answers."""
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else "none"
    return {"flashinfer": env.VERSION, "cuda": torch.version.cuda or "none", "gpu": gpu}


class AutoTuner:
    """The tuner of the process. :meth:`get` returns it.

    ``is_tuning_mode`` is true inside a context that tunes. ``_dirty``, which vLLM reads before it saves, is always false.
    """

    _instance: AutoTuner | None = None
    _dirty = False

    def __init__(self) -> None:
        self.is_tuning_mode = False

    @classmethod
    def get(cls) -> AutoTuner:
        """Return the one tuner of this process."""
        cls._instance = cls._instance or cls()
        return cls._instance

    def save_configs(self, path: str | Path) -> None:
        """Write a file that holds the environment and no tactic."""
        Path(path).write_text(json.dumps({"_metadata": _collect_metadata()}))

    def load_configs(self, path: str | Path) -> bool:
        """Return ``True`` for a file that :meth:`save_configs` wrote in an equal environment. There is nothing to load."""
        try:
            return bool(json.loads(Path(path).read_text()) == {"_metadata": _collect_metadata()})
        except (OSError, ValueError):
            return False

    def clear_cache(self) -> None:
        """Do nothing: no tactic is stored."""


def _check_options(
    name: str, skip_ops: Iterable[str] | None, tuning_buckets: Iterable[int] | None, round_up: bool
) -> None:
    """Refuse what no engine can mean: a string in the place of several, buckets that are no sizes."""
    if skip_ops is not None and (isinstance(skip_ops, str) or not all(isinstance(op, str) for op in skip_ops)):
        raise TypeError(f"{name}: skip_ops: got {skip_ops!r}, wanted names of operators")
    if tuning_buckets is not None:
        buckets = list(tuning_buckets)
        if not all(isinstance(size, int) and size > 0 for size in buckets):
            raise ValueError(f"{name}: tuning_buckets: got {buckets}, wanted positive integers")
    if not isinstance(round_up, bool):
        raise TypeError(f"{name}: round_up: got {round_up!r}, wanted a bool")


@contextmanager
def _tuning(active: bool) -> Iterator[None]:
    """Set ``is_tuning_mode`` inside the block."""
    tuner = AutoTuner.get()
    before, tuner.is_tuning_mode = tuner.is_tuning_mode, active
    try:
        yield
    finally:
        tuner.is_tuning_mode = before


@contextmanager
def autotune(
    tune_mode: bool = True,
    cache: str | Path | None = None,
    tuning_buckets: Iterable[int] | None = None,
    round_up: bool = False,
    skip_ops: Iterable[str] | None = None,
) -> Iterator[None]:
    """Run the block. Nothing is tuned, and no file is read or written.

    Args:
        tune_mode: value of ``AutoTuner.get().is_tuning_mode`` in the block.
        cache: path of a file of tactics, without effect.
        tuning_buckets, round_up: numbers of tokens to tune for, without effect.
        skip_ops: names of operators that are not tuned, without effect.

    Raises:
        TypeError: an unknown keyword, ``skip_ops`` that is no collection of names, ``round_up`` that is no bool.
        ValueError: a bucket that is no positive integer.
    """
    _check_options("autotune", skip_ops, tuning_buckets, round_up)
    with _tuning(bool(tune_mode)):
        yield


@contextmanager
def autotune_v2(
    mode: str = "tune",
    *,
    persistent_cache: bool = True,
    cache_root: str | Path | None = None,
    tuning_buckets: Iterable[int] | None = None,
    round_up: bool = False,
    skip_ops: Iterable[str] | None = None,
) -> Iterator[None]:
    """Run the block. Nothing is tuned, and no file is read or written.

    Args:
        mode: ``"tune"`` or ``"replay"``. Only the first sets ``AutoTuner.get().is_tuning_mode``.
        persistent_cache, cache_root: use and place of a store of tactics, without effect.
        tuning_buckets, round_up, skip_ops: as for :func:`autotune`.

    Raises:
        TypeError, ValueError: as :func:`autotune`; another mode.
    """
    if mode not in _MODES:
        raise ValueError(f"autotune_v2: mode: got {mode!r}, wanted 'tune' or 'replay'")
    _check_options("autotune_v2", skip_ops, tuning_buckets, round_up)
    with _tuning(mode == "tune"):
        yield


def autotune_v2_reload() -> None:
    """Do nothing: there is no store that other ranks could have written."""


def set_autotune_process_group(group: Any) -> None:
    """Store the group of ranks that tune together. :func:`get_autotune_process_group` returns it. It has no effect."""
    global _group
    _group = group


def get_autotune_process_group() -> Any:
    """Return the last group of :func:`set_autotune_process_group`, or ``None``."""
    return _group
