"""Fixtures of all tests: one test body serves every device of this machine."""

from __future__ import annotations

import atexit
import contextlib
import os
import random
import shutil
import tempfile
from collections.abc import Iterator

# Threads of a parallel loop sleep while they wait. With one test worker per CPU, a spinning thread would take the CPU
# of the thread that all others wait for. libgomp reads this when torch is loaded, and children inherit it.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
# NVLink multicast stays off, also in children. torch, NCCL and NVSHMEM read these when they are loaded.
os.environ.update(NCCL_NVLS_ENABLE="0", TORCH_SYMM_MEM_DISABLE_MULTICAST="1", NVSHMEM_DISABLE_NVLS="1")
# Streams act as ranks that wait for each other: two of them must not share a hardware queue.
os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")

import hypothesis
import pytest
import torch

from .support.slow import IN_CI, mark_beyond

DEVICES = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]
DTYPES = [torch.float32, torch.float16, torch.bfloat16]


@pytest.hookimpl(tryfirst=True)  # before pytest looks for its temporary directory
def pytest_configure(config: pytest.Config) -> None:
    """Give the session directories of its own: Inductor's cache and pytest's temporary files.

    The session's workers share the cache, because Inductor compiles torch's headers once per cache, in ten
    seconds. Another run of pytest would close the common temporary directory to other users, which tests become.
    """
    if not hasattr(config, "workerinput"):
        folder = tempfile.mkdtemp(prefix="flashinfer-tests-", dir=os.environ.get("PYTEST_DEBUG_TEMPROOT"))
        atexit.register(shutil.rmtree, folder, ignore_errors=True)
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = os.path.join(folder, "inductor")
        os.environ["PYTEST_DEBUG_TEMPROOT"] = folder
    # On a busy machine an example may wait for a CPU, and ten examples may take a second to draw.
    hypothesis.settings.register_profile(
        "busy machines", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow]
    )
    hypothesis.settings.load_profile("busy machines")


@pytest.hookimpl(tryfirst=True)  # before -m selects by markers
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out slow cases unless CI, a GPU, an expression of ``-m`` or the name of a test asks for them."""
    mark_beyond(items)
    if IN_CI or DEVICES != ["cpu"] or config.option.markexpr or any("::" in argument for argument in config.args):
        return
    slow = [item for item in items if item.get_closest_marker("slow") is not None]
    if slow:
        config.hook.pytest_deselected(items=slow)
        items[:] = [item for item in items if item.get_closest_marker("slow") is None]


@pytest.hookimpl(optionalhook=True)  # exists only with pytest-xdist
def pytest_xdist_auto_num_workers() -> int | None:
    """Return the number of CPUs plus one, because some tests wait for a minute until other processes give up."""
    return None if "PYTEST_XDIST_AUTO_NUM_WORKERS" in os.environ else len(os.sched_getaffinity(0)) + 1


@pytest.fixture(params=DEVICES)
def device(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(params=DTYPES, ids=lambda dtype: str(dtype).removeprefix("torch."))
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    return request.param  # type: ignore[no-any-return]


@pytest.fixture(autouse=True)
def fresh_seed(record_property: pytest.FixtureRequest) -> int:
    """Draw new inputs in every run. A failure prints the seed, and FLASHINFER_TEST_SEED repeats it."""
    seed = int(os.environ.get("FLASHINFER_TEST_SEED", random.SystemRandom().randrange(2**31)))
    print(f"FLASHINFER_TEST_SEED={seed}")
    torch.default_generator.manual_seed(seed)  # torch.manual_seed() formats a stack trace without a GPU
    if "cuda" in DEVICES:
        torch.cuda.manual_seed_all(seed)
    random.seed(seed)
    return seed


@pytest.fixture
def cold_dynamo() -> Iterator[None]:
    """Reset torch.compile and its counters before the test."""
    from torch._dynamo.utils import counters

    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()


@contextlib.contextmanager
def no_synchronisation(device: str) -> Iterator[None]:
    """Raise an error if code in the context waits for the GPU."""
    if device != "cuda":
        yield
        return
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")
