"""Open the archive of an engine from its settings."""

from __future__ import annotations

from keepwarm.config import EngineConfig, store_key
from keepwarm.core.codecs import codec
from keepwarm.core.geometry import KVGeometry
from keepwarm.runtime.codecs import TorchCodec
from keepwarm.runtime.device import DevicePort
from keepwarm.store.archive import Archive
from keepwarm.store.remote.limits import Limits
from keepwarm.store.retention import Rules
from keepwarm.store.runfile.codec import Coding


def archive_of(config: EngineConfig, geometry: KVGeometry, port: DevicePort) -> Archive:
    """Open the configured tiers, for a model whose KV is on the device of `port`. Raises StoreError and ConfigError."""
    is_raw = config.kv_codec == "raw"
    return Archive.open(
        config.store,
        register=port.register if is_raw and not port.is_host else None,
        max_ram=config.max_ram,
        max_disk=config.max_disk,
        key=store_key(config.store_key_file) if config.store is not None or config.remote else None,
        timeout=config.store_timeout,
        map_files=config.map_files,
        rules=Rules(
            ram_policy=config.ram_policy,
            disk_policy=config.disk_policy,
            admit=config.admit,
            min_tokens=config.min_store_tokens,
            min_write=config.min_write_tokens,
            ttl=config.store_ttl,
            writes_per_day=config.max_disk_writes_per_day,
        ),
        coding=Coding(TorchCodec(codec(config.kv_codec)), geometry) if not is_raw else None,
        remotes=config.remote_urls,
        limits=Limits(
            timeout=config.remote_timeout,
            load_timeout=config.remote_load_timeout,
            cap=config.max_remote,
            ttl=config.store_ttl,
        ),
    )
