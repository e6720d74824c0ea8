"""Find where a model is from its name, before anything of it is loaded."""

from __future__ import annotations

import glob
import re
from pathlib import Path

from keepwarm.errors import ModelNotFound

_HUB_SECONDS = 5.0
_SPLIT = re.compile(r"-([0-9]{5})-of-([0-9]{5})\.gguf$", re.IGNORECASE)  # one of several files with one model


def gguf_file(name: str | Path) -> Path | None:
    """Return the GGUF file that a name stands for; None for any other name. Raises ModelNotFound if it is not there."""
    if not str(name).lower().endswith(".gguf"):
        return None
    file = Path(name).expanduser()
    if not file.is_file():
        beside = [*file.parent.glob(f"{glob.escape(_SPLIT.sub('', file.name).removesuffix('.gguf'))}-*-of-*.gguf")]
        more = f"; of its parts, {min(beside)} is there" if beside else ""
        raise ModelNotFound(
            f"no GGUF file at {file}{more}; pass a file, a folder with config.json, "
            "a hub id (owner/name, or owner/name:Q4_K_M for GGUF files), or 'demo'"
        )
    return file


def gguf_parts(path: Path) -> list[Path]:
    """Return the GGUF file, or all files that are called parts of the same model. Only the first one's metadata say
    whether it is split."""
    found = _SPLIT.search(path.name)
    if found is None or not 1 <= int(found[1]) <= int(found[2]):
        return [path]
    stem, count = path.name[: found.start()], int(found[2])
    return [path.with_name(f"{stem}-{part:05d}-of-{count:05d}{path.suffix}") for part in range(1, count + 1)]


def unsplit(name: str) -> str:
    """Return a GGUF file's name without the number of its part."""
    return _SPLIT.sub(".gguf", name)


def model_id(model: str) -> str:
    """Return the name by which requests call a model: a hub id, or what its folder or file is called. A file that is
    split has the name of the whole."""
    return model if "/" in model and not Path(model).exists() else unsplit(Path(model).name)


def model_folder(name: str | Path) -> Path | None:
    """Return the folder that a name stands for; None for a name that may be a hub id. Raises ModelNotFound for a folder
    without a model, and for a path without a folder."""
    folder = Path(name).expanduser()
    try:
        return _model_folder(str(name), folder)
    except OSError as error:  # a folder above it is shut, a name is too long
        raise ModelNotFound(
            f"{folder} cannot be looked at ({error.strerror or error}): fix the owner and permissions of the folders "
            "above it, or pass another folder"
        ) from None


def _model_folder(name: str, folder: Path) -> Path | None:
    if not folder.is_dir():
        if folder.is_absolute() or name.startswith((".", "~")):
            raise ModelNotFound(f"no model folder at {folder}; pass a folder with config.json, a hub id, or 'demo'")
        return None
    if not any((folder / file).exists() for file in ("config.json", "adapter_config.json")):
        files = sorted(folder.glob("*.gguf"))
        which = f"one of its GGUF files ({files[0]})" if files else "the folder that save_pretrained wrote"
        raise ModelNotFound(f"{folder} has no config.json; pass {which}")
    return folder


def downloaded_before(name: str) -> Path | None:
    """Return where an earlier download left a hub's model, if the hub cannot be asked now; None when it can.

    The hub is asked once. Its own library would ask six times for each file, half a minute in all. Raises ModelNotFound
    when the hub does not answer and the model is not here.
    """
    silent = why_silent()
    if not silent:
        return None
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(name, local_files_only=True))
    except (LocalEntryNotFoundError, HFValidationError):
        raise ModelNotFound(
            f"cannot load {name!r}: {silent}, and it is not in the local cache. Expected a folder with config.json, "
            "tokenizer and weights, a hub id (set HF_TOKEN for a private one), or 'demo'"
        ) from None


def why_silent() -> str:
    """Return why the hub cannot be asked now; "" if it can."""
    from huggingface_hub import constants, get_session

    if constants.HF_HUB_OFFLINE:
        return "the hub is not asked (HF_HUB_OFFLINE)"
    try:
        get_session().head(constants.ENDPOINT, timeout=_HUB_SECONDS)
    except Exception as error:  # of any HTTP client that the hub's library uses
        return f"the hub at {constants.ENDPOINT} does not answer ({error})"
    return ""


def cached_config(name: str) -> Path | None:
    """Return the configuration of a hub id, if an earlier download left it here. Uses no network."""
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        found = try_to_load_from_cache(name, "config.json")
    except HFValidationError:  # not a hub id
        return None
    return Path(found) if isinstance(found, str) else None


def snapshot_here(name: str, revision: str | None) -> Path | None:
    """Return the hub cache's folder of a snapshot that was just loaded; None when it is unknown. Uses no network."""
    try:
        from transformers.utils.hub import cached_file

        found = cached_file(
            name, "config.json", revision=revision, local_files_only=True, _raise_exceptions_for_missing_entries=False
        )
        return Path(found).parent if found else None
    except (OSError, ValueError):
        return None
