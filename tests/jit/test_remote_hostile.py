"""Hostile objects in a store: without a trusted signature for this very module, nothing is loaded."""

from __future__ import annotations

import random

import pytest

from flashinfer.errors import JitFrozenError
from flashinfer.jit import freeze
from flashinfer.jit.artifact import sealed
from flashinfer.jit.build import make_request
from flashinfer.jit.remote import objects, transfer
from flashinfer.jit.remote.signing import keygen
from flashinfer.jit.resolve import look_up

from ..support.processes import answer, answering
from ..support.stores import flipped, is_object, place_of, taken


def pieces(data: bytes) -> tuple[bytes, bytes, bytes]:
    head = objects._HEAD.size
    *_, first, _ = objects._HEAD.unpack_from(data)
    return data[:head], data[head : head + first], data[head + first :]


def as_object(public: bytes, signature: bytes, manifest: bytes, library: bytes) -> bytes:
    return objects._HEAD.pack(objects.MAGIC, public, signature, len(manifest), len(library)) + manifest + library


class Attack:
    """Objects that an attacker with write access may put at the path of ``good``."""

    def __init__(self, good: bytes, replayed: dict[str, bytes], strangers: bytes, manifest: dict) -> None:
        self.good, self.replayed, self.strangers, self.manifest = good, replayed, strangers, manifest
        self.head, self.text, self.library = pieces(good)
        _, self.public, self.signature, _, _ = objects._HEAD.unpack_from(good)

    def lying(self, **changes: object) -> bytes:
        text = objects.json.dumps(sealed({**self.manifest, **changes})).encode()
        return as_object(self.public, self.signature, text, self.library)

    def cases(self) -> dict[str, bytes]:
        head, good, n = len(self.head), self.good, len(self.good)
        tar = b"../../../../tmp/escaped".ljust(512, b"\0")
        return {
            **{f"flipped at {at}": flipped(good, at) for at in (0, 25, 60, head - 1, head + 5, head + len(self.text) + 64)},
            **{f"flipped anywhere {k}": flipped(good, random.randrange(n)) for k in range(6)},
            **{f"cut at {at}": good[:at] for at in (0, 1, head - 1, head, head + 10, n // 2, n - 1)},
            "longer": good + b"\0",
            "twice": good + good,
            "HTML": b"<!doctype html><html><body>Sign in</body></html>" * 100,
            "an archive that escapes": tar * 8,
            "a pickle": b"cos\nsystem\n(S'true'\ntR." * 20,
            "a gigabyte by its own word": objects._HEAD.pack(objects.MAGIC, self.public, self.signature, 1 << 30, 1) + b"x",
            "all of 64 bits": objects._HEAD.pack(objects.MAGIC, self.public, self.signature, 2**64 - 1, 2**64 - 1),
            "another module's": self.replayed["module"],
            "another key's": self.replayed["key"],
            "of another build": self.replayed["build"],
            "unsigned": as_object(bytes(32), bytes(64), self.text, self.library),
            "signature removed": as_object(self.public, bytes(64), self.text, self.library),
            "a stranger's": self.strangers,
            "a stranger's signature by a trusted name": as_object(self.public, self.strangers[52:116], self.text, self.library),
            "a trusted signature by a stranger": as_object(self.strangers[20:52], self.signature, self.text, self.library),
            "another library": as_object(self.public, self.signature, self.text, self.library[:-1] + b"?"),
            "no library": as_object(self.public, self.signature, self.text, b""),
            "no manifest": as_object(self.public, self.signature, b"", self.library),
            "a manifest that is a list": as_object(self.public, self.signature, b"[]", self.library),
            "a deep manifest": as_object(self.public, self.signature, b"[" * 100000, self.library),
            "other archs": self.lying(archs=["x86-64"]),
            "another name": self.lying(name="../../escaped"),
            "another digest": self.lying(sha256="0" * 64),
            "pieces exchanged": as_object(self.public, self.signature, self.library, self.text),
        }  # fmt: skip


def attack_on(spec, remote, make_spec, host, keys, tmp_path, monkeypatch) -> Attack:
    """Make objects of the same publisher at other paths, and one of a stranger."""
    found, good = look_up(spec).artifact, remote.objects[place_of(remote)]
    sign = transfer.signer()
    host("elsewhere", f"{remote.url}/elsewhere", publish=True)
    other = make_spec("other", answering(8)).build()
    older = make_spec("tiny", answering(9)).build()
    make_spec("tiny", answering(7))
    tools = {**found.manifest["toolchain"], "cxx": "another"}
    key = objects.build_key(spec.key, objects.Target("", found.archs, False), tools)
    by_others = objects.Artifact("tiny", found.path, sealed({**found.manifest, "toolchain": tools, "build_key": key}))
    stranger = tmp_path / "stranger.pem"
    keygen(stranger)
    monkeypatch.setenv("FLASHINFER_STORE_SIGNING_KEY", str(stranger))
    strangers = objects.pack(found, transfer.signer())
    replayed = {
        name: objects.pack(one, sign) for name, one in (("module", other), ("key", older), ("build", by_others))
    }
    return Attack(good, replayed, strangers, found.manifest)


def test_hostile_objects_are_refused_and_nothing_is_written(
    pushed, remote, make_spec, host, keys, tmp_path, monkeypatch, capsys
):
    attack = attack_on(pushed, remote, make_spec, host, keys, tmp_path, monkeypatch)
    cases = attack.cases()
    assert len(cases) >= 40
    place = place_of(type("", (), {"objects": {p: 0 for p in remote.objects if "/prefix/" in p}})())
    for name, data in cases.items():
        remote.objects[place] = data
        where = host("victim", f"{remote.url}/bucket/prefix")
        request = make_request(pushed)
        capsys.readouterr()
        assert taken(request) == [], name
        said = capsys.readouterr().err
        assert said.count("it is not used") == 1 and said.count("\n") == 1, (name, said)
        assert taken(request) == [] and capsys.readouterr().err == "", "reported once"
        assert [path for path in where.rglob("*") if path.is_file()] == [], name
    remote.objects[place] = attack.good
    host("victim", f"{remote.url}/bucket/prefix")
    assert len(taken(make_request(pushed))) == 1


@pytest.mark.parametrize("name", ["HTML", "another key's"])
def test_after_a_refusal_it_is_built(
    name, pushed, remote, make_spec, host, keys, tmp_path, monkeypatch, capsys, compilers_started
):
    place = place_of(remote)
    attack = attack_on(pushed, remote, make_spec, host, keys, tmp_path, monkeypatch)
    remote.objects[place] = attack.cases()[name]
    host("victim", f"{remote.url}/bucket/prefix")
    before = compilers_started()
    assert answer(pushed.build()) == 7 and compilers_started() == before + 1
    assert "it is not used" in capsys.readouterr().err


def test_unsigned_objects_are_checked_too(pushed, remote, make_spec, host, keys, tmp_path, monkeypatch, capsys):
    """Without signatures, damage and other modules are still refused, but strangers are not."""
    place = place_of(remote)
    attack = attack_on(pushed, remote, make_spec, host, keys, tmp_path, monkeypatch)
    monkeypatch.delenv("FLASHINFER_STORE_KEYS")
    harmless = {"flipped at 25", "flipped at 60", "unsigned", "signature removed"}
    for name, data in attack.cases().items():
        if name in harmless or "stranger" in name or "anywhere" in name:
            continue
        remote.objects[place] = data
        host("victim", f"unsigned+{remote.url}/bucket/prefix")
        assert taken(make_request(pushed)) == [], name
        assert "it is not used" in capsys.readouterr().err
    remote.objects[place] = attack.cases()["unsigned"]
    host("victim", f"unsigned+{remote.url}/bucket/prefix")
    assert len(taken(make_request(pushed))) == 1


def test_a_key_that_is_no_longer_trusted(pushed, remote, host, keys, tmp_path, capsys):
    """Key rotation: two lines while both keys are in use, then only the new one."""
    host("b", f"{remote.url}/bucket/prefix")
    old = keys.read_text()
    keys.write_text(old + keygen(tmp_path / "new.pem") + "\n")
    assert len(taken(make_request(pushed))) == 1
    keys.write_text(keygen(tmp_path / "newer.pem") + "\n")
    host("c", f"{remote.url}/bucket/prefix")
    assert taken(make_request(pushed)) == []
    assert "a key that FLASHINFER_STORE_KEYS does not have" in capsys.readouterr().err


def test_an_artifact_that_cannot_run_here_is_refused(pushed, remote, host, monkeypatch, capsys):
    host("b", f"{remote.url}/bucket/prefix")
    monkeypatch.setattr(transfer, "why_not_linkable", lambda requires, abi: "needs GLIBC_9.99")
    assert taken(make_request(pushed)) == []
    assert "is not for this machine: needs GLIBC_9.99; it is not used" in capsys.readouterr().err


def test_a_pointer_to_anywhere_is_refused(pushed, remote, host, monkeypatch, capsys):
    monkeypatch.setenv("CXX", "/nowhere/g++")
    (pointer,) = (path for path in remote.objects if not is_object(path))
    for text in (b"../../../../etc/passwd", b"", b"0" * 64, place_of(remote).encode()):
        remote.objects[pointer] = text
        host("b", f"{remote.url}/bucket/prefix")
        with freeze(), pytest.raises(JitFrozenError, match="none is in the stores"):
            pushed.build()
        assert ("is not a pointer" in capsys.readouterr().err) == (text != b"0" * 64)
