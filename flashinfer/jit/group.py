"""``ensure``: the ranks of a process group decide together what is there, who builds what is not, and what went wrong.

Values travel through the group's own store of keys, which no backend and no GPU is needed for. The first rank collects in a
thread what every rank says, judges it and answers all of them alike: a late rank has a number, an error one text.
(Not ``ensure.py``: importing a file of a function's name would put the file in the function's place.)
"""

from __future__ import annotations

import pickle
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from .. import env
from ..errors import GroupError
from . import store
from .artifact import Artifact
from .build import build_jit_specs
from .events import emit
from .host import lock
from .machine.workspace import workspace_root
from .report import say
from .spec import Spec
from .trace import record

WORD = 10.0  # seconds between two lines about who is late
GRACE = 4.0  # seconds for which a verdict may be late, and others may still say something after an error
STAY = 2.0  # seconds for which the first rank, whose process may keep the store, stays for those who read it
TICKS = 0.002, 0.05  # seconds between two looks, at first and later
LATE = ("has not called ensure()", "is still building, or gone", "has not ended, or is gone")

_calls: dict[str, int] = {}  # of a group -> how many so far, the same number on every rank


@dataclass(frozen=True)
class Hello:
    """What a rank says first: its host, what it wants (name -> key), what it lacks (name -> build key, or nothing where it
    has no tools), and whether what it builds is written to a store that it reads."""

    host: str
    wants: dict[str, str]
    lacks: dict[str, str]
    publishes: bool


def ensure(specs: Sequence[Spec], group: Any = None, timeout: float | None = None) -> list[Artifact]:
    """Artifacts of all specs, on every rank: a collective over ``torch.distributed``, of which all ranks call it alike.

    The lowest rank of each host looks up, fetches or builds, the others wait. Where hosts publish to a store, each missing
    module is built by one of them and fetched by the others. Without a process group this is ``build_jit_specs``.

    Args:
        specs: modules, the same on every rank.
        group: a process group of any backend; by default all ranks.
        timeout: seconds for all of it; by default the group's own.

    Raises:
        GroupError: ranks want different modules, or one does not answer in time. It names them.
        BuildError, JitFrozenError, ToolchainError and others: what the lowest rank that failed has met, on every rank.
    """
    import torch.distributed as dist

    if timeout is not None and not 0 < timeout < float("inf"):
        raise ValueError(f"timeout: got {timeout!r}, wanted a positive number of seconds")
    if not (dist.is_available() and dist.is_initialized()):
        return build_jit_specs(specs)
    specs, found = list(specs), dict[Spec, store.Lookup]()
    talk = _Talk(group, timeout)

    def look() -> Hello:
        for spec in dict.fromkeys(specs):
            record(spec)
            found[spec] = store.look_up(spec)
        lacks = {spec.name: store.Here(spec).build_key(one.key) for spec, one in found.items() if one.artifact is None}
        publishes = env.STORE.is_set and env.STORE_PUBLISH.get()
        return Hello(_host(), {spec.name: one.key for spec, one in found.items()}, lacks, publishes)

    try:
        hellos = talk.round(look)
        if _is_done(hellos.values()):
            for spec, one in found.items():
                assert one.artifact is not None
                emit("hit", spec.name, one.ms, path=one.artifact.path)
            return [artifact for spec in specs if (artifact := found[spec].artifact) is not None]
        artifacts = list[Artifact]()
        names = shared(hellos)[talk.rank]
        for chosen in ([spec for spec in found if spec.name in names], specs):
            artifacts.clear()
            talk.round(lambda chosen=chosen: artifacts.extend(build_jit_specs(chosen)))  # type: ignore[misc]
        return artifacts
    finally:
        talk.end()


def _host() -> str:
    """Ranks of one boot and namespace that share a workspace share what is in it."""
    return f"{lock.place()} {workspace_root().resolve()}"


def _is_done(hellos: Iterable[Hello]) -> bool:
    return not any(one.lacks for one in hellos)


def shared(hellos: Mapping[int, Hello]) -> dict[int, set[str]]:
    """Rank -> the modules that it builds: the lowest of a host what the host lacks; where all of them publish, hosts that
    want the very same build share the modules among them, and fetch the rest afterwards."""
    leaders, lacks = dict[str, int](), dict[int, dict[str, str]]()
    for rank, one in sorted(hellos.items()):
        lacks.setdefault(leaders.setdefault(one.host, rank), {}).update(one.lacks)
    together = all(hellos[rank].publishes for rank in lacks)
    result = {rank: set[str]() for rank in hellos}
    for number, name in enumerate(sorted({name for one in lacks.values() for name in one})):
        for rank, own in lacks.items():
            # A host without tools builds nothing, and fetches what one for the same archs has built.
            alike = [other for other in lacks if (key := lacks[other].get(name)) and key == (own.get(name) or key)]
            if name in own and (not together or not alike or alike[number % len(alike)] == rank):
                result[rank].add(name)
    return result


def difference(hellos: Mapping[int, Hello], names: Sequence[int]) -> GroupError | None:
    """What one of the ranks wants and the first does not, or the other way round. ``names``: how ranks are called."""
    first = hellos[0].wants
    for rank, one in sorted(hellos.items()):
        for name in sorted(first.keys() | one.wants.keys()):
            if first.get(name) == one.wants.get(name):
                continue
            what = (
                "asks for"
                if name not in first
                else "does not ask for"
                if name not in one.wants
                else "has other sources of"
            )
            but = "which" if name not in first or name not in one.wants else "than"
            does = "" if but == "than" else " does not" if name not in first else " does"
            text = f"rank {names[rank]} {what} module {name!r}, {but} rank {names[0]}{does}"
            return GroupError(text.replace(", than", " than"), (names[rank],))
    return None


class _Talk:
    """One call of :func:`ensure`, as this rank hears and says it."""

    def __init__(self, group: Any, timeout: float | None) -> None:
        import torch.distributed as dist
        from torch.distributed import distributed_c10d as c10d

        group = group or dist.group.WORLD
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)
        if self.rank < 0:
            raise ValueError("group: this process is no rank of it")
        self.names = dist.get_process_group_ranks(group)
        number = _calls[group.group_name] = _calls.get(group.group_name, 0) + 1
        self.store: Any = c10d._get_process_group_store(group)
        self.prefix, self.number = f"flashinfer/ensure/{number}", 0
        own = _timeout(group)
        self.timeout = own if timeout is None else timeout
        self.deadline = time.monotonic() + self.timeout
        self.thread = threading.Thread(target=self._collect, name="flashinfer-ensure", daemon=True)
        if self.rank == 0:
            if self.timeout > own:
                say(
                    f"ensure may wait for {self.timeout:g} s, the group's own time-out is {own:g} s: others may give up first"
                )
            self.thread.start()

    def round(self, work: Callable[[], Any]) -> dict[int, Any]:
        """Do something, and hear what came of it on every rank.

        Raises:
            Exception: the verdict of the first rank, the same on every rank.
        """
        self.number += 1
        said: tuple[Any, Exception | None]
        try:
            said = (work(), None)
        except Exception as err:
            said = (None, portable(err, f"rank {self.names[self.rank]}"))
        except BaseException:
            self._say((None, GroupError(f"rank {self.names[self.rank]} was interrupted", (self.names[self.rank],))))
            raise
        self._say(said)
        values: dict[int, Any]
        values, error = pickle.loads(self._hear(f"{self.prefix}/{self.number}"))
        if error is not None:
            raise error
        return values

    def end(self) -> None:
        """Say that the last verdict was read; the first rank, whose process may keep the store, waits for that."""
        with suppress(RuntimeError):
            self.store.add(f"{self.prefix}/read", 1)
        if self.rank == 0:
            self.thread.join(STAY + 1)

    def _say(self, said: Any) -> None:
        try:
            self.store.set(f"{self.prefix}/{self.number}/{self.rank}", pickle.dumps(said))
        except RuntimeError as err:
            raise self._lost(err) from None

    def _hear(self, key: str) -> bytes:
        tick = TICKS[0]
        try:
            while not self.store.check([key]):
                if time.monotonic() > self.deadline + GRACE:
                    first = self.names[0]
                    raise GroupError(f"ensure: rank {first} did not answer within {self.timeout:g} s", (first,))
                time.sleep(tick)
                tick = min(tick * 1.5, TICKS[1])
            heard: bytes = self.store.get(key)
            return heard
        except GroupError:
            raise
        except RuntimeError as err:
            raise self._lost(err) from None

    def _lost(self, err: RuntimeError) -> GroupError:
        first, reason = self.names[0], str(err).splitlines()[0]
        return GroupError(f"ensure: the group's store is gone, and rank {first} if it kept it: {reason}", (first,))

    def _collect(self) -> None:
        with suppress(RuntimeError):  # of the store: every rank sees for itself
            for number in (1, 2, 3):
                said, error = self._gather(number)
                values = {rank: value for rank, (value, _) in said.items()}
                failed = [said[rank][1] for rank in sorted(said) if said[rank][1] is not None]
                error = failed[0] if failed else error
                if number == 1 and error is None:
                    error = difference(values, self.names)
                self.store.set(f"{self.prefix}/{number}", pickle.dumps((values, error)))
                if error is not None or (number == 1 and _is_done(values.values())):
                    break
            end = time.monotonic() + STAY
            while self.store.add(f"{self.prefix}/read", 0) < self.size and time.monotonic() < end:
                time.sleep(TICKS[0])

    def _gather(self, number: int) -> tuple[dict[int, Any], GroupError | None]:
        """What every rank says, or which did not."""
        said, tick, began = dict[int, Any](), TICKS[0], time.monotonic()
        word, end = began + WORD, self.deadline
        while True:
            for rank in (one for one in range(self.size) if one not in said):
                if self.store.check([key := f"{self.prefix}/{number}/{rank}"]):
                    said[rank] = pickle.loads(self.store.get(key))
            late = [self.names[rank] for rank in range(self.size) if rank not in said]
            who = f"rank{'s' * (len(late) > 1)} {', '.join(map(str, late[:8]))}{', ...' * (len(late) > 8)}"
            now = time.monotonic()
            if not late:
                return said, None
            if any(error is not None for _, error in said.values()):
                end = min(end, now + GRACE)
            if now >= end:
                return said, GroupError(f"ensure: {who} {LATE[number - 1]} after {self.timeout:g} s", tuple(late))
            if now >= word:
                say(f"ensure: waiting for {who}, which {LATE[number - 1]}: {now - began:.0f} s")
                word = now + WORD
            time.sleep(tick)
            tick = min(tick * 1.5, TICKS[1])


def portable(err: Exception, where: str) -> Exception:
    """An error that can travel: itself, or a :class:`GroupError` with its words."""
    with suppress(Exception):
        pickle.loads(pickle.dumps(err))
        return err
    return GroupError(f"{where}: {type(err).__name__}: {err}")


def _timeout(group: Any) -> float:
    """The group's own time-out, which each of its backends has; 30 minutes where none says."""
    for device in group._device_types:
        with suppress(AttributeError, RuntimeError):
            return float(group._get_backend(device).options._timeout.total_seconds())
    return 1800.0
