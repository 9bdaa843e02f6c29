"""List every public name with its module: ``flashinfer.<name>`` imports that module on its first use.

``python scripts/init_stub.py`` writes this file from the modules' ``__all__``.
"""

from . import activation as activation
from . import activation_backward as activation_backward
from . import attention as attention
from . import autotuner as autotuner
from . import batch_schedule as batch_schedule
from . import cascade as cascade
from . import causal_conv1d as causal_conv1d
from . import causal_conv1d_backward as causal_conv1d_backward
from . import cli as cli
from . import comm as comm
from . import concat_ops as concat_ops
from . import decode as decode
from . import deep_gemm as deep_gemm
from . import delta_rule as delta_rule
from . import delta_rule_backward as delta_rule_backward
from . import diffusion_ops as diffusion_ops
from . import dsv3_ops as dsv3_ops
from . import env as env
from . import errors as errors
from . import fp4_quantization as fp4_quantization
from . import fused_moe as fused_moe
from . import gated_norm as gated_norm
from . import gated_norm_backward as gated_norm_backward
from . import gdn_decode as gdn_decode
from . import gdn_kernels as gdn_kernels
from . import gdn_prefill as gdn_prefill
from . import gemm as gemm
from . import group_quant as group_quant
from . import grouped_mm as grouped_mm
from . import integrations as integrations
from . import jit as jit
from . import kda as kda
from . import logits_processor as logits_processor
from . import mamba as mamba
from . import mla as mla
from . import mxfp4_gemm as mxfp4_gemm
from . import norm as norm
from . import norm_backward as norm_backward
from . import norm_quant as norm_quant
from . import page as page
from . import pod as pod
from . import prefill as prefill
from . import prefill_backward as prefill_backward
from . import preload as preload
from . import profiler as profiler
from . import quantization as quantization
from . import rope as rope
from . import rope_quant as rope_quant
from . import sampling as sampling
from . import sparse as sparse
from . import testing as testing
from . import tllm_enums as tllm_enums
from . import topk as topk
from . import triton as triton
from . import utils as utils
from . import xqa as xqa
from .activation import gelu_and_mul as gelu_and_mul
from .activation import gelu_tanh_and_mul as gelu_tanh_and_mul
from .activation import gen_act_and_mul_module as gen_act_and_mul_module
from .activation import get_act_and_mul_module as get_act_and_mul_module
from .activation import silu_and_mul as silu_and_mul
from .activation_backward import gelu_and_mul_backward as gelu_and_mul_backward
from .activation_backward import gelu_tanh_and_mul_backward as gelu_tanh_and_mul_backward
from .activation_backward import gen_act_and_mul_backward_module as gen_act_and_mul_backward_module
from .activation_backward import silu_and_mul_backward as silu_and_mul_backward
from .attention import BatchAttention as BatchAttention
from .attention import BatchAttentionWithAttentionSinkWrapper as BatchAttentionWithAttentionSinkWrapper
from .autotuner import AutoTuner as AutoTuner
from .autotuner import autotune as autotune
from .autotuner import autotune_v2 as autotune_v2
from .autotuner import autotune_v2_reload as autotune_v2_reload
from .autotuner import get_autotune_process_group as get_autotune_process_group
from .autotuner import set_autotune_process_group as set_autotune_process_group
from .batch_schedule import gen_batch_schedule_module as gen_batch_schedule_module
from .cascade import BatchDecodeWithSharedPrefixPagedKVCacheWrapper as BatchDecodeWithSharedPrefixPagedKVCacheWrapper
from .cascade import BatchPrefillWithSharedPrefixPagedKVCacheWrapper as BatchPrefillWithSharedPrefixPagedKVCacheWrapper
from .cascade import MultiLevelCascadeAttentionWrapper as MultiLevelCascadeAttentionWrapper
from .cascade import gen_cascade_module as gen_cascade_module
from .cascade import merge_state as merge_state
from .cascade import merge_state_in_place as merge_state_in_place
from .cascade import merge_states as merge_states
from .cascade import variable_length_merge_states as variable_length_merge_states
from .causal_conv1d import causal_conv1d_fn as causal_conv1d_fn
from .causal_conv1d import causal_conv1d_update as causal_conv1d_update
from .causal_conv1d import gen_causal_conv1d_module as gen_causal_conv1d_module
from .causal_conv1d_backward import gen_causal_conv1d_backward_module as gen_causal_conv1d_backward_module
from .comm import AllReduceFusionOp as AllReduceFusionOp  # type: ignore[attr-defined]
from .comm import AllReduceFusionPattern as AllReduceFusionPattern  # type: ignore[attr-defined]
from .comm import AllReduceFusionWorkspace as AllReduceFusionWorkspace  # type: ignore[attr-defined]
from .comm import AllReduceStrategyConfig as AllReduceStrategyConfig  # type: ignore[attr-defined]
from .comm import AllReduceStrategyType as AllReduceStrategyType  # type: ignore[attr-defined]
from .comm import CommBackend as CommBackend  # type: ignore[attr-defined]
from .comm import CudaRTLibrary as CudaRTLibrary  # type: ignore[attr-defined]
from .comm import FP4QuantizationSFLayout as FP4QuantizationSFLayout  # type: ignore[attr-defined]
from .comm import MNNVLAllReduceFusionWorkspace as MNNVLAllReduceFusionWorkspace  # type: ignore[attr-defined]
from .comm import Mapping as Mapping  # type: ignore[attr-defined]
from .comm import MnnvlConfig as MnnvlConfig  # type: ignore[attr-defined]
from .comm import MoeAlltoAll as MoeAlltoAll  # type: ignore[attr-defined]
from .comm import QuantizationSFLayout as QuantizationSFLayout  # type: ignore[attr-defined]
from .comm import TRTLLMAllReduceFusionWorkspace as TRTLLMAllReduceFusionWorkspace  # type: ignore[attr-defined]
from .comm import TorchDistBackend as TorchDistBackend  # type: ignore[attr-defined]
from .comm import all_gather as all_gather  # type: ignore[attr-defined]
from .comm import allreduce_fusion as allreduce_fusion  # type: ignore[attr-defined]
from .comm import create_allreduce_fusion_workspace as create_allreduce_fusion_workspace  # type: ignore[attr-defined]
from .comm import create_shared_buffer as create_shared_buffer  # type: ignore[attr-defined]
from .comm import free_shared_buffer as free_shared_buffer  # type: ignore[attr-defined]
from .comm import gen_allreduce_module as gen_allreduce_module  # type: ignore[attr-defined]
from .comm import is_mnnvl_fabric_supported as is_mnnvl_fabric_supported  # type: ignore[attr-defined]
from .comm import moe_a2a_get_workspace_size_per_rank as moe_a2a_get_workspace_size_per_rank  # type: ignore[attr-defined]
from .comm import reduce_scatter as reduce_scatter  # type: ignore[attr-defined]
from .comm import trtllm_allreduce_fusion as trtllm_allreduce_fusion  # type: ignore[attr-defined]
from .comm import trtllm_create_ipc_workspace_for_all_reduce as trtllm_create_ipc_workspace_for_all_reduce  # type: ignore[attr-defined]
from .comm import trtllm_create_ipc_workspace_for_all_reduce_fusion as trtllm_create_ipc_workspace_for_all_reduce_fusion  # type: ignore[attr-defined]
from .comm import trtllm_custom_all_reduce as trtllm_custom_all_reduce  # type: ignore[attr-defined]
from .comm import trtllm_destroy_ipc_workspace_for_all_reduce as trtllm_destroy_ipc_workspace_for_all_reduce  # type: ignore[attr-defined]
from .comm import trtllm_destroy_ipc_workspace_for_all_reduce_fusion as trtllm_destroy_ipc_workspace_for_all_reduce_fusion  # type: ignore[attr-defined]
from .comm import trtllm_lamport_initialize as trtllm_lamport_initialize  # type: ignore[attr-defined]
from .comm import trtllm_lamport_initialize_all as trtllm_lamport_initialize_all  # type: ignore[attr-defined]
from .comm import trtllm_moe_allreduce_fusion as trtllm_moe_allreduce_fusion  # type: ignore[attr-defined]
from .comm import trtllm_moe_finalize_allreduce_fusion as trtllm_moe_finalize_allreduce_fusion  # type: ignore[attr-defined]
from .comm import vllm_all_reduce as vllm_all_reduce  # type: ignore[attr-defined]
from .comm import vllm_dispose as vllm_dispose  # type: ignore[attr-defined]
from .comm import vllm_get_graph_buffer_ipc_meta as vllm_get_graph_buffer_ipc_meta  # type: ignore[attr-defined]
from .comm import vllm_init_custom_ar as vllm_init_custom_ar  # type: ignore[attr-defined]
from .comm import vllm_meta_size as vllm_meta_size  # type: ignore[attr-defined]
from .comm import vllm_register_buffer as vllm_register_buffer  # type: ignore[attr-defined]
from .comm import vllm_register_graph_buffers as vllm_register_graph_buffers  # type: ignore[attr-defined]
from .concat_ops import concat_mla_k as concat_mla_k
from .concat_ops import gen_concat_ops_module as gen_concat_ops_module
from .decode import BatchDecodeWithPagedKVCacheWrapper as BatchDecodeWithPagedKVCacheWrapper
from .decode import CUDAGraphBatchDecodeWithPagedKVCacheWrapper as CUDAGraphBatchDecodeWithPagedKVCacheWrapper
from .decode import fast_decode_plan as fast_decode_plan
from .decode import gen_batch_decode_module as gen_batch_decode_module
from .decode import gen_customize_batch_decode_module as gen_customize_batch_decode_module
from .decode import gen_customize_single_decode_module as gen_customize_single_decode_module
from .decode import gen_single_decode_module as gen_single_decode_module
from .decode import single_decode_with_kv_cache as single_decode_with_kv_cache
from .decode import single_decode_with_kv_cache_with_jit_module as single_decode_with_kv_cache_with_jit_module
from .delta_rule_backward import gen_delta_rule_backward_module as gen_delta_rule_backward_module
from .diffusion_ops import fused_qk_rmsnorm_rope as fused_qk_rmsnorm_rope
from .diffusion_ops import gen_diffusion_ops_module as gen_diffusion_ops_module
from .fp4_quantization import SfLayout as SfLayout
from .fp4_quantization import block_scale_interleave as block_scale_interleave  # type: ignore[attr-defined]
from .fp4_quantization import fp4_quantize as fp4_quantize  # type: ignore[attr-defined]
from .fp4_quantization import fp4_swizzle_blockscale as fp4_swizzle_blockscale  # type: ignore[attr-defined]
from .fp4_quantization import mm_mxfp8 as mm_mxfp8  # type: ignore[attr-defined]
from .fp4_quantization import mxfp8_quantize as mxfp8_quantize  # type: ignore[attr-defined]
from .fp4_quantization import nvfp4_block_scale_interleave as nvfp4_block_scale_interleave  # type: ignore[attr-defined]
from .fp4_quantization import nvfp4_quantize as nvfp4_quantize  # type: ignore[attr-defined]
from .fp4_quantization import nvfp4_quantize_append_paged_kv_cache_with_slot_mapping as nvfp4_quantize_append_paged_kv_cache_with_slot_mapping  # type: ignore[attr-defined]
from .fp4_quantization import scaled_fp4_grouped_quantize as scaled_fp4_grouped_quantize  # type: ignore[attr-defined]
from .fp4_quantization import shuffle_matrix_a as shuffle_matrix_a  # type: ignore[attr-defined]
from .fp4_quantization import shuffle_matrix_sf_a as shuffle_matrix_sf_a  # type: ignore[attr-defined]
from .fp4_quantization import silu_and_mul_scaled_nvfp4_experts_quantize as silu_and_mul_scaled_nvfp4_experts_quantize  # type: ignore[attr-defined]
from .fused_moe import ActivationType as ActivationType  # type: ignore[attr-defined]
from .fused_moe import RoutingMethodType as RoutingMethodType  # type: ignore[attr-defined]
from .fused_moe import convert_to_block_layout as convert_to_block_layout  # type: ignore[attr-defined]
from .fused_moe import cutlass_fused_moe as cutlass_fused_moe  # type: ignore[attr-defined]
from .fused_moe import cutlass_fused_moe_workspace_size as cutlass_fused_moe_workspace_size  # type: ignore[attr-defined]
from .fused_moe import fused_topk_deepseek as fused_topk_deepseek
from .fused_moe import gen_cutlass_fused_moe_sm90_module as gen_cutlass_fused_moe_sm90_module
from .fused_moe import gen_fused_moe_module as gen_fused_moe_module
from .fused_moe import gen_fused_moe_sm100_module as gen_fused_moe_sm100_module
from .fused_moe import get_w2_permute_indices_with_cache as get_w2_permute_indices_with_cache  # type: ignore[attr-defined]
from .fused_moe import is_gated_activation as is_gated_activation  # type: ignore[attr-defined]
from .fused_moe import route as route
from .fused_moe import trtllm_fp4_block_scale_moe as trtllm_fp4_block_scale_moe  # type: ignore[attr-defined]
from .fused_moe import trtllm_fp4_block_scale_routed_moe as trtllm_fp4_block_scale_routed_moe  # type: ignore[attr-defined]
from .fused_moe import trtllm_mxint4_block_scale_moe as trtllm_mxint4_block_scale_moe  # type: ignore[attr-defined]
from .gated_norm import gated_rmsnorm as gated_rmsnorm
from .gated_norm import gen_gated_norm_module as gen_gated_norm_module
from .gated_norm_backward import gen_gated_norm_backward_module as gen_gated_norm_backward_module
from .gdn_decode import gated_delta_rule_decode as gated_delta_rule_decode
from .gdn_decode import gated_delta_rule_decode_pretranspose as gated_delta_rule_decode_pretranspose
from .gdn_decode import gated_delta_rule_mtp as gated_delta_rule_mtp
from .gdn_prefill import chunk_gated_delta_rule as chunk_gated_delta_rule
from .gemm import SegmentGEMMWrapper as SegmentGEMMWrapper
from .gemm import batch_deepgemm_fp8_nt_groupwise as batch_deepgemm_fp8_nt_groupwise
from .gemm import bmm_bf16 as bmm_bf16
from .gemm import bmm_fp8 as bmm_fp8
from .gemm import fp8_blockscale_gemm_sm90 as fp8_blockscale_gemm_sm90
from .gemm import gemm_fp8_nt_blockscaled as gemm_fp8_nt_blockscaled
from .gemm import gemm_fp8_nt_groupwise as gemm_fp8_nt_groupwise
from .gemm import gen_gemm_module as gen_gemm_module
from .gemm import gen_gemm_sm100_module as gen_gemm_sm100_module
from .gemm import gen_gemm_sm90_module as gen_gemm_sm90_module
from .gemm import group_deepgemm_fp8_nt_groupwise as group_deepgemm_fp8_nt_groupwise
from .gemm import group_gemm_fp8_nt_groupwise as group_gemm_fp8_nt_groupwise
from .gemm import group_gemm_fp8_nt_groupwise_contiguous as group_gemm_fp8_nt_groupwise_contiguous
from .gemm import mm_bf16 as mm_bf16
from .gemm import pad_indptr_to_multiple_of_4 as pad_indptr_to_multiple_of_4
from .group_quant import gen_group_quant_module as gen_group_quant_module
from .group_quant import per_token_group_quant_8bit as per_token_group_quant_8bit
from .grouped_mm import grouped_mm_bf16 as grouped_mm_bf16
from .kda import recurrent_kda as recurrent_kda
from .logits_processor import CompileError as CompileError
from .logits_processor import Compiler as Compiler
from .logits_processor import FusionRule as FusionRule
from .logits_processor import LegalizationError as LegalizationError
from .logits_processor import LogitsPipe as LogitsPipe
from .logits_processor import LogitsProcessor as LogitsProcessor
from .logits_processor import MinP as MinP
from .logits_processor import Op as Op
from .logits_processor import ParameterizedOp as ParameterizedOp
from .logits_processor import Sample as Sample
from .logits_processor import Softmax as Softmax
from .logits_processor import TaggedTensor as TaggedTensor
from .logits_processor import Temperature as Temperature
from .logits_processor import TensorType as TensorType
from .logits_processor import TopK as TopK
from .logits_processor import TopP as TopP
from .logits_processor import compile_pipeline as compile_pipeline
from .logits_processor import legalize_processors as legalize_processors
from .mamba import gen_mamba_module as gen_mamba_module
from .mamba import selective_state_update as selective_state_update
from .mla import BatchDecodeMlaWithPagedKVCacheWrapper as BatchDecodeMlaWithPagedKVCacheWrapper
from .mla import BatchMLAPagedAttentionWrapper as BatchMLAPagedAttentionWrapper
from .mla import gen_batch_decode_mla_module as gen_batch_decode_mla_module
from .mla import gen_batch_mla_module as gen_batch_mla_module
from .mla import trtllm_batch_decode_with_kv_cache_mla as trtllm_batch_decode_with_kv_cache_mla  # type: ignore[attr-defined]
from .mxfp4_gemm import dequantize_mxfp4 as dequantize_mxfp4
from .mxfp4_gemm import gen_mxfp4_gemm_module as gen_mxfp4_gemm_module
from .mxfp4_gemm import interleave_moe_scales_for_sm90_mixed_gemm as interleave_moe_scales_for_sm90_mixed_gemm
from .mxfp4_gemm import interleave_moe_weights_for_sm90_mixed_gemm as interleave_moe_weights_for_sm90_mixed_gemm
from .mxfp4_gemm import quantize_mxfp4 as quantize_mxfp4
from .norm import fused_add_rmsnorm as fused_add_rmsnorm
from .norm import gemma_fused_add_rmsnorm as gemma_fused_add_rmsnorm
from .norm import gemma_rmsnorm as gemma_rmsnorm
from .norm import gen_norm_module as gen_norm_module
from .norm import layernorm as layernorm
from .norm import rmsnorm as rmsnorm
from .norm_backward import gen_norm_backward_module as gen_norm_backward_module
from .norm_backward import layernorm_backward as layernorm_backward
from .norm_backward import rmsnorm_backward as rmsnorm_backward
from .norm_quant import fused_add_rmsnorm_fp8_block_quant as fused_add_rmsnorm_fp8_block_quant
from .norm_quant import fused_add_rmsnorm_quant as fused_add_rmsnorm_quant
from .norm_quant import gen_norm_quant_module as gen_norm_quant_module
from .norm_quant import layernorm_quant as layernorm_quant
from .norm_quant import rmsnorm_quant as rmsnorm_quant
from .page import append_paged_kv_cache as append_paged_kv_cache
from .page import append_paged_mla_kv_cache as append_paged_mla_kv_cache
from .page import block_sparse_indices_to_vector_sparse_offsets as block_sparse_indices_to_vector_sparse_offsets
from .page import gen_page_module as gen_page_module
from .page import get_batch_indices_positions as get_batch_indices_positions
from .page import get_seq_lens as get_seq_lens
from .pod import PODWithPagedKVCacheWrapper as PODWithPagedKVCacheWrapper
from .prefill import BatchPrefillWithPagedKVCacheWrapper as BatchPrefillWithPagedKVCacheWrapper
from .prefill import BatchPrefillWithRaggedKVCacheWrapper as BatchPrefillWithRaggedKVCacheWrapper
from .prefill import gen_batch_prefill_module as gen_batch_prefill_module
from .prefill import gen_customize_batch_prefill_module as gen_customize_batch_prefill_module
from .prefill import gen_customize_single_prefill_module as gen_customize_single_prefill_module
from .prefill import gen_single_prefill_module as gen_single_prefill_module
from .prefill import single_prefill_with_kv_cache as single_prefill_with_kv_cache
from .prefill import single_prefill_with_kv_cache_return_lse as single_prefill_with_kv_cache_return_lse
from .prefill import single_prefill_with_kv_cache_with_jit_module as single_prefill_with_kv_cache_with_jit_module
from .prefill_backward import gen_prefill_backward_module as gen_prefill_backward_module
from .preload import warmup as warmup
from .quantization import gen_quantization_module as gen_quantization_module
from .quantization import packbits as packbits
from .quantization import segment_packbits as segment_packbits
from .rope import apply_llama31_rope as apply_llama31_rope
from .rope import apply_llama31_rope_inplace as apply_llama31_rope_inplace
from .rope import apply_llama31_rope_pos_ids as apply_llama31_rope_pos_ids
from .rope import apply_llama31_rope_pos_ids_inplace as apply_llama31_rope_pos_ids_inplace
from .rope import apply_rope as apply_rope
from .rope import apply_rope_inplace as apply_rope_inplace
from .rope import apply_rope_pos_ids as apply_rope_pos_ids
from .rope import apply_rope_pos_ids_inplace as apply_rope_pos_ids_inplace
from .rope import apply_rope_with_cos_sin_cache as apply_rope_with_cos_sin_cache
from .rope import apply_rope_with_cos_sin_cache_inplace as apply_rope_with_cos_sin_cache_inplace
from .rope import gen_rope_module as gen_rope_module
from .rope_quant import gen_rope_quant_module as gen_rope_quant_module
from .rope_quant import mla_rope_quantize_fp8 as mla_rope_quantize_fp8
from .rope_quant import rope_quantize_fp8 as rope_quantize_fp8
from .rope_quant import rope_quantize_fp8_append_paged_kv_cache as rope_quantize_fp8_append_paged_kv_cache
from .sampling import TopKTieBreak as TopKTieBreak
from .sampling import chain_speculative_sampling as chain_speculative_sampling
from .sampling import gen_sampling_module as gen_sampling_module
from .sampling import min_p_sampling_from_probs as min_p_sampling_from_probs
from .sampling import sampling_from_logits as sampling_from_logits
from .sampling import sampling_from_probs as sampling_from_probs
from .sampling import softmax as softmax
from .sampling import top_k as top_k
from .sampling import top_k_mask_logits as top_k_mask_logits
from .sampling import top_k_page_table_transform as top_k_page_table_transform
from .sampling import top_k_ragged_transform as top_k_ragged_transform
from .sampling import top_k_renorm_prob as top_k_renorm_prob
from .sampling import top_k_renorm_probs as top_k_renorm_probs
from .sampling import top_k_sampling_from_probs as top_k_sampling_from_probs
from .sampling import top_k_top_p_sampling_from_logits as top_k_top_p_sampling_from_logits
from .sampling import top_k_top_p_sampling_from_probs as top_k_top_p_sampling_from_probs
from .sampling import top_p_renorm_prob as top_p_renorm_prob
from .sampling import top_p_renorm_probs as top_p_renorm_probs
from .sampling import top_p_sampling_from_probs as top_p_sampling_from_probs
from .sparse import BlockSparseAttentionWrapper as BlockSparseAttentionWrapper
from .sparse import VariableBlockSparseAttentionWrapper as VariableBlockSparseAttentionWrapper
from .sparse import convert_bsr_mask_layout as convert_bsr_mask_layout

__version__: str

def __dir__() -> list[str]: ...
