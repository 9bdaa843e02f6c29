"""Top-k functions under FlashInfer's module name. They are the objects of :mod:`flashinfer.sampling`."""

from __future__ import annotations

from ._sampling.top_k import TopKTieBreak, can_implement_filtered_topk, top_k
from ._sampling.transforms import top_k_page_table_transform, top_k_ragged_transform

__all__ = [
    "TopKTieBreak",
    "can_implement_filtered_topk",
    "top_k",
    "top_k_page_table_transform",
    "top_k_ragged_transform",
]
