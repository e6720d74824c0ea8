"""Any change that shapes the KV is a miss from the first difference on, and `explain` says why."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.helpers.models import tiny

from keepwarm import Engine
from keepwarm.core.blocks import common_length
from keepwarm.core.results import Explanation

SYSTEM = "You are a careful assistant of a travel agency. " + " ".join(f"Rule {i} holds." for i in range(30))


TOOLS = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": f"Look up the {name}.",
            "parameters": {
                "type": "object",
                "properties": {"city": {"type": "string"}, "unit": {"enum": ["day", "hour"]}},
                "required": ["unit", "city"],
            },
        },
    }
    for name in ("weather", "trains", "hotels")
]


QUESTION = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": "Where to?"}]


STEP = 32


@pytest.fixture(scope="module")
def folder(saved: Callable[..., Path]) -> Path:
    return saved("llama")


@pytest.fixture(scope="module")
def store(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store in which QUESTION with TOOLS is warm."""
    store = tmp_path_factory.mktemp("store")
    with open_engine(folder, store) as engine:
        engine.generate(messages=QUESTION, tools=TOOLS, max_new_tokens=1)
    return store


def open_engine(source: Any, store: Path, **settings: Any) -> Engine:
    return Engine.from_pretrained(source, store=store, step=STEP, min_step=8, **settings)


@pytest.fixture
def engine(folder: Path, store: Path) -> Iterator[Engine]:
    with open_engine(folder, store) as engine:
        yield engine


@pytest.fixture
def scheduled(folder: Path, tmp_path: Path) -> Iterator[Engine]:
    """An engine whose bits depend on cuts and threads, as they do through transformers; QUESTION with TOOLS is warm."""
    with open_engine(folder, tmp_path / "scheduled", attention="model") as engine:
        engine.generate(messages=QUESTION, tools=TOOLS, max_new_tokens=1)
        engine.flush()
        engine.pipeline.pool.forget()
        yield engine


def header_tokens(engine: Engine) -> int:
    return max(s.end for s in engine.explain(messages=QUESTION, tools=TOOLS).segments if s.kind == "tools")


def reached(explained: Explanation, at: int) -> int:
    """How far reuse goes of what agrees up to a position: to there where rows are invariant, else to the cut before."""
    return max([cut for cut in explained.cuts if cut <= at], default=0) if explained.cuts else at


def test_same_content_hits_in_another_engine(engine: Engine) -> None:
    asked = {"messages": [QUESTION[0], {"role": "user", "content": "And then?"}], "tools": TOOLS}
    one, other = (
        engine.pipeline.prepare(None, it).compiled.tokens for it in (asked, {"messages": QUESTION, "tools": TOOLS})
    )
    explained = engine.explain(**asked)
    r = engine.generate(**asked, max_new_tokens=1)
    assert r.cached_tokens == reached(explained, common_length(one, other)) >= header_tokens(engine)
    assert r.cached_by_tier == {"disk": r.cached_tokens}
    assert r.exactness == "exact"


def in_another_order(change: str) -> list[dict[str, Any]]:
    tools = copy.deepcopy(TOOLS)
    if "order of tools" in change:
        tools.reverse()
    if "order of keys" in change:
        tools = [dict(reversed(t.items())) for t in tools]
    if "order of required" in change:
        tools[0]["function"]["parameters"]["required"].reverse()
    return tools


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ("order of tools", "the tools differs"),
        ("order of keys", "the keys of the tools differs"),
        pytest.param("order of required", "the keys of the tools differs", marks=pytest.mark.slow),
        ("order of tools, order of keys", "the tools and the keys of the tools differs"),
    ],
)
def test_another_order_is_another_prompt_and_explain_says_that_only_the_order_differs(
    engine: Engine, change: str, told: str
) -> None:
    tools = in_another_order(change)
    explained = engine.explain(messages=QUESTION, tools=tools)
    assert explained.cached_tokens < header_tokens(engine)
    assert explained.miss is not None
    assert (explained.miss.reason, explained.miss.changed) == ("tokens_differ", "order")
    assert f"only the order of {told}" in explained.miss.detail
    assert "tool_order='sorted'" in explained.miss.detail
    tools[0]["function"]["description"] += "!"
    also = engine.explain(messages=QUESTION, tools=tools).miss
    assert also is not None
    assert also.changed in ("system", "tools"), "more than the order differs"


@pytest.mark.parametrize(
    "change", ["order of tools", "order of keys", pytest.param("order of required", marks=pytest.mark.slow)]
)
def test_sorted_tools_hit_in_any_order(folder: Path, tmp_path: Path, change: str) -> None:
    with open_engine(folder, tmp_path, tool_order="sorted") as engine:
        engine.generate(messages=QUESTION, tools=TOOLS, max_new_tokens=1)
        engine.flush()
        assert engine.explain(messages=QUESTION, tools=in_another_order(change)).cached_tokens >= header_tokens(engine)


def changed_prompt(change: str) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    messages, tools = copy.deepcopy(QUESTION), copy.deepcopy(TOOLS)
    if change == "system":
        messages[0]["content"] = SYSTEM.replace("Rule 9 ", "rule 9 ")
    elif change == "one character of one tool":
        tools[1]["function"]["description"] += "!"
    elif change == "enum order":
        tools[1]["function"]["parameters"]["properties"]["unit"]["enum"].reverse()
    return messages, tools


@pytest.mark.parametrize("change", ["system", "one character of one tool", "enum order"])
def test_changed_content_misses_from_the_difference_on(engine: Engine, change: str) -> None:
    messages, tools = changed_prompt(change)
    explained = engine.explain(messages=messages, tools=tools)
    assert explained.miss is not None
    assert explained.miss.reason == "tokens_differ"
    assert explained.cached_tokens == reached(explained, explained.miss.position)
    assert explained.miss.wanted != explained.miss.stored
    warm = engine.generate(messages=messages, tools=tools, max_new_tokens=3, trace=True)
    cold = engine.generate(messages=messages, tools=tools, max_new_tokens=3, trace=True, reuse="off")
    assert (warm.cached_tokens, warm.exactness) == (explained.cached_tokens, "exact")
    assert warm.logits_digest == cold.logits_digest


def test_another_salt_shares_nothing(engine: Engine) -> None:
    explained = engine.explain(messages=QUESTION, tools=TOOLS, salt="tenant")
    assert explained.cached_tokens == explained.cached_prefix_tokens == 0
    assert explained.miss is not None
    assert explained.miss.reason == "salt_differs"
    engine.generate(messages=QUESTION, tools=TOOLS, salt="tenant", max_new_tokens=1)
    engine.flush()
    assert engine.explain(messages=QUESTION, tools=TOOLS, salt="tenant").cached_tokens > 0
    assert engine.explain(messages=QUESTION, tools=TOOLS, salt="other").cached_tokens == 0


def expect_model_miss(engine: Engine, what: str) -> None:
    with engine:
        explained = engine.explain(messages=QUESTION, tools=TOOLS)
        assert explained.cached_tokens == explained.cached_prefix_tokens == 0
        assert explained.miss is not None
        assert explained.miss.reason == "model_changed"
        assert what in explained.miss.detail
        assert ("the same ones" in explained.miss.detail) == ("another dtype" in explained.miss.detail)


def test_other_weights_miss(store: Path, tokenizer: Any) -> None:
    expect_model_miss(open_engine((tiny("llama", seed=1), tokenizer), store), "weights")


def test_another_dtype_misses(folder: Path, store: Path) -> None:
    expect_model_miss(open_engine(folder, store, dtype="float16"), "dtype")  # which no machine chooses by itself


def test_another_tokenizer_misses(folder: Path, store: Path, tokenizer: Any) -> None:
    other = copy.deepcopy(tokenizer)
    other.add_special_tokens({"additional_special_tokens": ["<|fim_prefix|>"]})
    model = Engine.from_pretrained(folder, max_ram=0).pipeline.model.model
    expect_model_miss(open_engine((model, other), store), "tokenizer")


def test_rope_change_misses(store: Path, tokenizer: Any) -> None:
    rope = {"rope_type": "default", "rope_theta": 50_000.0}
    expect_model_miss(open_engine((tiny("llama", rope_parameters=rope), tokenizer), store), "rotary")


@pytest.mark.slow
def test_lora_misses_and_is_told_apart(folder: Path, store: Path, tokenizer: Any) -> None:
    import peft

    settings = peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    model = peft.get_peft_model(tiny("llama"), settings)
    expect_model_miss(open_engine((model, tokenizer), store), "LoRA")
    with open_engine((model, tokenizer), store) as engine:
        first = engine.generate(messages=QUESTION, tools=TOOLS, max_new_tokens=2, trace=True)
        assert engine.generate(messages=QUESTION, tools=TOOLS, max_new_tokens=2).cached_tokens > 0
        with model.disable_adapter():  # the same tensors, another function
            without = engine.generate(messages=QUESTION, tools=TOOLS, max_new_tokens=2, trace=True)
        assert without.cached_tokens == 0
        assert without.logits_digest != first.logits_digest


@pytest.mark.slow
def test_a_lora_folder_loads(folder: Path, tmp_path: Path) -> None:
    import peft

    base = Engine.from_pretrained(folder, max_ram=0).pipeline.model.model
    model = peft.get_peft_model(base, peft.LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False))
    model.save_pretrained(tmp_path / "adapter")
    with Engine.from_pretrained(tmp_path / "adapter", store=tmp_path / "store", step=STEP) as engine:
        assert engine.pipeline.model.identity.lora != "none"
        cold = engine.generate(messages=QUESTION, max_new_tokens=2, trace=True)
        assert engine.generate(messages=QUESTION, max_new_tokens=2, trace=True).logits_digest == cold.logits_digest


def test_another_chat_template_misses(folder: Path, store: Path, tokenizer: Any) -> None:
    other = copy.deepcopy(tokenizer)
    other.chat_template = "<|im_start|>start\n" + tokenizer.chat_template
    model = Engine.from_pretrained(folder, max_ram=0).pipeline.model.model
    with open_engine((model, other), store) as engine:
        assert engine.explain(messages=QUESTION, tools=TOOLS).cached_prefix_tokens <= 2


def test_other_cuts_are_at_most_prefix(scheduled: Engine) -> None:
    engine = scheduled
    text = SYSTEM + " Go on."
    engine.generate(text, max_new_tokens=1, salt="cuts")
    engine.flush()
    # the same tokens with an additional cut at 40: the exact chain breaks after the first step
    parts = [engine.pipeline.tokenizer.decode(engine.pipeline.tokenizer.encode(SYSTEM)[0][:40])]
    parts.append(SYSTEM[len(parts[0]) :] + " Go on.")
    explained = engine.explain(segments=parts, salt="cuts")
    assert explained.cached_tokens == STEP
    assert explained.miss is not None
    assert explained.miss.reason == "cuts_differ"
    prefix = engine.generate(segments=parts, max_new_tokens=2, salt="cuts", reuse="prefix")
    assert prefix.cached_tokens > STEP
    assert prefix.exactness == "prefix"
    exact = engine.generate(segments=parts, max_new_tokens=2, salt="cuts", reuse="exact")
    assert exact.cached_tokens == STEP
    assert exact.exactness == "exact"


@pytest.mark.host_memory("that they shape no bits is the lean decoder's")
@pytest.mark.parametrize("changed", ["cuts", "threads"])
def test_cuts_and_threads_shape_no_bits_of_our_kernels(engine: Engine, changed: str) -> None:
    """What they are asked for again, and a cold run under them, is what was computed before."""
    threads, text = torch.get_num_threads(), SYSTEM + " Go on."
    first = engine.generate(text, max_new_tokens=2, salt=changed, trace=True)
    engine.flush()
    engine.pipeline.pool.forget()
    asked: Any = {"prompt": text}
    if changed == "cuts":
        parts = [engine.pipeline.tokenizer.decode(engine.pipeline.tokenizer.encode(SYSTEM)[0][:40])]
        asked = {"segments": [*parts, SYSTEM[len(parts[0]) :] + " Go on."]}
    else:
        torch.set_num_threads(threads + 1)
    try:
        warm = engine.generate(**asked, max_new_tokens=2, salt=changed, trace=True)
        cold = engine.generate(**asked, max_new_tokens=2, salt=changed, trace=True, reuse="off")
    finally:
        torch.set_num_threads(threads)
    assert (warm.cached_tokens, warm.exactness) == (warm.prompt_tokens - 1, "exact")
    assert first.logits_digest == warm.logits_digest == cold.logits_digest


def test_another_thread_count_is_never_exact(scheduled: Engine) -> None:
    engine = scheduled
    threads = torch.get_num_threads()
    torch.set_num_threads(threads + 1)
    try:
        explained = engine.explain(messages=QUESTION, tools=TOOLS)
        assert explained.cached_tokens == 0
        assert explained.miss is not None
        assert explained.miss.reason == "arithmetic_differs"
        assert "threads" in explained.miss.detail
        r = engine.generate(messages=QUESTION, tools=TOOLS, max_new_tokens=1, reuse="prefix")
        assert r.cached_tokens > 0
        assert r.exactness == "prefix"
    finally:
        torch.set_num_threads(threads)


def test_what_stands_on_prefix_reuse_is_never_found_as_exact(scheduled: Engine) -> None:
    """Fresh KV computed on top of KV that was not exact gets other names."""
    engine = scheduled
    long = [SYSTEM + " Go on. ", "Word " * 80, "end"]
    engine.generate(SYSTEM + " Go on. ", max_new_tokens=1, salt="derived")
    engine.flush()
    cut = engine.pipeline.tokenizer.decode(engine.pipeline.tokenizer.encode(SYSTEM)[0][:40])
    parts = [cut, SYSTEM[len(cut) :] + " Go on. ", *long[1:]]
    reused = engine.generate(segments=parts, max_new_tokens=1, salt="derived", reuse="prefix")
    assert reused.exactness == "prefix"
    engine.flush()
    engine.pipeline.pool.forget()
    warm = engine.generate(segments=parts, max_new_tokens=2, salt="derived", trace=True)
    cold = engine.generate(segments=parts, max_new_tokens=2, salt="derived", trace=True, reuse="off")
    assert warm.logits_digest == cold.logits_digest


def test_what_stands_on_another_arithmetic_is_never_found_as_exact(engine: Engine, folder: Path) -> None:
    """The same where a row's bits depend on nothing but tokens: what is loaded was computed by others."""
    text, store = SYSTEM + " Go on. " + "Word " * 80, engine.pipeline.config.store
    with open_engine(folder, store, attention="model") as other:  # type: ignore[arg-type]
        other.generate(SYSTEM + " Go on. ", max_new_tokens=1, salt="foreign")
    assert engine.generate(text, max_new_tokens=1, salt="foreign", reuse="off").exactness == "exact"
    explained = engine.explain(text, salt="foreign")
    assert explained.miss is not None
    assert (explained.cached_tokens, explained.miss.reason) == (0, "arithmetic_differs")
    reused = engine.generate(text, max_new_tokens=1, salt="foreign", reuse="prefix")
    assert reused.cached_tokens > 100
    assert reused.exactness == "prefix"
    for _ in range(2):  # the second time from what the first stored
        engine.flush()
        engine.pipeline.pool.forget()
        warm = engine.generate(text, max_new_tokens=2, salt="foreign", trace=True)
        cold = engine.generate(text, max_new_tokens=2, salt="foreign", trace=True, reuse="off")
        assert (warm.logits_digest, warm.exactness) == (cold.logits_digest, "exact")
    assert warm.cached_tokens == reached(engine.explain(text, salt="foreign"), warm.prompt_tokens - 1)


def test_a_conversation_that_begins_inside_anothers_block_is_stored_too(scheduled: Engine) -> None:
    """Under `prefix`, reuse may end inside a block; what follows must be found again at the next turn."""
    engine = scheduled
    ids = engine.pipeline.tokenizer.encode(SYSTEM)[0][: 3 * STEP]
    engine.generate([*ids[: STEP // 2], *ids[:STEP]], max_new_tokens=1, salt="inside")  # begins alike, for half a step
    engine.flush()
    first = engine.generate(ids, max_new_tokens=1, salt="inside", reuse="prefix")
    assert (first.cached_tokens, first.exactness) == (STEP // 2, "prefix")
    engine.flush()
    engine.pipeline.pool.forget()
    second = engine.generate([*ids, *ids[:5]], max_new_tokens=3, salt="inside", reuse="prefix")
    assert second.cached_tokens >= 2 * STEP
    assert engine.generate([*ids, *ids[:5]], max_new_tokens=1, salt="inside").exactness == "exact"
    cold = engine.generate([*ids, *ids[:5]], max_new_tokens=3, salt="inside", reuse="off")
    assert second.token_ids == cold.token_ids


@pytest.mark.host_memory("a match that ends at any token is the lean decoder's")
@pytest.mark.parametrize("kept", [pytest.param("ram", marks=pytest.mark.slow), "disk"])
def test_of_many_questions_about_one_text_the_nearest_is_told(folder: Path, tmp_path: Path, kept: str) -> None:
    """However many are stored behind the same text: a look at each would take longer the more popular it is."""
    with open_engine(folder, tmp_path, max_ram="0B" if kept == "disk" else "1GiB") as engine:
        text = engine.pipeline.tokenizer.encode(SYSTEM)[0][: 2 * STEP]
        asked = [[7 + number, *([300 + number] * 12)] for number in range(60)]
        for question in asked:
            engine.generate([*text, *question], max_new_tokens=1)
        engine.flush()
        engine.pipeline.pool.forget()
        for number in (0, 31, 59):
            miss = engine.explain([*text, *asked[number][:9], 290, 290]).miss
            assert miss is not None
            assert (miss.reason, miss.position) == ("tokens_differ", len(text) + 9)


def test_of_many_texts_under_scheduled_arithmetic_the_nearest_is_told(scheduled: Engine) -> None:
    engine = scheduled
    head = engine.pipeline.tokenizer.encode(SYSTEM)[0][:STEP]
    asked = [[*head, *([50 + number] * (STEP - 4)), *([90 + number] * 8)] for number in range(20)]
    for prompt in asked:
        engine.generate(prompt, max_new_tokens=1)
    engine.flush()
    engine.pipeline.pool.forget()
    for number in (0, 11, 19):
        miss = engine.explain([*asked[number][: 2 * STEP - 10], *([290] * 2 * STEP)]).miss
        assert miss is not None
        assert (miss.reason, miss.position) == ("tokens_differ", 2 * STEP - 10)
