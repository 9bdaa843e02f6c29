"""Transports of stores: one request per object, and nothing is ever listed.

Plain files and HTTP need no package. fsspec's own transports would do less: its ``file`` has no atomic write,
its ``http`` no conditional one. All other URLs use fsspec: ``s3://`` and ``gs://`` with the packages that it
names.
"""

from __future__ import annotations

import http.client
import os
import random
import tempfile
import threading
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any

from ... import env
from ...errors import DependencyError, EnvironmentValueError
from ..machine import trust
from ..report import say

LARGEST = 1 << 30  # bytes of an object
PAUSES = (0.1, 0.4)  # seconds, randomized, before a retry of a busy server
MISS_SECONDS = 60.0  # a missing object is requested again after this time
BUSY = (429, 500, 502, 503, 504)


class _Files:
    def __init__(self, url: str) -> None:
        self.root = Path(urllib.parse.unquote(url.removeprefix("file://")))

    def get(self, name: str, seconds: float) -> bytes:
        with open(self.root / name, "rb") as file:
            return file.read(LARGEST)

    def put(self, name: str, data: bytes, replace: bool, seconds: float) -> None:
        path = self.root / name
        trust.make_directories(path.parent)
        handle, private = tempfile.mkstemp(dir=path.parent, prefix=".")  # its mode is set below
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            os.chmod(private, 0o644)
            os.replace(private, path) if replace else os.link(private, path)
        finally:
            Path(private).unlink(missing_ok=True)


class _Http:
    def __init__(self, url: str) -> None:
        self.url = url

    def get(self, name: str, seconds: float) -> bytes:
        with urllib.request.urlopen(f"{self.url}/{urllib.parse.quote(name)}", timeout=seconds) as response:
            data: bytes = response.read(LARGEST)
            return data

    def put(self, name: str, data: bytes, replace: bool, seconds: float) -> None:
        headers = {"Content-Type": "application/octet-stream"} | ({} if replace else {"If-None-Match": "*"})
        url = f"{self.url}/{urllib.parse.quote(name)}"
        request = urllib.request.Request(url, data, headers, method="PUT")
        with urllib.request.urlopen(request, timeout=seconds):
            pass


class _Fsspec:
    def __init__(self, url: str) -> None:
        try:
            import fsspec
        except ImportError:
            raise DependencyError("fsspec", f"{url} needs it", "store") from None
        try:
            self.fs, self.root = fsspec.core.url_to_fs(url)
        except ImportError as err:  # its text names the package that reads such a URL
            needed = "s3fs" if url.startswith("s3") else "gcsfs" if url.startswith("g") else url.partition(":")[0]
            raise DependencyError(needed, f"{url} needs it ({err})") from None
        except ValueError as err:
            raise EnvironmentValueError("FLASHINFER_STORE", url, f"a protocol that fsspec knows ({err})") from None

    def get(self, name: str, seconds: float) -> bytes:
        # Without bounds, s3fs asks for the size first, and lists the bucket if there is no such file.
        data: bytes = self.fs.cat_file(f"{self.root}/{name}", start=0, end=LARGEST)
        return data

    def put(self, name: str, data: bytes, replace: bool, seconds: float) -> None:
        self.fs.pipe_file(f"{self.root}/{name}", data, mode="overwrite" if replace else "create")


def _status(err: BaseException) -> int:
    """Return the HTTP status of an error of any library, or 0."""
    response = getattr(err.__cause__, "response", None) or {}  # botocore's, below s3fs's
    codes = [getattr(err, name, 0) for name in ("code", "status")]
    with suppress(AttributeError, KeyError, TypeError):
        codes.append(response["ResponseMetadata"]["HTTPStatusCode"])
    return next((code for code in codes if isinstance(code, int) and code), 0)


class Store:
    """A store of ``FLASHINFER_STORE`` with its remaining time in this process and its known misses."""

    def __init__(self, url: str) -> None:
        self.signed, self.url = not url.startswith("unsigned+"), url.removeprefix("unsigned+").rstrip("/")
        self.left = env.STORE_TIMEOUT.get()
        self.off = False
        self._transport: Any = None
        self._reported = set[str]()
        self._missed = dict[str, float]()

    def get(self, name: str, ignore_misses: bool = False) -> bytes | None:
        """Return an object, or ``None`` if it is missing or the store does not answer.

        ``ignore_misses``: send the request even if the object was missing a moment ago.
        """
        if not ignore_misses and time.monotonic() - self._missed.get(name, -MISS_SECONDS) < MISS_SECONDS:
            return None
        data: bytes | None = self._ask(lambda seconds: self._open().get(name, seconds), None)
        if data is None:
            self.record_miss(name)
        return data

    def record_miss(self, name: str) -> None:
        """Treat an object as missing for a minute."""
        self._missed[name] = time.monotonic()

    def put(self, name: str, data: bytes, replace: bool = False) -> str:
        """Write an object. Return ``written``, ``there already``, or ``""`` if the store rejects it."""
        self._missed.pop(name, None)
        wrote: str = self._ask(lambda seconds: self._open().put(name, data, replace, seconds) or "written", "")
        return wrote

    def complain(self, text: str) -> None:
        """Report a problem of this store, once."""
        if text not in self._reported:
            self._reported.add(text)
            say(f"store {self.url}: {text}")

    def prepare(self) -> None:
        """Import the packages that read the store. The first request reports a failure."""
        if not self.url.startswith(("file://", "http")):
            with suppress(Exception):
                import fsspec

                fsspec.get_filesystem_class(self.url.partition("://")[0])

    def _open(self) -> Any:
        if self._transport is None:
            kind = _Files if self.url.startswith("file://") else _Http if self.url.startswith("http") else _Fsspec
            self._transport = kind(self.url)
        return self._transport

    def _ask(self, request: Callable[[float], Any], default: Any) -> Any:
        """Return the result of a request, or ``default``. Only failures count against the store's time."""
        for pause in (*PAUSES, 0.0):
            if self.off:
                break
            began = time.monotonic()
            try:
                return _within(self.left, request)
            except (DependencyError, EnvironmentValueError):
                raise
            except Exception as err:
                status = _status(err)
                if isinstance(err, urllib.error.HTTPError):
                    err.close()
                if isinstance(err, FileNotFoundError) or status in (404, 410):
                    break
                if isinstance(err, FileExistsError) or status in (409, 412):
                    return "there already"
                self.left -= time.monotonic() - began
                reason = f"{type(err).__name__}: {err}" if str(err) else type(err).__name__
                cut = isinstance(err, (ConnectionResetError, http.client.HTTPException))
                lost = not status and not cut and _is_unreachable(err)
            if self.left <= 0 or lost:
                was, self.off = self.off, True
                if not was:  # only one of several threads reports it
                    self.complain(f"{reason}; it is not used from now on")
            elif not pause or not (status in BUSY or cut):
                self.complain(reason)
                break
            else:
                pause = min(pause * random.uniform(0.5, 1.5), self.left)
                self.left -= pause
                time.sleep(pause)
        return default


def _is_unreachable(err: Exception) -> bool:
    """Return whether the server cannot be reached: connection refused, no answer, unknown host, no credentials.

    Errors of a local disk do not count.
    """
    return isinstance(err, (urllib.error.URLError, TimeoutError, ConnectionError)) or not isinstance(err, OSError)


def _within(seconds: float, request: Callable[[float], Any]) -> Any:
    """Return the result of a request within ``seconds``. A request that hangs is left to a daemon thread."""
    answers = SimpleQueue[tuple[Any, BaseException | None]]()

    def run() -> None:
        try:
            answers.put((request(seconds), None))
        except BaseException as err:
            answers.put((None, err))

    threading.Thread(target=run, name="flashinfer-store", daemon=True).start()
    try:
        value, err = answers.get(timeout=seconds)
    except Empty:
        raise TimeoutError(f"no answer within {seconds:.1f} s") from None
    if err is not None:
        raise err
    return value
