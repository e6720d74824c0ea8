"""A connection below HTTP."""

from __future__ import annotations

import socket
from urllib.parse import urlsplit

from tests.helpers.processes import DEADLINE


def connect(url: str) -> socket.socket:
    parts = urlsplit(url)
    assert parts.hostname is not None
    assert parts.port is not None
    return socket.create_connection((parts.hostname, parts.port), timeout=DEADLINE)
