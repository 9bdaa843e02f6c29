"""docs/compile-guide.md: its code runs as written, block after block."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

DOCUMENT = Path(__file__).resolve().parents[2] / "docs" / "compile-guide.md"
BLOCKS = re.compile(r"^```python\n(.*?)^```$", re.DOTALL | re.MULTILINE)

# Warnings of torch itself when it imports Inductor.
pytestmark = [
    pytest.mark.filterwarnings(r"ignore:`torch\.jit\.:DeprecationWarning"),
    pytest.mark.filterwarnings(r"ignore:`isinstance\(treespec:FutureWarning"),
]


@pytest.mark.slow
def test_the_code_runs():
    """The blocks are one program, on the GPU if there is one."""
    torch._dynamo.reset()
    text = DOCUMENT.read_text()
    names: dict[str, object] = {"__name__": "guide"}
    blocks = list(BLOCKS.finditer(text))
    assert len(blocks) == text.count("```python") >= 8
    for block in blocks:
        # Errors name the document's lines.
        code = "\n" * text[: block.start(1)].count("\n") + block.group(1)
        exec(compile(code, str(DOCUMENT), "exec"), names)
    assert {"layer", "attend", "loop", "as_heads", "ragged", "graphed", "decode_step"} <= names.keys()
