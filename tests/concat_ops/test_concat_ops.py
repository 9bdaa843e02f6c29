"""Keys of MLA from their two parts, byte for byte."""

from __future__ import annotations

import pytest
import torch

from flashinfer import concat_ops
from flashinfer.concat_ops import concat_mla_k
from flashinfer.errors import GradientError

from ..conftest import no_synchronisation

DTYPES = [torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float8_e5m2]


def drawn(dtype: torch.dtype, device: str, *shape: int) -> torch.Tensor:
    """Every bit pattern, NaN too."""
    width = shape[-1] * dtype.itemsize
    if width == 0:
        return torch.empty(shape, dtype=dtype, device=device)
    return torch.randint(0, 256, (*shape[:-1], width), dtype=torch.uint8, device=device).view(dtype)


def bits(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.shape[-1] == 0:
        return tensor.new_empty(tensor.shape, dtype=torch.uint8)
    return tensor.contiguous().view(torch.uint8)


@pytest.mark.parametrize("keys_dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    "tokens, heads, dn, dr",
    [(1, 1, 16, 16), (7, 128, 128, 64), (0, 8, 128, 64), (300, 5, 48, 80), (2, 3, 0, 32), (9, 2, 32, 0)],
)
def test_parts_of_keys(tokens, heads, dn, dr, keys_dtype, device):
    nope, rope = drawn(keys_dtype, device, tokens, heads, dn), drawn(keys_dtype, device, tokens, 1, dr)
    k = torch.full((tokens + 2, heads, dn + dr), 77.0, device=device).to(keys_dtype)
    before = bits(k).clone()
    with no_synchronisation(device):
        assert concat_mla_k(k[1:-1], nope, rope) is None
    want = torch.cat([bits(nope), bits(rope).expand(tokens, heads, -1)], -1)
    assert bits(k)[1:-1].equal(want)
    assert bits(k)[[0, -1]].equal(before[[0, -1]])


@pytest.mark.parametrize("offset", [0, 8, 4, 2, 1])
def test_views_of_wider_tensors(offset, device):
    """Parts of a fused projection, a view of k in a wider tensor, and starts at every multiple of bytes."""
    dtype = torch.float8_e4m3fn
    tokens, heads, dn, dr = 33, 6, 64, 32
    nope = drawn(dtype, device, tokens, heads, dn + 56)[:, :, offset : offset + dn]
    rope = drawn(dtype, device, tokens, 3, dr + 40)[:, 1:2, 40 - offset : 40 - offset + dr]
    wide = torch.full((tokens, heads + 2, dn + dr + 24), 77.0, device=device).to(dtype)
    k = wide[:, 1:-1, offset : offset + dn + dr]
    want = bits(wide).clone()
    want[:, 1:-1, offset : offset + dn] = bits(nope)
    want[:, 1:-1, offset + dn : offset + dn + dr] = bits(rope)
    concat_mla_k(k, nope, rope)
    assert bits(wide).equal(want)
    heads_first = torch.full((heads, tokens, dn + dr), 77.0, device=device).to(dtype)
    concat_mla_k(heads_first.transpose(0, 1), nope, rope, backend="default")
    assert bits(heads_first.transpose(0, 1)).equal(bits(k))


def test_errors_leave_k_unchanged(device):
    k = torch.full((4, 3, 48), 77.0, device=device).half()
    nope, rope = torch.zeros(4, 3, 32, device=device).half(), torch.zeros(4, 1, 16, device=device).half()
    for kind, text, call in (
        (TypeError, "k_nope: got bfloat16", lambda: concat_mla_k(k, nope.bfloat16(), rope)),
        (TypeError, "k_rope: got float32", lambda: concat_mla_k(k, nope, rope.float())),
        (TypeError, "k: got float32", lambda: concat_mla_k(k.float(), nope.float(), rope.float())),
        (TypeError, "k_nope: got None, wanted Tensor", lambda: concat_mla_k(k, None, rope)),
        (ValueError, "k_nope: got shape", lambda: concat_mla_k(k, nope[:3], rope)),
        (ValueError, "k_rope: got shape", lambda: concat_mla_k(k, nope, rope.expand(4, 3, 16))),
        (ValueError, "k_rope: got 2 dimensions", lambda: concat_mla_k(k, nope, rope[:, 0])),
        (ValueError, "k: got 48 elements in a head", lambda: concat_mla_k(k, nope[..., :16], rope)),
        (ValueError, "k_rope: got 8 bytes", lambda: concat_mla_k(k[..., :36], nope, rope[..., :4])),
        (ValueError, "k_nope: got stride 2", lambda: concat_mla_k(k[..., :32], nope[..., ::2], rope)),
        (ValueError, "k: overlaps the memory of k_nope", lambda: concat_mla_k(k, k[..., :32], rope)),
        (ValueError, "k: has elements that share memory", lambda: concat_mla_k(k[:, :1].expand(4, 3, 48), nope, rope)),
        (ValueError, "backend: got 'fast', wanted 'default'", lambda: concat_mla_k(k, nope, rope, backend="fast")),
        (GradientError, "has no gradient", lambda: concat_mla_k(k, nope.clone().requires_grad_(), rope)),
    ):
        with pytest.raises(kind, match=text):
            call()
    assert (k == 77).all()


def test_the_name_that_engines_import():
    import flashinfer

    assert flashinfer.concat_mla_k is concat_ops.concat_mla_k


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_graph_replays_new_keys():
    nope, rope = torch.randn(70, 128, 128, device="cuda").bfloat16(), torch.randn(70, 1, 64, device="cuda").bfloat16()
    k = torch.empty(70, 128, 192, device="cuda", dtype=torch.bfloat16)
    concat_mla_k(k, nope, rope)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        concat_mla_k(k, nope, rope)
    for _ in range(3):
        nope.normal_(), rope.normal_()
        graph.replay()
        assert k[..., :128].equal(nope) and k[..., 128:].equal(rope.expand(70, 128, 64))
