"""Merges of attention states against float64."""

from __future__ import annotations

import pytest
import torch

import flashinfer

from ..support.oracle import Guarded, assert_close, filled

SHAPES = [
    (1, 1, 1),
    (3, 5, 7),
    (7, 8, 64),
    (5, 32, 128),
    (2, 3, 576),
    (1, 1, 5000),
    (33, 2, 257),
    (200, 8, 128),
    (0, 4, 64),
    (4, 0, 64),
    (3, 2, 0),
]
INF = float("inf")


def merge_oracle(v: torch.Tensor, s: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return v and s of the states along dimension 1, and the magnitudes of the summed terms."""
    v, s = v.double(), s.double()
    lse = torch.logsumexp(s * torch.log(torch.tensor(2.0, dtype=torch.float64)), 1) / torch.log(
        torch.tensor(2.0, dtype=torch.float64)
    )
    empty = (s == -INF).all(1)
    lse = torch.where(empty, -INF, lse)
    weights = torch.where(s == -INF, 0.0, torch.exp2(s - torch.where(empty, 0.0, lse).unsqueeze(1))).unsqueeze(-1)
    terms = torch.where(weights == 0, 0.0, v * weights)
    s_scale = torch.where(s == -INF, 0.0, s.abs()).amax(1) if s.shape[1] else torch.zeros_like(lse)
    return terms.sum(1), lse, terms.abs().sum(1), s_scale + 1


def states(
    shape: tuple[int, int, int, int], dtype: torch.dtype, device: str, padded: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return values and lse, some of them far apart, some of empty states with NaN values."""
    v = filled(shape, dtype, device, padded)
    s = (
        torch.randn(shape[:3], device=device)
        * torch.tensor([0.5, 5.0, 40.0], device=device)[torch.randint(3, shape[:3], device=device)]
    )
    empty = torch.rand(shape[:3], device=device) < 0.2
    s[empty] = -INF
    v[empty] = float("nan")
    return v, s


def assert_merged(got, v, s) -> None:
    want_v, want_s, v_scale, s_scale = merge_oracle(v, s)
    assert got[1].dtype == torch.float32 and got[0].dtype == v.dtype
    assert_close(got[0], want_v, v_scale)
    assert_close(got[1], want_s, s_scale)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("padded", [False, True], ids=["dense", "padded"])
def test_merge_state(shape, padded, dtype, device):
    seq, heads, dim = shape
    v, s = states((seq, 2, heads, dim), dtype, device, padded)
    assert_merged(flashinfer.merge_state(v[:, 0], s[:, 0], v[:, 1], s[:, 1]), v, s)
    # lse with heads outermost
    turned = [s[:, i].t().contiguous().t() for i in range(2)]
    assert_merged(flashinfer.merge_state(v[:, 0].contiguous(), turned[0], v[:, 1], turned[1]), v, s)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("padded", [False, True], ids=["dense", "padded"])
@pytest.mark.parametrize("mask_dtype", [None, torch.bool, torch.uint8], ids=str)
def test_merge_state_in_place(shape, padded, mask_dtype, dtype, device):
    seq, heads, dim = shape
    both, s_both = states((seq, 2, heads, dim), dtype, device, padded)
    v, s = Guarded(shape, dtype, device, padded), Guarded((seq, heads), torch.float32, device, padded)
    v.tensor.copy_(both[:, 0])
    s.tensor.copy_(s_both[:, 0])
    mask = None if mask_dtype is None else (torch.randint(0, 3, (seq,), device=device)).to(mask_dtype)
    flashinfer.merge_state_in_place(v.tensor, s.tensor, both[:, 1], s_both[:, 1], mask)
    v.check()
    s.check()
    merged = torch.ones(seq, dtype=torch.bool, device=device) if mask is None else mask != 0
    assert_merged((v.tensor[merged], s.tensor[merged]), both[merged], s_both[merged])
    for now, then in ((v.tensor, both[:, 0]), (s.tensor, s_both[:, 0])):  # NaN at the same positions
        assert torch.equal(now[~merged].nan_to_num(nan=77.0), then[~merged].nan_to_num(nan=77.0))


@pytest.mark.parametrize("kind", [torch.float16, torch.bfloat16, torch.float64], ids=str)
def test_lse_of_other_dtypes(kind, dtype, device):
    """Other dtypes are converted to float32. In place, the result is rounded to the dtype of s."""
    v, s = states((9, 2, 5, 40), dtype, device, False)
    s = s.to(kind)
    exact = s.float()
    for got in (
        flashinfer.merge_states(v, s),
        flashinfer.merge_state(v[:, 0], s[:, 0], v[:, 1], s[:, 1]),
        flashinfer.merge_state(v[:, 0], exact[:, 0], v[:, 1], s[:, 1]),
    ):
        assert_merged(got, v, exact)
    mask = torch.arange(9, device=device) % 3 != 0
    mine, lse = v[:, 0].clone(), s[:, 0].t().contiguous().t()
    flashinfer.merge_state_in_place(mine, lse, v[:, 1], s[:, 1], mask)
    want, want_lse = flashinfer.merge_states(v, exact)
    assert lse.dtype == kind and torch.equal(lse[~mask], s[~mask, 0])
    rtol = max(torch.finfo(kind).eps, 1e-6)
    torch.testing.assert_close(lse[mask], want_lse[mask].to(kind), rtol=rtol, atol=1e-5)
    torch.testing.assert_close(mine[mask], want[mask])
    assert torch.equal(mine[~mask].nan_to_num(nan=77.0), v[~mask, 0].nan_to_num(nan=77.0))
    before = mine.clone()
    with pytest.raises(ValueError, match=r"merge_state_in_place: s: has elements that share memory \(stride 0\)"):
        flashinfer.merge_state_in_place(mine, s[:1, 0].expand(9, 5), v[:, 1], s[:, 1])
    assert torch.equal(mine.nan_to_num(nan=77.0), before.nan_to_num(nan=77.0))


def test_two_states_of_one_tensor_merge_in_place(dtype, device):
    v, s = states((9, 2, 4, 64), dtype, device, False)
    both, s_both = v.clone(), s.clone()
    flashinfer.merge_state_in_place(v[:, 0], s[:, 0], v[:, 1], s[:, 1])
    assert_merged((v[:, 0], s[:, 0]), both, s_both)
    assert torch.equal(v[:, 1].nan_to_num(nan=77.0), both[:, 1].nan_to_num(nan=77.0)) and torch.equal(
        s[:, 1], s_both[:, 1]
    )


@pytest.mark.parametrize("num_states", [0, 1, 2, 4, 5, 67])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_merge_states(shape, num_states, dtype, device):
    seq, heads, dim = shape
    v, s = states((seq, num_states, heads, dim), dtype, device, padded=num_states % 2 == 0)
    got = flashinfer.merge_states(v, s)
    assert got[0].shape == shape and got[1].shape == shape[:2]
    assert_merged(got, v, s)
    if num_states == 5:
        assert_merged(flashinfer.merge_states(v, s.permute(2, 1, 0).contiguous().permute(2, 1, 0)), v, s)


def test_empty_states(dtype, device):
    v = torch.full((3, 4, 2, 40), float("nan"), dtype=dtype, device=device)
    s = torch.full((3, 4, 2), -INF, device=device)
    for merged, lse in (flashinfer.merge_states(v, s), flashinfer.merge_state(v[:, 0], s[:, 0], v[:, 1], s[:, 1])):
        assert bool((merged == 0).all()) and bool((lse == -INF).all())
    out, out_s = v[:, 2].clone(), s[:, 2].clone()
    flashinfer.merge_state_in_place(out, out_s, v[:, 3], s[:, 3])
    assert bool((out == 0).all()) and bool((out_s == -INF).all())
    # A merge with an empty state changes no bit, in either order and for any lse.
    full, lse = (
        filled((3, 2, 40), dtype, device, False),
        torch.tensor([[-3e38, 3e38], [0.0, 1e-30], [100.0, -100.0]], device=device),
    )
    for got in (
        flashinfer.merge_state(full, lse, v[:, 0], s[:, 0]),
        flashinfer.merge_state(v[:, 0], s[:, 0], full, lse),
    ):
        assert torch.equal(got[0], full) and torch.equal(got[1], lse)


def test_lse_far_apart_and_not_a_number(device):
    v = torch.tensor([1.0, 2.0], device=device).view(1, 2, 1, 1).repeat(1, 1, 1, 8)
    got, lse = flashinfer.merge_states(v, torch.tensor([-3e38, 3e38], device=device).view(1, 2, 1))
    assert bool((got == 2).all()) and lse.item() == torch.tensor(3e38).item()
    for other in (0.0, -INF):  # an error of the caller must not look like an empty state
        got, lse = flashinfer.merge_states(v, torch.tensor([float("nan"), other], device=device).view(1, 2, 1))
        assert bool(got.isnan().all()) and bool(lse.isnan().all())


def test_states_of_weight_zero_do_not_count(device):
    """2 ** -1000 underflows. A value with this weight has no effect, even if it is infinite."""
    v = torch.tensor([1.0, INF], device=device).view(1, 2, 1, 1).repeat(1, 1, 1, 19)
    s = torch.tensor([0.0, -1000.0], device=device).view(1, 2, 1)
    for got, lse in (flashinfer.merge_states(v, s), flashinfer.merge_state(v[:, 0], s[:, 0], v[:, 1], s[:, 1])):
        assert bool((got == 1).all()) and lse.item() == 0


@pytest.mark.parametrize("difference", [0.3, 7.7, 19.9, 60.1])
def test_small_weight_keeps_its_digits(difference, device):
    """If the larger state's values are 0, the result is the weight of the smaller one."""
    s = torch.tensor([3.3, 3.3 - difference], device=device).view(1, 2, 1).expand(1, 2, 50).contiguous()
    s += torch.rand(50, device=device)
    v = torch.stack([torch.zeros(50, 16), torch.rand(50, 16) + 0.5]).unsqueeze(0).to(device)
    assert_merged(flashinfer.merge_states(v, s), v, s)
    assert_merged(flashinfer.merge_state(v[:, 0], s[:, 0], v[:, 1], s[:, 1]), v, s)


def with_strides(tensor: torch.Tensor, device: str) -> torch.Tensor:
    """Move a tensor to a device without changing its strides. ``.to`` makes some views contiguous."""
    if tensor._base is None:
        return tensor.to(device)
    return tensor._base.to(device).as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())


@pytest.mark.parametrize(
    "change, error, message",
    [
        (dict(v_a=torch.ones(4, 16)), ValueError, "v_a: got 2 dimensions, wanted 3"),
        (
            dict(v_a=torch.ones(4, 2, 8).double()),
            TypeError,
            "v_a: got float64, wanted float32 or float16 or bfloat16",
        ),
        (dict(v_a=torch.ones(4, 8, 2).transpose(1, 2)), ValueError, "v_a: got stride 2 of the last dimension"),
        (dict(v_b=torch.ones(4, 2, 9)), ValueError, r"v_b: got shape \[4, 2, 9\], wanted \[4, 2, 8\] as v_a has"),
        (dict(v_b=torch.ones(4, 2, 8).half()), TypeError, "v_b: got float16, wanted float32"),
        (dict(s_a=torch.ones(4, 3)), ValueError, r"s_a: got shape \[4, 3\], wanted \[4, 2\]"),
        (dict(s_b=torch.ones(4)), ValueError, r"s_b: got shape \[4\], wanted \[4, 2\]"),
        (dict(s_b=torch.ones(4, 2).int()), TypeError, "s_b: got int32, wanted float32"),
        (dict(s_b=None), TypeError, "s_b: got None, wanted Tensor"),
        (dict(s_b=[1.0]), TypeError, "s_b: got list, wanted Tensor"),
    ],
)
def test_bad_input(change, error, message, device):
    arguments = (
        dict(v_a=torch.ones(4, 2, 8), s_a=torch.ones(4, 2), v_b=torch.ones(4, 2, 8), s_b=torch.ones(4, 2)) | change
    )
    with pytest.raises(error, match=message):
        flashinfer.merge_state(
            **{n: with_strides(x, device) if isinstance(x, torch.Tensor) else x for n, x in arguments.items()}
        )


@pytest.mark.parametrize(
    "change, error, message",
    [
        (dict(v_other=torch.ones(4, 3, 8)), ValueError, r"v_other: got shape \[4, 3, 8\]"),
        (dict(mask=torch.ones(3, dtype=torch.bool)), ValueError, r"mask: got shape \[3\], wanted \[4\]"),
        (dict(mask=torch.ones(4)), TypeError, "mask: got float32, wanted bool or uint8"),
        (dict(mask=torch.ones(8, dtype=torch.bool)[::2]), ValueError, "mask: is not contiguous"),
    ],
)
def test_bad_input_in_place(change, error, message, device):
    arguments = (
        dict(
            v=torch.full((4, 2, 8), 7.0),
            s=torch.full((4, 2), 7.0),
            v_other=torch.ones(4, 2, 8),
            s_other=torch.ones(4, 2),
        )
        | change
    )
    moved = {name: with_strides(x, device) for name, x in arguments.items()}
    with pytest.raises(error, match=message):
        flashinfer.merge_state_in_place(**moved)
    assert bool((moved["v"] == 7).all() and (moved["s"] == 7).all()), "something was written before the error"


def test_overlapping_states(device):
    memory = torch.randn(200, device=device)
    v, other = memory[:64].view(4, 2, 8), memory[8:72].view(4, 2, 8)
    s, s_other = memory[100:108].view(4, 2), torch.ones(4, 2, device=device)
    shared = torch.zeros(1, 2, 8, device=device).expand(4, 2, 8)
    for call, message in [
        ((v, s, other, s_other), "v: overlaps the memory of v_other"),
        ((v, s, v + 1, memory[101:109].view(4, 2)), "s: overlaps the memory of s_other"),
        ((v, memory[60:68].view(4, 2), v + 1, s_other), "v: overlaps the memory of s"),
        ((shared, s, v, s_other), "v: has elements that share memory"),
    ]:
        with pytest.raises(ValueError, match=message):
            flashinfer.merge_state_in_place(*call)


def test_bad_states(device):
    v, s = torch.ones(4, 3, 2, 8, device=device), torch.ones(4, 3, 2, device=device)
    for call, error, message in [
        ((v[0], s), ValueError, "v: got 3 dimensions, wanted 4"),
        ((v, s[:, :2]), ValueError, r"s: got shape \[4, 2, 2\], wanted \[4, 3, 2\]"),
        ((v, s.int()), TypeError, "s: got int32, wanted float32"),
        ((v.int(), s), TypeError, "v: got int32"),
    ]:
        with pytest.raises(error, match=message):
            flashinfer.merge_states(*call)
