"""The delta rule over chunks in half types, against float64, head by head.

GPUs use tensor cores. The CPU, and GPUs whose rows are not aligned to 16 bytes, compute in float32 and err less.
"""

from __future__ import annotations

import random

import pytest
import torch

from flashinfer import delta_rule

from .oracle import chunk_bound, error, inputs
from .oracle import delta_rule as oracle

HALVES = [torch.bfloat16, torch.float16]
# The largest error of dg, dbeta and dh0 on the CPU is 6.5e-6 in 43 seeds. Rounding dy to bfloat16 alone causes 1.6e-3
# in dbeta.
FLOAT32_GRADIENT_BOUND = 2e-5
# One decay per head, or one per channel of a key as in Kimi Delta Attention.
every_gate = pytest.mark.parametrize("gate", ["head", "channel"])


def inputs_of(gate: str, dtype: torch.dtype, device: str, *args: int, **shape) -> dict[str, torch.Tensor]:
    if gate == "head":
        return inputs(dtype, device, *args, **shape)
    given = inputs(dtype, device, *args, gate=False, row_gate=True, **shape)
    given["g"] = given.pop("gk")
    return given


def decays_by_channel(given: dict[str, torch.Tensor]) -> bool:
    return "g" in given and given["g"].dim() == 4


def run(given, lengths=None, **options):
    offsets = {}
    if lengths is not None:
        index = random.choice([torch.int32, torch.int64])
        offsets["cu_seqlens"] = torch.tensor([0, *lengths], device=given["q"].device).cumsum(0).to(index)
    function = delta_rule.chunk_kda if decays_by_channel(given) else delta_rule.chunk_gated_delta_rule
    return function(**given, scale=0.3, output_final_state=True, **offsets, **options)


def exactly(wide, lengths=None, l2norm=False):
    """Return the oracle's results for float64 inputs on the host."""
    named = {"gk" if name == "g" and decays_by_channel(wide) else name: one for name, one in wide.items()}
    return oracle(**named, scale=0.3, l2norm=l2norm, lengths=lengths)


def bound_of(given, alike=False) -> float:
    return chunk_bound(given, alike) or {torch.bfloat16: 4e-3, torch.float16: 5e-4}[given["q"].dtype]


def check_gradients(given, lengths=None, alike=False, **options) -> None:
    """Compare each result and each gradient with float64, head by head."""
    bound, l2norm = bound_of(given, alike), options.get("use_qk_l2norm_in_kernel", False)
    leaves = {name: one.detach().clone().requires_grad_() for name, one in given.items()}
    exact = {name: one.detach().cpu().double().requires_grad_() for name, one in given.items()}
    got, want = run(leaves, lengths, **options), exactly(exact, lengths, l2norm)
    assert error(got[0].transpose(1, 2), want[0].transpose(1, 2)) < bound and error(got[1], want[1]) < bound
    grads = [torch.randn_like(one) for one in got]
    ours = torch.autograd.grad(got, list(leaves.values()), grads)
    right = torch.autograd.grad(want, list(exact.values()), [one.cpu().double() for one in grads])
    for name, one, other in zip(leaves, ours, right, strict=True):
        assert one.dtype == leaves[name].dtype and other.square().mean() > 1e-6
        if name != "initial_state":
            one, other = one.transpose(1, 2), other.transpose(1, 2)
        if one.device.type == "cpu" and one.dtype == torch.float32:  # sums of float32 terms, stored unrounded
            assert error(one, other) < FLOAT32_GRADIENT_BOUND, name
            continue
        allowed = (2 if l2norm or name == "g" else 1) * bound
        if leaves["k"].shape[-1] <= 8:  # a mean over few roundings varies more
            allowed *= 1.5
        if name == "g" and not decays_by_channel(
            given
        ):  # terms cancel: a head with small sums has errors as large as other heads
            assert error(one.reshape(1, -1), other.reshape(1, -1)) < allowed
            allowed *= 4
        if name == "beta" and alike and one.device.type == "cuda" and leaves["q"].dtype == torch.float16:
            # Z comes from tf32 products, which round as float16 does, by 2^-11. That is negligible next to bfloat16's
            # 2^-8. In float16 it adds to the rounding of later products, and <dy, r> contains Z twice. The bound, an
            # eighth of bfloat16's, covers only the later products. Emulated in float64 for 400 inputs, the error
            # is 2.0e-3 in the median and 3.3e-3 at most. Without the rounding of tf32 it is 1.0e-3 and 1.6e-3.
            allowed *= 2
        assert error(one, other) < allowed, name


def check(given, lengths=None, alike=False, **options) -> None:
    bound = bound_of(given, alike)
    wide = {name: one.cpu().double() for name, one in given.items()}
    o, state = run(given, lengths, **options)
    want, last = exactly(wide, lengths, options.get("use_qk_l2norm_in_kernel", False))
    parts = [want.shape[1]] if lengths is None else lengths
    for got, right in zip(o.split(parts, 1), want.split(parts, 1), strict=True):
        assert error(got.transpose(1, 2), right.transpose(1, 2)) < bound
        for part in (slice(64), slice(right.shape[1] // 64 * 64, None)):  # also the first chunk and the tail separately
            assert error(got[:, part].transpose(1, 2), right[:, part].transpose(1, 2)) < 1.5 * bound
    assert error(state, last) < bound


NAMES_OF_SIZES = ("heads", "value_heads", "key_dim", "value_dim", "batch", "tokens")
# CTAs of two, four and eight warps, columns that do not fill the last CTA, one head and many heads.
SIZES = [
    (1, 1, 8, 8, 1, 64),
    (1, 2, 64, 64, 2, 190),
    (2, 6, 48, 104, 1, 131),
    (1, 1, 128, 40, 1, 257),
    (2, 26, 40, 56, 4, 65),
    (2, 10, 128, 64, 10, 70),
    (10, 10, 64, 136, 10, 64),
    (1, 13, 120, 128, 8, 129),
    (1, 2, 256, 512, 1, 190),
    (2, 6, 136, 40, 2, 131),
    (1, 3, 200, 72, 2, 64),
]


@pytest.mark.slow_beyond(6)
@pytest.mark.parametrize("sizes", SIZES, ids=str)
@every_gate
def test_heads_of_every_size(sizes, gate, device):
    for dtype in HALVES:
        check(inputs_of(gate, dtype, device, **dict(zip(NAMES_OF_SIZES, sizes, strict=True))))


@pytest.mark.slow_beyond(2)
@pytest.mark.parametrize("key_dim, value_dim", [(64, 64), (128, 128), (256, 64)])
@every_gate
def test_similar_keys(key_dim, value_dim, gate, device):
    for dtype in HALVES:
        shape = dict(tokens=300, heads=1, value_heads=2, key_dim=key_dim, value_dim=value_dim)
        check(inputs_of(gate, dtype, device, batch=1, alike=True, **shape), alike=True)


@pytest.mark.slow_beyond(2)
@pytest.mark.parametrize("key_dim", [64, 256])
@every_gate
def test_random_sequences(key_dim, gate, device):
    lengths = [random.choice([0, 1, 63, 64, 65, random.randrange(2, 300)]) for _ in range(7)] + [400]
    for dtype in HALVES:
        shape = dict(tokens=sum(lengths), sequences=len(lengths), key_dim=key_dim, value_dim=40)
        given = inputs_of(gate, dtype, device, batch=1, **shape)
        check(given, lengths, use_qk_l2norm_in_kernel=True)


@every_gate
def test_nan_stays_in_its_sequence(gate, device):
    lengths = [100, 90, 80]
    given = inputs_of(gate, torch.bfloat16, device, batch=1, tokens=270, sequences=3)
    good, state = run(given, lengths)
    for name in ("q", "k", "v", "g", "beta"):
        given[name][:, 100:190] = float("nan")
    o, last = run(given, lengths)
    for got, want in (
        (o[:, :100], good[:, :100]),
        (o[:, 190:], good[:, 190:]),
        (last[0], state[0]),
        (last[2], state[2]),
    ):
        assert got.equal(want)


@pytest.mark.slow_beyond(2)
@pytest.mark.parametrize("key_dim", [48, 256])
@every_gate
def test_layouts(key_dim, gate, device):
    """Use transposed views, states with columns first and no initial state. Results are equal, and so are two runs."""
    given = inputs_of(gate, torch.bfloat16, device, tokens=140, key_dim=key_dim)
    del given["initial_state"]
    want = run(given)
    views = {n: given[n].transpose(1, 2).contiguous().transpose(1, 2) for n in "qkv"}
    o, last = run(given | views, state_v_first=True)
    assert o.equal(want[0]) and last.mT.equal(want[1])
    assert all(one.equal(other) for one, other in zip(run(given), want, strict=True))


def test_unaligned_rows(device):
    """Compute rows that are not aligned to 16 bytes."""
    given = inputs(torch.float16, device, tokens=70, key_dim=44, value_dim=60)
    check(given)
    shifted = torch.empty(given["q"].numel() + 1, device=device, dtype=torch.float16)[1:].view(given["q"].shape)
    check(given | {"q": shifted.copy_(given["q"])})


@pytest.mark.slow_beyond(3)
@pytest.mark.parametrize("key_dim", [48, 64, 128, 256])
@every_gate
def test_resets(key_dim, gate, device):
    """Use decays of 0, with logarithms of minus infinity. They cause no NaN and no loss of digits."""
    given = inputs_of(gate, torch.float16, device, tokens=150, key_dim=key_dim)
    if gate == "channel":
        given["g"][:, [0, 20, 21, 37, 64, 149], :, ::3] = -float("inf")
        given["g"][:, [15, 16, 100]] = -float("inf")
        return check(given)
    given["g"][:, [0, 20, 21, 37, 64, 149]] = -float("inf")
    o, state = run(given)
    assert o.isfinite().all()
    want, last = exactly({name: one.cpu().double() for name, one in given.items()})
    bound = bound_of(given)
    assert error(o.transpose(1, 2), want.transpose(1, 2)) < 2 * bound and error(state, last) < 2 * bound


@pytest.mark.slow_beyond(2)
@pytest.mark.parametrize("key_dim", [48, 256])
@every_gate
def test_states_continue_a_prefill(key_dim, gate, device):
    """Two prefills that pass the state on equal one prefill."""
    given = inputs_of(gate, torch.bfloat16, device, batch=1, tokens=200, key_dim=key_dim)
    whole, last = run(given)
    state = given.pop("initial_state")
    first, middle = run({n: one[:, :128] for n, one in given.items()} | {"initial_state": state})
    second, end = run({n: one[:, 128:] for n, one in given.items()} | {"initial_state": middle})
    assert torch.cat([first, second], 1).equal(whole) and end.equal(last)


@pytest.mark.slow_beyond(4)
@pytest.mark.parametrize(
    "heads, value_heads, key_dim, value_dim, batch, tokens, l2norm",
    [
        (1, 1, 8, 8, 1, 64, False),
        (1, 2, 64, 64, 2, 190, False),
        (2, 6, 48, 104, 1, 131, True),
        (1, 1, 128, 40, 1, 257, False),
        (2, 26, 40, 56, 4, 65, False),
        (2, 10, 128, 72, 10, 70, True),
        (2, 10, 128, 136, 10, 70, True),
        (5, 15, 64, 136, 7, 64, False),
        (1, 2, 256, 64, 1, 131, True),
        (2, 6, 136, 40, 2, 131, False),
        (1, 2, 256, 136, 1, 190, False),
        (2, 2, 200, 136, 1, 70, True),
        (3, 9, 256, 128, 3, 200, True),
    ],
)
@every_gate
def test_gradients(heads, value_heads, key_dim, value_dim, batch, tokens, l2norm, gate, device):
    for dtype in HALVES:
        shape = dict(heads=heads, value_heads=value_heads, key_dim=key_dim, value_dim=value_dim, tokens=tokens)
        check_gradients(inputs_of(gate, dtype, device, batch=batch, **shape), use_qk_l2norm_in_kernel=l2norm)


@pytest.mark.slow_beyond(2)
@pytest.mark.parametrize("key_dim", [128, 256])
@every_gate
def test_gradients_of_similar_keys(key_dim, gate, device):
    for dtype in HALVES:
        shape = dict(tokens=200, heads=1, value_heads=2, key_dim=key_dim, value_dim=64)
        check_gradients(inputs_of(gate, dtype, device, batch=1, alike=True, **shape), alike=True)


@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_rounding_of_similar_keys_cancels_in_dg(dtype, device):
    """Bound dg of a loss of the state, with similar keys. It is a sum of X over rectangles.

    The kernels' roundings, emulated in float64 for 12 inputs, cause errors of 1.0e-2 to 1.1e-2 in bfloat16 and 1.8e-3 to
    2.0e-3 in float16. If elements of X were rounded independently, these would be 1.7e-2 to 1.8e-2 and 2.5e-3 to
    2.8e-3.
    """
    given = inputs(dtype, device, 8, 64, 32, 32, 32, 32, alike=True)
    given["g"] = torch.zeros_like(given["g"])
    del given["initial_state"]
    leaves = {name: one.requires_grad_() for name, one in given.items()}
    exact = {name: one.detach().cpu().double().requires_grad_() for name, one in given.items()}
    (o, state), (_, want) = run(leaves), exactly(exact)
    grad = torch.randn_like(state)
    (got,) = torch.autograd.grad((o, state), [leaves["g"]], (torch.zeros_like(o), grad))
    (right,) = torch.autograd.grad(want, [exact["g"]], grad.cpu().double())
    bound = {torch.bfloat16: 1.35e-2, torch.float16: 2.2e-3}[dtype] if got.is_cuda else FLOAT32_GRADIENT_BOUND
    assert error(got.reshape(1, -1), right.reshape(1, -1)) < bound


@pytest.mark.slow_beyond(2)
@pytest.mark.parametrize("key_dim, value_dim, l2norm", [(64, 40, True), (128, 128, False), (256, 40, False)])
@every_gate
def test_gradients_of_random_sequences(key_dim, value_dim, l2norm, gate, device):
    lengths = [random.choice([0, 1, 63, 64, 65, random.randrange(2, 200)]) for _ in range(5)] + [320]
    shape = dict(tokens=sum(lengths), sequences=len(lengths), key_dim=key_dim, value_dim=value_dim)
    for dtype in HALVES:
        given = inputs_of(gate, dtype, device, batch=1, **shape)
        check_gradients(given, lengths, use_qk_l2norm_in_kernel=l2norm)


def test_eight_thousand_tokens(device):
    """Errors do not grow with the length: 128 chunks and a tail have the bounds of two chunks."""
    lengths = [8200, 0, 9]
    given = inputs(
        torch.bfloat16, device, batch=1, tokens=sum(lengths), sequences=3, heads=1, value_heads=1, key_dim=16,
        value_dim=24,
    )  # fmt: skip
    check_gradients(given, lengths)


def test_gradients_of_one_result(device):
    """Compute gradients of only the output and of only the state, without gate and initial state, twice."""
    given = inputs(torch.bfloat16, device, tokens=140, gate=False)
    leaves = {name: one.clone().requires_grad_() for name, one in given.items() if name != "initial_state"}
    exact = {name: one.detach().cpu().double().requires_grad_() for name, one in leaves.items()}
    got = delta_rule.chunk_delta_rule(**leaves, scale=0.3, output_final_state=True)
    want = oracle(**exact, scale=0.3)
    for which, names in ((0, "qkv"), (1, "kv")):
        grad = torch.randn_like(got[which])
        mine = [
            torch.autograd.grad(got[which], [leaves[name] for name in names], grad, retain_graph=True) for _ in range(2)
        ]
        right = torch.autograd.grad(
            want[which], [exact[name] for name in names], grad.cpu().double(), retain_graph=True
        )
        for one, again, other in zip(*mine, right, strict=True):
            assert one.equal(again) and error(one.transpose(1, 2), other.transpose(1, 2)) < bound_of(given)


@pytest.mark.parametrize("batch, heads", [(1, 1), (11, 8)])
def test_dy_beyond_float16_is_erased_by_beta(batch, heads, device):
    """Make dy exceed float16: at one token it is 4 times the gradient of the output. beta = 0 then erases it."""
    given = inputs(torch.float16, device, batch, 130, heads, heads, 64, 64)
    given["q"], given["beta"] = 4 * given["k"], torch.zeros_like(given["beta"])
    leaves = {name: one.requires_grad_() for name, one in given.items() if name != "g"}
    o, _ = delta_rule.chunk_delta_rule(**leaves, scale=1.0)
    grad = torch.zeros_like(o)
    grad[:, 70] = 3e4
    (dv,) = torch.autograd.grad(o, [leaves["v"]], grad)
    assert dv.eq(0).all()


@pytest.mark.parametrize("batch, tokens, heads, values", [(1, 1500, 2, 128), (2, 530, 3, 128), (3, 257, 1, 96)])
def test_few_heads_have_the_bits_of_packed_sequences(batch, tokens, heads, values, device):
    """Compare two schedules. With few heads and equal lengths, CTAs of the scan's launch prepare the terms meanwhile.

    With ``cu_seqlens``, an earlier kernel prepares them. Bits are equal for any order of CTAs, and stale memory is
    never read.
    """
    dtype = random.choice(HALVES)
    given = inputs(dtype, device, batch, tokens, heads, 2 * heads, 128, values)
    packed = {
        name: one if name == "initial_state" else one.reshape(1, batch * tokens, *one.shape[2:])
        for name, one in given.items()
    }
    want, want_state = run(packed, [tokens] * batch)
    for _ in range(10):
        torch.full((1 << 22,), torch.nan, device=device)  # on a GPU, the call's workspace reuses this memory
        out, state = run(given)
        assert torch.equal(out.flatten(0, 1), want[0]) and torch.equal(state, want_state)
