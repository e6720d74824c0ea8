"""Options that commands share, as groups.

A group is a dataclass whose fields are `Annotated` for typer; `grouped` spreads the groups in a command's signature
into their fields and hands the command the filled groups.
"""

from __future__ import annotations

import functools
import inspect
import os
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import MISSING, dataclass, fields, is_dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_type_hints

import typer

from keepwarm.cli import output
from keepwarm.config import cache_dir, default_remotes

if TYPE_CHECKING:
    from keepwarm.engine import Engine

Json = Annotated[bool, typer.Option("--json", help="Print JSON on standard output, and nothing else there.")]
MaxNewTokens = Annotated[int, typer.Option("--max-new-tokens", "-n", min=1, help="Most tokens to generate.")]


def default_store() -> Path:
    """The store that commands use when none is named."""
    return cache_dir() / "store"


@dataclass(frozen=True)
class EngineOptions:
    """Which model runs, and over which store."""

    model: Annotated[
        str,
        typer.Option("--model", "-m", help="A folder, a hub id, or 'demo' (SmolLM2-135M-Instruct)."),
    ] = "demo"
    store: Annotated[
        Path | None,
        typer.Option("--store", help="Folder of the store. [default: ~/.cache/keepwarm/store]"),
    ] = None
    store_key_file: Annotated[
        Path | None,
        typer.Option("--store-key-file", help="File with an encrypted store's key. [default: $KEEPWARM_STORE_KEY]"),
    ] = None
    reuse: Annotated[str, typer.Option("--reuse", help="Weakest exactness allowed: exact, prefix, chunks or off.")] = (
        "exact"
    )
    dtype: Annotated[
        str | None,
        typer.Option("--dtype", help="float32, bfloat16 or float16; chosen by device when left out."),
    ] = None
    device: Annotated[
        str | None,
        typer.Option("--device", help="cuda, mps or cpu; the first present when left out."),
    ] = None
    kv_codec: Annotated[
        str | None,
        typer.Option("--kv-codec", help="How KV is kept: raw, int8, int4 or fp8; the last three need --reuse prefix."),
    ] = None
    kv_in_memory: Annotated[
        str | None,
        typer.Option(
            "--kv-in-memory",
            help="KV of a hit under such a codec: decoded as it is loaded, or kept encoded: less memory.",
        ),
    ] = None
    remote: Annotated[
        list[str] | None,
        typer.Option(
            "--remote",
            help="A remote tier below the disk: redis://, s3://, gs://, az:// or file://; repeatable. "
            "[default: $KEEPWARM_REMOTE, with spaces between]",
        ),
    ] = None
    max_ram: Annotated[str | None, typer.Option("--max-ram", help="Byte cap in RAM, e.g. 4GiB.")] = None
    max_disk: Annotated[str | None, typer.Option("--max-disk", help="Byte cap of the store on disk, e.g. 20GiB.")] = (
        None
    )

    def settings(self, store: Path | None = None) -> dict[str, Any]:
        """Keyword arguments of `Engine.from_pretrained`, JSON-ready. `store` replaces the one that was named."""
        chosen: dict[str, Any] = {
            "device": self.device,
            "dtype": self.dtype,
            "kv_codec": self.kv_codec,
            "kv_in_memory": self.kv_in_memory,
            "max_ram": self.max_ram,
            "max_disk": self.max_disk,
        }
        chosen["store_key_file"] = None if self.store_key_file is None else str(self.store_key_file)
        # A command that brings its own store measures it: nothing may come from elsewhere unasked.
        if remotes := self.remote or (default_remotes() if store is None else []):
            chosen["remote"] = remotes
        return {
            "store": str(store or self.store or default_store()),
            "reuse": self.reuse,
            **{name: value for name, value in chosen.items() if value is not None},
        }


def open_engine(model: str, settings: dict[str, Any]) -> Engine:
    """Load the model and open the store, showing that it takes a while. Imports torch."""
    local = model == "demo" or Path(model).expanduser().is_dir()
    # A hub id may mean a long download, and the hub's own bars show that better: two bars would fight for the line.
    with output.working(f"loading {model}") if local else nullcontext():
        if local:
            os.environ.setdefault("TQDM_DISABLE", "1")  # read when tqdm is imported
        from keepwarm.engine import Engine

        return Engine.from_pretrained(model, **settings)


def grouped(command: Callable[..., None]) -> Callable[..., None]:
    """A command whose dataclass parameters became options of their own."""
    hints = get_type_hints(command, include_extras=True)
    parameters: list[inspect.Parameter] = []
    groups: dict[str, Any] = {}
    for parameter in inspect.signature(command).parameters.values():
        kind = hints[parameter.name]
        if is_dataclass(kind):
            groups[parameter.name] = kind
            annotations = get_type_hints(kind, include_extras=True)
            members = [
                (
                    field.name,
                    annotations[field.name],
                    inspect.Parameter.empty if field.default is MISSING else field.default,
                )
                for field in fields(kind)
            ]
        else:
            members = [(parameter.name, kind, parameter.default)]
        parameters += [
            inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)
            for name, annotation, default in members
        ]

    @functools.wraps(command)
    def spread(**values: Any) -> None:
        filled = {
            name: kind(**{field.name: values.pop(field.name) for field in fields(kind)})
            for name, kind in groups.items()
        }
        command(**filled, **values)

    spread.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    spread.__annotations__ = {p.name: p.annotation for p in parameters} | {"return": None}
    return spread
