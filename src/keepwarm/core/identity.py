"""What computed a KV block, and for which tenant: model identity, arithmetic identity, salts.

Model identity decides *whether* KV may be reused (different: a miss). Arithmetic identity decides *how well*: under
another arithmetic, KV may differ in the last bits, so it is never `exact`, only `prefix`.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from functools import cached_property
from typing import Any

DIGEST_BYTES = 32
# Fields that were added later are left out of digests while they have these values, so earlier blocks keep their names.
_LATER = {"buffers": "none", "libraries": "", "environment": "", "switches": "", "constants": ""}


def digest(tag: str, *parts: bytes | str) -> bytes:
    """SHA-256 over a tag and length-prefixed parts, so that different lists of parts never have the same encoding.

    Returns 32 bytes, stable across processes, machines and Python versions.
    """
    hasher = hashlib.sha256()
    for part in (tag, *parts):
        raw = part.encode() if isinstance(part, str) else part
        hasher.update(len(raw).to_bytes(8, "little"))
        hasher.update(raw)
    return hasher.digest()


def canonical_json(value: Any) -> str:
    """JSON with sorted keys and no spaces: one text for one value.

    Raises TypeError for what JSON cannot hold and ValueError for NaN.
    """
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)


def as_json(value: Any) -> Any:
    """Return a configuration as JSON values. Infinity, NaN and objects of other types become their texts."""
    return json.loads(json.dumps(value, default=str, sort_keys=True), parse_constant=str)


def json_text(value: Any) -> str:
    """JSON with keys in their given order and without spaces. Raises what `canonical_json` does."""
    return json.dumps(value, separators=(",", ":"), ensure_ascii=False, allow_nan=False)


def same_json(one: Any, other: Any) -> bool:
    """Whether two values are the same JSON, in any order of keys. Python's own `==` does not tell `0` from `false`."""
    return bool(one == other) and canonical_json(one) == canonical_json(other)


def json_digest(tag: str, value: Any) -> str:
    """Hex digest of a JSON value's canonical form."""
    return digest(tag, canonical_json(value)).hex()


def model_digest(described: Mapping[str, Any]) -> bytes:
    """Digest of a model identity, given as its fields by name (32 bytes)."""
    return digest("keepwarm model identity 1", canonical_json(_said(described)))


def _said(described: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in described.items() if _LATER.get(name) != value}


@dataclass(frozen=True)
class ModelIdentity:
    """Everything that shapes the KV of a token sequence, as digests or short texts.

    Two engines with equal model identities compute the same KV up to rounding.
    """

    weights: str  # digest of the tensors' bytes, not of a name
    config: str  # digest of the architecture's configuration
    dtype: str
    quantization: str  # of the weights; "none" when not quantized
    rope: str  # rotary parameters, canonical JSON
    tokenizer: str  # digest of the vocabulary, merges and special tokens
    buffers: str = "none"  # digest of computed tensors that the configuration does not account for (`runtime.identity`)
    lora: str = "none"  # digest of active adapters, their weights and scales
    kv_layout: str = "layer,kv,head,token,dim"
    codec: str = "raw"

    @cached_property
    def digest(self) -> bytes:
        return model_digest(asdict(self))


@dataclass(frozen=True)
class ArithmeticIdentity:
    """How the numbers are computed. A difference means that the last bits may differ.

    Fields that cannot affect the computation are left empty: most of them, for our own kernels.
    """

    torch: str  # its build
    device: str  # kind and name, e.g. "cpu" or "cuda:NVIDIA H200"
    instruction_set: str  # of the processor or the device, with its model
    threads: int  # 0 if their number has no effect
    attention: str  # kernel and merge rule
    mode: str = "eager"  # or compiled
    libraries: str = ""  # versions, canonical JSON
    environment: str = ""  # variables by which libraries select kernels, canonical JSON
    switches: str = ""  # torch's, canonical JSON
    constants: str = ""  # digest of the tables that were computed when the model was loaded
    producer: str = "keepwarm"

    @cached_property
    def digest(self) -> bytes:
        return digest("keepwarm arithmetic identity 1", canonical_json(_said(asdict(self))))


@dataclass(frozen=True)
class Namespace:
    """The root of the hash chains: one model under one arithmetic."""

    model: ModelIdentity
    arithmetic: ArithmeticIdentity
    template: str = ""  # of the prompts, to explain a miss; not part of names, since its tokens differ anyway
    purpose: str = ""  # "chunks" for KV that is reused away from the prefix; found only with the same purpose
    prefix_root: bytes = field(init=False, repr=False)
    exact_root: bytes = field(init=False, repr=False)

    def __post_init__(self) -> None:
        model = self.model.digest
        if self.purpose:
            model = digest("keepwarm namespace of a purpose 1", model, self.purpose)
        object.__setattr__(self, "prefix_root", digest("keepwarm prefix chain 1", model))
        object.__setattr__(self, "exact_root", digest("keepwarm exact chain 1", model, self.arithmetic.digest))

    def describe(self) -> dict[str, dict[str, Any]]:
        """A JSON-ready description, kept in the catalogue so that a miss can be explained."""
        return dict(self._described)

    @cached_property
    def _described(self) -> dict[str, dict[str, Any]]:
        described = {"model": asdict(self.model), "arithmetic": asdict(self.arithmetic)}
        described |= {"template": {"digest": self.template}} if self.template else {}
        return described | ({"purpose": {"name": self.purpose}} if self.purpose else {})


def same_origin(a: Mapping[str, Any], b: Mapping[str, Any]) -> bool:
    """Whether two described namespaces have the same model and arithmetic: their blocks may share a run."""
    return bool(a["model"] == b["model"] and a["arithmetic"] == b["arithmetic"])


def differences(seen: Mapping[str, Any], wanted: Mapping[str, Any]) -> list[str]:
    """The names of the fields in which two described identities differ, in a fixed order."""
    return [name for name in {**wanted, **seen} if seen.get(name) != wanted.get(name)]


def salt_key(salt: str) -> bytes:
    """The extra key that a salt adds to the first block of its region (32 bytes)."""
    return digest("keepwarm salt 1", salt)


def salt_tag(key: bytes) -> bytes:
    """The tag by which stored blocks name their salt (32 bytes). It serves to find them, but gives no access."""
    return digest("keepwarm salt tag 1", key)
