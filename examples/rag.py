"""Documents that come back in another order, after a header of their own: moved and repaired, labelled `blended`."""

from __future__ import annotations

from common import compare

from keepwarm import Engine

DOCUMENTS = [
    {"title": title, "text": " ".join(sentence.format(n=n, m=n * 7 % 60) for n in range(1, 13))}
    for title, sentence in (
        ("Ferry", "Ferry {n} leaves pier {n} at {m} minutes past the hour and takes no cars in winter."),
        ("Rye", "Field {n} was sown with rye in September at {m} kilograms above the usual hundred."),
        ("Clock", "Bell {n} of the tower weighs {m} stones and rings only when the mayor has died."),
    )
]
QUESTIONS = ("Which ferry leaves from pier four?", "How much rye was sown on field two?", "When does bell nine ring?")


def run(engine: Engine, tokens: int) -> None:
    for document in DOCUMENTS:
        engine.warm(documents=[document])  # each by itself, for any place
    for number, question in enumerate(QUESTIONS):
        messages = [
            {"role": "system", "content": f"Visitor {number}. Answer from the documents in one sentence."},
            {"role": "user", "content": question},
        ]
        turned = DOCUMENTS[number:] + DOCUMENTS[:number]
        compare(engine, question, tokens, "chunks", messages=messages, documents=turned)
