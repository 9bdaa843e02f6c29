"""Exchange of Python objects between ranks: classes that engines subclass, options, and a query."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

__all__ = ["CommBackend", "MnnvlConfig", "TorchDistBackend", "is_mnnvl_fabric_supported"]


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

    def bcast(self, data: Any, root: int = 0) -> Any:
        """Return the ``data`` of rank ``root`` on every rank."""
        return self.allgather(data)[root]

    def barrier(self) -> None:
        """Return once every rank has called it."""
        self.allgather(None)

    @abstractmethod
    def Split(self, color: int, key: int) -> CommBackend:
        """Return the group of the ranks with the same ``color``, ordered by ``key``."""


class TorchDistBackend(CommBackend):
    """Exchange of objects over a process group of ``torch.distributed``.

    Args:
        group: a process group of any backend that gathers objects, by default all ranks.
    """

    def __init__(self, group: Any = None) -> None:
        import torch.distributed as dist

        self._group = dist.group.WORLD if group is None else group
        self._ranks: list[int] = dist.get_process_group_ranks(self._group)

    def Get_rank(self) -> int:
        """Return this rank's number in the group."""
        import torch.distributed as dist

        return self._ranks.index(dist.get_rank())

    def Get_size(self) -> int:
        """Return the number of ranks."""
        return len(self._ranks)

    def allgather(self, data: Any) -> tuple[Any, ...]:
        """Return every rank's ``data``, by rank. The objects are pickled."""
        import torch.distributed as dist

        found: list[Any] = [None] * len(self._ranks)
        dist.all_gather_object(found, data, group=self._group)
        order = dist.get_process_group_ranks(self._group)
        return tuple(found[order.index(rank)] for rank in self._ranks)

    def bcast(self, data: Any, root: int = 0) -> Any:
        """Return the ``data`` of rank ``root`` of the group on every rank."""
        import torch.distributed as dist

        found = [data]
        dist.broadcast_object_list(found, src=self._ranks[root], group=self._group)
        return found[0]

    def barrier(self) -> None:
        """Return once every rank has called it."""
        import torch.distributed as dist

        dist.barrier(group=self._group)

    def Split(self, color: int, key: int) -> TorchDistBackend:
        """Return the group of the ranks with the same ``color``, ordered by ``key`` and then by rank.

        Every rank of this group calls it.
        """
        import torch.distributed as dist

        colors: dict[int, list[tuple[int, int, int]]] = {}
        for number, (other, order) in enumerate(self.allgather((color, key))):
            colors.setdefault(other, []).append((order, number, self._ranks[number]))
        ranks = [rank for _, _, rank in sorted(colors[color])]
        own = TorchDistBackend(dist.new_group(ranks, use_local_synchronization=True))
        own._ranks = ranks  # torch sorts the ranks of a group
        return own


@dataclass(frozen=True)
class MnnvlConfig:
    """Options of FlashInfer's memory over a fabric. Only ``comm_backend`` is read by this library."""

    comm_backend: CommBackend | None = None
    fabric_page_size: int = 1 << 29
    allocation_granularity: int = 0


def is_mnnvl_fabric_supported(device_idx: int) -> bool:
    """Return ``False``: this library shares no memory over an NVLink fabric between nodes, on any device."""
    return False
