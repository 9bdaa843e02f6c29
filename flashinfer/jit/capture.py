"""Checks for work that a CUDA graph capture does not allow. CUDA's own error would end the capture."""

from __future__ import annotations

import sys

from ..errors import CaptureError

WARM_UP = "call flashinfer.warmup() with this function, or the function itself, once"


def refuse_capture(what: str, instead: str) -> None:
    """Raise if this thread's stream is being captured. Call it before work that is done only once.

    Args:
        what: a sentence that names the forbidden work.
        instead: the call to make before the capture.

    Raises:
        CaptureError: the stream is being captured. The capture continues with the operations captured so far.
    """
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing():
        raise CaptureError(
            f"{what}, which would invalidate the CUDA graph that is being captured: {instead} before the capture"
        )
