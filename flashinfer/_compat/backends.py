"""Questions that FlashInfer's callers ask of a function: which backends, which GPUs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from .._ops.numbers import whole

F = TypeVar("F", bound=Callable[..., Any])
OLDEST = 80  # least compute capability, 10 * major + minor, of the CUDA modules


def serves_backends(*backends: str) -> Callable[[F], F]:
    """Attach the two questions to a function that has one implementation for every backend.

    The function gets ``is_compute_capability_supported(cc)`` and ``is_backend_supported(backend, cc=None)``. ``cc`` is
    ``10 * major + minor``. An answer of True means that a call with this ``backend`` computes, by this library's kernel.

    Args:
        backends: accepted names: FlashInfer's for the kernels that it has on SM80 to SM90. ``"auto"`` is always one.
    """

    def attach(function: F) -> F:
        def is_compute_capability_supported(cc: int) -> bool:
            return whole("is_compute_capability_supported", "cc", cc) >= OLDEST

        def is_backend_supported(backend: str, cc: int | None = None) -> bool:
            supported = cc is None or whole("is_backend_supported", "cc", cc) >= OLDEST
            return supported and backend in ("auto", *backends)

        vars(function).update(
            is_compute_capability_supported=is_compute_capability_supported,
            is_backend_supported=is_backend_supported,
        )
        return function

    return attach
