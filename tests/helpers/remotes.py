"""Real services on loopback for the tests: a Redis server, an S3 server, an Azure server of their own."""

from __future__ import annotations

import base64
import hashlib
import hmac
import os
import shutil
import socket
import subprocess
import time
import urllib.parse
import urllib.request
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from email.utils import formatdate
from pathlib import Path

import pytest

SECONDS = 20.0


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


class RedisServer:
    """A redis-server process; `kill` and `start` it at will, on one port."""

    def __init__(self, folder: Path, *options: str) -> None:
        program = shutil.which("redis-server") or shutil.which("valkey-server")
        if program is None:
            pytest.skip("redis-server is not installed: apt-get install redis-server")
        self._command = [program, "--save", "", "--appendonly", "no", "--dir", str(folder), *options]
        self.cluster = "--cluster-enabled" in options
        self.slots = (0, 16383)  # of a cluster
        self.port = 0
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def command(self) -> list[str]:
        """What starts it again on its port."""
        return [*self._command, "--port", str(self.port)]

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    @property
    def url(self) -> str:
        return f"redis{'+cluster' if self.cluster else ''}://127.0.0.1:{self.port}/"

    def start(self) -> None:
        import redis

        wanted = self.port
        for _ in range(20):  # another process may take a free port first
            self.port = wanted or free_port()
            self._process = subprocess.Popen(self.command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
            deadline = time.monotonic() + SECONDS
            while self._process.poll() is None and time.monotonic() < deadline:
                try:
                    client = redis.Redis(port=self.port)
                    client.ping()
                    if self.cluster:
                        if client.cluster("info")["cluster_slots_assigned"] == "0":
                            client.execute_command("CLUSTER", "ADDSLOTSRANGE", *self.slots)
                        if self.slots == (0, 16383) and client.cluster("info")["cluster_state"] != "ok":
                            continue
                    client.close()
                    return
                except redis.exceptions.RedisError:
                    continue
            self.kill()
        raise AssertionError("redis-server does not start")

    def kill(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None


@contextmanager
def redis_server(folder: Path, *options: str) -> Iterator[RedisServer]:
    server = RedisServer(folder, *options)
    server.start()
    try:
        yield server
    finally:
        server.kill()


@contextmanager
def redis_cluster(folder: Path) -> Iterator[list[RedisServer]]:
    """Two servers that share the slots; any one's URL leads to both."""
    import redis

    servers: list[RedisServer] = []
    try:
        for slots in ((0, 8191), (8192, 16383)):
            (folder / f"{slots[0]}").mkdir()
            server = RedisServer(folder / f"{slots[0]}", "--cluster-enabled", "yes")
            server.slots = slots
            servers.append(server)
            server.start()
        clients = [redis.Redis(port=server.port) for server in servers]
        clients[0].cluster("MEET", "127.0.0.1", servers[1].port)
        deadline = time.monotonic() + SECONDS
        while any(client.cluster("info")["cluster_state"] != "ok" for client in clients):
            assert time.monotonic() < deadline, "the cluster does not form"
            time.sleep(0.05)
        for client in clients:
            client.close()
        yield servers
    finally:
        for server in servers:
            server.kill()


class S3Server:
    """Moto's S3, over HTTP, in this process; its objects live as long as the process."""

    def __init__(self) -> None:
        self._server: object = None
        self.port = 0

    def start(self) -> None:
        from moto.server import ThreadedMotoServer

        server = ThreadedMotoServer(ip_address="127.0.0.1", port=self.port or free_port(), verbose=False)
        server.start()
        self.port = server.get_host_and_port()[1]
        self._server = server

    def stop(self) -> None:
        if self._server is not None:
            self._server.stop()  # type: ignore[attr-defined]
            self._server = None

    def bucket(self, name: str) -> str:
        """Make a bucket, under a name of its own (all servers of a process share their buckets); returns its URL."""
        name = f"{name}-{uuid.uuid4().hex[:12]}"
        request = urllib.request.Request(f"http://127.0.0.1:{self.port}/{name}", method="PUT", data=b"")
        request.add_header("Authorization", "AWS4-HMAC-SHA256 Credential=a/20200101/us-east-1/s3/aws4_request")
        urllib.request.urlopen(request, timeout=SECONDS).read()
        return self.url(name)

    def url(self, name: str) -> str:
        keys = "access_key_id=test&secret_access_key=test"
        return f"s3://{name}/kv?endpoint=http://127.0.0.1:{self.port}&region=us-east-1&{keys}"


@contextmanager
def s3_server() -> Iterator[S3Server]:
    server = S3Server()
    server.start()
    try:
        yield server
    finally:
        server.stop()


# Azurite's own, the same for everybody
AZURITE_KEY = "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="


class AzureServer:
    """Microsoft's Azurite, in memory: `npm install -g azurite`, or $AZURITE names its `azurite-blob`."""

    account = "devstoreaccount1"

    def __init__(self) -> None:
        program = os.environ.get("AZURITE") or shutil.which("azurite-blob")
        if program is None:
            pytest.skip("azurite is not installed: npm install -g azurite")
        self.port = free_port()
        options = ["--silent", "--inMemoryPersistence", "--skipApiVersionCheck", "--disableTelemetry"]
        self._process = subprocess.Popen(
            [program, *options, "--blobPort", str(self.port)], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        deadline = time.monotonic() + SECONDS
        while True:
            with suppress(OSError), socket.create_connection(("127.0.0.1", self.port), timeout=1):
                return
            assert self._process.poll() is None, "azurite does not start"
            assert time.monotonic() < deadline, "azurite does not answer"
            time.sleep(0.05)

    def container(self) -> str:
        """Make a container; returns its URL."""
        name, now = f"keepwarm-{uuid.uuid4().hex[:12]}", formatdate(usegmt=True)
        path = f"/{self.account}/{name}"
        version = "2021-08-06"
        signed = f"PUT{chr(10) * 12}x-ms-date:{now}\nx-ms-version:{version}\n/{self.account}{path}\nrestype:container"
        digest = hmac.new(base64.b64decode(AZURITE_KEY), signed.encode(), hashlib.sha256).digest()
        headers = {
            "x-ms-date": now,
            "x-ms-version": version,
            "Authorization": f"SharedKey {self.account}:{base64.b64encode(digest).decode()}",
            "Content-Length": "0",
        }
        where = f"http://127.0.0.1:{self.port}"
        request = urllib.request.Request(f"{where}{path}?restype=container", method="PUT", headers=headers)
        urllib.request.urlopen(request, timeout=SECONDS).read()
        key = urllib.parse.quote(AZURITE_KEY, safe="")
        return f"az://{name}/kv?endpoint={where}/{self.account}&account_name={self.account}&account_key={key}"

    def stop(self) -> None:
        self._process.kill()
        self._process.wait()


@contextmanager
def azure_server() -> Iterator[AzureServer]:
    server = AzureServer()
    try:
        yield server
    finally:
        server.stop()
