"""Calls of an attention module's operators without the public functions, and a user's variant."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import Any

import torch

from flashinfer import jit
from flashinfer._attention.signature import CallArguments
from flashinfer.jit.machine.toolchain import find_cxx, find_nvcc
from flashinfer.jit.modules._attention import BUILTIN_TENSORS
from flashinfer.jit.ninja import render_config
from flashinfer.jit.spec import TORCH_ABI

# As a user of FlashInfer writes it: sigmoid(q . k * logits_scale + sigmoid_bias) instead of softmax.
FLASH_SIGMOID = r"""
struct FlashSigmoid : AttentionVariantBase {
  static constexpr bool use_softmax = false;
  uint32_t window_left, qo_len, kv_len;
  float scale_log2, bias_log2;

  template <typename Params>
  __device__ __host__ FlashSigmoid(const Params& params, uint32_t batch_idx, uint8_t* smem_ptr) {
    qo_len = params.get_qo_len(batch_idx);
    kv_len = params.get_kv_len(batch_idx);
    window_left = kv_len;
    bias_log2 = params.sigmoid_bias * math::log2e;
    scale_log2 = params.logits_scale * math::log2e;
  }

  REGISTER_LOGITS_TRANSFORM(params, logits, batch_idx, qo_idx, kv_idx, qo_head_idx, kv_head_idx, {
    return math::ptx_rcp(1.f + math::ptx_exp2(-float(logits * scale_log2 + bias_log2)));
  })
};
"""
SIGMOID_PARAMETERS: tuple[list[str], ...] = ([], [], ["logits_scale", "sigmoid_bias"], ["double", "double"])

HOOKS = r"""
// Documents in one sequence: queries see only keys of their document. Queries and keys are scaled before their
// product, logits get a bias of their head and are weighted, the output is clipped.
struct Hooks : AttentionVariantBase {
  uint32_t qo_len, kv_len, window_left;
  float sm_scale_log2;

  template <typename Params>
  FLASHINFER_HD Hooks(const Params& params, uint32_t batch_idx, uint8_t*)
      : qo_len(params.get_qo_len(batch_idx)), kv_len(params.get_kv_len(batch_idx)) {
    window_left = kv_len, sm_scale_log2 = params.sm_scale * math::log2e;
  }

  REGISTER_QUERY_TRANSFORM(params, q, { return q * 2.0f; })
  REGISTER_KEY_TRANSFORM(params, k, { return k < 0.0f ? k : k * 0.5f; })
  REGISTER_LOGITS_TRANSFORM(params, logits, batch_idx, qo_idx, kv_idx, qo_head_idx, kv_head_idx, {
    const float bias = params.maybe_bias ? params.maybe_bias[qo_head_idx] : 0.0f;
    return logits + bias * static_cast<float>(static_cast<int64_t>(kv_idx % params.period));
  })
  REGISTER_LOGITS_MASK(params, batch_idx, qo_idx, kv_idx, qo_head_idx, kv_head_idx, {
    return params.documents[kv_idx] == params.documents[kv_len - qo_len + qo_idx];
  })
  REGISTER_OUTPUT_TRANSFORM(params, output, batch_idx, qo_idx, qo_head_idx, {
    const float limit = static_cast<float>(params.limit);
    return output > limit ? limit : output < -limit ? -limit : output;
  })
};
"""
HOOKS_TENSORS = [("maybe_bias", "float"), ("documents", "int32_t")]
HOOKS_SCALARS = [("sm_scale", "double"), ("limit", "double"), ("period", "int64_t")]


def sigmoid(
    uri: str = "sigmoid", decl: str | Path = FLASH_SIGMOID, dtype: str = "float32", name: str = "FlashSigmoid"
) -> jit.JitSpec:
    """Return the CPU prefill module of a user's variant with head_dim 64."""
    return jit.gen_customize_single_prefill_module(
        "auto", uri, dtype, dtype, dtype, 64, 64, *SIGMOID_PARAMETERS, name, decl, device="cpu"
    )


def compiled(
    spec: jit.JitSpec, text: str, folder: Path, *flags: str, suffix: str = "", syntax_only: bool = True
) -> str:
    """Return the compiler's messages for a file that sees a module's configuration and headers.

    ``text``: the file's text, or the name of one of the module's sources. ``suffix``: ``cu`` or ``cc``.
    """
    (folder / spec.config_header).write_text(render_config(spec))
    file = folder / f"unit.{suffix or ('cu' if spec.backend == 'cuda' else 'cc')}"
    if text in spec.sources:
        file = Path(dict(zip(spec.sources, spec.source_paths(), strict=True))[text])
    else:
        file.write_text(text)
    includes = [f"-I{path}" for path in (folder, *spec.include_dirs)]
    torch_headers = ["-isystem", str(Path(torch.__file__).parent / "include")]
    defines = [f"-DFLASHINFER_MODULE={spec.name}", f"-DFLASHINFER_{spec.backend.upper()}=1"]
    if file.suffix == ".cu":
        # To PTX and for one arch: host and device code are parsed, and little else is done.
        command = [find_nvcc(), "-std=c++17", "-ptx", "-arch=compute_90a", "-o", os.devnull]
    else:
        abi = f"-DTORCH_TARGET_VERSION={TORCH_ABI[0] << 56 | TORCH_ABI[1] << 48:#018x}"
        command = [find_cxx(), "-std=c++17", "-w", abi, *(["-fsyntax-only"] if syntax_only else [])]
    command = [*map(str, command), *defines, *includes, *torch_headers, *flags, str(file)]
    done = subprocess.run(command, capture_output=True, text=True)
    return done.stdout + done.stderr if done.returncode else ""


# The library's variants get none of their optional tensors.
NONE = (None,) * len(BUILTIN_TENSORS)


def single(
    module: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *own: object, causal: bool = False, variant: int = 0
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return ``(out, lse)`` of one request by a module's ``run``. ``own`` are the variant's parameters."""
    out = q.new_full((*q.shape[:2], v.shape[-1]), float("nan"))
    lse = torch.full(q.shape[:2], float("nan"), device=q.device)
    module.run(q, k, v, out, lse, *CallArguments(batch_size=0, mask_mode=int(causal), variant=variant), *own)
    return out, lse


def tensors(
    dtype: torch.dtype, head_dims: str = "64", qo_len: int = 3, kv_len: int = 700, device: str = "cpu"
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return random queries of 4 heads, and keys and values of 2, for the value ``head_dims`` of the axis."""
    qk, vo = (int(size) for size in (head_dims.split(":") * 2)[:2])
    shapes = ((qo_len, 4, qk), (kv_len, 2, qk), (kv_len, 2, vo))
    q, k, v = (torch.randn(shape, device=device).to(dtype) for shape in shapes)
    return q, k, v


def sigmoid_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, bias: float) -> torch.Tensor:
    """Compute ``FLASH_SIGMOID`` in float64."""
    group = q.shape[1] // k.shape[1]
    q, k, v = q.double(), k.double().repeat_interleave(group, 1), v.double().repeat_interleave(group, 1)
    return torch.einsum("hqk,khd->qhd", torch.sigmoid(torch.einsum("qhd,khd->hqk", q, k) * scale + bias), v)


def relative_error(got: torch.Tensor, want: torch.Tensor) -> float:
    return float((got.double() - want).norm() / want.norm())
