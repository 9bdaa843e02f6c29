"""Argument lists in Python and C++ equal those of the registered operators."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

import pytest
import torch

import flashinfer
from flashinfer._attention.signature import (
    CallArguments,
    ExpectedArguments,
    HostTables,
    Parameters,
    PlanNumbers,
    RebindArguments,
    schema_of,
)
from flashinfer._ops.configured import load_configured
from flashinfer.jit.modules._attention import attention_spec

ROOT = Path(__file__).resolve().parents[2]
TENSORS = "Tensor q, Tensor k, Tensor v, Tensor(a!) out, Tensor(b!)? lse, "


def registered(namespace: object, name: str) -> str:
    """Return the arguments of an operator as torch prints them."""
    schema = str(getattr(namespace, name).default._schema)
    return schema[schema.index("(") + 1 : schema.index(") -> ")]


@pytest.mark.parametrize("family", ["decode", "prefill"])
def test_python_has_the_lists_of_the_modules(family, device):
    dtype = "float32" if device == "cpu" else "float16"
    namespace = load_configured(attention_spec(family, device, f"{dtype}:{dtype}:{dtype}", "64", "default"))
    arguments, parameters = schema_of(CallArguments), schema_of(Parameters)
    written = arguments.replace("Tensor? float_workspace", "Tensor(c!)? float_workspace")
    assert registered(namespace, "run") == f"{TENSORS}{written}, {parameters}"
    assert registered(namespace, "bind") == f"{schema_of(ExpectedArguments)}, {arguments}, {parameters}"
    assert registered(namespace, "rebind") == schema_of(RebindArguments)
    assert registered(namespace, "plan") == f"Tensor(a!) buffer, Tensor numbers, {schema_of(HostTables)}"


def test_numbers_of_a_plan_stand_in_one_order():
    text = (ROOT / "csrc/attention/tables.h").read_text()
    listed = text[text.index("#define FLASHINFER_PLAN_NUMBERS") : text.index("struct PlanNumbers")]
    assert re.findall(r"X\((\w+)\)", listed) == list(PlanNumbers._fields)


def test_schemas_in_python():
    assert schema_of(Parameters, "SymInt") == (
        "Tensor? maybe_alibi_slopes, Tensor? maybe_numbers, Tensor? maybe_head_scales, Tensor? maybe_sinks, float sm_scale,"
        " float logits_soft_cap"
    )
    assert "SymInt batch_size" in schema_of(CallArguments, "SymInt")
    # The defaults describe one request, for which the operator needs no table.
    assert [name for name, default in CallArguments._field_defaults.items() if isinstance(default, torch.Tensor)] == []
    assert CallArguments().batch_size == 1 and CallArguments().window_left == -1


PLANS = (
    flashinfer.BatchPrefillWithPagedKVCacheWrapper.plan, flashinfer.BatchPrefillWithRaggedKVCacheWrapper.plan,
    flashinfer.BatchDecodeWithPagedKVCacheWrapper.plan, flashinfer.BlockSparseAttentionWrapper.plan,
    flashinfer.VariableBlockSparseAttentionWrapper.plan, flashinfer.fast_decode_plan,
)  # fmt: skip
# FlashInfer's defaults differ too: the output of a sparse plan is float16, and a fast plan has no dtype of its own.
OWN_DEFAULTS = {"BlockSparseAttentionWrapper.plan": {"o_data_type"}, "fast_decode_plan": {"q_data_type"}}


def test_an_option_of_several_plans_has_one_default():
    defaults: dict[str, dict[str, object]] = {}
    for plan in PLANS:
        for name, parameter in inspect.signature(plan).parameters.items():
            if name not in OWN_DEFAULTS.get(plan.__qualname__, ()):
                defaults.setdefault(name, {})[plan.__qualname__] = parameter.default
    shared = {name: found for name, found in defaults.items() if len(found) > 1}
    assert len(shared) > 15
    assert {name: found for name, found in shared.items() if len(set(found.values())) > 1} == {}
