"""Rules that fuse steps."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from .op import Op
from .operators import (
    FusedProbsMinPSampleOp,
    FusedProbsTopKSampleOp,
    FusedProbsTopKTopPSampleOp,
    FusedProbsTopPSampleOp,
    FusedSoftmaxFilterSampleOp,
    FusedTemperatureSoftmaxOp,
    LogitsTopKOp,
    MinPOp,
    ProbsSampleOp,
    ProbsTopKOp,
    SoftmaxOp,
    TemperatureOp,
    TopPOp,
)


@dataclass(frozen=True)
class FusionRule:
    """Rule that fuses steps of these classes with ``build`` if ``guard`` allows it.

    The highest ``prio`` goes first.
    """

    pattern: tuple[type[Op], ...]
    guard: Callable[[Sequence[Op]], bool]
    build: Callable[[Sequence[Op]], Op]
    prio: int = 0

    def matches(self, ops: Sequence[Op]) -> bool:
        """Return whether these steps have the pattern's classes."""
        return len(ops) == len(self.pattern) and all(
            isinstance(op, kind) for op, kind in zip(ops, self.pattern, strict=True)
        )


def _fused(kind: type[Op]) -> Callable[[Sequence[Op]], Op]:
    """Return a function that makes one step with the parameters of all."""

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


# Steps that draw from probabilities, and the filters that they apply.
_FILTERS: dict[type[Op], tuple[str, ...]] = {
    FusedProbsTopKSampleOp: ("top_k",),
    FusedProbsTopPSampleOp: ("top_p",),
    FusedProbsMinPSampleOp: ("min_p",),
    FusedProbsTopKTopPSampleOp: ("top_k", "top_p"),
}


def _from_logits(ops: Sequence[Op]) -> Op:
    """Fuse a softmax and a draw."""
    softmax, sample = ops
    temperature = ("temperature",) if isinstance(softmax, FusedTemperatureSoftmaxOp) else ()
    filters = (*temperature, *_FILTERS[type(sample)])
    return FusedSoftmaxFilterSampleOp(**(softmax.params | sample.params), filters=filters)


def _has_no_mask(ops: Sequence[Op]) -> bool:
    return "top_k" not in ops[1].params["filters"]


def _masked(ops: Sequence[Op]) -> Op:
    """Fuse a mask before the softmax with the step."""
    mask, sample = ops
    filters = ("top_k", *sample.params["filters"])
    return FusedSoftmaxFilterSampleOp(**(mask.params | sample.params | dict(filters=filters, masks=True)))


def fusion_rules() -> list[FusionRule]:
    """Return the rules of every pipeline."""
    pairs: list[tuple[type[Op], type[Op]]] = [
        (ProbsTopKOp, FusedProbsTopKSampleOp),
        (TopPOp, FusedProbsTopPSampleOp),
        (MinPOp, FusedProbsMinPSampleOp),
    ]
    return [
        FusionRule((TemperatureOp, SoftmaxOp), _always, _fused(FusedTemperatureSoftmaxOp), 100),
        FusionRule((ProbsTopKOp, TopPOp, ProbsSampleOp), _is_joint, _fused(FusedProbsTopKTopPSampleOp), 100),
        *(FusionRule((kind, ProbsSampleOp), _always, _fused(fused), 10) for kind, fused in pairs),
        *(
            FusionRule((softmax, sample), _always, _from_logits, 5)
            for softmax in (SoftmaxOp, FusedTemperatureSoftmaxOp)
            for sample in _FILTERS
        ),
        FusionRule((LogitsTopKOp, FusedSoftmaxFilterSampleOp), _has_no_mask, _masked, 5),
    ]
