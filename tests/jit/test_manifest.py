"""Artifacts that contradict their spec or manifest: template, manifest, other library, flipped bit."""

from __future__ import annotations

import json
import shutil

from flashinfer.jit.artifact import MANIFEST, sealed
from flashinfer.jit.resolve import look_up


def test_miss_of_another_template(tmp_path, monkeypatch, make_spec):
    """One byte of the template of the configuration header changes."""
    monkeypatch.setattr("flashinfer.env.data_root", lambda: str(tmp_path))
    (tmp_path / "config.jinja").write_text("// {{ name }}\n")
    spec = make_spec(template="config.jinja", config_header="config.h")
    spec.build()
    assert look_up(spec).artifact is not None
    (tmp_path / "config.jinja").write_text("/* {{ name }} */\n")
    assert look_up(spec).artifact is None and "built from other source files" in look_up(spec).reason


def lies(manifest: dict) -> dict[str, object]:
    """Return field -> a wrong value of the same type."""
    other = {str: "0" * 64, int: 1, float: 1.5, list: ["x86-64"], dict: {"GLIBC": "2.0"}}
    return {name: not value if isinstance(value, bool) else other[type(value)] for name, value in manifest.items()}


def test_miss_of_a_manifest_that_lies(make_spec):
    """No single field can be changed."""
    spec = make_spec()
    artifact = spec.build()
    path = artifact.directory / MANIFEST
    assert len(artifact.manifest) > 20
    for name, lie in lies(artifact.manifest).items():
        path.write_text(json.dumps({**artifact.manifest, name: lie}))
        assert look_up(spec).artifact is None, name
        without = {field: value for field, value in artifact.manifest.items() if field != name}
        path.write_text(json.dumps(without))
        assert look_up(spec).artifact is None, name
    path.write_text(json.dumps(artifact.manifest))
    assert look_up(spec).artifact == artifact


def test_miss_of_a_sealed_manifest_of_another_library(make_spec):
    one, two = make_spec("one"), make_spec("two", {"unit.cc": "int other;\n"})
    mine, other = one.build(), two.build()
    shutil.copyfile(other.path, mine.path)
    manifest = sealed({**mine.manifest, "size": other.manifest["size"]})
    (mine.directory / MANIFEST).write_text(json.dumps(manifest))
    assert look_up(one).artifact is None and "damaged" in look_up(one).reason


def test_miss_of_a_library_with_any_bit_flipped(make_spec):
    spec = make_spec()
    artifact = spec.build()
    data = artifact.path.read_bytes()
    for place in (0, 5, len(data) // 3, len(data) // 2, len(data) - 1):
        for bit in (1, 128):
            artifact.path.write_bytes(data[:place] + bytes([data[place] ^ bit]) + data[place + 1 :])
            assert look_up(spec).artifact is None, place
    for length in (0, 1, 64, len(data) - 1):
        artifact.path.write_bytes(data[:length])
        assert look_up(spec).artifact is None, length
    artifact.path.write_bytes(data)
    assert look_up(spec).artifact == artifact
