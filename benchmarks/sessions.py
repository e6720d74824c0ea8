"""Conversations in sessions: what each turn computes, when its first token comes, and whether it equals no cache.

    python benchmarks/sessions.py [--part cases turns straight memory] [--output benchmarks/results]

Writes `sessions-PART.jsonl`. Run it on an otherwise idle machine.

* `cases`: prompts of 153, 1,449 and 5,780 tokens (those of the character-matching paper): the second turn of a
  conversation without the cache, from a settled session, and as the first request of a new process.
* `turns`: conversations of 8 and of 50 turns, settled between turns. The floor is the bare forward pass over the turn's
  new tokens with all else in place. Every turn is compared, logits bit for bit, with an engine that has no store and
  reuses nothing. Afterwards the last turn is asked again of a new process.
* `straight`: chats without a session, each turn asked the instant the last one ended. After every few turns their
  floors are timed.
* `memory`: a warm prefix of 1,000 tokens extended by 5,000 at once, under several bounds (`max_scratch`): peak memory
  beside weights and KV up to the first token, as the system counts it, in a new process each.
"""

from __future__ import annotations

import argparse
import json
import platform
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch

from keepwarm import Engine
from keepwarm.config import EngineConfig
from keepwarm.runtime.arena.arena import Arena
from keepwarm.runtime.loader import load
from keepwarm.sessions.turn import marked

CASES = {"short": 153, "medium": 1449, "long": 5780}
CONVERSATIONS = (8, 50)
REPEATS = 3
REPLY = 16  # tokens at most
STRETCHES, STRETCH = 12, 4  # turns; their floors are timed after each stretch, while the machine is as it was
NEXT = "And which of them is the oldest?"
QUESTIONS = (
    "Which pier takes the largest boats?",
    "And the smallest?",
    "Who keeps the book of pier {n}?",
    "When does pier {n} close in winter?",
    "Say that in fewer words.",
    "Is pier {n} free on day {n}?",
)
SETTINGS: dict[str, Any] = {"settle_after": None}


def text_of(engine: Engine, tokens: int) -> str:
    """A system prompt of about `tokens` tokens."""
    lines = (
        f"Pier {n}: boats up to {n * 7 % 40} metres, keeper {n * 37 % 1009}, closes at {n % 12}." for n in range(9999)
    )
    text, count = "You are the clerk of a harbour.\n", 8
    for line in lines:
        count += len(engine.pipeline.tokenizer.encode(line + "\n", False)[0])
        if count > tokens:
            return text
        text += line + "\n"
    raise AssertionError


def sized(engine: Engine, tokens: int) -> str:
    """A system prompt with which a second turn has `tokens` tokens, if the first answer has as many as it may."""

    def count(system: str) -> int:
        said = ["", QUESTIONS[0], " pier" * REPLY, NEXT]
        roles = ("system", "user", "assistant", "user")
        chat = [{"role": role, "content": text} for role, text in zip(roles, (system, *said[1:]), strict=True)]
        return len(engine.pipeline.prepare(None, {"messages": chat}).compiled.tokens)

    system = text_of(engine, max(tokens - count("You are") - 25, 10)) + "Quays:"
    return system + " pier" * (tokens - count(system))


def cases(model: Any, work: Path) -> Iterator[dict[str, Any]]:
    for name, tokens in CASES.items():
        store = work / name
        with Engine.from_pretrained(model, store=store, **SETTINGS) as engine:
            engine.generate("warm up " * 64, max_new_tokens=2)
            session = engine.sessions.open("s", system=sized(engine, tokens))
            session.say(QUESTIONS[0], max_new_tokens=REPLY)
            settle = milliseconds(session.settle)
            chat = [*session.show().messages, {"role": "user", "content": NEXT}]
            cold, warm = [], []
            for number in range(REPEATS):
                plain = {"messages": marked(chat), "reuse": "off"}
                cold.append(engine.generate(**plain, max_new_tokens=REPLY, trace=True))
                warm.append(session.fork(f"warm {number}").say(NEXT, max_new_tokens=REPLY, trace=True))
            session.fork("restarted")
        restarted = child(store, "restarted")
        digests = {result.logits_digest for result in (*cold, *warm)} | {restarted["digest"]}
        yield {
            "case": name,
            "prompt_tokens": warm[0].prompt_tokens,
            "cached_tokens": warm[0].cached_tokens,
            "cold_ms": round(statistics.median(result.ttft_ms for result in cold), 1),
            "warm_ms": round(statistics.median(result.ttft_ms for result in warm), 1),
            "rounds_ms": {
                "cold": [round(result.ttft_ms, 2) for result in cold],
                "warm": [round(result.ttft_ms, 2) for result in warm],
            },
            "restart_ms": round(restarted["ttft_ms"], 1),
            "restart_cached_tokens": restarted["cached_tokens"],
            "settle_ms": round(settle, 1),
            "bit_identical": len(digests) == 1,
        }


def milliseconds(action: Any) -> float:
    started = time.perf_counter()
    action()
    return (time.perf_counter() - started) * 1e3


def child(store: Path, session: str) -> dict[str, Any]:
    """The same turn as the first request of a new process."""
    command = [sys.executable, __file__, "--child", json.dumps([str(store), session])]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def answer_child(arguments: str) -> None:
    store, session = json.loads(arguments)
    with Engine.from_pretrained("demo", dtype="bfloat16", store=store, **SETTINGS) as engine:
        result = engine.generate(NEXT, session=session, max_new_tokens=REPLY, trace=True)
        print(
            json.dumps({
                "ttft_ms": result.ttft_ms,
                "cached_tokens": result.cached_tokens,
                "digest": result.logits_digest,
            })
        )


def floor_ms(engine: Engine, session: str, said: str) -> float:
    """The bare pass over what a turn has to compute, with its KV in place."""
    turn = engine.sessions.begin(said, {"session": session}, engine.pipeline.archive.epoch())
    arguments = {name: turn.arguments[name] for name in ("messages", "ran")}
    prompt = engine.pipeline.prepare(None, arguments).compiled
    with engine.pipeline.lease(
        engine.pipeline.linked(prompt), engine.pipeline.config.reuse, len(prompt.tokens) + 1
    ) as placed:
        assert len(placed.plan.computes) == 1, "not a hit"
        span = placed.plan.computes[0]
        tokens, cache = prompt.tokens[span.start : span.end], placed.arena.cache
        return milliseconds(lambda: engine.pipeline.model.runner.step(tokens, cache, span.start).argmax().item())


def turns(counts: list[int], model: Any, work: Path) -> Iterator[dict[str, Any]]:
    for count in counts:
        store, name, rows = work / f"turns-{count}", f"{count} turns", []
        with Engine.from_pretrained(model, store=store, **SETTINGS) as engine, Engine.from_pretrained(model) as bare:
            engine.generate("warm up " * 64, max_new_tokens=2)
            session = engine.sessions.open(name, system=text_of(engine, 60))
            for number in range(1, count + 1):
                said = QUESTIONS[number % len(QUESTIONS)].format(n=number)
                floor = floor_ms(engine, name, said) if number > 1 else None
                history = len(
                    engine.pipeline.prompts.compiled(None, {"messages": marked(session.show().messages)}).tokens
                )
                result = session.say(said, max_new_tokens=REPLY, trace=True)
                asked = marked(session.show().messages[:-1])
                cold = bare.generate(messages=asked, max_new_tokens=REPLY, reuse="off", trace=True)
                rows.append({
                    "conversation": count,
                    "turn": number,
                    "prompt_tokens": result.prompt_tokens,
                    "history_tokens": history,
                    "cached_tokens": result.cached_tokens,
                    "computed_tokens": result.prompt_tokens - result.cached_tokens,
                    "ttft_ms": round(result.ttft_ms, 1),
                    "floor_ms": floor and round(floor, 1),
                    "cold_ms": round(cold.ttft_ms, 1),
                    "settle_ms": round(milliseconds(session.settle), 1),
                    "exactness": result.exactness,
                    "bit_identical": cold.logits_digest == result.logits_digest,
                })
                yield rows[-1]
            engine.sessions.fork(name, "restarted")
            chat = [*session.show().messages, {"role": "user", "content": NEXT}]
            cold = bare.generate(messages=marked(chat), max_new_tokens=REPLY, reuse="off", trace=True)
        after = child(store, "restarted")
        later = rows[1:]
        ratios = [row["ttft_ms"] / row["floor_ms"] for row in later]
        yield {
            "conversation": count,
            "turns": len(rows),
            "bit_identical_turns": sum(row["bit_identical"] for row in rows),
            "least_share_of_history_cached": min(row["cached_tokens"] / row["history_tokens"] for row in later),
            "ttft_over_floor_first_half": round(statistics.median(ratios[: len(later) // 2]), 3),
            "ttft_over_floor_second_half": round(statistics.median(ratios[len(later) // 2 :]), 3),
            "ttft_ms_first_five": statistics.median(row["ttft_ms"] for row in later[:5]),
            "ttft_ms_last_five": statistics.median(row["ttft_ms"] for row in later[-5:]),
            "restart_bit_identical": after["digest"] == cold.logits_digest,
            "restart_cached_tokens": after["cached_tokens"],
            "restart_prompt_tokens": cold.prompt_tokens,
            "restart_ttft_ms": round(after["ttft_ms"], 1),
        }


def straight(model: Any, work: Path) -> Iterator[dict[str, Any]]:
    for system in (60, 1500):
        results, ratios, above = [], [], []
        with Engine.from_pretrained(model, store=work / f"straight-{system}") as engine:
            engine.generate("warm up " * 64, max_new_tokens=2)
            chat = [{"role": "system", "content": text_of(engine, system)}]
            for _ in range(STRETCHES):
                for result, prompt in stretch(engine, chat):
                    floor = floor_of(engine, prompt, result.cached_tokens)
                    results.append(result)
                    ratios.append(result.ttft_ms / floor)
                    above.append(result.ttft_ms - floor)
        computed = [result.prompt_tokens - result.cached_tokens for result in results]
        yield {
            "system_tokens": system,
            "turns": len(results),
            "last_prompt_tokens": results[-1].prompt_tokens,
            "computed_tokens": [min(computed), max(computed)],
            "tiers": sorted({tier for result in results for tier in result.cached_by_tier}),
            "ttft_over_floor": [round(each, 3) for each in statistics.quantiles(ratios, n=4, method="inclusive")],
            "ms_above_floor": [round(each, 2) for each in statistics.quantiles(above, n=4, method="inclusive")],
            "worst": round(max(ratios), 3),
        }


def stretch(engine: Engine, chat: list[dict[str, str]]) -> list[tuple[Any, Any]]:
    """The next turns of a chat, each asked the instant the last one ended, without the first, which was not."""
    asked = []
    for number in range(len(chat), len(chat) + 2 * STRETCH, 2):
        chat.append({"role": "user", "content": QUESTIONS[number % len(QUESTIONS)].format(n=number)})
        result = engine.generate(messages=chat, max_new_tokens=REPLY)
        asked.append((result, engine.pipeline.prepare(None, {"messages": chat}).compiled))
        chat.append({"role": "assistant", "content": result.text})
    return asked[1:]


def floor_of(engine: Engine, prompt: Any, cached: int) -> float:
    """The bare forward pass over what follows the first `cached` tokens, those in place."""
    tokens, model = prompt.tokens, engine.pipeline.model
    arena = Arena(model.geometry, len(tokens) + 1, model.runner.port)  # of its own: the chat's stays as it is
    model.runner.extend(tokens[:cached], arena.cache, 0)

    def step() -> None:
        arena.seek(cached)
        model.runner.step(tokens[cached:], arena.cache, cached).argmax().item()

    taken = statistics.median(milliseconds(step) for _ in range(REPEATS))
    arena.free()
    return taken


def peak() -> int:
    """Most memory this process held since `forget_peak`, in bytes."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM"):
            return int(line.split()[1]) << 10
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10


def held() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def memory(model: Any, work: Path) -> Iterator[dict[str, Any]]:
    """Each bound in a process of its own: memory that an earlier step took is used again, and would not be seen."""
    for bound, step in (("64GiB", 8192), ("64GiB", 2048), ("32MiB", 2048), ("16MiB", 2048)):
        command = [sys.executable, __file__, "--extend", json.dumps([bound, step])]
        done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
        yield json.loads(done.stdout.splitlines()[-1])


def extend(arguments: str) -> None:
    """One bound. Nothing is stored beside what the arena holds, whose memory is touched when the engine is made."""
    bound, step = json.loads(arguments)
    with Engine.from_pretrained(
        "demo", dtype="bfloat16", max_scratch=bound, step=step, max_ram=0, **SETTINGS
    ) as engine:
        head, tail = text_of(engine, 1000), text_of(engine, 5000)[31:]
        engine.generate("Hello.", max_new_tokens=2)
        before = held()
        Path("/proc/self/clear_refs").write_text("5")
        session = engine.sessions.open("s", system=head)
        session.say("Hello.", max_new_tokens=2)
        session.settle()
        warm = peak()
        pieces = session.stream(tail, max_new_tokens=2)
        next(pieces)
        most = peak()
        result = [piece.result for piece in pieces][-1]
        assert result is not None
        steps = [*engine.pipeline.grid.steps([result.prompt_tokens], result.cached_tokens)]
        row = {
            "max_scratch": bound,
            "step": step,
            "longest_step": max(b - a for a, b in steps),
            "cached_tokens": result.cached_tokens,
            "computed_tokens": result.prompt_tokens - result.cached_tokens,
            "kv_bytes": result.prompt_tokens * engine.pipeline.model.geometry.bytes_per_token,
            "peak_of_prefix_bytes": warm - before,
            "peak_bytes": most - before,
            "ttft_ms": round(result.ttft_ms, 1),
        }
    print(json.dumps(row))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parts: dict[str, Any] = {"cases": cases, "turns": turns, "straight": straight, "memory": memory}
    parser.add_argument("--part", nargs="+", choices=parts, default=list(parts))
    parser.add_argument("--output", type=Path, default=Path(__file__).parent / "results")
    parser.add_argument("--turns", type=int, nargs="+", default=list(CONVERSATIONS))
    parser.add_argument("--child", help=argparse.SUPPRESS)
    parser.add_argument("--extend", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        answer_child(options.child)
        return
    if options.extend:
        extend(options.extend)
        return
    parts["turns"] = partial(turns, options.turns)
    loaded = load("demo", EngineConfig.build(dtype="bfloat16"))
    machine = {
        "machine": platform.machine(),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "dtype": loaded.identity.dtype,
        "attention": loaded.attention,
        "model": "SmolLM2-135M-Instruct",
        "reply_tokens": REPLY,
    }
    options.output.mkdir(parents=True, exist_ok=True)
    for part in options.part:
        path = options.output / f"sessions-{part}.jsonl"
        with tempfile.TemporaryDirectory() as work, path.open("w") as out:
            print(json.dumps(machine), file=out)
            for row in parts[part]((loaded.model, loaded.tokenizer), Path(work)):
                print(json.dumps(row), file=out, flush=True)
                print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
