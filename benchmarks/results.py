"""Write benchmarks/RESULTS.md from benchmarks/results/*.json.

    python benchmarks/results.py            # write the page
    python benchmarks/results.py --check    # exit with 1 if the page is not what would be written

A file has the schema of ``Report.write`` in timing.py. ``SHOWN`` selects the rows of each table; files keep
all rows. A file without a table is an error: a new result replaces the older file of its benchmark and card.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).resolve().parent
TIMES = ("s", "ms", "us")  # smaller is better; every other unit is a rate
MOST_LINES = 150

# Title of a table: files, in order, each with a pattern that selects its rows.
SHOWN: dict[str, dict[str, str]] = {
    "Prefill": {
        "h100-prefill-peers": r"S=(1k|16k)|paged",
        "h200-prefill": r"head_dim=192:128 length=16384 causal=True",
    },
    "Gradients of prefill": {"h200-attention-backward": r"length=16384 heads=16/16"},
    "Decode over paged caches": {
        "h100-decode-peers": ".",
        "h100-decode": r"^decode( without a plan batch=16 keys=65|(, batch invariant| without a plan) batch=64 keys=26).*=128 page_size=16 ",
        "h200-decode": r"^decode B64 L4096",
    },
    "Latent attention": {
        "h100-mla-peers": ".",
        "h200-mla": r"64 keys=4096 heads=128 page_size=64",
    },
    "Products and experts": {
        "h100-gemm-peers": ".",
        "h200-gemm-fp8": "bmm_fp8",
        "h200-experts": r"groups=8 rows=(1|4096) |groups=128 rows=512",
    },
    "Delta rule": {"h100-delta-rule-peers": ".", "cpu-delta-rule": r"B1 T2048 H8 d128 forward"},
    "Collectives of two GPUs": {"h100x2-allreduce": r"(sum|fused) .*tokens=(1|128|2048) hidden=8192"},
    "Sampling, vocabulary 128,256": {
        "h200-sampling": r"(sampling_from_probs|top_p 0.9|joint 50 0.9|softmax) batch=512 .*flat",
        "cpu-sampling": r"(sampling_from_probs|top_p 0.9|joint 50 0.9) .*peaked",
    },
    "Norms, activations, RoPE, append": {
        "h200-memory-bound": r"^(?!copy|gelu)[a-z_]+ rows=16384 cols=8192",
        "cpu-memory-bound": r"^rmsnorm .*bfloat16",
    },
    "Compiled decoder layers": {"h200-decoder-layer": "batch=64 keys=131072"},
    "Host time of a call": {
        "h200-host": r"^(rmsnorm out=|decode run out=)$",
        "h100-plan": r"^(decode|prefill|mla)\.plan batch=64$",
    },
    "Build": {"h200-build": "warm|AOT run with", "cpu-store": "hit"},
}
HEAD = """\
# Results

`python benchmarks/results.py` writes this page from the JSON files in [results](results). The files have all rows; a table
shows a selection. Each peer ran in turns with ours, in one process or in one call on one machine. The ratio is above 1 where
ours is faster. The floor is the time of a copy of the same bytes. bfloat16 unless a row names another type.
"""


def load(name: str) -> dict[str, Any]:
    """Return one file of results."""
    found: dict[str, Any] = json.loads((FOLDER / "results" / f"{name}.json").read_text())
    for row in found["rows"]:
        if row["unit"] == "GFLOP/s" and row["ours"] > 1e4:
            row["unit"], row["ours"] = "TFLOP/s", row["ours"] / 1e3
            row["peers"] = {peer: value / 1e3 for peer, value in row["peers"].items()}
    return found


def best_peer(row: dict[str, Any]) -> tuple[str, str]:
    """Return the best peer with its number, and the ratio of ours to it; empty without a peer."""
    if not row["peers"]:
        return "", ""
    smaller = row["unit"] in TIMES
    name, value = (min if smaller else max)(row["peers"].items(), key=lambda item: item[1])
    ratio = value / row["ours"] if smaller else row["ours"] / value
    return f"{value:.4g} ({name})", f"{ratio:.2f}"


def table(title: str, files: dict[str, str]) -> list[str]:
    """Return the lines of one table."""
    lines = [
        f"## {title}",
        "",
        "| shape | ours | best peer | ratio | of the floor | card, commit, date |",
        "| --- " * 6 + "|",
    ]
    for name, pattern in files.items():
        about = load(name)
        device = about["device"].removeprefix("NVIDIA ").removesuffix(" 80GB HBM3")
        where = f"{device}, {about['commit']}, {about['date']}"
        for row in (one for one in about["rows"] if re.search(pattern, one["shape"])):
            peer, ratio = best_peer(row)
            floor = "" if row["of_floor"] is None else f"{row['of_floor']:.2f}"
            lines.append(f"| {row['shape']} | {row['ours']:.4g} {row['unit']} | {peer} | {ratio} | {floor} | {where} |")
    return [*lines, ""]


def page() -> str:
    """Return the text of RESULTS.md."""
    shown = {name for files in SHOWN.values() for name in files}
    unused = {path.stem for path in (FOLDER / "results").iterdir()} - shown
    assert not unused, f"files without a table: {sorted(unused)}"
    lines = [HEAD]
    for title, files in SHOWN.items():
        lines += table(title, files)
    text = "\n".join(lines)
    assert len(text.splitlines()) <= MOST_LINES, f"{len(text.splitlines())} lines, wanted at most {MOST_LINES}"
    return text


def main() -> int:
    """Write the page, or compare it."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--check", action="store_true", help="compare only")
    given = parser.parse_args()
    path, text = FOLDER / "RESULTS.md", page()
    if given.check:
        return int(path.read_text() != text)
    path.write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
