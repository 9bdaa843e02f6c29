"""Wrapper for models whose layers all have attention sinks."""

from __future__ import annotations

from functools import partialmethod
from typing import Any

import torch

from .arguments import PagedCache
from .prefill_paged import BatchPrefillWithPagedKVCacheWrapper
from .scales import Scale


class BatchAttentionWithAttentionSinkWrapper(BatchPrefillWithPagedKVCacheWrapper):
    """Prefill over a paged cache whose ``run()`` takes sinks and ``sm_scale`` by position.

    The base class is :class:`flashinfer.BatchPrefillWithPagedKVCacheWrapper`. A sink is a logit of a query
    head that joins the softmax denominator of its rows and has no value:
    ``l = 2 ** (sink * log2 e - m) + sum(2 ** (logit * log2 e - m))``.

    Args:
        float_workspace_buffer, ..., backend: as for the base class.
        q_data_type, kv_data_type, head_dim_qk, head_dim_vo, window_left: accepted and ignored. ``plan()`` sets them.

    Raises:
        ValueError, TypeError: as the base class.
    """

    def __init__(
        self,
        float_workspace_buffer: torch.Tensor,
        kv_layout: str = "NHD",
        use_cuda_graph: bool = False,
        qo_indptr_buf: torch.Tensor | None = None,
        paged_kv_indptr_buf: torch.Tensor | None = None,
        paged_kv_indices_buf: torch.Tensor | None = None,
        paged_kv_last_page_len_buf: torch.Tensor | None = None,
        custom_mask_buf: torch.Tensor | None = None,
        mask_indptr_buf: torch.Tensor | None = None,
        backend: str = "auto",
        q_data_type: str | torch.dtype = torch.bfloat16,
        kv_data_type: str | torch.dtype = torch.bfloat16,
        head_dim_qk: int = 128,
        head_dim_vo: int = 128,
        window_left: int = -1,
    ) -> None:
        super().__init__(
            float_workspace_buffer, kv_layout, use_cuda_graph, qo_indptr_buf, paged_kv_indptr_buf, paged_kv_indices_buf,
            paged_kv_last_page_len_buf, custom_mask_buf, mask_indptr_buf, backend,
        )  # fmt: skip

    def run(
        self,
        q: torch.Tensor,
        paged_kv_cache: PagedCache,
        *args: Any,
        q_scale: Scale = None,
        k_scale: Scale = None,
        v_scale: Scale = None,
        out: torch.Tensor | None = None,
        lse: torch.Tensor | None = None,
        return_lse: bool = False,
        enable_pdl: bool | None = None,
        window_left: int | None = None,
        sinks: torch.Tensor | None = None,
        kv_cache_sf: Any = None,
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """Compute attention of the planned batch, with sinks.

        Args:
            q, paged_kv_cache: as for the base class.
            args: the sinks, ``[num_qo_heads]`` float32, and ``sm_scale``, which replaces ``plan()``'s. Empty
                if ``sinks`` is passed by name.
            q_scale, ...: as for the base class.

        Raises:
            ValueError, TypeError: as the base class, or another number of arguments by position.
        """
        if args:
            if len(args) != 2 or sinks is not None:
                raise TypeError(f"{self._name}.run: got {len(args)} more arguments, wanted two: sinks and sm_scale")
            sinks, sm_scale = args
            options = self._planned_or_fail("run").options
            self._use_logits(options.logits._replace(sm_scale=float(sm_scale)))
        return super().run(
            q, paged_kv_cache, q_scale=q_scale, k_scale=k_scale, v_scale=v_scale, out=out, lse=lse, return_lse=return_lse,
            enable_pdl=enable_pdl, window_left=window_left, sinks=sinks, kv_cache_sf=kv_cache_sf,
        )  # fmt: skip

    run_return_lse = partialmethod(run, return_lse=True)
