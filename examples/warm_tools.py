"""Warm a set of tools once, then ask: only the question is computed.

    python examples/warm_tools.py [MODEL] [STORE]

MODEL is a folder, a hub id or "demo" (the embedded SmolLM2); STORE a folder that outlives the process.
"""

from __future__ import annotations

import sys

from keepwarm import Engine

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": f"Look up the {thing} of a city on a day.",
            "parameters": {
                "type": "object",
                "properties": {"city": {"type": "string"}, "day": {"type": "string", "format": "date"}},
                "required": ["city"],
            },
        },
    }
    for name, thing in [("get_weather", "weather"), ("list_trains", "train departures"), ("find_rooms", "free rooms")]
]
SYSTEM = {"role": "system", "content": "You plan short trips. Answer in one sentence."}
QUESTIONS = ["Is it raining in Oslo?", "When does the first train to Bergen leave?"]


def main(model: str = "demo", store: str | None = None) -> None:
    with Engine.from_pretrained(model, store=store) as engine:
        report = engine.warm(messages=[SYSTEM], tools=TOOLS, name="trip tools")
        print(f"warm: {report.tokens} tokens, {report.reused_tokens} of them were stored already")
        for question in QUESTIONS:
            messages = [SYSTEM, {"role": "user", "content": question}]
            cold = engine.generate(messages=messages, tools=TOOLS, max_new_tokens=16, reuse="off", trace=True)
            engine.warm(messages=[SYSTEM], tools=TOOLS)
            warm = engine.generate(messages=messages, tools=TOOLS, max_new_tokens=16, trace=True)
            same = "yes" if warm.logits_digest == cold.logits_digest else "no"
            print(f"{question} -> {warm.text!r}")
            print(
                f"  {warm.cached_tokens} of {warm.prompt_tokens} tokens reused, first token after "
                f"{warm.ttft_ms:.0f} ms (cold {cold.ttft_ms:.0f} ms), bit-identical: {same}"
            )


if __name__ == "__main__":
    main(*sys.argv[1:])
