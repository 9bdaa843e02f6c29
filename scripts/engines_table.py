"""Writes the table of docs/engines.md: names that engines use of FlashInfer, and what this library does with each.

    python scripts/engines_table.py            # writes the table anew
    python scripts/engines_table.py --check    # exit code 1 where it is not what the code says

Whether a name computes, raises or is missing is looked up in the package, parameters in signatures.
"""

from __future__ import annotations

import argparse
import importlib
import inspect
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

PAGE = Path(__file__).resolve().parent.parent / "docs" / "engines.md"
BEGIN, END = "<!-- python scripts/engines_table.py -->\n", "<!-- end -->\n"
UNSUPPORTED = "Raises ``UnsupportedError``"

# What engines of FlashInfer 0.2.7 use; then what newer ones use on GPUs that this library has kernels for. A row is a
# module or class, names in it, and who uses them; "name(a, b)" are parameters of it.
ROWS: tuple[tuple[str, str, str], ...] = (
    ("sampling", "softmax sampling_from_probs sampling_from_logits top_k_sampling_from_probs top_p_sampling_from_probs"
     " min_p_sampling_from_probs top_k_top_p_sampling_from_probs top_k_top_p_sampling_from_logits top_k_renorm_probs"
     " top_p_renorm_probs top_k_mask_logits chain_speculative_sampling",
     "SGLang, vLLM, mini-sglang, TensorRT-LLM"),
    ("BatchDecodeWithPagedKVCacheWrapper", "plan run forward forward_return_lse", "all"),
    ("BatchPrefillWithPagedKVCacheWrapper", "plan run forward forward_return_lse", "all"),
    ("BatchPrefillWithRaggedKVCacheWrapper", "plan run forward forward_return_lse", "SGLang, vLLM"),
    ("BatchPrefillWithPagedKVCacheWrapper", "_window_left _logits_soft_cap _sm_scale _causal _int_workspace_buffer"
     " _float_workspace_buffer _pin_memory_int_workspace_buffer _paged_kv_indptr_buf _paged_kv_indices_buf"
     " _paged_kv_last_page_len_buf _qo_indptr_buf _custom_mask_buf _mask_indptr_buf _max_total_num_rows"
     " _fixed_batch_size _kv_lens_buffer _backend _jit_module _plan_info _cached_module", "all"),
    ("decode", "_get_range_buf get_seq_lens fast_decode_plan", "SGLang, vLLM, TensorRT-LLM"),
    ("jit.core", "check_cuda_arch logger gen_jit_spec", "TensorRT-LLM, vLLM, SGLang"),
    ("mla.BatchMLAPagedAttentionWrapper", "plan run", "SGLang, LightLLM, TensorRT-LLM, vLLM"),
    ("comm", "trtllm_allreduce_fusion trtllm_create_ipc_workspace_for_all_reduce_fusion"
     " trtllm_destroy_ipc_workspace_for_all_reduce vllm_init_custom_ar vllm_meta_size vllm_register_buffer"
     " vllm_get_graph_buffer_ipc_meta vllm_register_graph_buffers", "SGLang, TensorRT-LLM"),
    ("gemm", "bmm_fp8 SegmentGEMMWrapper", "SGLang, vLLM"),
    ("autotuner", "AutoTuner autotune set_autotune_process_group", "SGLang, vLLM"),
    ("utils", "_get_range_buf _cache_buf _ceil_pow2", "SGLang, vLLM"),
    ("jit.env", "FLASHINFER_WORKSPACE_DIR", "vLLM"),
    ("jit", "gen_batch_mla_module gen_customize_batch_decode_module gen_customize_batch_prefill_module", "TVM"),
    ("logits_processor", "LogitsPipe Temperature Softmax TopK TopP MinP Sample", "none known"),
    ("triton.cascade", "merge_state merge_state_in_place merge_states variable_length_merge_states", "none known"),
    ("triton.activation", "silu_and_mul(x_scale, o_scale, dtype)", "none known"),
    ("triton.norm", "rms_norm(in_scale, out_scale) rms_norm_add_residual(x_out, x_in_scale, x_out_scale)",
     "none known"),
    ("triton.sm_constraint_gemm", "gemm gemm_persistent gemm_descriptor_persistent", "none known"),
    ("utils", "device_support_pdl get_device_sm_count", "SGLang, vLLM"),
    ("BatchDecodeWithPagedKVCacheWrapper", "__init__(backend) plan(seq_lens, block_tables, fixed_split_size,"
     " disable_split_kv, o_data_type) run(q_scale, sinks, window_left, kv_cache_sf, q_len_per_req)",
     "SGLang, vLLM, mini-sglang, TensorRT-LLM"),
    ("BatchPrefillWithPagedKVCacheWrapper", "plan(seq_lens, block_tables, max_token_per_sequence, max_sequence_kv,"
     " fixed_split_size, disable_split_kv, o_data_type) run(q_scale, sinks, window_left, kv_cache_sf)",
     "SGLang, vLLM, mini-sglang"),
    ("BatchPrefillWithRaggedKVCacheWrapper", "plan(seq_lens, fixed_split_size, disable_split_kv, o_data_type)", "vLLM"),
    ("attention", "BatchAttentionWithAttentionSinkWrapper", "vLLM"),
    ("norm", "rmsnorm_quant fused_add_rmsnorm_quant layernorm", "SGLang, TensorRT-LLM"),
    ("sampling", "top_k_top_p_sampling_from_probs(seed, offset)", "PIE"),
    ("", "top_k top_k_ragged_transform top_k_page_table_transform", "SGLang, vLLM"),
    ("mamba", "selective_state_update", "SGLang, vLLM, TensorRT-LLM"),
    ("gdn_prefill", "chunk_gated_delta_rule", "SGLang, vLLM"),
    ("gdn_decode", "gated_delta_rule_decode_pretranspose gated_delta_rule_mtp", "SGLang"),
    ("kda", "recurrent_kda", "SGLang, vLLM"),
    ("fused_moe", "cutlass_fused_moe", "SGLang, vLLM"),
    ("gemm", "fp8_blockscale_gemm_sm90", "SGLang, vLLM"),
)  # fmt: skip


def split(names: str) -> Iterator[str]:
    """``a b(c, d) e`` -> ``a``, ``b(c, d)``, ``e``."""
    start = depth = 0
    for at, letter in enumerate(names + " "):
        depth += (letter == "(") - (letter == ")")
        if letter == " " and depth == 0:
            yield names[start:at]
            start = at + 1


def state(place: str, name: str) -> str:
    """What a name does: ``computes``, ``raises`` or ``missing``."""
    name, _, parameters = name.partition("(")
    try:
        what: Any = importlib.import_module("flashinfer")
        for part in filter(None, place.split(".")):
            what = getattr(what, part) if hasattr(what, part) else importlib.import_module(f"flashinfer.{place}")
        owner, what = what, getattr(what, name)
    except (AttributeError, ImportError):
        return "missing"
    if any((inspect.getdoc(one) or "").startswith(UNSUPPORTED) for one in (owner, what)):
        return "raises"
    wanted = [one.strip() for one in parameters.rstrip(")").split(",") if one.strip()]
    return "computes" if not wanted or set(wanted) <= set(inspect.signature(what).parameters) else "missing"


def table() -> str:
    """The rows of docs/engines.md; a row whose names differ in what they do becomes several."""
    say = {"computes": "here", "raises": "imports; raises `UnsupportedError` when called", "missing": "not there"}
    lines = ["| where | names | used by | here? |\n", "| --- | --- | --- | --- |\n"]
    for place, names, users in ROWS:
        found: dict[str, list[str]] = {}
        for name in split(names):
            found.setdefault(state(place, name), []).append(f"`{name}`")
        for what, those in sorted(found.items()):
            lines.append(
                f"| `flashinfer{'.' if place else ''}{place}` | {', '.join(those)} | {users} | {say[what]} |\n"
            )
    return "".join(lines)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; exit code 1 where the page is old")
    options = parser.parse_args(arguments)
    page = PAGE.read_text()
    before, _, rest = page.partition(BEGIN)
    _, _, after = rest.partition(END)
    new = before + BEGIN + table() + END + after
    if options.check:
        return int(new != page)
    PAGE.write_text(new)
    return 0


if __name__ == "__main__":
    sys.exit(main())
