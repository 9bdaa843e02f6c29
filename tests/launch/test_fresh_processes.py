"""Calls of each operator in a fresh process, where no earlier call has raised a shared memory limit."""

from __future__ import annotations

import sys
from collections.abc import Callable

import pytest
import torch

from ..support.processes import end, start
from ..support.samples import attention_cases, public_cases

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="wanted a GPU")
BORDERS = (9216, 9217, 9728, 9729, 18432, 18433, 19456, 19457, 641_025, 655_360)  # lengths of rows, with static bytes
ROWS = ("softmax", "top_p_renorm_probs", "top_k_renorm_probs", "top_k_mask_logits", "sampling_from_probs",
        "sampling_from_logits", "top_p_sampling_from_probs", "top_k_sampling_from_probs",
        "min_p_sampling_from_probs", "chain_speculative_sampling", "top_k")  # fmt: skip
CHILD = "from tests.launch.test_fresh_processes import main; main()"


def call_case(name: str) -> None:
    case = {**public_cases("cuda"), **attention_cases("cuda")}[name]
    case.function(**case.arguments(9))


def call_rows(name: str) -> None:
    """Call a function of sampling with four rows of a length, and compare distributions with float64."""
    import flashinfer

    function, length = name.split()
    logits = torch.randn(4, int(length), device="cuda")
    probs = logits.softmax(-1)
    if function == "softmax":
        got, want = flashinfer.sampling.softmax(logits), logits.double().softmax(-1)
        torch.testing.assert_close(got.double(), want, rtol=1e-4, atol=1e-9)
    elif function == "top_p_renorm_probs":
        got = flashinfer.sampling.top_p_renorm_probs(probs, 0.5)
        torch.testing.assert_close(got.sum(-1), torch.ones(4, device="cuda"), rtol=1e-4, atol=0)
        assert bool(((got > 0).sum(-1) < int(length)).all())
    elif function == "top_k_renorm_probs":
        got = flashinfer.sampling.top_k_renorm_probs(probs, 3000)
        torch.testing.assert_close(got.sum(-1), torch.ones(4, device="cuda"), rtol=1e-4, atol=0)
    elif function == "top_k_mask_logits":
        got = flashinfer.sampling.top_k_mask_logits(logits, 3000)
        assert bool(((got > -torch.inf).sum(-1) >= 3000).all())
    elif function == "top_k":
        values, _ = flashinfer.sampling.top_k(probs, 7)
        assert torch.equal(values.sort().values, probs.topk(7).values.sort().values)
    elif function == "chain_speculative_sampling":
        ids = torch.zeros(2, 1, dtype=torch.int32, device="cuda")
        tokens = flashinfer.sampling.chain_speculative_sampling(probs[:2, None], ids, probs.view(2, 2, -1))[0]
        assert bool((tokens < int(length)).all())
    else:
        limit = {
            "top_p_sampling_from_probs": (0.5,),
            "top_k_sampling_from_probs": (3000,),
            "min_p_sampling_from_probs": (0.1,),
        }
        rows = logits if function == "sampling_from_logits" else probs
        drawn = getattr(flashinfer.sampling, function)(rows, *limit.get(function, ()))
        assert bool((drawn >= 0).all() and (drawn < int(length)).all())


def main() -> None:
    """Run each call that the arguments name in a fork of this process, which never touches the GPU itself."""
    import os

    kind = sys.argv[1]
    for name in sys.argv[2:]:
        child = os.fork()
        if child == 0:
            try:
                (call_rows if kind == "rows" else call_case)(name)
                torch.cuda.synchronize()
            except BaseException as error:
                print(f"{name}: {type(error).__name__}: {error}", flush=True)
                os._exit(1)
            os._exit(0)
        os.waitpid(child, 0)
    print("done", flush=True)


def in_fresh_processes(kind: str, names: list[str]) -> str:
    return end(start(CHILD, kind, *names, PYTHONWARNINGS="ignore", PYTORCH_NVML_BASED_CUDA_CHECK="1"), 3600)


@pytest.mark.parametrize(
    ("kind", "names"),
    [
        ("case", lambda: [*public_cases("cpu"), *attention_cases("cpu")]),
        ("rows", lambda: [f"{name} {length}" for name in ROWS for length in BORDERS]),
    ],
    ids=["cases", "rows"],
)
def test_first_call_of_a_process(kind: str, names: Callable[[], list[str]]) -> None:
    assert in_fresh_processes(kind, names()) == "done\n"
