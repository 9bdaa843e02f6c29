"""The norm over all heads and the rotation by three axes against float64, and errors."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from flashinfer.diffusion_ops import fused_qk_rmsnorm_rope
from flashinfer.errors import GradientError

E4M3 = torch.float8_e4m3fn


def options(head_dim: int = 128, heads: tuple[int, int, int] = (3, 2, 1), **changes: Any) -> dict[str, Any]:
    side = 2 * (head_dim // 6)
    names = dict(zip(("num_heads_q", "num_heads_k", "num_heads_v"), heads, strict=True))
    sizes = dict(num_frame_channels=head_dim - 2 * side, num_height_channels=side, num_width_channels=side)
    return dict(ppf=3, pph=5, ppw=7, head_dim=head_dim, **names, **sizes) | changes


def tensors(device: str, o: dict[str, Any], batch: int = 2) -> dict[str, torch.Tensor]:
    heads = [o[f"num_heads_{one}"] for one in "qkv"]
    tokens = o["ppf"] * o["pph"] * o["ppw"]
    return dict(
        qkv=torch.randn(batch, tokens, sum(heads) * o["head_dim"], device=device).bfloat16() * 2,
        q_weight=torch.randn(heads[0] * o["head_dim"], device=device).bfloat16(),
        k_weight=torch.randn(heads[1] * o["head_dim"], device=device).bfloat16(),
    )


def oracle(given: dict[str, torch.Tensor], o: dict[str, Any], norm: bool, interleave: bool) -> list[torch.Tensor]:
    """Return q, k and v in float64, ``[batch, tokens, heads, head_dim]``."""
    given = {name: x.cpu().double() for name, x in given.items()}
    heads, dim = [o[f"num_heads_{one}"] for one in "qkv"], o["head_dim"]
    parts = list(given["qkv"].split([one * dim for one in heads], -1))
    positions = torch.cartesian_prod(*(torch.arange(o[name]).double() for name in ("ppf", "pph", "ppw")))
    axes = [o[f"num_{name}_channels"] for name in ("frame", "height", "width")]
    angles = torch.cat(
        [
            positions[:, n : n + 1] * o.get("base", 1e4) ** (-torch.arange(0, c, 2).double() / max(c, 1))
            for n, c in enumerate(axes)
        ],
        -1,
    )
    cosines, sines = angles.cos()[:, None], angles.sin()[:, None]
    results = []
    for n, part in enumerate(parts):
        if norm and n < 2:
            root = part.square().mean(-1, keepdim=True).add(o.get("eps", 1e-6)).sqrt()
            part = part / root * given["qk"[n] + "_weight"]
        part = part.unflatten(-1, (heads[n], dim))
        if n < 2:
            a, b = (part[..., ::2], part[..., 1::2]) if interleave else part.chunk(2, -1)
            first, second = a * cosines - b * sines, b * cosines + a * sines
            part = torch.stack([first, second], -1).flatten(-2) if interleave else torch.cat([first, second], -1)
        results.append(part)
    return results


def check(got: torch.Tensor, want: torch.Tensor, factor: float = 1.0) -> None:
    size = want.abs().amax(-1, keepdim=True)
    want = want * factor
    if got.dtype == torch.bfloat16:
        bound = 1.01 * 2**-8 * want.abs() + 2e-5 * size
    else:
        want = want.clamp(-448, 448)
        bound = 1.01 * 2**-4 * want.abs() + 2**-10 + 2e-5 * size * factor
    assert ((got.cpu().double() - want).abs() <= bound).all()


@pytest.mark.parametrize("interleave", [True, False])
@pytest.mark.parametrize("norm", [True, False])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_values(head_dim, norm, interleave, device):
    o = options(head_dim, base=500.0, eps=1e-2)
    given = tensors(device, o)
    got = fused_qk_rmsnorm_rope(**given, **o, is_qk_norm=norm, interleave=interleave)
    for one, want in zip(got, oracle(given, o, norm, interleave), strict=True):
        assert one.shape == want.shape and one.dtype == torch.bfloat16
        check(one, want)
    assert got[2].flatten(2).equal(given["qkv"][..., 5 * head_dim :])


@pytest.mark.parametrize("heads", [(24, 24, 24), (40, 1, 2)])
def test_many_heads(heads, device):
    o = options(heads=heads, ppf=1, pph=2, ppw=3)
    given = tensors(device, o, batch=1)
    for one, want in zip(fused_qk_rmsnorm_rope(**given, **o), oracle(given, o, True, True), strict=True):
        check(one, want)


@pytest.mark.parametrize("interleave", [True, False])
@pytest.mark.parametrize("norm", [True, False])
def test_eight_bits(norm, interleave, device):
    o = options()
    given = tensors(device, o)
    eight = dict(output_fp8=True, output_quant_scale=2.0, v_quant_scale=100.0)
    got = fused_qk_rmsnorm_rope(**given, **o, **eight, is_qk_norm=norm, interleave=interleave)
    want = oracle(given, o, norm, interleave)
    for one, wanted, factor in zip(got, want, (2.0, 2.0, 100.0), strict=True):
        assert one.dtype == E4M3 and bool(one.float().isfinite().all())
        check(one, wanted, factor)


def test_axes_without_channels(device):
    o = options(64, num_frame_channels=0, num_height_channels=64, num_width_channels=0)
    given = tensors(device, o)
    for one, want in zip(fused_qk_rmsnorm_rope(**given, **o), oracle(given, o, True, True), strict=True):
        check(one, want)


def test_outputs_of_the_caller_and_tokens_without_batches(device):
    o = options()
    given = tensors(device, o)
    want = fused_qk_rmsnorm_rope(**given, **o)
    room = [torch.full((*one.shape[:2], one.shape[2] + 1, 128), 7.0, device=device).bfloat16() for one in want]
    outs = [one[:, :, :-1] for one in room]
    flat = given | dict(qkv=given["qkv"].flatten(0, 1))
    # Tokens of a wider tensor, and outputs with room between tokens.
    wide = torch.cat([flat["qkv"], torch.full_like(flat["qkv"], 9.0)], -1)[:, : flat["qkv"].shape[1]]
    names = dict(zip(("q_out", "k_out", "v_out"), (one.flatten(0, 1) for one in outs), strict=True))
    got = fused_qk_rmsnorm_rope(**flat | dict(qkv=wide), **o, **names)
    for one, name, whole, wanted in zip(got, names, room, want, strict=True):
        assert one is names[name] and one.dim() == 3
        assert one.equal(wanted.flatten(0, 1)) and bool((whole[:, :, -1] == 7).all())


def test_no_tokens(device):
    o = options()
    given = tensors(device, o, batch=0)
    assert [tuple(one.shape) for one in fused_qk_rmsnorm_rope(**given, **o)] == [(0, 105, n, 128) for n in (3, 2, 1)]


def test_bad_arguments(device):
    o = options()
    given = tensors(device, o)
    q_out = torch.full((2, 105, 3, 128), 7.0, device=device).bfloat16()

    def refused(error: type[Exception], message: str, **changes: Any) -> None:
        with pytest.raises(error, match=message):
            fused_qk_rmsnorm_rope(**given | o | dict(q_out=q_out) | changes)
        assert bool((q_out == 7).all())

    refused(ValueError, "qkv: got torch.float16, wanted torch.bfloat16", qkv=given["qkv"].half())
    refused(ValueError, "qkv: got 1 dimensions, wanted 2 or 3", qkv=given["qkv"][0, 0])
    refused(ValueError, "qkv: got 104 tokens, wanted ppf", qkv=given["qkv"][:, 1:])
    refused(ValueError, "qkv: got a last dimension of 640, wanted all heads", qkv=given["qkv"][..., 128:])
    flat = given["qkv"].flatten(0, 1)[1:]
    refused(ValueError, "qkv: got 209 tokens, wanted a multiple", qkv=flat, q_out=None)
    refused(ValueError, "q_out: got shape", num_heads_q=4)
    refused(ValueError, "q_out: got torch.bfloat16, wanted torch.float8_e4m3fn", output_fp8=True)
    refused(ValueError, "k_out: overlaps the memory of q_out", k_out=q_out[:, :, :2])
    refused(ValueError, "k_weight: got shape", k_weight=given["q_weight"])
    refused(TypeError, "q_weight: got float32, wanted bfloat16", q_weight=given["q_weight"].float())
    refused(ValueError, "got 126 channels of all axes, wanted head_dim, 128", num_width_channels=40)
    refused(ValueError, "got 41 channels of an axis, wanted an even number", num_width_channels=41)
    refused(ValueError, "head_dim: got 96, wanted 64, 128 or 256", **options(96), q_out=None)
    refused(ValueError, "ppf: got 0", ppf=0)
    refused(ValueError, "eps: got .*wanted a finite", eps=-1.0)
    refused(ValueError, "base: got 0.0, wanted a positive number", base=0.0)
    refused(ValueError, "factor: got 2.0, wanted 1", factor=2.0)
    refused(ValueError, "v_quant_scale: got -1.0, wanted a positive number", v_quant_scale=-1.0)
    refused(GradientError, "has no gradient", qkv=given["qkv"].clone().requires_grad_())
