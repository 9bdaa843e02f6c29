"""FlashInfer's module of this name: the generator of specs, the logger and a check of the GPUs."""

from __future__ import annotations

import logging

from ..errors import UnsupportedError
from .machine.target import visible_gpus
from .module import JitSpec, gen_jit_spec
from .resolve import build_jit_specs

__all__ = ["JitSpec", "build_jit_specs", "check_cuda_arch", "gen_jit_spec", "logger"]

logger = logging.getLogger("flashinfer")
OLDEST = (8, 0)


def check_cuda_arch() -> None:
    """Check that every GPU of this machine can run the CUDA modules.

    Raises:
        UnsupportedError: a GPU is older than compute capability 8.0.
    """
    for major, minor in visible_gpus():
        if (major, minor) < OLDEST:
            raise UnsupportedError(
                f"check_cuda_arch: got a GPU of compute capability {major}.{minor}, wanted 8.0 or newer"
            )
