"""Nothing that another user can write is loaded."""

from __future__ import annotations

import grp
import os
import pwd
import shutil
from collections import namedtuple

import pytest

from flashinfer.errors import ArtifactError
from flashinfer.jit.artifact import MANIFEST, verified
from flashinfer.jit.machine import trust
from flashinfer.jit.machine.workspace import workspace as get_workspace
from flashinfer.jit.resolve import look_up

SOMEBODY = 12345  # neither root nor the user of the tests nor the owner of the package
PLACES = {
    "the library": lambda d: d / "tiny.so",
    "the manifest": lambda d: d / MANIFEST,
    "its directory": lambda d: d,
    "the directory of its key": lambda d: d.parents[0],
    "the directory of its name": lambda d: d.parents[1],
    "artifacts": lambda d: d.parents[2],
    "the workspace": lambda d: d.parents[3],
}


@pytest.fixture
def built(make_spec):
    spec = make_spec()
    return spec, spec.build()


def test_the_list_of_checked_paths_is_complete(built, workspace):
    assert PLACES["the workspace"](built[1].directory) == workspace


@pytest.mark.parametrize("place", PLACES.values(), ids=PLACES)
@pytest.mark.parametrize("right, who", [(0o020, "by group"), (0o002, "by everybody")], ids=["group", "others"])
def test_paths_that_others_can_write_are_refused(built, place, right, who):
    spec, artifact = built
    path = place(artifact.directory)
    mode = path.stat().st_mode
    path.chmod(mode | right)
    lookup = look_up(spec)
    assert lookup.artifact is None and f"{path} can be written {who}" in lookup.reason
    path.chmod(mode)
    assert look_up(spec).artifact == artifact


@pytest.mark.parametrize("place", PLACES.values(), ids=PLACES)
def test_paths_of_another_user_are_refused(built, place, monkeypatch):
    """Check each path separately. The owner is that of ``stat``, whatever user runs the test."""
    spec, artifact = built
    stolen = place(artifact.directory).stat()
    real = trust.refusal

    def refusal(path, status=None):
        status = status or os.stat(path)
        if (status.st_dev, status.st_ino) == (stolen.st_dev, stolen.st_ino):
            status = os.stat_result((*status[:4], SOMEBODY, *status[5:10]))
        return real(path, status)

    monkeypatch.setattr(trust, "refusal", refusal)
    lookup = look_up(spec)
    assert lookup.artifact is None and f"belongs to user {SOMEBODY}, neither to root nor to this user" in lookup.reason


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")
@pytest.mark.parametrize("place", PLACES.values(), ids=PLACES)
def test_paths_given_to_another_user_are_refused(built, place):
    spec, artifact = built
    os.chown(place(artifact.directory), SOMEBODY, -1)
    assert f"belongs to user {SOMEBODY}" in look_up(spec).reason and look_up(spec).artifact is None


def test_another_user_is_not_served(built, monkeypatch):
    """A user who owns neither these files nor the package accepts only root's files."""
    spec, artifact = built
    monkeypatch.setattr(os, "geteuid", lambda: SOMEBODY)
    monkeypatch.setattr(trust, "code_directories", lambda: (status(uid=0),))
    owner = artifact.path.stat().st_uid
    assert (look_up(spec).artifact == artifact) == (owner == 0)
    assert trust.refusal("x", status(uid=SOMEBODY)) is None and trust.refusal("x", status(uid=0)) is None
    assert "x belongs to user 777, neither to root nor to this user (12345)" in trust.refusal("x", status(uid=777))


def status(uid: int = 0, gid: int = 0, mode: int = 0o755) -> os.stat_result:
    return os.stat_result((mode, 1, 1, 1, uid, gid, 0, 0, 0, 0))


def test_the_owner_of_the_package_is_trusted(monkeypatch):
    """An administrator's account installed the environment, so its code runs here anyway."""
    monkeypatch.setattr(trust, "code_directories", lambda: (status(uid=SOMEBODY),))
    assert trust.refusal("x", status(uid=SOMEBODY)) is None
    monkeypatch.setattr(trust, "code_directories", lambda: (status(uid=0),))
    assert "belongs to" in trust.refusal("x", status(uid=SOMEBODY))


def test_groups_that_may_write(monkeypatch):
    group = namedtuple("group", "gr_name gr_mem")
    names = {1000: "me", 2000: "staff"}
    members = {"me": [], "staff": []}
    monkeypatch.setattr(grp, "getgrgid", lambda gid: group(names[gid], members[names[gid]]))
    monkeypatch.setattr(pwd, "getpwuid", lambda uid: namedtuple("user", "pw_name")(names[uid]))
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert trust.refusal("x", status(1000, 1000, 0o775)) is None, "umask 002, and the user's own group"
    members["me"] = ["me"]
    assert trust.refusal("x", status(1000, 1000, 0o775)) is None
    members["me"] = ["me", "friend"]
    assert "by group 1000" in trust.refusal("x", status(1000, 1000, 0o775))
    assert "by group 2000" in trust.refusal("x", status(1000, 2000, 0o775))
    assert "by group 3000" in trust.refusal("x", status(1000, 3000, 0o775)), "its members are unknown"
    assert "by group 0" in trust.refusal("x", status(0, 0, 0o775))
    monkeypatch.setattr(trust, "code_directories", lambda: (status(0, 2000, 0o775),))
    assert trust.refusal("x", status(1000, 2000, 0o775)) is None, "its members can write this package's code"
    monkeypatch.setattr(trust, "code_directories", lambda: (status(0, 2000, 0o755),))
    assert "by group 2000" in trust.refusal("x", status(1000, 2000, 0o775))


@pytest.mark.parametrize("umask", [0o000, 0o002, 0o022, 0o077])
def test_builds_with_any_umask_are_accepted(make_spec, workspace, umask):
    spec = make_spec()
    before = os.umask(umask)
    try:
        artifact = spec.build()
    finally:
        os.umask(before)
    assert look_up(spec).artifact == artifact
    open_to_others = [path for path in [workspace, *workspace.rglob("*")] if path.stat().st_mode & 0o022]
    assert not open_to_others


def test_objects_are_not_left_where_others_can_write(make_spec, workspace):
    make_spec("before").build()
    (workspace / "build").chmod(0o777)
    with pytest.warns(UserWarning, match=rf"{workspace / 'build'} can be written by everybody"):
        assert not make_spec().build().path.is_relative_to(workspace)


@pytest.mark.parametrize("mode", [0o777, 0o1777, 0o2775])
def test_a_workspace_of_everybody_holds_a_directory_per_user(make_spec, workspace, mode, compilers_started):
    """As in a volume mounted with mode 0777: the build stays, and no other user can have made it."""
    workspace.mkdir()
    workspace.chmod(mode)
    spec, mine = make_spec(), workspace / f"user-{os.geteuid()}"
    artifact = spec.build()
    assert artifact.path.is_relative_to(mine) and os.listdir(workspace) == [mine.name]
    assert look_up(spec).artifact == artifact == spec.build() and compilers_started() == 1
    mine.chmod(0o777)
    lookup = look_up(spec)
    assert lookup.artifact is None and f"{mine} can be written by everybody" in lookup.reason
    assert f"{workspace} can be written by" in lookup.reason and f"so {mine} is used" in lookup.reason
    with pytest.warns(UserWarning, match=rf"{mine} cannot be written .* can be written by everybody"):
        assert not get_workspace().is_relative_to(workspace)


def test_a_sticky_directory_of_everybody_may_hold_the_workspace(make_spec, tmp_path, monkeypatch):
    (tmp_path / "everybody").mkdir()
    (tmp_path / "everybody").chmod(0o1777)
    monkeypatch.setenv("FLASHINFER_WORKSPACE_DIR", str(tmp_path / "everybody" / "mine"))
    spec = make_spec()
    assert spec.build() == look_up(spec).artifact


def test_an_aot_directory_that_others_can_write(built, tmp_path):
    spec, artifact = built
    shutil.copytree(artifact.directory, tmp_path / "aot" / "tiny")
    assert look_up(spec).artifact.directory == tmp_path / "aot" / "tiny"
    (tmp_path / "aot").chmod(0o777)
    assert look_up(spec).artifact == artifact
    assert f"{tmp_path / 'aot'} can be written by everybody" in " ".join(look_up(spec).reasons)


def test_the_file_that_is_hashed_is_the_one_that_is_checked(built):
    """A library passes ``read`` and is made writable afterwards."""
    _, artifact = built
    artifact.path.chmod(0o666)
    with pytest.raises(ArtifactError, match=r"tiny\.so can be written by everybody"), verified(artifact):
        raise AssertionError("it was opened")
    artifact.path.unlink()
    with pytest.raises(ArtifactError, match=r"tiny\.so: No such file"), verified(artifact):
        raise AssertionError("it was opened")
    os.mkfifo(artifact.path, 0o600)
    with pytest.raises(ArtifactError, match="damaged"), verified(artifact):
        raise AssertionError("a pipe is no library, and must not be waited for")
