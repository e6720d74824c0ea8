"""Checks of names and settings that run before a model is loaded. They load no torch."""

from __future__ import annotations

import os
from contextlib import closing
from importlib.util import find_spec
from pathlib import Path

from keepwarm.config import EngineConfig, store_key
from keepwarm.core.chunking import Chunking
from keepwarm.core.levels import VARIABLE, level_named, machine
from keepwarm.core.repair import RepairRule
from keepwarm.errors import ConfigError
from keepwarm.models.places import gguf_file, model_folder
from keepwarm.store.disk.recovery import check_folder
from keepwarm.store.remote.limits import Limits
from keepwarm.store.remote.tiers import open_blobs
from keepwarm.store.runfile.crypto import StoreKey


def chunking_of(config: EngineConfig) -> Chunking:
    """Return the chunking that the settings ask for. Raises ConfigError for settings that do not fit each other."""
    return Chunking(config.chunker, config.chunk_size, config.chunk_least, config.chunk_partial)


def check(config: EngineConfig) -> None:
    """Refuse settings that an engine would refuse once its model is loaded. Uses no remote service, makes no folder.

    Raises ConfigError (also for a package that is missing), and what opening the store raises.
    """
    chunking_of(config)
    _check_level()
    RepairRule.parse(config.repair)
    if config.store is None and not config.remote:
        return
    secret = store_key(config.store_key_file)
    key = None if secret is None else StoreKey(secret)
    if config.store is not None:
        check_folder(config.store, key)
    limits = Limits(timeout=config.remote_timeout, load_timeout=config.remote_load_timeout)
    for url in config.remote_urls:
        with closing(open_blobs(url, limits)):
            pass


def _check_level() -> None:
    """Refuse a level of instructions that is unknown here."""
    if name := os.environ.get(VARIABLE):
        try:
            level_named(name, machine())
        except ValueError as error:
            raise ConfigError(str(error)) from None


def need(package: str, extra: str, what: str) -> None:
    """Raise ConfigError when a package is not installed, before the work that needs it starts."""
    if find_spec(package) is None:
        raise ConfigError(f"{what} needs the package {package}: pip install 'keepwarm[{extra}]'")


def check_model(name: str | Path) -> None:
    """Raise ModelNotFound for a path that is no model's folder and no GGUF file. A hub id is only looked up when it is
    loaded."""
    if str(name) != "demo" and gguf_file(name) is None:
        model_folder(name)
