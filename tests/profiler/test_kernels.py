"""Kernels that write events: equal results, paired events, and no write outside the buffer."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch

import flashinfer
from flashinfer import profiler
from flashinfer._profiler.buffer import Recording, read
from flashinfer._profiler.trace import timeline_of

from ..support.attention_oracle import Paged, drawn, indptr_of, int32, workspace
from ..support.mla_samples import Batch

GUARD, WORD = 64, 0x5EED5EED5EED5EED
HEADS, KV_HEADS, DIM, PAGE = 8, 2, 64, 16
KV_LENS = [300, 0, 75, 1, 513]
QO_LENS = [70, 3, 0, 1, 6]

Run = Callable[..., tuple[torch.Tensor, torch.Tensor]]


def mla(device: str, on: bool) -> Run:
    """Plan with ``use_profiler`` or without."""
    batch = Batch([2, 1, 0, 1, 3], KV_LENS, 16, PAGE, torch.bfloat16, device, causal=True)
    wrapper = flashinfer.BatchMLAPagedAttentionWrapper(workspace(device))

    def run(on: bool, buffer: torch.Tensor | None) -> Any:
        batch.plan(wrapper, use_profiler=on)
        return wrapper.run(*batch.inputs, return_lse=True, profiler_buffer=buffer)

    return run


def attention(device: str, on: bool) -> Run:
    paged = Paged(KV_LENS, PAGE, KV_HEADS, DIM, torch.bfloat16, device)
    q = drawn((sum(QO_LENS), HEADS, DIM), torch.bfloat16, device)
    wrapper, (indptr, indices, _) = flashinfer.BatchAttention(), paged.tables_on(device)

    def run(on: bool, buffer: torch.Tensor | None) -> Any:
        wrapper.plan(
            indptr_of(QO_LENS).to(device), indptr, indices, int32(KV_LENS, device), HEADS, KV_HEADS, DIM, DIM, PAGE,
            causal=True, use_profiler=on,
        )  # fmt: skip
        return wrapper.run(q, paged.cache, profiler_buffer=buffer)

    return run


def decode(device: str, on: bool) -> Run:
    paged = Paged(KV_LENS, PAGE, KV_HEADS, DIM, torch.bfloat16, device)
    q = drawn((len(KV_LENS), HEADS, DIM), torch.bfloat16, device)
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace(device))

    def run(on: bool, buffer: torch.Tensor | None) -> Any:
        profiler.attach(wrapper, buffer)
        wrapper.plan(*paged.tables_on(device), HEADS, KV_HEADS, DIM, PAGE, q_data_type=torch.bfloat16)
        return wrapper.run(q, paged.cache, return_lse=True, k_scale=0.5)

    return run


def prefill(device: str, on: bool) -> Run:
    q = drawn((sum(QO_LENS), HEADS, DIM), torch.bfloat16, device)
    k, v = (drawn((sum(KV_LENS), KV_HEADS, DIM), torch.bfloat16, device) for _ in range(2))
    wrapper = flashinfer.BatchPrefillWithRaggedKVCacheWrapper(workspace(device))

    def run(on: bool, buffer: torch.Tensor | None) -> Any:
        profiler.attach(wrapper, buffer)
        indptrs = (indptr_of(lens).to(device) for lens in (QO_LENS, KV_LENS))
        wrapper.plan(*indptrs, HEADS, KV_HEADS, DIM, causal=True, q_data_type=torch.bfloat16)
        return wrapper.run(q, k, v, return_lse=True)

    return run


FAMILIES = {"mla": mla, "attention": attention, "decode": decode, "prefill": prefill}
# The module of latent attention takes the longest to compile.
NAMES = [pytest.param(name, marks=[pytest.mark.slow] if name == "mla" else []) for name in FAMILIES]


def guarded(size: int, device: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a buffer of ``size`` words, and the memory around it."""
    memory = torch.full((size + 2 * GUARD,), WORD, dtype=torch.int64, device=device)
    return memory, memory[GUARD : GUARD + size].view(random.choice([torch.int64, torch.uint64]))


def check_guards(memory: torch.Tensor) -> None:
    assert (memory[:GUARD] == WORD).all() and (memory[-GUARD:] == WORD).all()


def check_events(recording: Recording) -> int:
    """Check that events are paired, nested and ordered in time. Return their number."""
    assert recording.tracks
    for track in recording.tracks:
        times = [record.time for record in track.records]
        assert times == sorted(times) and track.end is not None and times[-1] <= track.end + 1
        open_events: list[int] = []
        for record in track.records:
            assert record.event < len(profiler.EVENT_NAMES)
            if record.kind == profiler.EventType.kBegin:
                open_events.append(record.event)
            elif record.kind == profiler.EventType.kEnd:
                assert open_events.pop() == record.event
        assert not open_events or track.dropped
    return sum(len(track.records) for track in recording.tracks)


@pytest.mark.parametrize("name", NAMES)
def test_events_are_pairs_and_results_the_same(name, device):
    run = FAMILIES[name](device, True)
    memory, buffer = guarded(1 << 20, device)
    out, lse = run(False, None)
    for _ in range(2):  # contents of the buffer from an earlier run do not matter
        got, got_lse = run(True, buffer)
        assert torch.equal(got, out) and torch.equal(got_lse, lse)
    check_guards(memory)
    recording = read(buffer)
    assert recording.dropped == 0 and check_events(recording) > 20
    timeline = timeline_of(recording, profiler.EVENT_NAMES)
    assert timeline.unbalanced == 0
    seen = {span.name for row in timeline.rows for span in row.spans}
    assert {"item", "write-o"} < seen and seen & {"gemm-qk", "attend"}, seen
    assert torch.equal(run(False, None)[0], out)


@pytest.mark.parametrize("name", NAMES)
def test_a_buffer_that_is_too_small_loses_events_and_nothing_else(name, device):
    run = FAMILIES[name](device, True)
    out, lse = run(False, None)
    memory, buffer = guarded(1 << 20, device)
    run(True, buffer)
    whole = read(buffer)
    tracks, events = whole.blocks * whole.groups, check_events(whole)
    for room in (-4, -1, 0, 1, 2, random.randrange(3, 12)):
        size = 1 + tracks * (4 + room) + random.randrange(tracks)
        memory, buffer = guarded(size, device)
        got, got_lse = run(True, buffer)
        assert torch.equal(got, out) and torch.equal(got_lse, lse)
        check_guards(memory)
        recording = read(buffer)
        if room < 0:
            assert not recording.has_room and (buffer.view(torch.int64)[1:] == WORD).all()
        elif device == "cuda" and name != "attention":  # a CPU's runs distribute items differently
            assert sum(len(track.records) for track in recording.tracks) + recording.dropped == events
        # One word may end an event and begin the next.
        assert all(len(track.records) <= 2 * max(room, 0) for track in recording.tracks)
        if 0 <= room <= 2:
            assert recording.dropped > 0
    memory, buffer = guarded(1, device)
    run(True, buffer)
    check_guards(memory)


@pytest.mark.parametrize("name", NAMES[:2])
def test_checks_of_buffers(name, device):
    run = FAMILIES[name](device, True)
    for buffer, error, text in (
        (None, ValueError, r"got None, wanted one: plan\(\) was called with use_profiler"),
        ([1, 2], TypeError, "got list, wanted Tensor"),
        (torch.zeros(64, device=device), TypeError, "got torch.float32, wanted torch.uint64 or torch.int64"),
        (
            torch.zeros(64, 2, dtype=torch.int64, device=device),
            ValueError,
            r"got shape \[64, 2\] and strides \[2, 1\], wanted a contiguous vector",
        ),
        (
            torch.zeros(64, dtype=torch.int64, device=device)[::2],
            ValueError,
            r"got shape \[32\] and strides \[2\], wanted a contiguous vector",
        ),
        (torch.zeros(0, dtype=torch.int64, device=device), ValueError, "got 0 words, wanted at least 1"),
        (
            torch.zeros(64, dtype=torch.int64, device="meta"),
            ValueError,
            f"got a tensor on meta, wanted one on {device}",
        ),
    ):
        with pytest.raises(error, match=rf"\w+\.run: profiler_buffer: {text}"):
            run(True, buffer)
    with pytest.raises(
        ValueError, match=r"profiler_buffer: got Tensor, wanted None: plan\(\) was called without use_pro"
    ):
        run(False, torch.zeros(64, dtype=torch.int64, device=device))


def test_attach_takes_wrappers_and_buffers(device):
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace(device))
    for arguments, error, text in (
        ((None, None), TypeError, "wrapper: got NoneType, wanted one of decode, prefill, attention or mla"),
        ((wrapper, [1]), TypeError, "profiler_buffer: got list, wanted Tensor"),
        ((wrapper, torch.zeros(4)), TypeError, "profiler_buffer: got torch.float32"),
        (
            (wrapper, torch.zeros(4, dtype=torch.int64, device="meta")),
            ValueError,
            "profiler_buffer: got a tensor on meta",
        ),
    ):
        with pytest.raises(error, match=f"attach: {text}"):
            profiler.attach(*arguments)


@pytest.mark.slow
def test_a_wrapper_that_plans_with_a_buffer_attached_needs_no_other(device):
    """Also wrappers with ``use_profiler``. After detaching, the next plan has kernels without events."""
    batch = Batch([1, 1], [40, 9], 16, PAGE, torch.bfloat16, device)
    wrapper = flashinfer.BatchMLAPagedAttentionWrapper(workspace(device))
    buffer = torch.zeros(1 << 16, dtype=torch.int64, device=device)
    profiler.attach(wrapper, buffer)
    batch.plan(wrapper)
    out = wrapper.run(*batch.inputs)
    assert check_events(read(buffer))
    profiler.attach(wrapper, None)
    batch.plan(wrapper)
    buffer.zero_()
    assert torch.equal(wrapper.run(*batch.inputs), out) and not buffer.any()
