"""What cannot be done while a CUDA graph is being captured is refused before CUDA refuses it, which ends the capture."""

from __future__ import annotations

import sys

from ..errors import CaptureError

WARM_UP = "call flashinfer.warmup() with this function, or the function itself, once"


def refuse_capture(what: str, instead: str) -> None:
    """Raise where this thread's stream is being captured; to be called where something is done for the first time.

    Args:
        what: a sentence about what cannot be done.
        instead: what to do before the capture.

    Raises:
        CaptureError: the capture goes on, and what was captured before stays in it.
    """
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing():
        raise CaptureError(
            f"{what}, which would spoil the CUDA graph that is being captured: {instead} before the capture"
        )
