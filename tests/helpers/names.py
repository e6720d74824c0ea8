"""Names that never change."""

from __future__ import annotations

from tests.helpers.identities import NAMESPACE

from keepwarm.core.blocks import chain, token_ids
from keepwarm.core.identity import salt_key


def golden() -> list[str]:
    blocks = chain(token_ids([1, 2, 3, 70_000, 5]), (2, 4, 5), NAMESPACE, {2: salt_key("tenant")})
    return [name.hex() for b in blocks for name in (b.exact, b.prefix, b.content)]
