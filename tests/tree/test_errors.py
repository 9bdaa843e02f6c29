"""Errors: one base class, and every error can be sent from a worker to its parent."""

from __future__ import annotations

import inspect
import pickle
import traceback
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import pytest

from flashinfer import errors
from flashinfer.errors import (
    BuildError,
    DependencyError,
    EnvironmentValueError,
    FlashInferError,
    JitFrozenError,
    ReentrantBuildError,
)

KINDS = [kind for _, kind in inspect.getmembers(errors, inspect.isclass) if issubclass(kind, FlashInferError)]
ARGUMENTS = {
    DependencyError: ("transformers", "cannot be imported", "transformers"),
    EnvironmentValueError: ("CXX", "x y", "a program"),
    ReentrantBuildError: ("norm_cpu",),
    JitFrozenError: ("norm_cpu", "freeze()", "nothing there", "rmsnorm", tuple(traceback.extract_stack())),
}


def make(kind: type[FlashInferError]) -> FlashInferError:
    builds = issubclass(kind, BuildError)
    return kind(
        *ARGUMENTS.get(kind, ("norm_cpu", "no such file", "g++", "error", Path("log")) if builds else ("said",))
    )


@pytest.mark.parametrize("kind", KINDS)
def test_pickled(kind):
    error = make(kind)
    again = pickle.loads(pickle.dumps(error))
    assert type(again) is kind and str(again) == str(error) and vars(again) == vars(error)
    assert isinstance(again, RuntimeError)


def fail(kind):
    raise make(kind)


def test_raised_in_a_worker():
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        with pytest.raises(JitFrozenError, match="module 'norm_cpu' is not built") as caught:
            pool.submit(fail, JitFrozenError).result()
        assert caught.value.reason == "nothing there" and caught.value.stack
        assert pool.submit(len, "still works").result() == 11
