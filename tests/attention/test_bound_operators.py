"""Operators of attention's modules: their schemas, and references to tensors after failed calls."""

from __future__ import annotations

import pytest
import torch

import flashinfer
from flashinfer._attention import bound as _bound
from flashinfer._attention.signature import PlanNumbers

from ..support.attention_oracle import int32, workspace
from ..support.opcheck import opcheck
from ..support.plans import bound_calls, plan_of
from .test_bound import DIM, HEADS, KV_HEADS, PAGE, drawn, handle_of, inputs, namespace_of, planned


@pytest.fixture(params=[pytest.param("decode", marks=pytest.mark.slow), "prefill"])
def operators(request, device):
    """Return a wrapper, and arguments of each operator of its module."""
    if request.param == "decode":
        wrapper, q = planned(device, [3, 16]), drawn(2, HEADS, DIM, device=device)
    else:
        wrapper, q = (
            flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace(device)),
            drawn(5, HEADS, DIM, device=device),
        )
        wrapper.plan(
            int32([0, 2, 5]), int32([0, 1, 2]), int32([1, 0]), int32([3, 16]), HEADS, KV_HEADS, DIM, PAGE, causal=True
        )
    _, cache = inputs(device, 2)
    k, v = cache.unbind(1)
    plan, handle, lse = plan_of(wrapper), handle_of(bound_calls(wrapper)), torch.empty(q.shape[:2], device=device)
    given, scales, none = (*plan.arguments, *plan.parameters), (DIM**-0.5, 1.0), (None, None)
    expected = (3, len(q), False, HEADS, KV_HEADS, DIM, DIM, 2, 2, PAGE, 2)
    buffer, lens = torch.empty(4096, dtype=torch.int32), int32([3, 16])
    qo_indptr = None if request.param == "decode" else int32([0, 2, 5])
    numbers = PlanNumbers(HEADS, KV_HEADS, DIM, DIM, 2, 2, 2, page_size=PAGE).tensor()
    again = (plan.lists.plan, plan.arguments.kv_indptr, plan.arguments.kv_indices, *plan.lists[2:], len(q), 2)
    # opcheck binds copies that are gone afterwards: calls of this handle would read freed memory.
    bound_to_copies, namespace = next(_bound._handles), namespace_of(wrapper)
    namespace.bind(bound_to_copies, *expected, *given)
    arguments = {
        "run": [(q, k, v, q.clone(), None, *given), (q, k, v, q.clone(), lse, *given)],
        "plan": [
            (buffer, numbers, qo_indptr, lens, None, None, None),
            (buffer, numbers, qo_indptr, None, int32([0, 1, 2]), int32([1, 0]), int32([3, 16])),
        ],
        "bind": [(bound_to_copies, *expected, *given)],
        "rebind": [(bound_to_copies, *again)],
        "unbind": [(-1,)],
        "stream_of": [(handle,)],
        "run_bound": [(q, cache, None, handle, *scales), (q, k, v, handle, *none)],
        "run_bound_lse": [(q, cache, None, handle, *none)],
        "run_bound_out": [
            (q, cache, None, q.clone(), None, handle, *none),
            (q, k, v, q.clone(), lse, handle, *scales),
        ],
    }
    yield wrapper, arguments
    namespace.unbind(bound_to_copies)


def test_operators_keep_the_promises_of_their_schema(operators):
    wrapper, arguments = operators
    namespace = namespace_of(wrapper)
    registered = {name for name in torch._C._dispatch_get_all_op_names() if name.startswith(f"{namespace.name}::")}
    assert registered == {f"{namespace.name}::{name}" for name in arguments}
    for name, calls in arguments.items():
        operator = getattr(namespace, name).default
        assert torch.Tag.pt2_compliant_tag in operator.tags
        written = {one.name for one in operator._schema.arguments if one.alias_info and one.alias_info.is_write}
        wanted = {"run": {"out", "lse", "float_workspace"}, "run_bound_out": {"out", "lse"}, "plan": {"buffer"}}
        assert written == wanted.get(name, set())
        for call in calls:
            opcheck(operator, call)


def test_failed_calls_keep_nothing(operators):
    """Check that a call with one wrong argument keeps no reference to any argument."""
    wrapper, arguments = operators
    mask = torch.zeros(64, dtype=torch.uint8, device=wrapper.device)  # the last argument, which this call does not read
    failed = set()
    for name, calls in arguments.items():
        operator = getattr(namespace_of(wrapper), name).default
        names = [one.name for one in operator._schema.arguments]
        for call in calls:
            given = dict(zip(names, call, strict=True))
            if "custom_mask" in given:
                given["custom_mask"] = mask
            tensors = {name: one for name, one in given.items() if isinstance(one, torch.Tensor)}
            before = [one._use_count() for one in tensors.values()]
            for wrong, one in tensors.items():
                try:
                    operator(*(given | {wrong: one.double()}).values())
                except RuntimeError:
                    failed.add((name, wrong))
                assert [one._use_count() for one in tensors.values()] == before, (name, wrong)
    assert {name for name, _ in failed} == set(arguments) - {"unbind", "stream_of"}
    assert {("run", one) for one in ("q", "k", "v", "out", "kv_indptr", "kv_indices", "plan")} <= failed
