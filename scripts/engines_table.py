"""Write the tables of docs/engines.md from the facts of tests/integrations/contract.

python scripts/engines_table.py            # write the tables
python scripts/engines_table.py --check    # exit with 1 if they differ from the facts
"""

from __future__ import annotations

import argparse
import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from tests.integrations.contract.facts import NAMES, QUESTIONS  # noqa: E402

PAGE = ROOT / "docs" / "engines.md"
BEGIN, END = "<!-- begin: {} -->\n", "<!-- end: {} -->\n"
SAY = {"serves": "served", "raises": "refused", "absent": "elsewhere"}


def capabilities() -> str:
    """Return a row for each capability and state: names, engines, use, and the reason if it is not served."""
    rows: dict[tuple[str, str, str, str], tuple[list[str], list[str]]] = {}
    for fact in NAMES.values():
        names, engines = rows.setdefault((fact.capability, fact.use, fact.state, fact.reason), ([], []))
        names.append(f"`{fact.name}`")
        engines += [engine for engine in fact.engines.split(", ") if engine not in engines]
    lines = ["| capability | engine | use | here | names, reason |\n", "| --- | --- | --- | --- | --- |\n"]
    for (capability, use, state, reason), (names, engines) in sorted(rows.items()):
        text = ", ".join(names) + (f": {reason}" if reason else "")
        lines.append(f"| {capability} | {', '.join(sorted(engines))} | {use} | {SAY[state]} | {text} |\n")
    return "".join(lines)


def questions() -> str:
    """Return a row for each question."""
    lines = [
        "| engine | question | use | answer | names, all of which must exist |\n",
        "| --- | --- | --- | --- | --- |\n",
    ]
    for question in QUESTIONS:
        asked = ", ".join(
            re.sub(r"`(.*)\(\*(.*)\)`", r"`\1` with a keyword-only `\2`", f"`{one}`") for one in question.asked
        )
        lines.append(f"| {question.engine} | {question.capability} | {question.use} | {question.answer} | {asked} |\n")
    return "".join(lines)


TABLES = {"capabilities": capabilities, "questions": questions}


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing")
    options = parser.parse_args(arguments)
    page = new = PAGE.read_text()
    for name, table in TABLES.items():
        before, begin, rest = new.partition(BEGIN.format(name))
        _, end, after = rest.partition(END.format(name))
        if not begin or not end:
            raise ValueError(f"{PAGE.name}: got no marks of {name!r}, wanted {BEGIN.format(name)!r} and its end")
        new = before + begin + table() + end + after
    if options.check:
        return int(new != page)
    PAGE.write_text(new)
    return 0


if __name__ == "__main__":
    sys.exit(main())
