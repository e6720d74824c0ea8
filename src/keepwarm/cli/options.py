"""Options that commands share, as groups.

A group is a dataclass whose fields are `Annotated` for typer; `grouped` spreads the groups in a command's signature
into their fields and hands the command the filled groups.
"""

from __future__ import annotations

import functools
import inspect
import os
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import MISSING, asdict, dataclass, fields, is_dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_type_hints

import typer

from keepwarm.checks import check, check_model
from keepwarm.cli import output
from keepwarm.config import EngineConfig, cache_dir, from_environment, store_key
from keepwarm.errors import ConfigError

if TYPE_CHECKING:
    from keepwarm.engine import Engine

Json = Annotated[bool, typer.Option("--json", help="Print JSON on standard output, and nothing else there.")]
MaxNewTokens = Annotated[int, typer.Option("--max-new-tokens", "-n", min=1, help="Most tokens to generate.")]
Model = Annotated[
    str | None,
    typer.Option(
        "--model",
        "-m",
        help="A folder, a GGUF file, a hub id (owner/name, or owner/name:Q4_K_M for GGUF files), or 'demo' "
        "(SmolLM2-135M-Instruct). [default: demo]",
    ),
]
Dtype = Annotated[
    str | None,
    typer.Option(
        "--dtype",
        help="float32, bfloat16 or float16 (a GGUF file takes no float16); auto, or left out: chosen by device.",
    ),
]
Device = Annotated[
    str | None, typer.Option("--device", help="cuda, mps or cpu; auto, or left out: the first present of these.")
]


def chosen_model(given: str | None) -> str:
    """Return the model named by an option or by `$KEEPWARM__MODEL`, else the demo model."""
    return str(given or from_environment({}).get("model") or "demo")


def default_store() -> Path:
    """The store that commands use when none is named."""
    return Path(engine_variables().get("store") or cache_dir() / "store").expanduser()


def chosen_remotes(given: Sequence[str] | None) -> Sequence[str]:
    """Return the remote tiers named by options or by the environment."""
    named = given or engine_variables().get("remote") or ()
    return (named,) if isinstance(named, str) else named


def key_of(file: Path | None) -> bytes | None:
    """The key of the store that commands use. Raises ConfigError."""
    named = file or engine_variables().get("store_key_file")
    return store_key(None if named is None else Path(named))


@dataclass(frozen=True)
class EngineOptions:
    """Which model runs, and over which store."""

    model: Model = None
    store: Annotated[
        Path | None, typer.Option("--store", help="Folder of the store. [default: ~/.cache/keepwarm/store]")
    ] = None
    store_key_file: Annotated[
        Path | None,
        typer.Option("--store-key-file", help="File with an encrypted store's key. [default: $KEEPWARM_STORE_KEY]"),
    ] = None
    reuse: Annotated[
        str | None,
        typer.Option("--reuse", help="Weakest exactness allowed: exact, prefix, chunks or off. [default: exact]"),
    ] = None
    dtype: Dtype = None
    device: Device = None
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

    @property
    def source(self) -> str:
        """The model to load."""
        return chosen_model(self.model)

    @property
    def given(self) -> dict[str, Any]:
        """The engine settings that are given as options, JSON-ready."""
        values = {name: value for name, value in asdict(self).items() if name != "model" and value not in (None, [])}
        return {name: str(value) if isinstance(value, Path) else value for name, value in values.items()}

    def settings(self, store: Path | None = None) -> dict[str, Any]:
        """Keyword arguments of `Engine.from_pretrained`, JSON-ready. Options override the environment.

        `store` replaces the named store, and the environment's remote tiers are then not used: the command measures a
        store of its own, so nothing may come from elsewhere unasked.
        """
        found = engine_variables()
        if store is not None and found.pop("remote", None) and not self.remote:
            output.note("KEEPWARM_REMOTE is not used: what is measured is a store of its own; --remote gives it a tier")
        return found | self.given | {"store": str(store or self.store or default_store())}


def engine_variables() -> dict[str, Any]:
    """Return the engine settings in the environment. Raises ConfigError."""
    found = from_environment({}).get("engine", {})
    if not isinstance(found, dict):
        raise ConfigError(f"the variable KEEPWARM__ENGINE must be a JSON table, got {found!r}")
    return found


def measured(**given: Any) -> dict[str, Any]:
    """Return the settings of an engine to measure: options override the environment, whose store and remote tiers
    are not used."""
    found = {name: value for name, value in engine_variables().items() if name not in ("store", "remote")}
    return found | {name: value for name, value in given.items() if value is not None}


def refuse(model: str, settings: dict[str, Any]) -> None:
    """Raise what is wrong with a model's name or an engine's settings, as far as that shows without loading."""
    check(EngineConfig.build(**settings))
    check_model(model)


def open_engine(model: str, settings: dict[str, Any]) -> Engine:
    """Load the model and open the store, and show progress meanwhile. Imports torch.

    Errors that show without the model are raised before it is loaded. Raises what `Engine.from_pretrained` does.
    """
    refuse(model, settings)
    local = model == "demo" or Path(model).expanduser().exists()
    # A hub id may mean a long download, and the hub's own bars show that better: two bars would fight for the line.
    with output.working(f"loading {model}") if local else nullcontext():
        if local:
            os.environ.setdefault("TQDM_DISABLE", "1")  # read when tqdm is imported
        from keepwarm.engine import Engine

        return Engine.from_pretrained(model, **settings)


def grouped(command: Callable[..., None]) -> Callable[..., None]:
    """Return the command with the fields of its dataclass parameters as its own options."""
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
