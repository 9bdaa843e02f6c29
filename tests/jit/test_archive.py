"""Archives of modules: reproducible, checked on both sides, and hostile archives write nothing."""

from __future__ import annotations

import copy
import gzip
import hashlib
import json
import os
import shutil
import stat
import tarfile
from pathlib import Path

import pytest

from flashinfer.cli import tar
from flashinfer.cli.main import main
from flashinfer.jit.artifact import sealed
from flashinfer.jit.resolve import look_up
from flashinfer.jit.worker import file_digest


@pytest.fixture
def built(make_spec, monkeypatch):
    """Build two modules and make them the whole matrix."""
    specs = [make_spec("one"), make_spec("two")]
    for module in ("export", "usage"):
        monkeypatch.setattr(f"flashinfer.cli.{module}.matrix_specs", lambda matrix: specs)
    return specs, [spec.build() for spec in specs]


@pytest.fixture
def exported(built, tmp_path, capsys):
    assert main(["export", str(tmp_path / "modules.tar")]) == 0
    return tmp_path / "modules.tar"


def members(place: Path) -> list[tarfile.TarInfo]:
    with tarfile.open(place) as opened:
        return opened.getmembers()


def files_below(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize("ending", ["tar", "tar.gz", "tgz"])
def test_there_and_back(ending, built, tmp_path, workspace, compilers_started, capsys):
    specs, artifacts = built
    place = tmp_path / f"modules.{ending}"
    assert main(["export", str(place)]) == 0
    before = files_below(workspace / "artifacts")
    shutil.rmtree(workspace)
    capsys.readouterr()
    assert main(["import", str(place), "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert [(row["name"], row["how"], row["path"]) for row in rows] == [
        (spec.name, "imported", str(built.path)) for spec, built in zip(specs, artifacts, strict=True)
    ]
    assert files_below(workspace / "artifacts") == before
    assert [look_up(spec).artifact for spec in specs] == artifacts
    capsys.readouterr()
    assert main(["import", str(place), "--json"]) == 0
    assert {row["how"] for row in json.loads(capsys.readouterr().out)} == {"there already"}
    assert not [path for path in workspace.iterdir() if path.name.startswith(".import")]


def test_into_a_directory_for_an_image(exported, built, tmp_path, workspace, monkeypatch):
    shutil.rmtree(workspace)
    assert main(["import", str(exported), "--to", str(tmp_path / "image")]) == 0
    assert sorted(os.listdir(tmp_path / "image")) == ["one", "two"] and not workspace.exists()
    monkeypatch.setenv("FLASHINFER_AOT_DIR", str(tmp_path / "image"))
    assert [look_up(spec).artifact.directory for spec in built[0]] == [
        tmp_path / "image" / "one",
        tmp_path / "image" / "two",
    ]


def test_a_damaged_artifact_is_replaced_by_the_archives(exported, built, workspace):
    _, (artifact, _) = built
    os.truncate(artifact.path, 10)
    assert main(["import", str(exported)]) == 0
    assert file_digest(artifact.path) == artifact.manifest["sha256"]


def test_equal_modules_give_equal_bytes(exported, built, tmp_path):
    for artifact in built[1]:
        for path in artifact.directory.iterdir():
            os.utime(path, (1, 1))
            path.chmod(0o444)
    (tmp_path / "b").mkdir()
    for ending in ("tar", "tar.gz"):
        places = [tmp_path / f"a.{ending}", tmp_path / "b" / f"other.{ending}"]
        for place in places:
            assert main(["export", str(place)]) == 0
        assert places[0].read_bytes() == places[1].read_bytes()
    assert (tmp_path / "a.tar").read_bytes() == exported.read_bytes()
    assert [one.name for one in members(exported)] == ["index.json"] + [
        f"{m}/{f}" for m in ("one", "two") for f in ("library.so", "manifest.json")
    ]
    for one in members(exported):
        assert (one.uid, one.gid, one.uname, one.gname, one.mtime, one.mode, one.type) == (
            0,
            0,
            "",
            "",
            0,
            0o644,
            tarfile.REGTYPE,
        )


def test_imported_modules_belong_to_the_importing_user(exported, tmp_path):
    before = os.umask(0)
    try:
        assert main(["import", str(exported), "--to", str(tmp_path / "image")]) == 0
    finally:
        os.umask(before)
    for path in (tmp_path / "image").rglob("*"):
        status = path.stat()
        assert status.st_uid == os.geteuid() and stat.S_IMODE(status.st_mode) == (0o755 if path.is_dir() else 0o644)


def test_a_choice_by_name_and_by_directory(built, tmp_path, capsys, monkeypatch):
    assert main(["export", str(tmp_path / "a.tar"), "two"]) == 0
    assert [one.name for one in members(tmp_path / "a.tar")][1:] == ["two/library.so", "two/manifest.json"]
    shutil.copytree(built[1][0].directory, tmp_path / "shipped" / "one")
    assert main(["export", str(tmp_path / "b.tar"), "--from", str(tmp_path / "shipped")]) == 0
    assert [one.name for one in members(tmp_path / "b.tar")][1:] == ["one/library.so", "one/manifest.json"]
    os.truncate(tmp_path / "shipped" / "one" / "one.so", 9)
    assert main(["export", str(tmp_path / "c.tar"), "--from", str(tmp_path / "shipped")]) == 1
    assert "one.so has 9 bytes" in capsys.readouterr().err and not (tmp_path / "c.tar").exists()


@pytest.mark.parametrize(
    "arguments, code, message",
    [
        (["a.zip"], 2, "wanted a name that ends in .tar"),
        (["missing/a.tar"], 2, "is not a writable directory"),
        (["a.tar", "three"], 2, "there is no module 'three'"),
        (["a.tar", "one", "--from", "x"], 2, "got more than one of NAME"),
    ],
)
def test_bad_exports(arguments, code, message, built, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(["export", *arguments]) == code
    assert message in capsys.readouterr().err and not list(tmp_path.glob("*a.*"))


def test_a_module_that_is_not_built_is_reported(built, tmp_path, workspace, capsys):
    shutil.rmtree(workspace / "artifacts" / "one")
    assert main(["export", str(tmp_path / "a.tar"), "one"]) == 1
    assert "one cannot be exported" in capsys.readouterr().err
    shutil.rmtree(workspace)
    assert main(["export", str(tmp_path / "a.tar")]) == 1
    assert "nothing to export" in capsys.readouterr().err


def test_zst_where_the_standard_library_has_it(built, tmp_path, capsys):
    code = main(["export", str(tmp_path / "a.tar.zst")])
    try:
        import compression.zstd  # noqa: F401
    except ImportError:
        assert code == 2 and "needs Python 3.14" in capsys.readouterr().err and not list(tmp_path.glob("*.zst"))
    else:
        assert code == 0 and main(["import", str(tmp_path / "a.tar.zst"), "--to", str(tmp_path / "image")]) == 0


# Hostile archives. Each function takes the good members and returns those of the hostile archive.

GOOD = {"m/manifest.json": b"{}", "m/library.so": b"library"}


def index_of(files, **changes) -> bytes:
    entries = {name: {"size": len(data), "sha256": hashlib.sha256(data).hexdigest()} for name, data in files.items()}
    return json.dumps({"format": 1, "files": entries, **changes}).encode()


def info(name, kind=tarfile.REGTYPE, link="", **more):
    one = tarfile.TarInfo(name)
    one.type, one.linkname = kind, link
    for key, value in more.items():
        setattr(one, key, value)
    return one


def put_together(place: Path, parts, form=tarfile.USTAR_FORMAT, tail=b"") -> Path:
    """Write members (header, contents) unchanged, whether they are consistent or not."""
    with place.open("wb") as file:
        for one, data in parts:
            one = copy.copy(one)
            one.size = one.size or len(data)
            file.write(one.tobuf(form) + data + bytes(-len(data) % 512))
        file.write(bytes(1024) + tail)
    return place


def regular(files=None, index=None):
    files = GOOD if files is None else files
    first = index_of(files) if index is None else index
    return [(info("index.json"), first), *((info(name), files[name]) for name in sorted(files))]


def after_index(*parts):
    return [regular()[0], *parts]


def renamed(name):
    return after_index((info(name), GOOD["m/library.so"]))


HOSTILE = {
    "absolute path": (renamed("/etc/cron.d/x"), "'/etc/cron.d/x' of 7 bytes, wanted 'm/library.so'"),
    "dots": (renamed("../../x"), "'../../x' of 7 bytes, wanted"),
    "absolute path in the index": (regular({"/etc/x": b""}), "names '/etc/x'"),
    "dots in the index": (regular({"../library.so": b"", "../manifest.json": b""}), "names '../library.so'"),
    "hidden name in the index": (regular({".m/library.so": b"", ".m/manifest.json": b""}), "names '.m/library.so'"),
    "deep name in the index": (regular({"m/a/library.so": b""}), "names 'm/a/library.so'"),
    "other file in the index": (regular({**GOOD, "m/run.sh": b""}), "names 'm/run.sh'"),
    "half a module": (regular({"m/library.so": b""}), "m has one file"),
    "symbolic link": (after_index((info("m/library.so", tarfile.SYMTYPE, "/etc/passwd"), b"")), "is a link"),
    "hard link": (after_index((info("m/library.so", tarfile.LNKTYPE, "/etc/passwd"), b"")), "is a link"),
    "character device": (after_index((info("m/library.so", tarfile.CHRTYPE, devmajor=1, devminor=5), b"")), "is a device"),
    "block device": (after_index((info("m/library.so", tarfile.BLKTYPE), b"")), "is a device"),
    "pipe": (after_index((info("m/library.so", tarfile.FIFOTYPE), b"")), "is a pipe"),
    "directory": ([(info("m", tarfile.DIRTYPE), b""), *regular()], "is a directory"),
    "sparse file": (after_index((info("m/library.so", tarfile.GNUTYPE_SPARSE), b"")), "type b'S'"),
    "extended header": ([(info("x", tarfile.XHDTYPE), b"30 path=../../../../../../etc/x\n"), *regular()], "type b'x'"),
    "long name": ([(info("././@LongLink", tarfile.GNUTYPE_LONGNAME), b"../x\0"), *regular()], "type b'L'"),
    "no index": (regular()[1:], "begins with 'm/library.so'"),
    "index is no JSON": (regular(index=b"{"), "is not an index"),
    "index is another thing": (regular(index=b"[]"), "is not an index"),
    "index is deep": (regular(index=b"[" * 100000), "is not an index"),
    "index of another format": (regular(index=index_of(GOOD, format=2)), "format 2, wanted 1"),
    "negative size": (regular(index=index_of(GOOD).replace(b'"size": 7', b'"size": -7')), "got -7 bytes"),
    "size that is no number": (regular(index=index_of(GOOD).replace(b'"size": 7', b'"size": true')), "got True bytes"),
    "digest that is none": (regular(index=index_of(GOOD).replace(hashlib.sha256(b"library").hexdigest().encode(), b"../x")), "SHA-256 '../x'"),
    "larger than the index says": (regular(index=index_of({**GOOD, "m/library.so": b"lib"})), "of 7 bytes, wanted 'm/library.so' of 3"),
    "other contents": (regular(index=index_of({**GOOD, "m/library.so": b"LIBRARY"})), "'m/library.so' is damaged"),
    "a file more": ([*regular(), (info("n/library.so"), b"")], "continues after its last file"),
    "a file less": (regular()[:2], "is damaged or not an archive"),
    "twice the same": ([*regular()[:2], *regular()[1:]], "got 'm/library.so'"),
    "more than the disk holds": (regular(index=index_of(GOOD).replace(b'"size": 7', b'"size": %d' % (1 << 60))), " free"),
    "index of a terabyte": ([(info("index.json", size=1 << 32), b"")], "wanted a small index.json"),
    "contents that are missing": (after_index((info("m/library.so", size=7), b"library"), (info("m/manifest.json", size=2), b"")), "is damaged"),
    "no manifest at all": (regular(), "lacks fields"),
}  # fmt: skip


@pytest.mark.parametrize("packed", [False, True], ids=["plain", "gzip"])
@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_archive_is_refused_and_nothing_is_left(name, packed, tmp_path, capsys, monkeypatch):
    parts, message = HOSTILE[name]
    place = put_together(tmp_path / "hostile.tar", parts)
    if packed:
        place.write_bytes(gzip.compress(place.read_bytes()))
    monkeypatch.setattr(tar.shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(1 << 40, 0, 1 << 40))
    assert main(["import", str(place), "--to", str(tmp_path / "a" / "image")]) == 1
    assert message in capsys.readouterr().err
    assert os.listdir(tmp_path / "a" / "image") == [] and sorted(os.listdir(tmp_path)) == ["a", "hostile.tar"]


def test_garbage_after_the_end_is_refused(exported, tmp_path, capsys):
    content = exported.read_bytes()
    for tail in (b"x", bytes(1 << 20), b"\0" * 512 + b"x"):
        exported.write_bytes(content + tail)
        assert main(["import", str(exported), "--to", str(tmp_path / "image")]) == 1
        assert "continues after" in capsys.readouterr().err and not os.listdir(tmp_path / "image")


def test_a_bomb_is_not_unpacked(exported, tmp_path, capsys):
    """A gigabyte of zeros after a complete archive costs a megabyte of it and no time."""
    with gzip.open(tmp_path / "bomb.tar.gz", "wb", compresslevel=1) as bomb:
        bomb.write(exported.read_bytes())
        for _ in range(64):
            bomb.write(bytes(1 << 20))
    read = []
    real = tar.Source.read_some
    tar.Source.read_some = lambda self, most: (read.append(most), real(self, most))[1]
    try:
        assert main(["import", str(tmp_path / "bomb.tar.gz"), "--to", str(tmp_path / "image")]) == 1
    finally:
        tar.Source.read_some = real
    assert "continues after" in capsys.readouterr().err
    assert sum(read) < exported.stat().st_size + (1 << 20)


@pytest.mark.parametrize("packed", [False, True], ids=["plain", "gzip"])
def test_every_damaged_byte_and_every_cut_is_noticed(packed, exported, tmp_path, capsys):
    """Unused bytes of headers may change. Then the unpacked modules are the same."""
    content = gzip.compress(exported.read_bytes(), mtime=0) if packed else exported.read_bytes()
    want = None
    place = tmp_path / "damaged.tar"
    for at in [*range(0, len(content), max(len(content) // 97, 1)), len(content) - 1]:
        for data in (content[:at], content[:at] + bytes([content[at] ^ 0x20]) + content[at + 1 :]):
            place.write_bytes(data)
            image = tmp_path / "image"
            code = main(["import", str(place), "--to", str(image)])
            if code == 0:
                want = want or built_files(exported, tmp_path)
                assert files_below(image) == want
            else:
                assert code == 1 and os.listdir(image) == []
            shutil.rmtree(image)


def built_files(exported: Path, tmp_path: Path) -> dict[str, bytes]:
    assert main(["import", str(exported), "--to", str(tmp_path / "whole")]) == 0
    return files_below(tmp_path / "whole")


def test_a_manifest_that_lies_is_refused(built, tmp_path, capsys):
    _, (artifact, _) = built
    for changes, message in (
        (dict(name="other"), "for 'other'"),
        (dict(size=1), "damaged"),
        (dict(seal="0"), "damaged"),
    ):
        manifest = json.dumps({**artifact.manifest, **changes}).encode()
        files = {"one/manifest.json": manifest, "one/library.so": artifact.path.read_bytes()}
        put_together(
            tmp_path / "lies.tar",
            [(info("index.json"), index_of(files)), *((info(n), files[n]) for n in sorted(files))],
        )
        assert main(["import", str(tmp_path / "lies.tar"), "--to", str(tmp_path / "image")]) == 1
        assert message in capsys.readouterr().err and os.listdir(tmp_path / "image") == []


def test_keys_that_are_paths_are_refused(built, tmp_path, workspace, capsys):
    _, (artifact, _) = built
    manifest = sealed({**artifact.manifest, "build_key": "../../../../x"})
    files = {"one/manifest.json": json.dumps(manifest).encode(), "one/library.so": artifact.path.read_bytes()}
    put_together(
        tmp_path / "lies.tar", [(info("index.json"), index_of(files)), *((info(n), files[n]) for n in sorted(files))]
    )
    before = files_below(tmp_path)
    assert main(["import", str(tmp_path / "lies.tar")]) == 1
    assert "wanted SHA-256" in capsys.readouterr().err and files_below(tmp_path) == before


def test_one_bad_module_and_none_is_published(built, tmp_path, capsys):
    artifacts = built[1]
    files = {
        f"{a.name}/{n}": d
        for a in artifacts
        for n, d in (("library.so", a.path.read_bytes()), ("manifest.json", json.dumps(a.manifest).encode()))
    }
    files["two/manifest.json"] = b"{}"
    put_together(
        tmp_path / "half.tar", [(info("index.json"), index_of(files)), *((info(n), files[n]) for n in sorted(files))]
    )
    assert main(["import", str(tmp_path / "half.tar"), "--to", str(tmp_path / "image")]) == 1
    assert "two: the manifest lacks fields" in capsys.readouterr().err and os.listdir(tmp_path / "image") == []


def test_an_archive_that_others_can_write_is_refused(exported, tmp_path, capsys):
    exported.chmod(0o666)
    assert main(["import", str(exported), "--to", str(tmp_path / "image")]) == 1
    assert "can be written by everybody" in capsys.readouterr().err and not (tmp_path / "image").exists()


def test_a_directory_that_others_can_write_is_refused(exported, tmp_path, capsys):
    (tmp_path / "image").mkdir()
    (tmp_path / "image").chmod(0o777)
    assert main(["import", str(exported), "--to", str(tmp_path / "image")]) == 1
    assert "nothing in it would be loaded" in capsys.readouterr().err and os.listdir(tmp_path / "image") == []


def test_no_archive_at_all(tmp_path, capsys):
    assert main(["import", str(tmp_path / "none.tar")]) == 1
    assert "cannot be imported" in capsys.readouterr().err
    (tmp_path / "text.tar").write_text("hello " * 1000)
    assert main(["import", str(tmp_path / "text.tar")]) == 1
    assert "is damaged or not an archive" in capsys.readouterr().err


def test_long_names_fit(tmp_path):
    name = "m" * 128
    files = {f"{name}/{kind}": tar.File.of(kind.encode()) for kind in ("library.so", "manifest.json")}
    tar.pack(tmp_path / "long.tar", files)
    (tmp_path / "out").mkdir()
    assert tar.unpack(tmp_path / "long.tar", tmp_path / "out") == [name]
    assert (tmp_path / "out" / name / f"{name}.so").read_bytes() == b"library.so"


def test_an_export_that_is_killed_leaves_the_old_archive(exported, built, tmp_path, monkeypatch):
    before = exported.read_bytes()
    monkeypatch.setattr(
        tarfile.TarFile, "addfile", lambda *_: (_ for _ in ()).throw(OSError(28, "No space left on device"))
    )
    assert main(["export", str(exported)]) == 1
    assert exported.read_bytes() == before and os.listdir(exported.parent).count("modules.tar") == 1
    assert not list(exported.parent.glob(".modules*"))
