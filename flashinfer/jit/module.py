"""``JitSpec``: a spec with methods that find, build and load its module. ``gen_jit_spec`` makes one.

Each method imports its dependencies when it is called, because most programs find their modules and build
none.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .. import env
from . import process
from .spec import Scalar, Spec, Value, checked_coverage

if TYPE_CHECKING:
    from .artifact import Artifact
    from .probe import Probe

_BASE_CFLAGS = ("-std=c++17", "-fPIC", "-fvisibility=hidden", "-Wall", "-Wextra", "-Werror=return-type")


@dataclass(frozen=True)
class JitSpec(Spec):
    """A complete description of a module. :func:`gen_jit_spec` or a family's ``gen_*_module`` makes one."""

    def probe(self, needs: Mapping[str, Iterable[Value]] | None = None) -> Probe:
        """Return whether a load would find this module, could build it, or cannot succeed.

        Nothing is changed or started.
        """
        from .probe import probe

        return probe(self, needs)

    def build(self, verbose: bool = False) -> Artifact:
        """Return the artifact of this module. Build it if it does not exist."""
        with process.without_forks():
            from .resolve import build_jit_specs

        return build_jit_specs([self], verbose=verbose)[0]

    def build_and_load(self) -> Any:
        """Load the module, build it first if it does not exist, and return its ``torch.ops`` namespace."""
        with process.without_forks():
            from .load import load

        return load(self)


def _without_include_paths(words: Iterable[str]) -> tuple[list[str], list[str]]:
    """Separate flags and include directories: the key covers the contents of headers, not their paths."""
    flags, paths = list[str](), list[str]()
    words = iter(words)
    for word in words:
        if word.startswith(("-include", "-imacros", "@")):
            raise ValueError(f"flags: got {word!r}, whose file no key would cover; wanted an #include in the source")
        if word in ("-I", "-iquote"):
            paths.append(next(words, ""))
        elif word.startswith("-I"):
            paths.append(word[2:])
        else:
            flags.append(word)
    return flags, paths


def gen_jit_spec(
    name: str,
    sources: Sequence[str | Path],
    extra_cflags: Sequence[str] | None = None,
    extra_cuda_cflags: Sequence[str] | None = None,
    extra_ldflags: Sequence[str] | None = None,
    extra_include_paths: Sequence[str | Path] | None = None,
    *,
    backend: str | None = None,
    config: Mapping[str, Scalar] | None = None,
    coverage: Mapping[str, Iterable[Value]] | None = None,
    template: str = "",
    config_header: str = "",
    namespace: str | None = None,
) -> JitSpec:
    """Describe a module of native code.

    Args:
        name: name of the module, its directory and its ``.so``.
        sources: C++ (``.cc``, ``.cpp``) and CUDA (``.cu``) files, absolute or relative to the directory that
            holds ``csrc``.
        extra_cflags, extra_cuda_cflags, extra_ldflags: flags after the project's and the environment's.
            ``-I`` means the same as ``extra_include_paths``. Headers below ``-isystem`` count as system
            headers.
        extra_include_paths: directories searched before the project's.
        backend: ``"cpu"`` or ``"cuda"``, by default ``"cuda"`` if a source ends in ``.cu``.
        config, coverage, template, config_header: see :class:`JitSpec`.
        namespace: namespace of ``torch.ops``, by default the name.

    Raises:
        ValueError: an invalid name, backend, flag, path or set of values.
    """
    debug = env.JIT_DEBUG.get()
    optimise = ("-O0", "-g", "-DFLASHINFER_DEBUG=1") if debug else ("-O3",)
    if backend is None:
        backend = "cuda" if any(str(source).endswith(".cu") for source in sources) else "cpu"
    cflags, paths = _without_include_paths([*(extra_cflags or ()), *env.EXTRA_CFLAGS.get()])
    cuda_cflags, cuda_paths = _without_include_paths([*(extra_cuda_cflags or ()), *env.EXTRA_CUDAFLAGS.get()])
    paths = [*map(str, extra_include_paths or ()), *paths, *(cuda_paths if backend == "cuda" else ())]
    # nvcc knows -std itself, and passes the other flags to the host's compiler. -G is its -g for the device.
    builtin_cuda = ("-std=c++17", *optimise, *(["-G"] if debug else []), f"-Xcompiler={','.join(_BASE_CFLAGS[1:])}")
    return JitSpec(
        name=name,
        backend=backend,
        sources=tuple(str(source) for source in sources),
        namespace=name if namespace is None else namespace,
        config=tuple(sorted((config or {}).items())),
        coverage=checked_coverage(coverage or {}),
        template=template,
        config_header=config_header,
        cflags=(*_BASE_CFLAGS, *optimise, *cflags),
        cuda_cflags=() if backend == "cpu" else (*builtin_cuda, *cuda_cflags),
        ldflags=(*(extra_ldflags or ()), *env.EXTRA_LDFLAGS.get()),
        include_paths=tuple(dict.fromkeys(str(Path(path).resolve()) for path in paths)),
    )
