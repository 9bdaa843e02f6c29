"""Sentences of Markdown pages, without code, tables and headings."""

from __future__ import annotations

import re

FENCE = re.compile(r"^ *```.*?^ *```", re.MULTILINE | re.DOTALL)
COMMENT = re.compile(r"<!--.*?-->", re.DOTALL)
LINK = re.compile(r"!?\[([^\]]*)\]\([^)]*\)")
ITEM = re.compile(r"^ *(?:[-*]|\d+\.) ")
# A full stop ends a sentence before a capital letter, a digit or code. "e.g." and numbers do not.
END = re.compile(r"(?<=[.!?:])\s+(?=[A-Z`*\"(\[0-9])")


def paragraphs(text: str) -> list[str]:
    """Return the paragraphs and list items of a page, each on one line."""
    text = COMMENT.sub("", FENCE.sub("\n\n", text))
    found: list[str] = []
    fresh = True
    for line in text.splitlines():
        stripped = line.strip()
        if not stripped or stripped.startswith(("|", "#", ":::")):
            fresh = True
        elif fresh or ITEM.match(line):
            found.append(ITEM.sub("", line).strip())
            fresh = False
        else:
            found[-1] += " " + stripped
    return found


def sentences(text: str) -> list[str]:
    """Return the sentences of a page. Code and links count as one word."""
    found: list[str] = []
    for paragraph in paragraphs(text):
        plain = re.sub(r"`[^`]*`", "X", LINK.sub(r"\1", paragraph))
        found += [one.strip() for one in END.split(plain) if one.strip()]
    return found


def words(sentence: str) -> int:
    """Count the words of a sentence."""
    return len(re.findall(r"[\w'/-]+", sentence))
