"""`keepwarm doctor`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from keepwarm.cli import output
from keepwarm.cli.doctor import machine, model, ports, stores
from keepwarm.cli.doctor.finding import Finding, broken, looked, worst
from keepwarm.cli.options import Device, Dtype, Json, Model, default_store, grouped, key_of
from keepwarm.cli.stored import KeyFile, StoreFolder
from keepwarm.config import EngineConfig

if TYPE_CHECKING:  # it takes a while to import
    from keepwarm.serving.settings import ServeConfig

UNWELL = 7  # the exit code when something fails


@dataclass(frozen=True)
class What:
    """What is looked at."""

    model: Model = None
    store: StoreFolder = None
    store_key_file: KeyFile = None
    remote: Annotated[
        list[str] | None,
        typer.Option("--remote", help="Also ask this remote tier; repeatable. [default: $KEEPWARM_REMOTE]"),
    ] = None
    dtype: Dtype = None
    device: Device = None
    config: Annotated[
        Path | None, typer.Option("--config", "-c", help="Look at what this file of the service names.")
    ] = None
    load: Annotated[bool, typer.Option("--load", help="Also load the model: it then says how it is cached.")] = False

    @property
    def settings(self) -> dict[str, Any]:
        """The engine's settings among them, where given."""
        return {name: value for name in _SETTINGS if (value := getattr(self, name))}


_SETTINGS = ("store", "store_key_file", "remote", "dtype", "device")


@grouped
def doctor(what: What, as_json: Json = False) -> None:
    """Look at the machine, kernels, device, store, model and port, and say what to do about what is wrong.

    Ends with 0 when Keepwarm can work, even where something is worth a warning, and with 7 when it cannot. Only the
    kernels are made if need be; nothing else is changed.
    """
    found: list[Finding] = []
    for each in _looked_at(what):
        found.append(each)
        if not as_json:
            _print(each)
    status = worst(found)
    if as_json:
        output.print_json({"status": status, "findings": [asdict(each) for each in found]})
    else:
        counts = {kind: sum(each.status == kind for each in found) for kind in ("ok", "warn", "fail")}
        output.note(", ".join(f"{count} {kind}" for kind, count in counts.items()))
    if status == "fail":
        raise typer.Exit(UNWELL)


def _looked_at(what: What) -> Iterator[Finding]:
    yield from looked("machine", machine.machine)
    yield from looked("packages", machine.packages)
    yield from looked("cache", machine.cache_folder)
    try:
        service = _service(what.config)
        chosen = EngineConfig.build(**service.engine | what.settings)
        secret, models = key_of(chosen.store_key_file), _models(what, service)
    except Exception as error:
        yield broken("settings", error, "mend the option, variable or file that it names")
        yield from looked("kernels", machine.kernels)
        return
    named = f"options, environment and {what.config}" if what.config else "options and environment"
    yield Finding("settings", "ok", f"{named} are understood")
    yield from looked("kernels", machine.kernels)
    yield from (devices := looked("device", lambda: machine.device(chosen.device)))
    yield from looked("store", lambda: stores.store(_store(chosen), secret, chosen.max_disk))
    yield from looked("remote", lambda: stores.remotes(chosen.remote_urls))
    can_load = what.load and worst(devices) != "fail"
    for source, settings in models:
        loaded = partial(model.loaded, source, settings)
        look = loaded if can_load else partial(model.named, source, settings)
        yield from looked("model", look)
    yield from looked("port", lambda: ports.port(service.server.host, service.server.port))


def _store(chosen: EngineConfig) -> stores.Named:
    return stores.Named(chosen.store or default_store(), chosen.store_key_file)


def _service(config: Path | None) -> ServeConfig:
    from keepwarm.serving.settings import ServeConfig

    return ServeConfig.load(config)


def _models(what: What, service: ServeConfig) -> list[tuple[str, EngineConfig]]:
    """Return the models with their settings: all that the service names, or the one that is given."""
    if what.model is not None:
        return [(what.model, EngineConfig.build(**service.engine | what.settings))]
    return [(one.source, EngineConfig.build(**dict(one.engine_settings) | what.settings)) for one in service.served]


def _print(found: Finding) -> None:
    print(f"{found.status:<4}  {found.name:<9}  {found.detail}", flush=True)
    if found.advice:
        print(f"{'':<4}  {'':<9}  -> {found.advice}", flush=True)
