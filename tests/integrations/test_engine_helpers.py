"""Functions around the kernels that engines call at start: the tuner, shared buffers, times, and the version."""

from __future__ import annotations

import importlib
import inspect
import json
import re
import time
from itertools import pairwise

import pytest
import torch
from packaging.version import Version

import flashinfer
from flashinfer import env, utils
from flashinfer.autotuner import AutoTuner, _collect_metadata, autotune, autotune_v2, autotune_v2_reload
from flashinfer.fused_moe.utils import get_hybrid_num_tokens_buckets
from flashinfer.testing import bench_gpu_time

from ..support.tree import ROOT


def test_the_version_has_two_parts():
    """Engines compare the part before the plus. The library's own number is after it."""
    version = Version(flashinfer.__version__)
    assert version.public == "0.7.2.post1" and version.local == env.VERSION
    assert str(version) == flashinfer.__version__ and version >= Version("0.7.2")
    assert "\ncu13 = []\n" in (ROOT / "pyproject.toml").read_text()


# The tuner


def test_files_of_the_tuner_hold_the_environment(tmp_path):
    path = tmp_path / "tuned.json"
    AutoTuner.get().save_configs(path)
    assert json.loads(path.read_text()) == {"_metadata": _collect_metadata()}
    assert AutoTuner.get().load_configs(str(path)) is True
    path.write_text(json.dumps({"_metadata": {**_collect_metadata(), "gpu": "another"}}))
    assert AutoTuner.get().load_configs(path) is False
    path.write_text("not json")
    assert AutoTuner.get().load_configs(path) is False
    assert AutoTuner.get().load_configs(tmp_path / "missing.json") is False
    metadata = _collect_metadata()
    assert metadata == _collect_metadata() and metadata["flashinfer"] == env.VERSION
    assert all(isinstance(text, str) for text in [*metadata, *metadata.values()])


CONTEXTS = {
    "SGLang": lambda path: autotune(True, cache=str(path), skip_ops={"moe"}),
    "SGLang, reused": lambda path: autotune(True, cache=None, skip_ops=set()),
    "SGLang, second": lambda path: autotune_v2(mode="tune", persistent_cache=False),
    "vLLM": lambda path: autotune_v2(mode="tune", cache_root=path, skip_ops={"moe"}),
    "vLLM, buckets": lambda path: autotune(tuning_buckets=get_hybrid_num_tokens_buckets(8192), round_up=True),
    "vLLM, older": lambda path: autotune(tune_mode=True, skip_ops={"moe"}),
}


@pytest.mark.parametrize("context", CONTEXTS)
def test_tuning_contexts_restore_the_state(context, tmp_path):
    tuner = AutoTuner.get()
    assert tuner is AutoTuner.get() and tuner.is_tuning_mode is False
    with CONTEXTS[context](tmp_path / "cache"):
        assert tuner.is_tuning_mode is True
        with autotune_v2("replay"):
            assert tuner.is_tuning_mode is False
        assert tuner.is_tuning_mode is True
    with pytest.raises(KeyError), CONTEXTS[context](tmp_path / "cache"):
        raise KeyError
    assert tuner.is_tuning_mode is False and tuner._dirty is False
    autotune_v2_reload()
    tuner.clear_cache()
    assert not list(tmp_path.iterdir())


def test_tuning_contexts_refuse_typos():
    for error, text, call in (
        (TypeError, "unexpected keyword argument 'skip_op'", lambda: autotune(True, skip_op={"moe"})),
        (TypeError, "unexpected keyword argument 'cache'", lambda: autotune_v2(cache="x")),
        (TypeError, "skip_ops: got 'moe', wanted names", lambda: autotune(skip_ops="moe").__enter__()),
        (ValueError, r"tuning_buckets: got \[1, 0\]", lambda: autotune_v2(tuning_buckets=[1, 0]).__enter__()),
        (TypeError, "round_up: got 8, wanted a bool", lambda: autotune(round_up=8).__enter__()),
        (ValueError, "mode: got 'tuned', wanted 'tune' or 'replay'", lambda: autotune_v2("tuned").__enter__()),
    ):
        with pytest.raises(error, match=text):
            call()


def test_the_tuner_is_found_at_the_top_level():
    for name in ("autotune", "autotune_v2", "autotune_v2_reload", "AutoTuner"):
        assert getattr(flashinfer, name) is getattr(importlib.import_module("flashinfer.autotuner"), name)
    assert list(inspect.signature(autotune).parameters)[:2] == ["tune_mode", "cache"]
    flashinfer.autotuner.set_autotune_process_group("group")
    assert flashinfer.autotuner.get_autotune_process_group() == "group"
    flashinfer.autotuner.set_autotune_process_group(None)


def test_buckets_stand_for_every_number_of_tokens():
    assert get_hybrid_num_tokens_buckets(1) == (1,)
    assert get_hybrid_num_tokens_buckets(300) == (1, 2, 4, 8, 16, 32, 64, 128, 256, 300)
    assert get_hybrid_num_tokens_buckets(5000, 600) == (600, 768, 1024, 1280, 1536, 1792, 2048, 4096, 5000)
    for most in (1, 7, 8192, 8193, 100_000):
        buckets = get_hybrid_num_tokens_buckets(most)
        assert list(buckets) == sorted({*buckets}) and buckets[0] == 1 and buckets[-1] == most
        assert all(b <= 2 * a for a, b in pairwise(buckets))
    for bad, text in (
        ((0,), "max_num_tokens: got 0"),
        ((4, 5), "max_num_tokens: got 4"),
        ((4, 0), "min_num_tokens: got 0"),
    ):
        with pytest.raises(ValueError, match=f"get_hybrid_num_tokens_buckets: {text}"):
            get_hybrid_num_tokens_buckets(*bad)


# Shared buffers


def test_the_range_is_shared_and_grows(device):
    from flashinfer.decode import _get_range_buf

    for length in (0, 1, 5, 8, 1000, 3):
        assert torch.equal(_get_range_buf(length, torch.device(device)).cpu(), torch.arange(length, dtype=torch.int32))
    assert _get_range_buf(5, torch.device(device)).data_ptr() == _get_range_buf(8, device).data_ptr()


def test_an_engine_replaces_the_buffer_of_the_host():
    """vLLM pins the buffer: it replaces the entry for ``_ceil_pow2``, which each call reads."""
    for length in (0, 1, 2, 3, 100, 128, 129):
        utils._get_range_buf(length, "cpu")
        key = (f"range_{utils._ceil_pow2(length)}", "cpu")
        other = utils._cache_buf[key].clone()
        utils._cache_buf[key] = other
        for device in ("cpu", torch.device("cpu")):
            assert (
                utils._get_range_buf(length, device).untyped_storage().data_ptr() == other.untyped_storage().data_ptr()
            )


def test_powers_of_two():
    for x, want in ((-3, 1), (0, 1), (1, 1), (2, 2), (3, 4), (4, 4), (5, 8), (1025, 2048), (2**40 + 1, 2**41)):
        assert utils.next_positive_power_of_2(x) == want
    assert utils.get_trtllm_gen_multi_ctas_kv_counter_bytes(64, 32, 132) == 0


# Names that engines check for


ABSENT = (
    "comm.trtllm_alltoall",
    "comm.trtllm_moe_alltoall",
    "comm.dcp_alltoall",
    "comm.PcieIpcAllReduceWorkspace",
    "comm.mnnvl.MnnvlMemory",
    "comm.mnnvl.McastGPUBuffer",
    "moe_ep",
    "mhc",
    "cute_dsl",
    "kda_decode.fused_kda_decode",
    "prefill.cudnn_batch_prefill_with_kv_cache",
)


@pytest.mark.parametrize("name", ABSENT)
def test_unserved_names_are_absent(name):
    """A stub would tell an engine that checks with hasattr or by import that the feature exists."""
    place, _, last = f"flashinfer.{name}".rpartition(".")
    try:
        owner = importlib.import_module(place)
    except ModuleNotFoundError:
        return
    assert not hasattr(owner, last)
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module(f"flashinfer.{name}")


def test_no_gpu_of_these_has_a_fabric():
    assert flashinfer.comm.mnnvl.is_mnnvl_fabric_supported(0) is False


def test_the_wheel_has_no_package_of_cubins():
    """vLLM also reads ``flashinfer_cubin`` as support of XQA decode."""
    assert not (ROOT / "flashinfer_cubin").exists()
    assert not re.search("flashinfer_cubin", (ROOT / "build_backend.py").read_text())


# Times


def test_times_are_milliseconds_of_an_iteration(device):
    calls = []

    def wait(x: int, y: int) -> None:
        calls.append((x, y))
        time.sleep(0.002)

    times = bench_gpu_time(wait, 1, 5, input_args=(1,), input_kwargs={"y": 2})
    assert len(times) == 5 and len(calls) >= 6 and {*calls} == {(1, 2)}
    assert device == "cuda" or all(1.9 < one < 60_000 for one in times)  # a busy machine sleeps longer
    assert len(bench_gpu_time(fn=wait, dry_run_time_ms=1, repeat_time_ms=10, input_args=(1, 2))) >= 1
    with pytest.raises(ValueError, match="repeat_iters: got 0, wanted at least 1"):
        bench_gpu_time(wait, repeat_iters=0)


def test_times_in_a_graph(device):
    if device == "cpu":
        if not torch.cuda.is_available():
            with pytest.raises(ValueError, match="use_cuda_graph: got True, wanted False without a GPU"):
                bench_gpu_time(lambda: None, use_cuda_graph=True)
        return
    x = torch.randn(1 << 20, device=device)
    out = torch.empty_like(x)
    times = bench_gpu_time(torch.mul, 2, 4, use_cuda_graph=True, input_args=(x, 2), input_kwargs={"out": out})
    assert len(times) == 4 and all(0 < one < 10 for one in times) and out.equal(x * 2)


def test_names_of_gated_delta_nets_kernels(device):
    """SGLang imports the function for bfloat16 states together with the others, in one try block."""
    from flashinfer.gdn_decode import gated_delta_rule_mtp as other
    from flashinfer.gdn_kernels.gdn_decode_bf16_state import gated_delta_rule_mtp

    batch, tokens, heads, dim, slots = 3, 2, 2, 16, 5
    q, k, v = (torch.randn(batch, tokens, heads, dim, dtype=torch.bfloat16, device=device) for _ in range(3))
    a, b = (torch.randn(batch, tokens, heads, dtype=torch.bfloat16, device=device) for _ in range(2))
    A_log, dt_bias = (torch.randn(heads, device=device) for _ in range(2))
    pool = torch.randn(slots, heads, dim, dim, dtype=torch.bfloat16, device=device)
    indices = torch.tensor([4, 1, 2], dtype=torch.int32, device=device)
    copy = pool.clone()
    steps = torch.zeros(batch, tokens, heads, dim, dim, dtype=torch.bfloat16, device=device)
    given = dict(
        A_log=A_log, a=a, dt_bias=dt_bias, softplus_beta=1.0, softplus_threshold=20.0, q=q, k=k, v=v, b=b,
        initial_state_source=pool, initial_state_indices=indices, use_qk_l2norm_in_kernel=True,
    )  # fmt: skip
    out = gated_delta_rule_mtp(
        **given, scale=None, output=None, intermediate_states_buffer=steps, disable_state_update=True
    )
    want, _ = other(q, k, v, copy, indices, A_log, a, dt_bias, b, disable_state_update=True)
    assert out.equal(want) and pool.equal(copy) and steps.any()
    for text, wrong in (("softplus_beta: got 2.0", dict(softplus_beta=2.0)), ("q: got None", dict(q=None))):
        with pytest.raises(ValueError, match=f"gated_delta_rule_mtp: .*{text}"):
            gated_delta_rule_mtp(**{**given, **wrong})
