"""What `keepwarm doctor` says of a GGUF file."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.helpers.doctor import Look
from tests.helpers.gguf_files import write

from keepwarm.runtime.native import blocks


def test_a_gguf_file_is_told_by_what_it_holds(look: Look, tmp_path: Path) -> None:
    code, found = look("--model", write(tmp_path / "m.gguf", architecture="qwen3moe"))
    assert (code, found["model"]["status"]) == (0, "ok")
    assert "qwen3moe in F32, Q4_K, Q6_K" in found["model"]["detail"]
    assert "of KV per token" in found["model"]["detail"]
    assert "template" not in found["model"]["detail"]
    code, found = look("--model", write(tmp_path / "base.gguf", lacking="chat_template"))
    assert (code, "--raw" in found["model"]["detail"]) == (0, True)
    code, found = look("--model", write(tmp_path / "other.gguf", architecture="mamba"))
    assert (code != 0, found["model"]["status"]) == (True, "fail")
    assert "'mamba'" in found["model"]["detail"]
    assert "docs/gguf.md" in found["model"]["advice"]


def test_a_gguf_file_without_kernels_does_not_run(look: Look, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KEEPWARM_KERNELS", "native")  # which is always compiled
    monkeypatch.setenv("CXX", "no-such-compiler")
    blocks._library.cache_clear()
    try:
        code, found = look("--model", write(tmp_path / "m.gguf"))
    finally:
        blocks._library.cache_clear()
    assert (code != 0, found["model"]["status"]) == (True, "fail")
    assert "g++" in found["model"]["advice"]


def test_a_file_that_is_no_gguf_file_is_told(look: Look, tmp_path: Path) -> None:
    file = tmp_path / "model.gguf"
    file.write_bytes(b"<html>")
    code, found = look("--model", str(file))
    assert (code != 0, found["model"]["status"]) == (True, "fail")
    assert "no GGUF file" in found["model"]["detail"]
    file.write_bytes(b"GGUF" + bytes(20))
    assert "not a whole GGUF file" in look("--model", str(file))[1]["model"]["detail"]
