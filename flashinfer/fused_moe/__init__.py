"""Mixtures of experts: the names that engines import without a guard."""

from __future__ import annotations

from . import core
from .core import *  # noqa: F403 - every name of it is found here too, as in FlashInfer

__all__ = list(core.__all__)
