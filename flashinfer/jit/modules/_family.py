"""Specs of the project's modules. Kernels are found by file name in ``csrc``.

``csrc/<family>_<kernels>.*`` contains the kernels of a module: portable kernels (``cpu``, ``cuda``), or kernels for one
GPU arch (``sm90a``, ``sm100a``). There is no list of files, so kernels for another arch need only a new file.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import PurePath

from ... import env
from ..machine.arch import Arch
from ..module import JitSpec, gen_jit_spec
from ..spec import BACKENDS, Scalar, Value


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
        family: name of the family.
        kernels: ``"cpu"``, ``"cuda"``, or an arch such as ``"sm90a"``: CUDA kernels for one arch only.
        variant: a further part of the module's name.
        config, coverage: see :class:`Spec`.

    Raises:
        ValueError: the family has no such kernels.
    """
    names = (f"csrc/{family}_{kernels}.{suffix}" for suffix in ("cc", "cu"))
    source = next((name for name in names if os.path.isfile(f"{env.data_root()}/{name}")), None)
    if source is None:
        raise ValueError(f"backend: got {kernels!r}, wanted one of {', '.join(kernels_of(family))}")
    archs, binding = _archs(kernels), f"csrc/{family}.cc"
    spec = gen_jit_spec(
        "_".join(part for part in (family, variant, kernels) if part),
        [binding, source],
        backend="cuda" if archs else kernels,
        config=config,
        coverage=coverage,
        template="csrc/config.h.jinja",
        config_header=f"{family}_config.h",
        namespace="flashinfer",
    )
    spec = replace(spec, archs=archs)
    # A binding converts arguments once per call: -O1 runs as fast as -O3 and compiles in half the time.
    return spec if env.JIT_DEBUG.get() else replace(spec, source_cflags=((binding, "-O1"),))


def kernels_of(family: str, backends: Iterable[str] = BACKENDS) -> tuple[str, ...]:
    """Return the kernels of a family for some backends, by file name: ``cpu``, ``cuda``, ``sm90a``."""
    files = (PurePath(name).stem for name in os.listdir(f"{env.data_root()}/csrc") if name.startswith(f"{family}_"))
    ends = (stem.removeprefix(f"{family}_") for stem in files)
    return tuple(sorted(end for end in ends if end in backends or ("cuda" in backends and _archs(end))))


def arch_kernels(family: str) -> tuple[str, ...]:
    """Return the archs for which a family has kernels, such as ``sm90a``."""
    return tuple(kernels for kernels in kernels_of(family, ("cuda",)) if kernels != "cuda")


def parts_of(family: str) -> tuple[str, ...]:
    """Return the CUDA sources in a family's folder, sorted. They compile in parallel."""
    folder = f"csrc/{family}"
    names = sorted(name for name in os.listdir(f"{env.data_root()}/{folder}") if name.endswith(".cu"))
    return tuple(f"{folder}/{name}" for name in names)


def arch_modules(portable: JitSpec) -> tuple[JitSpec, ...]:
    """Return the modules for single archs that can replace a family's portable module.

    They have its binding, operators and configuration, and the kernels of ``csrc/<family>_<arch>.cu``. Families with
    another operator namespace have none: they select kernels themselves.
    """
    if portable.backend != "cuda" or portable.archs or portable.namespace != "flashinfer":
        return ()
    binding = PurePath(portable.sources[0])
    return tuple(
        replace(
            portable,
            name=f"{portable.name.removesuffix('cuda')}{kernels}",
            sources=(str(binding), f"{binding.with_suffix('')}_{kernels}.cu"),
            archs=_archs(kernels),
        )
        for kernels in arch_kernels(binding.stem)
    )


def _archs(kernels: str) -> tuple[str, ...]:
    """Return the arch of a name such as ``sm90a``, or an empty tuple for any other name."""
    try:
        arch = Arch.of(kernels)
    except ValueError:
        return ()
    return (str(arch),) if arch.tag == kernels else ()
