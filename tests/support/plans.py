"""Plans of attention's wrappers: the private state that tests look at, in one place."""

from __future__ import annotations

from typing import Any

from flashinfer._attention.lists import Scheduler
from flashinfer._attention.plan import Plan


def plan_of(wrapper: Any) -> Plan:
    """Return the last plan."""
    planned: Plan | None = wrapper._planned
    assert planned is not None, "plan() was not called"
    return planned


def bound_calls(wrapper: Any) -> Any:
    """Return the calls that are bound to the last plan, or ``None``."""
    return wrapper._bound


def scheduler_of(wrapper: Any) -> Scheduler:
    """Return the workspaces of a wrapper."""
    scheduler: Scheduler = wrapper._scheduler
    return scheduler


def num_partial_states(wrapper: Any) -> int:
    """Return the number of partial states of the last plan, 0 if no keys are split."""
    return scheduler_of(wrapper).header[4]


def num_merges(wrapper: Any) -> int:
    """Return the number of rows that the last plan merges from partial states."""
    return scheduler_of(wrapper).header[1]
