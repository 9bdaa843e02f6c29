"""Files of the package that one ``plan()`` and one ``run()`` of the wrappers cross after warm-up."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import pytest
import torch

import flashinfer

from ..support.profile import files_of_calls

MOST_FILES, MOST_CALLS_OF_A_RUN = 10, 3
ROOT = os.path.dirname(flashinfer.__file__) + os.sep
LENS, PAGE_SIZE, QO_HEADS, KV_HEADS, HEAD_DIM = (3, 37, 0, 16), 16, 4, 2, 64


def int32(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def offsets(counts: list[int]) -> torch.Tensor:
    return int32(*(sum(counts[:end]) for end in range(len(counts) + 1)))


PAGES = [-(-length // PAGE_SIZE) for length in LENS]
TABLES = (offsets(PAGES), torch.arange(sum(PAGES), dtype=torch.int32), int32(*((n - 1) % PAGE_SIZE + 1 for n in LENS)))
QO_INDPTR = offsets([1, 5, 0, 2])


def paged() -> tuple[Any, tuple[Any, ...], dict[str, Any], tuple[torch.Tensor, ...]]:
    cache = torch.randn(sum(PAGES), 2, PAGE_SIZE, KV_HEADS, HEAD_DIM, dtype=torch.bfloat16)
    return (
        flashinfer.BatchPrefillWithPagedKVCacheWrapper,
        (QO_INDPTR, *TABLES, QO_HEADS, KV_HEADS, HEAD_DIM, PAGE_SIZE),
        {"causal": True},
        (query(8), cache),
    )


def ragged() -> tuple[Any, tuple[Any, ...], dict[str, Any], tuple[torch.Tensor, ...]]:
    k, v = torch.randn(2, sum(LENS), KV_HEADS, HEAD_DIM, dtype=torch.bfloat16)
    return (
        flashinfer.BatchPrefillWithRaggedKVCacheWrapper,
        (QO_INDPTR, offsets(list(LENS)), QO_HEADS, KV_HEADS, HEAD_DIM),
        {"causal": True},
        (query(8), k, v),
    )


def decode() -> tuple[Any, tuple[Any, ...], dict[str, Any], tuple[torch.Tensor, ...]]:
    cache = torch.randn(sum(PAGES), 2, PAGE_SIZE, KV_HEADS, HEAD_DIM, dtype=torch.bfloat16)
    tables = (*TABLES, QO_HEADS, KV_HEADS, HEAD_DIM, PAGE_SIZE)
    return flashinfer.BatchDecodeWithPagedKVCacheWrapper, tables, {}, (query(len(LENS)), cache)


def query(rows: int) -> torch.Tensor:
    return torch.randn(rows, QO_HEADS, HEAD_DIM, dtype=torch.bfloat16)


def calls_of(function: Callable[[], object]) -> list[str]:
    """Return the file of each call into the package."""
    return [file.removeprefix(ROOT) for file in files_of_calls(function) if file.startswith(ROOT)]


@pytest.mark.parametrize("sample", [paged, ragged, decode])
def test_a_plan_crosses_few_files_and_a_run_few_functions(sample):
    kind, tables, options, inputs = sample()
    wrapper = kind(torch.empty(8 << 20, dtype=torch.uint8))

    def plan() -> None:
        wrapper.plan(*tables, q_data_type=torch.bfloat16, **options)

    for _ in range(2):
        plan()
        wrapper.run(*inputs)
    files = calls_of(plan)
    assert {"_attention/request.py", "_attention/planner.py", "_attention/lists.py", "_attention/plan.py"} <= set(files)
    assert len(set(files)) <= MOST_FILES, sorted(set(files))
    run = calls_of(lambda: wrapper.run(*inputs))
    assert 0 < len(run) <= MOST_CALLS_OF_A_RUN, run
