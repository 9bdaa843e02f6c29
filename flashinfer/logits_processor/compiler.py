"""From steps to fewer steps of the same meaning."""

from __future__ import annotations

from collections.abc import Sequence

from .fusion_rules import FusionRule, fusion_rules
from .op import Op
from .validators import CompileError, ValidityCheck, validity_checks

__all__ = ["CompileError", "Compiler", "compile_pipeline"]


class Compiler:
    """Checks and rules, to which a caller may add."""

    def __init__(self) -> None:
        self.rules: list[FusionRule] = fusion_rules()
        self.checks: list[ValidityCheck] = validity_checks()

    def register_fusion_rule(self, rule: FusionRule) -> None:
        """One more rule; of those with one ``prio`` the last registered goes last."""
        self.rules.append(rule)

    def register_validity_check(self, check: ValidityCheck) -> None:
        """One more check."""
        self.checks.append(check)

    def compile(self, ops: Sequence[Op]) -> list[Op]:
        """The steps, fused.

        Raises:
            CompileError: no steps, or a check fails.
        """
        if not ops:
            raise CompileError("Pipeline cannot be empty")
        for check in self.checks:
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
            at = max(at - 1, 0)  # what stands before may fit now
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
    """The steps, fused by the rules that all pipelines have and by these.

    Raises:
        CompileError: no steps, or a check fails.
    """
    compiler = Compiler()
    for rule in custom_fusion_rules or ():
        compiler.register_fusion_rule(rule)
    for check in custom_validity_checks or ():
        compiler.register_validity_check(check)
    return compiler.compile(ops)
