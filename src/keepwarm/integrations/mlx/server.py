"""mlx-lm's own server, with its prompts kept in a store.

    python -m keepwarm.integrations.mlx.server --store FOLDER [--max-disk SIZE] [--max-ram SIZE]
                                               [--setting NAME=VALUE ...] [options of mlx_lm.server]

mlx-lm's server makes its prompt cache in its function `run`, and takes no other one from its command line. So this
program puts a `run` of its own in the place of that function, and then calls mlx-lm's `main`.
"""

from __future__ import annotations

import argparse
import signal
import sys
from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import mlx_lm.server

from keepwarm.errors import ConfigError, KeepwarmError
from keepwarm.integrations.mlx.cache import KeepwarmPromptCache
from keepwarm.integrations.mlx.form import Quantization
from keepwarm.integrations.mlx.identity import Loaded


def loaded_by(provider: Any) -> Loaded:
    """Return the model that mlx-lm's server has loaded at present."""
    path, adapter, draft = provider.model_key
    asked = provider.cli_args
    how = None
    if asked.kv_bits is not None:
        how = Quantization(asked.kv_bits, asked.kv_group_size, asked.quantized_kv_start)
    return Loaded(provider.model, path, adapter, draft, how)


def serve(host: str, port: int, provider: Any, settings: dict[str, Any]) -> None:
    """Run mlx-lm's server until it is interrupted, and then write what is left. Raises KeepwarmError."""
    if mx.distributed.init().size() > 1:
        raise ConfigError("a model over several processes is not supported: each has its own part of the KV")
    cache = KeepwarmPromptCache(lambda: loaded_by(provider), provider.cli_args.prompt_cache_size, **settings)
    archive = cache.archive
    generator = mlx_lm.server.ResponseGenerator(provider, cache)
    del cache  # mlx-lm ends it in the thread that generates
    try:
        mlx_lm.server._run_http_server(host, port, generator)
    finally:
        archive.close()


def settings_of(arguments: Sequence[str]) -> tuple[dict[str, Any], list[str]]:
    """Return the store's settings, and the arguments that are mlx-lm's."""
    parser = argparse.ArgumentParser(
        prog="python -m keepwarm.integrations.mlx.server",
        description="mlx-lm's server, with its prompts kept in a store. mlx-lm's own options follow these.",
        add_help=False,
        allow_abbrev=False,
    )
    parser.add_argument("--store", help="folder, shared with other processes on this machine")
    parser.add_argument("--max-disk", help="byte cap of the folder (20GiB)")
    parser.add_argument("--max-ram", help="byte cap of the prompts that mlx-lm's own cache keeps in memory (1GiB)")
    parser.add_argument("--setting", action="append", default=[], metavar="NAME=VALUE", help="any other setting")
    own, rest = parser.parse_known_args(arguments)
    if "-h" in rest or "--help" in rest:
        parser.print_help()
        print()
    settings = {name: value for name in ("store", "max_disk", "max_ram") if (value := getattr(own, name)) is not None}
    for text in own.setting:
        name, _, value = text.partition("=")
        settings[name] = value
    return settings, rest


def _stop(*arguments: object) -> None:
    raise KeyboardInterrupt


def main() -> None:
    settings, rest = settings_of(sys.argv[1:])
    signal.signal(signal.SIGTERM, _stop)  # as Ctrl-C, so that what is left is written
    mlx_lm.server.run = lambda host, port, provider: serve(host, port, provider, settings)
    sys.argv = ["mlx_lm.server", *rest]
    try:
        mlx_lm.server.main()
    except KeepwarmError as error:
        raise SystemExit(f"error: {error}") from None


if __name__ == "__main__":
    main()
