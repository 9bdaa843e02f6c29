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
from .objects import ObjectId, id_of, install, pack, pointer, unpack
from .signing import Signer, signer, trusted_keys
from .transport import Store

MAX_REQUESTS = 8  # at once
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
    candidates: Iterable[Store], object_id: ObjectId, destination: Path, refusal: Refusal, ignore_misses: bool = False
) -> Artifact | None:
    """Publish the first valid object of the stores at ``destination``."""
    for one in candidates:
        began = time.perf_counter()
        if (data := one.get(object_id.path, ignore_misses)) is None:
            continue
        try:
            found = install(data, object_id, destination, trusted_keys() if one.signed else None, refusal)
        except OSError as err:
            one.complain(f"{destination} cannot be written: {err}")
        except (ArtifactError, TypeError, ValueError, AttributeError) as err:  # unsigned manifests may be anything
            one.record_miss(object_id.path)
            one.complain(f"{object_id.path} {err}; it is not used")
        else:
            ms = (time.perf_counter() - began) * 1e3
            emit("fetch", object_id.name, ms, url=f"{one.url}/{object_id.path}", bytes=len(data))
            return found
    return None


def fetch_default(
    candidates: Iterable[Store],
    spec: Spec,
    key: str,
    archs: Collection[str],
    destination: Callable[[str], Path],
    refusal: Refusal,
) -> Artifact | None:
    """Publish a build for these archs, whatever its tools. A machine without tools cannot compute a build key."""
    for one in candidates:
        text = one.get(place := pointer(spec.name, key, archs))
        if text is None:
            continue
        if not re.fullmatch(b"[0-9a-f]{64}", text):
            one.complain(f"{place} is not a pointer; it is not used")
            continue
        object_id = ObjectId(spec.name, key, text.decode())
        if (found := fetch([one], object_id, destination(object_id.build_key), refusal)) is not None:
            return found
    return None


def link_refusal(found: Artifact) -> str | None:
    return why_not_linkable(found.manifest["requires"], found.manifest["torch_abi"])


def fetch_all(requests: Sequence[Request]) -> Answers:
    """Fetch modules whose locks this process holds."""
    candidates = stores()
    not_found = Rejected((f"none is in the stores {', '.join(one.url for one in candidates)}",))
    with ThreadPoolExecutor(min(MAX_REQUESTS, len(requests))) as pool:
        for request, found in zip(requests, pool.map(partial(_fetch_request, candidates), requests), strict=True):
            yield request, not_found if found is None else found


def _fetch_request(candidates: Sequence[Store], request: Request) -> Artifact | None:
    """Fetch the build of a request. If this machine has no tools, fetch any build for its archs."""
    name, key, build = request.spec.name, request.key, request.build_key
    refusal = link_refusal if isinstance(request, BuildRequest) else request.refusal
    if build:
        return fetch(candidates, ObjectId(name, key, build), request.destination_of(build), refusal)
    return fetch_default(candidates, request.spec, key, request.archs, request.destination_of, refusal)


def push(one: Store, found: Artifact, sign: Signer | None) -> str:
    """Write an artifact, then the pointer to it.

    Return ``written``, ``there already``, or ``""`` if rejected.
    """
    how = one.put(id_of(found).path, pack(found, sign))
    return how and point(one, found, how)


def repair(one: Store, found: Artifact, sign: Signer | None) -> str:
    """Write like :func:`push`, and replace an existing object that no machine would accept: ``repaired``."""
    how, object_id = push(one, found, sign), id_of(found)
    if how != "there already":
        return how
    try:
        trusted = {sign(b"")[0]} | (trusted_keys() if env.STORE_KEYS.is_set else set()) if sign else None
        unpack(one.get(object_id.path, ignore_misses=True) or b"", object_id, trusted)
        return how
    except ArtifactError:
        how = one.put(object_id.path, pack(found, sign), replace=True)
        return how and point(one, found, "repaired", replace=True)


def point(one: Store, found: Artifact, how: str, replace: bool = False) -> str:
    """Write the pointer to an existing object."""
    object_id = id_of(found)
    one.put(pointer(*object_id[:2], found.archs), object_id.build_key.encode(), replace)
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
