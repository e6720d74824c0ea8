"""Prompts of the workloads: a house's rules, examples to learn from, code, a chat."""

from __future__ import annotations

import colorsys
import inspect

from papers.chunks.bench import Given, documents

_MOODS = ("friendly", "angry", "neutral")
_EXAMPLES = (
    "The desk was closed again and nobody answered the telephone for two days.",
    "Thank you for mending the lamp so quickly, it shines like new.",
    "My card has the number four thousand and eleven.",
    "This is the third letter I write, and I expect an answer this time.",
    "What a lovely evening it was, please give my regards to the cook.",
    "The parcel arrived on Tuesday at ten.",
    "I will not pay for a room with a broken window.",
    "You have been very patient with us, and we will come back.",
    "The meeting takes place in the second room on the left.",
)

CHAT = (
    ("When does the night ferry leave in winter?", "It leaves pier four at a quarter past eight in the evening."),
    ("And in summer?", "From April to October it leaves at twenty to ten, an hour and a half after boarding begins."),
    ("How long is the crossing?", "Seven hours and twenty minutes in calm weather, longer when there is ice."),
    ("May I take my dog along?", "Yes, free of charge, in the kennels on deck three, before the cars are loaded."),
    ("Which cabins have a window?", "Class A cabins have a window and two lower berths; the others have none."),
    ("What if I come too late for my berth?", "It is given to the waiting list ten minutes after departure."),
    ("Can I use the ticket the next day?", "Yes, on the day boat, if you report to the window before midnight."),
    ("Where is lost property kept?", "For sixty days at the office in Harbour Street, next to the customs house."),
)


def chat_turn(turn: int) -> Given:
    """The conversation up to the user's message of a turn, counted from 0."""
    messages = [{"role": "system", "content": documents()[0]["text"]}]
    for asked, said in CHAT[:turn]:
        messages += [{"role": "user", "content": asked}, {"role": "assistant", "content": said}]
    return {"messages": [*messages, {"role": "user", "content": CHAT[turn][0]}]}


def system_prompt(question: str, number: int) -> Given:
    """One long system prompt, a question of its own per request."""
    rules = "\n\n".join(document["text"] for document in documents()[:3])
    messages = [{"role": "system", "content": rules}, {"role": "user", "content": f"{number}: {question}"}]
    return {"messages": messages}


def few_shot(number: int) -> Given:
    """Examples of letters with their tone, and a letter to judge."""
    lines = [f"Letter {n}: {text}\nTone: {_MOODS[(n + 1) % 3]}" for n, text in enumerate(_EXAMPLES * 3)]
    system = "Name the tone of a letter in one word, as in these examples.\n\n" + "\n\n".join(lines)
    asked = f"Letter {100 + number}: {_EXAMPLES[number % 9].lower()}\nTone:"
    return {"messages": [{"role": "system", "content": system}, {"role": "user", "content": asked}]}


def code(number: int) -> Given:
    """A module of the standard library, and a question about it."""
    asked = (
        "Which functions does this module define?",
        "What does hls_to_rgb return?",
        "Where is ONE_SIXTH used?",
        "What happens when the saturation is zero?",
    )[number % 4]
    system = "You answer questions about this file.\n\n```python\n" + inspect.getsource(colorsys) + "```"
    return {"messages": [{"role": "system", "content": system}, {"role": "user", "content": asked}]}


def raw(chosen: list[dict[str, str]], question: str, header: str = "") -> Given:
    """Documents as one plain text: nothing is declared, a chunker divides it."""
    text = "\n\n---\n\n".join(f"# {document['title']}\n\n{document['text']}" for document in chosen)
    return {"prompt": f"{header}{text}\n\n---\n\nQuestion: {question}\nAnswer:"}
