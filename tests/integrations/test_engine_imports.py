"""Every name that engines import without a guard is here; what has no kernels raises when it is called."""

from __future__ import annotations

import importlib
import logging

import pytest

import flashinfer
from flashinfer._compat.refused import FP4, REFUSED, kind
from flashinfer.errors import FlashInferError, UnsupportedError

# Engine -> "module: names", as its sources import them at the top of a file without a guard, or with none but a look for
# the package itself.
IMPORTS = {
    "SGLang 0.4.9.post1": """
        flashinfer: BatchDecodeWithPagedKVCacheWrapper BatchMLAPagedAttentionWrapper BatchPrefillWithPagedKVCacheWrapper
            BatchPrefillWithRaggedKVCacheWrapper SegmentGEMMWrapper
        flashinfer.cascade: merge_state
        flashinfer.comm: AllReduceFusionPattern trtllm_create_ipc_workspace_for_all_reduce_fusion
            trtllm_allreduce_fusion trtllm_destroy_ipc_workspace_for_all_reduce
        flashinfer.decode: _get_range_buf get_seq_lens
        flashinfer.gemm: gemm_fp8_nt_groupwise
    """,
    "SGLang 0.5.23": """
        flashinfer: BatchDecodeWithPagedKVCacheWrapper BatchMLAPagedAttentionWrapper BatchPrefillWithPagedKVCacheWrapper
            BatchPrefillWithRaggedKVCacheWrapper SfLayout bmm_fp8 mm_mxfp8 mxfp8_quantize nvfp4_block_scale_interleave
            nvfp4_quantize scaled_fp4_grouped_quantize shuffle_matrix_a shuffle_matrix_sf_a
            silu_and_mul_scaled_nvfp4_experts_quantize
        flashinfer.autotuner: AutoTuner autotune get_autotune_process_group set_autotune_process_group
        flashinfer.cascade: merge_state
        flashinfer.comm.mnnvl: CommBackend
        flashinfer.fp4_quantization: block_scale_interleave
        flashinfer.fused_moe: convert_to_block_layout trtllm_fp4_block_scale_moe trtllm_fp4_block_scale_routed_moe
            trtllm_mxint4_block_scale_moe
        flashinfer.fused_moe.core: _maybe_get_cached_w3_w1_permute_indices get_w2_permute_indices_with_cache
        flashinfer.gemm: fp8_blockscale_gemm_sm90 gemm_fp8_nt_groupwise
        flashinfer.jit.core: logger
        flashinfer.prefill: BatchPrefillWithRaggedKVCacheWrapper
        flashinfer.utils: get_compute_capability
    """,
    "vLLM 0.9.2": """
        flashinfer: BatchDecodeWithPagedKVCacheWrapper BatchPrefillWithPagedKVCacheWrapper
            MultiLevelCascadeAttentionWrapper
        flashinfer.decode: CUDAGraphBatchDecodeWithPagedKVCacheWrapper
        flashinfer.prefill: BatchPrefillWithPagedKVCacheWrapper
    """,
    "vLLM 0.32.0": """
        flashinfer: BatchAttentionWithAttentionSinkWrapper BatchDecodeWithPagedKVCacheWrapper BatchPrefillWithPagedKVCacheWrapper
            BatchPrefillWithRaggedKVCacheWrapper get_seq_lens nvfp4_quantize_append_paged_kv_cache_with_slot_mapping
        flashinfer.autotuner: AutoTuner set_autotune_process_group
        flashinfer.comm.mnnvl: CommBackend
        flashinfer.decode: fast_decode_plan trtllm_batch_decode_with_kv_cache trtllm_batch_decode_with_kv_cache_mla
        flashinfer.fused_moe.core: ActivationType is_gated_activation
        flashinfer.tllm_enums: ActivationType is_gated_activation
        flashinfer.concat_ops: concat_mla_k
        flashinfer.dsv3_ops: fused_topk_deepseek
        flashinfer.jit.core: check_cuda_arch
        flashinfer.prefill: trtllm_batch_context_with_kv_cache
        flashinfer.utils: FP4Tensor get_device_sm_count get_trtllm_gen_multi_ctas_kv_counter_bytes
    """,
    "mini-sglang": """
        flashinfer: BatchDecodeWithPagedKVCacheWrapper BatchPrefillWithPagedKVCacheWrapper
            CUDAGraphBatchDecodeWithPagedKVCacheWrapper apply_rope_with_cos_sin_cache_inplace fused_add_rmsnorm
            gelu_and_mul rmsnorm silu_and_mul
        flashinfer.decode: trtllm_batch_decode_with_kv_cache
        flashinfer.prefill: trtllm_batch_context_with_kv_cache
    """,
    "TensorRT-LLM": """
        flashinfer.comm: vllm_get_graph_buffer_ipc_meta vllm_init_custom_ar vllm_meta_size vllm_register_buffer
            vllm_register_graph_buffers
        flashinfer.jit.core: check_cuda_arch
    """,
}


def names(text: str) -> list[tuple[str, str]]:
    found, module = [], ""
    for word in text.split():
        if word.endswith(":"):
            module = word[:-1]
        else:
            found.append((module, word))
    return found


@pytest.mark.parametrize("engine", IMPORTS)
def test_engine_imports_exist(engine):
    missing = [f"{m}.{n}" for m, n in names(IMPORTS[engine]) if not hasattr(importlib.import_module(m), n)]
    assert not missing, f"{engine} imports {', '.join(missing)}"


@pytest.mark.parametrize(("module", "name"), [(m, name) for m, (_, names) in REFUSED.items() for name in names])
def test_a_refused_name_raises_with_its_reason(module, name):
    refused = getattr(importlib.import_module(f"flashinfer.{module}"), name)
    with pytest.raises(UnsupportedError, match=rf"{name}: needs .*, which this library does not have; use ") as caught:
        refused(1, key=2)
    assert isinstance(caught.value, FlashInferError) and isinstance(caught.value, NotImplementedError)


def test_wrappers_without_kernels_have_the_methods_of_wrappers():
    """FlashInfer's tests name them when they are collected."""
    wrapper = kind("OfSomeGPUWrapper", FP4)
    for method in ("plan", "run"):
        with pytest.raises(UnsupportedError, match=f"OfSomeGPUWrapper.{method}: needs"):
            getattr(wrapper, method)(None)


def test_a_communicator_of_an_engines_own_is_a_backend():
    class Group(flashinfer.comm.mnnvl.CommBackend):
        def Get_rank(self):
            return 3

        def Get_size(self):
            return 4

        def allgather(self, data):
            return [data] * 4

        def Split(self, color, key):
            return self

    assert Group().Get_rank() == 3 and Group().allgather(7) == [7] * 4


def test_places_of_the_cache_have_flashinfers_names(tmp_path, monkeypatch):
    from flashinfer.jit import env

    monkeypatch.setenv("FLASHINFER_WORKSPACE_DIR", str(tmp_path))
    assert tmp_path == env.FLASHINFER_WORKSPACE_DIR
    assert (env.FLASHINFER_CSRC_DIR / "norm.cc").is_file()
    with pytest.raises(AttributeError, match="FLASHINFER_NO_SUCH_DIR"):
        _ = env.FLASHINFER_NO_SUCH_DIR


def test_gpus_that_are_too_old_are_refused(monkeypatch):
    from flashinfer.jit import core

    monkeypatch.setattr(core, "visible_gpus", lambda: ((8, 0), (9, 0)))
    core.check_cuda_arch()
    monkeypatch.setattr(core, "visible_gpus", lambda: ((7, 5),))
    with pytest.raises(UnsupportedError, match=r"got a GPU of compute capability 7.5, wanted 8.0"):
        core.check_cuda_arch()
    assert core.logger is logging.getLogger("flashinfer")


def test_levels_of_the_log(caplog):
    logger = logging.getLogger("flashinfer")
    before = logger.level
    try:
        flashinfer.utils.set_log_level("error")
        assert logger.level == logging.ERROR
        with pytest.raises(ValueError, match="got 'loud', wanted 'debug', 'info'"):
            flashinfer.utils.set_log_level(lvl_str="loud")
    finally:
        logger.setLevel(before)
