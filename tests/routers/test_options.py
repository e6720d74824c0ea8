"""deploy/kubernetes/router: the router takes its options, and what it is told of replicas is so."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path

from tests.helpers.deploying import DEPLOY, ROOT, built, containers, variables

HERE = DEPLOY / "kubernetes"
READ = """
import argparse, json, sys
from vllm_router.router_args import RouterArgs
parser = argparse.ArgumentParser()
RouterArgs.add_cli_args(parser)
print(json.dumps(vars(parser.parse_args(sys.argv[1:])), default=str))
"""


def test_the_router_takes_its_options(router: Path) -> None:
    objects = built(HERE / "overlays" / "vllm-router")
    (one,) = (one for one in objects if one["metadata"]["name"] == "keepwarm-router" and containers(one))
    (container,) = containers(one)
    python = router.parent / "python"
    done = subprocess.run([str(python), "-c", READ, *container["args"]], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["policy"] == "kv_aware"
    assert found["port"] == container["ports"][0]["containerPort"]
    (replicas,) = (one for one in objects if one["kind"] == "StatefulSet")
    (vllm,) = containers(replicas)
    ports = {port["name"]: port["containerPort"] for port in vllm["ports"]}
    hosts = [
        f"{replicas['metadata']['name']}-{number}.{replicas['spec']['serviceName']}"
        for number in range(replicas["spec"]["replicas"])
    ]
    assert found["worker_urls"] == [f"http://{host}:{ports['http']}" for host in hosts]
    assert found["kv_event_source"] == [
        f"http://{host}:{ports['http']}=tcp://{host}:{ports['kv-events']}" for host in hosts
    ]
    assert f"--block-size={found['kv_event_block_size']}" in vllm["args"]
    events = json.loads(variables(vllm)["KV_EVENTS_CONFIG"])
    assert "topic" not in events, "this router hears no others"
    assert events["endpoint"] == f"tcp://*:{ports['kv-events']}"
    assert {"name": "MODEL", "value": found["kv_event_model"]} in vllm["env"]


def test_the_image_has_the_version_that_is_tested() -> None:
    peer = (ROOT / "benchmarks" / "peers" / "environments.py").read_text()
    version = re.search(r'ROUTER = "(vllm-router==[\d.]+)"', peer)
    assert version is not None
    assert f"install --no-cache-dir {version[1]}\n" in (HERE / "router" / "Dockerfile").read_text()
