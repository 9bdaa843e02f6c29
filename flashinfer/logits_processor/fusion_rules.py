"""Which steps become one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from .op import Op
from .operators import (
    FusedProbsMinPSampleOp,
    FusedProbsTopKSampleOp,
    FusedProbsTopKTopPSampleOp,
    FusedProbsTopPSampleOp,
    FusedTemperatureSoftmaxOp,
    MinPOp,
    ProbsSampleOp,
    ProbsTopKOp,
    SoftmaxOp,
    TemperatureOp,
    TopPOp,
)


@dataclass(frozen=True)
class FusionRule:
    """Steps of these classes, where ``guard`` says so, become what ``build`` returns; the highest ``prio`` goes first."""

    pattern: tuple[type[Op], ...]
    guard: Callable[[Sequence[Op]], bool]
    build: Callable[[Sequence[Op]], Op]
    prio: int = 0

    def matches(self, ops: Sequence[Op]) -> bool:
        """Whether these steps are of the pattern's classes."""
        return len(ops) == len(self.pattern) and all(
            isinstance(op, kind) for op, kind in zip(ops, self.pattern, strict=True)
        )


def _fused(kind: type[Op]) -> Callable[[Sequence[Op]], Op]:
    """With the parameters of all."""

    def build(ops: Sequence[Op]) -> Op:
        params: dict[str, object] = {}
        for op in ops:
            params |= op.params
        return kind(**params)

    return build


def _always(ops: Sequence[Op]) -> bool:
    return True


def _is_joint(ops: Sequence[Op]) -> bool:
    return bool(ops[0].params.get("joint_topk_topp", False))


def fusion_rules() -> list[FusionRule]:
    """Those that every pipeline is compiled with."""
    pairs: list[tuple[type[Op], type[Op]]] = [
        (ProbsTopKOp, FusedProbsTopKSampleOp),
        (TopPOp, FusedProbsTopPSampleOp),
        (MinPOp, FusedProbsMinPSampleOp),
    ]
    return [
        FusionRule((TemperatureOp, SoftmaxOp), _always, _fused(FusedTemperatureSoftmaxOp), 100),
        FusionRule((ProbsTopKOp, TopPOp, ProbsSampleOp), _is_joint, _fused(FusedProbsTopKTopPSampleOp), 100),
        *(FusionRule((kind, ProbsSampleOp), _always, _fused(fused), 10) for kind, fused in pairs),
    ]
