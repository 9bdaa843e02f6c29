"""Selection of prefill's kernels: portable, for Hopper, or an error with the reason."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import flashinfer
from flashinfer._attention import kernels
from flashinfer._attention.kernels import CallProperties, choose
from flashinfer.jit.modules import Matrix, family
from flashinfer.jit.modules.prefill import gen_batch_prefill_module
from flashinfer.utils import determine_attention_backend, is_fa3_backend_supported
from tests.support.attention_oracle import indptr_of, workspace

BF16, E4M3 = torch.bfloat16, torch.float8_e4m3fn
SERVED = CallProperties("prefill", torch.device("cuda:0"), (BF16, BF16, BF16), (128, 128), 0, False, 1, 4)
NOT_SERVED = [
    (dict(device=torch.device("cpu")), "got tensors on cpu, wanted a GPU of compute capability 9.0"),
    (dict(dtypes=(BF16, E4M3, BF16)), "got torch.float8_e4m3fn keys and torch.bfloat16 queries"),
    (dict(dtypes=(E4M3, E4M3, BF16), head_dims=(192, 128)), "got head_dims (192, 128) of torch.float8_e4m3fn"),
    (dict(pos_encoding_mode=1), "got pos_encoding_mode 'ROPE_LLAMA', wanted 'NONE' or 'ALIBI'"),
    (dict(mask_mode=2), "got a custom mask, wanted no mask, a causal one or multi-item scoring"),
    (dict(group=65), "got 65 query heads for a key head, wanted at most 64"),
]


@pytest.fixture
def hopper(monkeypatch):
    """Simulate a machine with a Hopper GPU."""
    monkeypatch.setattr(kernels, "capability", lambda device: (9, 0))
    monkeypatch.setattr(kernels, "can_be_loaded", lambda *_: True)


@pytest.mark.parametrize(
    "change",
    [{}, dict(mask_mode=0), dict(group=64), dict(head_dims=(64, 64)), dict(pos_encoding_mode=2)],
)
def test_served(hopper, change):
    wanted = replace(SERVED, **change)
    assert choose("auto", wanted, 65) == choose("fa3", wanted, 1) == "sm90a"
    assert choose("fa2", wanted, 65) == "cuda"


@pytest.mark.parametrize("change, reason", NOT_SERVED)
def test_unserved_calls_fall_back_and_fail_with_fa3(hopper, change, reason):
    wanted = replace(SERVED, **change)
    assert choose("auto", wanted, 1000) == wanted.device.type
    with pytest.raises(ValueError, match="backend: got 'fa3', whose kernels do not support this call: ") as error:
        choose("fa3", wanted, 1000)
    assert reason in str(error.value)


def test_another_gpu(monkeypatch):
    monkeypatch.setattr(kernels, "capability", lambda device: (8, 0))
    assert choose("auto", SERVED, 1000) == "cuda"
    with pytest.raises(ValueError, match=r"got a GPU of compute capability \(8, 0\), wanted \(9, 0\)"):
        choose("fa3", SERVED, 1000)


def test_calls_that_fa3_serves(hopper):
    wanted = replace(SERVED, mask_mode=3)
    assert (choose("auto", wanted, 1000), choose("fa3", wanted, 1000)) == ("cuda", "sm90a")


def test_only_hopper_serves_queries_of_8_bits(hopper):
    wanted = replace(SERVED, dtypes=(E4M3, E4M3, BF16))
    assert choose("auto", wanted, 1) == choose("fa3", wanted, 1) == "sm90a"
    assert (
        gen_batch_prefill_module("fa3", E4M3, E4M3, BF16, "int32", 128, 128).name
        == "prefill_e4m3_kv_e4m3_o_bf16_d128_sm90a"
    )
    with pytest.raises(ValueError, match="dtype_q: got float8_e4m3fn, wanted one of float16, bfloat16 on cuda"):
        gen_batch_prefill_module("fa2", E4M3, E4M3, BF16, "int32", 128, 128, device="cuda")
    with pytest.raises(ValueError, match="got 'fa3' with torch.float8_e5m2 keys, torch.float8_e4m3fn queries"):
        gen_batch_prefill_module("fa3", E4M3, torch.float8_e5m2, BF16, "int32", 128, 128, device="cuda")


def test_few_rows_stay_with_the_portable_kernels(hopper):
    assert choose("auto", SERVED, 64) == "cuda"


def test_a_missing_module_is_not_chosen(hopper, monkeypatch):
    monkeypatch.setattr(kernels, "can_be_loaded", lambda *_: False)
    assert choose("auto", SERVED, 1000) == "cuda"


def test_unknown_backend():
    with pytest.raises(ValueError, match="backend: got 'fa4', wanted one of auto, fa2, fa3"):
        choose("fa4", SERVED, 1)


@pytest.mark.skipif(torch.cuda.is_available(), reason="wanted a machine that fa3 is an error on")
def test_wrappers_and_functions_refuse_fa3_on_a_cpu():
    x = torch.ones(4, 2, 64).half()
    with pytest.raises(ValueError, match="backend: got 'fa3', .*: got tensors on cpu"):
        flashinfer.single_prefill_with_kv_cache(x, x, x, backend="fa3")
    wrapper = flashinfer.BatchPrefillWithRaggedKVCacheWrapper(workspace("cpu"), backend="fa3")
    with pytest.raises(ValueError, match="backend: got 'fa3', .*: got tensors on cpu"):
        wrapper.plan(indptr_of([4]), indptr_of([4]), 2, 2, 64)


def test_modules_for_hopper_have_only_its_arch():
    spec = gen_batch_prefill_module("fa3", *["bfloat16"] * 3, "int32", 128, 128)
    assert (spec.name, spec.archs) == ("prefill_bf16_d128_sm90a", ("9.0a",))
    assert gen_batch_prefill_module("auto", *["bfloat16"] * 3, "int32", 128, 128).archs == ()
    matrix = Matrix(backends=("cuda",), variants=("default", "rope"))
    names = {spec.name for spec in family("prefill").aot_specs(matrix)}
    assert {"prefill_bf16_d128_sm90a", "prefill_f16_d256_sm90a", "prefill_f16_d64_rope_cuda"} <= names
    assert not any("rope_sm90a" in name for name in names)


def test_questions_of_engines():
    assert is_fa3_backend_supported(0, True, False, BF16, BF16)
    assert not is_fa3_backend_supported(1, False, False, BF16, BF16)
    assert not is_fa3_backend_supported(0, False, True, BF16, BF16)
    assert not is_fa3_backend_supported(0, False, False, BF16, E4M3)
    assert is_fa3_backend_supported(0, False, False, E4M3, E4M3)
    assert determine_attention_backend(torch.device("cpu"), 0, False, False, BF16, BF16) == "fa2"
