"""Exceptions that callers can catch.

Invalid arguments of a call raise ``ValueError`` or ``TypeError``. Failures of the library itself (building,
finding, loading a module) raise a subclass of :class:`FlashInferError`.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from traceback import FrameSummary


class FlashInferError(RuntimeError):
    """Base of every error that is not an invalid argument. All can be pickled, because workers send them."""

    def __reduce__(self) -> tuple[Any, ...]:
        # Unpickling passes only the message, but the constructors below take other arguments.
        return _restore, (type(self), self.args), self.__dict__


def _restore(kind: type[FlashInferError], arguments: tuple[Any, ...]) -> FlashInferError:
    error = kind.__new__(kind)
    error.args = arguments
    return error


class EnvironmentValueError(FlashInferError, ValueError):
    """An environment variable has an invalid value."""

    def __init__(self, name: str, value: str, wanted: str) -> None:
        super().__init__(f"{name}={value!r}: wanted {wanted}")
        self.name = name


class WorkspaceError(FlashInferError):
    """No directory can hold the workspace."""


class ToolchainError(FlashInferError):
    """A tool that a build needs is missing or does not answer."""


class JitFrozenError(FlashInferError):
    """A module is missing, and ``flashinfer.jit.freeze()`` or ``FLASHINFER_DISABLE_JIT`` forbids a build.

    Attributes: ``name`` of the module, ``reason`` of the miss, ``stack`` of the caller with the innermost
    frame last.
    """

    def __init__(self, name: str, by: str, reason: str, call: str, stack: tuple[FrameSummary, ...]) -> None:
        self.name, self.reason, self.stack = name, reason, stack
        lines = [f"module {name!r} is not built and {by} forbids building it: {reason}"]
        if stack:
            lines.append(f"  requested by {call}(), called at")
            lines += [f"    {frame.filename}:{frame.lineno} in {frame.name}: {frame.line}" for frame in stack[-12:]]
        super().__init__("\n".join(lines))


class ArtifactError(FlashInferError):
    """An artifact is damaged, or other users can write it."""


class ModuleLoadError(FlashInferError):
    """A verified artifact could not be loaded into this process."""


class CaptureError(FlashInferError):
    """A module would have to be loaded or built, or a plan made, during the capture of a CUDA graph.

    The error is raised before anything that would end the capture. The operations captured so far stay in it.
    """


class UnsupportedError(FlashInferError, NotImplementedError):
    """The called function of a newer FlashInfer needs hardware that this library has no kernels for.

    The message names the hardware and the alternative here.
    """


class GradientError(FlashInferError, NotImplementedError):
    """No operator of this library computes the requested gradient."""


class DependencyError(FlashInferError, ImportError):
    """An optional library is missing or too old.

    Args:
        library: the distribution that is needed.
        reason: the import error, or the version found and the version needed.
        extra: the extra of this project that installs it. The message says that it comes from the checkout.

    Attribute: ``library``.
    """

    def __init__(self, library: str, reason: str, extra: str | None = None) -> None:
        command = (
            f"pip install {library}" if extra is None else f"pip install -e '.[{extra}]' in this library's checkout"
        )
        super().__init__(f"{library}: {reason}: {command}")
        self.library = library


class ClusterError(FlashInferError):
    """A cluster cannot run the builds: there is no scheduler, or no worker has the tools."""


class GroupError(FlashInferError):
    """Ranks of a process group need different modules, or a rank does not answer.

    Attribute: ``ranks``, the ranks that disagree or do not answer.
    """

    def __init__(self, message: str, ranks: tuple[int, ...] = ()) -> None:
        super().__init__(message)
        self.ranks = ranks


class BuildError(FlashInferError):
    """The build of a module failed.

    Attributes: ``name`` of the module, the failed ``command``, its ``output``, and the complete ``log``.
    """

    def __init__(self, name: str, reason: str, command: str = "", output: str = "", log: Path | None = None) -> None:
        self.name, self.reason = name, reason
        self.command, self.output, self.log = command, output, log
        lines = [f"building module {name!r} failed: {reason}"]
        if command:
            lines.append(f"  command: {command}")
        if log is not None:
            lines.append(f"  log: {log}")
        # The first error is repeated in the last line, because readers of a long serving log look there.
        text = output.strip().splitlines()
        lines += [f"  | {line}" for line in text[:12]]
        if len(text) > 12:
            lines.append(f"  | ... {len(text) - 12} more lines in the log")
        if len(lines) > 1:
            lines.append(f"  first error: {reason}")
        super().__init__("\n".join(lines))


class WorkspaceBuildError(BuildError, WorkspaceError):
    """A build failed because a file of the workspace could not be read or written."""


class ReentrantBuildError(BuildError):
    """A thread requested a module that the same thread is building or loading, and would wait for itself."""

    def __init__(self, name: str) -> None:
        super().__init__(
            name,
            "this thread is already building it, and requested it again:"
            " in a signal handler, a subscriber to events, or a file imported instead of a standard module",
        )


class JitTimeoutError(BuildError):
    """Another process did not finish a build within ``FLASHINFER_JIT_TIMEOUT``.

    ``reason`` names the process.
    """
