"""README: its example runs, it fits on a page, and the files that it names exist."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text()
EXAMPLES = re.findall(r"```python\n(.*?)```", README, re.DOTALL)


def test_the_examples_run():
    assert EXAMPLES
    for example in EXAMPLES:
        exec(compile(example, "README.md", "exec"), {})


def test_its_length_is_a_page():
    assert len(README.splitlines()) <= 150


def test_every_named_path_exists():
    for document in ("README.md", "CONTRIBUTING.md"):
        text = (ROOT / document).read_text()
        for path in re.findall(r"`((?:flashinfer|csrc|include|scripts|tests|benchmarks|\.ci)/[\w./-]*)`", text):
            if "scale" not in path:  # CONTRIBUTING's example family
                assert (ROOT / path).exists(), f"{document} names {path}"
