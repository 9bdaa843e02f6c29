"""Families of modules. Each file has ``gen_*_module``, ``aot_specs`` (its part of the AOT matrix) and ``AXES``.

Families are found by file name, so no list needs an entry. Files whose names start with ``_`` are shared by families.
"""

from __future__ import annotations

import importlib
import pkgutil
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from types import ModuleType

from ..machine.target import visible_gpus
from ..module import JitSpec
from ..spec import BACKENDS, DTYPES
from ._family import arch_modules

Values = tuple[str, ...]


@dataclass(frozen=True)
class Axis:
    """A property of modules, such as the dtype, and the values to build ahead of time.

    Each axis is an option of the AOT command. ``parse`` converts the text of the option to values, or raises
    ``ValueError``. Families with the same axis use the same object.
    """

    name: str
    default: Values
    parse: Callable[[str], Values]
    help: str

    @property
    def option(self) -> str:
        return f"--{self.name.replace('_', '-')}"


def words(text: str) -> Values:
    """Return the words of an option, separated by commas or spaces, without repeats."""
    return tuple(dict.fromkeys(text.replace(",", " ").split()))


def some_of(*allowed: str) -> Callable[[str], Values]:
    """Return a parser that accepts one or more words of a set."""

    def parse(text: str) -> Values:
        values = words(text)
        unknown = [value for value in values if value not in allowed]
        if unknown or not values:
            raise ValueError(f"got {', '.join(unknown) or 'nothing'}, wanted some of {', '.join(allowed)}")
        return values

    return parse


def one_of(*allowed: str) -> Callable[[str], Values]:
    """Return a parser that accepts one word of a set."""

    def parse(text: str) -> Values:
        if text not in allowed:
            raise ValueError(f"got {text!r}, wanted one of {', '.join(allowed)}")
        return (text,)

    return parse


def subset(argument: str, values: Iterable[str], allowed: Iterable[str]) -> Values:
    """Return ``values`` as a tuple.

    Raises:
        ValueError: a value is not in ``allowed``.
    """
    values, known = tuple(values), tuple(allowed)
    if unknown := [value for value in values if value not in known]:
        raise ValueError(f"{argument}: got {', '.join(map(str, unknown))}, wanted a subset of {', '.join(known)}")
    return values


def device_of(device: object = None) -> str:
    """Return ``"cpu"`` or ``"cuda"`` for a device or its name. The default is ``"cuda"`` if a GPU is visible.

    Raises:
        ValueError: no backend exists for the device.
    """
    if device is None:
        torch = sys.modules.get("torch")
        return "cuda" if visible_gpus() and (torch is None or torch.version.cuda is not None) else "cpu"
    name = str(device).partition(":")[0]
    if name not in BACKENDS:
        raise ValueError(f"device: got {name!r}, wanted one of {', '.join(BACKENDS)}")
    return name


DTYPE_AXIS = Axis("dtypes", DTYPES, some_of(*DTYPES), "element types")
PROFILER_AXIS = Axis(
    "profiler", ("off",), some_of("off", "on"), "modules whose kernels write events, for flashinfer.profiler: off,on"
)


@cache
def families() -> tuple[str, ...]:
    """Return the names of all families, sorted."""
    return tuple(sorted(module.name for module in pkgutil.iter_modules(__path__) if not module.name.startswith("_")))


def family(name: str) -> ModuleType:
    """Return the module that describes a family.

    Raises:
        ValueError: there is no such family.
    """
    if name not in families():
        raise ValueError(f"family: got {name!r}, wanted one of {', '.join(families())}")
    return importlib.import_module(f"{__name__}.{name}")


def axes(names: Iterable[str] = ()) -> tuple[Axis, ...]:
    """Return the axes of the named families (by default of all), sorted by name, without repeats.

    Raises:
        ValueError: two families define different axes of one name.
    """
    found: dict[str, Axis] = {}
    for name in names or families():
        for axis in getattr(family(name), "AXES", ()):
            if found.setdefault(axis.name, axis) != axis:
                raise ValueError(f"axis {axis.name!r} of family {name!r}: got a second axis of that name, wanted one")
    return tuple(found[name] for name in sorted(found))


class Matrix(Mapping[str, Values]):
    """The AOT matrix: ``backends``, and the values of each axis. Every other axis has its default.

    Raises:
        TypeError: no family has an axis of that name.
    """

    def __init__(self, **values: Values) -> None:
        known = {"backends": BACKENDS} | {axis.name: axis.default for axis in axes()}
        if unknown := values.keys() - known.keys():
            raise TypeError(f"Matrix: got {', '.join(sorted(unknown))}, wanted some of {', '.join(known)}")
        self._values = known | values

    def __getitem__(self, name: str) -> Values:
        return self._values[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)


def matrix_specs(matrix: Matrix, names: Iterable[str] = ()) -> list[JitSpec]:
    """Return the specs of the named families (by default of all) for a matrix, sorted by name.

    They include the modules of kernels for one arch, see :func:`._family.arch_modules`.
    """
    listed = {spec.name: spec for name in names or families() for spec in family(name).aot_specs(matrix)}
    derived = {spec.name: spec for portable in listed.values() for spec in arch_modules(portable)}
    found = derived | listed  # a spec that a family lists has priority over a derived one
    return [found[name] for name in sorted(found)]
