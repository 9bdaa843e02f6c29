"""top_k_page_table_transform and top_k_ragged_transform, row by row against sorting."""

from __future__ import annotations

from functools import partial

import pytest
import torch

import flashinfer


def places_of(scores: torch.Tensor, length: int, k: int, last: bool = False) -> list[int]:
    """Return the indices of the k largest scores. Ties go to the smallest indices, or to the largest."""
    numbers = [-float("inf") if score != score else score for score in scores[:length].tolist()]
    return sorted(sorted(range(length), key=lambda i: (-numbers[i], -i if last else i))[:k])


@pytest.mark.parametrize("width, k", [(1, 1), (40, 7), (700, 64), (700, 900), (3000, 2048)])
@pytest.mark.parametrize("starts", [False, True])
@pytest.mark.parametrize("tie_break", flashinfer.TopKTieBreak)
def test_places_of_rows_of_different_lengths(width, k, starts, tie_break, dtype, device):
    rows = 6
    scores = torch.randn(rows, width).to(dtype)
    scores[1] = scores[1, 0].clone()
    scores[2, ::2] = -float("inf")
    scores[3, width // 2] = float("nan")
    lengths = torch.tensor([width, width, max(width // 2, 1), width, 0, 1], dtype=torch.int32)
    first = torch.randint(width, (rows,)) if starts else torch.zeros(rows, dtype=torch.int64)
    lengths = torch.minimum(lengths, width - first).int()
    table = torch.randint(2**31 - 1, (4, 2 * width), dtype=torch.int32)
    batch = torch.tensor([3, 0, 0, 1, 2, 3], dtype=torch.int32)
    offsets = torch.randint(10**6, (rows,), dtype=torch.int32)
    more = dict(deterministic=True, tie_break=tie_break, dsa_graph_safe=True)
    more["row_starts"] = first.to(device) if starts else None
    given = scores.to(device), lengths.to(device)
    ragged = flashinfer.top_k_ragged_transform(given[0], offsets.to(device), given[1], k, **more)
    paged = flashinfer.top_k_page_table_transform(
        given[0], table.to(device), given[1], k, row_to_batch=batch.to(device), **more
    )
    assert ragged.dtype == paged.dtype == torch.int32 and ragged.shape == paged.shape == (rows, k)
    for row in range(rows):
        want = places_of(scores[row, first[row] :].float(), int(lengths[row]), k, tie_break == 2)
        none = [-1] * (k - len(want))
        assert ragged[row].tolist() == [place + int(offsets[row]) for place in want] + none
        assert paged[row].tolist() == table[batch[row], int(first[row]) :][want].tolist() + none


def test_the_tables_rows_are_the_scores_rows(device):
    scores, table = torch.randn(3, 50, device=device), torch.arange(150, dtype=torch.int32, device=device).view(3, 50)
    lengths = torch.full((3,), 50, device=device)
    paged = flashinfer.top_k_page_table_transform(scores, table, lengths, 8)
    assert paged.equal(flashinfer.top_k_ragged_transform(scores, torch.arange(3, device=device) * 50, lengths, 8))


@pytest.mark.parametrize("page_size", [1, 4, 64])
@pytest.mark.parametrize("given", ["nothing", "starts", "both starts"])
def test_slots_of_pages(page_size, given, device):
    """Use one entry per page, and tables whose rows start at other offsets than the scores."""
    rows, width, k = 5, 300, 70
    scores = torch.randn(rows, width + 3)[:, :width]  # padded rows
    first = torch.randint(width // 2, (rows,), dtype=torch.int32) if given != "nothing" else None
    lengths = torch.randint(k // 2, width // 2, (rows,), dtype=torch.int32)
    pages = torch.randint(3, (rows,), dtype=torch.int32) if given == "both starts" else first
    table = torch.stack([torch.randperm(1000, dtype=torch.int32)[: width + 3] for _ in range(rows)])
    options = dict(
        row_starts=first if first is None else first.to(device),
        page_table_row_starts=pages.to(device) if given == "both starts" else None,
    )
    call = partial(
        flashinfer.top_k_page_table_transform, scores.to(device), table.to(device), lengths.to(device), k,
        page_size=page_size, **options,
    )  # fmt: skip
    if given == "starts" and page_size > 1:
        with pytest.raises(
            ValueError, match="page_table_row_starts: got None, wanted entries in addition to row_starts"
        ):
            call()
        return
    out, raw = (torch.full((rows, k), 77, dtype=torch.int32, device=device) for _ in range(2))
    assert call(out=out, out_raw_indices=raw) is out and call().equal(out)
    for row in range(rows):
        begin, entry = (0 if x is None else int(x[row]) for x in (first, pages))
        want = places_of(scores[row, begin:], int(lengths[row]), k)
        none = [-1] * (k - len(want))
        slots = [int(table[row, entry + i // page_size]) * page_size + i % page_size for i in want]
        assert raw[row].tolist() == want + none and out[row].tolist() == slots + none


def test_module_topk_has_the_same_objects():
    from flashinfer import topk

    for name in ("TopKTieBreak", "top_k", "top_k_page_table_transform", "top_k_ragged_transform"):
        assert getattr(topk, name) is getattr(flashinfer, name)
    assert [(one.name, int(one)) for one in topk.TopKTieBreak] == [("NONE", 0), ("SMALL", 1), ("LARGE", 2)]
    assert topk.can_implement_filtered_topk() is True


def test_mistakes():
    scores, table = torch.randn(3, 50), torch.zeros(3, 50, dtype=torch.int32)
    lengths = torch.full((3,), 50, dtype=torch.int32)
    paged, ragged = flashinfer.top_k_page_table_transform, flashinfer.top_k_ragged_transform
    for error, call, text in (
        (ValueError, lambda: paged(scores, table, lengths, 0), "k: got 0, wanted a positive number"),
        (ValueError, lambda: paged(scores[0], table, lengths, 3), "input: got 1 dimensions"),
        (ValueError, lambda: paged(scores, table, lengths[:2], 3), "lengths: got 2 rows, wanted 3"),
        (TypeError, lambda: paged(scores, table, lengths.float(), 3), "lengths: got torch.float32"),
        (TypeError, lambda: paged(scores, table.long(), lengths, 3), "src_page_table: got torch.int64"),
        (ValueError, lambda: paged(scores, table[:2], lengths, 3), "src_page_table: got 2 rows, wanted 3"),
        (ValueError, lambda: paged(scores, table, lengths, 3, lengths[:2]), "row_to_batch: got 2 rows"),
        (
            ValueError,
            lambda: paged(scores, table.to("meta"), lengths, 3),
            "src_page_table: got a tensor on meta, wanted one on cpu as input is",
        ),
        (ValueError, lambda: paged(scores, table, lengths, 3, tie_break=3), "tie_break: got 3, wanted a TopKTieBreak"),
        (ValueError, lambda: paged(scores, table, lengths, 3, page_size=6), "page_size: got 6, wanted a power of two"),
        (ValueError, lambda: paged(scores, table, lengths, 3, page_size=2**31), "page_size: got 2147483648"),
        (ValueError, lambda: paged(scores, table, lengths, 3, out=table[:, :3]), "out: got strides"),
        (ValueError, lambda: paged(scores, table, lengths, 3, out=table[:, :4]), "out: got shape"),
        (TypeError, lambda: paged(scores, table, lengths, 3, out=scores[:, :3]), "out: got torch.float32"),
        (
            ValueError,
            lambda: paged(scores, table, lengths, 50, out=table),
            "out: got a tensor that overlaps another tensor",
        ),
        (
            ValueError,
            lambda: paged(scores, table, lengths, 50, out=(o := table.clone()), out_raw_indices=o),
            "out_raw_indices: got a tensor that overlaps another tensor",
        ),
        (TypeError, lambda: ragged(scores, lengths.half(), lengths, 3), "offsets: got torch.float16"),
        (ValueError, lambda: ragged(scores, lengths, lengths, 3, row_starts=lengths[:1]), "row_starts: got 1 rows"),
    ):
        with pytest.raises(error, match=text):
            call()
