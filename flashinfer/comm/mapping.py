"""Parallel groups of a rank, as engines describe them to the all-to-all."""

from __future__ import annotations

from dataclasses import dataclass

from .._ops.errors import value_error

__all__ = ["Mapping"]


@dataclass(frozen=True)
class Mapping:
    """Parallel groups of a rank, by FlashInfer's names. Only ``moe_ep_size`` and ``moe_ep_rank`` are read by this library."""

    world_size: int = 1
    rank: int = 0
    gpus_per_node: int = 8
    cp_size: int = 1
    tp_size: int = 1
    pp_size: int = 1
    moe_tp_size: int = -1
    moe_ep_size: int = -1

    def __post_init__(self) -> None:
        """Fill in the sizes of the experts' groups that are not given."""
        tensor, expert = self.moe_tp_size, self.moe_ep_size
        if expert < 1:
            expert = self.tp_size // tensor if tensor > 0 else 1
        object.__setattr__(self, "moe_ep_size", expert)
        object.__setattr__(self, "moe_tp_size", tensor if tensor > 0 else self.tp_size // expert)
        if self.moe_tp_size * expert != self.tp_size:
            got = f"{self.moe_tp_size} x {expert}"
            raise value_error("Mapping", "moe_tp_size x moe_ep_size", got, f"{self.tp_size} as tp_size")

    @property
    def moe_ep_rank(self) -> int:
        """Return this rank's number in its group of experts."""
        return self.rank % self.tp_size % self.moe_ep_size
