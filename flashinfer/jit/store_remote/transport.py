"""How bytes are read from a URL and written to it: one request each, and nothing is ever listed.

Plain files and HTTP need no package, and fsspec's own would do less: its ``file`` has no atomic write, its ``http`` no
conditional one. Everything else is fsspec's, ``s3://`` and ``gs://`` by the packages that it names.
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
PAUSES = (0.1, 0.4)  # seconds before a server that is busy is asked again, more or less
FORGET = 60.0  # seconds after which an object that was not there is asked for again
BUSY = (429, 500, 502, 503, 504)


class _Files:
    def __init__(self, url: str) -> None:
        self.root = Path(urllib.parse.unquote(url.removeprefix("file://")))

    def get(self, name: str, seconds: float) -> bytes:
        with open(self.root / name, "rb") as file:
            return file.read(LARGEST)

    def put(self, name: str, data: bytes, replace: bool, seconds: float) -> None:
        place = self.root / name
        trust.make_directories(place.parent)
        handle, private = tempfile.mkstemp(dir=place.parent, prefix=".")  # its mode is set below, whatever the umask
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            os.chmod(private, 0o644)
            os.replace(private, place) if replace else os.link(private, place)
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
        except ImportError as err:  # in which fsspec says which package reads such a URL
            needed = "s3fs" if url.startswith("s3") else "gcsfs" if url.startswith("g") else url.partition(":")[0]
            raise DependencyError(needed, f"{url} needs it ({err})") from None
        except ValueError as err:
            raise EnvironmentValueError("FLASHINFER_STORE", url, f"a protocol that fsspec knows ({err})") from None

    def get(self, name: str, seconds: float) -> bytes:
        # Of a file without bounds s3fs asks for the size first, and lists where there is none.
        data: bytes = self.fs.cat_file(f"{self.root}/{name}", start=0, end=LARGEST)
        return data

    def put(self, name: str, data: bytes, replace: bool, seconds: float) -> None:
        self.fs.pipe_file(f"{self.root}/{name}", data, mode="overwrite" if replace else "create")


def _status(err: BaseException) -> int:
    """The HTTP status that an error stands for, of whichever library; 0 where it stands for none."""
    response = getattr(err.__cause__, "response", None) or {}  # botocore's, below s3fs's
    codes = [getattr(err, name, 0) for name in ("code", "status")]
    with suppress(AttributeError, KeyError, TypeError):
        codes.append(response["ResponseMetadata"]["HTTPStatusCode"])
    return next((code for code in codes if isinstance(code, int) and code), 0)


class Store:
    """A store of ``FLASHINFER_STORE`` as this process knows it: what it may still cost, and what it did not have."""

    def __init__(self, url: str) -> None:
        self.signed, self.url = not url.startswith("unsigned+"), url.removeprefix("unsigned+").rstrip("/")
        self.left = env.STORE_TIMEOUT.get()
        self.off = False
        self._transport: Any = None
        self._said = set[str]()
        self._missed = dict[str, float]()

    def get(self, name: str, again: bool = False) -> bytes | None:
        """An object; ``None`` where there is none, or the store does not answer. ``again``: what was not there may be now."""
        if not again and time.monotonic() - self._missed.get(name, -FORGET) < FORGET:
            return None
        data: bytes | None = self._ask(lambda seconds: self._open().get(name, seconds), None)
        if data is None:
            self.forget(name)
        return data

    def forget(self, name: str) -> None:
        """Take an object for missing, for a minute."""
        self._missed[name] = time.monotonic()

    def put(self, name: str, data: bytes, replace: bool = False) -> str:
        """Write an object: ``written``, ``there already``, or ``""`` where the store does not take it."""
        self._missed.pop(name, None)
        wrote: str = self._ask(lambda seconds: self._open().put(name, data, replace, seconds) or "written", "")
        return wrote

    def complain(self, text: str) -> None:
        """Say something of this store, once."""
        if text not in self._said:
            self._said.add(text)
            say(f"store {self.url}: {text}")

    def prepare(self) -> None:
        """Import what reads the store. A failure is told by the first request."""
        if not self.url.startswith(("file://", "http")):
            with suppress(Exception):
                import fsspec

                fsspec.get_filesystem_class(self.url.partition("://")[0])

    def _open(self) -> Any:
        if self._transport is None:
            kind = _Files if self.url.startswith("file://") else _Http if self.url.startswith("http") else _Fsspec
            self._transport = kind(self.url)
        return self._transport

    def _ask(self, request: Callable[[float], Any], nothing: Any) -> Any:
        """What a request gives, or ``nothing``. Only what fails counts against the store's time."""
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
                lost = not status and not cut and _is_of_the_network(err)
            if self.left <= 0 or lost:
                was, self.off = self.off, True
                if not was:  # of several threads one says so
                    self.complain(f"{reason}; it is left alone from now on")
            elif not pause or not (status in BUSY or cut):
                self.complain(reason)
                break
            else:
                pause = min(pause * random.uniform(0.5, 1.5), self.left)
                self.left -= pause
                time.sleep(pause)
        return nothing


def _is_of_the_network(err: Exception) -> bool:
    """Whether nobody answers: refused, silent, unknown, without credentials. Not a full disk, nor a forbidden file."""
    return isinstance(err, (urllib.error.URLError, TimeoutError, ConnectionError)) or not isinstance(err, OSError)


def _within(seconds: float, request: Callable[[float], Any]) -> Any:
    """What a request gives in that time, whatever it waits for; one that hangs is left to a thread that nobody joins."""
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
