"""GGUF files in a hub's repository, named as under llama.cpp and vLLM: `owner/repository:Q4_K_M`."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path, PurePosixPath

from keepwarm.errors import ModelNotFound
from keepwarm.models.places import unsplit, why_silent

_NAMED = re.compile(r"([\w.-]+/[\w.-]+):([\w.-]+)")
_KIND = re.compile(
    r"(?:^|[^A-Za-z0-9])((?:I?Q[1-8]|TQ[12]|MXFP4|BF16|F16|F32)(?:_[A-Z0-9]+)*)(?![A-Za-z0-9_])", re.IGNORECASE
)


def fetched_gguf(name: str | Path) -> Path | None:
    """Return the GGUF file that a name stands for, or the first one of a split model; download what is not here yet.
    None for any other name. Raises ModelNotFound."""
    if (named := _named(name)) is None:
        return None
    repository, kind = named
    if silent := why_silent():
        if (here := downloaded_gguf(name)) is not None:
            return here
        raise ModelNotFound(f"cannot load '{name}': {silent}, and it is not in the local cache")
    from huggingface_hub import HfApi, hf_hub_download
    from huggingface_hub.errors import HFValidationError

    try:
        there = HfApi().list_repo_files(repository)
        if not (files := files_of(there, kind)):
            found = f"; it has {_kinds(there)}" if _models(there) else ", and no other GGUF file"
            raise ModelNotFound(f"{repository} has no GGUF file with {kind} in its name{found}")
        parts = [Path(hf_hub_download(repository, file)) for file in files]
    except (OSError, HFValidationError) as error:
        raise ModelNotFound(
            f"cannot load '{name}': {str(error).strip().splitlines()[0]}. Expected a repository of the hub and a type "
            "of weights, as in owner/repository:Q4_K_M (set HF_TOKEN for a private one)"
        ) from error
    return parts[0]


def gguf_beside(name: str) -> str:
    """Say that a hub's repository has GGUF files, if it has; "" otherwise, or if the hub does not tell."""
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HFValidationError

    try:
        there = HfApi().list_repo_files(name)
    except (OSError, HFValidationError):
        return ""
    return f" It has GGUF files ({_kinds(there)}): name one as {name}:Q4_K_M" if _models(there) else ""


def downloaded_gguf(name: str | Path) -> Path | None:
    """Return the file that an earlier download left here. Uses no network."""
    if (named := _named(name)) is None:
        return None
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    repository, kind = named
    try:
        folder = Path(snapshot_download(repository, local_files_only=True))
    except (LocalEntryNotFoundError, HFValidationError):
        return None
    files = files_of((file.relative_to(folder).as_posix() for file in folder.rglob("*")), kind)
    return folder / files[0] if files else None


def files_of(files: Iterable[str], kind: str) -> list[str]:
    """Return the GGUF files of the model whose name has a type of weights in it, in order of its parts. Of several such
    models it is the one with the shortest name: `Q4_K_XL` before `UD-Q4_K_XL`."""
    wanted = re.compile(rf"(?:^|[^a-z0-9]){re.escape(kind)}(?![a-z0-9_])", re.IGNORECASE)
    models: dict[str, list[str]] = {}
    for file in _models(files):
        whole = unsplit(file)
        if wanted.search(PurePosixPath(whole).name[: -len(".gguf")]):
            models.setdefault(whole, []).append(file)
    return sorted(min(models.items(), key=lambda item: (len(item[0]), item[0]))[1]) if models else []


def _models(files: Iterable[str]) -> list[str]:
    """Leave out what is no GGUF file, and what encodes pictures or was measured for quantizing."""
    beside = ("mmproj", "imatrix")
    return [
        file
        for file in files
        if file.lower().endswith(".gguf") and not any(word in PurePosixPath(file).name.lower() for word in beside)
    ]


def _kinds(files: Iterable[str]) -> str:
    models = _models(files)
    found = {kind.upper() for file in models for kind in _KIND.findall(PurePosixPath(unsplit(file)).name)}
    return ", ".join(sorted(found) or models)


def _named(name: str | Path) -> tuple[str, str] | None:
    found = _NAMED.fullmatch(str(name))
    return None if found is None or Path(name).expanduser().exists() else (found[1], found[2])
