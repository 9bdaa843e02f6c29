"""Stores: a module built on one machine is fetched by others in one request, if a trusted key signed it."""

from __future__ import annotations

import os
import socket
import sys
import time

import pytest

from flashinfer.cli.main import main
from flashinfer.errors import ArtifactError, DependencyError, EnvironmentValueError, JitFrozenError
from flashinfer.jit import freeze, subscribe
from flashinfer.jit.build import make_request
from flashinfer.jit.remote import transfer, transport
from flashinfer.jit.resolve import look_up

from ..support.processes import answer, answering
from ..support.stores import flipped, place_of, taken

# One publisher, many readers.


def test_one_host_builds_and_another_fetches(pushed, remote, host, compilers_started):
    found = look_up(pushed).artifact
    base = f"/bucket/prefix/tiny/{pushed.key}"
    default = f"{base}/default-{found.archs[0].replace('+', '-')}"
    assert remote.asked[-2:] == [("PUT", place_of(remote)), ("PUT", default)]
    assert set(remote.objects) == {f"{base}/{found.manifest['build_key']}", default}
    before, events = compilers_started(), []
    place = host("b", f"{remote.url}/bucket/prefix")
    remote.asked.clear()
    stop = subscribe(events.append)
    there = pushed.build()
    stop()
    assert answer(there) == 7 and there.path.is_relative_to(place) and there.manifest == found.manifest
    assert compilers_started() == before and remote.asked == [("GET", place_of(remote))]
    assert [event.kind for event in events] == ["miss", "fetch"]
    assert (
        events[1].detail["url"] == remote.url + place_of(remote) and events[1].detail["bytes"] > found.manifest["size"]
    )
    assert pushed.build() == there and len(remote.asked) == 1, "the workspace has it now"
    assert not list(place.rglob(".*")), "no temporary file is left"


@pytest.mark.parametrize("kind", ["file", "memory", "s3"])
def test_other_stores(kind, make_spec, keys, host, tmp_path, remote, monkeypatch, compilers_started):
    if kind == "s3":
        pytest.importorskip("s3fs", reason="s3:// takes s3fs")
        for name, value in (("KEY_ID", "key"), ("SECRET_KEY", "secret")):
            monkeypatch.setenv(f"FSSPEC_S3_{'KEY' if name == 'KEY_ID' else 'SECRET'}", value)
        monkeypatch.setenv("FSSPEC_S3_ENDPOINT_URL", remote.url)
        monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
        monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
        import fsspec.config

        fsspec.config.set_conf_env(fsspec.config.conf)
    elif kind == "memory":
        pytest.importorskip("fsspec", reason="memory:// takes fsspec")
    url = {"file": f"file://{tmp_path}/layer", "memory": "memory://layer", "s3": "s3://bucket/prefix"}[kind]
    monkeypatch.setenv("FLASHINFER_STORE_TIMEOUT", "60")  # importing s3fs may take more than a second
    spec = make_spec("tiny", answering(7))
    host("a", url, publish=True)
    spec.build()
    built = compilers_started()
    assert built == 1
    host("b", url)
    assert answer(spec.build()) == 7 and compilers_started() == built
    # A second publisher succeeds without writing.
    first = transfer.stores()[0]
    assert transfer.push(first, look_up(spec).artifact, transfer.signer()) == "there already"
    first.put("half/way", b"1")
    assert (first.put("half/way", b"2"), first.get("half/way")) == ("there already", b"1")
    assert (first.put("half/way", b"2", replace=True), first.get("half/way")) == ("written", b"2")
    assert first.get("not/there") is None and not first.off
    if kind == "s3":
        assert remote.listings == [] and remote.count("GET", "half") == 2
        fsspec.config.conf.clear()


def test_stores_are_asked_in_their_order(pushed, remote, host, tmp_path, compilers_started):
    before = compilers_started()
    host("b", f"file://{tmp_path}/layer,{remote.url}/other,{remote.url}/bucket/prefix")
    pushed.build()
    assert compilers_started() == before and [path.split("/")[1] for _, path in remote.asked[-2:]] == [
        "other",
        "bucket",
    ]


def test_a_machine_without_tools_asks_for_the_default(pushed, remote, host, monkeypatch, compilers_started):
    """The machine reads the pointer, then the object. The same holds if builds are forbidden."""
    before = compilers_started()
    host("b", f"{remote.url}/bucket/prefix")
    remote.asked.clear()
    monkeypatch.setenv("CXX", "/nowhere/g++")
    assert answer(pushed.build()) == 7 and compilers_started() == before
    assert [path.rpartition("/")[2].partition("-")[0] for _, path in remote.asked] == [
        "default",
        place_of(remote)[-64:],
    ]
    monkeypatch.delenv("CXX")
    host("c", f"{remote.url}/bucket/prefix")
    remote.asked.clear()
    with freeze():
        assert answer(pushed.build()) == 7 and remote.asked == [("GET", place_of(remote))]


def test_frozen_names_the_stores(make_spec, remote, host, tmp_path):
    url = f"unsigned+{remote.url}/one"
    host("a", f"{url},unsigned+file://{tmp_path}/two")
    with freeze(), pytest.raises(JitFrozenError) as caught:
        make_spec().build()
    assert f"none is in the stores {remote.url}/one, file://{tmp_path}/two" in str(caught.value)


def test_misses_are_remembered_for_a_minute(make_spec, remote, host, monkeypatch):
    host("a", f"unsigned+{remote.url}/one")
    spec = make_spec()
    for _ in range(3):
        with freeze(), pytest.raises(JitFrozenError):
            spec.build()
    assert remote.count() == 1 and remote.listings == []
    now = time.monotonic()
    monkeypatch.setattr(transport.time, "monotonic", lambda: now + 61)
    with freeze(), pytest.raises(JitFrozenError):
        spec.build()
    assert remote.count() == 2


def test_a_store_is_not_touched_by_a_hit_nor_without_need(make_spec, remote, host, python):
    host("a", f"unsigned+{remote.url}/one")
    spec = make_spec()
    spec.build()
    asked = len(remote.asked)
    done = python(
        """
        import sys
        from flashinfer.jit import gen_jit_spec
        gen_jit_spec("tiny", [sys.argv[1]]).build()
        names = ("flashinfer.jit.remote.transfer", "fsspec", "cryptography", "urllib.request", "flashinfer.jit.ensure")
        print([name for name in names if name in sys.modules])
        """,
        spec.source_paths()[0],
    )
    assert done.stdout == "[]\n" and len(remote.asked) == asked


# Stores that do not answer.


def test_busy_servers_are_asked_again_twice(pushed, remote, host, capsys, compilers_started):
    for status in (500, 503):
        answers = iter([status, status, None])
        remote.fault = lambda method, path, answers=answers: next(answers)
        host(f"b{status}", f"{remote.url}/bucket/prefix")
        remote.asked.clear()
        before = compilers_started()
        pushed.build()
        assert compilers_started() == before and remote.count() == 3 and capsys.readouterr().err == ""
    remote.fault = lambda method, path: 503
    host("c", f"{remote.url}/bucket/prefix")
    remote.asked.clear()
    assert answer(pushed.build()) == 7 and compilers_started() == before + 1 and remote.count() == 3
    assert "HTTP Error 503" in capsys.readouterr().err


@pytest.mark.parametrize("how", ["silent", "refused", "unknown", "cut"])
def test_a_store_that_does_not_answer_costs_its_time_once(how, make_spec, remote, host, monkeypatch, capsys):
    monkeypatch.setenv("FLASHINFER_STORE_TIMEOUT", "0.4")
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        gone = f"http://127.0.0.1:{closed.getsockname()[1]}/x"
    url = {"silent": remote.url, "cut": remote.url, "refused": gone, "unknown": "http://store.invalid/x"}[how]
    remote.fault = lambda method, path: 200.0 if how == "silent" else 0.0
    host("a", f"unsigned+{url}")
    specs = [make_spec(f"m{number}", answering(number)) for number in range(4)]
    requests = [make_request(spec) for spec in specs]
    began = time.monotonic()
    assert taken(*requests) == []
    first = time.monotonic() - began
    said = capsys.readouterr().err
    if how != "cut":
        assert said.count("not used from now on") == 1 and transfer.stores()[0].off
        asked = len(remote.asked)
        assert taken(make_request(make_spec("late", answering(1)))) == []
        assert len(remote.asked) == asked, "this process does not ask again"
    # The silent store answers after 200 s.
    assert first < 150


def test_missing_packages_are_named(make_spec, remote, host, monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "cryptography.hazmat.primitives.asymmetric", None)
    host("a", f"{remote.url}/one")
    with pytest.raises(DependencyError, match="cryptography: .*pip install -e '..store.'"):
        make_spec().build()
    monkeypatch.setitem(sys.modules, "fsspec", None)
    host("b", "unsigned+s3://bucket/prefix")
    with pytest.raises(DependencyError, match="fsspec: .*pip install -e '..store.'"):
        make_spec().build()
    assert remote.asked == []


@pytest.mark.parametrize(
    "name, value, wanted",
    [
        ("FLASHINFER_STORE", "bucket", "'bucket' is not a store URL"),
        ("FLASHINFER_STORE", "unsigned+file:///a,", "'' is not a store URL"),
        ("FLASHINFER_STORE", "unsigned+file://relative", "is not a store URL"),
        ("FLASHINFER_STORE", "unsigned+quux://x", "a protocol that fsspec knows"),
        ("FLASHINFER_STORE_TIMEOUT", "-1", "a positive number of seconds"),
        ("FLASHINFER_STORE_PUBLISH", "maybe", "one of 0, 1"),
        ("FLASHINFER_STORE_KEYS", "", "a file of public keys, for a store without unsigned"),
        ("FLASHINFER_STORE_KEYS", "/none/there", "a file of public keys"),
        ("FLASHINFER_STORE_KEYS", "{bad}", "line 1 is not"),
        ("FLASHINFER_STORE_KEYS", "{empty}", "at least one public key"),
        ("FLASHINFER_STORE_KEYS", "{open}", "a file that only its owner can write"),
        ("FLASHINFER_STORE_SIGNING_KEY", "", "store keygen FILE"),
        ("FLASHINFER_STORE_SIGNING_KEY", "{bad}", "a private key of Ed25519 in PEM"),
        ("FLASHINFER_STORE_SIGNING_KEY", "{readable}", "a file that no other user can read"),
    ],
)
def test_a_bad_value_names_its_variable(name, value, wanted, keys, make_spec, tmp_path, monkeypatch, compilers_started):
    for file, text, mode in (("bad", "x\n", 0o600), ("empty", "#\n", 0o600), ("open", keys.read_text(), 0o666), ("readable", "x", 0o644)):  # fmt: skip
        (tmp_path / file).write_text(text)
        (tmp_path / file).chmod(mode)
        value = value.replace(f"{{{file}}}", str(tmp_path / file))
    monkeypatch.setenv("FLASHINFER_STORE", f"file://{tmp_path}/layer")
    monkeypatch.setenv("FLASHINFER_STORE_PUBLISH", "1")
    monkeypatch.setenv(name, value)
    with pytest.raises(EnvironmentValueError, match=wanted) as caught:
        make_spec().build()
    assert caught.value.name == name and compilers_started() == 0


def test_a_store_that_cannot_be_written_is_no_reason_to_fail(make_spec, remote, keys, host, capsys):
    remote.fault = lambda method, path: 403 if method == "PUT" else None
    host("a", f"{remote.url}/one", publish=True)
    assert answer(make_spec("tiny", answering(7)).build()) == 7 and "HTTP Error 403" in capsys.readouterr().err


# The command.


def test_keygen_push_and_pull(make_spec, remote, keys, host, tmp_path, monkeypatch, capsys, compilers_started):
    private = tmp_path / "new.pem"
    assert main(["store", "keygen", str(private)]) == 0
    public = capsys.readouterr().out
    assert os.stat(private).st_mode & 0o777 == 0o600 and public.startswith("ed25519:") and len(public) == 73
    before = private.read_bytes()
    assert main(["store", "keygen", str(private)]) == 2 and private.read_bytes() == before
    keys.write_text(public)
    monkeypatch.setenv("FLASHINFER_STORE_SIGNING_KEY", str(private))

    spec, url = make_spec("tiny", answering(7)), f"{remote.url}/bucket/prefix"
    specs = tmp_path / "specs.jsonl"
    from flashinfer.jit.machine.target import native_level
    from flashinfer.jit.specfile import write_specs
    from flashinfer.jit.specjson import to_json

    write_specs(specs, [{"spec": to_json(spec), "key": spec.key, "needs": {}, "archs": [native_level()]}])
    assert (
        main(["store", "push", url, "--specs", str(specs)]) == 1 and "1 of 1 modules: tiny" in capsys.readouterr().err
    )
    spec.build()
    built = compilers_started()
    for how in ("written", "there already"):
        assert main(["store", "push", url, "--specs", str(specs)]) == 0 and how in capsys.readouterr().out
    place = place_of(remote)
    good = remote.objects[place]
    for spoiled in (b"", good[:-1], flipped(good, 30), flipped(good, len(good) - 1)):
        remote.objects[place] = spoiled
        assert main(["store", "push", url, "--specs", str(specs)]) == 0 and "repaired" in capsys.readouterr().out
        assert remote.objects[place] == good

    host("b", "")
    assert main(["store", "pull", url, "--specs", str(specs)]) == 0 and "pulled" in capsys.readouterr().out
    assert answer(look_up(spec).artifact) == 7
    assert main(["store", "pull", url, "--specs", str(specs)]) == 0 and "there already" in capsys.readouterr().out
    host("c", "")
    assert main(["store", "pull", url, "--specs", str(specs), "--to", str(tmp_path / "image")]) == 0
    monkeypatch.setenv("FLASHINFER_AOT_DIR", str(tmp_path / "image"))
    assert look_up(spec).artifact.path == tmp_path / "image" / "tiny" / "tiny.so" and compilers_started() == built
    assert main(["verify", "--specs", str(specs)]) == 0
    monkeypatch.delenv("FLASHINFER_AOT_DIR")
    remote.objects.clear()
    host("d", "")
    assert main(["store", "pull", url, "--specs", str(specs)]) == 1 and "not in" in capsys.readouterr().out
    assert remote.listings == []


def test_the_command_without_a_key(make_spec, remote, tmp_path, capsys):
    for action in ("push", "pull"):
        assert main(["store", action, remote.url, "norm_cpu"]) == 2
        assert "FLASHINFER_STORE" in capsys.readouterr().err
        for words in (["bucket", "norm_cpu"], [remote.url], [remote.url, "norm_cpu", "--specs", "x"]):
            assert main(["store", action, *words]) == 2
    assert main(["store", "push", "unsigned+" + remote.url, "norm_cpu"]) == 1
    assert main(["store", "push", remote.url, "norm_cpu", "--to", "x"]) == 2
    assert remote.asked == []


def test_damage_in_the_workspace_is_not_published(pushed, remote, keys):
    found = look_up(pushed).artifact
    found.path.write_bytes(flipped(found.path.read_bytes(), 100))
    with pytest.raises(ArtifactError, match="damaged"):
        transfer.push(transfer.stores()[0], found, transfer.signer())
