"""``ensure``: ranks of a process group agree on missing modules, on their builders and on one error.

Ranks exchange values through the group's key-value store, which needs no backend and no GPU. A thread of the first
rank gathers the states of all ranks, decides, and sends all ranks the same answer. Errors can therefore name a late
rank, and are the same on all ranks. The file is not called ``ensure.py``, because its import would replace the function
``ensure``.
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
from . import lock
from .artifact import Artifact
from .events import emit
from .lookup import Machine
from .machine.workspace import workspace_root
from .report import say
from .resolve import Lookup, build_jit_specs, look_up, record
from .spec import Spec

REPORT_INTERVAL = 10.0  # seconds between two lines about late ranks
ERROR_GRACE = 4.0  # seconds to wait for a late decision, and for reports of other ranks after an error
STORE_GRACE = 2.0  # seconds that the first rank waits for readers, because its process may host the store
POLL_INTERVALS = 0.002, 0.05  # seconds between two polls, at first and later
LATE_TEXTS = ("has not called ensure()", "is still building, or gone", "has not ended, or is gone")

_calls: dict[str, int] = {}  # group -> number of calls so far, equal on all ranks


@dataclass(frozen=True)
class RankState:
    """First message of a rank: its host, its modules (name -> key) and the missing ones (name -> build key).

    A build key is empty on a host without tools. ``publishes``: the rank writes its builds to a remote store.
    """

    host: str
    modules: dict[str, str]
    missing: dict[str, str]
    publishes: bool


def ensure(specs: Sequence[Spec], group: Any = None, timeout: float | None = None) -> list[Artifact]:
    """Return the artifacts of all specs on every rank: a collective call over ``torch.distributed``.

    The lowest rank of each host looks up, fetches or builds, and all other ranks wait. If hosts publish to a remote
    store, one host builds each missing module and the others fetch it. Without a process group, the function calls
    ``build_jit_specs``.

    Args:
        specs: modules, the same on every rank.
        group: a process group of any backend, by default all ranks.
        timeout: seconds for the whole call, by default the group's own time-out.

    Raises:
        GroupError: ranks have different modules, or a rank does not answer in time. The text names them.
        BuildError, JitFrozenError, ToolchainError and others: the error of the lowest rank that failed, on
            every rank.
    """
    import torch.distributed as dist

    if timeout is not None and not 0 < timeout < float("inf"):
        raise ValueError(f"timeout: got {timeout!r}, wanted a positive number of seconds")
    if not (dist.is_available() and dist.is_initialized()):
        return build_jit_specs(specs)
    specs, found = list(specs), dict[Spec, Lookup]()
    session = _Session(group, timeout)

    def state() -> RankState:
        for spec in dict.fromkeys(specs):
            record(spec)
            found[spec] = look_up(spec)
        missing = {spec.name: Machine(spec).build_key(one.key) for spec, one in found.items() if one.artifact is None}
        publishes = env.STORE.is_set and env.STORE_PUBLISH.get()
        return RankState(_host(), {spec.name: one.key for spec, one in found.items()}, missing, publishes)

    try:
        states = session.round(state)
        if _is_done(states.values()):
            for spec, one in found.items():
                assert one.artifact is not None
                emit("hit", spec.name, one.ms, path=one.artifact.path)
            return [artifact for spec in specs if (artifact := found[spec].artifact) is not None]
        artifacts = list[Artifact]()
        names = assign(states)[session.rank]
        for chosen in ([spec for spec in found if spec.name in names], specs):
            artifacts.clear()
            session.round(lambda chosen=chosen: artifacts.extend(build_jit_specs(chosen)))  # type: ignore[misc]
        return artifacts
    finally:
        session.end()


def _host() -> str:
    """Return the identity of the host: boot, PID namespace and workspace."""
    return f"{lock.pid_namespace()} {workspace_root().resolve()}"


def _is_done(states: Iterable[RankState]) -> bool:
    return not any(one.missing for one in states)


def assign(states: Mapping[int, RankState]) -> dict[int, set[str]]:
    """Map each rank to the modules that it builds.

    The lowest rank of a host, its leader, builds the missing modules of the host. If all leaders publish, hosts with
    equal build keys divide the modules, and each fetches the rest afterwards.
    """
    leaders, missing = dict[str, int](), dict[int, dict[str, str]]()  # host -> leader, leader -> modules of its host
    for rank, one in sorted(states.items()):
        missing.setdefault(leaders.setdefault(one.host, rank), {}).update(one.missing)
    all_publish = all(states[rank].publishes for rank in missing)
    result = {rank: set[str]() for rank in states}
    for number, name in enumerate(sorted({name for one in missing.values() for name in one})):
        for rank, own in missing.items():
            # A host without tools builds nothing. It fetches the build of a host with the same archs.
            equal = [other for other in missing if (key := missing[other].get(name)) and key == (own.get(name) or key)]
            if name in own and (not all_publish or not equal or equal[number % len(equal)] == rank):
                result[rank].add(name)
    return result


def mismatch(states: Mapping[int, RankState], ranks: Sequence[int]) -> GroupError | None:
    """Return an error if a rank has other modules than the first rank.

    ``ranks``: the global ranks of the group's members, for the text.
    """
    first = states[0].modules
    for rank, one in sorted(states.items()):
        for name in sorted(first.keys() | one.modules.keys()):
            if first.get(name) == one.modules.get(name):
                continue
            what = (
                "asks for"
                if name not in first
                else "does not ask for"
                if name not in one.modules
                else "has other sources of"
            )
            but = "which" if name not in first or name not in one.modules else "than"
            does = "" if but == "than" else " does not" if name not in first else " does"
            text = f"rank {ranks[rank]} {what} module {name!r}, {but} rank {ranks[0]}{does}"
            return GroupError(text.replace(", than", " than"), (ranks[rank],))
    return None


class _Session:
    """One call of :func:`ensure` on this rank."""

    def __init__(self, group: Any, timeout: float | None) -> None:
        import torch.distributed as dist
        from torch.distributed import distributed_c10d as c10d

        group = group or dist.group.WORLD
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)
        if self.rank < 0:
            raise ValueError("group: got a group without this process, wanted one of its ranks")
        self.names = dist.get_process_group_ranks(group)
        number = _calls[group.group_name] = _calls.get(group.group_name, 0) + 1
        self.store: Any = c10d._get_process_group_store(group)
        self.prefix, self.number = f"flashinfer/ensure/{number}", 0
        group_timeout = _timeout(group)
        self.timeout = group_timeout if timeout is None else timeout
        self.deadline = time.monotonic() + self.timeout
        self.thread = threading.Thread(target=self._collect, name="flashinfer-ensure", daemon=True)
        if self.rank == 0:
            if self.timeout > group_timeout:
                say(
                    f"ensure may wait for {self.timeout:g} s, the group's own time-out is {group_timeout:g} s:"
                    " other ranks may give up first"
                )
            self.thread.start()

    def round(self, work: Callable[[], Any]) -> dict[int, Any]:
        """Do some work, and return the results of all ranks.

        Raises:
            Exception: the decision of the first rank, the same on every rank.
        """
        self.number += 1
        result: tuple[Any, Exception | None]
        try:
            result = (work(), None)
        except Exception as err:
            result = (None, portable(err, f"rank {self.names[self.rank]}"))
        except BaseException:
            self._send((None, GroupError(f"rank {self.names[self.rank]} was interrupted", (self.names[self.rank],))))
            raise
        self._send(result)
        values: dict[int, Any]
        values, error = pickle.loads(self._receive(f"{self.prefix}/{self.number}"))
        if error is not None:
            raise error
        return values

    def end(self) -> None:
        """Report that this rank has read the last decision. The first rank waits, because it may host the store."""
        with suppress(RuntimeError):
            self.store.add(f"{self.prefix}/read", 1)
        if self.rank == 0:
            self.thread.join(STORE_GRACE + 1)

    def _send(self, result: Any) -> None:
        try:
            self.store.set(f"{self.prefix}/{self.number}/{self.rank}", pickle.dumps(result))
        except RuntimeError as err:
            raise self._lost(err) from None

    def _receive(self, key: str) -> bytes:
        tick = POLL_INTERVALS[0]
        try:
            while not self.store.check([key]):
                if time.monotonic() > self.deadline + ERROR_GRACE:
                    first = self.names[0]
                    raise GroupError(f"ensure: rank {first} did not answer within {self.timeout:g} s", (first,))
                time.sleep(tick)
                tick = min(tick * 1.5, POLL_INTERVALS[1])
            value: bytes = self.store.get(key)
            return value
        except GroupError:
            raise
        except RuntimeError as err:
            raise self._lost(err) from None

    def _lost(self, err: RuntimeError) -> GroupError:
        first, reason = self.names[0], str(err).splitlines()[0]
        text = f"ensure: the group's store is gone; rank {first}, which may have hosted it, may be gone too: {reason}"
        return GroupError(text, (first,))

    def _collect(self) -> None:
        with suppress(RuntimeError):  # the store is gone, which every rank notices itself
            for number in (1, 2, 3):
                results, error = self._gather(number)
                values = {rank: value for rank, (value, _) in results.items()}
                failed = [results[rank][1] for rank in sorted(results) if results[rank][1] is not None]
                error = failed[0] if failed else error
                if number == 1 and error is None:
                    error = mismatch(values, self.names)
                self.store.set(f"{self.prefix}/{number}", pickle.dumps((values, error)))
                if error is not None or (number == 1 and _is_done(values.values())):
                    break
            end = time.monotonic() + STORE_GRACE
            while self.store.add(f"{self.prefix}/read", 0) < self.size and time.monotonic() < end:
                time.sleep(POLL_INTERVALS[0])

    def _gather(self, number: int) -> tuple[dict[int, Any], GroupError | None]:
        """Return the results of all ranks, or those received and an error that names the late ranks."""
        results, began = dict[int, Any](), time.monotonic()
        next_report, end = began + REPORT_INTERVAL, self.deadline
        tick = POLL_INTERVALS[0]
        while True:
            for rank in (one for one in range(self.size) if one not in results):
                if self.store.check([key := f"{self.prefix}/{number}/{rank}"]):
                    results[rank] = pickle.loads(self.store.get(key))
            late = [self.names[rank] for rank in range(self.size) if rank not in results]
            who = f"rank{'s' * (len(late) > 1)} {', '.join(map(str, late[:8]))}{', ...' * (len(late) > 8)}"
            now = time.monotonic()
            if not late:
                return results, None
            if any(error is not None for _, error in results.values()):
                end = min(end, now + ERROR_GRACE)
            if now >= end:
                text = f"ensure: {who} {LATE_TEXTS[number - 1]} after {self.timeout:g} s"
                return results, GroupError(text, tuple(late))
            if now >= next_report:
                say(f"ensure: waiting for {who}, which {LATE_TEXTS[number - 1]}: {now - began:.0f} s")
                next_report = now + REPORT_INTERVAL
            time.sleep(tick)
            tick = min(tick * 1.5, POLL_INTERVALS[1])


def portable(err: Exception, where: str) -> Exception:
    """Return ``err`` if it can be pickled, else a :class:`GroupError` with its text."""
    with suppress(Exception):
        pickle.loads(pickle.dumps(err))
        return err
    return GroupError(f"{where}: {type(err).__name__}: {err}")


def _timeout(group: Any) -> float:
    """Return the group's own time-out, which each of its backends has, or 30 minutes if none has one."""
    for device in group._device_types:
        with suppress(AttributeError, RuntimeError):
            return float(group._get_backend(device).options._timeout.total_seconds())
    return 1800.0
