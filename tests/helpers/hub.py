"""A hub of our own with one repository, for the hub's real client: the paths that it asks for, and no more."""

from __future__ import annotations

import hashlib
import json
import os
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path


@dataclass
class Hub:
    """What the hub is asked, and how it answers."""

    environment: Mapping[str, str]  # of a process that asks this hub
    sent: list[str]  # files
    commit: str = "0" * 40
    broken: bool = False  # it lists files, and breaks off when it sends one
    refuses: bool = False  # it tells nobody anything of its repository


@contextmanager
def hub(repository: str, folder: Path, home: Path) -> Iterator[Hub]:
    """Serve a folder's files as a repository. A process with its environment keeps what it downloads under `home`."""

    class Handler(BaseHTTPRequestHandler):
        def do_HEAD(self) -> None:
            self._answer(body=False)

        def do_GET(self) -> None:
            self._answer(body=True)

        def log_message(self, *_: object) -> None:
            pass

        def _answer(self, *, body: bool) -> None:
            path = self.path.partition("?")[0]
            found = folder / "/".join(path.removeprefix(f"/{repository}/resolve/").split("/")[1:])
            mine = path.startswith((f"/{repository}/", f"/api/models/{repository}"))
            if path == "/":
                self._send(b"", {}, body=body)
            elif mine and it.refuses:
                self._send(
                    b"{}", {"X-Error-Code": "GatedRepo", "X-Error-Message": "ask its owner"}, status=403, body=body
                )
            elif path == f"/api/models/{repository}" or path.startswith(f"/api/models/{repository}/revision/"):
                files = [
                    {"rfilename": each.relative_to(folder).as_posix()} for each in folder.rglob("*") if each.is_file()
                ]
                told = {"id": repository, "sha": it.commit, "siblings": files}
                self._send(json.dumps(told).encode(), {"Content-Type": "application/json"}, body=body)
            elif path.startswith(f"/api/models/{repository}/tree/"):
                names = [each.relative_to(folder) for each in folder.rglob("*") if each.is_file()]
                tree = [{"type": "file", "path": each.as_posix(), "size": 0, "oid": "0" * 40} for each in names]
                self._send(json.dumps(tree).encode(), {"Content-Type": "application/json"}, body=body)
            elif path.startswith(f"/{repository}/resolve/") and found.is_file():
                it.sent.extend([found.name] if body else [])
                data = found.read_bytes()
                known = {"ETag": f'"{hashlib.sha256(data).hexdigest()}"', "X-Repo-Commit": it.commit}
                self._send(data, known, body=body)
            else:
                code = "EntryNotFound" if mine else "RepoNotFound"
                self._send(b"{}", {"X-Error-Code": code}, status=404, body=body)

        def _send(self, data: bytes, headers: Mapping[str, str], *, body: bool, status: int = 200) -> None:
            self.send_response(status)
            for name, value in {**headers, "Content-Length": str(len(data))}.items():
                self.send_header(name, value)
            self.end_headers()
            if body:
                self.wfile.write(data[: len(data) // 2] if it.broken and "ETag" in headers else data)
            self.close_connection = it.broken

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    there = {"HF_HUB_OFFLINE": "0", "HF_ENDPOINT": f"http://127.0.0.1:{server.server_port}", "HF_HOME": str(home)}
    it = Hub({**os.environ, **there}, [])
    try:
        yield it
    finally:
        server.shutdown()
        server.server_close()
