"""Print docs/attention-modules.md: attention modules in directories of artifacts, sizes, compile times.

    python scripts/build_aot.py --families decode,prefill --out-dir DIR
    python scripts/attention_table.py DIR > docs/attention-modules.md

Numbers are those of the artifacts' manifests. Does not import torch.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

from flashinfer.jit.artifact import Artifact, read
from flashinfer.jit.modules import axes, families

PAGE = """\
# Attention modules

`python scripts/build_aot.py --families decode,prefill` builds the modules of the table below, with `--cuda-arch` for
CUDA. Each configuration has one portable module for each backend, and some have a second one for Hopper. `--dtypes`,
`--head-dims`, `--kv-dtypes` and `--variants` select other configurations.

`--attention-form dispatching` builds one dispatching module for all configurations of a family. A call first looks for
the module of its configuration, then for a dispatching module that covers it. If neither exists, the call builds the
module of its configuration. A dispatching module has one translation unit per configuration, and each unit compiles as
fast as the module of that configuration. Masks, windows, layouts, page sizes, head groups and paging are run-time
values of every module.

## Prefill on Hopper

Prefill has a second module, `..._sm90a`, for each 16-bit configuration without rotation on the fly. It uses wgmma and
TMA (`csrc/prefill_sm90a.cu`) and is built for 9.0a only. `backend="auto"` selects it on compute capability 9.0 under
two conditions. The mask is causal or absent, and the mean number of queries of a request, times `group`, is more than
64. Pages whose size is not a multiple of 16 are gathered. `backend="fa3"` requests the module, also for multi-item
scoring. If its kernels cannot serve the call, an error gives the reason. `backend="fa2"` requests the portable module.

8-bit queries need 8-bit keys and values of the same dtype and a 16-bit output. Their kernels exist for Hopper only, in
modules such as `prefill_e4m3_kv_e4m3_o_bf16_d128_sm90a`; `--kv-dtypes float8_e4m3fn` builds them. Scales are numbers,
or tensors with one element or one per head. They are arguments of `single_prefill_with_kv_cache`. A wrapper's `run()`
takes them after keys and values. `P` is rounded to e4m3 before the product with values, so outputs err by 2 to 3 % of
their norm.

## Decode on Hopper

Decode has a second module too (`csrc/decode_sm90a.cu`). Only `backend="fa3"` of `BatchDecodeWithPagedKVCacheWrapper`
selects it, because it is not always faster. It is the portable kernel with finer splits, and merges the splits in the
same launch. It serves everything but RoPE on the fly and custom variants.

## Modules

Seconds are the sum of the wall times of a module's compilers and its link. Every core ran one compiler during the
measurement.

"""


def attention_families() -> tuple[str, ...]:
    """Return the families whose modules are specialised on head sizes."""
    return tuple(name for name in families() if "head_dims" in {axis.name for axis in axes([name])})


def rows(directories: Iterable[Path]) -> Iterator[tuple[str, str, str, str]]:
    """Yield module, target, KiB and seconds of every artifact of an attention family, by name."""
    places = sorted((path for directory in directories for path in directory.iterdir()), key=lambda path: path.name)
    for place in places:
        found = read(place, place.name)
        # prefill_backward begins like prefill, but has one module for all sizes.
        longest = max(filter(place.name.startswith, ("", *families())), key=len)
        if isinstance(found, Artifact) and longest in attention_families():
            size, seconds = found.manifest["size"] / 1024, found.manifest["seconds"]
            yield f"`{found.name}`", " ".join(found.archs), f"{size:.0f}", f"{seconds:.1f}"


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directories", nargs="+", type=Path, metavar="DIR", help="directories of artifacts")
    options = parser.parse_args(arguments)
    missing = [str(path) for path in options.directories if not path.is_dir()]
    if missing:
        parser.error(f"got {', '.join(missing)}, wanted directories")
    table = [("module", "target", "KiB", "seconds"), ("---", "---", "---:", "---:"), *rows(options.directories)]
    sys.stdout.write(PAGE + "".join(f"| {' | '.join(row)} |\n" for row in table))
    return 0


if __name__ == "__main__":
    sys.exit(main())
