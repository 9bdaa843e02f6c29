"""Collective steps of a group's set-up. Each step has the same results, or the same error, on every rank."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from ..errors import GroupError
from ..jit.group import portable
from .mnnvl import CommBackend

T = TypeVar("T")


class Exchange:
    """The ranks of a group that set up shared memory.

    Args:
        backend: exchanges objects between the ranks, or ``None`` for a group of one.

    Attributes: ``rank``, ``size``.
    """

    def __init__(self, backend: CommBackend | None) -> None:
        self.rank, self.size = (0, 1) if backend is None else (backend.Get_rank(), backend.Get_size())
        self._backend = backend

    def vote(self, work: Callable[[], T]) -> list[T]:
        """Call ``work`` on every rank and return all results by rank. They must be picklable.

        If a rank fails, all ranks raise its error, so none waits in the next step.

        Raises:
            Exception: the error of the lowest rank that failed, on every rank.
        """
        mine: tuple[Any, Exception | None]
        try:
            mine = (work(), None)
        except Exception as err:
            mine = (None, portable(err, f"rank {self.rank}"))
        gathered: Sequence[tuple[Any, Exception | None]] = (
            [mine] if self._backend is None else self._backend.allgather(mine)
        )
        if len(gathered) != self.size:
            raise GroupError(f"allgather: got values of {len(gathered)} ranks, wanted those of {self.size}")
        for _, error in gathered:
            if error is not None:
                raise error
        return [value for value, _ in gathered]

    def run(self, work: Callable[[], T]) -> T:
        """Call ``work`` on every rank and return the result of this rank. It need not be picklable.

        Raises:
            Exception: the error of the lowest rank that failed, on every rank.
        """
        results: list[T] = []
        self.vote(lambda: results.append(work()))
        return results[0]

    def agree(self, what: str, value: T) -> T:
        """Check that a value is equal on all ranks, and return it.

        Raises:
            ValueError: the values of two ranks differ. The text names both. Every rank raises it.
        """
        values = self.vote(lambda: value)
        for rank, other in enumerate(values):
            if other != values[0]:
                raise ValueError(f"{what}: got {other!r} on rank {rank}, wanted {values[0]!r} as rank 0 has")
        return value
