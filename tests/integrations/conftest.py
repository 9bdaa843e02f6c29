"""Fixtures of the integration tests."""

from __future__ import annotations

import pytest


@pytest.fixture(scope="module")
def ours() -> str:
    """Return the name of our attention in transformers."""
    pytest.importorskip("transformers")
    from flashinfer.integrations.transformers import register

    return register()
