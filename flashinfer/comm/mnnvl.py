"""Exchange of Python objects between ranks: a class that engines subclass, and a query."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

__all__ = ["CommBackend", "is_mnnvl_fabric_supported"]


class CommBackend(ABC):
    """Exchange of Python objects between the ranks of a group.

    Engines implement it over their process groups.
    """

    @abstractmethod
    def Get_rank(self) -> int:
        """Return this rank's number in the group."""

    @abstractmethod
    def Get_size(self) -> int:
        """Return the number of ranks."""

    @abstractmethod
    def allgather(self, data: Any) -> Any:
        """Return every rank's ``data``, by rank."""

    @abstractmethod
    def Split(self, color: int, key: int) -> CommBackend:
        """Return the group of the ranks with the same ``color``, ordered by ``key``."""


def is_mnnvl_fabric_supported(device_idx: int) -> bool:
    """Return ``False``: this library shares no memory over an NVLink fabric between nodes, on any device."""
    return False
