"""Exact at any token: what was computed once is found up to the first token that differs, whoever computed it and how,
and the answer is that of a cold run to the bit."""

from __future__ import annotations

import random
import shutil
import tempfile
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule
from tests.helpers.lean_families import lean_family
from tests.helpers.models import VOCABULARY, tiny

from keepwarm import Engine
from keepwarm.batching import Batcher
from keepwarm.core.results import Generation

pytestmark = pytest.mark.host_memory("exact at any token is the lean decoder's")

NEW = 5  # tokens generated at most


def common(one: list[int], other: list[int]) -> int:
    return next((at for at, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


class Asked:
    """What was asked of an engine, and what a cold one answers."""

    def __init__(self, model: Any, tokenizer: Any) -> None:
        self.cold = Engine.from_pretrained((model, tokenizer), reuse="off")
        self.runs: list[list[int]] = []  # token ids whose KV was computed

    def best(self, prompt: list[int]) -> int:
        """Tokens that an unbounded cache at token level reuses."""
        return min(max((common(run, prompt) for run in self.runs), default=0), len(prompt) - 1)

    def check(self, prompt: list[int], found: Generation, at_least: int, at_most: int) -> None:
        cold = self.cold.generate(prompt, max_new_tokens=NEW, trace=True)
        if found.exactness == "quantized":
            return
        assert found.token_ids == cold.token_ids
        assert found.exactness == "exact"
        if found.logits_digest is not None:
            assert found.logits_digest == cold.logits_digest
        assert at_least <= found.cached_tokens <= at_most

    def ran(self, prompt: list[int], found: Generation) -> None:
        self.runs.append([*prompt, *found.token_ids[:-1]])  # the last token was chosen, not run


@pytest.fixture(scope="module")
def model() -> Any:
    return tiny("llama")


@pytest.fixture(scope="module")
def bf16() -> Any:
    return tiny("qwen2", torch.bfloat16)


@pytest.fixture(scope="module")
def windowed() -> Any:
    return lean_family("gemma3", vocab_size=VOCABULARY)


class Trees(RuleBasedStateMachine):
    """Random trees of prompts over one store: answered alone or together, edited, gone on from, restarted, evicted."""

    model: Any
    tokenizer: Any
    settings_of_engine: ClassVar[dict[str, Any]] = {}
    all_is_found: ClassVar[bool] = (
        True  # remote tiers find whole pages, and what went through a lossy codec is not exact
    )

    def __init__(self) -> None:
        super().__init__()
        self.folder = Path(tempfile.mkdtemp())
        self.asked = Asked(self.model, self.tokenizer)
        self.sure = True  # nothing was evicted since
        self.random = random.Random(0)
        self.engine = self._open()

    def _open(self) -> Engine:
        settings = dict(self.settings_of_engine)
        if "remote" in settings:
            settings["remote"] = settings["remote"].format(self.folder)
        else:
            settings["store"] = self.folder
        return Engine.from_pretrained((self.model, self.tokenizer), **settings)

    def teardown(self) -> None:
        self.engine.close()
        self.asked.cold.close()
        shutil.rmtree(self.folder)

    def _ids(self, count: int) -> list[int]:
        return [self.random.randrange(3, 40000) for _ in range(count)]

    @initialize(seed=st.integers(0, 2**32))
    def begin(self, seed: int) -> None:
        self.random.seed(seed)

    def _prompt(self, cut: float, more: int) -> list[int]:
        """What goes on from somewhere in something that was run."""
        base = self.random.choice(self.asked.runs) if self.asked.runs else []
        return [*base[: int(cut * len(base) + 0.5)], *self._ids(more)][-1500:]

    def _expect(self, prompt: list[int]) -> tuple[int, int]:
        best = self.asked.best(prompt)
        return (best if self.sure and self.all_is_found else 0), best

    @rule(cut=st.floats(0, 1), more=st.sampled_from([1, 2, 7, 31, 32, 33, 70, 130]))
    def ask(self, cut: float, more: int) -> None:
        prompt = self._prompt(cut, more)
        expected = self._expect(prompt)
        found = self.engine.generate(prompt, max_new_tokens=NEW, trace=True)
        self.asked.check(prompt, found, *expected)
        self.asked.ran(prompt, found)

    @rule()
    @precondition(lambda self: self.asked.runs)
    def ask_again(self) -> None:
        prompt = self.random.choice(self.asked.runs)[:-1] or [5]
        found = self.engine.generate(prompt, max_new_tokens=NEW, trace=True)
        self.asked.check(prompt, found, *self._expect(prompt))
        self.asked.ran(prompt, found)

    @rule(cut=st.floats(0, 1), more=st.integers(1, 40))
    def break_off(self, cut: float, more: int) -> None:
        prompt = self._prompt(cut, more)
        pieces = self.engine.stream(prompt, max_new_tokens=NEW)
        first = next(pieces)
        pieces.close()
        assert first.token_id is not None
        self.asked.runs.append(prompt)

    @rule(cuts=st.lists(st.floats(0, 1), min_size=2, max_size=4), more=st.integers(1, 40))
    def ask_together(self, cuts: list[float], more: int) -> None:
        self.engine.flush()  # arenas may go for others: what is on its way to the store is then nowhere else
        prompts = [self._prompt(cut, more) for cut in cuts]
        least = [self._expect(prompt)[0] for prompt in prompts]
        with Batcher(self.engine) as batch:
            tickets = [batch.submit(prompt, max_new_tokens=NEW, trace=True) for prompt in prompts]
            results = [ticket.result(60) for ticket in tickets]
        self.engine.flush()  # a batch's answers are stored from its pages, a moment later
        for prompt, found, at_least in zip(prompts, results, least, strict=True):
            self.asked.check(prompt, found, at_least, len(prompt) - 1)
            self.asked.ran(prompt, found)

    @rule(more=st.integers(1, 200))
    def warm(self, more: int) -> None:
        prompt = self._prompt(0.7, more)
        self.engine.warm(prompt)
        self.asked.runs.append(prompt)

    @rule()
    def restart(self) -> None:
        self.engine.close()
        self.engine = self._open()

    @rule()
    def forget_device(self) -> None:
        self.engine.flush()  # what is on its way to the store is nowhere else
        self.engine.pipeline.pool.forget()

    @rule()
    def forget_ram(self) -> None:
        self.engine.flush()
        self.engine.pipeline.pool.forget()
        self.engine.pipeline.archive.clear_ram()

    @rule()
    @precondition(lambda self: self.asked.runs)
    def give_up_some(self) -> None:
        self.engine.flush()
        if runs := self.engine.pipeline.archive.contents.entries():
            self.engine.remove(self.random.choice(runs).id)
            self.sure = False


@pytest.mark.parametrize(
    ("kind", "settings_of_engine", "all_is_found"),
    [
        ("model", {}, True),
        pytest.param("bf16", {}, True, marks=pytest.mark.slow),
        pytest.param("windowed", {}, True, marks=pytest.mark.slow),
        pytest.param("windowed", {"max_ram": 0}, True, marks=pytest.mark.slow),
        pytest.param("model", {"max_ram": 0}, True, marks=pytest.mark.slow),
        pytest.param("model", {"step": 48}, True, marks=pytest.mark.slow),
        pytest.param("model", {"min_write_tokens": 40}, False, marks=pytest.mark.slow),
        pytest.param("model", {"store_answers": False}, False, marks=pytest.mark.slow),
        pytest.param("model", {"kv_codec": "int8", "reuse": "prefix"}, False, marks=pytest.mark.slow),
        pytest.param("model", {"remote": "file://{}", "max_ram": 0}, False, marks=pytest.mark.slow),
    ],
    ids=["all", "bf16", "windows", "windows-disk", "disk", "steps", "few-writes", "no-answers", "int8", "remote"],
)
def test_trees_of_prompts(
    request: pytest.FixtureRequest, tokenizer: Any, kind: str, settings_of_engine: dict[str, Any], all_is_found: bool
) -> None:
    own = {"settings_of_engine": settings_of_engine, "all_is_found": all_is_found}
    case = type("Case", (Trees,), {"model": request.getfixturevalue(kind), "tokenizer": tokenizer} | own)
    run = case.TestCase()
    run.settings = settings(
        max_examples=4 if request.node.get_closest_marker("slow") else 2,
        stateful_step_count=10,
        deadline=None,
        suppress_health_check=list(HealthCheck),
        phases=[phase for phase in Phase if phase is not Phase.shrink],  # minutes: a case takes seconds
    )
    run.runTest()
