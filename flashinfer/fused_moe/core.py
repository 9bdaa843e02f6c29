"""Mixtures of experts, at the address that engines import from FlashInfer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from .._compat.refused import FP4, declare
from .._gemm.arguments import F32
from .._gemm.arguments import blocks as cdiv
from .._ops.dtypes import FLOATS, HALVES
from .._ops.errors import either, type_error, value_error
from .._ops.numbers import check_range, whole
from .._ops.shapes import check_tensors
from .._ops.sizes import differs
from .._ops.tensors import check_count, check_dtype, check_tensor
from ..errors import UnsupportedError
from ..mxfp4_gemm import DEPTH, interleaved_scales
from ..tllm_enums import DEFAULT_SITU_BETA as DEFAULT_SITU_BETA
from ..tllm_enums import DEFAULT_SITU_LINEAR_BETA as DEFAULT_SITU_LINEAR_BETA
from ..tllm_enums import DEFAULT_SWIGLU_ALPHA as DEFAULT_SWIGLU_ALPHA
from ..tllm_enums import DEFAULT_SWIGLU_BETA as DEFAULT_SWIGLU_BETA
from ..tllm_enums import DEFAULT_SWIGLU_LIMIT as DEFAULT_SWIGLU_LIMIT
from ..tllm_enums import ActivationType, is_gated_activation
from ..tllm_enums import RoutingMethodType as RoutingMethodType
from .layer import BLOCK, Gate, Scales, run_experts
from .workspace import Workspace, aligned_bytes, check_workspace

_NAME = "cutlass_fused_moe"
_INT32 = (torch.int32,)
_BYTES = (torch.uint8,)
_NO_KERNEL = (ActivationType.InvalidType, ActivationType.ClampedRelu2)


def _bias(argument: str, bias: torch.Tensor, *shape: int) -> torch.Tensor:
    check_tensors(_NAME, **{argument: (bias, shape)})
    return bias.to(torch.float32).contiguous()


def _scales(
    quant_scales: Sequence[torch.Tensor] | None, fp8: bool, blocks: bool, first: torch.Tensor, second: torch.Tensor
) -> Scales | None:
    """Return ``quant_scales`` in float32, after checking them against the weights."""
    four_bits = first.dtype == torch.uint8
    count = 2 if blocks or four_bits else 4 if fp8 else 0
    scales = [] if quant_scales is None else list(quant_scales)
    check_range(_NAME, "quant_scales", len(scales), count, count, "tensors", f" for weights of {first.dtype}")
    if not scales:
        return None
    if four_bits:
        both = enumerate(zip(scales, (first, second), strict=True))
        one, two = (interleaved_scales(_NAME, f"quant_scales[{i}]", scale, weight) for i, (scale, weight) in both)
        return Scales(one, two)
    for index, scale in enumerate(scales):
        check_tensor(_NAME, f"quant_scales[{index}]", scale)
    experts, width, hidden = first.shape
    scales = [scale.to(torch.float32) for scale in scales]
    if blocks:
        of_first = (experts, cdiv(width, BLOCK), cdiv(hidden, BLOCK))
        of_second = (experts, cdiv(hidden, BLOCK), cdiv(second.shape[2], BLOCK))
        check_tensors(_NAME, **{"quant_scales[0]": (scales[0], of_first), "quant_scales[1]": (scales[1], of_second)})
        return Scales(scales[0], scales[1], blocks=True)
    for index, elements in ((0, experts), (1, 1), (2, experts)):
        check_count(_NAME, f"quant_scales[{index}]", scales[index], elements)
    return Scales(scales[0].reshape(-1), scales[2].reshape(-1), scales[1].reshape(()))


def cutlass_fused_moe(
    input: torch.Tensor,
    token_selected_experts: torch.Tensor,
    token_final_scales: torch.Tensor | None,
    fc1_expert_weights: torch.Tensor,
    fc2_expert_weights: torch.Tensor,
    output_dtype: torch.dtype,
    quant_scales: Sequence[torch.Tensor] | None,
    fc1_expert_biases: torch.Tensor | None = None,
    fc2_expert_biases: torch.Tensor | None = None,
    input_sf: torch.Tensor | None = None,
    swiglu_alpha: torch.Tensor | None = None,
    swiglu_beta: torch.Tensor | None = None,
    swiglu_limit: torch.Tensor | None = None,
    tp_size: int = 1,
    tp_rank: int = 0,
    ep_size: int = 1,
    ep_rank: int = 0,
    cluster_size: int = 1,
    cluster_rank: int = 0,
    output: torch.Tensor | None = None,
    enable_alltoall: bool = False,
    use_deepseek_fp8_block_scale: bool = False,
    use_w4_group_scaling: bool = False,
    use_mxfp8_act_scaling: bool = False,
    min_latency_mode: bool = False,
    use_packed_weights: bool = False,
    use_wfp4afp8_humming: bool = False,
    tune_max_num_tokens: int = 8192,
    enable_pdl: bool | None = None,
    activation_type: ActivationType | int = ActivationType.Swiglu,
    swizzled_input_sf: bool = True,
    use_fused_finalize: bool = True,
    profile_ids: Any = None,
    workspace_buffer: torch.Tensor | None = None,
    *,
    clamped_relu2_limit: torch.Tensor | None = None,
    situ_beta: torch.Tensor | None = None,
    situ_linear_beta: torch.Tensor | None = None,
    backend: str = "cutlass",
    use_fp8_block_scaling: bool = False,
    use_w4a8_group_scaling: bool = False,
) -> list[torch.Tensor]:
    """Compute this rank's part of a mixture of experts, from routed tokens to their sums.

    With ``e = selected[t, j]``::

        out[t] = sum over j of scale[t, j] * W2[e] (silu(W1[e] x[t]) * (W3[e] x[t]))

    Numbers of rows stay on the device: a CUDA graph serves every routing. A row's bits do not depend on other
    rows.

    Args:
        input: ``[T, H]``: float32, float16, bfloat16; float8_e4m3fn for weights of that dtype with one scale
            each.
        token_selected_experts: ``[T, k]`` int32, of all ranks' experts; those of other ranks and negative
            ones add 0.
        token_final_scales: ``[T, k]`` float32; ``None``: 1.
        fc1_expert_weights: ``[E, 2 I, H]``, the rows of W3 before those of W1; ``[E, I, H]`` without a gate.
            Of input's dtype, or float8_e4m3fn. E is the number of experts of this rank. In MXFP4, uint8
            ``[E, 2 I, H / 2]`` from :func:`flashinfer.interleave_moe_weights_for_sm90_mixed_gemm`, with input in
            float16 or bfloat16.
        fc2_expert_weights: ``[E, H, I]``, in MXFP4 ``[E, H, I / 2]``.
        output_dtype: float32, float16 or bfloat16.
        quant_scales: ``None`` or ``[]``; in float8_e4m3fn
            ``[first [E], activated [], second [E], input []]``: ``first`` and ``second`` multiply the
            products, ``activated`` multiplies the operand of the second; for blocks
            ``[[E, 2 I / 128, H / 128], [E, H / 128, I / 128]]``; in MXFP4 the scales of both weights from
            :func:`flashinfer.interleave_moe_scales_for_sm90_mixed_gemm`, uint8 or the same bytes as int32.
        fc1_expert_biases, fc2_expert_biases: ``[E, 2 I]`` and ``[E, H]``, added before the activation and
            before the scale of a token.
        swiglu_alpha, swiglu_beta, swiglu_limit: ``[E]`` float32, each optional (1, 0, no limit):
            ``g = min(gate, limit)``, ``u`` is the linear half clamped to ``+-limit``, and the activation is
            ``g * sigmoid(alpha * g) * (u + beta)``. SwigluStep reads ``swiglu_limit`` only (7).
        tp_size, tp_rank: the caller splits I and adds the results of all ranks.
        ep_size, ep_rank: this rank has experts from ``ep_rank * E`` on; the caller adds the results of all
            ranks.
        output: ``[T, H]`` of output_dtype; allocated by default.
        use_deepseek_fp8_block_scale, use_fp8_block_scaling: two names of one option. Weights in float8_e4m3fn
            have a scale for each 128 x 128. Input of 16 or 32 bits is quantised here, with a scale for each
            128 of a row.
        use_w4_group_scaling: true for weights in MXFP4. H and I are multiples of 128: pad with zeros.
        activation_type: Swiglu, SwigluBias, SwigluStep, Geglu, GegluTanh, Situ; without a gate Relu2, Relu,
            Gelu, Silu, Identity.
        situ_beta, situ_linear_beta: ``[E]`` float32, of Situ,
            ``b tanh(gate / b) sigmoid(gate) l tanh(up / l)``: b (4) and l (25).
        workspace_buffer: a vector of uint8 or int8 of at least :func:`cutlass_fused_moe_workspace_size` bytes
            for the results of the products.
        enable_alltoall, tune_max_num_tokens, enable_pdl, swizzled_input_sf, use_fused_finalize, profile_ids:
            accepted and unused. Results are the same in every run.

    Returns:
        A list of ``[T, H]``.

    Raises:
        ValueError: invalid shapes or devices.
        TypeError: invalid dtypes.
        UnsupportedError: other weights of 4 bits, ``input_sf``, ``clamped_relu2_limit``, another backend,
            clusters, and a true ``use_w4a8_group_scaling``, ``use_mxfp8_act_scaling``,
            ``use_packed_weights``, ``use_wfp4afp8_humming`` or ``min_latency_mode``.
        GradientError: a tensor requires a gradient.
    """
    for name, value in {
        "input_sf": input_sf is not None, "clamped_relu2_limit": clamped_relu2_limit is not None,
        "use_w4a8_group_scaling": use_w4a8_group_scaling, "use_mxfp8_act_scaling": use_mxfp8_act_scaling,
        "use_packed_weights": use_packed_weights, "use_wfp4afp8_humming": use_wfp4afp8_humming,
        "min_latency_mode": min_latency_mode, "cluster_size": cluster_size != 1, "backend": backend != "cutlass",
    }.items():  # fmt: skip
        if value:
            raise UnsupportedError(f"{_NAME}: {name}: has no kernel here; use bfloat16, float16, fp8 or MXFP4 weights")
    x, ids, first, second = input, token_selected_experts, fc1_expert_weights, fc2_expert_weights
    four_bits = bool(use_w4_group_scaling)
    if not four_bits and isinstance(first, torch.Tensor) and first.dtype in (torch.int64, torch.uint8):
        raise UnsupportedError(f"{_NAME}: fc1_expert_weights: {FP4}, or MXFP4 with use_w4_group_scaling")
    tokens, hidden, slots, experts, width, *_, inner = check_tensors(
        _NAME, input=(x, "t h"), token_selected_experts=(ids, "t k", _INT32),
        fc1_expert_weights=(first, "e w p", _BYTES) if four_bits else (first, "e w h"),
        fc2_expert_weights=(second, "e h i", "fc1_expert_weights"), token_final_scales=(token_final_scales, "?t k", F32),
        output=(output, "?t h", (output_dtype,)),
    )  # fmt: skip
    if four_bits:
        inner *= 2
        _check_four_bits(x, first, inner)
    try:
        act = ActivationType(activation_type)
    except ValueError:
        raise value_error(_NAME, "activation_type", repr(activation_type), "an ActivationType") from None
    if act in _NO_KERNEL:
        raise UnsupportedError(f"{_NAME}: activation_type: {act.name} has no kernel; use Swiglu with its numbers")
    gate = _gate(act, first, swiglu_alpha, swiglu_beta, swiglu_limit, situ_beta, situ_linear_beta)
    if differs(width, (2 if act.is_gated else 1) * inner):
        shape = [experts, (2 if act.is_gated else 1) * inner, first.shape[2]]
        raise value_error(_NAME, "fc1_expert_weights", f"shape {list(first.shape)}", shape)
    blocks, fp8 = use_fp8_block_scaling or use_deepseek_fp8_block_scale, first.dtype == torch.float8_e4m3fn
    if blocks and not fp8:
        raise type_error(_NAME, "fc1_expert_weights", first.dtype, "torch.float8_e4m3fn for block scales")
    check_dtype(_NAME, "output_dtype", output_dtype, FLOATS)
    if not blocks and not four_bits and x.dtype != first.dtype:
        raise type_error(_NAME, "input", x.dtype, f"fc1_expert_weights', {first.dtype}")
    for name, size, rank in (("ep", ep_size, ep_rank), ("tp", tp_size, tp_rank)):
        check_range(_NAME, f"{name}_rank", rank, 0, size - 1)
    scales = _scales(quant_scales, fp8, blocks, first, second)
    out = torch.empty((tokens, hidden), dtype=output_dtype, device=x.device) if output is None else output
    one = None if fc1_expert_biases is None else _bias("fc1_expert_biases", fc1_expert_biases, *first.shape[:2])
    two = None if fc2_expert_biases is None else _bias("fc2_expert_biases", fc2_expert_biases, experts, hidden)
    if workspace_buffer is not None:
        shapes = _intermediates(tokens * slots, hidden, inner, act.is_gated)
        least = aligned_bytes(shapes, output_dtype if fp8 else x.dtype)
        check_workspace(_NAME, workspace_buffer, x.device, least)
    run_experts(
        out, x, ids.contiguous(), None if token_final_scales is None else token_final_scales.contiguous(), first, second,
        gate, first_expert=ep_rank * experts, scales=scales, biases=(one, two), workspace=Workspace(workspace_buffer),
    )  # fmt: skip
    return [out]


def _check_four_bits(x: torch.Tensor, first: torch.Tensor, inner: int) -> None:
    """Check what kernels for MXFP4 need of the input and of the sizes."""
    check_dtype(_NAME, "input", x.dtype, HALVES)
    hidden = x.shape[1]
    if differs(2 * first.shape[2], hidden):
        shape = [*first.shape[:2], f"{hidden} / 2"]
        raise value_error(_NAME, "fc1_expert_weights", f"shape {list(first.shape)}", shape)
    for name, size in (("fc1_expert_weights", hidden), ("fc2_expert_weights", inner)):
        if size % DEPTH != 0:
            raise value_error(_NAME, name, f"rows of {size} elements", f"a multiple of {DEPTH}; pad with zeros")


def _gate(
    act: ActivationType, first: torch.Tensor, alpha: torch.Tensor | None, beta: torch.Tensor | None,
    limit: torch.Tensor | None, situ_beta: torch.Tensor | None, situ_linear_beta: torch.Tensor | None,
) -> Gate:  # fmt: skip
    """Return the numbers of each expert that an activation reads.

    Numbers for another activation are an error.
    """
    swiglu = (ActivationType.Swiglu, ActivationType.SwigluBias)
    given = {
        "swiglu_alpha": (alpha, swiglu), "swiglu_beta": (beta, swiglu),
        "swiglu_limit": (limit, (*swiglu, ActivationType.SwigluStep)),
        "situ_beta": (situ_beta, (ActivationType.Situ,)), "situ_linear_beta": (situ_linear_beta, (ActivationType.Situ,)),
    }  # fmt: skip
    for name, (number, readers) in given.items():
        if number is None:
            continue
        if act not in readers:
            raise value_error(_NAME, "activation_type", act.name, f"{either(one.name for one in readers)} for {name}")
        check_tensors(_NAME, fc1_expert_weights=(first, "e _ _"), **{name: (number, "e", (torch.float32,))})
    if act == ActivationType.Situ:
        alpha, beta = situ_beta, situ_linear_beta
    numbers = (None if one is None else one.contiguous() for one in (alpha, beta, limit))
    return Gate(int(act), False, *numbers)


def _intermediates(slots: int, hidden: int, inner: int, gated: bool) -> tuple[tuple[int, int], ...]:
    """Return shapes of the first product, of the activated rows, and of the second product."""
    return (slots, (2 if gated else 1) * inner), (slots, inner), (slots, hidden)


def cutlass_fused_moe_workspace_size(
    max_num_tokens: int,
    hidden_size: int,
    intermediate_size: int,
    num_experts_total: int,
    top_k: int,
    *,
    x_dtype: torch.dtype,
    weight_dtype: torch.dtype,
    output_dtype: torch.dtype = torch.bfloat16,
    activation_type: ActivationType | int = ActivationType.Swiglu,
    tp_size: int = 1,
    tp_rank: int = 0,
    ep_size: int = 1,
    ep_rank: int = 0,
    use_deepseek_fp8_block_scale: bool = False,
    use_w4_group_scaling: bool = False,
    use_mxfp8_act_scaling: bool = False,
    min_latency_mode: bool = False,
    use_packed_weights: bool = False,
    use_wfp4afp8_humming: bool = False,
    use_fused_finalize: bool = True,
    enable_alltoall: bool = False,
    device: torch.device | str | None = None,
    backend: str = "cutlass",
) -> int:
    """Return the size of :func:`cutlass_fused_moe`'s ``workspace_buffer`` for ``max_num_tokens`` tokens.

    The buffer holds the results of both products. torch allocates lists of rows and quantised rows: its
    caching allocator also serves them in CUDA graphs. Without a buffer torch allocates everything.

    Args:
        max_num_tokens, hidden_size, intermediate_size, top_k: T, H, I and k; the size grows with each of
            them.
        x_dtype, weight_dtype, output_dtype: of input, of both weights, and of the output.
        activation_type: decides whether the first product has a gate.
        num_experts_total, tp_size, tp_rank, ep_size, ep_rank, device, use_fused_finalize, enable_alltoall,
            use_deepseek_fp8_block_scale, use_w4_group_scaling: accepted and unused.

    Raises:
        ValueError: a negative size, or no ActivationType.
        TypeError: a size that is no integer.
        UnsupportedError: an option that :func:`cutlass_fused_moe` has no kernel for.
    """
    name = "cutlass_fused_moe_workspace_size"
    for flag, value in {
        "use_mxfp8_act_scaling": use_mxfp8_act_scaling,
        "use_packed_weights": use_packed_weights, "use_wfp4afp8_humming": use_wfp4afp8_humming,
        "min_latency_mode": min_latency_mode, "backend": backend != "cutlass",
    }.items():  # fmt: skip
        if value:
            raise UnsupportedError(f"{name}: {flag}: has no kernel here; use bfloat16, float16, fp8 or MXFP4 weights")
    sizes = {
        "max_num_tokens": max_num_tokens, "hidden_size": hidden_size, "intermediate_size": intermediate_size,
        "num_experts_total": num_experts_total, "top_k": top_k,
    }  # fmt: skip
    for argument, size in sizes.items():
        whole(name, argument, size, 0)
    shapes = _intermediates(
        max_num_tokens * top_k, hidden_size, intermediate_size, is_gated_activation(activation_type)
    )
    return aligned_bytes(shapes, output_dtype if weight_dtype == torch.float8_e4m3fn else x_dtype)


__all__ = sorted([
    "ActivationType",
    "RoutingMethodType",
    "cutlass_fused_moe",
    "cutlass_fused_moe_workspace_size",
    "is_gated_activation",
    *declare(globals()),
])  # fmt: skip
