"""Operator that schedules a batch of attention on the device, see ``include/flashinfer/attention/batch_schedule.h``."""

from __future__ import annotations

from ._ops.declare import define
from .jit.modules.batch_schedule import gen_batch_schedule_module

__all__ = ["gen_batch_schedule_module"]

# Writes the lists of a plan, and offsets of the page table's rows. flashinfer/_attention/batch_schedule.py sizes them.
schedule_batch = define(
    "schedule_batch(Tensor(a!) plan, Tensor(b!) kv_indptr, Tensor(c!)? numbers, Tensor seq_lens, Tensor? qo_indptr,"
    " Tensor? sm_scale, int num_tokens, int q_len, int most_keys, int table_stride, int num_kv_heads, int group,"
    " int tile_rows, int mask_mode, int window_left, int workers) -> ()",
    gen_batch_schedule_module,
)
