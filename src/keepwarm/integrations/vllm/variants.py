"""The namespace of a request's KV within that of a worker's shard."""

from __future__ import annotations

from dataclasses import replace

from keepwarm.core.identity import Namespace


def variant_of(namespace: Namespace, variant: str) -> Namespace:
    """Return the namespace of the model with an adapter, or with images on the first page."""
    if variant == "none":
        return namespace
    return Namespace(replace(namespace.model, lora=variant), namespace.arithmetic)
