"""The page family against Python loops; whole caches are compared, byte by byte."""

from __future__ import annotations

import random

import pytest
import torch

import flashinfer

BYTES = [torch.uint8, torch.int8, torch.float8_e4m3fn, torch.float8_e5m2, torch.int32]
SHAPES = [  # heads, dim, page_size
    (1, 1, 1), (2, 64, 1), (8, 128, 16), (3, 5, 7), (1, 512, 64), (4, 130, 3), (40, 256, 2), (2, 1, 5), (0, 8, 4), (2, 0, 4),
]  # fmt: skip


def drawn(shape, dtype, device) -> torch.Tensor:
    """Return random bits: NaN and infinities are copied unchanged."""
    size = torch.empty((), dtype=dtype).element_size()
    count = int(torch.tensor(shape).prod()) * size
    return torch.randint(0, 256, (count,), dtype=torch.uint8).view(dtype).view(shape).to(device)


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(-1).view(torch.uint8).cpu()


def int32(values, device) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32, device=device)


class Requests:
    """Requests of random lengths in shuffled pages, their appended tokens, and the slot of every token."""

    def __init__(self, batch: int, page_size: int, device: str, longest: int = 40) -> None:
        self.page_size, self.device = page_size, device
        self.seq_lens = [random.randrange(longest) for _ in range(batch)]
        appended = [random.randint(0, length) for length in self.seq_lens]
        pages = [-(-length // page_size) for length in self.seq_lens]
        self.num_pages = sum(pages) + 3
        indices = random.sample(range(self.num_pages), sum(pages))
        indptr = [sum(pages[:i]) for i in range(batch + 1)]
        last = [length - max(n - 1, 0) * page_size for length, n in zip(self.seq_lens, pages, strict=True)]
        self.nnz = sum(appended)
        self.append_indptr = int32([sum(appended[:i]) for i in range(batch + 1)], device)
        self.kv_indices, self.kv_indptr, self.kv_last_page_len = (int32(x, device) for x in (indices, indptr, last))
        where = [
            (i, length - n + j)
            for i, (length, n) in enumerate(zip(self.seq_lens, appended, strict=True))
            for j in range(n)
        ]
        self.batch_indices, self.positions = (int32([pair[k] for pair in where], device) for k in range(2))
        self.slots = [(indices[indptr[i] + at // page_size], at % page_size) for i, at in where]

    @property
    def pages(self):
        return self.kv_indices, self.kv_indptr, self.kv_last_page_len

    @property
    def tokens(self):
        return self.batch_indices, self.positions


def make_cache(form: str, layout: str, pages: int, page_size: int, heads: int, dim: int, dtype, device):
    """Return the whole buffer (some forms have margins), the argument, and views of k and v as NHD."""
    inner = (page_size, heads) if layout == "NHD" else (heads, page_size)
    if form == "one":
        buffer = drawn((pages, 2, *inner, dim), dtype, device)
        argument = buffer
    elif form == "padded":
        buffer = drawn((pages + 1, 2, inner[0] + 1, inner[1] + 2, dim + 16), dtype, device)
        argument = buffer[1:, :, 1:, 1:-1, 8 : 8 + dim]
    elif form == "tuple":
        buffer = drawn((2, pages, *inner, dim), dtype, device)
        argument = (buffer[0], buffer[1])
    elif form == "unbound":
        buffer = drawn((pages, 2, *inner, dim), dtype, device)
        argument = (buffer[:, 0], buffer[:, 1])
    else:  # k and v next to each other in one row, transposed to the layout
        assert form == "side by side"
        buffer = drawn((pages, inner[1], inner[0], 2 * dim), dtype, device)
        argument = (buffer[..., :dim].transpose(1, 2), buffer[..., dim:].transpose(1, 2))
    k, v = argument if isinstance(argument, tuple) else (argument[:, 0], argument[:, 1])
    return buffer, argument, *((x if layout == "NHD" else x.transpose(1, 2)) for x in (k, v))


def check_append(requests, heads, dim, page_size, form, layout, dtype, device, sliced) -> None:
    buffer, argument, k_cache, v_cache = make_cache(
        form, layout, requests.num_pages, page_size, heads, dim, dtype, device
    )
    if sliced:  # two parts of one projection
        qkv = drawn((requests.nnz, 3 * heads, dim + 3), dtype, device)
        key, value = qkv[:, heads : 2 * heads, :dim], qkv[:, 2 * heads :, :dim]
    else:
        key, value = drawn((requests.nnz, heads, dim), dtype, device), drawn((requests.nnz, heads, dim), dtype, device)
    before = buffer.clone()
    flashinfer.append_paged_kv_cache(key, value, *requests.tokens, argument, *requests.pages, layout)
    got = as_bytes(buffer)
    buffer.view(torch.uint8).copy_(before.view(torch.uint8))
    for token, (page, entry) in enumerate(requests.slots):
        if dim and heads:
            k_cache[page, entry] = key[token]
            v_cache[page, entry] = value[token]
    assert torch.equal(got, as_bytes(buffer))


@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize("form", ["one", "padded", "tuple", "unbound", "side by side"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_append(shape, form, layout, dtype, device):
    heads, dim, page_size = shape
    requests = Requests(random.choice([1, 2, 7]), page_size, device)
    check_append(requests, heads, dim, page_size, form, layout, dtype, device, sliced=random.random() < 0.5)


@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize("kind", BYTES, ids=str)
def test_append_moves_any_bits(kind, layout, device):
    requests = Requests(3, 4, device)
    for dim in (16, 7, 64):
        check_append(requests, 2, dim, 4, "one", layout, kind, device, sliced=False)


def test_append_of_many_tokens_is_threaded(device):
    requests = Requests(5, 16, device, longest=700)
    check_append(requests, 8, 128, 16, "one", "NHD", torch.float16, device, sliced=True)


def test_nothing_to_append(dtype, device):
    empty = torch.empty(0, dtype=torch.int32, device=device)
    tokens = torch.empty(0, 2, 8, dtype=dtype, device=device)
    for pages in (0, 3):
        cache = torch.full((pages, 2, 4, 2, 8), 7.0, dtype=dtype, device=device)
        flashinfer.append_paged_kv_cache(tokens, tokens, empty, empty, cache, empty, int32([0], device), empty)
        assert bool((cache == 7).all())


def test_values_may_have_a_width_of_their_own(dtype, device):
    requests = Requests(3, 4, device)
    key, value = drawn((requests.nnz, 2, 24), dtype, device), drawn((requests.nnz, 2, 16), dtype, device)
    caches = [drawn((requests.num_pages, 4, 2, dim), dtype, device) for dim in (24, 16)]
    want = [cache.clone() for cache in caches]
    flashinfer.append_paged_kv_cache(key, value, *requests.tokens, (caches[0], caches[1]), *requests.pages)
    for token, place in enumerate(requests.slots):
        want[0][place], want[1][place] = key[token], value[token]
    assert all(torch.equal(as_bytes(a), as_bytes(b)) for a, b in zip(caches, want, strict=True))


@pytest.mark.parametrize("dims", [(512, 64), (5, 3), (256, 1), (4096, 40)], ids=str)
@pytest.mark.parametrize("form", ["two", "one"])
def test_append_mla(dims, form, dtype, device):
    page_size = random.choice([1, 3, 16])
    requests = Requests(4, page_size, device)
    if form == "one":
        buffer = drawn((requests.num_pages, page_size, sum(dims)), dtype, device)
        ckv_cache, kpe_cache = buffer[..., : dims[0]], buffer[..., dims[0] :]
        rows = drawn((requests.nnz, sum(dims)), dtype, device)
        ckv, kpe = rows[:, : dims[0]], rows[:, dims[0] :]
    else:
        ckv_cache, kpe_cache = (drawn((requests.num_pages, page_size, dim), dtype, device) for dim in dims)
        ckv, kpe = (drawn((requests.nnz, dim), dtype, device) for dim in dims)
    want = ckv_cache.clone(), kpe_cache.clone()
    for token, place in enumerate(requests.slots):
        want[0][place], want[1][place] = ckv[token], kpe[token]
    flashinfer.append_paged_mla_kv_cache(ckv, kpe, *requests.tokens, ckv_cache, kpe_cache, *requests.pages)
    assert torch.equal(as_bytes(ckv_cache), as_bytes(want[0]))
    assert torch.equal(as_bytes(kpe_cache), as_bytes(want[1]))


@pytest.mark.parametrize(
    "change, message",
    [
        (dict(batch_indices=[0, -1, 1]), r"batch_indices\[1\]: got -1, wanted 0 to 1"),
        (dict(batch_indices=[0, 2, 1]), r"batch_indices\[1\]: got 2, wanted 0 to 1"),
        (dict(positions=[0, -1, 1]), r"positions\[1\]: got -1, wanted 0 to 7"),
        (dict(positions=[0, 8, 1]), r"positions\[1\]: got 8, wanted 0 to 7"),
        (dict(positions=[0, 2**31 - 1, 1]), r"positions\[1\]: got 2147483647"),
        (dict(kv_indices=[3, -1, 0]), r"kv_indices\[1\]: got -1, wanted 0 to 4"),
        (dict(kv_indices=[3, 5, 0]), r"kv_indices\[1\]: got 5, wanted 0 to 4"),
        (dict(kv_indices=[3]), r"kv_indptr\[0\]: got 0, wanted none"),
        (dict(kv_indptr=[0, 0, 3], positions=[0, 4, 0]), r"positions\[0\]: got 0, wanted none"),
    ],
)
def test_indices_out_of_range(change, message, device):
    """Token 1 has no slot. The CPU raises an error before any write, CUDA skips the token."""
    indices = dict(batch_indices=[0, 0, 1], positions=[0, 4, 1], kv_indices=[3, 1, 0], kv_indptr=[0, 2, 3]) | change
    tensors = {name: int32(value, device) for name, value in indices.items()}
    tensors["kv_last_page_len"] = int32([4, 2], device)
    cache = torch.full((5, 2, 4, 2, 8), 7.0, device=device)
    tokens = torch.randn(3, 2, 8, device=device)
    call = dict(append_key=tokens, append_value=tokens, paged_kv_cache=cache, **tensors)
    want = cache.clone()
    if device == "cpu":
        with pytest.raises(ValueError, match=message):
            flashinfer.append_paged_kv_cache(**call)
    else:
        flashinfer.append_paged_kv_cache(**call)
        for token in (0, 1, 2):
            request, position = indices["batch_indices"][token], indices["positions"][token]
            if not 0 <= request < 2 or position < 0:
                continue
            at = indices["kv_indptr"][request] + position // 4
            if at >= indices["kv_indptr"][request + 1] or at >= len(indices["kv_indices"]):
                continue
            page = indices["kv_indices"][at]
            if 0 <= page < 5:
                want[page, :, position % 4] = tokens[token]
    assert torch.equal(cache, want)


def with_strides(tensor: torch.Tensor, device: str) -> torch.Tensor:
    """Move a tensor to a device without changing its strides. ``.to`` makes some views contiguous."""
    if tensor._base is None:
        return tensor.to(device)
    return tensor._base.to(device).as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())


def good_arguments() -> dict:
    return dict(
        append_key=torch.ones(3, 2, 8), append_value=torch.ones(3, 2, 8), paged_kv_cache=torch.full((5, 2, 4, 2, 8), 7.0),
        batch_indices=int32([0, 0, 1], "cpu"), positions=int32([0, 4, 1], "cpu"), kv_indices=int32([3, 1, 0], "cpu"),
        kv_indptr=int32([0, 2, 3], "cpu"), kv_last_page_len=int32([4, 2], "cpu"),
    )  # fmt: skip


@pytest.mark.parametrize(
    "change, error, message",
    [
        (dict(append_key=torch.ones(3, 16)), ValueError, "append_key: got 2 dimensions, wanted 3"),
        (dict(append_key=torch.ones(3, 2, 8).double()), TypeError, "append_key: got a dtype of 8 bytes"),
        (dict(append_key=torch.ones(3, 2, 8).short()), TypeError, "append_key: got a dtype of 2 bytes"),
        (dict(append_value=torch.ones(3, 2, 8).half()), TypeError, "append_value: got float16, wanted float32"),
        (
            dict(append_value=torch.ones(2, 2, 8)),
            ValueError,
            r"append_value: got shape \[2, 2, 8\], wanted \[3, 2, 8\]",
        ),
        (
            dict(append_key=torch.ones(3, 8, 2).transpose(1, 2)),
            ValueError,
            "append_key: got stride 2 of the last dimension",
        ),
        (dict(paged_kv_cache=torch.ones(5, 4, 2, 8)), ValueError, "paged_kv_cache: got 4 dimensions, wanted 5"),
        (dict(paged_kv_cache=torch.ones(5, 3, 4, 2, 8)), ValueError, r"wanted \[5, 2, 4, 2, 8\]"),
        (dict(paged_kv_cache=torch.ones(5, 2, 0, 2, 8)), ValueError, "got page_size 0"),
        (dict(paged_kv_cache=torch.ones(5, 2, 4, 2, 8).half()), TypeError, "paged_kv_cache: got float16"),
        (
            dict(paged_kv_cache=(torch.ones(5, 4, 2, 8), torch.ones(5, 4, 2, 9))),
            ValueError,
            r"paged_kv_cache\[1\]: got shape",
        ),
        (
            dict(paged_kv_cache=(torch.ones(5, 4, 2, 8), torch.ones(5, 3, 2, 8))),
            ValueError,
            r"paged_kv_cache\[1\]: got shape",
        ),
        (
            dict(paged_kv_cache=(torch.ones(5, 4, 2, 8),)),
            ValueError,
            "paged_kv_cache: got 1, wanted 2, keys and values",
        ),
        (
            dict(paged_kv_cache=(torch.ones(5, 4, 2, 8), None)),
            TypeError,
            r"paged_kv_cache\[1\]: got NoneType, wanted Tensor",
        ),
        (dict(paged_kv_cache=(torch.ones(5, 2, 4, 2, 8), None)), TypeError, r"paged_kv_cache\[1\]: got NoneType"),
        (dict(kv_layout="HND"), ValueError, r"got shape \[5, 2, 4, 2, 8\], wanted \[5, 2, 2, 2, 8\]"),
        (dict(kv_layout="nhd"), ValueError, "kv_layout: got 'nhd', wanted 'NHD' or 'HND'"),
        (dict(batch_indices=torch.zeros(3)), TypeError, "batch_indices: got float32, wanted int32"),
        (dict(batch_indices=torch.zeros(2, dtype=torch.int64)), ValueError, r"batch_indices: got shape \[2\]"),
        (dict(positions=torch.zeros(3)), TypeError, "positions: got float32, wanted int32"),
        (dict(positions=torch.zeros(2, dtype=torch.int32)), ValueError, r"positions: got shape \[2\], wanted \[3\]"),
        (dict(kv_indices=torch.zeros(3, 1, dtype=torch.int32)), ValueError, r"kv_indices: got shape \[3, 1\]"),
        (dict(kv_indptr=torch.zeros(0, dtype=torch.int32)), ValueError, r"kv_indptr: got shape \[0\]"),
        (dict(kv_indptr=torch.zeros((), dtype=torch.int32)), ValueError, "kv_indptr: got 0 dimensions"),
        (
            dict(kv_last_page_len=torch.zeros(3, dtype=torch.int32)),
            ValueError,
            r"kv_last_page_len: got shape \[3\], wanted \[2\]",
        ),
        (dict(kv_last_page_len=None), TypeError, "kv_last_page_len: got None, wanted Tensor"),
    ],
)
def test_bad_input(change, error, message, device):
    def put(value):
        if isinstance(value, tuple):
            return tuple(put(one) for one in value)
        return with_strides(value, device) if isinstance(value, torch.Tensor) else value

    arguments = {name: put(value) for name, value in (good_arguments() | change).items()}
    with pytest.raises(error, match=message):
        flashinfer.append_paged_kv_cache(**arguments)
    if "paged_kv_cache" not in change:
        assert bool((arguments["paged_kv_cache"] == 7).all()), "something was written before the error"


def test_memory_that_is_shared(device):
    memory = torch.zeros(400, device=device)
    good = {name: value.to(device) for name, value in good_arguments().items()}
    cache, other = memory[:320].view(5, 4, 2, 8), memory[8:328].view(5, 4, 2, 8)
    for change, message in [
        (dict(paged_kv_cache=(cache, other)), r"paged_kv_cache\[0\]: overlaps the memory of paged_kv_cache\[1\]"),
        (dict(paged_kv_cache=(cache, cache)), r"paged_kv_cache\[0\]: overlaps the memory of paged_kv_cache\[1\]"),
        (
            dict(paged_kv_cache=(cache, cache + 1), append_value=other[:3, 0]),
            r"paged_kv_cache\[0\]: overlaps the memory of append_value",
        ),
        (dict(paged_kv_cache=torch.zeros(1, 2, 4, 2, 8, device=device).expand(5, 2, 4, 2, 8)), "share memory"),
    ]:
        with pytest.raises(ValueError, match=message):
            flashinfer.append_paged_kv_cache(**(good | change))


@pytest.mark.parametrize(
    "change, error, message",
    [
        (dict(append_kpe=torch.ones(2, 4)), ValueError, r"append_kpe: got shape \[2, 4\], wanted \[3, any\]"),
        (dict(append_ckv=torch.ones(3, 1, 8)), ValueError, "append_ckv: got 3 dimensions, wanted 2"),
        (dict(ckv_cache=torch.ones(5, 4, 9)), ValueError, r"ckv_cache: got shape \[5, 4, 9\], wanted \[any, any, 8\]"),
        (dict(kpe_cache=torch.ones(5, 3, 4)), ValueError, r"kpe_cache: got shape \[5, 3, 4\], wanted \[5, 4, 4\]"),
        (dict(kpe_cache=torch.ones(5, 4, 4).half()), TypeError, "kpe_cache: got float16"),
        (dict(positions=torch.zeros(3)), TypeError, "positions: got float32"),
    ],
)
def test_bad_mla_input(change, error, message, device):
    arguments = good_arguments() | dict(append_ckv=torch.ones(3, 8), append_kpe=torch.ones(3, 4), ckv_cache=torch.ones(5, 4, 8),
                                        kpe_cache=torch.ones(5, 4, 4))  # fmt: skip
    for name in ("append_key", "append_value", "paged_kv_cache"):
        del arguments[name]
    with pytest.raises(error, match=message):
        flashinfer.append_paged_mla_kv_cache(**{name: value.to(device) for name, value in (arguments | change).items()})
