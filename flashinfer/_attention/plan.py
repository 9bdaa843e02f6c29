"""Plans: the lists of a batch, and options that may differ from one run of them to the next."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch

from .arguments import CAUSAL, MULTI_ITEM, Logits, parameters_of
from .bound import Bound, bind_plan
from .masks import MaskTensors
from .operators import Operators
from .schedule import Lists, Shape
from .signature import Parameters, Setting
from .tables import Batch
from .traced import as_shape


class Options(NamedTuple):
    """What a run may have otherwise than the run before: arguments of the kernels."""

    logits: Logits
    causal: int  # CAUSAL or NON_CAUSAL; means nothing where there is another mask


class Extent(NamedTuple):
    """Which keys the lists of a plan hold for each query: at least those that a run sees."""

    causal: bool
    window_left: int  # -1: all

    def holds(self, other: Extent) -> bool:
        if self.causal and not other.causal:
            return False
        return self.window_left < 0 or 0 <= other.window_left <= self.window_left

    def joined(self, other: Extent) -> Extent:
        """One that holds both."""
        windows = self.window_left, other.window_left
        return Extent(self.causal and other.causal, -1 if min(windows) < 0 else max(windows))


@dataclass(frozen=True)
class Requests:
    """What of a plan no option changes."""

    batch: Batch
    shape: Shape
    masks: MaskTensors
    page_size: int | None  # None: ragged keys
    kv_layout: int
    given: Shape | None = None  # what is run where kernels do not have its dtypes: float64, to check gradients in

    def mask_mode(self, options: Options) -> int:
        return options.causal if self.masks.mode is None else self.masks.mode

    def extent(self, options: Options) -> Extent:
        return Extent(self.mask_mode(options) in (CAUSAL, MULTI_ITEM), max(options.logits.window_left, -1))


@dataclass(frozen=True)
class Plan:
    """Requests, lists and options, ready to run."""

    requests: Requests
    lists: Lists
    extent: Extent  # of the lists
    options: Options
    operators: Operators
    setting: Setting
    parameters: Parameters | tuple[()]  # none where a run brings those of a user's variant
    sizes: torch.Tensor  # rows, kv_rows, what of the setting is a size, and window_left, for graphs
    bound: Bound | None  # for eager calls

    @property
    def shape(self) -> Shape:
        """Of what is run."""
        return self.requests.given or self.requests.shape

    @property
    def batch(self) -> Batch:
        return self.requests.batch

    @property
    def logits(self) -> Logits:
        return self.options.logits


def make_plan(
    requests: Requests, lists: Lists, extent: Extent, options: Options, operators: Operators, *,
    device: torch.device, graph_rows: int | None, more_rows: bool,
) -> Plan:  # fmt: skip
    """Lists with options.

    Args:
        graph_rows: where one captured graph serves all plans, the queries that it was captured for: what it compares
            with is the same for all.
        more_rows: queries may be more than were planned.
    """
    batch, shape, masks, logits = requests.batch, requests.shape, requests.masks, options.logits
    setting = Setting(
        **lists._asdict(),
        kv_indptr=batch.kv_indptr,
        kv_indices=batch.kv_indices,
        custom_mask=masks.packed,
        mask_indptr=masks.indptr,
        prefix_len=masks.prefix_len,
        token_pos_in_items=masks.token_pos_in_items,
        token_pos_in_items_len=masks.token_pos_in_items_len,
        kv_layout=requests.kv_layout,
        mask_mode=requests.mask_mode(options),
        window_left=logits.window_left,
        rope_scale=logits.rope_scale,
        rope_theta=logits.rope_theta,
        variant=operators.variant,
    )
    parameters = () if operators.custom else parameters_of(logits, shape.num_qo_heads, device)
    rows, kv_rows = (batch.rows, batch.kv_rows) if graph_rows is None else (graph_rows, 0)
    window = max(logits.window_left, -1) + 1
    sizes = as_shape((rows, kv_rows, *lists[2:], masks.token_pos_in_items_len, window))
    bound = None
    if isinstance(parameters, Parameters) and requests.given is None:
        bound = bind_plan(
            operators, shape, batch.rows, more_rows, requests.page_size, batch.kv_rows, setting, parameters
        )
    return Plan(requests, lists, extent, options, operators, setting, parameters, sizes, bound)
