"""A small object store over HTTP that S3 clients understand and that counts requests."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

NO_SUCH = b'<?xml version="1.0"?><Error><Code>NoSuchKey</Code><Message>none</Message></Error>'
THERE = b'<?xml version="1.0"?><Error><Code>PreconditionFailed</Code><Message>there</Message></Error>'


class ObjectStore:
    """``objects``: path -> bytes. ``asked``: method and path of each request.

    ``fault(method, path)``: a status to answer with, seconds of silence (a float), or ``None``.
    """

    def __init__(self) -> None:
        self.objects = dict[str, bytes]()
        self.asked = list[tuple[str, str]]()
        self.fault: Callable[[str, str], int | float | None] = lambda method, path: None
        self.url = ""

    def count(self, method: str = "GET", part: str = "") -> int:
        return sum(one == method and part in path for one, path in self.asked)

    @property
    def listings(self) -> list[tuple[str, str]]:
        """Return requests that neither read nor write a single object."""
        return [(method, path) for method, path in self.asked if method not in ("GET", "PUT") or "?" in path]


def _handler(store: ObjectStore) -> type[BaseHTTPRequestHandler]:
    guard = threading.Lock()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def answer(self, status: int, data: bytes = b"") -> None:
            self.send_response(status)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(data)

        def handle_one(self) -> None:
            size = int(self.headers.get("Content-Length") or 0)
            data = self.rfile.read(size)
            # SDKs send chunks, each after its size, with trailers.
            if "aws-chunked" in (self.headers.get("Content-Encoding") or ""):
                data = unchunked(data)
            with guard:
                store.asked.append((self.command, self.path))
            fault = store.fault(self.command, self.path)
            if isinstance(fault, float):
                time.sleep(fault)
                self.close_connection = True
                return
            if fault is not None:
                self.answer(fault)
            elif self.command == "PUT":
                with guard:
                    there = self.path in store.objects and self.headers.get("If-None-Match") == "*"
                    if not there:
                        store.objects[self.path] = data
                self.answer(412, THERE) if there else self.answer(200)
            elif (found := store.objects.get(self.path)) is None:
                self.answer(404, NO_SUCH)
            else:
                self.answer(206 if self.headers.get("Range") else 200, found)

        do_GET = do_PUT = do_HEAD = do_POST = do_DELETE = handle_one

        def log_message(self, *words: object) -> None:
            pass

    return Handler


def unchunked(data: bytes) -> bytes:
    result = b""
    while data:
        size, _, data = data.partition(b"\r\n")
        if not (length := int(size.split(b";")[0], 16)):
            break
        result, data = result + data[:length], data[length + 2 :]
    return result


class _Server(ThreadingHTTPServer):
    request_queue_size = 256
    daemon_threads = True

    def handle_error(self, *words: object) -> None:
        pass  # a client was killed, or did not wait


@contextmanager
def serving() -> Iterator[ObjectStore]:
    """Serve an object store on a port of this machine."""
    store = ObjectStore()
    server = _Server(("127.0.0.1", 0), _handler(store))
    store.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
    thread.start()
    try:
        yield store
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
