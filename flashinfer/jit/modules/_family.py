"""``family_spec``: the spec of one of the project's modules, from the files that it finds in ``csrc``."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import PurePath

from ... import env
from ..module import JitSpec, gen_jit_spec
from ..spec import BACKENDS, Scalar, Value

_ARCH = re.compile(r"sm(\d+)(\d[af]?)")


def family_spec(
    family: str,
    kernels: str,
    *,
    variant: str = "",
    config: Mapping[str, Scalar] | None = None,
    coverage: Mapping[str, Iterable[Value]] | None = None,
) -> JitSpec:
    """Return a module's spec: binding ``csrc/<family>.cc``, kernels ``csrc/<family>_<kernels>.*``.

    Args:
        family: family of the functions that the operators implement.
        kernels: ``"cpu"``, ``"cuda"``, or an arch such as ``"sm90a"``: CUDA kernels for one arch only. Their
            operators have a namespace of their own, ``flashinfer_sm90a``, next to the portable ones.
        variant: a further part of the module's name.
        config, coverage: see :class:`Spec`.

    Raises:
        ValueError: the family has no such kernels.
    """
    names = (f"csrc/{family}_{kernels}.{suffix}" for suffix in ("cc", "cu"))
    source = next((name for name in names if os.path.isfile(f"{env.data_root()}/{name}")), None)
    if source is None:
        raise ValueError(f"backend: got {kernels!r}, wanted one of {', '.join(kernels_of(family))}")
    arch, binding = _ARCH.fullmatch(kernels), f"csrc/{family}.cc"
    spec = gen_jit_spec(
        "_".join(part for part in (family, variant, kernels) if part),
        [binding, source],
        backend="cuda" if arch else kernels,
        config=config,
        coverage=coverage,
        template="csrc/config.h.jinja",
        config_header=f"{family}_config.h",
        namespace=f"flashinfer_{kernels}" if arch else "flashinfer",
    )
    spec = replace(spec, archs=(f"{arch[1]}.{arch[2]}",) if arch else ())
    # A binding converts arguments once per call: -O1 runs as fast as -O3 and compiles in half the time.
    return spec if env.JIT_DEBUG.get() else replace(spec, source_cflags=((binding, "-O1"),))


def kernels_of(family: str, backends: Iterable[str] = BACKENDS) -> tuple[str, ...]:
    """Return the kernels that a family has for some backends, found by file: ``cpu``, ``cuda``, ``sm90a``."""
    files = (PurePath(name).stem for name in os.listdir(f"{env.data_root()}/csrc") if name.startswith(f"{family}_"))
    ends = (stem.removeprefix(f"{family}_") for stem in files)
    return tuple(sorted(end for end in ends if end in backends or ("cuda" in backends and _ARCH.fullmatch(end))))
