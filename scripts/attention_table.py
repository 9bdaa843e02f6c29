"""Prints docs/attention-modules.md: the attention modules in directories of artifacts, their sizes and compile times.

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

What `python scripts/build_aot.py --families decode,prefill` builds, with `--cuda-arch` for CUDA: one module for each
configuration. `--dtypes`, `--head-dims`, `--kv-dtypes` and `--variants` choose others, `--attention-form dispatching`
makes one module for each family of them all; a call takes the module of exactly its configuration, else a dispatching
one that was built for it, else it builds the exact one. A dispatching module has one translation unit for each
combination of its values, none of which takes longer than a specialised module's. Masks, windows, layouts, page sizes,
groups of heads and whether keys are paged are run-time values of every module.

Prefill has a second module for each configuration of one 16-bit dtype without rotation: `..._sm90a`, for Hopper's wgmma
and TMA (`csrc/prefill_sm90a.cu`), built for 9.0a alone. `backend="auto"` takes it on a GPU of compute capability 9.0
where a request has more than 64 rows of queries and group and masks are causal or none; keys of pages that have no
multiple of 16 are gathered. `backend="fa3"` asks for it, also for multi-item scoring, and is an error with the reason
where it cannot serve; `backend="fa2"` is the portable one.

Queries of 8 bits, with keys and values of the same dtype and an output of 16 bits, have kernels for Hopper alone:
`prefill_e4m3_kv_e4m3_o_bf16_d128_sm90a` and its like, which `--kv-dtypes float8_e4m3fn` builds. Scales are numbers, or
tensors of one element or of one for each head: arguments of `single_prefill_with_kv_cache`, and behind the keys and
values of a wrapper's `run()`. Weights become e4m3 on their way to the values: outputs err by 2 to 3 % of their norm.

Decode has one, too (`csrc/decode_sm90a.cu`): `backend="fa3"` of `BatchDecodeWithPagedKVCacheWrapper` asks for it, and
builds it where it is not; nothing takes it by itself, as it is not always faster. It is the portable one, cuts keys more
finely and merges their parts itself, and serves all but RoPE on the fly and variants of your own.

Seconds are of all the compilers that a module takes, added up, while as many run as the machine has cores.

"""


def attention_families() -> tuple[str, ...]:
    """The families whose modules are specialised on sizes of heads."""
    return tuple(name for name in families() if "head_dims" in {axis.name for axis in axes([name])})


def rows(directories: Iterable[Path]) -> Iterator[tuple[str, str, str, str]]:
    """Module, target, KiB and seconds of every artifact of an attention family, by name."""
    places = sorted((path for directory in directories for path in directory.iterdir()), key=lambda path: path.name)
    for place in places:
        found = read(place, place.name)
        # prefill_backward has one module for all sizes, and prefill's name at its beginning.
        longest = max(filter(place.name.startswith, ("", *families())), key=len)
        if isinstance(found, Artifact) and longest in attention_families():
            size, seconds = found.manifest["size"] / 1024, found.manifest["seconds"]
            yield f"`{found.name}`", " ".join(found.archs), f"{size:.0f}", f"{seconds:.1f}"


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directories", nargs="+", type=Path, metavar="DIR", help="where artifacts are")
    options = parser.parse_args(arguments)
    missing = [str(path) for path in options.directories if not path.is_dir()]
    if missing:
        parser.error(f"got {', '.join(missing)}, wanted directories")
    table = [("module", "target", "KiB", "seconds"), ("---", "---", "---:", "---:"), *rows(options.directories)]
    sys.stdout.write(PAGE + "".join(f"| {' | '.join(row)} |\n" for row in table))
    return 0


if __name__ == "__main__":
    sys.exit(main())
