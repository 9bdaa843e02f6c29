"""Memory that GPUs of several nodes share over NVLink: names that engines import, and subclass."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

from .. import _unsupported


class CommBackend(ABC):
    """How the ranks of a group exchange Python objects; engines implement it over their own process groups."""

    @abstractmethod
    def Get_rank(self) -> int:
        """Returns this rank's number in the group."""

    @abstractmethod
    def Get_size(self) -> int:
        """Returns the number of ranks."""

    @abstractmethod
    def allgather(self, data: Any) -> list[Any]:
        """Returns every rank's ``data``, by rank."""

    @abstractmethod
    def Split(self, color: int, key: int) -> CommBackend:
        """Returns the group of the ranks that gave the same ``color``, ordered by ``key``."""


__all__ = sorted([
    "CommBackend",
    *_unsupported.declare(
        globals(),
        _unsupported.SEVERAL_GPUS,
        functions=("is_mnnvl_fabric_supported",),
        classes=("McastGPUBuffer", "MnnvlConfig", "MnnvlMemory", "MpiComm", "TorchDistBackend"),
    ),
])  # fmt: skip
