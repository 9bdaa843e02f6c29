"""Helpers of callers and of several families: modes, dtypes, ALiBi slopes, properties of GPUs."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from enum import Enum
from typing import Any, TypeVar

import torch
from packaging.version import Version

from ._compat.refused import declare
from ._ops.dtypes import FP8, HALVES, dtype_of, is_fp8
from ._ops.errors import value_error
from ._ops.numbers import choice, positive

F = TypeVar("F", bound=Callable[..., Any])

__all__ = [
    "MaskMode",
    "PosEncodingMode",
    "TensorLayout",
    "canonicalize_torch_dtype",
    "determine_attention_backend",
    "determine_gemm_backend",
    "determine_mla_backend",
    "device_support_pdl",
    "get_alibi_slopes",
    "get_compute_capability",
    "get_device_sm_count",
    "get_indptr",
    "get_trtllm_gen_multi_ctas_kv_counter_bytes",
    "is_fa3_backend_supported",
    "is_float8",
    "is_sm90a_supported",
    "is_sm100a_supported",
    "next_positive_power_of_2",
    "register_custom_op",
    "register_fake_op",
    "set_log_level",
    "version_at_least",
]


class PosEncodingMode(Enum):
    """Position encodings that attention applies itself."""

    NONE = 0
    ROPE_LLAMA = 1
    ALIBI = 2


class MaskMode(Enum):
    """Masks of attention."""

    NON_CAUSAL = 0
    CAUSAL = 1
    CUSTOM = 2
    MULTIITEMSCORING = 3


class TensorLayout(Enum):
    """Order of keys and values: tokens before heads, or heads before tokens."""

    NHD = 0
    HND = 1


def canonicalize_torch_dtype(dtype: torch.dtype | str) -> torch.dtype:
    """Return ``torch.float16`` for ``torch.float16`` or ``"float16"``.

    Raises:
        ValueError: no name of a torch dtype.
        TypeError: neither a name nor a dtype.
    """
    return dtype_of("canonicalize_torch_dtype", "dtype", dtype)


def is_float8(x: torch.Tensor) -> bool:
    """Return whether the elements of ``x`` are float8_e4m3fn or float8_e5m2."""
    return is_fp8(x.dtype)


def get_alibi_slopes(n_heads: int) -> torch.Tensor:
    """Return the slopes of ALiBi, ``[n_heads]`` float32 on the CPU.

    Let ``n`` be the largest power of two up to ``n_heads``. The first ``n`` slopes are ``2^(-8 i / n)`` for
    ``i`` in 1 ... n. Further heads have every second one of the slopes of ``2 n`` heads.

    Source: Press, Smith, Lewis: Train Short, Test Long: Attention with Linear Biases, 2021.

    Raises:
        ValueError: ``n_heads`` below 1.
    """
    positive("get_alibi_slopes", "n_heads", n_heads)
    n = 2 ** math.floor(math.log2(n_heads))
    exponents = [-8 * i / n for i in range(1, n + 1)] + [-4 * (2 * i + 1) / n for i in range(n_heads - n)]
    return torch.tensor([2.0**exponent for exponent in exponents], dtype=torch.float32, device="cpu")


def get_indptr(x: torch.Tensor) -> torch.Tensor:
    """Return the bounds ``[n + 1]`` of segments with the lengths ``x``, ``[n]``: int64 on ``x``'s device."""
    return torch.nn.functional.pad(x.to(torch.int64).cumsum(0), (1, 0))


def get_compute_capability(device: torch.device) -> tuple[int, int]:
    """Return ``(major, minor)`` of a GPU.

    Raises:
        ValueError: no GPU.
    """
    if device.type != "cuda":
        raise value_error("get_compute_capability", "device", device, "a CUDA device")
    return torch.cuda.get_device_capability(device.index)


def is_sm90a_supported(device: torch.device) -> bool:
    """Return whether the device is a Hopper GPU."""
    return device.type == "cuda" and get_compute_capability(device)[0] == 9


def is_sm100a_supported(device: torch.device) -> bool:
    """Return whether the device is a data-center Blackwell GPU."""
    return device.type == "cuda" and get_compute_capability(device)[0] == 10


def device_support_pdl(device: torch.device) -> bool:
    """Return whether a kernel on the device may start before its predecessor has ended."""
    return device.type == "cuda" and get_compute_capability(device)[0] >= 9


def get_device_sm_count(device: torch.device) -> int:
    """Return the number of streaming multiprocessors of a GPU.

    Raises:
        ValueError: no GPU.
    """
    if device.type != "cuda":
        raise value_error("get_device_sm_count", "device", device, "a CUDA device")
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


def determine_gemm_backend(device: torch.device) -> str:
    """Return the kernels that ``backend="auto"`` of a matrix product selects on a device."""
    return "sm90" if is_sm90a_supported(device) else "sm80"


def determine_mla_backend(device: torch.device) -> str:
    """Return the kernels that ``backend="auto"`` of multi-head latent attention selects on a device."""
    return "fa3" if is_sm90a_supported(device) else "fa2"


def determine_attention_backend(
    device: torch.device,
    pos_encoding_mode: int,
    use_fp16_qk_reductions: bool,
    use_custom_mask: bool,
    dtype_q: torch.dtype,
    dtype_kv: torch.dtype,
) -> str:
    """Return the kernels that ``backend="auto"`` of prefill selects for long requests.

    ``"fa3"`` are the Hopper kernels, ``"fa2"`` the portable ones.
    """
    serves = is_fa3_backend_supported(
        pos_encoding_mode, use_fp16_qk_reductions, use_custom_mask, dtype_q, dtype_kv
    ) and is_sm90a_supported(device)
    return "fa3" if serves else "fa2"


def is_fa3_backend_supported(
    pos_encoding_mode: int,
    use_fp16_qk_reductions: bool,
    use_custom_mask: bool,
    dtype_q: torch.dtype,
    dtype_kv: torch.dtype,
) -> bool:
    """Return whether prefill's Hopper kernels compute this.

    ``use_fp16_qk_reductions`` is unused, as everywhere.
    """
    rotates = int(pos_encoding_mode) == PosEncodingMode.ROPE_LLAMA.value
    served = (*HALVES, *FP8)
    return not rotates and not use_custom_mask and dtype_q == dtype_kv and dtype_q in served


def version_at_least(version: str, base_version: str) -> bool:
    """Return whether ``version`` is ``base_version`` or a later one (PEP 440)."""
    return Version(version) >= Version(base_version)


def set_log_level(lvl_str: str) -> None:
    """Set the level of the library's logger: ``"debug"`` to ``"critical"``.

    Raises:
        ValueError: another level.
    """
    levels = {"debug": 10, "info": 20, "warning": 30, "error": 40, "critical": 50}
    logging.getLogger("flashinfer").setLevel(choice("set_log_level", "lvl_str", lvl_str.lower(), levels))


def register_custom_op(name: str, *args: Any, **kwargs: Any) -> Callable[[F], F]:
    """Return a decorator without effect: every function here already is an operator (FlashInfer 0.2.7)."""
    return lambda function: function


def register_fake_op(name: str, *args: Any, **kwargs: Any) -> Callable[[F], F]:
    """Return a decorator without effect, as in FlashInfer 0.2.7: every operator here already has its fake."""
    return lambda function: function


def next_positive_power_of_2(x: int) -> int:
    """Return the smallest power of two that is at least ``x``, and 1 for ``x`` below 1."""
    return 1 << max(x - 1, 0).bit_length()


def get_trtllm_gen_multi_ctas_kv_counter_bytes(batch_size: int, num_qo_heads: int, sm_count: int) -> int:
    """Return 0: splits of a request are merged without counters.

    vLLM allocates an empty buffer for every layer.
    """
    return 0


# Shared buffers by (name, str(device)). vLLM replaces a host entry by a pinned copy, so look entries up each
# time.
_cache_buf: dict[tuple[str, str], torch.Tensor] = {}


def _ceil_pow2(x: int) -> int:
    return 1 << (x - 1).bit_length()


def _get_cache_buf(name: str, bytes: int, device: torch.device | str) -> torch.Tensor:
    """Return a buffer of at least ``bytes`` bytes that all callers of one name and device share."""
    key = name, str(device)
    buffer = _cache_buf.get(key)
    if buffer is None or buffer.numel() < bytes:
        buffer = _cache_buf[key] = torch.empty(bytes, dtype=torch.uint8, device=device)
    return buffer


def _get_range_buf(seq_len: int, device: torch.device | str) -> torch.Tensor:
    """Return ``0, 1, ...`` int32 of length ``seq_len``: a view of one buffer per power of two and device."""
    length = _ceil_pow2(seq_len)
    key = f"range_{length}", str(device)
    buffer = _cache_buf.get(key)
    if buffer is None:
        buffer = _cache_buf[key] = torch.arange(length, dtype=torch.int32, device=device)
    return buffer[:seq_len]


declare(globals())
