"""Concurrent prefill of one request and decode of a batch, against float64."""

from __future__ import annotations

import pytest
import torch

import flashinfer

from ..support.attention_oracle import Paged, assert_near, attention, batch_attention, drawn, int32, variant_dtype

HEADS, KV_HEADS, DIM, PAGE = 8, 2, 64, 16
LENS = [40, 0, 7, 129, 300]


def workspace(device: str) -> torch.Tensor:
    return torch.empty(16 << 20, dtype=torch.uint8, device=device)


def request(dtype: torch.dtype, device: str, layout: str = "NHD", qo_len: int = 19, kv_len: int = 45):
    """Return arguments of the prefill, for the wrapper and for the oracle."""
    q = drawn((qo_len, HEADS, DIM), dtype, device)
    k, v = (drawn((kv_len, KV_HEADS, DIM), dtype, device) for _ in range(2))
    given = (k, v) if layout == "NHD" else (k.transpose(0, 1), v.transpose(0, 1))
    return (q, *given), (q, k, v)


def planned(paged: Paged, device: str, layout: str = "NHD", **options):
    wrapper = flashinfer.PODWithPagedKVCacheWrapper(workspace(device), layout)
    wrapper.plan(*paged.tables_on(device), HEADS, KV_HEADS, DIM, PAGE, **options)
    return wrapper


def decoded(q: torch.Tensor, paged: Paged, **options) -> tuple[torch.Tensor, torch.Tensor]:
    return batch_attention(
        q, [1] * len(paged.kv_lens), [paged.request(b) for b in range(len(paged.kv_lens))], **options
    )


@pytest.mark.parametrize("layout_p, layout_d", [("NHD", "NHD"), ("HND", "NHD"), ("NHD", "HND")])
@pytest.mark.parametrize("causal", [False, True])
def test_both(layout_p, layout_d, causal, dtype, device):
    if dtype == torch.float32 and device == "cuda":
        pytest.skip("CUDA has no float32 queries")
    paged = Paged(LENS, PAGE, KV_HEADS, DIM, dtype, device, layout_d)
    wrapper = planned(paged, device, layout_d, q_data_type=dtype)
    assert not wrapper.is_cuda_graph_enabled
    given, (q, k, v) = request(dtype, device, layout_p)
    q_d = drawn((len(LENS), HEADS, DIM), dtype, device)
    want_p, want_d = attention(q, k, v, causal=causal), decoded(q_d, paged)
    out_p, out_d = wrapper.run(*given, q_d, paged.cache, causal_p=causal, kv_layout_p=layout_p)
    assert_near(out_p, want_p[0])
    assert_near(out_d, want_d[0])
    (again_p, lse_p), (again_d, lse_d) = wrapper.run(
        *given, q_d, paged.cache, causal_p=causal, kv_layout_p=layout_p, return_lse_p=True, return_lse_d=True
    )
    assert torch.equal(again_p, out_p) and torch.equal(again_d, out_d)
    assert_near(again_p, want_p[0], lse_p, want_p[1])
    assert_near(again_d, want_d[0], lse_d, want_d[1])


def test_options_of_each(device):
    dtype = variant_dtype(device)
    paged = Paged(LENS, PAGE, KV_HEADS, DIM, dtype, device)
    wrapper = planned(paged, device, window_left=50, sm_scale=0.2, q_data_type=dtype, data_type=dtype)
    given, (q, k, v) = request(dtype, device)
    q_d = drawn((len(LENS), HEADS, DIM), dtype, device)
    mask = torch.rand(19, 45) < 0.5
    out_p, out_d = wrapper.run(*given, q_d, paged.cache, mask.to(device), sm_scale_p=0.3, k_scale=0.5, v_scale=2.0)
    assert_near(out_p, attention(q, k, v, mask=mask, sm_scale=0.3)[0])
    assert_near(out_d, 2 * decoded(q_d, paged, window_left=50, sm_scale=0.1)[0])
    # Options of a run replace the planned ones, for that run only.
    rope = {"pos_encoding_mode": "ROPE_LLAMA", "rope_theta": 5e3, "rope_scale": 2.0, "window_left": 9, "sm_scale": 0.3}
    out_p, out_d = wrapper.run(
        *given, q_d, paged.cache, causal_p=True, **{f"{name}_p": value for name, value in rope.items()},
        **{f"{name}_d": value for name, value in rope.items()},
    )  # fmt: skip
    assert_near(out_p, attention(q, k, v, causal=True, **rope)[0])
    assert_near(out_d, decoded(q_d, paged, **rope)[0])
    _, out_d = wrapper.forward(*given, q_d, paged.cache)
    assert_near(out_d, decoded(q_d, paged, window_left=50, sm_scale=0.2)[0])


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_in_a_graph():
    device, dtype = "cuda", torch.float16
    paged = Paged(LENS, PAGE, KV_HEADS, DIM, dtype, device)
    tables = paged.tables_on(device)
    buffers = [tables[0].clone(), torch.zeros(64, dtype=torch.int32, device=device), tables[2].clone()]
    wrapper = flashinfer.PODWithPagedKVCacheWrapper(workspace(device), "NHD", True, *buffers)
    assert wrapper.is_cuda_graph_enabled
    given, (q, k, v) = request(dtype, device)
    q_d = drawn((len(LENS), HEADS, DIM), dtype, device)
    wrapper.plan(*tables, HEADS, KV_HEADS, DIM, PAGE)
    wrapper.run(*given, q_d, paged.cache)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out_p, out_d = wrapper.run(*given, q_d, paged.cache)
    for _ in range(5):
        lens = torch.randint(0, 96, (len(LENS),)).tolist()  # fewer pages than those of LENS
        other = Paged(lens, PAGE, KV_HEADS, DIM, dtype, device)
        paged.cache[: other.cache.shape[0]].copy_(other.cache)
        for x in (q, q_d):
            x.copy_(drawn(tuple(x.shape), dtype, device))
        wrapper.plan(*other.tables_on(device), HEADS, KV_HEADS, DIM, PAGE)
        graph.replay()
        assert_near(out_p, attention(q, k, v)[0])
        assert_near(out_d, decoded(q_d, other)[0])


def test_bad_arguments(device):
    name = "PODWithPagedKVCacheWrapper"
    with pytest.raises(ValueError, match=f"{name}: jit_args: got tuple, wanted None: use the wrappers"):
        flashinfer.PODWithPagedKVCacheWrapper(workspace(device), jit_args=("uri",))
    paged = Paged(LENS, PAGE, KV_HEADS, DIM, torch.float16, device)
    wrapper = planned(paged, device)
    given, _ = request(torch.float16, device)
    q_d = drawn((len(LENS), HEADS, DIM), torch.float16, device)
    one = torch.ones(1, dtype=torch.bool)
    for options, error, message in (
        ({"custom_mask_d": one}, ValueError, "custom_mask_d: got Tensor, wanted None: a query"),
        ({"packed_custom_mask_d": one}, ValueError, "packed_custom_mask_d: got Tensor, wanted None: a query"),
        ({"kv_layout_d": "HND"}, ValueError, "kv_layout_d: got 'HND', wanted 'NHD' as the wrapper has"),
        (
            {"pos_encoding_mode_d": "SINE"},
            ValueError,
            "pos_encoding_mode_d: got 'SINE', wanted 'NONE', 'ROPE_LLAMA' or 'ALIBI'",
        ),
        ({"rope_theta_d": -1.0}, ValueError, "rope_theta_d: got -1.0, wanted a positive number"),
        ({"kv_layout_p": "DNH"}, ValueError, "kv_layout_p: got 'DNH', wanted"),
    ):
        with pytest.raises(error, match=message):
            wrapper.run(*given, q_d, paged.cache, **options)
    with pytest.raises(TypeError, match=r"run: got 1 more arguments, wanted none"):
        wrapper.run(*given, q_d, paged.cache, None, None, False, "NHD", "NONE", None, -1, None, None, False, None, None,
                    False, "NHD", "NONE", None, -1, None, None, None, None, None, False, False, None, 3)  # fmt: skip
    with pytest.raises(ValueError, match="q_d: got 4 queries, and plan\\(\\) was called for 5"):
        wrapper.run(*given, q_d[1:], paged.cache)
    with pytest.raises(ValueError, match="q_d: got 2 dimensions, wanted 3"):
        wrapper.run(*given, q_d[0], paged.cache)
    with pytest.raises(ValueError, match="last_page_len: got 4 elements, wanted 5"):
        wrapper.plan(*paged.tables_on(device)[:2], int32([1] * 4), HEADS, KV_HEADS, DIM, PAGE)
    with pytest.raises(ValueError, match=rf"{name}.run: got no plan"):
        wrapper.run(*given, q_d, paged.cache)
    wrapper = planned(paged, device)
    wrapper.reset_workspace_buffer(workspace(device), workspace(device))
    with pytest.raises(ValueError, match=rf"{name}.run: got no plan"):
        wrapper.run(*given, q_d, paged.cache)
    wrapper.end_forward()
