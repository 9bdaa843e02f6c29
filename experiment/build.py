"""Builds latent attention's modules: build.py NAME KERNELS[+profiler]..."""

import sys
import time

from flashinfer.jit.build import build_jit_specs
from flashinfer.jit.modules.mla import mla_spec

start = time.monotonic()
wanted = [one.partition("+") for one in sys.argv[2:]]
build_jit_specs([mla_spec(kernels, profiler=bool(profiler)) for kernels, _, profiler in wanted])
print(f"{sys.argv[1]}: built in {time.monotonic() - start:.1f} s", flush=True)
