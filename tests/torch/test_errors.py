"""Tests of errors: every public function names itself, and the argument by its public name."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable

import pytest
import torch

import flashinfer
from flashinfer.errors import GradientError

from ..support.attention_oracle import workspace
from ..support.attention_samples import samples
from ..support.cases import Case
from ..support.samples import attention_cases, public_cases

SPOILED: dict[str, Callable[[torch.Tensor], object]] = {
    "complex": lambda x: x.to(torch.complex64),
    "dimensions": lambda x: x[(None,) * 4],
    "rows": lambda x: torch.cat([x, x[:1]]),
    "meta": lambda x: x.to("meta"),
    "sparse": lambda x: x.float().to_sparse(),
    "str": lambda x: "zero",
    "None": lambda x: None,
}
CASES = [
    (name, argument)
    for name, case in public_cases("cpu").items()
    for argument, value in case.arguments(9).items()
    if isinstance(value, torch.Tensor) and inspect.isfunction(case.function)
]


def is_public(case: Case) -> bool:
    """Return whether a case calls a public function directly."""
    return case.function.__module__.startswith("flashinfer.")


@pytest.mark.parametrize("how", SPOILED)
@pytest.mark.parametrize(("name", "argument"), CASES)
def test_arguments(name, argument, how, device):
    case = public_cases(device)[name]
    if not is_public(case):
        pytest.skip("a function of the tests")
    arguments = case.arguments(9)
    arguments[argument] = SPOILED[how](arguments[argument])
    function = name.split()[0]
    try:
        case.function(**arguments)
    except (ValueError, TypeError) as err:
        assert str(err).startswith(f"{function}: "), err
        parameters = inspect.signature(case.function).parameters
        named = str(err).removeprefix(f"{function}: ").split(":")[0].split("[")[0]
        # The operator of rope has other names for arguments that are not tensors.
        assert named in parameters or (how == "None" and argument in ("query", "key")), err
        # If two arguments do not fit each other, an error may name either.
        assert named == argument or how in ("rows", "meta", "dimensions") or argument in ("seed", "query", "key"), err
    else:
        assert how in ("rows", "meta", "dimensions") or arguments[argument] is None, "it was taken"


ATTENTION = [
    (name, argument)
    for name, case in attention_cases("cpu").items()
    for argument, value in case.arguments(9).items()
    if isinstance(value, torch.Tensor)
]


@pytest.mark.parametrize("how", ["int", *(how for how in SPOILED if how != "rows")])
@pytest.mark.parametrize(("name", "argument"), ATTENTION)
def test_arguments_of_attention(name, argument, how, device):
    """The selection of a module has names of its own for dtypes and devices, which no caller knows."""
    case = attention_cases(device)[name]
    arguments = case.arguments(9)
    arguments[argument] = {**SPOILED, "int": lambda x: x.int()}[how](arguments[argument])
    function = re.escape(name.split()[0])
    with pytest.raises((ValueError, TypeError), match=f"^{function}: ") as caught:
        case.function(**arguments)
    named = str(caught.value).split(": ")[1].split("[")[0]
    assert named == argument or (named in arguments and how in ("meta", "dimensions")), caught.value


@pytest.mark.parametrize("function", ["top_p_sampling_from_probs", "top_p_renorm_probs", "min_p_sampling_from_probs"])
def test_filter_arguments_must_be_real(function, device):
    probs = torch.rand(5, 40, device=device)
    for kind in (torch.complex64, torch.bool):
        numbers = torch.ones(5, device=device).to(kind)
        with pytest.raises(TypeError, match=rf"^{function}: (top_p|min_p): got {kind}, wanted real numbers"):
            getattr(flashinfer, function)(probs, numbers)


def test_scales_must_be_real(device):
    q, k, v = (torch.randn(9, 2, 64, device=device).half() for _ in range(3))
    for shape in ((), (2,)):
        scale = torch.ones(shape, dtype=torch.complex64, device=device)
        for name in ("scale_q", "scale_k", "scale_v"):
            with pytest.raises(TypeError, match=f"^single_prefill_with_kv_cache: {name}: got torch.complex64"):
                flashinfer.single_prefill_with_kv_cache(q, k, v, **{name: scale})


def test_wrappers_name_their_method(device):
    x = torch.randn(9, 2, 64, device=device).half()
    indptr = torch.tensor([0, 9], dtype=torch.int32)
    wrapper = flashinfer.BatchPrefillWithRaggedKVCacheWrapper(workspace(device))
    wrapper.plan(indptr, indptr, 2, 2, 64)
    for call in (wrapper.run, wrapper.run_return_lse):
        with pytest.raises(ValueError, match=r"^BatchPrefillWithRaggedKVCacheWrapper\.run: k: got"):
            call(x, x.to("meta"), x)
        with pytest.raises(
            TypeError, match=r"^BatchPrefillWithRaggedKVCacheWrapper\.run: v: got float32, wanted float16"
        ):
            call(x, x, x.float())


def test_wrappers_of_wrappers_name_their_method(device):
    """Pass arguments that only an inner wrapper or function checks."""
    q, k = torch.randn(2, 4, 64, device=device).half(), torch.randn(5, 2, 64, device=device).half()
    cache = torch.randn(3, 2, 4, 2, 64, device=device).half()
    indptr, indices, last = (torch.tensor(x, dtype=torch.int32) for x in ([0, 2, 3], [0, 1, 2], [1, 3]))
    queries, sizes = torch.tensor([0, 1, 2], dtype=torch.int32), (4, 2, 64, 4)
    learned, mask = q.clone().requires_grad_(), torch.ones(3, 3, dtype=torch.bool, device=device)
    pod = flashinfer.PODWithPagedKVCacheWrapper(workspace(device))
    levels = flashinfer.MultiLevelCascadeAttentionWrapper(1, workspace(device))
    decode = flashinfer.BatchDecodeWithSharedPrefixPagedKVCacheWrapper(workspace(device))
    prefill = flashinfer.BatchPrefillWithSharedPrefixPagedKVCacheWrapper(workspace(device))

    def refused(wrapper: object, method: str, text: str, *args: object, **options: object) -> None:
        with pytest.raises((ValueError, TypeError, GradientError)) as caught:
            getattr(wrapper, method)(*args, **options)
        assert str(caught.value).startswith(f"{type(wrapper).__name__}.{method}: {text}")

    refused(decode, "forward", "got no plan, wanted a call of begin_forward() before", q, k, k, cache)
    refused(pod, "plan", "kv_data_type: got int32", indptr, indices, last, *sizes, kv_data_type=torch.int32)
    pod.plan(indptr, indices, last, *sizes)
    levels.plan([queries], [indptr], [indices], [last], *sizes)
    decode.begin_forward(indptr, indices, last, *sizes)
    prefill.begin_forward(queries, indptr, indices, last, *sizes)
    refused(pod, "run", "has no gradient", q, k, k, learned, cache)
    refused(pod, "run", "custom_mask_p: got shape [3, 3]", q, k, k, q, cache, mask)
    refused(pod, "run", "k_p: got int32", q, k.int(), k, q, cache)
    refused(levels, "run", "has no gradient", learned, cache)
    refused(decode, "forward", "has no gradient", learned, k, k, cache)
    refused(decode, "forward", "has no gradient", q, k.clone().requires_grad_(), k, cache)
    refused(prefill, "forward", "unique_kv_cache: got int32", q, k, k, cache.int())


WRAPPERS = [name for name in samples("cpu") if "Wrapper" in name or name == "BatchAttention"]


@pytest.mark.parametrize("how", [how for how in SPOILED if how != "rows"])
@pytest.mark.parametrize("name", WRAPPERS)
def test_arguments_of_wrappers(name, how, device):
    """Inner wrappers and operators have other names for these arguments."""
    sample = samples(device)[name]
    sample.plan(9)
    tensors = [argument for argument, x in sample.inputs(9).items() if isinstance(x, torch.Tensor)]
    for argument in tensors:
        arguments = sample.inputs(9)
        arguments[argument] = SPOILED[how](arguments[argument])
        if (argument, how) == ("sinks", "None"):
            continue
        with pytest.raises((ValueError, TypeError), match=rf"^{name}\.(run|forward): ") as caught:
            sample.function(**arguments)
        named = str(caught.value).split(": ")[1].split("[")[0]
        # If two arguments do not fit each other, an error may name either.
        assert named == argument or (named in tensors and how in ("meta", "dimensions")), caught.value


def test_options_of_pod(device):
    """Prefill and decode check these options under names without the suffix."""
    q, k = torch.randn(2, 4, 64, device=device).half(), torch.randn(5, 2, 64, device=device).half()
    cache = torch.randn(3, 2, 4, 2, 64, device=device).half()
    indptr, indices, last = (torch.tensor(x, dtype=torch.int32) for x in ([0, 2, 3], [0, 1, 2], [1, 3]))
    pod = flashinfer.PODWithPagedKVCacheWrapper(workspace(device))
    pod.plan(indptr, indices, last, 4, 2, 64, 4)
    spoiled = {"kv_layout": "NDH", "pos_encoding_mode": "ROPE", "rope_scale": -1.0, "rope_theta": 0.0}
    spoiled |= {"sm_scale": float("nan"), "window_left": 0.5}
    options = {f"{name}_{part}": value for name, value in spoiled.items() for part in "pd"}
    for name, value in (options | {"packed_custom_mask_p": torch.ones(7, device=device)}).items():
        with pytest.raises((ValueError, TypeError), match=rf"^PODWithPagedKVCacheWrapper\.run: {name}: got"):
            pod.run(q, k, k, q, cache, **{name: value})
    short = (cache[:, 0], cache[:1, 1])
    with pytest.raises(ValueError, match=r"^PODWithPagedKVCacheWrapper\.run: paged_kv_cache_d\[1\]: got shape"):
        pod.run(q, k, k, q, short)
    with pytest.raises(TypeError, match=r"v_p: got bfloat16, wanted float16 as k_p has$"):
        pod.run(q, k, k.bfloat16(), q, cache)


def test_tables_of_wrappers_of_wrappers(device):
    indptr, indices, last = (torch.tensor(x, dtype=torch.int32) for x in ([0, 2, 3], [0, 1, 2], [1, 3]))
    queries, sizes = torch.tensor([0, 1, 2], dtype=torch.int32), (4, 2, 64, 4)
    levels = flashinfer.MultiLevelCascadeAttentionWrapper(2, workspace(device))
    tables = dict(qo_indptr_arr=queries, paged_kv_indptr_arr=indptr, paged_kv_indices_arr=indices)
    tables["paged_kv_last_page_len"] = last
    for name, table in tables.items():
        spoiled = {other: [x, table.float() if other == name else x] for other, x in tables.items()}
        with pytest.raises(TypeError, match=rf"^MultiLevelCascadeAttentionWrapper\.plan: {name}\[1\]: got"):
            levels.plan(*spoiled.values(), *sizes)
    decode = flashinfer.BatchDecodeWithSharedPrefixPagedKVCacheWrapper(workspace(device))
    tables = dict(unique_kv_indptr=indptr, unique_kv_indices=indices, unique_kv_last_page_len=last)
    for name, table in tables.items():
        with pytest.raises(TypeError, match=rf"^{type(decode).__name__}\.begin_forward: {name}: got"):
            decode.begin_forward(*(tables | {name: table.float()}).values(), *sizes)
    with pytest.raises(ValueError, match=r"begin_forward: data_type: got int32"):
        decode.begin_forward(*tables.values(), *sizes, torch.int32)
    short, long = (torch.empty(size, dtype=torch.int32, device=device) for size in (2, 3))
    buffers = dict(qo_indptr_buf_arr=long, paged_kv_indptr_buf_arr=long, paged_kv_indices_buf_arr=long)
    buffers["paged_kv_last_page_len_buf_arr"] = short
    for name, buffer in buffers.items():
        arrays = {other: [x, buffer.float() if other == name else x] for other, x in buffers.items()}
        with pytest.raises(TypeError, match=rf"^MultiLevelCascadeAttentionWrapper: {name}\[1\]: got"):
            flashinfer.MultiLevelCascadeAttentionWrapper(2, workspace(device), "NHD", True, **arrays)


def negated(x: torch.Tensor) -> torch.Tensor:
    """Return a view with the negative bit that stands for ``x``, as the imaginary part of a conjugate is."""
    return torch._neg_view(x.neg())


def results(result: object) -> list[torch.Tensor]:
    parts = result if isinstance(result, (tuple, list)) else [result]
    return [part.resolve_neg() for part in parts if isinstance(part, torch.Tensor)]


@pytest.mark.parametrize(("name", "argument"), CASES)
def test_views_with_the_negative_bit(name, argument, device):
    case = public_cases(device)[name]
    plain = case.arguments(9)
    if plain[argument].dtype not in (torch.float32, torch.float16, torch.bfloat16, torch.int32, torch.int64):
        pytest.skip("torch has no negative view of it")
    given = {key: x.clone() if isinstance(x, torch.Tensor) else x for key, x in plain.items()}
    given[argument] = negated(given[argument])
    want = [*results(case.function(**plain)), *results(list(plain.values()))]
    got = [*results(case.function(**given)), *results(list(given.values()))]
    for one, other in zip(got, want, strict=True):
        torch.testing.assert_close(one, other, equal_nan=True)


@pytest.mark.parametrize("name", list(samples("cpu")))
def test_views_with_the_negative_bit_in_attention(name, device):
    sample = samples(device)[name]
    sample.plan(9)
    inputs = sample.inputs(9)
    want = results(sample.function(**inputs))
    for argument, x in inputs.items():
        if isinstance(x, torch.Tensor) and x.is_floating_point():
            for one, other in zip(results(sample.function(**inputs | {argument: negated(x)})), want, strict=True):
                torch.testing.assert_close(one, other, equal_nan=True)


def test_outputs_of_attention_with_the_negative_bit(device):
    q, k, v = (torch.randn(9, 2, 64, device=device).half() for _ in range(3))
    indptr = torch.tensor([0, 9], dtype=torch.int32)
    wrapper = flashinfer.BatchPrefillWithRaggedKVCacheWrapper(workspace(device))
    wrapper.plan(indptr, indptr, 2, 2, 64)
    want, want_lse = wrapper.run(q, k, v, return_lse=True)
    out, lse = negated(torch.full_like(want, 77)), torch.full_like(want_lse, 77)
    wrapper.run(q, k, v, out=out, lse=lse, return_lse=True)
    assert out.is_neg() and torch.equal(out.resolve_neg(), want) and torch.equal(lse, want_lse)
