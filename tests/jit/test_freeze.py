"""Freezes: nothing is compiled, existing modules work, and the error names the caller."""

from __future__ import annotations

import os
import threading

import pytest

import flashinfer
from flashinfer.errors import FlashInferError, JitFrozenError
from flashinfer.jit import build_jit_specs, freeze
from flashinfer.jit.load import load
from flashinfer.jit.resolve import look_up


def test_the_function(make_spec, compilers_started):
    spec = make_spec()
    frozen = freeze()
    try:
        for ask in (spec.build, spec.build_and_load, lambda: build_jit_specs([spec]), lambda: load(spec, {})):
            with pytest.raises(
                JitFrozenError, match=r"module 'tiny' is not built and flashinfer\.jit\.freeze\(\) forbids"
            ):
                ask()
    finally:
        frozen.thaw()
    assert compilers_started() == 0 and spec.build().path.exists() and compilers_started() == 1


def test_the_context_ends_with_the_block(make_spec):
    spec = make_spec()
    with pytest.raises(ZeroDivisionError), freeze():
        raise ZeroDivisionError
    spec.build()


def test_contexts_nest_and_end_independently(make_spec):
    spec = make_spec()
    with freeze() as outer:
        with freeze():
            pass
        with pytest.raises(JitFrozenError):
            spec.build()
        inner = freeze()
        outer.thaw()
        outer.thaw()
        with pytest.raises(JitFrozenError):
            spec.build()
        inner.thaw()
        spec.build()


def test_hits_of_every_kind_still_work(make_spec, tmp_path):
    """Loaded and prebuilt modules, those of the workspace, and those that cover more are hits."""
    wide = make_spec("frozen_wide", coverage={"dtype": ["float16", "bfloat16"], "head_dim": [64, 128]})
    cached, ahead, loaded = (make_spec(f"frozen_{name}") for name in ("cached", "ahead", "loaded"))
    artifacts = build_jit_specs([wide, cached, ahead, loaded])
    artifacts[2].directory.rename((tmp_path / "aot").mkdir() or tmp_path / "aot" / ahead.name)
    loaded.build_and_load()
    narrow = wide.covering({"dtype": ["float16"], "head_dim": [128]})
    with freeze():
        for spec in (cached, ahead, loaded):
            spec.build_and_load()
        assert build_jit_specs([cached, ahead])[1].path.is_relative_to(tmp_path / "aot")
        assert narrow.key != wide.key and look_up(narrow).artifact == artifacts[0]
        narrow.build_and_load()


def a_users_function(spec):
    return spec.build()


def test_the_error_names_module_reason_and_stack(make_spec):
    first, spec = make_spec(), make_spec(extra_cflags=["-DNEW"])
    first.build()
    with freeze(), pytest.raises(JitFrozenError) as caught:
        a_users_function(spec)
    error, text = caught.value, str(caught.value)
    assert isinstance(error, FlashInferError) and error.name == "tiny"
    assert (
        "1 artifact of this name in the workspace was built from other source files, flags or configuration"
        in error.reason
    )
    assert text.splitlines()[0].endswith(error.reason)
    innermost = error.stack[-1]
    assert (innermost.name, os.path.basename(innermost.filename)) == ("a_users_function", "test_freeze.py")
    assert text.splitlines()[-1].endswith("in a_users_function: return spec.build()")
    assert "requested by build(), called at" in text
    package = os.path.dirname(flashinfer.__file__)
    assert not [frame for frame in error.stack if frame.filename.startswith(package)]


def test_the_stack_of_an_operator(python):
    """The stack names the public function although torch's dispatcher calls the operator."""
    program = """
        import torch, flashinfer
        flashinfer.jit.env.default_aot_dir = lambda: flashinfer.jit.env.Path("/nowhere")

        def serve():
            return flashinfer.silu_and_mul(torch.randn(2, 8))

        flashinfer.jit.freeze()
        try:
            serve()
        except flashinfer.errors.JitFrozenError as err:
            print(err)
    """
    lines = python(program).stdout.splitlines()
    assert lines[0].startswith(
        "module 'activation_silu_cpu' is not built and flashinfer.jit.freeze() forbids building it"
    )
    assert lines[1] == "  requested by silu_and_mul(), called at" and " in serve: " in lines[-1]


def test_the_variable(make_spec, monkeypatch):
    spec = make_spec()
    monkeypatch.setenv("FLASHINFER_DISABLE_JIT", "1")
    with pytest.raises(
        JitFrozenError, match="FLASHINFER_DISABLE_JIT forbids building it: no artifact of that name is in"
    ):
        spec.build()
    with freeze(), pytest.raises(JitFrozenError, match=r"freeze\(\) forbids"):
        spec.build()


def test_every_thread_is_frozen(make_spec, compilers_started):
    """Threads freeze, load and unfreeze at once. No compiler starts while any of them holds a freeze."""
    spec, refused, start = make_spec(), [], threading.Barrier(8)

    def ask():
        start.wait()
        for _ in range(20):
            with freeze():
                try:
                    spec.build()
                except JitFrozenError as err:
                    refused.append(err.stack[-1].name)

    threads = [threading.Thread(target=ask) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert refused == ["ask"] * 160 and compilers_started() == 0
    assert spec.build().path.exists(), "all freezes have ended"


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")  # torch has threads
def test_a_forked_child_is_frozen_too(make_spec):
    spec = make_spec()
    with freeze():
        child = os.fork()
        if child == 0:
            try:
                spec.build()
                os._exit(1)
            except JitFrozenError:
                os._exit(7)
            finally:
                os._exit(2)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
