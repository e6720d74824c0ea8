"""`keepwarm export` and `keepwarm import`: a compiled prompt as one file, made once and carried to other machines."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from keepwarm.checks import check, check_model
from keepwarm.cli import output
from keepwarm.cli.options import Device, Dtype, Json, default_store, engine_variables, key_of
from keepwarm.cli.stored import KeyFile, StoreFolder, open_store
from keepwarm.config import EngineConfig
from keepwarm.core.geometry import KVGeometry
from keepwarm.core.identity import differences
from keepwarm.errors import ConfigError
from keepwarm.store.remote.backend import redacted
from keepwarm.store.runfile.crypto import StoreKey
from keepwarm.toolsets.carried import note_of, register_carried
from keepwarm.toolsets.registry import Registry

if TYPE_CHECKING:
    from keepwarm.store.archive import Archive


def export(
    which: Annotated[str, typer.Argument(metavar="NAME|ID", help="A name, or first digits of a run's or block's id.")],
    file: Annotated[
        str, typer.Argument(metavar="FILE", help="The bundle to write (or s3://, gs://, az://); replaced when there.")
    ],
    store: StoreFolder = None,
    key_file: KeyFile = None,
    sign_key: Annotated[
        Path | None, typer.Option("--sign-key", help="Sign with this Ed25519 private key (PEM, as openssl makes it).")
    ] = None,
    as_json: Json = False,
) -> None:
    """Write a stored prompt, from its beginning to its end, into one file for other machines.

    The file holds the prompt's token ids and KV, unencrypted also when the store is encrypted, and for a registered
    tool set its schemas in their order. Prompts under a salt are refused.
    """
    with (
        open_store(store, key_file) as archive,
        output.working(f"exporting {which}"),
        _local(file, write=True) as place,
    ):
        epoch = archive.epoch()
        note = note_of(_registry(archive, store, key_file), which)
        report = archive.contents.export(which, place, sign_key, note, epoch)
    shown = redacted(file) if "://" in file else file
    if as_json:
        output.print_json(asdict(report) | {"file": shown})
        return
    beside = f", {output.counted(report.snapshots, 'snapshot')}" if report.snapshots else ""
    signed = ", signed" if report.signed else ""
    print(f"{report.tokens:,} tokens{beside}, {output.in_bytes(report.nbytes)}{signed}: {shown}")


def import_(
    file: Annotated[
        str, typer.Argument(metavar="FILE", help="A bundle that `keepwarm export` wrote, also s3://, gs://, az://.")
    ],
    store: StoreFolder = None,
    key_file: KeyFile = None,
    model: Annotated[
        str | None,
        typer.Option("--model", "-m", help="Refuse the bundle unless it was made for this model. It is loaded."),
    ] = None,
    dtype: Dtype = None,
    device: Device = None,
    verify_key: Annotated[
        Path | None,
        typer.Option("--verify-key", help="Refuse the bundle unless signed by this public key's owner (PEM)."),
    ] = None,
    max_disk: Annotated[
        str | None, typer.Option("--max-disk", help="Byte cap of the store on disk, e.g. 20GiB.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Store the prompt of a bundle, with its names. Nothing is kept before all of it is verified.

    An engine finds it only when it runs the same model; exactly, when it computes with the same arithmetic, too.
    """
    from keepwarm.store.archive import Archive

    if model is None and (dtype or device):
        raise ConfigError("--dtype and --device belong to --model: they are those of the model that the bundle is for")
    given = {"dtype": dtype, "device": device, "max_disk": max_disk, "store_key_file": key_file}
    found = engine_variables() | {name: value for name, value in given.items() if value is not None}
    config = EngineConfig.build(**found | {"store": store or default_store()})
    check(config)
    if model is not None:
        check_model(model)
    identity, geometry = (None, None) if model is None else _identity(model, config)
    assert config.store is not None
    with (
        Archive.open(config.store, max_ram=0, max_disk=config.max_disk, key=key_of(key_file)) as archive,
        output.working("importing the bundle"),
        _local(file, write=False) as place,
    ):
        wanted, epoch = None if identity is None else identity["model"], archive.epoch()
        report = archive.contents.import_(place, verify_key=verify_key, model=wanted, geometry=geometry, epoch=epoch)
        carried = register_carried(_registry(archive, config.store, key_file), report.note, epoch)
    other = [] if identity is None else differences(report.namespace["arithmetic"], identity["arithmetic"])
    if as_json:
        tool_set = None if carried is None else {"name": carried[0], "version": carried[1].number}
        output.print_json(asdict(report) | {"arithmetic_differs": other, "tool_set": tool_set})
        return
    names = ", ".join(report.names) or "no name"
    beside = f", with {output.counted(report.snapshots, 'snapshot')} of recurrent state" if report.snapshots else ""
    print(f"{report.tokens:,} tokens ({names}), {report.new_blocks:,} of {report.blocks:,} blocks were new{beside}")
    if carried is not None:
        print(f"tool set {carried[0]!r} is registered: {len(carried[1].tools)} tools, version {carried[1].number}")
    if other:
        output.note(f"computed under another arithmetic ({', '.join(other)} differ): reused with --reuse prefix only")
    if report.signed and verify_key is None:
        output.note("the bundle is signed, but its signature was not checked: --verify-key names the key")


def _registry(archive: Archive, store: Path | None, key_file: Path | None) -> Registry:
    key = key_of(key_file)
    return Registry(store or default_store(), None if key is None else StoreKey(key), archive.epochs)


def _local(file: str, *, write: bool) -> AbstractContextManager[Path]:
    """Yield the file itself, or a local copy of an object. With `write` the copy is uploaded at the end."""
    if "://" not in file:
        return nullcontext(Path(file).expanduser())
    from keepwarm.store.remote.object_store import is_object, local_copy

    if not is_object(file):
        raise ConfigError("a bundle is a local file or an object under s3://, gs:// or az://")
    return local_copy(file, write=write)


def _identity(model: str, config: EngineConfig) -> tuple[dict[str, dict[str, Any]], KVGeometry]:
    """Load a model. Return its described namespace as it runs here, and the geometry of its KV."""
    with output.working(f"loading {model}"):
        from keepwarm.runtime.loader import load

        loaded = load(model, config)
    return loaded.namespace().describe(), loaded.geometry
