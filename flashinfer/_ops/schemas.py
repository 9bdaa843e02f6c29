"""List the operators of each Python module; ``python scripts/init_stub.py`` writes this file. See ``registry.py``."""

SCHEMAS: dict[str, tuple[str, ...]] = {
    "flashinfer._attention.backward": (
        "flashinfer::prefill_backward(Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, Tensor grad, Tensor grad_lse, Tensor? qo_indptr, Tensor? kv_lens, Tensor? packed_mask, Tensor? alibi_slopes, int layout, int mask_mode, int window_left, float logits_soft_cap, float sm_scale) -> (Tensor, Tensor, Tensor)",
        "flashinfer::prefill_gradients(Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, Tensor grad, Tensor grad_lse, Tensor? qo_indptr, Tensor? kv_lens, Tensor? packed_mask, Tensor? numbers, int layout, int mask_mode, SymInt window_left, int pos_encoding_mode, float logits_soft_cap, float sm_scale, float rope_scale, float rope_theta) -> (Tensor, Tensor, Tensor)",
        "flashinfer::prefill_autograd(Tensor q, Tensor k, Tensor v, Tensor? out, Tensor? lse, Tensor? qo_indptr, Tensor? kv_lens, Tensor? packed_mask, Tensor? numbers, int layout, int mask_mode, SymInt window_left, int pos_encoding_mode, float logits_soft_cap, float sm_scale, float rope_scale, float rope_theta) -> (Tensor, Tensor)",
    ),
    "flashinfer._attention.equal_batch": (
        "flashinfer::attend_batch(Tensor q, Tensor k, Tensor v, Tensor? mask, bool causal, int window_left, float logits_soft_cap, float sm_scale, bool return_lse) -> (Tensor, Tensor)",
    ),
    "flashinfer._attention.merge": (
        "flashinfer::merge_state(Tensor v_a, Tensor s_a, Tensor v_b, Tensor s_b) -> (Tensor, Tensor)",
        "flashinfer::merge_state_in_place(Tensor(a!) v, Tensor(b!) s, Tensor v_other, Tensor s_other, Tensor? mask) -> ()",
        "flashinfer::merge_states(Tensor v, Tensor s) -> (Tensor, Tensor)",
    ),
    "flashinfer._attention.one_request": (
        "flashinfer::attend(str family, str op, str backend, Tensor q, Tensor k, Tensor v, Tensor(a!) out, Tensor(b!)? lse, Tensor? kv_indptr, Tensor? kv_indices, Tensor? plan, Tensor? float_workspace, SymInt batch_size, SymInt max_items, SymInt max_merges, SymInt max_slots, SymInt tile_rows, SymInt slot_rows, Tensor? custom_mask, Tensor? mask_indptr, Tensor? prefix_len, Tensor? token_pos_in_items, SymInt token_pos_in_items_len, SymInt kv_layout, SymInt mask_mode, SymInt window_left, float o_scale, float rope_scale, float rope_theta, SymInt variant, Tensor? maybe_alibi_slopes, Tensor? maybe_numbers, Tensor? maybe_head_scales, Tensor? maybe_sinks, float sm_scale, float logits_soft_cap) -> ()",
        "flashinfer::attend_custom(str module, str op, Tensor q, Tensor k, Tensor v, Tensor(a!) out, Tensor(b!)? lse, int layout, int mask_mode, SymInt window_left, Tensor?[] tensors, Scalar[] scalars) -> ()",
    ),
    "flashinfer._attention.traced": (
        "flashinfer::attend_planned(str family, str op, Tensor q, Tensor k, Tensor v, Tensor(a!) out, Tensor(b!)? lse, SymInt num_queries, SymInt kv_size, SymInt kernels, Tensor? kv_indptr, Tensor? kv_indices, Tensor? plan, Tensor? float_workspace, SymInt batch_size, SymInt max_items, SymInt max_merges, SymInt max_slots, SymInt tile_rows, SymInt slot_rows, Tensor? custom_mask, Tensor? mask_indptr, Tensor? prefix_len, Tensor? token_pos_in_items, SymInt token_pos_in_items_len, SymInt kv_layout, SymInt mask_mode, SymInt window_left, float o_scale, float rope_scale, float rope_theta, SymInt variant, Tensor? maybe_alibi_slopes, Tensor? maybe_numbers, Tensor? maybe_head_scales, Tensor? maybe_sinks, float sm_scale, float logits_soft_cap) -> ()",
    ),
    "flashinfer._delta_rule.operators": (
        "flashinfer::delta_rule_autograd(Tensor q, Tensor k, Tensor v, Tensor? g, Tensor? gk, Tensor? beta, Tensor? initial_state, Tensor? cu_seqlens, float scale, Tensor? scale_tensor, bool final_state, bool l2norm, bool v_first, bool chunked) -> (Tensor, Tensor)",
        "flashinfer::delta_rule(Tensor q, Tensor k, Tensor v, Tensor? g, Tensor? gk, Tensor? beta, Tensor? initial_state, Tensor? cu_seqlens, float scale, bool final_state, bool l2norm, bool v_first, bool chunked) -> (Tensor, Tensor)",
        "flashinfer::delta_rule_checkpoints(Tensor q, Tensor k, Tensor v, Tensor? g, Tensor? gk, Tensor? beta, Tensor? initial_state, Tensor? cu_seqlens, Tensor(a!) checkpoints, Tensor checkpoint_starts, int checkpoint_every, float scale, Tensor? scale_tensor, bool final_state, bool l2norm, bool v_first, bool chunked) -> (Tensor, Tensor)",
        "flashinfer::delta_rule_step(Tensor q, Tensor k, Tensor v, Tensor(a!) state, Tensor? g, Tensor? gk, Tensor? beta, Tensor? A_log, Tensor? dt_bias, Tensor? state_indices, Tensor? output_indices, Tensor(b!)? snapshots, float scale, Tensor? scale_tensor, float lower_bound, int beta_sigmoid, bool l2norm, bool v_first, bool update_state) -> Tensor",
    ),
    "flashinfer._gemm.operators": (
        "flashinfer::grouped_gemm(Tensor(a!) out, Tensor a, Tensor b, Tensor? a_scale, Tensor? b_scale, Tensor? m_indptr, Tensor? m_counts, Tensor? b_indices, Tensor? a_rows, Tensor? row_scale, int granularity_m, int granularity_n, int granularity_k, int arch, int gate) -> ()",
    ),
    "flashinfer._mla.operators": (
        "flashinfer::mla_plan(Tensor workspace, Tensor(a!) buffer, Tensor numbers, Tensor? qo_indptr, Tensor? kv_lens, Tensor? kv_indptr, Tensor? kv_indices, Tensor? last_page_len) -> ()",
        "flashinfer::mla_run(Tensor q_nope, Tensor q_pe, Tensor ckv_cache, Tensor kpe_cache, Tensor(a!) out, Tensor(b!)? lse, Tensor kv_indptr, Tensor kv_indices, Tensor plan, Tensor sizes, Tensor(c!)? float_workspace, bool causal, float sm_scale, float o_scale, float pe_factor, Tensor? ckv_scales, Tensor? sinks) -> ()",
        "flashinfer_profiler::mla_plan(Tensor workspace, Tensor(a!) buffer, Tensor numbers, Tensor? qo_indptr, Tensor? kv_lens, Tensor? kv_indptr, Tensor? kv_indices, Tensor? last_page_len) -> ()",
        "flashinfer_profiler::mla_run(Tensor q_nope, Tensor q_pe, Tensor ckv_cache, Tensor kpe_cache, Tensor(a!) out, Tensor(b!)? lse, Tensor kv_indptr, Tensor kv_indices, Tensor plan, Tensor sizes, Tensor(c!)? float_workspace, bool causal, float sm_scale, float o_scale, float pe_factor, Tensor? ckv_scales, Tensor? sinks, Tensor(d!) profiler_buffer) -> ()",
        "flashinfer_sm90a::mla_plan(Tensor workspace, Tensor(a!) buffer, Tensor numbers, Tensor? qo_indptr, Tensor? kv_lens, Tensor? kv_indptr, Tensor? kv_indices, Tensor? last_page_len) -> ()",
        "flashinfer_sm90a::mla_run(Tensor q_nope, Tensor q_pe, Tensor ckv_cache, Tensor kpe_cache, Tensor(a!) out, Tensor(b!)? lse, Tensor kv_indptr, Tensor kv_indices, Tensor plan, Tensor sizes, Tensor(c!)? float_workspace, bool causal, float sm_scale, float o_scale, float pe_factor, Tensor? ckv_scales, Tensor? sinks) -> ()",
        "flashinfer_sm90a_profiler::mla_plan(Tensor workspace, Tensor(a!) buffer, Tensor numbers, Tensor? qo_indptr, Tensor? kv_lens, Tensor? kv_indptr, Tensor? kv_indices, Tensor? last_page_len) -> ()",
        "flashinfer_sm90a_profiler::mla_run(Tensor q_nope, Tensor q_pe, Tensor ckv_cache, Tensor kpe_cache, Tensor(a!) out, Tensor(b!)? lse, Tensor kv_indptr, Tensor kv_indices, Tensor plan, Tensor sizes, Tensor(c!)? float_workspace, bool causal, float sm_scale, float o_scale, float pe_factor, Tensor? ckv_scales, Tensor? sinks, Tensor(d!) profiler_buffer) -> ()",
        "flashinfer_scaled::mla_plan(Tensor workspace, Tensor(a!) buffer, Tensor numbers, Tensor? qo_indptr, Tensor? kv_lens, Tensor? kv_indptr, Tensor? kv_indices, Tensor? last_page_len) -> ()",
        "flashinfer_scaled::mla_run(Tensor q_nope, Tensor q_pe, Tensor ckv_cache, Tensor kpe_cache, Tensor(a!) out, Tensor(b!)? lse, Tensor kv_indptr, Tensor kv_indices, Tensor plan, Tensor sizes, Tensor(c!)? float_workspace, bool causal, float sm_scale, float o_scale, float pe_factor, Tensor? ckv_scales, Tensor? sinks) -> ()",
    ),
    "flashinfer._sampling.operators": (
        "flashinfer::sample_from_rows(Tensor input, bool is_logits, Tensor? temperature, float temperature_value, Tensor? top_k, SymInt top_k_value, Tensor? top_p, float top_p_value, Tensor? min_p, float min_p_value, bool top_k_first, Tensor? indices, Tensor? seed, SymInt seed_value, Tensor? offset, SymInt offset_value, Tensor? slot, SymInt slot_value) -> (Tensor, Tensor)",
        "flashinfer::softmax(Tensor logits, Tensor? temperature, float temperature_value, bool? enable_pdl) -> Tensor",
        "flashinfer::top_k_renorm_probs(Tensor probs, Tensor? top_k, SymInt top_k_value) -> Tensor",
        "flashinfer::top_p_renorm_probs(Tensor probs, Tensor? top_p, float top_p_value) -> Tensor",
        "flashinfer::top_k_mask_logits(Tensor logits, Tensor? top_k, SymInt top_k_value) -> Tensor",
        "flashinfer::chain_speculative_sampling(Tensor draft_probs, Tensor draft_token_ids, Tensor target_probs, Tensor(a!) accepted, Tensor(b!) emitted, Tensor? seed, SymInt seed_value, Tensor? offset, SymInt offset_value, Tensor? slot, SymInt slot_value) -> Tensor",
        "flashinfer::top_k(Tensor input, SymInt k) -> (Tensor, Tensor)",
    ),
    "flashinfer.activation": (
        "flashinfer::silu_and_mul_autograd(Tensor input, bool? enable_pdl) -> Tensor",
        "flashinfer::silu_and_mul(Tensor input, bool? enable_pdl) -> Tensor",
        "flashinfer::silu_and_mul_out(Tensor(a!) out, Tensor input, bool? enable_pdl) -> ()",
        "flashinfer::gelu_tanh_and_mul_autograd(Tensor input, bool? enable_pdl) -> Tensor",
        "flashinfer::gelu_tanh_and_mul(Tensor input, bool? enable_pdl) -> Tensor",
        "flashinfer::gelu_tanh_and_mul_out(Tensor(a!) out, Tensor input, bool? enable_pdl) -> ()",
        "flashinfer::gelu_and_mul_autograd(Tensor input, bool? enable_pdl) -> Tensor",
        "flashinfer::gelu_and_mul(Tensor input, bool? enable_pdl) -> Tensor",
        "flashinfer::gelu_and_mul_out(Tensor(a!) out, Tensor input, bool? enable_pdl) -> ()",
    ),
    "flashinfer.activation_backward": (
        "flashinfer::silu_and_mul_backward(Tensor grad, Tensor input) -> Tensor",
        "flashinfer::gelu_and_mul_backward(Tensor grad, Tensor input) -> Tensor",
        "flashinfer::gelu_tanh_and_mul_backward(Tensor grad, Tensor input) -> Tensor",
    ),
    "flashinfer.batch_schedule": (
        "flashinfer::schedule_batch(Tensor(a!) plan, Tensor(b!) kv_indptr, Tensor(c!)? numbers, Tensor seq_lens, Tensor? qo_indptr, Tensor? sm_scale, int num_tokens, int q_len, int most_keys, int table_stride, int num_kv_heads, int group, int tile_rows, int mask_mode, int window_left, int workers) -> ()",
    ),
    "flashinfer.causal_conv1d": (
        "flashinfer::causal_conv1d_autograd(Tensor x, Tensor weight, Tensor? bias, Tensor? initial_states, Tensor? cu_seqlens, bool final_states, bool silu) -> (Tensor, Tensor)",
        "flashinfer::causal_conv1d(Tensor x, Tensor weight, Tensor? bias, Tensor? initial_states, Tensor? cu_seqlens, bool final_states, bool silu) -> (Tensor, Tensor)",
        "flashinfer::causal_conv1d_update(Tensor x, Tensor(a!) conv_state, Tensor weight, Tensor? bias, Tensor? cache_seqlens, Tensor? conv_state_indices, int pad_slot_id, bool silu) -> Tensor",
    ),
    "flashinfer.causal_conv1d_backward": (
        "flashinfer::causal_conv1d_backward(Tensor? grad_out, Tensor? grad_final, Tensor x, Tensor weight, Tensor? bias, Tensor? initial_states, Tensor? cu_seqlens, bool silu) -> (Tensor, Tensor, Tensor, Tensor)",
    ),
    "flashinfer.comm.allreduce": (
        "flashinfer::allreduce(Tensor input, Tensor(a!) out, Tensor(b!) order, Tensor table, int shots, bool? enable_pdl) -> ()",
        "flashinfer::allreduce_norm(Tensor input, Tensor residual_in, Tensor weight, Tensor(a!)? out, Tensor(b!) residual_out, Tensor(c!) norm_out, Tensor(d!) order, Tensor table, float eps, float weight_bias, int shots, bool? enable_pdl) -> ()",
        "flashinfer::allreduce_norm_quant(Tensor input, Tensor residual_in, Tensor weight, Tensor(a!)? out, Tensor(b!) residual_out, Tensor(c!)? norm_out, Tensor(d!) quant_out, Tensor(e!)? scale_out, Tensor(f!) order, Tensor table, int quant, float scale, Tensor? scale_tensor, int group, float eps, float weight_bias, int shots, bool? enable_pdl) -> ()",
    ),
    "flashinfer.comm.alltoall": (
        "flashinfer::moe_dispatch(Tensor experts, Tensor payload0, Tensor? payload1, Tensor? payload2, Tensor? payload3, Tensor? payload4, Tensor? payload5, Tensor(a!) targets, Tensor(b!) order, Tensor table, int most, int num_experts, int ids, int invalid_id, bool? enable_pdl) -> ()",
        "flashinfer::moe_combine(Tensor payload, Tensor(a!) out, Tensor targets, Tensor(b!) order, Tensor table, bool? enable_pdl) -> ()",
    ),
    "flashinfer.comm.shares": (
        "flashinfer::reduce_scatter(Tensor input, Tensor(a!) output, Tensor(b!) order, Tensor table, bool? enable_pdl) -> ()",
        "flashinfer::all_gather(Tensor input, Tensor(a!) output, Tensor(b!) order, Tensor table, bool? enable_pdl) -> ()",
    ),
    "flashinfer.concat_ops": (
        "flashinfer::concat_mla_k(Tensor(a!) k, Tensor k_nope, Tensor k_rope) -> ()",
    ),
    "flashinfer.delta_rule_backward": (
        "flashinfer::delta_rule_backward(Tensor? grad_o, Tensor? grad_state, Tensor q, Tensor k, Tensor v, Tensor? g, Tensor? gk, Tensor? beta, Tensor? initial_state, Tensor? cu_seqlens, float scale, Tensor? scale_tensor, bool l2norm, bool v_first, bool chunked) -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
    ),
    "flashinfer.diffusion_ops": (
        "flashinfer::fused_qk_rmsnorm_rope(Tensor qkv, Tensor q_weight, Tensor k_weight, Tensor(a!) q_out, Tensor(b!) k_out, Tensor(c!) v_out, int ppf, int pph, int ppw, int num_frame_channels, int num_height_channels, int num_width_channels, float eps, float base, bool interleave, bool is_qk_norm, float output_quant_scale, float v_quant_scale) -> ()",
    ),
    "flashinfer.fused_moe.operators": (
        "flashinfer::moe_route(Tensor(a!) weights, Tensor(b!) ids, Tensor logits, Tensor? bias, int method, int n_group, int topk_group, float routed_scaling_factor) -> ()",
        "flashinfer::moe_sort(Tensor ids, SymInt num_experts, SymInt first_expert) -> (Tensor, Tensor, Tensor)",
        "flashinfer::moe_activate(Tensor input, Tensor? m_indptr, int activation, bool gate_first, Tensor? bias, Tensor? swiglu_alpha, Tensor? swiglu_beta, Tensor? swiglu_limit, Tensor? quant_scale, bool blocks) -> (Tensor, Tensor)",
        "flashinfer::moe_finalize(Tensor(a!) out, Tensor input, Tensor rows, Tensor? weights, Tensor? bias, Tensor? m_indptr) -> ()",
    ),
    "flashinfer.gated_norm": (
        "flashinfer::gated_rmsnorm_autograd(Tensor input, Tensor gate, Tensor weight, float eps, Tensor? eps_tensor, int group_size, bool sigmoid, bool norm_before_gate) -> Tensor",
        "flashinfer::gated_rmsnorm(Tensor input, Tensor gate, Tensor weight, float eps, int group_size, bool sigmoid, bool norm_before_gate) -> Tensor",
    ),
    "flashinfer.gated_norm_backward": (
        "flashinfer::gated_rmsnorm_backward(Tensor grad, Tensor input, Tensor gate, Tensor weight, float eps, Tensor? eps_tensor, int group_size, bool sigmoid, bool norm_before_gate) -> (Tensor, Tensor, Tensor)",
    ),
    "flashinfer.group_quant": (
        "flashinfer::per_token_group_quant_8bit(Tensor x, Tensor(a!) q, Tensor(b!) scale, int group_size, float eps, bool power_of_two) -> ()",
    ),
    "flashinfer.mamba": (
        "flashinfer::selective_state_update(Tensor(a!) state, Tensor x, Tensor dt, Tensor A, Tensor B, Tensor C, Tensor? D, Tensor? z, Tensor? dt_bias, bool dt_softplus, Tensor? state_batch_indices, Tensor? dst_state_batch_indices, int pad_slot_id, Tensor(b!) out, bool update_state, Tensor(c!)? intermediate_states_buffer, Tensor? intermediate_state_indices, Tensor? rand_seed, int philox_rounds, Tensor? cu_seqlens, Tensor? num_accepted_tokens, Tensor(d!)? state_scale, Tensor(e!)? intermediate_state_scales) -> ()",
    ),
    "flashinfer.mxfp4_gemm": (
        "flashinfer::mxfp4_gemm(Tensor(a!) out, Tensor a, Tensor b, Tensor b_scale, Tensor m_indptr, Tensor? a_rows) -> ()",
    ),
    "flashinfer.norm": (
        "flashinfer::rmsnorm_autograd(Tensor input, Tensor weight, float eps, Tensor? eps_tensor, bool? enable_pdl) -> Tensor",
        "flashinfer::rmsnorm(Tensor input, Tensor weight, float eps, bool? enable_pdl) -> Tensor",
        "flashinfer::rmsnorm_out(Tensor(a!) out, Tensor input, Tensor weight, float eps, bool? enable_pdl) -> ()",
        "flashinfer::gemma_rmsnorm_autograd(Tensor input, Tensor weight, float eps, Tensor? eps_tensor, bool? enable_pdl) -> Tensor",
        "flashinfer::gemma_rmsnorm(Tensor input, Tensor weight, float eps, bool? enable_pdl) -> Tensor",
        "flashinfer::gemma_rmsnorm_out(Tensor(a!) out, Tensor input, Tensor weight, float eps, bool? enable_pdl) -> ()",
        "flashinfer::fused_add_rmsnorm_autograd(Tensor input, Tensor residual, Tensor weight, float eps, Tensor? eps_tensor, bool? enable_pdl) -> (Tensor, Tensor)",
        "flashinfer::fused_add_rmsnorm(Tensor(a!) input, Tensor(b!) residual, Tensor weight, float eps, bool? enable_pdl) -> ()",
        "flashinfer::gemma_fused_add_rmsnorm_autograd(Tensor input, Tensor residual, Tensor weight, float eps, Tensor? eps_tensor, bool? enable_pdl) -> (Tensor, Tensor)",
        "flashinfer::gemma_fused_add_rmsnorm(Tensor(a!) input, Tensor(b!) residual, Tensor weight, float eps, bool? enable_pdl) -> ()",
        "flashinfer::layernorm_autograd(Tensor input, Tensor gemma, Tensor beta, float eps, Tensor? eps_tensor) -> Tensor",
        "flashinfer::layernorm(Tensor input, Tensor gemma, Tensor beta, float eps) -> Tensor",
        "flashinfer::layernorm_out(Tensor(a!) out, Tensor input, Tensor gemma, Tensor beta, float eps) -> ()",
    ),
    "flashinfer.norm_backward": (
        "flashinfer::rmsnorm_backward(Tensor grad, Tensor input, Tensor weight, Tensor? grad_sum, float eps, Tensor? eps_tensor, float weight_offset) -> (Tensor, Tensor)",
        "flashinfer::layernorm_backward(Tensor grad, Tensor input, Tensor gemma, float eps, Tensor? eps_tensor) -> (Tensor, Tensor, Tensor)",
    ),
    "flashinfer.norm_quant": (
        "flashinfer::rmsnorm_quant(Tensor(a!) out, Tensor input, Tensor weight, float scale, Tensor? scale_tensor, float eps, Tensor? eps_tensor, bool? enable_pdl) -> ()",
        "flashinfer::fused_add_rmsnorm_quant(Tensor(a!) out, Tensor input, Tensor(b!) residual, Tensor weight, float scale, Tensor? scale_tensor, float eps, Tensor? eps_tensor, bool? enable_pdl) -> ()",
        "flashinfer::layernorm_quant(Tensor(a!) out, Tensor input, Tensor gemma, Tensor beta, float scale, Tensor? scale_tensor, float eps, Tensor? eps_tensor) -> ()",
        "flashinfer::fused_add_rmsnorm_fp8_block_quant(Tensor(a!) out, Tensor(b!) block_scale, Tensor(c!) normed_out, Tensor input, Tensor(d!) residual, Tensor weight, float eps, Tensor? eps_tensor, bool? enable_pdl) -> ()",
    ),
    "flashinfer.page": (
        "flashinfer::append_paged_kv_cache(Tensor append_key, Tensor append_value, Tensor batch_indices, Tensor positions, Tensor(a!) paged_kv_cache, Tensor(b!)? paged_v_cache, Tensor kv_indices, Tensor kv_indptr, Tensor kv_last_page_len, bool heads_first) -> ()",
        "flashinfer::append_paged_mla_kv_cache(Tensor append_ckv, Tensor append_kpe, Tensor batch_indices, Tensor positions, Tensor(a!) ckv_cache, Tensor(b!) kpe_cache, Tensor kv_indices, Tensor kv_indptr, Tensor kv_last_page_len) -> ()",
        "flashinfer::get_batch_indices_positions(Tensor append_indptr, Tensor seq_lens, SymInt nnz) -> (Tensor, Tensor)",
        "flashinfer::get_batch_indices_positions_out(Tensor append_indptr, Tensor seq_lens, Tensor(a!) batch_indices, Tensor(b!) positions) -> ()",
        "flashinfer::get_seq_lens(Tensor kv_indptr, Tensor kv_last_page_len, SymInt page_size) -> Tensor",
        "flashinfer::block_sparse_indices_to_vector_sparse_offsets(Tensor block_sparse_indices, Tensor block_sparse_indptr, Tensor(a!) vector_sparse_offsets, Tensor vector_sparse_indptr, Tensor kv_lens, SymInt stride_block, SymInt stride_n, SymInt block_size) -> ()",
    ),
    "flashinfer.quantization": (
        "flashinfer::packbits(Tensor x, bool little) -> Tensor",
        "flashinfer::segment_packbits(Tensor x, Tensor indptr, bool little) -> (Tensor, Tensor)",
    ),
    "flashinfer.rope": (
        "flashinfer::apply_rope_autograd(Tensor q, Tensor k, Tensor indptr, Tensor offsets, int? rotary_dim, bool interleave, float rope_scale, float rope_theta, bool llama31, float low_freq_factor, float high_freq_factor, int old_context_len, Tensor? frequencies, bool inverse) -> (Tensor, Tensor)",
        "flashinfer::apply_rope(Tensor q, Tensor k, Tensor indptr, Tensor offsets, int? rotary_dim, bool interleave, float rope_scale, float rope_theta, bool llama31, float low_freq_factor, float high_freq_factor, int old_context_len) -> (Tensor, Tensor)",
        "flashinfer::apply_rope_inplace(Tensor(a!) q, Tensor(b!) k, Tensor indptr, Tensor offsets, int? rotary_dim, bool interleave, float rope_scale, float rope_theta, bool llama31, float low_freq_factor, float high_freq_factor, int old_context_len) -> ()",
        "flashinfer::apply_rope_pos_ids_autograd(Tensor q, Tensor k, Tensor pos_ids, int? rotary_dim, bool interleave, float rope_scale, float rope_theta, bool llama31, float low_freq_factor, float high_freq_factor, int old_context_len, Tensor? frequencies, bool inverse) -> (Tensor, Tensor)",
        "flashinfer::apply_rope_pos_ids(Tensor q, Tensor k, Tensor pos_ids, int? rotary_dim, bool interleave, float rope_scale, float rope_theta, bool llama31, float low_freq_factor, float high_freq_factor, int old_context_len) -> (Tensor, Tensor)",
        "flashinfer::apply_rope_pos_ids_inplace(Tensor(a!) q, Tensor(b!) k, Tensor pos_ids, int? rotary_dim, bool interleave, float rope_scale, float rope_theta, bool llama31, float low_freq_factor, float high_freq_factor, int old_context_len) -> ()",
        "flashinfer::apply_rope_with_cos_sin_cache_autograd(Tensor positions, Tensor query, Tensor key, SymInt head_size, Tensor cos_sin_cache, bool is_neox, bool inverse) -> (Tensor, Tensor)",
        "flashinfer::apply_rope_with_cos_sin_cache(Tensor positions, Tensor query, Tensor key, SymInt head_size, Tensor cos_sin_cache, bool is_neox) -> (Tensor, Tensor)",
        "flashinfer::apply_rope_with_cos_sin_cache_inplace(Tensor positions, Tensor(a!) query, Tensor(b!) key, SymInt head_size, Tensor cos_sin_cache, bool is_neox) -> ()",
    ),
    "flashinfer.rope_quant": (
        "flashinfer::rope_quantize_fp8(Tensor q_rope, Tensor k_rope, Tensor q_nope, Tensor k_nope, Tensor cos_sin_cache, Tensor pos_ids, bool is_neox, float quant_scale_q, Tensor? quant_scale_q_tensor, float quant_scale_kv, Tensor? quant_scale_kv_tensor, Tensor(a!) q_rope_out, Tensor(b!) k_rope_out, Tensor(c!) q_nope_out, Tensor(d!) k_nope_out, bool? enable_pdl) -> ()",
        "flashinfer::rope_quantize_fp8_append_paged_kv_cache(Tensor q_rope, Tensor k_rope, Tensor q_nope, Tensor k_nope, Tensor? v, Tensor cos_sin_cache, Tensor pos_ids, Tensor(a!) k_cache, Tensor(b!) v_cache, Tensor kv_indices, Tensor kv_indptr, Tensor batch_indices, Tensor positions, bool is_neox, float quant_scale_q, Tensor? quant_scale_q_tensor, float quant_scale_kv, Tensor? quant_scale_kv_tensor, SymInt page_size, bool heads_first, Tensor(c!) q_rope_out, Tensor(d!) q_nope_out, bool? enable_pdl) -> ()",
    ),
}
