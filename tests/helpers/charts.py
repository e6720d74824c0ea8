"""What charts of others know: names of values, and where a value is one of a few, these. Facts of what is published:
the schema of vllm-project/production-stack's chart, and the values of llm-d/llm-d-router's chart
`llm-d-router-standalone` with its library, as of autumn 2026. `None` is any value."""

from __future__ import annotations

from typing import Any

ANY = None
NUMBER_OR_TEXT = (int, float, str)
_RESOURCES = {"requests": {"cpu": str, "memory": str}, "limits": {"cpu": str, "memory": str}}

PRODUCTION_STACK: dict[str, Any] = {
    "servingEngineSpec": {
        "labels": ANY,
        "runtimeClassName": str,
        "vllmApiKey": ANY,
        "containerPort": int,
        "tolerations": list,
        "modelSpec": [
            {
                "name": str,
                "repository": str,
                "tag": str,
                "modelURL": str,
                "replicaCount": int,
                "requestCPU": int,
                "requestMemory": str,
                "requestGPU": NUMBER_OR_TEXT,
                "limitCPU": NUMBER_OR_TEXT,
                "limitMemory": str,
                "vllmConfig": {
                    "enablePrefixCaching": bool,
                    "enableChunkedPrefill": bool,
                    "maxModelLen": int,
                    "dtype": str,
                    "tensorParallelSize": int,
                    "extraArgs": [str],
                },
                "env": list,
                "envFromSecret": ANY,
                "extraVolumes": list,
                "extraVolumeMounts": list,
                "serviceAccountName": str,
            }
        ],
    },
    "routerSpec": {
        "enableRouter": bool,
        "replicaCount": int,
        "serviceDiscovery": ("k8s", "static"),
        "routingLogic": ("roundrobin", "session", "prefixaware", "kvaware", "disaggregated_prefill"),
        "sessionKey": str,
        "prefixMinMatchLength": int,
        "extraArgs": list,
        "resources": _RESOURCES,
    },
}

LLM_D_ROUTER: dict[str, Any] = {
    "router": {
        "modelServers": {
            "type": ("vllm", "sglang", "triton-tensorrt-llm", "trtllm-serve", "triton"),
            "protocol": ("http", "grpc"),
            "targetPorts": [{"number": int}],
            "matchLabels": ANY,
        },
        "extraServicePorts": [{"name": str, "port": int, "protocol": str, "targetPort": int}],
        "epp": {
            "replicas": int,
            "env": list,
            "flags": ANY,
            "resources": _RESOURCES,
            "pluginsConfigFile": str,
            "pluginsCustomConfig": ANY,
        },
    }
}

# Plugins of llm-d's endpoint picker, with the parameters that their pages name.
LLM_D_PLUGINS: dict[str, Any] = {
    "token-producer": {"modelName": str, "vllm": {"url": str}},
    "endpoint-notification-source": {},
    "precise-prefix-cache-producer": {
        "tokenProcessorConfig": {"blockSizeTokens": int},
        "speculativeIndexing": bool,
        "kvEventsConfig": {
            "topicFilter": str,
            "concurrency": int,
            "discoverPods": bool,
            "podDiscoveryConfig": {"socketPort": int},
        },
    },
    "prefix-cache-scorer": {"prefixMatchInfoProducerName": str},
    "kv-cache-utilization-scorer": {},
    "queue-scorer": {},
    "max-score-picker": {},
}


def unknown(values: Any, known: Any, where: str = "") -> list[str]:
    """Return what a chart would not know of these values: names, and values of another kind."""
    if known is None:
        return []
    if isinstance(known, dict):
        if not isinstance(values, dict):
            return [f"{where} is no table"]
        extra = [f"{where}.{name}" for name in values if name not in known]
        return extra + [
            fault for name in values if name in known for fault in unknown(values[name], known[name], f"{where}.{name}")
        ]
    if isinstance(known, list):
        if not isinstance(values, list):
            return [f"{where} is no list"]
        return [fault for at, one in enumerate(values) for fault in unknown(one, known[0], f"{where}[{at}]")]
    if isinstance(known, tuple) and not isinstance(known[0], type):
        return [] if values in known else [f"{where} is {values!r}"]
    return (
        []
        if isinstance(values, known) and not (known is int and isinstance(values, bool))
        else [f"{where} is {values!r}"]
    )
