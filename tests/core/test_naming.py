"""Names of prompts that begin like others: the same as made from nothing."""

from __future__ import annotations

import random

from hypothesis import given
from hypothesis import strategies as st

from keepwarm.core.blocks import chain, token_ids
from keepwarm.core.identity import salt_key
from keepwarm.core.naming import Naming
from keepwarm.core.schedule import Pages
from keepwarm.testing.kv import namespace

KEYS = [
    {},
    {0: salt_key("one")},
    {0: salt_key("two")},
    {7: salt_key("one")},
    {40: salt_key("one"), 70: salt_key("two")},
]


@given(st.integers(0, 1 << 30), st.sampled_from([1, 2, 8]))
def test_what_begins_alike_is_named_as_from_nothing(seed: int, page: int) -> None:
    drawn, naming, grid = random.Random(seed), Naming(), Pages(64, page=page)
    spaces = [namespace(), namespace(torch="3.0")]
    base = drawn.choices(range(3), k=100)
    for _ in range(12):
        tokens = token_ids([*base[: drawn.randrange(101)], *drawn.choices(range(3), k=drawn.randrange(1, 60))])
        keys = {at: key for at, key in drawn.choice(KEYS).items() if at < len(tokens)}
        space = drawn.choice(spaces)
        cuts = grid.cuts(len(tokens), regions=[*keys, drawn.randrange(len(tokens))])
        found = naming.chain(tokens, cuts, space, keys)
        wanted = chain(tokens, cuts, space, keys)
        assert [block._replace(tokens=block.tokens.tolist()) for block in found] == [
            block._replace(tokens=block.tokens.tolist()) for block in wanted
        ]
