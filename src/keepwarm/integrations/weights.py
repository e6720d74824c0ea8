"""Finds the files of another engine's model, so that KV is keyed by their content and not by a name."""

from __future__ import annotations

import re
from pathlib import Path

from keepwarm.errors import ConfigError

_SPLIT = re.compile(r"-\d{5}-of-(\d{5})\.gguf$")  # one of several files, which llama.cpp loads together


def weights_folder(model: str, revision: str | None = None) -> Path:
    """Return the folder of a model's files: the given one, or the snapshot of a hub id, by default of its main branch.
    Raises ConfigError."""
    folder = Path(model).expanduser()
    if folder.is_dir():
        return folder
    try:
        from huggingface_hub import snapshot_download

        return Path(snapshot_download(model, revision=revision, local_files_only=True))
    except Exception as error:
        at = f" at revision {revision!r}" if revision else ""
        raise ConfigError(
            f"the weights of {model!r}{at} cannot be found to be identified ({error}): pass a folder"
        ) from None


def gguf_parts(path: Path) -> list[Path]:
    """Return the GGUF file, or all files of a model that is split."""
    found = _SPLIT.search(path.name)
    if found is None:
        return [path]
    stem, count = path.name[: found.start()], int(found[1])
    return [path.with_name(f"{stem}-{part:05d}-of-{count:05d}.gguf") for part in range(1, count + 1)]
