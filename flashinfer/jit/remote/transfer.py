"""Fetches from stores: one process of a host, under the module's lock, requests one object."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

from ... import env
from ...errors import ArtifactError
from ..artifact import Artifact
from ..events import emit
from ..lookup import Answers, BuildRequest, Rejected, Request
from ..machine.target import why_not_linkable
from ..spec import Spec
from .objects import Wanted, install, pack, pointer, unpack, wanted_of
from .signing import Signer, signer, trusted_keys
from .transport import Store

AT_ONCE = 8  # requests
Refusal = Callable[[Artifact], str | None]
_stores: dict[str, Store] = {}


def stores() -> list[Store]:
    """Return the stores of ``FLASHINFER_STORE``, in order.

    Raises:
        EnvironmentValueError, DependencyError: signatures cannot be checked, or builds cannot be signed.
    """
    found = [_stores.setdefault(url, Store(url)) for url in env.STORE.get()]
    if any(one.signed for one in found):
        trusted_keys()
    if found and found[0].signed and env.STORE_PUBLISH.get():
        signer()
    return found


def fetch(
    among: Iterable[Store], wanted: Wanted, destination: Path, refusal: Refusal, again: bool = False
) -> Artifact | None:
    """Publish the first valid object of the stores at ``destination``."""
    for one in among:
        began = time.perf_counter()
        if (data := one.get(wanted.place, again)) is None:
            continue
        try:
            found = install(data, wanted, destination, trusted_keys() if one.signed else None, refusal)
        except OSError as err:
            one.complain(f"{destination} cannot be written: {err}")
        except (ArtifactError, TypeError, ValueError, AttributeError) as err:  # unsigned manifests may be anything
            one.forget(wanted.place)
            one.complain(f"{wanted.place} {err}; it is not used")
        else:
            ms = (time.perf_counter() - began) * 1e3
            emit("fetch", wanted.name, ms, url=f"{one.url}/{wanted.place}", bytes=len(data))
            return found
    return None


def fetch_default(
    among: Iterable[Store],
    spec: Spec,
    key: str,
    archs: Collection[str],
    destination: Callable[[str], Path],
    refusal: Refusal,
) -> Artifact | None:
    """Fetch like :func:`fetch` a build of any tools for these archs, for a machine without tools."""
    for one in among:
        text = one.get(place := pointer(spec.name, key, archs))
        if text is None:
            continue
        if not re.fullmatch(b"[0-9a-f]{64}", text):
            one.complain(f"{place} is not a pointer; it is not used")
            continue
        wanted = Wanted(spec.name, key, text.decode())
        if (found := fetch([one], wanted, destination(wanted.build_key), refusal)) is not None:
            return found
    return None


def linkable(found: Artifact) -> str | None:
    return why_not_linkable(found.manifest["requires"], found.manifest["torch_abi"])


def fetched(requests: Sequence[Request]) -> Answers:
    """Fetch modules whose locks this process holds."""
    among = stores()
    nowhere = Rejected((f"none is in the stores {', '.join(one.url for one in among)}",))
    with ThreadPoolExecutor(min(AT_ONCE, len(requests))) as pool:
        for request, found in zip(requests, pool.map(partial(_fetched, among), requests), strict=True):
            yield request, nowhere if found is None else found


def _fetched(among: Sequence[Store], request: Request) -> Artifact | None:
    """Fetch the build of a request, or without tools any build for its archs."""
    name, key, build = request.spec.name, request.key, request.build_key
    refusal = linkable if isinstance(request, BuildRequest) else request.refuses
    if build:
        return fetch(among, Wanted(name, key, build), request.place(build), refusal)
    return fetch_default(among, request.spec, key, request.archs, request.place, refusal)


def push(one: Store, found: Artifact, sign: Signer | None) -> str:
    """Write an artifact, then the pointer to it.

    Return ``written``, ``there already``, or ``""`` if rejected.
    """
    how = one.put(wanted_of(found).place, pack(found, sign))
    return how and point(one, found, how)


def repair(one: Store, found: Artifact, sign: Signer | None) -> str:
    """Write like :func:`push`, and replace an existing object that no machine would accept: ``repaired``."""
    how, wanted = push(one, found, sign), wanted_of(found)
    if how != "there already":
        return how
    try:
        trusted = {sign(b"")[0]} | (trusted_keys() if env.STORE_KEYS.is_set else set()) if sign else None
        unpack(one.get(wanted.place, again=True) or b"", wanted, trusted)
        return how
    except ArtifactError:
        how = one.put(wanted.place, pack(found, sign), replace=True)
        return how and point(one, found, "repaired", replace=True)


def point(one: Store, found: Artifact, how: str, replace: bool = False) -> str:
    """Write the pointer to an existing object."""
    wanted = wanted_of(found)
    one.put(pointer(*wanted[:2], found.archs), wanted.build_key.encode(), replace)
    return how


def publish_built(built: Iterable[Artifact]) -> None:
    """Write built modules to the first store. A store that rejects them does not fail the build."""
    first = stores()[0]
    sign = signer() if first.signed else None
    for found in built:
        try:
            push(first, found, sign)
        except ArtifactError as err:
            first.complain(f"{found.name} is not written: {err}")
