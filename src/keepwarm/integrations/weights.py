"""Finds the files of another engine's model, so that KV is keyed by their content and not by a name."""

from __future__ import annotations

from pathlib import Path

from keepwarm.errors import ConfigError


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
