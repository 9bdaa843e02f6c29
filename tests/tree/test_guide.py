"""docs/compile-guide.md: its code runs as it stands there, block after block."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

DOCUMENT = Path(__file__).resolve().parents[2] / "docs" / "compile-guide.md"
BLOCKS = re.compile(r"^```python\n(.*?)^```$", re.DOTALL | re.MULTILINE)

# torch's own, where Inductor is imported.
pytestmark = [
    pytest.mark.filterwarnings(r"ignore:`torch\.jit\.:DeprecationWarning"),
    pytest.mark.filterwarnings(r"ignore:`isinstance\(treespec:FutureWarning"),
]


def test_the_code_runs():
    """As one program: on the GPU where there is one."""
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
