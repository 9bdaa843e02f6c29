"""Fixtures of collectives: a bounded wait, and one thread for each rank's loops."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch

from .ranks import Group


@pytest.fixture(autouse=True)
def bounded(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("FLASHINFER_COMM_TIMEOUT", "60")
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def make_group(device: str) -> Iterator[Callable[..., Group]]:
    """Return a function that makes groups, which end with the test."""
    made = list[Group]()

    def make(size: int, tokens: int, hidden: int, dtype: torch.dtype) -> Group:
        made.append(Group(size, tokens, hidden, dtype, device))
        return made[-1]

    yield make
    for one in made:
        for workspace in one.workspaces:
            workspace._words[0] = 0  # an error that the test has seen
            workspace.destroy()
