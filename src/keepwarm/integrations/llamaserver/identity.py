"""What the KV of a llama-server depends on.

The server tells its build, its model's file and the length of a context. It does not tell how rotary positions are
scaled, which vectors are added or which values of the file are overridden. So the KV of some tokens is part of the
identity, too: whatever changes KV changes theirs.
"""

from __future__ import annotations

import platform
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from keepwarm.config import cache_dir
from keepwarm.core.identity import ArithmeticIdentity, ModelIdentity, Namespace, canonical_json, json_digest
from keepwarm.errors import ConfigError
from keepwarm.integrations.llamacpp.form import Form
from keepwarm.models.weight_files import files_digest, weight_files

FORM = 1  # format of the bytes in the store


def namespace_of(
    props: Mapping[str, Any], adapters: Sequence[Mapping[str, Any]], form: Form, probed: str, file: Path | None
) -> Namespace:
    """Return the namespace of a server's model. `probed` is the digest of the probe's KV, and `file` replaces the path
    that the server tells. Raises ConfigError when a file cannot be read."""
    cache = cache_dir() / "identity.json"
    path = Path(str(props["model_path"])) if file is None else file
    try:
        weights = files_digest(weight_files(path), cache, named=False)
        lora = [[files_digest([Path(each["path"])], cache, named=False), each["scale"]] for each in adapters]
    except (OSError, KeyError) as error:
        raise ConfigError(
            f"the model's files cannot be read to be identified, --model-file names it: {error}"
        ) from None
    layout = {
        "form": FORM,
        "n_ctx": props["default_generation_settings"]["n_ctx"],
        "planes": json_digest("keepwarm llama.cpp planes 1", form.describe()),
        # What cannot be taken apart has the server's streams in it.
        "streams": [section.streams for section in form.sections] if form.has_tail else [],
    }
    kinds = {plane.kind for section in form.sections for plane in section.planes}
    model = ModelIdentity(
        weights=weights,
        config=probed,
        dtype=f"ggml:{'/'.join(map(str, sorted(kinds)))}",
        quantization="gguf",  # the digest of the file's bytes covers it
        rope="probed",
        tokenizer="ids",  # KV belongs to token ids
        lora=json_digest("keepwarm llama.cpp adapters 1", lora) if lora else "none",
        kv_layout=canonical_json(layout),
    )
    return Namespace(
        model,
        ArithmeticIdentity(
            torch="",
            device="llama-server",
            instruction_set=platform.machine(),
            threads=0,  # llama.cpp guarantees no bits, so the number of threads does not count
            attention="",
            libraries=canonical_json({"llama-server": props["build_info"]}),
            producer="llama-server",
        ),
    )
