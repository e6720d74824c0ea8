"""A public header before a private conversation: the header's KV is everybody's, the rest the salt's own."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from tests.helpers.models import tiny

from keepwarm import Batcher, Engine
from keepwarm.core.identity import salt_key

TOOLS = [
    {"name": f"desk_{n}", "description": "Looks something up. " * 8, "input_schema": {"type": "object"}}
    for n in range(2)
]
SYSTEM = {"role": "system", "content": "You are the front desk. " * 8}
LONG = "The figures of the northern branch. " * 20


@pytest.fixture
def engine(tokenizer: Any) -> Iterator[Engine]:
    with Engine.from_pretrained((tiny("llama"), tokenizer), step=64, min_step=4, max_pages="2MiB") as engine:
        yield engine


def asked(salt: str | None, text: str = LONG, **more: Any) -> dict[str, Any]:
    chat = [SYSTEM, {"role": "user", "content": text}]
    return {"messages": chat, "tools": TOOLS, "salt": salt, "max_new_tokens": 4, "trace": True} | more


def test_two_salts_share_the_header_and_nothing_else(engine: Engine) -> None:
    header = engine.warm(messages=[SYSTEM], tools=TOOLS).tokens
    cold = engine.generate(**asked("a", public_header=True, reuse="off"))
    first = engine.generate(**asked("a", public_header=True))
    again = engine.generate(**asked("a", public_header=True))
    other = engine.generate(**asked("b", public_header=True))
    private = engine.generate(**asked("a"))
    assert first.cached_tokens == other.cached_tokens == header
    assert again.cached_tokens > header
    assert private.cached_tokens == 0
    assert len({result.logits_digest for result in (cold, first, again, other, private)}) == 1
    assert {result.exactness for result in (first, again, other)} == {"exact"}


def test_the_region_begins_at_a_cut_and_its_blocks_carry_the_salt(engine: Engine) -> None:
    prepared = engine.pipeline.prepare(None, asked("a", public_header=True))
    ((start, key),) = prepared.compiled.extra_keys.items()
    assert key == salt_key("a")
    blocks = engine.pipeline.linked(prepared.compiled).blocks
    assert start in {block.end for block in blocks}
    assert all(bool(block.salts) == (block.start >= start) for block in blocks)


def test_without_a_header_all_is_private(engine: Engine) -> None:
    for arguments in (
        {"prompt": "word " * 300, "salt": "a", "public_header": True},
        {"messages": [{"role": "user", "content": LONG}], "salt": "a", "public_header": True},
    ):
        keys = engine.pipeline.prepare(arguments.pop("prompt", None), arguments).compiled.extra_keys  # type: ignore[arg-type]
        header = 0 if "messages" not in arguments else min(keys)
        assert list(keys) == [header]


@pytest.mark.host_memory("pages are the lean decoder's")
def test_nobody_waits_for_what_another_salt_computes(engine: Engine) -> None:
    """In a batch a request waits for one that computes the same blocks; under another salt they are not the same."""
    with Batcher(engine) as batcher:
        tickets = [batcher.submit(**asked(salt)) for salt in ("a", "b", "a", "b")]
        results = [ticket.result(60) for ticket in tickets]
    assert [result.cached_tokens > 0 for result in results] == [False, False, True, True]
    assert len({result.logits_digest for result in results}) == 1


def test_a_listener_gets_every_piece_and_then_the_end(engine: Engine) -> None:
    seen: list[Any] = []
    with Batcher(engine) as batcher:
        ticket = batcher.submit(**asked(None), listener=lambda whose, piece: seen.append((whose, piece)))
        result = ticket.result(60)
    assert all(whose is ticket for whose, _ in seen)
    assert seen[-1][1] is None
    assert seen[-2][1].result is result
    assert "".join(piece.text for _, piece in seen[:-1]) == result.text
    assert ticket.plan is not None
    assert ticket.plan.cached_tokens == result.cached_tokens


@pytest.mark.host_memory("pages are the lean decoder's")
def test_a_purge_reaches_the_pages_of_a_batch(engine: Engine) -> None:
    with Batcher(engine) as batcher:
        batcher.submit(**asked("a")).result(60)
        engine.flush()  # an answer is stored from its pages
        assert batcher.pool.counts.cached > 0
        engine.purge("a")
        assert batcher.pool.counts.cached == 0
        assert batcher.submit(**asked("a")).result(60).cached_tokens == 0
    assert engine.pipeline.on_purge == []
