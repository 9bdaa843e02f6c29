"""Fusion of steps."""

from __future__ import annotations

from collections.abc import Sequence

from .fusion_rules import FusionRule, fusion_rules
from .op import Op
from .validators import CompileError, ValidityCheck, validity_checks

__all__ = ["CompileError", "Compiler", "compile_pipeline"]


class Compiler:
    """Validity checks and fusion rules. A caller may add to both."""

    def __init__(self) -> None:
        self.rules: list[FusionRule] = fusion_rules()
        self.checks: list[ValidityCheck] = validity_checks()

    def register_fusion_rule(self, rule: FusionRule) -> None:
        """Add a rule. Among rules with equal ``prio``, later ones come last."""
        self.rules.append(rule)

    def register_validity_check(self, check: ValidityCheck) -> None:
        """Add a check."""
        self.checks.append(check)

    def compile(self, ops: Sequence[Op], custom_validity_checks: Sequence[ValidityCheck] | None = None) -> list[Op]:
        """Return the steps, fused. ``custom_validity_checks`` are for this call only, after all others.

        Raises:
            CompileError: no steps, or a check fails.
        """
        if not ops:
            raise CompileError("Pipeline cannot be empty")
        for check in (*self.checks, *(custom_validity_checks or ())):
            check(ops)
        rules = sorted(self.rules, key=lambda rule: -rule.prio)
        result, at = list(ops), 0
        while at < len(result):
            rule = next((rule for rule in rules if self._fits(rule, result, at)), None)
            if rule is None:
                at += 1
                continue
            end = at + len(rule.pattern)
            result[at:end] = [rule.build(result[at:end])]
            at = max(at - 1, 0)  # the previous step may fit a rule now
        return result

    @staticmethod
    def _fits(rule: FusionRule, ops: list[Op], at: int) -> bool:
        window = ops[at : at + len(rule.pattern)]
        return rule.matches(window) and rule.guard(window)


def compile_pipeline(
    ops: Sequence[Op],
    custom_fusion_rules: Sequence[FusionRule] | None = None,
    custom_validity_checks: Sequence[ValidityCheck] | None = None,
) -> list[Op]:
    """Return the steps, fused by the builtin rules and by these.

    Raises:
        CompileError: no steps, or a check fails.
    """
    compiler = Compiler()
    for rule in custom_fusion_rules or ():
        compiler.register_fusion_rule(rule)
    return compiler.compile(ops, custom_validity_checks)
