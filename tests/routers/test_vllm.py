"""vLLM replicas with the connector behind vLLM's router: it reads their KV events, and knows where a prompt's KV is."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx2 as httpx
import pytest
from tests.helpers.deploying import DEPLOY, ROOT, built, containers, variables
from tests.helpers.remotes import free_port, redis_server
from tests.helpers.routers import SECONDS, reached, routing

PYTHON = ROOT / ".peers" / "vllm" / "bin" / "python"
PAGE = 32
RULES = "Answer briefly and kindly, whatever the guest asks of you. " * 20
HEADS = [f"{name} is where you are the clerk. {RULES}" for name in ("Harbour", "Museum", "Garden", "Station")]

pytestmark = pytest.mark.skipif(not PYTHON.is_file(), reason="vLLM is not installed: make test-vllm")


@dataclass(frozen=True)
class Replica:
    url: str
    events: int  # the port
    process: subprocess.Popen[bytes]


@pytest.fixture(scope="module")
def replicas(demo_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Replica]]:
    """Two, over one Redis, with the options of the manifests as far as a small machine takes them."""
    folder = tmp_path_factory.mktemp("replicas")
    with ExitStack() as stack, redis_server(folder) as redis:
        found = []
        for number in range(2):  # one after the other: each takes all cores while it starts
            replica = _start(demo_folder, folder / str(number), redis.url)
            stack.callback(_end, replica)
            reached(replica.url, replica.process)
            found.append(replica)
        yield found


def _start(model: Path, store: Path, remote: str) -> Replica:
    objects = built(DEPLOY / "kubernetes" / "overlays" / "vllm-router")
    (one,) = (one for one in objects if one["kind"] == "StatefulSet")
    (container,) = containers(one)
    known = variables(container)
    port, events = free_port(), free_port()
    transfer = json.loads(known["KV_TRANSFER_CONFIG"])
    transfer["kv_connector_extra_config"] = {"store": str(store), "max_disk": "1GiB", "max_ram": "128MiB"}
    publishing = json.loads(known["KV_EVENTS_CONFIG"]) | {"endpoint": f"tcp://*:{events}"}
    switches = [word for word in container["args"] if word.startswith("--enable")]
    command = [str(PYTHON), "-m", "vllm.entrypoints.openai.api_server", "--model", str(model), "--port", str(port)]
    command += ["--served-model-name=demo", "--dtype=float32", "--max-model-len=2048", "--enforce-eager", *switches]
    command += [f"--block-size={PAGE}", "--shutdown-timeout=20", f"--kv-transfer-config={json.dumps(transfer)}"]
    own = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "KEEPWARM_REMOTE": remote}
    own |= {"PYTHONPATH": str(ROOT / "src"), "PYTHONHASHSEED": known["PYTHONHASHSEED"], "DO_NOT_TRACK": "1"}
    process = subprocess.Popen(
        [*command, f"--kv-events-config={json.dumps(publishing)}"],
        env=os.environ | own,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    return Replica(f"http://127.0.0.1:{port}", events, process)


def _end(replica: Replica) -> None:
    replica.process.send_signal(signal.SIGTERM)
    replica.process.wait(SECONDS)


def ask(url: str, head: str, question: str) -> int:
    """Return how many tokens were cached, of about 270."""
    messages = [{"role": "system", "content": head}, {"role": "user", "content": question}]
    body = {"model": "demo", "messages": messages, "max_tokens": 4, "temperature": 0}
    found = httpx.post(f"{url}/v1/chat/completions", json=body, timeout=SECONDS)
    assert found.status_code == 200, found.text
    details: dict[str, Any] | None = found.json()["usage"]["prompt_tokens_details"]
    return details["cached_tokens"] if details else 0


def answered(replica: Replica) -> float:
    lines = httpx.get(f"{replica.url}/metrics", timeout=SECONDS).text.splitlines()
    return sum(float(line.split()[-1]) for line in lines if line.startswith("vllm:request_success_total"))


def test_a_prompt_goes_where_its_kv_is(router: Path, replicas: list[Replica]) -> None:
    """The router saw none of the first requests: it knows of them by events."""
    options = [f"--kv-event-block-size={PAGE}", "--kv-event-model=demo"]
    options += [f"--kv-event-source={one.url}=tcp://127.0.0.1:{one.events}" for one in replicas]
    with routing(router, "kv_aware", [one.url for one in replicas], *options) as url:
        time.sleep(1)  # until it listens to both
        for number, head in enumerate(HEADS):
            ask(replicas[number % 2].url, head, "First?")
        time.sleep(1)
        for number, head in enumerate(HEADS):
            before = answered(replicas[number % 2])
            assert ask(url, head, "Second?") > 200
            time.sleep(0.5)  # the counter follows the answer
            assert answered(replicas[number % 2]) == before + 1


def test_the_other_replica_loads_what_was_written_at_the_end(replicas: list[Replica]) -> None:
    """A replica is told to end as soon as it has answered: what was queued is in Redis."""
    first, second = replicas
    head = f"Nursery is where you are the clerk. {RULES}"
    assert ask(first.url, head, "First?") == 0
    _end(first)
    assert ask(second.url, head, "Second?") > 200
