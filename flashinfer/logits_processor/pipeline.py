"""Pipelines of processors, compiled into as few steps as the library's functions allow."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import torch

from .._ops.errors import type_error, value_error
from .compiler import compile_pipeline
from .fusion_rules import FusionRule
from .legalization import infer_initial_type, legalize_processors
from .op import Op
from .processors import LogitsProcessor
from .types import TaggedTensor, TensorType
from .validators import ValidityCheck


class LogitsPipe:
    """A chain of processors, for example ``LogitsPipe([Temperature(), Softmax(), TopP(), Sample()])``.

    Args:
        processors: at least one.
        compile: fuse steps at once. Otherwise each step runs by itself until :meth:`compile`.
        input_type: type of the input; required if the first processor accepts logits and probabilities.
        custom_fusion_rules, custom_validity_checks: in addition to those of all pipelines.

    Raises:
        ValueError: processors that form no pipeline.

    ``processors``, ``ops`` (one or more for each), ``compiled_ops`` (``None`` until compiled) and
    ``initial_type`` are attributes.
    """

    def __init__(
        self,
        processors: Sequence[LogitsProcessor],
        compile: bool = True,
        input_type: TensorType | None = None,
        custom_fusion_rules: Sequence[FusionRule] | None = None,
        custom_validity_checks: Sequence[ValidityCheck] | None = None,
    ) -> None:
        if not processors:
            raise ValueError("Pipeline cannot be empty")
        self.processors = list(processors)
        self.custom_fusion_rules, self.custom_validity_checks = custom_fusion_rules, custom_validity_checks
        self.compiled_ops: list[Op] | None = None
        try:
            self.initial_type = infer_initial_type(self.processors) if input_type is None else input_type
            self.ops = legalize_processors(self.processors, self.initial_type)
            if compile:
                self.compile()
        except ValueError as err:
            raise ValueError(f"Pipeline creation failed: {err}") from err

    def compile(
        self,
        custom_fusion_rules: Sequence[FusionRule] | None = None,
        custom_validity_checks: Sequence[ValidityCheck] | None = None,
    ) -> None:
        """Fuse the steps. Rules and checks replace those of the constructor.

        Raises:
            CompileError: the steps form no pipeline.
        """
        if custom_fusion_rules is not None:
            self.custom_fusion_rules = custom_fusion_rules
        if custom_validity_checks is not None:
            self.custom_validity_checks = custom_validity_checks
        self.compiled_ops = compile_pipeline(self.ops, self.custom_fusion_rules, self.custom_validity_checks)

    def __call__(self, x: torch.Tensor | TaggedTensor, **runtime: Any) -> torch.Tensor:
        """Run the pipeline on ``[batch_size, vocab_size]``, with the parameters of its processors by name.

        Raises:
            ValueError: a tensor of another type, or a step that fails; the message names it.
        """
        tensor = x if isinstance(x, TaggedTensor) else TaggedTensor(x, self.initial_type)
        if tensor.type != self.initial_type:
            raise value_error("LogitsPipe", "x", tensor.type.name, self.initial_type.name)
        ops = self.compiled_ops
        if ops is None:
            warnings.warn("this LogitsPipe is not compiled: its steps run one by one", UserWarning, stacklevel=2)
            ops = self.ops
        for number, op in enumerate(ops):
            try:
                tensor = op(tensor, **runtime)
                if not isinstance(tensor, TaggedTensor):
                    raise type_error(op.name, "result", type(tensor).__name__, f"a TaggedTensor of {op.OUT.name}")
            except (TypeError, ValueError, IndexError) as err:
                raise ValueError(f"Error executing operator {number} ({op.name}): {err}") from err
        return tensor.data

    def __repr__(self) -> str:
        def chain(steps: Sequence[object]) -> str:
            return "[" + " -> ".join(map(repr, steps)) + "]"

        compiled = None if self.compiled_ops is None else chain(self.compiled_ops)
        return f"LogitsPipe({chain(self.processors)}, ops={chain(self.ops)}, compiled_ops={compiled})"
