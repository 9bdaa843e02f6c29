"""Hooks of mkdocs: add pages from outside docs/ to the site, and print links to other files of the tree as code."""

from __future__ import annotations

import re
from pathlib import Path, PurePosixPath

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parents[1]
OUTSIDE = {"CONTRIBUTING.md": "CONTRIBUTING.md", "RESULTS.md": "benchmarks/RESULTS.md"}  # page: its file in the tree
LINK = re.compile(r"\[([^\]]+)\]\(((?:\.\./|docs/)[^)#\s]*)(#[^)\s]*)?\)")


def on_files(files: Files, config: object) -> Files:
    """Add the pages from outside docs/."""
    for page, path in OUTSIDE.items():
        files.append(File.generated(config, page, content=(ROOT / path).read_text()))
    return files


def on_page_markdown(markdown: str, page: object, **_: object) -> str:
    """Point links out of docs/ at pages of the site, and print other files' names as code."""
    depth = len(PurePosixPath(page.file.src_uri).parts) - 1  # type: ignore[attr-defined]
    up = "../" * depth
    pages = {path: up + name for name, path in OUTSIDE.items()}

    def site(link: re.Match[str]) -> str:
        text, target, anchor = link[1], link[2], link[3] or ""
        name = target.removeprefix("docs/") if target.startswith("docs/") else target.removeprefix(up + "../")
        if target.startswith("docs/"):
            return f"[{text}]({up}{name}{anchor})"
        if target.startswith(up + "../"):
            return f"[{text}]({pages[name]}{anchor})" if name in pages else f"{text} (`{name}`)"
        return link[0]

    return LINK.sub(site, markdown)
