"""Contexts and files of a tuner that tunes nothing: the names of :mod:`flashinfer.autotuner`."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from .. import env
from .._ops.errors import type_error, value_error
from .._ops.numbers import check_option

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
    """Return the properties that a stored tactic depends on: versions and the GPU."""
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else "none"
    return {"flashinfer": env.VERSION, "cuda": torch.version.cuda or "none", "gpu": gpu}


class AutoTuner:
    """Tuner of the process, returned by :meth:`get`.

    ``is_tuning_mode`` is true inside a context that tunes. vLLM reads ``_dirty`` before it saves; it is
    always false.
    """

    _instance: AutoTuner | None = None
    _dirty = False

    def __init__(self) -> None:
        self.is_tuning_mode = False

    @classmethod
    def get(cls) -> AutoTuner:
        """Return the tuner of this process."""
        cls._instance = cls._instance or cls()
        return cls._instance

    def save_configs(self, path: str | Path) -> None:
        """Write a file that holds only the environment."""
        Path(path).write_text(json.dumps({"_metadata": _collect_metadata()}))

    def load_configs(self, path: str | Path) -> bool:
        """Return whether :meth:`save_configs` wrote a file in an equal environment.

        There is nothing to load.
        """
        try:
            return bool(json.loads(Path(path).read_text()) == {"_metadata": _collect_metadata()})
        except (OSError, ValueError):
            return False

    def clear_cache(self) -> None:
        """Do nothing: no tactic is stored."""


def _check_options(
    name: str, skip_ops: Iterable[str] | None, tuning_buckets: Iterable[int] | None, round_up: bool
) -> None:
    """Check options that have no effect."""
    if skip_ops is not None and (isinstance(skip_ops, str) or not all(isinstance(op, str) for op in skip_ops)):
        raise type_error(name, "skip_ops", repr(skip_ops), "names of operators")
    if tuning_buckets is not None:
        buckets = list(tuning_buckets)
        if not all(isinstance(size, int) and size > 0 for size in buckets):
            raise value_error(name, "tuning_buckets", buckets, "positive integers")
    if not isinstance(round_up, bool):
        raise type_error(name, "round_up", repr(round_up), "a bool")


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
        skip_ops: names of operators to skip, without effect.

    Raises:
        TypeError: an unknown keyword, ``skip_ops`` that are no names, or a ``round_up`` that is no bool.
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
        persistent_cache, cache_root: use and path of a store of tactics, without effect.
        tuning_buckets, round_up, skip_ops: as for :func:`autotune`.

    Raises:
        TypeError, ValueError: as :func:`autotune`; another mode.
    """
    check_option("autotune_v2", "mode", mode, _MODES)
    _check_options("autotune_v2", skip_ops, tuning_buckets, round_up)
    with _tuning(mode == "tune"):
        yield


def autotune_v2_reload() -> None:
    """Do nothing: other ranks have written no store."""


def set_autotune_process_group(group: Any) -> None:
    """Store the group of ranks that tune together.

    :func:`get_autotune_process_group` returns it. It has no effect.
    """
    global _group
    _group = group


def get_autotune_process_group() -> Any:
    """Return the last group of :func:`set_autotune_process_group`, or ``None``."""
    return _group
