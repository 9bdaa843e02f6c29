"""Fixtures that tests of prefill share."""

from __future__ import annotations

import pytest
import torch


@pytest.fixture
def small(device):
    """Return arguments of modules that other tests use too."""
    return (device, torch.float16, 64)
