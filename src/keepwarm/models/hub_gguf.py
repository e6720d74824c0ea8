"""GGUF files in a hub's repository, named as under llama.cpp and vLLM: `owner/repository:Q4_K_M`."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from pathlib import Path, PurePosixPath

from keepwarm.errors import DownloadError, ModelNotFound
from keepwarm.models.places import gguf_parts, unsplit, why_silent

_NAMED = re.compile(r"([\w-][\w.-]*/[\w.-]+):([\w.-]+)")
_TYPE = re.compile(
    r"(?:^|[-._])((?:UD-)?(?:I?Q[1-8]|TQ[12]|MXFP4|NVFP4|BF16|FP?16|FP?32)(?:_[A-Z0-9]+)*)$", re.IGNORECASE
)
_BESIDE = ("mmproj", "imatrix")  # what encodes pictures, and what was measured for quantizing


def names_hub_gguf(name: str | Path) -> bool:
    """Whether a name stands for a GGUF file on a hub."""
    return _named(name) is not None


def fetched_gguf(name: str | Path) -> Path:
    """Return the GGUF file that a name stands for, or the first one of a split model; download what is not here yet.
    The hub is asked for the newest revision. If it does not answer, an earlier download is taken.

    Raises ModelNotFound for other names and for what is not there, DownloadError if a download breaks off.
    """
    if (named := _named(name)) is None:
        raise ModelNotFound(f"{name} is no GGUF file of a hub; those are named as in owner/repository:Q4_K_M")
    repository, kind = named
    here = downloaded_gguf(name)
    if silent := why_silent():
        if here is not None:
            return here
        raise ModelNotFound(f"cannot load '{name}': {silent}, and it is not in the local cache")
    from huggingface_hub import HfApi, hf_hub_download

    try:
        told = HfApi().model_info(repository)
        there = [each.rfilename for each in told.siblings or ()]
    except Exception as error:  # of any HTTP client that the hub's library uses
        if here is not None:
            return here
        raise ModelNotFound(
            f"cannot load '{name}': {_said(error)}. Expected a repository of the hub and a type of weights, as in "
            "owner/repository:Q4_K_M (set HF_TOKEN for a private one)"
        ) from error
    if not (files := files_of(there, kind, repository)):
        has = f"; it has {', '.join(types_of(there))}" if types_of(there) else ", and no other GGUF file"
        raise ModelNotFound(f"{repository} has no GGUF file of type {kind}{has}")
    if lacking := [file for file in files if file not in there]:
        raise ModelNotFound(f"{repository} lacks a part of the model: {', '.join(lacking)}")
    try:
        paths = [Path(hf_hub_download(repository, file, revision=told.sha)) for file in files]
    except Exception as error:  # as above
        raise DownloadError(
            f"{repository} ({kind}) was not downloaded: {_said(error)}. What arrived is kept: run it again"
        ) from error
    return paths[0]


def gguf_beside(name: str) -> str:
    """Say that a hub's repository has GGUF files, if it has; "" otherwise, or if the hub does not tell."""
    from huggingface_hub import HfApi

    try:
        types = types_of(each.rfilename for each in HfApi().model_info(name).siblings or ())
    except Exception:  # this only adds to an error
        return ""
    if not types:
        return ""
    which = "Q4_K_M" if "Q4_K_M" in types else types[0]
    return f". It has GGUF files ({', '.join(types)}): name one as {name}:{which}"


def downloaded_gguf(name: str | Path) -> Path | None:
    """Return the file that an earlier download left here, of the newest revision that is whole; None if there is none.
    Uses no network."""
    if (named := _named(name)) is None:
        return None
    from huggingface_hub import constants

    repository, kind = named
    kept = Path(constants.HF_HUB_CACHE) / f"models--{repository.replace('/', '--')}" / "snapshots"
    try:
        revisions = sorted(kept.iterdir(), key=lambda each: each.stat().st_mtime, reverse=True)
    except OSError:
        return None
    for folder in revisions:
        there = [file.relative_to(folder).as_posix() for file in folder.rglob("*") if file.is_file()]
        files = files_of(there, kind, repository)
        if files and all((folder / file).is_file() for file in files):
            return folder / files[0]
    return None


def files_of(there: Iterable[str], kind: str, repository: str = "it") -> list[str]:
    """Return the GGUF files of the one model of a type, in order of its parts. Parts that are not there are among them.

    The type is the end of the file's name, or its folder's name. `kind` may also be the file's whole name. A file that
    is not split comes before a split one. Raises ModelNotFound if several models have the type.
    """
    models = _models(there)
    found = {whole: file for whole, file in models.items() if _fits(whole, kind)}
    if len(found) > 1:
        names = ", ".join(PurePosixPath(whole).stem for whole in found)
        raise ModelNotFound(f"{repository} has several GGUF files of type {kind}. Name the file instead of it: {names}")
    return [part.as_posix() for file in found.values() for part in gguf_parts(Path(file))]


def types_of(there: Iterable[str]) -> list[str]:
    """Return the types of a repository's GGUF files, or, of files that do not tell, their names."""
    return sorted({_type_of(whole) or PurePosixPath(whole).stem for whole in _models(there)})


def _models(there: Iterable[str]) -> Mapping[str, str]:
    """The models' first files, by their names without parts."""
    models: dict[str, str] = {}
    for file in sorted(there, key=lambda each: (len(each), each)):
        if file.lower().endswith(".gguf") and not any(word in PurePosixPath(file).name.lower() for word in _BESIDE):
            models.setdefault(unsplit(file), file)
    return models


def _type_of(whole: str) -> str:
    path = PurePosixPath(whole)
    found = _TYPE.search(path.stem) or _TYPE.search(path.parent.name)
    return found[1].upper() if found else ""


def _fits(whole: str, kind: str) -> bool:
    def plain(text: str) -> str:
        return re.sub(r"(?<=f)p(?=16|32)", "", text.lower())  # fp16 is F16

    return plain(kind) in (plain(_type_of(whole)), plain(PurePosixPath(whole).stem))


def _said(error: Exception) -> str:
    """What the hub said, else the first line of the error."""
    lines = str(getattr(error, "server_message", None) or error).strip().splitlines()
    return lines[0].rstrip(".") if lines else type(error).__name__


def _named(name: str | Path) -> tuple[str, str] | None:
    found = _NAMED.fullmatch(str(name))
    return None if found is None or Path(name).expanduser().exists() else (found[1], found[2])
