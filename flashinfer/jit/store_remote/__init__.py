"""Artifacts of other machines, from the stores of ``FLASHINFER_STORE``: what a build asks of them.

Whoever has no store imports nothing of it: ``herd`` (who asks, and for what) -> ``objects`` (what is there), ``signing``
-> ``transport`` (how it is read).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from ... import env
from .. import process

if TYPE_CHECKING:
    from ..host.lock import Hold
    from ..run import Outcome, Request
    from ..spec import Spec
    from ..store import Lookup


def prepare() -> None:
    """Import what reading stores needs, before a lock is taken: the first import executes files.

    Raises:
        EnvironmentValueError, DependencyError: a store cannot be used.
    """
    if env.STORE.is_set:
        with process.one_step():
            from .herd import stores

            for one in stores():
                one.prepare()


def without_building(spec: Spec, lookup: Lookup) -> Lookup:
    """Where a miss cannot be built, or may not: what stores have for it, else which of them were asked."""
    if env.STORE.is_set:
        prepare()
        from .herd import without_building

        return without_building(spec, lookup)
    return lookup


def fetched(holds: dict[Request, Hold]) -> dict[Request, Outcome]:
    """What stores have of modules whose locks this process holds; it is taken out of ``holds``."""
    if holds and env.STORE.is_set:
        from .herd import fetched

        return fetched(holds)
    return {}


def publish(outcomes: Iterable[Outcome]) -> None:
    """Write what was built to the first store, where ``FLASHINFER_STORE_PUBLISH`` says so."""
    if env.STORE_PUBLISH.get() and env.STORE.is_set:
        from .herd import publish_built

        publish_built(one.artifact for one in outcomes if one.artifact is not None and one.how == "built")
