"""``Arch``: a GPU architecture as a value, and the GPUs that run its code."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

Capability = tuple[int, int]

# "9.0a+PTX" of lists and manifests, or "sm90a" of file names.
_NAME = re.compile(r"(?:sm(\d+)|(\d+)\.)(\d)([af]?)(\+PTX)?")


@dataclass(frozen=True, order=True)
class Arch:
    """A GPU architecture that code is compiled for.

    ``suffix`` is ``"a"`` for code of one compute capability, ``"f"`` for code of a family (same major version,
    this minor version or a later one), or empty. ``ptx``: the binary also has PTX, which the driver compiles.
    """

    major: int
    minor: int
    suffix: str = ""
    ptx: bool = False

    @classmethod
    def of(cls, name: str) -> Arch:
        """Return the arch that a list (``9.0a``, ``8.0+PTX``) or a file (``sm90a``) names.

        Raises:
            ValueError: the name has another form.
        """
        found = _NAME.fullmatch(name)
        if found is None:
            raise ValueError(f"arch: got {name!r}, wanted a name such as 9.0a, 10.0f, 8.0+PTX or sm90a")
        return cls(int(found[1] or found[2]), int(found[3]), found[4], found[5] is not None)

    @classmethod
    def native(cls, gpu: Capability) -> Arch:
        """Return the arch to compile for a GPU: with ``a`` from 9.0 on, because only such code has wgmma."""
        return cls(*gpu, "a" if gpu[0] >= 9 else "")

    def __str__(self) -> str:
        return f"{self.major}.{self.minor}{self.suffix}{'+PTX' if self.ptx else ''}"

    @property
    def tag(self) -> str:
        """Return the name of kernels for this arch only, in names of files and modules: ``sm90a``."""
        return f"sm{self.major}{self.minor}{self.suffix}"

    @property
    def capability(self) -> Capability:
        """Return the compute capability of the oldest GPU that runs the code."""
        return self.major, self.minor

    def runs_on(self, gpu: Capability) -> bool:
        """Return whether code for this arch runs on a GPU of that compute capability."""
        if self.suffix == "a":  # only this GPU, also by its PTX
            return self.capability == gpu
        is_portable = self.ptx and not self.suffix  # PTX of a family stays in the family
        return self.capability <= gpu and (is_portable or self.major == gpu[0])

    def compiled_for(self, target: Arch) -> Arch | None:
        """Return the arch to compile kernels of this arch for, so that ``target`` has them, or ``None``.

        Equal archs take the target's PTX. Kernels of a family serve a target with ``a`` or ``f`` in it.
        """
        if replace(target, ptx=False) == self:
            return target
        return self if self.suffix == "f" and target.suffix and self.runs_on(target.capability) else None
