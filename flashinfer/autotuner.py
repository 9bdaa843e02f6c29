"""FlashInfer's tuner of kernels. This library tunes nothing at run time: plans select kernels by sizes.

Engines wrap their warm-up in :func:`autotune` or :func:`autotune_v2` and share files of tactics between
ranks. Contexts run their block, files hold only the environment, and ranks never differ.
"""

from __future__ import annotations

from ._compat.autotuner import (
    AutoTuner,
    _collect_metadata,  # noqa: F401  # SGLang imports it
    autotune,
    autotune_v2,
    autotune_v2_reload,
    get_autotune_process_group,
    set_autotune_process_group,
)

__all__ = [
    "AutoTuner",
    "autotune",
    "autotune_v2",
    "autotune_v2_reload",
    "get_autotune_process_group",
    "set_autotune_process_group",
]
