"""Where :class:`flashinfer.comm.Mapping` stands in FlashInfer."""

from __future__ import annotations

from . import Mapping as Mapping  # type: ignore[attr-defined] # declared by name

__all__ = ["Mapping"]
