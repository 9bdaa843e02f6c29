"""Compiled code of decode without a plan: neither the schedule nor tiles that mask drafts spill registers."""

from __future__ import annotations

from pathlib import Path

import pytest

from ..support.device_code import assert_clean, compiled_for


@pytest.mark.slow_beyond(1)
@pytest.mark.parametrize("arch", ["90a", "80"])
def test_ptxas_spills_nothing(arch, tmp_path):
    _, messages = compiled_for(arch, Path(__file__).parent / "plan_free.cu", tmp_path)
    assert_clean(messages, "21schedule_batch_kernel", 2)
    assert_clean(messages, "16attention_kernel", 5)
