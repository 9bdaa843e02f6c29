"""A plan on one stream waits for runs on other streams that still read the previous plan."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import flashinfer
from flashinfer._attention.bound import LastRun

from ..support.attention_oracle import Paged, assert_near, batch_attention, drawn, workspace
from ..support.plans import bound_calls

HEADS, KV_HEADS, DIM, PAGE = 4, 2, 64, 4


class Stream:
    """Stream without a GPU, with its number and the streams that it waited for."""

    def __init__(self, number: int) -> None:
        self.cuda_stream, self.waited = number, set[int]()

    def stream(self) -> int:
        return self.cuda_stream

    def wait_stream(self, other: Stream) -> None:
        self.waited.add(other.cuda_stream)


def test_a_plan_waits_for_other_streams(monkeypatch):
    device, here, default = torch.device("cuda", 0), Stream(5), Stream(0)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: here)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda _: here.cuda_stream, raising=False)
    monkeypatch.setattr(torch.cuda, "default_stream", lambda _: default)
    monkeypatch.setattr(torch.cuda, "ExternalStream", lambda number, _: Stream(number))
    runs: Any = [None, Stream(-1), Stream(5), Stream(7), Stream(0)]  # -1: never called
    last = LastRun()
    last.wait(torch.device("cpu"), runs)
    assert here.waited == set()
    last.wait(device, runs)
    assert here.waited == {0, 7}
    here = Stream(9)
    last.record(device)
    last.record(torch.device("cpu"))
    here = Stream(5)
    last.wait(device, [])
    assert here.waited == {9}


def test_bound_calls_know_their_stream(device):
    paged = Paged([9, 1], PAGE, KV_HEADS, DIM, torch.float16, device)
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace(device))
    wrapper.plan(*paged.tables_on("cpu"), HEADS, KV_HEADS, DIM, PAGE)
    assert bound_calls(wrapper).stream() == -1
    wrapper.run(drawn((2, HEADS, DIM), torch.float16, device), paged.cache)
    assert bound_calls(wrapper).stream() == (torch.cuda.current_stream().cuda_stream if device == "cuda" else 0)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="streams are a GPU's")
@pytest.mark.parametrize("scale", [None, "tensor"], ids=["bound", "full"])
def test_a_plan_during_a_run(scale):
    """The run starts late on its stream. The next plan is made immediately on another."""
    device, side = "cuda", torch.cuda.Stream()
    one = torch.ones((), device=device) if scale else None
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace(device))
    for _ in range(5):
        first = Paged([90, 70], PAGE, KV_HEADS, DIM, torch.float16, device)
        second = Paged([3, 120], PAGE, KV_HEADS, DIM, torch.float16, device)
        q = drawn((2, HEADS, DIM), torch.float16, device)
        wrapper.plan(*first.tables_on("cpu"), HEADS, KV_HEADS, DIM, PAGE)
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            torch.cuda._sleep(100_000_000)
            got = wrapper.run(q, first.cache, k_scale=one)
        wrapper.plan(*second.tables_on("cpu"), HEADS, KV_HEADS, DIM, PAGE)
        torch.cuda.synchronize()
        assert_near(got, batch_attention(q, [1, 1], [first.request(b) for b in range(2)])[0])
