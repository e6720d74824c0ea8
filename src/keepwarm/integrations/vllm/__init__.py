"""Keepwarm's store under vLLM: a KV connector, loaded by path, without a change to vLLM.

    vllm serve MODEL --kv-transfer-config '{"kv_connector": "KeepwarmConnector", "kv_role": "kv_both",
        "kv_connector_module_path": "keepwarm.integrations.vllm.connector", "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"store": "/var/lib/keepwarm"}}'

`connector.py` is vLLM's face of it: `scheduler.py` finds the longest stored prefix, `worker.py` moves blocks between
the store and vLLM's pages (`loading.py` one request's), `messages.py` is what the first tells the second. `hybrid/` has
the same two halves for models of which vLLM keeps several groups of pages.
"""
