"""Collective steps of a group's set-up: each ends with the same results, or the same error, on every rank."""

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
        """Do some work on every rank and return the results by rank. They must be picklable.

        A rank that fails does not leave the others waiting in the next step.

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
        """Do some work on every rank and return the result of this rank, which need not be picklable.

        Raises:
            Exception: the error of the lowest rank that failed, on every rank.
        """
        results: list[T] = []
        self.vote(lambda: results.append(work()))
        return results[0]

    def agree(self, what: str, value: T) -> T:
        """Return a value that is equal on all ranks.

        Raises:
            ValueError: it differs. The text names both ranks and values, on every rank.
        """
        values = self.vote(lambda: value)
        for rank, other in enumerate(values):
            if other != values[0]:
                raise ValueError(f"{what}: got {other!r} on rank {rank}, wanted {values[0]!r} as rank 0 has")
        return value
