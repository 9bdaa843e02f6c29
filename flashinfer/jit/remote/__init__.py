"""Remote stores of ``FLASHINFER_STORE``, from which a build fetches artifacts of other machines.

A process without a store imports none of these files: ``transfer`` (fetch and publish) -> ``objects`` (format),
``signing`` -> ``transport`` (reads and writes).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from ... import env
from .. import process

if TYPE_CHECKING:
    from ..host.lock import Hold
    from ..lookup import Lookup
    from ..run import Outcome, Request
    from ..spec import Spec


def prepare() -> None:
    """Import the packages that read stores, before a lock is taken: the first import runs their code.

    Raises:
        EnvironmentValueError, DependencyError: a store cannot be used.
    """
    if env.STORE.is_set:
        with process.one_step():
            from .transfer import stores

            for one in stores():
                one.prepare()


def without_building(spec: Spec, lookup: Lookup) -> Lookup:
    """Fetch a module that this host cannot or must not build.

    Without success, name the stores in the reason.
    """
    if env.STORE.is_set:
        prepare()
        from .transfer import without_building

        return without_building(spec, lookup)
    return lookup


def fetched(holds: dict[Request, Hold]) -> dict[Request, Outcome]:
    """Fetch modules whose locks this process holds, and remove them from ``holds``."""
    if holds and env.STORE.is_set:
        from .transfer import fetched

        return fetched(holds)
    return {}


def publish(outcomes: Iterable[Outcome]) -> None:
    """Write built modules to the first store, if ``FLASHINFER_STORE_PUBLISH`` is set."""
    if env.STORE_PUBLISH.get() and env.STORE.is_set:
        from .transfer import publish_built

        publish_built(one.artifact for one in outcomes if one.artifact is not None and one.how == "built")
