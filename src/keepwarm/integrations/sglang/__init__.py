"""Keepwarm's store under SGLang: a HiCache storage backend, loaded by path, without changes to SGLang.

python -m sglang.launch_server --model-path MODEL --enable-hierarchical-cache --hicache-storage-backend dynamic \
    --hicache-storage-backend-extra-config '{"backend_name": "keepwarm", "class_name": "KeepwarmHiCache",
        "module_path": "keepwarm.integrations.sglang.hicache", "store": "/var/lib/keepwarm"}'
"""
