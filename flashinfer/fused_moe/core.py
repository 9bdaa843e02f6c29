"""Mixtures of experts: what engines import of FlashInfer's module of this name."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.compiler import is_dynamo_compiling

from .. import _unsupported
from .._ops.numbers import whole
from .._ops.tensors import check_form, check_tensor
from ..errors import UnsupportedError
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
_NO_KERNEL = (ActivationType.InvalidType, ActivationType.ClampedRelu2)


def _mistake(argument: str, text: str) -> ValueError:
    return ValueError(f"{_NAME}: {argument}: {text}")


def _check_shape(argument: str, tensor: torch.Tensor, *wanted: int) -> None:
    check_tensor(_NAME, argument, tensor)
    if is_dynamo_compiling() and tensor.dim() == len(wanted):
        for got, size in zip(tensor.shape, wanted, strict=True):
            torch._check(got == size)  # sizes of which nothing is known yet are compared when the graph runs
    elif list(tensor.shape) != list(wanted):
        raise _mistake(argument, f"got shape {list(tensor.shape)}, wanted {list(wanted)}")


def _bias(argument: str, bias: torch.Tensor, *wanted: int) -> torch.Tensor:
    _check_shape(argument, bias, *wanted)
    return bias.to(torch.float32).contiguous()


def _check_ranks(**given: tuple[torch.Tensor, int]) -> None:
    for name, (tensor, rank) in given.items():
        check_tensor(_NAME, name, tensor)
        if tensor.dim() != rank:
            raise _mistake(name, f"got {tensor.dim()} dimensions, wanted {rank}")


def _scales(
    quant_scales: Sequence[torch.Tensor] | None, fp8: bool, blocks: bool, first: torch.Tensor, second: torch.Tensor
) -> Scales | None:
    """What the weights' dtype asks of quant_scales, in float32."""
    wanted = 2 if blocks else 4 if fp8 else 0
    given = [] if quant_scales is None else list(quant_scales)
    if len(given) != wanted:
        raise _mistake("quant_scales", f"got {len(given)} tensors, wanted {wanted} for weights of {first.dtype}")
    if not given:
        return None
    for place, scale in enumerate(given):
        check_tensor(_NAME, f"quant_scales[{place}]", scale)
    experts, (width, hidden), inner = first.shape[0], first.shape[1:], second.shape[2]
    one, *others = (scale.to(torch.float32) for scale in given)

    def in_blocks(size: int) -> int:
        return (size + BLOCK - 1) // BLOCK

    if blocks:
        _check_shape("quant_scales[0]", one, experts, in_blocks(width), in_blocks(hidden))
        _check_shape("quant_scales[1]", others[0], experts, in_blocks(hidden), in_blocks(inner))
        return Scales(one, others[0], blocks=True)
    activated, two = others[0], others[1]
    for place, scale in ((0, one), (2, two)):
        if scale.numel() != experts:
            raise _mistake(f"quant_scales[{place}]", f"got shape {list(scale.shape)}, wanted [{experts}]")
    if activated.numel() != 1:
        raise _mistake("quant_scales[1]", f"got shape {list(activated.shape)}, wanted one number")
    return Scales(one.reshape(-1), two.reshape(-1), activated.reshape(()))


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
    """Compute this rank's part of a mixture of experts, from routed tokens to their sums::

        out[t] = sum over j of scale[t, j] * W2[e] (silu(W1[e] x[t]) * (W3[e] x[t])),  e = selected[t, j]

    Numbers of rows stay on the device: a CUDA graph serves every routing. A row's bits depend on no other row.

    Args:
        input: ``[T, H]``: float32, float16, bfloat16; float8_e4m3fn for weights of that dtype with one scale each.
        token_selected_experts: ``[T, k]`` int32, of all ranks' experts; those of other ranks and negative ones add 0.
        token_final_scales: ``[T, k]`` float32, or ``None``: 1.
        fc1_expert_weights: ``[E, 2 I, H]``, the rows of W3 and then those of W1; ``[E, I, H]`` without a gate. Of
            input's dtype, or float8_e4m3fn. E is the number of experts of this rank.
        fc2_expert_weights: ``[E, H, I]``.
        output_dtype: float32, float16 or bfloat16.
        quant_scales: ``None`` or ``[]``; in float8_e4m3fn ``[first [E], activated [], second [E], input []]``:
            ``first`` and ``second`` multiply the products, ``activated`` multiplies the operand of the second; for
            blocks ``[[E, 2 I / 128, H / 128], [E, H / 128, I / 128]]``.
        fc1_expert_biases, fc2_expert_biases: ``[E, 2 I]`` and ``[E, H]``, added before the activation and before the
            scale of a token.
        swiglu_alpha, swiglu_beta, swiglu_limit: ``[E]`` float32, each optional (1, 0, no limit): ``g = min(gate,
            limit)``, ``u`` is the linear half clamped to ``+-limit``, and the activation is
            ``g * sigmoid(alpha * g) * (u + beta)``. SwigluStep reads ``swiglu_limit`` only (7).
        tp_size, tp_rank: the caller cuts I and adds the results of all ranks.
        ep_size, ep_rank: this rank has experts from ``ep_rank * E`` on; the caller adds the results of all ranks.
        output: ``[T, H]`` of output_dtype; allocated where not given.
        use_deepseek_fp8_block_scale, use_fp8_block_scaling: two names of one choice: weights in float8_e4m3fn have a
            scale for each 128 x 128, and input, of 16 or 32 bits, is quantised here, with a scale for each 128 of a row.
        activation_type: Swiglu, SwigluBias, SwigluStep, Geglu, GegluTanh, Situ; without a gate Relu2, Relu, Gelu, Silu,
            Identity.
        situ_beta, situ_linear_beta: ``[E]`` float32, of Situ, ``b tanh(gate / b) sigmoid(gate) l tanh(up / l)``: b
            (4) and l (25).
        workspace_buffer: a vector of uint8 or int8 of at least :func:`cutlass_fused_moe_workspace_size` bytes, in which
            the results of the products are kept.
        enable_alltoall, tune_max_num_tokens, enable_pdl, swizzled_input_sf, use_fused_finalize, profile_ids: accepted,
            nothing depends on them; results are the same in every run.

    Returns:
        A list of ``[T, H]``.

    Raises:
        ValueError: shapes or devices that do not fit.
        TypeError: dtypes that do not fit.
        UnsupportedError: weights of 4 bits, ``input_sf``, ``clamped_relu2_limit``, another backend, clusters, and any
            of ``use_w4_group_scaling``, ``use_w4a8_group_scaling``, ``use_mxfp8_act_scaling``, ``use_packed_weights``,
            ``use_wfp4afp8_humming`` and ``min_latency_mode`` that is true.
        GradientError: a tensor wants a gradient.
    """
    for name, value in {
        "input_sf": input_sf is not None, "clamped_relu2_limit": clamped_relu2_limit is not None,
        "use_w4_group_scaling": use_w4_group_scaling, "use_w4a8_group_scaling": use_w4a8_group_scaling,
        "use_mxfp8_act_scaling": use_mxfp8_act_scaling, "use_packed_weights": use_packed_weights,
        "use_wfp4afp8_humming": use_wfp4afp8_humming, "min_latency_mode": min_latency_mode,
        "cluster_size": cluster_size != 1, "backend": backend != "cutlass",
    }.items():  # fmt: skip
        if value:
            raise UnsupportedError(f"{_NAME}: {name}: has no kernel here; use bfloat16, float16 or fp8 weights")
    x, ids, first, second = input, token_selected_experts, fc1_expert_weights, fc2_expert_weights
    _check_ranks(
        input=(x, 2), token_selected_experts=(ids, 2), fc1_expert_weights=(first, 3), fc2_expert_weights=(second, 3)
    )
    if first.dtype in (torch.int64, torch.uint8):
        raise UnsupportedError(f"{_NAME}: fc1_expert_weights: {_unsupported.FP4}")
    try:
        act = ActivationType(activation_type)
    except ValueError:
        raise _mistake("activation_type", f"got {activation_type!r}, wanted an ActivationType") from None
    if act in _NO_KERNEL:
        raise UnsupportedError(f"{_NAME}: activation_type: {act.name} has no kernel; use Swiglu with its numbers")
    gate = _gate(act, first, swiglu_alpha, swiglu_beta, swiglu_limit, situ_beta, situ_linear_beta)
    tokens, hidden = x.shape
    experts, inner = first.shape[0], second.shape[2]
    _check_shape("fc1_expert_weights", first, second.shape[0], (2 if act.is_gated else 1) * inner, hidden)
    _check_shape("fc2_expert_weights", second, experts, hidden, inner)
    _check_shape("token_selected_experts", ids, tokens, ids.shape[1])
    if ids.dtype != torch.int32:
        raise TypeError(f"{_NAME}: token_selected_experts: got {ids.dtype}, wanted torch.int32")
    if token_final_scales is not None:
        _check_shape("token_final_scales", token_final_scales, *ids.shape)
        if token_final_scales.dtype != torch.float32:
            raise TypeError(f"{_NAME}: token_final_scales: got {token_final_scales.dtype}, wanted torch.float32")
    blocks, fp8 = use_fp8_block_scaling or use_deepseek_fp8_block_scale, first.dtype == torch.float8_e4m3fn
    if blocks and not fp8:
        raise TypeError(f"{_NAME}: fc1_expert_weights: got {first.dtype}, wanted torch.float8_e4m3fn for block scales")
    if second.dtype != first.dtype:
        raise TypeError(f"{_NAME}: fc2_expert_weights: got {second.dtype}, wanted fc1_expert_weights', {first.dtype}")
    if output_dtype not in (torch.float32, torch.float16, torch.bfloat16):
        raise TypeError(f"{_NAME}: output_dtype: got {output_dtype}, wanted float32, float16 or bfloat16")
    if not blocks and x.dtype != first.dtype:
        raise TypeError(f"{_NAME}: input: got {x.dtype}, wanted fc1_expert_weights', {first.dtype}")
    for name, size, rank in (("ep", ep_size, ep_rank), ("tp", tp_size, tp_rank)):
        if not 0 <= rank < size:
            raise _mistake(f"{name}_rank", f"got {rank}, wanted 0 to {name}_size - 1, {size - 1}")
    scales = _scales(quant_scales, fp8, blocks, first, second)
    out = torch.empty((tokens, hidden), dtype=output_dtype, device=x.device) if output is None else output
    _check_shape("output", out, tokens, hidden)
    if out.dtype != output_dtype:
        raise TypeError(f"{_NAME}: output: got {out.dtype}, wanted output_dtype, {output_dtype}")
    one = None if fc1_expert_biases is None else _bias("fc1_expert_biases", fc1_expert_biases, *first.shape[:2])
    two = None if fc2_expert_biases is None else _bias("fc2_expert_biases", fc2_expert_biases, experts, hidden)
    if workspace_buffer is not None:
        shapes = _intermediates(tokens * ids.shape[1], hidden, inner, act.is_gated)
        least = aligned_bytes(shapes, output_dtype if fp8 else x.dtype)
        check_workspace(_NAME, workspace_buffer, x.device, least)
    run_experts(
        out, x, ids.contiguous(), None if token_final_scales is None else token_final_scales.contiguous(), first, second,
        gate, first_expert=ep_rank * experts, scales=scales, biases=(one, two), workspace=Workspace(workspace_buffer),
    )  # fmt: skip
    return [out]


def _gate(
    act: ActivationType, first: torch.Tensor, alpha: torch.Tensor | None, beta: torch.Tensor | None,
    limit: torch.Tensor | None, situ_beta: torch.Tensor | None, situ_linear_beta: torch.Tensor | None,
) -> Gate:  # fmt: skip
    """Return the numbers of each expert that an activation reads; numbers for another activation are an error."""
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
            wanted = " or ".join(one.name for one in readers)
            raise _mistake("activation_type", f"got {act.name}, wanted {wanted} for {name}")
        check_form(_NAME, name, number, (first.shape[0],), first.device, torch.float32)
    if act == ActivationType.Situ:
        alpha, beta = situ_beta, situ_linear_beta
    numbers = (None if one is None else one.contiguous() for one in (alpha, beta, limit))
    return Gate(int(act), False, *numbers)


def _intermediates(slots: int, hidden: int, inner: int, gated: bool) -> tuple[tuple[int, int], ...]:
    """Return shapes of the first product, of what is activated, and of the second product."""
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
    """Return the bytes that ``workspace_buffer`` of :func:`cutlass_fused_moe` needs for up to ``max_num_tokens`` tokens.

    The buffer holds the results of both products. Lists of rows and quantised rows are torch's: its caching allocator
    serves them under CUDA graphs too. Without a buffer everything is torch's.

    Args:
        max_num_tokens, hidden_size, intermediate_size, top_k: T, H, I and k; the size grows with each of them.
        x_dtype, weight_dtype, output_dtype: of input, of both weights, and of the output.
        activation_type: decides whether the first product has a gate.
        num_experts_total, tp_size, tp_rank, ep_size, ep_rank, device, use_fused_finalize, enable_alltoall,
            use_deepseek_fp8_block_scale: accepted, nothing depends on them.

    Raises:
        ValueError: a size below 0, or no ActivationType.
        TypeError: a size that is no integer.
        UnsupportedError: what :func:`cutlass_fused_moe` has no kernel for.
    """
    name = "cutlass_fused_moe_workspace_size"
    for flag, value in {
        "use_w4_group_scaling": use_w4_group_scaling, "use_mxfp8_act_scaling": use_mxfp8_act_scaling,
        "use_packed_weights": use_packed_weights, "use_wfp4afp8_humming": use_wfp4afp8_humming,
        "min_latency_mode": min_latency_mode, "backend": backend != "cutlass",
    }.items():  # fmt: skip
        if value:
            raise UnsupportedError(f"{name}: {flag}: has no kernel here; use bfloat16, float16 or fp8 weights")
    sizes = {
        "max_num_tokens": max_num_tokens, "hidden_size": hidden_size, "intermediate_size": intermediate_size,
        "num_experts_total": num_experts_total, "top_k": top_k,
    }  # fmt: skip
    for argument, size in sizes.items():
        if whole(name, argument, size) < 0:
            raise ValueError(f"{name}: {argument}: got {size}, wanted 0 or more")
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
    *_unsupported.declare(
        globals(),
        _unsupported.TRTLLM_MOE,
        functions=(
            "convert_to_block_layout",
            "get_w2_permute_indices_with_cache",
            "trtllm_fp4_block_scale_moe",
            "trtllm_fp4_block_scale_routed_moe",
            "trtllm_mxint4_block_scale_moe",
        ),
    ),
])  # fmt: skip
_unsupported.declare(globals(), _unsupported.TRTLLM_MOE, functions=("_maybe_get_cached_w3_w1_permute_indices",))
