"""What tests of prefill share."""

from __future__ import annotations

import pytest
import torch


@pytest.fixture
def small(device):
    """Arguments of modules that other tests use too."""
    return (device, torch.float16, 64)
