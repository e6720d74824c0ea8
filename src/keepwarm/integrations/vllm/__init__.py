"""Keepwarm's store under vLLM: a KV connector, loaded by path, without changes to vLLM.

    vllm serve MODEL --kv-transfer-config '{"kv_connector": "KeepwarmConnector", "kv_role": "kv_both",
        "kv_connector_module_path": "keepwarm.integrations.vllm.connector", "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"store": "/var/lib/keepwarm"}}'

`connector.py` is the interface for vLLM. `scheduler.py` finds the longest stored prefix, `worker.py` moves blocks
between the store and vLLM's pages (`loading.py` does so for one request), and `messages.py` has the scheduler's
messages to workers. Pages on a GPU are moved by plans of copies (`device_pages.py`), on streams beside the model's
(`device_loading.py`, `deferred_saves.py`). What moves bytes imports no vLLM.

`tiering.py` is a tier of vLLM's own offloading, and `offloading.py` that offloading where the tier is told all it must
know.

`hybrid/` has the same two halves for models with several groups of pages in vLLM.
"""
