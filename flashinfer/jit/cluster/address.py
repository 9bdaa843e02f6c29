"""Addresses of Dask schedulers, and the check that one is safe to use."""

from __future__ import annotations

import socket
from urllib.parse import urlsplit

WANTED = "wanted tcp://HOST:PORT or tls://HOST:PORT"


def parse(text: str) -> str:
    """Return an address in Dask's form.

    Raises:
        ValueError: the text is not an address.
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
    """Return why an address needs ``--cluster-insecure``, or ``None``.

    Anyone who can connect to a scheduler can run code on its workers. An address belongs to this machine if a
    socket can be bound to it.
    """
    parts = urlsplit(address)
    if parts.scheme == "tls":
        return None
    try:
        found = socket.getaddrinfo(parts.hostname, None, type=socket.SOCK_STREAM)
        for family, kind, _, _, sockaddr in found:
            with socket.socket(family, kind) as probe:
                probe.bind((sockaddr[0], 0, *sockaddr[2:]))
        return None
    except OSError:
        return (
            f"{address} is another machine, and tcp:// is not encrypted: anyone on the network can run code there."
            " Start the scheduler and the workers with --tls-ca-file, --tls-cert and --tls-key, set the same files in"
            " Dask's configuration (distributed.comm.tls) and use tls://; or pass --cluster-insecure"
        )
