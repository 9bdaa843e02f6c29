"""A call of every operator and of every public function, with fresh inputs: for tests of what holds for all of them.

An operator or function that is missing here fails ``tests/torch/test_ops.py`` and ``tests/torch/test_torch.py``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

import flashinfer

from . import attention_samples

EPS = 1e-5
ACTIVATIONS = ("silu", "gelu", "gelu_tanh")
ANGLES = (None, False, 1.5, 1e4, True, 1.0, 4.0, 8192)


def operator_calls(device: str) -> dict[str, list[tuple[Any, ...]]]:
    """Name of an operator -> arguments, once or more; tensors of differentiable ones require gradients."""
    return {
        **_norm_operators(device),
        **_activation_operators(device),
        **_rope_operators(device),
        **_attention_operators(device),
        **_prefill_operators(device),
        **_other_operators(device),
        **attention_samples.operator_calls(device),
    }


def _randn(*shape: int, device: str, grad: bool = False) -> torch.Tensor:
    return torch.randn(shape, device=device, requires_grad=grad)


def _norm_operators(device: str) -> dict[str, list[tuple[Any, ...]]]:
    x, w = _randn(6, 64, device=device).half(), _randn(64, device=device).half()
    xg, rg = _randn(6, 64, device=device, grad=True), _randn(6, 64, device=device, grad=True)
    wg, bg = _randn(64, device=device, grad=True), _randn(64, device=device, grad=True)
    tensor = torch.full((), EPS, dtype=torch.float64, device=device)
    calls: dict[str, list[tuple[Any, ...]]] = {}
    for name in ("rmsnorm", "gemma_rmsnorm"):
        calls[name] = [(x, w, EPS, None)]
        calls[f"{name}_out"] = [(x.clone(), x, w, EPS, None)]
        calls[f"{name}_autograd"] = [(xg, wg, EPS, None, None), (xg, wg, 0.0, tensor, None)]
    for name in ("fused_add_rmsnorm", "gemma_fused_add_rmsnorm"):
        calls[name] = [(x.clone(), x.clone(), w, EPS, None)]
        calls[f"{name}_autograd"] = [(xg, rg, wg, EPS, None, None), (xg, rg, wg, 0.0, tensor, None)]
    calls["layernorm"] = [(x, w, w, EPS)]
    calls["layernorm_out"] = [(x.clone(), x, w, w, EPS)]
    calls["layernorm_autograd"] = [(xg, wg, bg, EPS, None), (xg, wg, bg, 0.0, tensor)]
    calls["rmsnorm_backward"] = [(x, x, w, None, EPS, None, 1.0), (x, x, w, x, 0.0, tensor, 0.0)]
    calls["layernorm_backward"] = [(x, x, w, EPS, None), (x, x, w.float(), 0.0, tensor)]
    return calls


def _activation_operators(device: str) -> dict[str, list[tuple[Any, ...]]]:
    x, out = _randn(6, 64, device=device).half(), torch.empty(6, 32, device=device).half()
    xg = _randn(6, 64, device=device, grad=True)
    calls: dict[str, list[tuple[Any, ...]]] = {}
    for name in ACTIVATIONS:
        calls[f"{name}_and_mul"] = [(x, None)]
        calls[f"{name}_and_mul_out"] = [(out.clone(), x, None)]
        calls[f"{name}_and_mul_autograd"] = [(xg, None)]
        calls[f"{name}_and_mul_backward"] = [(x[:, :32], x)]
    return calls


def _rope_operators(device: str) -> dict[str, list[tuple[Any, ...]]]:
    q, k = _randn(5, 4, 16, device=device), _randn(5, 2, 16, device=device)
    qg, kg = _randn(5, 4, 16, device=device, grad=True), _randn(5, 2, 16, device=device, grad=True)
    where = torch.arange(5, device=device)
    places = torch.tensor([0, 2, 5], device=device), torch.tensor([7, 0], device=device)
    cache = _randn(9, 16, device=device)
    frequencies = torch.rand(8, dtype=torch.float64, device=device) + 0.1
    more = [(*ANGLES, None, False), (*ANGLES, frequencies, True)]
    return {
        "apply_rope": [(q, k, *places, *ANGLES)],
        "apply_rope_inplace": [(q.clone(), k.clone(), *places, *ANGLES)],
        "apply_rope_autograd": [(qg, kg, *places, *rest) for rest in more],
        "apply_rope_pos_ids": [(q, k, where, *ANGLES)],
        "apply_rope_pos_ids_inplace": [(q.clone(), k.clone(), where, *ANGLES)],
        "apply_rope_pos_ids_autograd": [(qg, kg, where, *rest) for rest in more],
        "apply_rope_with_cos_sin_cache": [(where, q, k, 16, cache, True)],
        "apply_rope_with_cos_sin_cache_inplace": [(where, q.clone(), k.clone(), 16, cache, True)],
        "apply_rope_with_cos_sin_cache_autograd": [
            (where, qg, kg, 16, cache, True, inverse) for inverse in (False, True)
        ],
    }


def _attention_operators(device: str) -> dict[str, list[tuple[Any, ...]]]:
    """Of functions without a plan; those of modules are tried in tests/attention/test_bound.py."""
    q, k, v = (_randn(n, heads, 64, device=device).half() for n, heads in ((3, 4), (9, 2), (9, 2)))
    lse, bits = _randn(3, 4, device=device), torch.full((4,), 0b10110111, dtype=torch.uint8, device=device)
    numbers = (0, -1, 0.0, 0.125, 1.0, 1e4, 1.0, 1.0)
    return {
        "attend": [
            ("decode", "sample", q[:1], k, v, q[:1].clone(), None, None, 0, 0, *numbers),
            ("prefill", "sample", q, k, v, q.clone(), lse, bits, 0, 2, *numbers),
        ]
    }


def _prefill_operators(device: str) -> dict[str, list[tuple[Any, ...]]]:
    dtype = torch.float32 if device == "cpu" else torch.float16
    q, k, v = (torch.randn(n, heads, 64, device=device, dtype=dtype) for n, heads in ((7, 4), (9, 2), (9, 2)))
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    out, lse = flashinfer.single_prefill_with_kv_cache(q, k, v, return_lse=True)
    one = (None, None, None, None, 0, 0, -1, 0, 0.0, 0.125, 1.0, 1e4)
    tables = torch.tensor([0, 3, 7], dtype=torch.int32), torch.tensor([5, 4], dtype=torch.int32)
    numbers = torch.tensor([0.125, 5.0, 1.0, 1e4], dtype=torch.float64)
    mask = torch.full((9,), 255, dtype=torch.uint8, device=device)
    masked = (*tables, mask, numbers, 0, 2, 3, 2, 1.0, 1.0, 1.0, 1.0)
    wide = [x.double().requires_grad_() for x in (q, k, v)] if device == "cpu" else leaves
    return {
        "prefill_autograd": [(*leaves, out, lse, *one), (*wide, None, None, *masked)],
        "prefill_gradients": [(q, k, v, out, lse, out, lse, *one), (q, k, v, out, lse, out, lse, *masked)],
        "prefill_backward": [
            (q, k, v, out, lse, out, lse, *tables, mask, torch.ones(4, device=device), 0, 2, 3, 5.0, 0.125),
            (q, k, v, out, lse, out, lse, None, None, None, None, 0, 1, -1, 0.0, 0.125),
        ],
    }


def _paged(device: str) -> dict[str, torch.Tensor]:
    """Two requests with 3 and 2 new tokens in pages of 4."""

    def ints(*values: int) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32, device=device)

    return dict(
        append_indptr=ints(0, 3, 5),
        seq_lens=ints(7, 2),
        batch_indices=ints(0, 0, 0, 1, 1),
        positions=ints(4, 5, 6, 0, 1),
        kv_indices=ints(3, 1, 0),
        kv_indptr=ints(0, 2, 3),
        kv_last_page_len=ints(3, 2),
        offsets=torch.zeros(9, dtype=torch.int32, device=device),
        offsets_indptr=ints(0, 7, 9),
    )


def _other_operators(device: str) -> dict[str, list[tuple[Any, ...]]]:
    p = _paged(device)
    tokens = p["batch_indices"], p["positions"]
    pages = p["kv_indices"], p["kv_indptr"], p["kv_last_page_len"]
    new, cache = _randn(5, 2, 8, device=device), torch.zeros(4, 2, 4, 2, 8, device=device)
    ckv, kpe = _randn(5, 16, device=device), _randn(5, 8, device=device)
    v, s = _randn(4, 8, 3, 16, device=device).half(), _randn(4, 8, 3, device=device)
    bits = torch.ones(37, dtype=torch.uint8, device=device)
    return {
        "append_paged_kv_cache": [
            (new, new, *tokens, cache, None, *pages, False),
            (new, new, *tokens, cache[:, 0].clone(), cache[:, 1].clone(), *pages, False),
        ],
        "append_paged_mla_kv_cache": [
            (ckv, kpe, *tokens, torch.zeros(4, 4, 16, device=device), torch.zeros(4, 4, 8, device=device), *pages)
        ],
        "get_batch_indices_positions": [(p["append_indptr"], p["seq_lens"], 5)],
        "get_seq_lens": [(p["kv_indptr"], p["kv_last_page_len"], 4)],
        "block_sparse_indices_to_vector_sparse_offsets": [
            (p["kv_indices"], p["kv_indptr"], p["offsets"], p["offsets_indptr"], p["seq_lens"], 8, 2, 4)
        ],
        "merge_state": [(v[:, 0], s[:, 0], v[:, 1], s[:, 1])],
        "merge_state_in_place": [(v[:, 0].clone(), s[:, 0].clone(), v[:, 1], s[:, 1], None)],
        "merge_states": [(v, s)],
        "packbits": [(bits, False)],
        "segment_packbits": [(bits, torch.tensor([0, 9, 37], dtype=torch.int32, device=device), True)],
    }


@dataclass(frozen=True)
class Case:
    """A public function, its arguments for a number of tokens, and the numbers among them that users vary.

    No two sizes are alike, and none is 1: torch takes sizes that are equal on the first call for one, and 1 for ever.
    """

    function: Callable[..., Any]
    arguments: Callable[[int], dict[str, Any]]
    numbers: tuple[str, ...] = ()
    differentiable: tuple[str, ...] = ()
    written: tuple[str, ...] = ()


def public_cases(device: str) -> dict[str, Case]:
    """Name of a public function -> a call of it."""
    return {**_norm_cases(device), **_activation_cases(device), **_rope_cases(device), **_other_cases(device)}


def attention_cases(device: str) -> dict[str, Case]:
    """The functions and wrappers of attention that one trains with, and those beside them."""
    dtype = torch.float32 if device == "cpu" else torch.float16

    def inputs(*lengths: int, heads: tuple[int, ...] = (6, 2, 2)) -> dict[str, Any]:
        shapes = zip(lengths, heads, strict=True)
        return {
            name: torch.randn(n, count, 64, device=device, dtype=dtype)
            for name, (n, count) in zip("qkv", shapes, strict=True)
        }

    def causal(**tensors: torch.Tensor) -> Any:
        return flashinfer.single_prefill_with_kv_cache(**tensors, causal=True)

    def decode(n: int) -> dict[str, Any]:
        return inputs(1, 2 * n, 2 * n) | dict(q=torch.randn(6, 64, device=device, dtype=dtype))

    def ragged(**tensors: torch.Tensor) -> Any:
        return wrapper.run(**tensors)

    wrapper = flashinfer.BatchPrefillWithRaggedKVCacheWrapper(torch.empty(1 << 20, dtype=torch.uint8, device=device))
    qo_indptr, kv_indptr = (torch.tensor(indptr, dtype=torch.int32) for indptr in ([0, 4, 9], [0, 8, 18]))
    wrapper.plan(qo_indptr, kv_indptr, 6, 2, 64, causal=True, q_data_type=dtype)
    return {
        "single_prefill_with_kv_cache": Case(causal, lambda n: inputs(n, 2 * n, 2 * n), ("sm_scale",), ("q", "k", "v")),
        "single_decode_with_kv_cache": Case(flashinfer.single_decode_with_kv_cache, decode, differentiable=("q",)),
        "BatchPrefillWithRaggedKVCacheWrapper.run": Case(
            ragged, lambda _: inputs(9, 18, 18), differentiable=("q", "k", "v")
        ),
    }


def values(number: str, count: int) -> list[float]:
    """Values of a number that users vary, no two alike."""
    if number in ("page_size", "block_size", "stride_block", "stride_n"):
        return [4 + i for i in range(count)]
    start = {"eps": 1e-6, "old_context_len": 1000, "high_freq_factor": 4.5, "low_freq_factor": 0.5, "rope_theta": 1e4}
    step = {"eps": 1e-4, "old_context_len": 10, "rope_theta": 123.0}
    return [start.get(number, 1.5) + i * step.get(number, 0.25) for i in range(count)]


def _norm_cases(device: str) -> dict[str, Case]:
    def rows(*names: str, weights: tuple[str, ...] = ("weight",)) -> Callable[[int], dict[str, Any]]:
        return lambda n: (
            {name: _randn(n, 24, device=device) for name in names}
            | {name: _randn(24, device=device) for name in weights}
        )

    cases = {}
    for gemma in ("", "gemma_"):
        norm, fused = getattr(flashinfer, f"{gemma}rmsnorm"), getattr(flashinfer, f"{gemma}fused_add_rmsnorm")
        cases[f"{gemma}rmsnorm"] = Case(norm, rows("input"), ("eps",), ("input", "weight"))
        cases[f"{gemma}rmsnorm out"] = Case(norm, rows("input", "out"), ("eps",), ("input", "weight"), ("out",))
        both = ("input", "residual")
        cases[f"{gemma}fused_add_rmsnorm"] = Case(fused, rows(*both), ("eps",), (*both, "weight"), both)
    affine = ("gemma", "beta")
    layernorm = flashinfer.layernorm
    cases["layernorm"] = Case(layernorm, rows("input", weights=affine), ("eps",), ("input", *affine))
    cases["layernorm out"] = Case(
        layernorm, rows("input", "out", weights=affine), ("eps",), ("input", *affine), ("out",)
    )
    cases["rmsnorm_backward"] = Case(
        flashinfer.rmsnorm_backward, rows("grad", "input"), differentiable=("grad", "input")
    )
    cases["layernorm_backward"] = Case(
        flashinfer.layernorm_backward, rows("grad", "input", weights=("gemma",)), differentiable=("grad", "input")
    )
    return cases


def _activation_cases(device: str) -> dict[str, Case]:
    def wide(n: int) -> dict[str, Any]:
        return dict(input=_randn(n, 48, device=device))

    cases = {}
    for name in ACTIVATIONS:
        function, backward = getattr(flashinfer, f"{name}_and_mul"), getattr(flashinfer, f"{name}_and_mul_backward")
        cases[f"{name}_and_mul"] = Case(function, wide, differentiable=("input",))
        cases[f"{name}_and_mul out"] = Case(
            function,
            lambda n: wide(n) | dict(out=_randn(n, 24, device=device)),
            differentiable=("input",),
            written=("out",),
        )
        cases[f"{name}_and_mul_backward"] = Case(
            backward, lambda n: wide(n) | dict(grad=_randn(n, 24, device=device)), differentiable=("grad", "input")
        )
    return cases


def _rope_cases(device: str) -> dict[str, Case]:
    plain = ("rope_scale", "rope_theta")
    llama31 = (*plain, "low_freq_factor", "high_freq_factor", "old_context_len")

    def heads(n: int) -> dict[str, Any]:
        return dict(q=_randn(n, 3, 16, device=device), k=_randn(n, 2, 16, device=device))

    def requests(n: int) -> dict[str, Any]:
        indptr, offsets = torch.tensor([0, 2, n], device=device), torch.tensor([100, 7], device=device)
        return heads(n) | dict(indptr=indptr, offsets=offsets)

    def given(n: int) -> dict[str, Any]:
        return heads(n) | dict(pos_ids=torch.randint(0, 300, (n,), device=device))

    def cached(n: int) -> dict[str, Any]:
        return dict(
            positions=torch.randint(0, 50, (n,), device=device),
            query=_randn(n, 48, device=device),
            key=_randn(n, 32, device=device),
            head_size=16,
            cos_sin_cache=_randn(50, 8, device=device),
        )

    cases = {}
    for end in ("", "_inplace"):
        q_and_k, query_and_key = ("q", "k"), ("query", "key")
        for name, numbers in (("apply_rope", plain), ("apply_llama31_rope", llama31)):
            cases[name + end] = Case(
                getattr(flashinfer, name + end), requests, numbers, q_and_k, q_and_k if end else ()
            )
            by_ids = f"{name}_pos_ids{end}"
            cases[by_ids] = Case(getattr(flashinfer, by_ids), given, numbers, q_and_k, q_and_k if end else ())
        by_cache = f"apply_rope_with_cos_sin_cache{end}"
        cases[by_cache] = Case(getattr(flashinfer, by_cache), cached, (), query_and_key, query_and_key if end else ())
    return cases


def _other_cases(device: str) -> dict[str, Case]:
    def tokens(n: int) -> dict[str, Any]:
        """n tokens of one request in pages of 4."""
        count = torch.arange(n, dtype=torch.int32, device=device)
        pages = (n + 3) // 4
        return dict(
            batch_indices=torch.zeros_like(count),
            positions=count,
            kv_indices=torch.arange(pages + 20, dtype=torch.int32, device=device),
            kv_indptr=torch.tensor([0, pages], dtype=torch.int32, device=device),
            kv_last_page_len=torch.tensor([n - 4 * (pages - 1)], dtype=torch.int32, device=device),
        )

    def append(n: int) -> dict[str, Any]:
        new = dict(append_key=_randn(n, 2, 8, device=device), append_value=_randn(n, 2, 8, device=device))
        return tokens(n) | new | dict(paged_kv_cache=torch.zeros(64, 2, 4, 2, 8, device=device))

    def append_mla(n: int) -> dict[str, Any]:
        new = dict(append_ckv=_randn(n, 16, device=device), append_kpe=_randn(n, 8, device=device))
        caches = dict(ckv_cache=torch.zeros(64, 4, 16, device=device), kpe_cache=torch.zeros(64, 4, 8, device=device))
        return tokens(n) | new | caches

    def lengths(n: int) -> dict[str, Any]:
        ones = torch.ones(n, dtype=torch.int32, device=device)
        return dict(append_indptr=torch.arange(n + 1, dtype=torch.int32, device=device), seq_lens=ones + 3, nnz=n)

    def last_pages(n: int) -> dict[str, Any]:
        indptr = torch.arange(n + 1, dtype=torch.int32, device=device) * 2
        return dict(kv_indptr=indptr, kv_last_page_len=torch.ones(n, dtype=torch.int32, device=device), page_size=4)

    def blocks(n: int) -> dict[str, Any]:
        indptr = torch.arange(n + 1, dtype=torch.int32, device=device)
        return dict(
            block_sparse_indices=indptr[:-1].clone(),
            block_sparse_indptr=indptr,
            vector_sparse_offsets=torch.zeros(3 * n, dtype=torch.int32, device=device),
            vector_sparse_indptr=indptr * 3,
            kv_lens=torch.full((n,), 3, dtype=torch.int32, device=device),
            stride_block=8,
            stride_n=2,
            block_size=4,
        )

    def states(count: int, *names: str) -> Callable[[int], dict[str, Any]]:
        shape = () if count == 1 else (count,)
        return lambda n: {
            name: _randn(n, *shape, 3, *(() if name.startswith("s") else (8,)), device=device) for name in names
        }

    def bits(n: int) -> dict[str, Any]:
        return dict(x=torch.randint(0, 2, (8 * n + 3,), dtype=torch.uint8, device=device))

    indptr = torch.tensor([0, 1, 5], dtype=torch.int32, device=device)
    return {
        "append_paged_kv_cache": Case(flashinfer.append_paged_kv_cache, append, written=("paged_kv_cache",)),
        "append_paged_mla_kv_cache": Case(
            flashinfer.append_paged_mla_kv_cache, append_mla, written=("ckv_cache", "kpe_cache")
        ),
        "get_batch_indices_positions": Case(flashinfer.get_batch_indices_positions, lengths),
        "get_seq_lens": Case(flashinfer.get_seq_lens, last_pages, ("page_size",)),
        "block_sparse_indices_to_vector_sparse_offsets": Case(
            flashinfer.block_sparse_indices_to_vector_sparse_offsets,
            blocks,
            ("stride_block", "stride_n", "block_size"),
            written=("vector_sparse_offsets",),
        ),
        "merge_state": Case(flashinfer.merge_state, states(1, "v_a", "s_a", "v_b", "s_b")),
        "merge_state_in_place": Case(
            flashinfer.merge_state_in_place, states(1, "v", "s", "v_other", "s_other"), written=("v", "s")
        ),
        "merge_states": Case(flashinfer.merge_states, states(4, "v", "s")),
        "packbits": Case(flashinfer.packbits, bits),
        "segment_packbits": Case(flashinfer.segment_packbits, lambda n: bits(n) | dict(indptr=indptr)),
    }
