"""Exceptions a caller can catch.

A mistake in the arguments of a call raises ``ValueError`` or ``TypeError``; everything that goes wrong on
the library's own side (building, finding, loading a module) raises a subclass of :class:`FlashInferError`.
"""

from __future__ import annotations

from pathlib import Path


class FlashInferError(RuntimeError):
    """Base of every error that is not a mistake in the arguments of a call."""


class EnvironmentValueError(FlashInferError, ValueError):
    """An environment variable holds a value that it cannot take."""

    def __init__(self, name: str, value: str, wanted: str) -> None:
        super().__init__(f"{name}={value!r}: wanted {wanted}")
        self.name = name


class ToolchainError(FlashInferError):
    """A tool that a build needs is missing or does not answer."""


class JitDisabledError(FlashInferError):
    """A module is missing and ``FLASHINFER_DISABLE_JIT`` forbids building it."""


class ModuleLoadError(FlashInferError):
    """A verified artifact could not be loaded into this process."""


class GradientError(FlashInferError, NotImplementedError):
    """A gradient was asked for that no operator of ours computes."""


class BuildError(FlashInferError):
    """A module did not build.

    Attributes: ``name`` of the module, ``command`` that failed, ``output`` of it, ``log`` with everything.
    """

    def __init__(self, name: str, reason: str, command: str = "", output: str = "", log: Path | None = None) -> None:
        self.name, self.reason, self.command, self.output, self.log = name, reason, command, output, log
        lines = [f"building module {name!r} failed: {reason}"]
        if command:
            lines.append(f"  command: {command}")
        if log is not None:
            lines.append(f"  log: {log}")
        # The first error stays within the last lines, where a reader of a long serving log looks.
        text = output.strip().splitlines()
        lines += [f"  | {line}" for line in text[:12]]
        if len(text) > 12:
            lines.append(f"  | ... {len(text) - 12} more lines in the log")
        lines.append(f"  first error: {reason}")
        super().__init__("\n".join(lines))
