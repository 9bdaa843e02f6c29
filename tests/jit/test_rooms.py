"""The rooms of the build system, and how many lines each may have: those that hold something, docstrings among them."""

from __future__ import annotations

from pathlib import Path

import pytest

JIT = Path(__file__).resolve().parents[2] / "flashinfer" / "jit"
# A room -> its files or folders, the lines that it is to have, and those that it has no right to pass until then.
ROOMS = {
    "core": ("module spec closure template ninja store artifact publish build run load", 1300, 1300),
    "machine": ("machine/", 450, 450),
    "host and worker": ("host/ worker/", 600, 600),
    "rest": ("__init__ events capture frozen probe", 250, 250),
    # FLEET's own budget; imported by whoever asks for it.
    "fleet": ("cluster/", 300, 589),
    # What nothing above needs: it is imported when somebody traces, reads a file of specs or is short of space.
    "on request": ("trace specfile specjson gc", 390, 390),
    # What serves fleets alone.
    "stores": ("store_remote/ group background", 600, 876),
}
# Names of FlashInfer's that lead to ours, and the families' own files: they grow with what there is to build.
UNCOUNTED = "attention/ core modules/"


def files(names: str) -> set[Path]:
    found = set[Path]()
    for name in names.split():
        found |= {*(JIT / name).rglob("*.py")} if name.endswith("/") else {JIT / f"{name}.py"}
    return found


def lines(paths: set[Path]) -> int:
    return sum(bool(line.strip()) for path in paths for line in path.read_text().splitlines())


def test_every_file_is_in_one_room():
    rooms = [files(names) for names, *_ in ROOMS.values()] + [files(UNCOUNTED)]
    assert set().union(*rooms) == {*JIT.rglob("*.py")} and sum(map(len, rooms)) == len(set().union(*rooms))


@pytest.mark.parametrize("room", ROOMS)
def test_a_room_keeps_its_budget(room):
    names, goal, most = ROOMS[room]
    count = lines(files(names))
    assert count <= most, f"{room} has {count} lines, more than {most}; it is to have {goal}"
