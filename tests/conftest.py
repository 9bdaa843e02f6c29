"""One test body serves every device this machine has."""

from __future__ import annotations

import atexit
import contextlib
import os
import random
import shutil
import tempfile
from collections.abc import Iterator

# Threads of a parallel loop sleep where they wait for the others: a worker for each CPU has no CPU to spare, and one that
# spins keeps from it the thread that all wait for. libgomp reads this when torch is loaded; children inherit it.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import hypothesis
import pytest
import torch

from .support.drawn import IN_CI

DEVICES = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]
DTYPES = [torch.float32, torch.float16, torch.bfloat16]


def pytest_configure(config: pytest.Config) -> None:
    """Inductor's cache is this session's own: in one that other runs share, what is found and who holds a lock is theirs.

    Its workers share it: Inductor compiles torch's headers once before its first kernel, which takes ten seconds.
    """
    if not hasattr(config, "workerinput"):
        folder = tempfile.mkdtemp(prefix="inductor-")
        atexit.register(shutil.rmtree, folder, ignore_errors=True)
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = folder
        os.environ["FLASHINFER_TEST_DRAW"] = str(random.randrange(2**31))  # workers draw the same cases
    # An example that waits for a CPU is no failure, nor are ten that take a second to draw.
    hypothesis.settings.register_profile(
        "busy machines", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow]
    )
    hypothesis.settings.load_profile("busy machines")


@pytest.hookimpl(trylast=True)  # of what a person selected
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Of a test marked ``drawn(count)`` so many cases run on a desk, others in another run; in CI and on a GPU all do."""
    cases: dict[str, list[pytest.Item]] = {}
    for item in items:
        if not IN_CI and DEVICES == ["cpu"] and item.get_closest_marker("drawn") is not None:
            cases.setdefault(item.nodeid.partition("[")[0], []).append(item)
    chance, passed_over = random.Random(os.environ["FLASHINFER_TEST_DRAW"]), set[pytest.Item]()
    for all_of_one in cases.values():
        (count,) = all_of_one[0].get_closest_marker("drawn").args  # type: ignore[union-attr]
        passed_over.update(chance.sample(all_of_one, max(0, len(all_of_one) - count)))
    if passed_over:
        config.hook.pytest_deselected(items=list(passed_over))
        items[:] = [item for item in items if item not in passed_over]


@pytest.hookimpl(optionalhook=True)  # pytest knows none of this name where pytest-xdist is not
def pytest_xdist_auto_num_workers() -> int | None:
    """One more than there are CPUs: some tests wait for a minute until other processes give up."""
    return None if "PYTEST_XDIST_AUTO_NUM_WORKERS" in os.environ else len(os.sched_getaffinity(0)) + 1


@pytest.fixture(params=DEVICES)
def device(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(params=DTYPES, ids=lambda dtype: str(dtype).removeprefix("torch."))
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    return request.param  # type: ignore[no-any-return]


@pytest.fixture(autouse=True)
def fresh_seed(record_property: pytest.FixtureRequest) -> int:
    """Inputs are new in every run; the seed is printed with a failure and FLASHINFER_TEST_SEED repeats it."""
    seed = int(os.environ.get("FLASHINFER_TEST_SEED", random.SystemRandom().randrange(2**31)))
    print(f"FLASHINFER_TEST_SEED={seed}")
    torch.manual_seed(seed)
    random.seed(seed)
    return seed


@pytest.fixture
def cold_dynamo() -> Iterator[None]:
    """torch.compile has seen nothing before the test, and its counters are at 0."""
    from torch._dynamo.utils import counters

    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()


@contextlib.contextmanager
def no_synchronisation(device: str) -> Iterator[None]:
    """Whatever waits for the GPU within is an error."""
    if device != "cuda":
        yield
        return
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")
