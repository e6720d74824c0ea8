"""Where the files of a foreign engine's model lie, so that KV is keyed by what they hold and not by a name."""

from __future__ import annotations

from pathlib import Path

from keepwarm.errors import ConfigError


def weights_folder(model: str) -> Path:
    """Where a model's files lie: a folder, or the newest snapshot of a hub id. Raises ConfigError."""
    folder = Path(model).expanduser()
    if folder.is_dir():
        return folder
    try:
        from huggingface_hub import snapshot_download

        return Path(snapshot_download(model, local_files_only=True))
    except Exception as error:
        raise ConfigError(
            f"the weights of {model!r} cannot be found to be identified ({error}): pass a folder"
        ) from None
