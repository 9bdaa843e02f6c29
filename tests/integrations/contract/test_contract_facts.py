"""Every fact holds: names have their state, calls bind, questions get their answer, a yes is followed by what serves."""

from __future__ import annotations

import dataclasses
import importlib.util
import sys
from types import ModuleType

import pytest
import torch

import flashinfer
from flashinfer.errors import UnsupportedError

from ...support.tree import ROOT
from . import facts
from .facts import CALLS, NAMES, PRIVATE, QUESTIONS

LATER = ("serves one host", "SageAttention", "4-bit types", "head_dim 512", "checkpoints")


@pytest.mark.parametrize("name", NAMES)
def test_a_name_has_its_state(name):
    fact = NAMES[name]
    assert facts.state_of(name.removesuffix(".*")) == fact.state
    if fact.state == "serves":
        assert not fact.reason
    else:
        assert fact.reason


@pytest.mark.parametrize("name", [name for name, fact in NAMES.items() if fact.state == "raises"])
def test_stubs_raise_with_the_reason(name):
    with pytest.raises(UnsupportedError, match=r"needs .*, which this library does not have; use "):
        facts.find(name)(1, key=2)


@pytest.mark.parametrize("form", [form for form in CALLS if not form.elsewhere], ids=lambda form: form.name)
def test_a_call_binds(form):
    known = facts.known(form.name)
    assert known is not None and known.state == "serves"
    assert facts.refusal(form.name, form.positional, form.keywords, facts.is_method(form.name)) is None


@pytest.mark.parametrize("question", QUESTIONS, ids=lambda question: f"{question.engine}: {question.capability}")
def test_a_question_gets_its_answer(question):
    there = [name for name in question.asked if facts.is_asked(name)]
    assert ("yes" if len(there) == len(question.asked) else "no") == question.answer, there
    if question.answer == "no":
        assert not question.calls
        missing = [facts.known(name.partition("(")[0]) for name in question.asked if name not in there]
        assert all(fact is not None for fact in missing)
    forms = {form.name for form in CALLS}
    for name in question.calls:
        assert facts.state_of(name) == "serves" and name in forms


@pytest.mark.parametrize("name", PRIVATE)
def test_a_wrapper_has_the_attribute(name, device):
    if name in ("_custom_mask_buf", "_mask_indptr_buf", "_max_total_num_rows", "_qo_indptr_buf"):
        kinds = [flashinfer.BatchPrefillWithPagedKVCacheWrapper]
    else:
        kinds = [flashinfer.BatchPrefillWithPagedKVCacheWrapper, flashinfer.BatchDecodeWithPagedKVCacheWrapper]
    for kind in kinds:
        assert hasattr(kind(torch.empty(1 << 20, dtype=torch.uint8, device=device)), name)


def test_absent_names_have_a_reason():
    """A missing capability is absent, or a stub that an engine imports without a guard."""
    reasons = {fact.reason for fact in NAMES.values()}
    for subject in LATER[:3]:
        assert any(subject in reason for reason in reasons), subject


def test_stubs_of_missing_capabilities_are_imported_without_a_guard():
    for fact in NAMES.values():
        if fact.state == "raises" and any(subject in fact.reason for subject in LATER):
            assert "without a guard" in fact.reason, fact.name


# The program that reads an engine

ENGINE = {
    "engine/__init__.py": "",
    "engine/compat.py": """
import importlib, inspect
def lazy_import(module, name):
    return getattr(importlib.import_module(module), name, None)
softmax = lazy_import("flashinfer.sampling", "softmax")
def has_new():
    return all(hasattr(importlib.import_module(m), n) for m, n in [("flashinfer.comm", "NewThing"), ("flashinfer", "rmsnorm")])
""",
    "engine/layer.py": """
import flashinfer, inspect
import flashinfer.comm as fi_comm
from typing import TYPE_CHECKING
from engine.compat import softmax as fast_softmax
from flashinfer import BatchDecodeWithPagedKVCacheWrapper, top_k as choose
if TYPE_CHECKING:
    from flashinfer import OnlyForTypes
try:
    from flashinfer.newer import guarded_name
except ImportError:
    guarded_name = None
class Layer:
    def __init__(self, workspace):
        self.wrapper = BatchDecodeWithPagedKVCacheWrapper(workspace, "NHD", novel=True)
        self.pick = choose
        assert self.wrapper._novel_attribute is None
    def forward(self, x):
        self.wrapper.plan(indptr=1, unheard_of=2)
        self.pick(x, 3, sorted=True, deterministic=True)
        self.pick(x, 3, surprising=True)
        fast_softmax(x, hotter=1)
        if "group" in inspect.signature(flashinfer.top_k).parameters or hasattr(fi_comm, "allreduce_fusion"):
            return flashinfer.unheard_of_function(x)
""",
}


@pytest.fixture
def program(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    return script("engine_contract", monkeypatch)


def script(name: str, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, ROOT / "scripts" / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, name, module)  # dataclasses look for it
    spec.loader.exec_module(module)
    return module


def test_an_engine_of_tomorrow_is_reported(program, tmp_path, capsys):
    for file, text in ENGINE.items():
        (tmp_path / file).parent.mkdir(exist_ok=True)
        (tmp_path / file).write_text(text)
    assert program.main([str(tmp_path)]) == 1
    lines = capsys.readouterr().out
    for text in (
        "unknown: question flashinfer.comm.NewThing",
        "unknown: import flashinfer.newer.guarded_name (guarded)",
        "unknown: attribute flashinfer.unheard_of_function",
        "unknown: question flashinfer.top_k parameter group",
        "unknown: private flashinfer.wrapper._novel_attribute",
        "refused: call flashinfer.BatchDecodeWithPagedKVCacheWrapper(_, _, novel=)",
        "refused: method flashinfer.BatchDecodeWithPagedKVCacheWrapper.plan(indptr=, unheard_of=)",
        "refused: call flashinfer.top_k(_, _, surprising=)",
        "refused: call flashinfer.sampling.softmax(_, hotter=)",
    ):
        assert text in lines, text
    assert "OnlyForTypes" not in lines and "allreduce_fusion" not in lines and "deterministic" not in lines


def test_an_engine_that_asks_for_nothing_new_is_silent(program, tmp_path, capsys):
    (tmp_path / "layer.py").write_text(
        "from flashinfer import top_k\ntry:\n    from flashinfer.comm import allreduce_fusion\nexcept ImportError:\n"
        "    pass\ntop_k(x, 3, sorted=True, deterministic=True)\n"
    )
    assert program.main([str(tmp_path)]) == 0
    assert capsys.readouterr().out == ""
    assert program.main(["--all", str(tmp_path)]) == 0
    assert "call flashinfer.top_k(_, _, sorted=, deterministic=)" in capsys.readouterr().out


def test_lost_names_are_reported(program, tmp_path, capsys, monkeypatch):
    """A name that the facts call served, and a known call whose keyword is gone."""
    (tmp_path / "layer.py").write_text(
        "from flashinfer import top_k\nfrom flashinfer.topk import TopKTieBreak, top_k_ragged_transform\n"
        "top_k(x, 3, sorted=True, deterministic=True)\n"
    )
    monkeypatch.setattr(flashinfer, "top_k", lambda input, k, sorted=False: None, raising=False)
    monkeypatch.delattr(flashinfer.topk, "top_k_ragged_transform")
    assert program.main([str(tmp_path)]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("refused: call flashinfer.top_k(_, _, sorted=, deterministic=)")
    assert [line.split("  ")[0] for line in lines[1:]] == [
        "unknown: import flashinfer.topk.TopKTieBreak", "missing: import flashinfer.topk.top_k_ragged_transform"
    ]  # fmt: skip


def test_the_page_follows_the_facts(monkeypatch):
    """``python scripts/engines_table.py`` writes it anew."""
    table = script("engines_table", monkeypatch)
    assert table.main(["--check"]) == 0, "run python scripts/engines_table.py and commit docs/engines.md"
    fact = dataclasses.replace(NAMES["top_k"], state="absent", reason="x")
    monkeypatch.setitem(table.NAMES, "top_k", fact)
    assert table.main(["--check"]) == 1
