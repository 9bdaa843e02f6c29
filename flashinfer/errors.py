"""Exceptions a caller can catch.

A mistake in the arguments of a call raises ``ValueError`` or ``TypeError``; everything that goes wrong on
the library's own side (building, finding, loading a module) raises a subclass of :class:`FlashInferError`.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from traceback import FrameSummary


class FlashInferError(RuntimeError):
    """Base of every error that is not a mistake in the arguments of a call. All can be pickled: workers send them."""

    def __reduce__(self) -> tuple[Any, ...]:
        # An exception is made again from its message, which is not what the constructors below take.
        return _again, (type(self), self.args), self.__dict__


def _again(kind: type[FlashInferError], arguments: tuple[Any, ...]) -> FlashInferError:
    error = kind.__new__(kind)
    error.args = arguments
    return error


class EnvironmentValueError(FlashInferError, ValueError):
    """An environment variable holds a value that it cannot take."""

    def __init__(self, name: str, value: str, wanted: str) -> None:
        super().__init__(f"{name}={value!r}: wanted {wanted}")
        self.name = name


class WorkspaceError(FlashInferError):
    """There is no directory in which modules could be built."""


class ToolchainError(FlashInferError):
    """A tool that a build needs is missing or does not answer."""


class JitFrozenError(FlashInferError):
    """A module is missing, and ``flashinfer.jit.freeze()`` or ``FLASHINFER_DISABLE_JIT`` forbids building it.

    Attributes: ``name`` of the module, ``reason`` of the miss, ``stack`` of the caller, innermost frame last.
    """

    def __init__(self, name: str, by: str, reason: str, call: str, stack: tuple[FrameSummary, ...]) -> None:
        self.name, self.reason, self.stack = name, reason, stack
        lines = [f"module {name!r} is not built and {by} forbids building it: {reason}"]
        if stack:
            lines.append(f"  asked for by {call}(), called at")
            lines += [f"    {frame.filename}:{frame.lineno} in {frame.name}: {frame.line}" for frame in stack[-12:]]
        super().__init__("\n".join(lines))


class ArtifactError(FlashInferError):
    """An artifact is damaged, or others can write it."""


class ModuleLoadError(FlashInferError):
    """A verified artifact could not be loaded into this process."""


class CaptureError(FlashInferError):
    """While a CUDA graph is being captured, a module would have to be loaded or built, or a plan made.

    It is raised before anything is done that ends the capture: what was captured before stays in it.
    """


class UnsupportedError(FlashInferError, NotImplementedError):
    """A name of newer FlashInfer was called whose hardware this library has no kernels for.

    The message says which hardware, and what serves here instead.
    """


class GradientError(FlashInferError, NotImplementedError):
    """A gradient was asked for that no operator of ours computes."""


class DependencyError(FlashInferError, ImportError):
    """An optional library is missing or too old.

    Args:
        library: the distribution that is needed.
        reason: the import error, or the version found and the version wanted.
        extra: the extra of this project that installs it; the message says that it comes from the checkout.

    Attribute: ``library``.
    """

    def __init__(self, library: str, reason: str, extra: str | None = None) -> None:
        command = (
            f"pip install {library}" if extra is None else f"pip install -e '.[{extra}]' in this library's checkout"
        )
        super().__init__(f"{library}: {reason}: {command}")
        self.library = library


class ClusterError(FlashInferError):
    """A cluster cannot build what it was asked for: there is no scheduler, or no worker that has the tools."""


class GroupError(FlashInferError):
    """Ranks of a process group want different modules, or one of them does not answer.

    Attribute: ``ranks`` that it is about.
    """

    def __init__(self, message: str, ranks: tuple[int, ...] = ()) -> None:
        super().__init__(message)
        self.ranks = ranks


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
        if len(lines) > 1:
            lines.append(f"  first error: {reason}")
        super().__init__("\n".join(lines))


class WorkspaceBuildError(BuildError, WorkspaceError):
    """A module did not build because a file of the workspace could not be read or written."""


class ReentrantBuildError(BuildError):
    """A module was asked for by the thread that is building or loading it, which would wait for itself."""

    def __init__(self, name: str) -> None:
        super().__init__(
            name,
            "this thread is building it already, and was asked for it again meanwhile:"
            " by a signal handler, a subscriber to events, or a file that was imported in place of a standard module",
        )


class JitTimeoutError(BuildError):
    """Another process did not finish building a module within ``FLASHINFER_JIT_TIMEOUT``; ``reason`` says which."""
