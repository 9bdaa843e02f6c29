"""Modules for some archs only: built for these, found on their GPUs, refused elsewhere with the reason."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace

import pytest

from flashinfer import env
from flashinfer.cli.main import main
from flashinfer.errors import ToolchainError
from flashinfer.jit import JitSpec
from flashinfer.jit.artifact import Artifact
from flashinfer.jit.build import make_request
from flashinfer.jit.lookup import Machine
from flashinfer.jit.machine import target
from flashinfer.jit.machine.arch import Arch
from flashinfer.jit.machine.target import Target, narrowed

needs_nvcc = pytest.mark.skipif(shutil.which("nvcc") is None, reason="needs nvcc")
UNIT = {"unit.cu": '__global__ void kernel() {}\nextern "C" int answer() { kernel<<<1, 1>>>(); return 42; }\n'}


@pytest.fixture
def hopper(make_spec) -> JitSpec:
    return replace(make_spec("hopper", UNIT), archs=("9.0a",))


def made(spec: JitSpec, *archs: str) -> Artifact:
    manifest = {
        "key": spec.key, "build_key": "", "archs": list(archs), "requires": {}, "torch_abi": [2, 10]
    }  # fmt: skip
    return Artifact(spec.name, env.aot_dirs()[0] / spec.name / f"{spec.name}.so", manifest)


def test_archs_are_part_of_the_key(hopper):
    assert hopper.key != replace(hopper, archs=()).key != replace(hopper, archs=("9.0a", "10.0a")).key


def test_a_target_is_narrowed():
    both = Target("cuda", ("8.0", "9.0a+PTX", "10.0a"), True)
    assert narrowed(both, (), "m") == both
    assert narrowed(both, ("9.0a",), "m").archs == ("9.0a+PTX",)
    assert narrowed(both, ("10.0a", "9.0a"), "m").archs == ("9.0a+PTX", "10.0a")
    with pytest.raises(ToolchainError, match=r"module 'm' has kernels only for 9\.0a, the request names 8\.0 9\.0"):
        narrowed(Target("cuda", ("8.0", "9.0"), True), ("9.0a",), "m")
    with pytest.raises(ToolchainError, match=r"only for .*, this machine has 8\.0"):
        narrowed(Target("cuda", ("8.0",), False), ("9.0a",), "m")


@pytest.mark.parametrize(
    "archs, message",
    [
        (("nine",), "nine"),
        (("9.0a", "9.0a"), "each once"),
        (("9.0a 8.0",), "wanted GPU archs, sorted"),
    ],
)
def test_bad_archs(make_spec, archs, message):
    with pytest.raises(ValueError, match=message):
        replace(make_spec("hopper", UNIT), archs=archs)
    with pytest.raises(ValueError, match="for cpu, wanted none"):
        replace(make_spec("tiny"), archs=("9.0a",))


def test_an_artifact_for_other_gpus_is_refused(hopper, monkeypatch):
    monkeypatch.setattr(target, "visible_gpus", lambda: ((8, 0),))
    why = Machine(hopper, cache_versions=False).refusal(made(hopper, "9.0a"))
    assert why == "compiled for 9.0a, this machine has a GPU of 8.0"
    for gpus in (((9, 0),), ((8, 0), (9, 0)), ()):  # one GPU suffices, and without any nothing is launched
        monkeypatch.setattr(target, "visible_gpus", lambda gpus=gpus: gpus)
        assert Machine(hopper, cache_versions=False).refusal(made(hopper, "9.0a")) is None
    plain = replace(hopper, archs=())
    monkeypatch.setattr(target, "visible_gpus", lambda: ((8, 0), (9, 0)))
    why = Machine(plain, cache_versions=False).refusal(made(plain, "9.0a"))
    assert why == "compiled for 9.0a, this machine has a GPU of 8.0"


def test_an_artifact_for_other_archs_than_requested_is_refused(hopper, monkeypatch):
    monkeypatch.setattr(target, "visible_gpus", lambda: ())
    monkeypatch.setenv("FLASHINFER_CUDA_ARCH_LIST", "8.0")
    here = Machine(hopper, cache_versions=False)
    assert here.refusal(made(hopper, "9.0a")) == "built for 9.0a only, wanted 8.0"
    monkeypatch.setenv("FLASHINFER_CUDA_ARCH_LIST", "8.0 9.0a")
    assert Machine(hopper, cache_versions=False).refusal(made(hopper, "9.0a")) is None


@needs_nvcc
def test_one_list_of_archs_builds_each_module_for_its_own(aot, make_spec, hopper, monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(aot, "matrix_specs", lambda matrix, names: [hopper, make_spec("portable", UNIT)])
    command = ["--backend", "cuda", "--out-dir", str(tmp_path / "out"), "--json", "--cuda-arch"]
    assert aot.main([*command, "8.0 9.0a"]) == 0
    rows = {row["name"]: row for row in json.loads(capsys.readouterr().out)}
    assert {name: row["archs"] for name, row in rows.items()} == {"hopper": ["9.0a"], "portable": ["8.0", "9.0a"]}
    manifest = json.loads((tmp_path / "out" / "hopper" / "manifest.json").read_text())
    assert manifest["archs"] == ["9.0a"] == manifest["only_archs"]
    # The build ignores archs without kernels, so the artifact is the same.
    assert aot.main([*command, "9.0a"]) == 0
    assert {row["name"]: row["how"] for row in json.loads(capsys.readouterr().out)} == {
        "hopper": "reused",
        "portable": "built",
    }
    assert aot.main([*command, "8.0", "--dry-run"]) == 0
    said = capsys.readouterr()
    assert [row["name"] for row in json.loads(said.out)] == ["portable"]
    assert "left out: module 'hopper' has kernels only for 9.0a, the request names 8.0" in said.err


@needs_nvcc
def test_a_build_for_other_archs_names_the_reason(hopper, monkeypatch):
    monkeypatch.setenv("FLASHINFER_CUDA_ARCH_LIST", "8.0")
    with pytest.raises(ToolchainError, match=r"kernels only for 9\.0a, the request names 8\.0"):
        make_request(hopper)
    assert hopper.probe().state == "impossible" and "only for 9.0a" in hopper.probe().reason


@pytest.mark.parametrize("text", ["8.0", "Ampere;Ada", "8.0 9.0+PTX", "Common", "of a later torch"])
def test_torchs_list_refuses_no_artifact(text, hopper, monkeypatch):
    """The variable belongs to torch: an artifact that runs here is used whatever the variable holds."""
    monkeypatch.setattr(target, "visible_gpus", lambda: ((9, 0),))
    monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", text)
    assert Machine(hopper, cache_versions=False).refusal(made(hopper, "9.0a")) is None
    portable = replace(hopper, archs=())
    assert Machine(portable, cache_versions=False).refusal(made(portable, "9.0a")) is None


@needs_nvcc
def test_an_invalid_list_prevents_only_builds_for_gpus(hopper, make_spec, monkeypatch, capsys):
    monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", "of a later torch")
    with pytest.raises(
        ToolchainError, match=r"'hopper' cannot be built: TORCH_CUDA_ARCH_LIST='of a later torch': wanted"
    ):
        make_request(hopper)
    assert hopper.probe().state == "impossible" and "TORCH_CUDA_ARCH_LIST" in hopper.probe().reason
    assert make_spec("tiny").build().path.exists()
    main(["doctor", "--json"])
    (row,) = [row for row in json.loads(capsys.readouterr().out) if row["check"] == "environment"]
    assert row["state"] == "note" and "TORCH_CUDA_ARCH_LIST" in row["detail"]


@pytest.mark.parametrize(
    "arch, runs",
    [
        ("9.0", [(9, 0)]), ("9.0a", [(9, 0)]), ("9.0a+PTX", [(9, 0)]), ("8.0", [(8, 0), (8, 6), (8, 9)]),
        ("8.6+PTX", [(8, 6), (8, 9), (9, 0), (10, 0), (10, 3), (12, 0), (12, 1)]), ("10.0f", [(10, 0), (10, 3)]),
        ("10.0f+PTX", [(10, 0), (10, 3)]), ("12.0f+PTX", [(12, 0), (12, 1)]), ("10.3f", [(10, 3)]),
        ("10.0+PTX", [(10, 0), (10, 3), (12, 0), (12, 1)]), ("12.0a+PTX", [(12, 0)]),
    ],
)  # fmt: skip
def test_archs_and_the_gpus_that_run_them(arch, runs):
    gpus = [(8, 0), (8, 6), (8, 9), (9, 0), (10, 0), (10, 3), (12, 0), (12, 1)]
    assert [gpu for gpu in gpus if Arch.of(arch).runs_on(gpu)] == runs


def test_an_arch_and_its_names():
    for name, kernels in (("8.0", "sm80"), ("9.0a", "sm90a"), ("10.0f", "sm100f"), ("12.1a", "sm121a")):
        assert str(Arch.of(name)) == name and Arch.of(name).tag == kernels and Arch.of(kernels) == Arch.of(name)
    assert str(Arch.of("8.6+PTX")) == "8.6+PTX" and Arch.of("8.6+PTX").tag == "sm86"
    assert [str(Arch.native(gpu)) for gpu in ((8, 9), (9, 0), (12, 1))] == ["8.9", "9.0a", "12.1a"]
    for name in ("cuda", "9", "9.0b", "sm9", "90a", "profiler_sm90a", "9.0a+ptx"):
        with pytest.raises(ValueError, match=f"arch: got {name!r}, wanted a name such as".replace("+", r"\+")):
            Arch.of(name)


def test_kernels_of_a_family_of_gpus_serve_its_targets():
    """The code is that of the family, once, for each target in it."""
    targets = Target("cuda", ("9.0a", "10.0a", "10.3a", "12.0a"), True)
    assert narrowed(targets, ("10.0f",), "m").archs == ("10.0f",)
    assert narrowed(targets, ("10.3f", "9.0a"), "m").archs == ("9.0a", "10.3f")
    for other in ("10.0", "12.0a", "9.0a"):  # 10.0: without features of the family
        with pytest.raises(ToolchainError, match=f"only for 10.0f, the request names {other}"):
            narrowed(Target("cuda", (other,), True), ("10.0f",), "m")
