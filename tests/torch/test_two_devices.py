"""Tests on a GPU that is not the current one. Every function and wrapper gives the results of the CPU's kernels there.

Tests of the families compare those with float64. State per device is tested without a GPU, with a small CUDA runtime.
"""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch

from ..support.attention_samples import own_variants, samples
from ..support.samples import attention_cases, public_cases

ROOT = Path(__file__).resolve().parents[2]
OTHER = "cuda:1"
TOLERANCE = {torch.float16: dict(rtol=4e-3, atol=4e-3), torch.float32: dict(rtol=2e-5, atol=2e-5)}
WITH_LSE = TOLERANCE | {torch.float32: dict(rtol=0, atol=1e-3)}
FUNCTIONS, WRAPPERS = list(public_cases("cpu")), list(samples("cpu"))
OWN = ["single_prefill_with_kv_cache_with_jit_module", "single_decode_with_kv_cache_with_jit_module"]

needs_two = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")


@pytest.fixture(autouse=True)
def the_first_is_current():
    yield
    assert not torch.cuda.is_available() or torch.cuda.current_device() == 0


def moved(arguments: dict[str, Any]) -> dict[str, Any]:
    return {name: one.to(OTHER, copy=True) if torch.is_tensor(one) else one for name, one in arguments.items()}


def outcome(function: Any, arguments: dict[str, Any]) -> list[torch.Tensor]:
    """Return the results of a call, and its arguments, which it may have written."""
    result = function(**arguments)
    results = [] if result is None else [result] if torch.is_tensor(result) else list(result)
    return [*results, *(one for one in arguments.values() if torch.is_tensor(one))]


def assert_alike(got: list[torch.Tensor], want: list[torch.Tensor], tolerances: Any = TOLERANCE) -> None:
    assert got and len(got) == len(want)
    for one, other in zip(got, want, strict=True):
        assert one.device == torch.device(OTHER)
        if one.dtype == torch.bfloat16:  # a sum near the middle of two numbers rounds to either: a step of 2^-8
            here = one.to(other.device).double()
            assert (here - other.double()).norm() <= 2**-8 * other.double().norm()
            continue
        tolerance = tolerances.get(one.dtype, dict(rtol=0, atol=0))
        torch.testing.assert_close(one.to(other.device), other, equal_nan=True, **tolerance)


@needs_two
@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_function(name):
    here, there = (public_cases(device)[name] for device in ("cpu", OTHER))
    arguments = here.arguments(9)
    there_too = moved(arguments)
    assert_alike(outcome(there.function, there_too), outcome(here.function, arguments))


@needs_two
@pytest.mark.parametrize("name", WRAPPERS)
@pytest.mark.parametrize("size", [5, 23])
def test_attention(name, size, fresh_seed):
    here, there = (samples(device)[name] for device in ("cpu", OTHER))
    for one in (here, there):  # plans draw equal tables
        torch.manual_seed(fresh_seed)
        one.plan(size)
    arguments = here.inputs(size)
    assert_alike(outcome(there.function, moved(arguments)), outcome(here.function, arguments), WITH_LSE)


@needs_two
@pytest.mark.parametrize("name", OWN)
def test_a_variant_of_a_user(name):
    here, there = (own_variants(device)[name] for device in ("cpu", OTHER))
    arguments = here.inputs(5)
    assert_alike(outcome(there.function, moved(arguments)), outcome(here.function, arguments))


@needs_two
@pytest.mark.parametrize("name", ["single_prefill_with_kv_cache", "BatchPrefillWithRaggedKVCacheWrapper.run"])
def test_gradients(name):
    case = attention_cases(OTHER)[name]
    leaves = {key: one.requires_grad_() for key, one in case.arguments(9).items()}
    out = case.function(**leaves)
    weights = torch.randn(out.shape).to(out)
    got = torch.autograd.grad(out, [leaves[key] for key in case.differentiable], weights)
    case = attention_cases("cpu")[name]
    leaves = {key: one.detach().cpu().float().requires_grad_() for key, one in leaves.items()}
    out = case.function(**leaves)
    want = torch.autograd.grad(out, [leaves[key] for key in case.differentiable], weights.cpu().float())
    for one, other in zip(got, want, strict=True):
        assert one.device == torch.device(OTHER)
        assert (one.cpu().float() - other).norm() < 5e-3 * other.norm()


@needs_two
def test_alternating_devices():
    """A kernel that is prepared on one device is also prepared on the other."""
    for device in ("cuda:0", OTHER, "cuda:0", OTHER):
        for name in ("single_prefill_with_kv_cache", "BatchPrefillWithRaggedKVCacheWrapper"):
            sample, cpu = samples(device)[name], samples("cpu")[name]
            for one in (sample, cpu):
                one.plan(40)
            inputs = cpu.inputs(40)
            given = {key: one.to(device) for key, one in inputs.items()}
            for one, other in zip(outcome(sample.function, given), outcome(cpu.function, inputs), strict=True):
                torch.testing.assert_close(one.cpu(), other, **WITH_LSE[one.dtype])


# A runtime with three devices. Each thread has a current one.
RUNTIME = r"""#pragma once
enum cudaError_t { cudaSuccess, cudaErrorInvalidDevice };
cudaError_t cudaGetDevice(int* device);
cudaError_t cudaSetDevice(int device);
const char* cudaGetErrorString(cudaError_t);
"""
PROGRAM = r"""
#undef NDEBUG
#include <cassert>
#include <cstdio>
#include <cstring>
#include <vector>

#include <flashinfer/cuda/host/per_device.cuh>

thread_local int current = 0;
cudaError_t cudaGetDevice(int* device) { *device = current;
  return cudaSuccess; }
cudaError_t cudaSetDevice(int device) {
  if (device >= 3) return cudaErrorInvalidDevice;
  return current = device, cudaSuccess;
}
const char* cudaGetErrorString(cudaError_t) { return "no such device"; }

int main() {
  flashinfer::cuda::PerDevice<int> found;
  int looks[3] = {};
  const auto find = [&](int device) {
    assert(current == device);  // what is set now is this device's
    return 100 * device + ++looks[device];
  };
  std::vector<std::thread> threads;
  for (int i = 0; i < 24; ++i)
    threads.emplace_back([&, i] {
      current = i / 3 % 3;
      assert(found.get(i % 3, find) == 100 * (i % 3) + 1 && current == i / 3 % 3);
    });
  for (std::thread& one : threads) one.join();
  for (const int count : looks) assert(count == 1);

  flashinfer::cuda::PerDevice<int> other;
  for (const int device : {-1, 64, 3}) {  // 64 and 3: the runtime refuses
    try {
      other.get(device, find);
      assert(false);
    } catch (const std::runtime_error& error) {
      std::puts(error.what());
    }
  }
  int tries = 0;
  const auto fail_once = [&](int) {
    if (++tries == 1) throw std::runtime_error("once");
    return tries;
  };
  try {
    other.get(1, fail_once);
    assert(false);
  } catch (const std::runtime_error& error) {
    assert(std::strcmp(error.what(), "once") == 0 && current == 0);
  }
  assert(other.get(1, fail_once) == 2 && other.get(1, fail_once) == 2);
}
"""


@pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")
def test_state_per_device(tmp_path):
    source, program = tmp_path / "program.cc", tmp_path / "program"
    source.write_text(PROGRAM)
    (tmp_path / "cuda_runtime.h").write_text(RUNTIME)
    words = ["g++", "-std=c++17", "-pthread", f"-I{ROOT / 'include'}", f"-I{tmp_path}", str(source), "-o", str(program)]
    subprocess.run(words, check=True)
    done = subprocess.run([str(program)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [
        "device: got -1, wanted 0 or more",
        "cudaSetDevice: no such device",
        "cudaSetDevice: no such device",
    ]
