"""Kernels for attention and the delta rule of Hugging Face transformers.

    from flashinfer.integrations.transformers import register
    model = AutoModelForCausalLM.from_pretrained(..., dtype=torch.bfloat16, attn_implementation=register())

:func:`register_delta_rule` is for hybrid models such as Qwen3-Next, which have layers with a gated delta
rule.

Importing this module does not import transformers; its functions do.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from .._attention.equal_batch import attend_batch
from .._ops.errors import value_error
from ..errors import DependencyError
from ..jit.modules._attention import head_dims_value
from ..jit.spec import BACKENDS
from ._experts import EXPERTS, experts_forward

__all__ = ["EXPERTS", "NAME", "register", "register_delta_rule", "register_experts"]

# transformers treats every name with "flash" in it as a version of FlashAttention, and rejects unknown ones.
NAME = "fi_attention"
OLDEST = (5, 17)
_DTYPES = {"cpu": (torch.float32, torch.float16, torch.bfloat16), "cuda": (torch.float16, torch.bfloat16)}
# Arguments of models that have no kernel.
_UNSUPPORTED = {
    "s_aux": "attention sinks",
    "position_bias": "a position bias",
    "output_attentions": "attention weights among the outputs",
}


def _require_transformers() -> None:
    """Raise ``DependencyError`` if transformers is missing or too old."""
    try:
        import transformers
        import transformers.modeling_utils
    except ImportError as err:
        raise DependencyError("transformers", f"cannot be imported ({err})", "transformers") from err
    version = transformers.__version__
    if tuple(int(part) for part in version.split(".")[:2]) < OLDEST:
        wanted = ".".join(map(str, OLDEST))
        raise DependencyError("transformers", f"got {version}, wanted {wanted} or newer", "transformers")


def register() -> str:
    """Register our attention with transformers' ``AttentionInterface`` and ``AttentionMaskInterface``.

    Returns:
        The name to pass as ``attn_implementation``. Registering again changes nothing.

    Raises:
        DependencyError: transformers is not installed, or older than 5.17.

    Models run on the CPU in float32, float16 and bfloat16, on CUDA in float16 and bfloat16. Unsupported
    properties (a dtype, a head_dim, dropout, attention sinks, a bias) raise ``ValueError`` or ``TypeError``
    in the first attention.
    """
    _require_transformers()
    from transformers.masking_utils import AttentionMaskInterface
    from transformers.modeling_utils import AttentionInterface

    AttentionInterface.register(NAME, attention_forward)
    AttentionMaskInterface.register(NAME, attention_mask)
    return NAME


def register_delta_rule(model_type: str | None = None) -> Callable[[], None]:
    """Run the delta rule, short convolutions and gated norms of transformers' hybrid models on our kernels.

    Args:
        model_type: ``"qwen3_next"``, ``"qwen3_5"``, ``"qwen3_5_moe"``, ``"qwen4_exp"``, ``"olmo_hybrid"`` or
            ``"kimi_linear"``; ``None``: all of these that this version of transformers has.

    Returns:
        A function that restores the models' own functions.

    Raises:
        DependencyError: transformers is not installed, is older than 5.17, or lacks the model.
        ValueError: another model_type.

    Existing models change too: layers call functions of their file by name.
    """
    _require_transformers()
    from transformers import __version__ as version

    from .linear_attention import MODEL_TYPES, modules_of, set_functions

    if model_type is not None and model_type not in MODEL_TYPES:
        raise value_error("register_delta_rule", "model_type", repr(model_type), f"one of {', '.join(MODEL_TYPES)}")
    modules = modules_of(MODEL_TYPES if model_type is None else (model_type,))
    if not modules:
        raise DependencyError(
            "transformers", f"got {version}, which has no {model_type or 'model of these'}",
            "transformers",
        )  # fmt: skip
    return set_functions(modules)


def register_experts() -> str:
    """Register our mixtures of experts with transformers' ``ExpertsInterface``.

    Returns:
        The name to pass as ``experts_implementation``. Registering again changes nothing.

    Raises:
        DependencyError: transformers is not installed, or older than 5.17.

    Experts of a model then are two grouped products with a few small kernels; the router does not change.
    They have no
    gradient: without ``torch.no_grad()``, parameters that require one raise ``GradientError``. Unsupported
    properties (an activation, a module's own gate, interleaved halves) raise ``ValueError`` in the first
    call.
    """
    _require_transformers()
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    ALL_EXPERTS_FUNCTIONS.register(EXPERTS, experts_forward)
    return EXPERTS


def attention_forward(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    softcap: float | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Compute attention as an attention function of transformers.

    Args:
        query: ``[batch_size, num_qo_heads, qo_len, head_dim]``.
        key, value: ``[batch_size, num_kv_heads, kv_len, head_dim]``.
        attention_mask: the result of :func:`attention_mask`, or the caller's own: bool,
            ``[batch_size or 1, 1, qo_len or 1, keys]``, True if a query sees a key. Keys after the last one
            of the mask are not seen. Without a mask, ``is_causal`` and ``sliding_window`` define the mask,
            and the last query aligns with the last key.

    Returns:
        ``[batch_size, qo_len, num_qo_heads, head_dim]``, and ``None`` instead of weights.
    """
    device = query.device.type
    if device in BACKENDS and torch.is_autocast_enabled(device):
        dtype = torch.get_autocast_dtype(device)
        query, key, value = query.to(dtype), key.to(dtype), value.to(dtype)
    _check(query, key, value, attention_mask, dropout, kwargs)
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    window_left = -1
    if attention_mask is not None:
        keys = attention_mask.shape[-1]
        key, value = key[:, :, :keys], value[:, :, :keys]
    elif causal:
        # Qwen2-MoE does not pass its layers' window.
        window = kwargs.get("sliding_window", getattr(module, "sliding_window", None))
        window_left = -1 if window is None else window - 1
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    out = attend_batch(query, key, value, attention_mask, bool(causal), window_left, softcap or 0.0, scale)
    return out, None


def _error(name: str, got: object, wanted: str, kind: type[Exception] = ValueError) -> Exception:
    """Return the error for an argument.

    It names the ``attn_implementation`` instead of the called function.
    """
    return kind(f"{NAME}: {name}: got {got}, wanted {wanted}")


def _check(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    dropout: float,
    kwargs: dict[str, Any],
) -> None:
    """Reject unsupported calls before anything runs. Only sizes and types are read."""
    device = query.device.type
    if device not in BACKENDS:
        raise _error("query", f"a tensor on {device}", f"one on {', '.join(BACKENDS)}")
    known = _DTYPES[device]
    if query.dtype not in known or not query.dtype == key.dtype == value.dtype:
        got = ", ".join(str(dtype) for dtype in dict.fromkeys((query.dtype, key.dtype, value.dtype)))
        wanted = f"one of {', '.join(map(str, known))}: load the model with dtype=torch.bfloat16"
        raise _error("query", f"{got} on {device}", f"{wanted}, or use another attn_implementation", TypeError)
    head_dims_value(query.shape[-1], value.shape[-1], device)
    if dropout > 0:
        raise _error("attention_dropout", f"{dropout} in training", "0: kernels have no dropout")
    for name, meaning in _UNSUPPORTED.items():
        if kwargs.get(name) is not None and kwargs[name] is not False:
            raise _error(name, meaning, "none: use another attn_implementation")
    if mask is None:
        return
    if mask.dtype != torch.bool:
        raise _error("attention_mask", mask.dtype, "torch.bool, True if a query sees a key", TypeError)
    batch, heads, queries, keys = mask.shape
    if batch not in (1, query.shape[0]) or heads != 1 or queries not in (1, query.shape[2]) or keys > key.shape[2]:
        wanted = f"[{query.shape[0]}, 1, {query.shape[2]}, {key.shape[2]}] or fewer keys"
        raise _error("attention_mask", f"shape {list(mask.shape)}", wanted)


def attention_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | torch.Tensor = 0,
    kv_offset: int = 0,
    attention_mask: torch.Tensor | None = None,
    local_size: int | None = None,
    allow_is_causal_skip: bool = True,
    allow_is_bidirectional_skip: bool = False,
    config: Any = None,
    **kwargs: Any,
) -> torch.Tensor | None:
    """Return a mask for transformers, or ``None`` if the attention function does not need one.

    Args:
        q_offset: position of the first query; a tensor with a static cache.
        attention_mask: ``[batch_size, at least q_length]``, bool, False at padding.

    Tensors on a GPU are read only in eager prefill, as in transformers itself. A decoding step waits for
    nothing.
    """
    from transformers.masking_utils import sdpa_mask
    from transformers.utils.import_utils import is_tracing

    def readable(x: torch.Tensor) -> bool:
        return not is_tracing(x) and (x.device.type == "cpu" or q_length > 1)

    def all_real() -> bool:
        if attention_mask is None:
            return True
        end = kv_offset + kv_length
        if not readable(attention_mask) or attention_mask.shape[-1] < end:
            return False
        return bool(attention_mask[:, kv_offset:end].all())

    if isinstance(q_offset, torch.Tensor):
        fits = False
        if readable(q_offset):
            # A static cache is longer than its written part. No query sees the keys after the last query.
            written = int(q_offset) + q_length - kv_offset
            kv_length, fits = min(kv_length, written), written >= kv_length
    else:
        fits = q_offset + q_length == kv_offset + kv_length
        if allow_is_bidirectional_skip and (local_size is None or kv_length < local_size) and all_real():
            return None
    if allow_is_causal_skip and fits and _is_known(local_size, kv_length, config) and all_real():
        return None
    mask: torch.Tensor = sdpa_mask(
        batch_size=batch_size,
        q_length=q_length,
        kv_length=kv_length,
        q_offset=q_offset,
        kv_offset=kv_offset,
        attention_mask=attention_mask,
        local_size=local_size,
        allow_is_causal_skip=False,
        allow_is_bidirectional_skip=False,
        **kwargs,
    )
    return mask


def _is_known(local_size: int | None, kv_length: int, config: Any) -> bool:
    """Return whether the attention function knows the layer's ``local_size``, or it covers all keys."""
    if local_size is None:
        return True
    if getattr(config, "attention_chunk_size", None) is None and getattr(config, "sliding_window", None) == local_size:
        return True
    return kv_length < local_size
