"""What tests of integrations share."""

from __future__ import annotations

import pytest


@pytest.fixture(scope="module")
def ours() -> str:
    """The name of our attention among those of transformers."""
    pytest.importorskip("transformers")
    from flashinfer.integrations.transformers import register

    return register()
