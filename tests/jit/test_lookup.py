"""Artifacts: complete or absent, found if they fit, otherwise refused with a reason."""

from __future__ import annotations

import json
import os
import shutil
import threading

import pytest
import torch

from flashinfer.jit.artifact import MANIFEST, Artifact, elf_requirements, publish, read, sealed
from flashinfer.jit.machine import target
from flashinfer.jit.machine.target import Target, level_features, why_not_runnable
from flashinfer.jit.resolve import look_up
from flashinfer.jit.worker import file_digest, read_depfile


@pytest.fixture
def built(make_spec):
    """Return a spec and its artifact in the workspace."""
    spec = make_spec()
    return spec, spec.build()


def to_aot(artifact, tmp_path, **changes):
    """Copy an artifact to the AOT directory, with parts of its manifest changed."""
    shutil.copytree(artifact.directory, tmp_path / "aot" / artifact.name, dirs_exist_ok=True)
    path = tmp_path / "aot" / artifact.name / MANIFEST
    path.write_text(json.dumps(sealed({**json.loads(path.read_text()), **changes})))
    return path.parent


def test_layout_and_manifest(built):
    spec, artifact = built
    manifest = json.loads((artifact.directory / "manifest.json").read_text())
    assert artifact.path.name == "tiny.so" and manifest["name"] == "tiny" and manifest["key"] == spec.key
    assert manifest["sha256"] == file_digest(artifact.path) and manifest["size"] == artifact.path.stat().st_size
    assert set(manifest["files"]) == {"<0>/unit.cc", "<0>/unit.h"} and manifest["seconds"] > 0
    assert sorted(os.listdir(artifact.directory)) == ["manifest.json", "tiny.so"]


def test_found_in_the_workspace(built):
    spec, artifact = built
    assert look_up(spec).artifact == artifact


def test_aot_comes_first(built, tmp_path):
    spec, artifact = built
    directory = to_aot(artifact, tmp_path)
    assert look_up(spec).artifact.directory == directory


@pytest.mark.parametrize(
    "damage, reason",
    [
        (lambda d: (d / "tiny.so").write_bytes((d / "tiny.so").read_bytes()[:-1]), "bytes, its manifest says"),
        (lambda d: flip(d / "tiny.so"), "damaged"),
        (lambda d: (d / "manifest.json").write_text("{"), "unreadable"),
        (lambda d: (d / "manifest.json").write_text("[]"), "lacks fields"),
        (lambda d: (d / "manifest.json").write_text("{}"), "lacks fields"),
        (lambda d: (d / "manifest.json").unlink(), "incomplete"),
        (lambda d: (d / "tiny.so").unlink(), "incomplete"),
    ],
)
def test_a_damaged_artifact_is_refused_and_replaced(built, damage, reason, tmp_path):
    spec, artifact = built
    directory = to_aot(artifact, tmp_path)
    shutil.rmtree(artifact.directory)
    damage(directory)
    lookup = look_up(spec)
    assert lookup.artifact is None and reason in lookup.reason
    assert spec.build().path.exists()


def flip(path):
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def test_a_damaged_artifact_of_the_workspace_is_built_again(built):
    spec, artifact = built
    flip(artifact.path)
    assert "damaged" in look_up(spec).reason
    again = spec.build()
    assert again.path == artifact.path and file_digest(again.path) == again.manifest["sha256"]


@pytest.mark.parametrize(
    "changes, reason",
    [
        (dict(key="0" * 64), "other source files"),
        (dict(format=99), "format 99"),
        (dict(name="other"), "is for 'other'"),
        (dict(requires={"GLIBC": "9.99"}), "needs GLIBC_9.99, which libc.so.6 of this process does not have"),
        (dict(requires={"GLIBCXX": "3.4.999"}), "needs GLIBCXX_3.4.999, which libstdc++.so.6"),
        (dict(requires={"CXXABI": "9.9"}), "needs CXXABI_9.9, which libstdc++.so.6"),
        (dict(torch_abi=[99, 0]), f"needs torch 99.0 or newer, this is {torch.__version__}"),
        (dict(archs=["9.9"]), "compiled for 9.9, which is no level known here"),
    ],
)
def test_a_manifest_that_does_not_fit(built, changes, reason, tmp_path):
    spec, artifact = built
    to_aot(artifact, tmp_path, **changes)
    shutil.rmtree(artifact.directory)
    lookup = look_up(spec)
    assert lookup.artifact is None and reason in lookup.reason


def test_a_cpu_that_lacks_a_feature_skips_the_artifact(built, tmp_path, monkeypatch):
    spec, artifact = built
    to_aot(artifact, tmp_path, archs=["x86-64-v4"])
    shutil.rmtree(artifact.directory)
    monkeypatch.setattr(target, "cpu_features", lambda: frozenset(level_features("x86-64-v3")))
    lookup = look_up(spec)
    assert lookup.artifact is None and "this CPU lacks avx512bw" in lookup.reason


@pytest.mark.parametrize(
    "archs, capability, runs",
    [
        (["9.0a"], (9, 0), True),
        (["8.0"], (9, 0), False),
        (["8.0+PTX"], (9, 0), True),
        (["8.0"], (8, 9), True),
        (["8.9"], (8, 0), False),
        (["9.0a"], (10, 0), False),
        (["8.0", "9.0a"], (9, 0), True),
        (["10.0f"], (10, 3), True),
        (["10.0a"], (10, 3), False),
    ],
)
def test_gpus(archs, capability, runs, monkeypatch):
    monkeypatch.setattr(target, "visible_gpus", lambda: (capability,))
    assert (why_not_runnable("cuda", archs) is None) == runs


def test_a_requested_arch_is_required(built, tmp_path, monkeypatch):
    spec, artifact = built
    to_aot(artifact, tmp_path, archs=["x86-64"])
    shutil.rmtree(artifact.directory)
    assert look_up(spec).artifact is not None, "any level of this CPU is accepted without a request"
    monkeypatch.setenv("FLASHINFER_CPU_ARCH", "x86-64-v2")
    assert "built for x86-64, wanted x86-64-v2" in look_up(spec).reason


def test_other_tools_miss_in_the_workspace_and_hit_ahead_of_time(built, tmp_path, monkeypatch):
    spec, artifact = built
    monkeypatch.setattr(
        "flashinfer.jit.lookup.toolchain_identity", lambda *_: {"cxx": "99", "nvcc": None, "as": "1", "ld": "1"}
    )
    assert "by other tools" in look_up(spec).reason
    to_aot(artifact, tmp_path)
    assert look_up(spec).artifact is not None


def test_no_tools_at_all(built, monkeypatch):
    spec, artifact = built
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.setenv("CXX", "/nowhere/g++")
    assert look_up(spec).artifact == artifact


def test_an_artifact_with_fewer_values_serves_calls_that_need_no_more(make_spec, tmp_path):
    wide = make_spec(coverage={"dtype": ["float16", "bfloat16"]})
    narrow = wide.covering({"dtype": ["bfloat16"]})
    artifact = narrow.build()
    to_aot(artifact, tmp_path)
    assert wide.key != narrow.key
    assert look_up(wide, {"dtype": ["bfloat16"]}).artifact is not None
    refused = look_up(wide, {"dtype": ["float16"]})
    assert refused.artifact is None and "built without dtype float16" in refused.reason
    assert look_up(wide).artifact is None


WIDE = {"dtype_q": ["float16", "bfloat16"], "head_dim": [64, 128, 256], "mask_mode": ["none", "causal"]}


@pytest.mark.parametrize(
    "needs, lacks",
    [
        (dict(dtype_q=["float16"], head_dim=[128], mask_mode=["causal"]), None),
        (dict(dtype_q=["float16"], head_dim=[64, 256]), None),
        (dict(), None),
        (dict(head_dim=[512]), "head_dim 512"),
        (dict(dtype_q=["float16"], head_dim=[128, 512], mask_mode=["window"]), "head_dim 512, mask_mode window"),
        (dict(page_size=[16]), "page_size 16"),
    ],
)
@pytest.mark.parametrize("place", ["ahead of time", "workspace"])
def test_coverage_must_include_the_needs_of_every_axis(make_spec, tmp_path, needs, lacks, place):
    """A library that dispatches over three axes serves the configurations it covers, and no other."""
    one = make_spec(coverage={"dtype_q": ["bfloat16"], "head_dim": [64], "mask_mode": ["none"]})
    wide = one.covering(WIDE).build()
    if place == "ahead of time":
        to_aot(wide, tmp_path)
        shutil.rmtree(wide.directory)
    lookup = look_up(one, needs)
    if lacks is None:
        assert lookup.artifact.manifest["key"] == wide.manifest["key"]
    else:
        assert lookup.artifact is None and f"built without {lacks}" in lookup.reason


def test_an_axis_that_is_not_named_is_needed_whole(make_spec):
    spec = make_spec(coverage={"dtype_q": ["float16", "bfloat16"], "head_dim": [64, 128]})
    spec.covering({"dtype_q": ["float16"], "head_dim": [64, 128]}).build()
    assert look_up(spec, {"dtype_q": ["float16"]}).artifact is not None
    assert "built without dtype_q bfloat16" in look_up(spec, {"head_dim": [64]}).reason


def test_in_one_source_the_exact_artifact_comes_before_one_that_covers(make_spec, tmp_path):
    narrow = make_spec(coverage={"head_dim": [64]})
    exact = narrow.build()
    wide = narrow.covering({"head_dim": [64, 128]})
    assert look_up(wide).artifact is None
    covering = wide.build()
    assert look_up(narrow).artifact == exact
    to_aot(covering, tmp_path)
    assert look_up(narrow).artifact.directory == tmp_path / "aot" / "tiny", "AOT directories come first"


def test_coverage_of_other_sources_does_not_serve(make_spec):
    wide = make_spec(coverage={"head_dim": [64, 128]})
    wide.build()
    changed = make_spec(files={"unit.cc": "int other;\n"}, coverage={"head_dim": [64]})
    assert look_up(changed).reason.startswith(
        "1 artifact of this name in the workspace was built from other source files"
    )
    without = make_spec(files={"unit.cc": "int other;\n"})
    assert look_up(without).artifact is None


def test_publishing_never_shows_a_mixture(make_spec, tmp_path):
    """A polling reader sees one artifact or the other, and sometimes none."""
    artifacts = [make_spec(f"m{number}").build() for number in range(2)]
    place, stop, seen = tmp_path / "aot" / "same", threading.Event(), []

    def look():
        while not stop.is_set():
            found = read(place, "same")
            if isinstance(found, Artifact):
                seen.append(found.manifest["sha256"])

    libraries = [(a.path, {**a.manifest, "name": "same"}) for a in artifacts]
    reader = threading.Thread(target=look)
    reader.start()
    for _ in range(50):
        for library, manifest in libraries:
            publish(library, manifest, place)
    stop.set()
    reader.join()
    assert set(seen) <= {a.manifest["sha256"] for a in artifacts}
    assert os.listdir(place.parent) == ["same"], "no private directory is left"
    assert file_digest(place / "same.so") == libraries[1][1]["sha256"]


def test_a_failed_publish_leaves_the_old_artifact(built, monkeypatch):
    _, artifact = built
    before = artifact.path.read_bytes()

    def fail(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("flashinfer.jit.artifact.sync_to_disk", fail)
    with pytest.raises(OSError, match="No space left"):
        publish(artifact.path, artifact.manifest, artifact.directory)
    assert artifact.path.read_bytes() == before and len(os.listdir(artifact.directory.parent)) == 1


def test_elf_requirements(built):
    _, artifact = built
    assert elf_requirements(artifact.path).keys() <= {"GLIBC", "GLIBCXX", "CXXABI", "GCC"}


def test_target_flags():
    assert Target("cpu", ("x86-64-v3",), True).flags() == ("-march=x86-64-v3",)
    assert Target("cuda", ("10.0f",), True).flags() == ("-gencode=arch=compute_100f,code=sm_100f",)
    assert read_depfile("a.o: b.h \\\n c\\ d.h $$e.h\n") == ["b.h", "c d.h", "$e.h"]
