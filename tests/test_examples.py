"""The examples run as they are printed, all in this process: loading torch takes long."""

from __future__ import annotations

import importlib
import re
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import transformers
from tests.helpers import gguf_files, int4_folders, remotes
from tests.helpers.adapters import adapter

import keepwarm
from keepwarm.config import cache_dir
from keepwarm.runtime.native.blocks import can_compute
from tools.manual import notebook

ROOT = Path(__file__).parents[1]


@pytest.fixture
def example(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Any]:
    """Imports an example as it is imported when it is run from its folder."""
    monkeypatch.syspath_prepend(ROOT / "examples")
    return importlib.import_module


@pytest.mark.slow
def test_warm_tools(
    example: Callable[[str], Any], demo_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    example("warm_tools").main(str(demo_folder), str(tmp_path / "store"))
    printed = capsys.readouterr().out
    assert printed.count("bit-identical: yes") == 2
    assert "0 of them were stored already" in printed
    example("warm_tools").main(str(demo_folder), str(tmp_path / "store"))
    assert "0 of them were stored already" not in capsys.readouterr().out


@pytest.mark.slow
def test_the_notebook_runs_from_top_to_bottom(demo_folder: Path) -> None:
    printed = {cell["id"]: text for cell, text in notebook.run()}
    reused = [[int(n) for n in re.findall(r"(\d+) of \d+ tokens reused", text)] for text in printed.values()]
    assert [len(numbers) for numbers in reused] == [0, 2, 2, 1, 0, 0]
    assert reused[1][0] == 0
    assert reused[1][1] > 300
    assert "exact True" in printed["same"]
    assert "disk" in printed["reopen"]
    assert "tokens_differ" in printed["explain"]
    kept = {cell["id"]: "".join(out["text"]) for cell in notebook.cells() for out in cell.get("outputs", ())}
    assert kept == {name: text for name, text in printed.items() if text}  # the file shows what it prints


@pytest.mark.slow
def test_attach_generate(example: Callable[[str], Any], demo_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    example("attach_generate").main(str(demo_folder))
    reused = [int(n) for n in re.findall(r"(\d+) of \d+ tokens reused", capsys.readouterr().out)]
    assert reused[0] == 0
    assert reused[1] > 900


@pytest.fixture
def runner(example: Callable[[str], Any], monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """`python examples/run.py ARGUMENTS`."""

    def run(*arguments: str) -> None:
        monkeypatch.setattr(sys, "argv", ["run.py", *arguments])
        example("run").main()

    return run


def test_every_example_shows_cold_beside_warm(
    runner: Callable[..., None], saved: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    runner("--model", str(saved("llama")), "--tokens", "2")
    shown = dict(re.findall(r"== (\w+):(.*?)(?=\n== |\Z)", capsys.readouterr().out, re.DOTALL))
    assert list(shown) == ["chatbot", "rag", "fewshot", "multiturn", "code"]
    for name, text in shown.items():
        assert text.count("  cold ") == text.count("  warm ") >= 3
        shares = [int(share) for share in re.findall(r"(\d+)% of \d+ tokens reused", text)]
        assert min(shares if name != "multiturn" else shares[1:]) > 50, name
        assert ("blended" if name == "rag" else "exact") in text


def test_the_runner_lists_and_takes_defaults(
    runner: Callable[..., None],
    example: Callable[[str], Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    runner("--list")
    assert len(capsys.readouterr().out.splitlines()) == 5
    (tmp_path / ".env").write_text("# a comment\nKEEPWARM_MODEL='there'\nKEEPWARM_TOKENS=7\n")
    monkeypatch.setenv("KEEPWARM_TOKENS", "9")
    monkeypatch.delenv("KEEPWARM_MODEL", raising=False)
    example("run").read_env(tmp_path / ".env")
    import os

    assert (os.environ.pop("KEEPWARM_MODEL"), os.environ["KEEPWARM_TOKENS"]) == ("there", "9")
    with pytest.raises(SystemExit):
        runner("--example", "nothing")


@pytest.mark.slow
def test_the_event_loops_page(
    demo_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("KEEPWARM_CACHE", str(cache_dir()))
    monkeypatch.setenv("HOME", str(tmp_path))
    (block,) = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "async.md").read_text(), re.DOTALL)
    exec(compile(block, "async.md", "exec"), {"__name__": "__main__"})
    assert float(capsys.readouterr().out.splitlines()[-1]) > 0


@pytest.mark.slow
def test_the_adapters_page(
    demo_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    model = transformers.AutoModelForCausalLM.from_pretrained(demo_folder)
    for seed, name in enumerate(("formal", "brief")):
        adapter(tmp_path / "adapters" / name, model, rank=8, seed=seed, size=0.02)
    monkeypatch.setenv("KEEPWARM_CACHE", str(cache_dir()))
    monkeypatch.chdir(tmp_path)
    (block,) = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "lora.md").read_text(), re.DOTALL)
    exec(compile(block, "lora.md", "exec"), {"__name__": "__main__"})
    assert capsys.readouterr().out == "('brief', 'other')\n"


def block_of(page: str) -> str:
    (block,) = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / page).read_text(), re.DOTALL)
    return str(block)


@pytest.mark.slow
@pytest.mark.skipif(not can_compute(), reason="no C++ compiler")
@pytest.mark.host_memory("the lean decoder attends to the host's memory")
def test_the_pages_of_quantized_files(tmp_path: Path, tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    gguf_files.write(tmp_path / "model.gguf")
    named = re.findall(r'"(models/.*?)"', block_of("int4.md"))[0]
    int4_folders.write(tmp_path / named, int4_folders.How("awq", 64, symmetric=False), tokenizer)
    monkeypatch.chdir(tmp_path)
    for page in ("gguf.md", "int4.md"):
        names: dict[str, Any] = {"Engine": keepwarm.Engine}
        exec(compile(block_of(page), page, "exec"), names)
        with names["engine"] as engine:
            assert len(engine.generate("once", max_new_tokens=1).token_ids) == 1


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("redis-server") is None, reason="there is no redis-server")
def test_the_page_about_fleets(demo_folder: Path, tmp_path: Path) -> None:
    (tmp_path / "bucket").mkdir()
    with remotes.redis_server(tmp_path) as server:
        text = block_of("fleet.md").replace("redis://cache:6379/0", server.url)
        text = text.replace("s3://bucket/kv?region=eu-west-1", (tmp_path / "bucket").as_uri())
        text = text.replace("/var/cache/keepwarm", str(tmp_path / "store"))
        names: dict[str, Any] = {}
        for part in re.split(r"(?=^engine = )", text, flags=re.MULTILINE):
            exec(compile(part, "fleet.md", "exec"), names)
            if "engine" in names:
                with names["engine"] as engine:
                    assert len(engine.generate("once upon a time", max_new_tokens=1).token_ids) == 1
