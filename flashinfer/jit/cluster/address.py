"""Addresses of schedulers, and which of them are reached without TLS."""

from __future__ import annotations

import socket
from urllib.parse import urlsplit

WANTED = "wanted tcp://HOST:PORT or tls://HOST:PORT"


def parse(text: str) -> str:
    """An address as Dask takes it.

    Raises:
        ValueError: it is none.
    """
    try:
        parts = urlsplit(text)
        good = parts.scheme in ("tcp", "tls") and parts.hostname and parts.port and "@" not in parts.netloc
    except ValueError:
        good = False
    if not good or text != f"{parts.scheme}://{parts.netloc}" or any(letter.isspace() for letter in text):
        raise ValueError(f"got {text!r}, {WANTED}")
    return text


def why_insecure(address: str) -> str | None:
    """Why an address is not to be used without being asked to: whoever reaches a scheduler runs code on its workers.

    An address of this machine is one that a socket can be bound to.
    """
    parts = urlsplit(address)
    if parts.scheme == "tls":
        return None
    try:
        found = socket.getaddrinfo(parts.hostname, None, type=socket.SOCK_STREAM)
        for family, kind, _, _, place in found:
            with socket.socket(family, kind) as probe:
                probe.bind((place[0], 0, *place[2:]))
        return None
    except OSError:
        return (
            f"{address} is another machine, and tcp:// is not encrypted: whoever listens can run code on its workers."
            " Start the scheduler and the workers with --tls-ca-file, --tls-cert and --tls-key, set the same in Dask's"
            " configuration (distributed.comm.tls) and use tls://; or say --cluster-insecure"
        )
