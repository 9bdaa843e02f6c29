"""Artifacts used on other systems: with any Python, and on any GPU of the arch."""

from __future__ import annotations

from flashinfer import env
from flashinfer.jit.artifact import Artifact
from flashinfer.jit.lookup import Machine
from flashinfer.jit.machine import target

from .test_matrix_hit_miss import FAMILY, ROOT


def test_a_module_knows_no_python(python, tmp_path):
    from elftools.elf.elffile import ELFFile

    done = python(FAMILY, str(ROOT))
    with open(done.stdout.strip(), "rb") as file:
        elf = ELFFile(file)
        names = [symbol.name for symbol in elf.get_section_by_name(".dynsym").iter_symbols()]
        needed = [
            tag.needed for tag in elf.get_section_by_name(".dynamic").iter_tags() if tag.entry.d_tag == "DT_NEEDED"
        ]
    assert any(name.startswith("aoti_torch_") for name in names), "the stable C ABI, and no Python symbol"
    assert not [name for name in names if name.startswith(("Py", "_Py"))]
    assert not [name for name in needed if "python" in name]


def test_hit_of_another_gpu_of_the_same_arch(make_spec, monkeypatch):
    spec = make_spec("gpu", backend="cuda")
    monkeypatch.setattr(target, "visible_gpus", lambda: ((9, 0),))
    here = Machine(spec, cache_versions=False)
    manifest = {"key": spec.key, "build_key": "", "archs": ["9.0a"], "requires": {}, "torch_abi": [2, 10]}
    found = Artifact("gpu", env.aot_dirs()[0] / "gpu" / "gpu.so", manifest)
    assert here.refusal(found) is None
    monkeypatch.setattr(target, "visible_gpus", lambda: ((9, 0), (10, 0)))
    assert "this machine has a GPU of 10.0" in here.refusal(found)
