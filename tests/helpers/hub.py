"""A hub of our own with one repository, for the hub's real client: the paths that it asks for, and no more."""

from __future__ import annotations

import hashlib
import json
import os
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

COMMIT = "0123456789012345678901234567890123456789"


@contextmanager
def hub(repository: str, folder: Path, home: Path) -> Iterator[tuple[Mapping[str, str], list[str]]]:
    """Serve a folder's files as a repository. Yields the environment in which a process asks this hub and keeps what it
    downloads under `home`, and the list of files that were sent."""
    sent: list[str] = []

    class Handler(BaseHTTPRequestHandler):
        def do_HEAD(self) -> None:
            self._answer(body=False)

        def do_GET(self) -> None:
            self._answer(body=True)

        def log_message(self, *_: object) -> None:
            pass

        def _answer(self, *, body: bool) -> None:
            path = self.path.partition("?")[0]
            found = folder / path.removeprefix(f"/{repository}/resolve/main/")
            if path == "/":
                self._send(b"", {}, body=body)
            elif path == f"/api/models/{repository}/tree/main":
                files = [
                    {"type": "file", "path": each.name, "size": each.stat().st_size, "oid": "0" * 40}
                    for each in sorted(folder.iterdir())
                ]
                self._send(json.dumps(files).encode(), {"Content-Type": "application/json"}, body=body)
            elif path.startswith(f"/{repository}/resolve/main/") and found.is_file():
                sent.extend([found.name] if body else [])
                data = found.read_bytes()
                known = {"ETag": f'"{hashlib.sha256(data).hexdigest()}"', "X-Repo-Commit": COMMIT}
                self._send(data, known, body=body)
            else:
                known = path.startswith((f"/{repository}/", f"/api/models/{repository}/"))
                self._send(b"{}", {"X-Error-Code": "EntryNotFound" if known else "RepoNotFound"}, status=404, body=body)

        def _send(self, data: bytes, headers: Mapping[str, str], *, body: bool, status: int = 200) -> None:
            self.send_response(status)
            for name, value in {**headers, "Content-Length": str(len(data))}.items():
                self.send_header(name, value)
            self.end_headers()
            if body:
                self.wfile.write(data)

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    there = {"HF_HUB_OFFLINE": "0", "HF_ENDPOINT": f"http://127.0.0.1:{server.server_port}", "HF_HOME": str(home)}
    try:
        yield {**os.environ, **there}, sent
    finally:
        server.shutdown()
        server.server_close()
