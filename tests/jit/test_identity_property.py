"""Keys: every edit in a module's closure changes the key, no other edit does, and no two specs share one."""

from __future__ import annotations

import os
import tempfile
from dataclasses import fields
from pathlib import Path

from hypothesis import given, settings
from hypothesis import strategies as st

from flashinfer.jit import gen_jit_spec
from flashinfer.jit.module import JitSpec

PLACES = ("src/{}.h", "src/deep/{}.h", "include/{}.h", "include/flashinfer/{}.h")
CONDITIONS = ("", "#ifdef NEVER_DEFINED\n", "#if 0\n")
edits = settings(max_examples=60)


class Tree:
    """Random headers in random folders with random includes, and those that a source reaches."""

    def __init__(self, root: Path, draw) -> None:
        self.root, self.by_flag = root, draw(st.booleans())
        count = draw(st.integers(1, 7))
        self.paths = [root / draw(st.sampled_from(PLACES)).format(f"h{number}") for number in range(count)]
        reaches = {number: draw(st.sets(st.integers(0, count - 1), max_size=3)) for number in range(-1, count)}
        for number, path in enumerate([*self.paths, root / "src" / "unit.cc"]):
            number = -1 if number == count else number
            path.parent.mkdir(parents=True, exist_ok=True)
            lines = [self._include(path, self.paths[other], draw) for other in sorted(reaches[number])]
            path.write_text("".join(lines) + f"// {number}\n")
        seen, todo = set[int](), list(reaches[-1])
        while todo:
            number = todo.pop()
            if number not in seen:
                seen.add(number)
                todo += reaches[number]
        self.inside = [root / "src" / "unit.cc", *(self.paths[number] for number in sorted(seen))]
        self.outside = [path for number, path in enumerate(self.paths) if number not in seen]
        self.outside.append(root / "include" / "nobody.h")
        self.outside[-1].parent.mkdir(exist_ok=True)
        self.outside[-1].write_text("// nobody includes this\n")

    def _include(self, path: Path, other: Path, draw) -> str:
        include = self.root / "include"
        spelled = [f'"{os.path.relpath(other, path.parent)}"']
        if other.is_relative_to(include):
            spelled += [f"<{other.relative_to(include)}>", f'"{other.relative_to(include)}"']
        condition = draw(st.sampled_from(CONDITIONS))
        space = draw(st.sampled_from(["", " ", "\t", " \\\n "]))
        line = f"#{space if chr(10) not in space else ''}include{space}{draw(st.sampled_from(spelled))}\n"
        return f"{condition}{line}#endif\n" if condition else line

    @property
    def spec(self) -> JitSpec:
        include = self.root / "include"
        named = {"extra_cflags": [f"-I{include}"]} if self.by_flag else {"extra_include_paths": [include]}
        return gen_jit_spec("random", [self.root / "src" / "unit.cc"], **named)


def edit(path: Path, draw) -> None:
    """Change bytes of a file. Its length sometimes stays, and it gets a new time."""
    data, status = path.read_bytes(), path.stat()
    place = draw(st.integers(0, len(data)))
    kind = draw(st.sampled_from(["insert", "remove", "replace"]))
    if kind == "insert" or place == len(data):
        data = data[:place] + draw(st.binary(min_size=1, max_size=9)) + data[place:]
    elif kind == "remove":
        data = data[:place] + data[place + 1 :]
    else:
        data = data[:place] + bytes([data[place] ^ draw(st.integers(1, 255))]) + data[place + 1 :]
    path.write_bytes(data)
    when = draw(st.sampled_from([None, 0, status.st_mtime_ns, status.st_mtime_ns + 120 * 10**9]))
    if when is not None:
        os.utime(path, ns=(when, when))


@edits
@given(st.data())
def test_an_edit_inside_changes_the_key(data):
    with tempfile.TemporaryDirectory() as folder:
        tree = Tree(Path(folder).resolve(), data.draw)
        before = tree.spec.key
        assert tree.spec.key == before
        path = data.draw(st.sampled_from(tree.inside))
        edit(path, data.draw)
        assert tree.spec.key != before, path


@edits
@given(st.data())
def test_an_edit_outside_does_not(data):
    with tempfile.TemporaryDirectory() as folder:
        tree = Tree(Path(folder).resolve(), data.draw)
        before = tree.spec.key
        edit(data.draw(st.sampled_from(tree.outside)), data.draw)
        for path in tree.inside:
            os.utime(path, (data.draw(st.integers(0, 2**32)),) * 2)
        assert tree.spec.key == before


@edits
@given(st.data())
def test_many_edits_of_one_file_within_a_tick_are_all_seen(data):
    """A file written a moment ago is not cached, because the clock may not have moved since."""
    with tempfile.TemporaryDirectory() as folder:
        tree = Tree(Path(folder).resolve(), data.draw)
        path, keys = data.draw(st.sampled_from(tree.inside)), set()
        text = path.read_text()
        for number in range(16):
            path.write_text(f"{text}// {number:02}\n")
            keys.add(tree.spec.key)
        assert len(keys) == 16


words = st.text("ab-=, \\$\"'", max_size=4)
word_tuples = st.lists(words, max_size=3).map(tuple)
pairs = st.lists(st.tuples(words, words), max_size=2).map(tuple)
axes = st.dictionaries(words, st.lists(words, min_size=1, max_size=3).map(tuple), max_size=2)
# All fields except those that are read from files or stand for a path.
specs = st.builds(
    JitSpec,
    name=st.text("ab_.", min_size=1, max_size=4).filter(lambda text: text[0] != "."),
    backend=st.sampled_from(["cpu", "cuda"]),
    sources=st.just(("csrc/quantization_cpu.cc",)),
    namespace=words,
    config=st.dictionaries(words, words | st.integers(0, 2) | st.booleans(), max_size=2).map(
        lambda d: tuple(d.items())
    ),
    coverage=axes.map(lambda d: tuple(d.items())),
    config_header=words,
    cflags=word_tuples,
    cuda_cflags=word_tuples,
    ldflags=word_tuples,
    source_cflags=pairs,
    split=st.booleans(),
)


def same(first: object, second: object) -> bool:
    """Return whether two values are equal.

    True differs from 1, and the order of axes, which no template sees, does not count.
    """
    if type(first) is not type(second):
        return False
    if isinstance(first, tuple):
        return len(first) == len(second) and all(map(same, first, second))  # type: ignore[arg-type]
    return first == second


@settings(max_examples=300)
@given(specs, specs)
def test_two_specs_never_encode_alike(first, second):
    mine, other = ({one.name: getattr(spec, one.name) for one in fields(JitSpec)} for spec in (first, second))
    for values in (mine, other):
        values["coverage"] = tuple(sorted(values["coverage"]))
    assert (first.key == second.key) == all(same(mine[name], other[name]) for name in mine)


@settings(max_examples=200)
@given(specs, st.data())
def test_one_field_taken_from_another_spec_changes_the_key(first, data):
    """Neighbours: two specs that differ in one field only."""
    second = data.draw(specs)
    name = data.draw(st.sampled_from([one.name for one in fields(JitSpec)]))
    mine = {one.name: getattr(first, one.name) for one in fields(JitSpec)}
    mixed = JitSpec(**{**mine, name: getattr(second, name)})
    left, right = getattr(first, name), getattr(mixed, name)
    if name == "coverage":
        left, right = tuple(sorted(left)), tuple(sorted(right))
    assert (mixed.key == first.key) == same(left, right)
