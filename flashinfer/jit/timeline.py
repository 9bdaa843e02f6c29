"""Where the time of a build goes: what ran when, in which compile slot, with how much memory."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class Unit:
    """One step of a build, in seconds since the build began.

    ``kind``: ``compile``, ``link``, ``reuse`` (an object of an interrupted build) or ``wait`` (for a compile slot, or
    for another process that builds the module). ``name`` is the file made, ``source`` what it is made from, ``lane``
    the compile slot of this machine; of a wait for a slot, the one that it led to.
    """

    kind: str
    module: str
    name: str
    source: str
    start: float
    end: float
    lane: int = 0
    peak_rss_bytes: int = 0


@dataclass(frozen=True)
class Timeline:
    """One ninja run: when it ``began`` (seconds since the epoch), where, and its units in the order of their ends."""

    began: float
    host: str
    pid: int
    jobs: int
    units: list[Unit] = field(default_factory=list)
