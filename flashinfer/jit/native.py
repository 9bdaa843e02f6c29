"""Selection of the module that serves a family's operators on the GPUs of this machine."""

from __future__ import annotations

from .machine.arch import Arch
from .machine.target import visible_gpus
from .module import JitSpec
from .modules._family import arch_modules
from .probe import probe


def module_for_gpus(portable: JitSpec) -> JitSpec:
    """Return the module of the GPUs' arch if a family has one and a load would succeed, else ``portable``.

    All visible GPUs must run it, because an operator has one kernel for all GPUs.
    """
    gpus = visible_gpus()
    for spec in arch_modules(portable) if gpus else ():
        runs = all(any(Arch.of(arch).runs_on(gpu) for arch in spec.archs) for gpu in gpus)
        if runs and probe(spec).state != "impossible":
            return spec
    return portable
