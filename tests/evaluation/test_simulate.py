"""The simulator: traces are read right, the caches are the real ones, and nothing beats the optimum."""

from __future__ import annotations

import itertools
import json
from array import array
from pathlib import Path
from typing import get_args

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.helpers.cli import Cli, cli

from keepwarm.errors import ConfigError
from keepwarm.evaluation.caches import BlockCache, TokenCache
from keepwarm.evaluation.simulate import POLICIES, Match, Router, optimum, replay, simulate
from keepwarm.evaluation.traces import UNKNOWN, Trace
from keepwarm.store.eviction import PolicyName

__all__ = ["cli"]

MATCHES: tuple[Match, ...] = get_args(Match)


def trace_of(*chains: list[int]) -> Trace:
    """A trace of chains of whole blocks of one token; equal numbers in two chains must have equal beginnings."""
    bounds = [0, *itertools.accumulate(len(chain) for chain in chains)]
    nodes = [node for chain in chains for node in chain]
    lengths = [len(chain) for chain in chains]
    return Trace("made", 1, array("q", nodes), array("q", bounds), array("q", lengths), max(nodes) + 1)


def mooncake(file: Path, rows: list[tuple[int, int, list[int]]]) -> Path:
    keys = ("timestamp", "input_length", "hash_ids")
    file.write_text("".join(json.dumps(dict(zip(keys, row, strict=True))) + "\n" for row in rows))
    return file


@pytest.fixture
def file(tmp_path: Path) -> Path:
    rows = [(0, 1000, [0, 1]), (5, 1500, [0, 1, 2]), (9, 600, [7, 1]), (2, 1000, [0, 1])]
    return mooncake(tmp_path / "trace.jsonl", rows)


def test_a_mooncake_trace_is_read_in_order_of_time(file: Path) -> None:
    trace = Trace.read(file)
    assert (trace.block, len(trace), trace.tokens) == (512, 4, 4100)
    assert list(trace.lengths) == [1000, 1000, 1500, 600]
    assert [list(trace.chain(at)) for at in range(4)] == [[0, 1], [0, 1], [0, 1, 2], [3, 4]]  # [7, 1] is not [0, 1]


def test_agent_sessions_share_nothing_and_are_merged_by_time(tmp_path: Path) -> None:
    files = []
    for name in ("a", "b"):
        inner = {"t": 5.0, "in": 200, "hash_ids": [1, 2, 3]}
        session = {
            "block_size": 64,
            "requests": [{"t": 1.0, "in": 100, "hash_ids": [1, 2]}, {"t": 4.0, "requests": [inner]}],
        }
        files.append(tmp_path / f"{name}.json")
        files[-1].write_text(json.dumps(session))
    trace = Trace.read(*files)
    assert (trace.block, len(trace), trace.distinct) == (64, 4, 6)
    assert list(trace.lengths) == [100, 100, 200, 200]
    assert replay(trace, "shared", 1, "lru", 1.0, "blocks").hit_rate == pytest.approx(2 * 128 / 600)
    assert replay(trace, "shared", 1, "lru", 1.0).hit_rate == pytest.approx(2 * 100 / 600)  # 2 begins with 36 tokens


def test_what_follows_a_sessions_last_whole_block_begins_the_next_requests(tmp_path: Path) -> None:
    asked = [(100, [1]), (70, [1]), (200, [1, 2, 3]), (80, [1])]
    requests = [{"t": float(at), "in": tokens, "hash_ids": ids} for at, (tokens, ids) in enumerate(asked)]
    file = tmp_path / "a.json"
    file.write_text(json.dumps({"block_size": 64, "requests": requests}))
    trace = Trace.read(file)
    assert [trace.within(at) for at in range(4)] == [[0, 1], [0, 1], [0, 1, 2, UNKNOWN], [0, UNKNOWN]]
    cache = TokenCache("lru", 100, 64)
    found = [cache.serve(trace.within(at), trace.lengths[at]) for at in range(4)]
    assert found == [0, 69, 100, 64]


def test_copies_are_crowds_that_share_nothing(file: Path) -> None:
    one, five = Trace.read(file), Trace.read(file, copies=5)
    assert (len(five), five.distinct, five.tokens) == (20, 25, 5 * one.tokens)
    assert optimum(five, 1.0).hit_rate <= optimum(one, 1.0).hit_rate


def test_what_is_no_trace_is_refused(tmp_path: Path, file: Path) -> None:
    wrong = tmp_path / "wrong.jsonl"
    wrong.write_text('{"text": "hello"}\n')
    with pytest.raises(ConfigError, match="no trace of a known format"):
        Trace.read(wrong)
    with pytest.raises(ConfigError, match="cannot be read"):
        Trace.read(tmp_path / "nothing")
    agent = tmp_path / "agent.json"
    agent.write_text(json.dumps({"block_size": 64, "requests": [{"t": 0, "in": 5, "hash_ids": [1]}]}))
    with pytest.raises(ConfigError, match="one block size"):
        Trace.read(file, agent)


def test_hits_are_counted_in_tokens_of_the_prompt(file: Path) -> None:
    trace = Trace.read(file)
    found = replay(trace, "shared", 1, "lru", 1.0, "blocks")
    assert (found.match, found.hit_rate) == ("blocks", (1000 + 1024) / 4100)
    assert optimum(trace, 1.0, "blocks").hit_rate == found.hit_rate
    found = replay(trace, "shared", 1, "lru", 1.0)
    assert (found.match, found.hit_rate) == ("tokens", (999 + 1000) / 4100)  # 488 tokens of block 1 are known then
    assert optimum(trace, 1.0).hit_rate == found.hit_rate


@pytest.mark.parametrize("kind", [BlockCache, TokenCache])
def test_a_cache_gives_up_leaves_first(kind: type[BlockCache | TokenCache]) -> None:
    cache = kind("lru", 4, 2)
    assert cache.serve([0, 1], 4) == 0
    assert cache.serve([0, 1, 2], 6) == 4
    assert cache.serve([5], 2) == 0
    assert cache.serve([6], 2) == 0  # block 2 went: nothing continues it
    assert cache.serve([0, 1, 2], 6) == 4


def test_a_match_to_the_token_ends_where_prompts_part_and_leaves_one() -> None:
    cache = TokenCache("lru", 100, 64)
    found = [cache.serve(*asked) for asked in (([0, 1], 100), ([0, 1], 100), ([0, 1], 128), ([0, 1], 70), ([0, 2], 99))]
    assert found == [0, 99, 100, 69, 64]


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.lists(st.integers(0, 2), min_size=1, max_size=5), st.integers(1, 4)), max_size=12))
def test_without_a_cap_a_match_to_the_token_is_the_longest_common_beginning(asked: list[tuple[list[int], int]]) -> None:
    """Prompts are paths in a tree; a path's node is its number in base four, and a block is four tokens."""
    cache, before = TokenCache("lru", 1000, 4), [[-1]]
    for path, last in asked:
        nodes = [int("".join(str(each + 1) for each in path[: depth + 1]), 4) for depth in range(len(path))]
        length = 4 * len(nodes) - 4 + last
        tokens = [4 * node + at for node in nodes for at in range(4)][:length]
        pairs = [
            list(itertools.takewhile(lambda pair: pair[0] == pair[1], zip(tokens, old, strict=False))) for old in before
        ]
        assert cache.serve(nodes, length) == min(max(map(len, pairs)), length - 1)
        before.append(tokens)


def _brute(chains: list[list[int]], capacity: int) -> int:
    """Most blocks that any choice of what to keep after each request can find."""
    best = {frozenset[int](): 0}
    for chain in chains:
        following: dict[frozenset[int], int] = {}
        for held, hits in best.items():
            found = next((at for at, node in enumerate(chain) if node not in held), len(chain))
            room = held | set(chain)
            for kept in itertools.chain.from_iterable(
                itertools.combinations(sorted(room), size) for size in range(min(capacity, len(room)) + 1)
            ):
                key = frozenset(kept)
                following[key] = max(following.get(key, 0), hits + found)
        best = following
    return max(best.values())


# A tree of blocks: 0 → 1 → 2, 0 → 3, 4 → 5.
PATHS = [[0], [0, 1], [0, 1, 2], [0, 3], [4], [4, 5]]


@settings(max_examples=60, deadline=None)
@given(st.lists(st.sampled_from(PATHS), min_size=1, max_size=6), st.integers(1, 4))
def test_the_optimum_is_what_trying_everything_finds(chains: list[list[int]], capacity: int) -> None:
    trace = trace_of(*chains, [5])
    share = capacity / trace.distinct
    tokens = sum(map(len, chains)) + 1
    assert round(optimum(trace, share, "blocks").hit_rate * tokens) == _brute([*chains, [5]], capacity)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.sampled_from(PATHS), min_size=1, max_size=30), st.integers(1, 6), st.sampled_from(POLICIES))
def test_no_policy_beats_the_optimum(chains: list[list[int]], capacity: int, name: PolicyName) -> None:
    trace = trace_of(*chains, [5])
    share = capacity / trace.distinct
    for match in MATCHES:
        best = optimum(trace, share, match).hit_rate
        assert replay(trace, "shared", 1, name, share, match).hit_rate <= best + 1e-9


def test_a_router_follows_prefixes_and_shuns_the_busy() -> None:
    router = Router(3, 100)
    first = router.route([1, 2, 3, 4])
    assert router.route([1, 2, 3, 5]) == first
    assert router.route([9, 8]) != first
    many = [router.route([1, 2, 3, 4]) for _ in range(30)]
    assert len(set(many)) > 1


def test_fleets_find_more_the_more_they_share(tmp_path: Path) -> None:
    rows = [(at, 4 * 512, [at % 8, 100 + at % 8, 200 + at % 8, 300 + at % 8]) for at in range(400)]
    trace = Trace.read(mooncake(tmp_path / "t.jsonl", rows))
    rates = {fleet: replay(trace, fleet, 3, "lru", 1.0).hit_rate for fleet in ("local", "routed", "shared")}  # type: ignore[arg-type]
    assert rates["local"] <= rates["routed"] <= rates["shared"]
    assert rates["shared"] > 0.97
    thousand = replay(trace, "routed", 1000, "lru", 1.0)
    assert thousand.replicas == 1000


def test_jobs_change_nothing(file: Path) -> None:
    trace = Trace.read(file)
    one, two = (
        [(e.policy, e.share, e.hit_rate) for e in simulate(trace, shares=[0.5, 1.0], jobs=jobs)] for jobs in (1, 2)
    )
    assert one == two
    assert len(one) == 2 * (1 + len(POLICIES))


@pytest.mark.slow
def test_the_command_prints_a_table_and_draws(cli: Cli, file: Path, tmp_path: Path) -> None:
    picture, lines = tmp_path / "rates.png", tmp_path / "rates.jsonl"
    done = cli("simulate", file, "--capacity", "50,100", "--replicas", "1,2", "--plot", picture, "--out", lines)
    assert done.code == 0
    assert "optimum (Belady)" in done.out
    assert "up to the first token that differs" in done.err
    assert "s3fifo, 2 replicas, routed" in done.out
    assert picture.stat().st_size > 1000
    assert len(lines.read_text().splitlines()) == 2 + 2 * 3 + 2 * 3 * 3
    found = cli("simulate", file, "--capacity", "100", "--policy", "lru", "--json").json["outcomes"]
    assert [(each["policy"], each["match"]) for each in found] == [("belady", "tokens"), ("lru", "tokens")]
    assert "in whole blocks" in cli("simulate", file, "--capacity", "100", "--match", "blocks").err


@pytest.mark.parametrize(
    "wrong",
    [
        ["--capacity", "0"],
        ["--policy", "best"],
        ["--replicas", "many"],
        ["--cache", ""],
        ["--match", "words"],
        ["--match", "tokens,blocks"],
    ],
)
def test_wrong_options_name_the_right_ones(cli: Cli, file: Path, wrong: list[str]) -> None:
    done = cli("simulate", file, *wrong)
    assert done.code == 2
    assert wrong[0] in done.err
