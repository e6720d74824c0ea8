"""The layout version and the key that a remote service was written with."""

from __future__ import annotations

import json

from keepwarm.errors import RemoteUnavailable, StoreLocked, StoreTooNew
from keepwarm.store.remote.backend import Blobs
from keepwarm.store.runfile.crypto import StoreKey

LAYOUT = 1
ROOT = f"v{LAYOUT}/"
LAYOUT_KEY = "layout"  # in the same place in every version


def layout_of(key: StoreKey | None) -> bytes:
    """The value that `check_layout` reads."""
    return json.dumps({"layout": LAYOUT, "key": None if key is None else key.id}).encode()


def check_layout(blobs: Blobs, key: StoreKey | None, seconds: float) -> None:
    """Compare what the service holds with what this version and key can use.

    Raises RemoteUnavailable, StoreTooNew and StoreLocked.
    """
    (raw,) = blobs.get([LAYOUT_KEY], seconds)
    if raw is None:
        return
    try:
        found = json.loads(raw)
        layout, theirs = int(found["layout"]), found["key"]
    except (ValueError, KeyError, TypeError) as error:
        raise RemoteUnavailable(f"{blobs.label}: the record of its layout cannot be read: {error}") from error
    if layout > LAYOUT:
        raise StoreTooNew(
            f"{blobs.label} was written by a newer Keepwarm (layout {layout}, this one knows {LAYOUT}): "
            "upgrade, or name another prefix"
        )
    if theirs != (None if key is None else key.id):
        seen = "is not encrypted" if theirs is None else "is encrypted, by another key than the one given"
        if key is None:
            seen = "is encrypted, and no key was given"
        raise StoreLocked(f"{blobs.label} {seen}: give its key (store_key_file), or name another prefix")
