"""Pipelines from logits to tokens: temperature, softmax, filters and draws, fused into few functions."""

from __future__ import annotations

from .compiler import Compiler, compile_pipeline
from .fusion_rules import FusionRule
from .legalization import LegalizationError, legalize_processors
from .op import Op, ParameterizedOp
from .pipeline import LogitsPipe
from .processors import LogitsProcessor, MinP, Sample, Softmax, Temperature, TopK, TopP
from .types import TaggedTensor, TensorType
from .validators import CompileError

__all__ = [
    "CompileError",
    "Compiler",
    "FusionRule",
    "LegalizationError",
    "LogitsPipe",
    "LogitsProcessor",
    "MinP",
    "Op",
    "ParameterizedOp",
    "Sample",
    "Softmax",
    "TaggedTensor",
    "Temperature",
    "TensorType",
    "TopK",
    "TopP",
    "compile_pipeline",
    "legalize_processors",
]
