"""A type checker finds misspelt settings and arguments, and knows what comes back."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import get_type_hints

import pytest

import keepwarm
from keepwarm.config import EngineConfig
from keepwarm.core.request import Decoding, GenerateArgs, PromptArgs, Request
from keepwarm.core.settings import EngineArgs

ROOT = Path(__file__).parents[1]
WRONG = {  # a line of a user's program, and the word that the complaint about it has
    'Engine.from_pretrained("demo", max_rom="4GiB")': "max_rom",
    'Engine.from_pretrained("demo", reuse="exactly")': "reuse",
    'engine.generate("Hi", max_new_token=3)': "max_new_token",
    'engine.generate("Hi", temperature="hot")': "temperature",
    'engine.warm("Hi", temperature=1.0)': "temperature",
    'text: int = engine.generate("Hi").text': "str",
    'AsyncEngine.from_pretrained("demo", stor="there")': "stor",
    'attach(None, None, kernel="own")': "kernel",
}
RIGHT = """
from keepwarm import AsyncEngine, Engine, Generation, Piece, attach


def used(engine: Engine) -> list[Piece]:
    answer: Generation = engine.generate(messages=[{"role": "user", "content": "Hi"}], max_new_tokens=8, salt=None)
    tokens: tuple[int, ...] = answer.token_ids
    print(tokens, engine.warm("Hi", name="greeting").tokens)
    return list(engine.stream("Hi", reuse="off"))


async def awaited() -> str:
    async with AsyncEngine.from_pretrained("demo", store=None, max_batch=4, max_ram="1GiB") as engine:
        pieces = [piece.text async for piece in engine.stream("Hi", priority=1, temperature=0.5)]
        answer: Generation = await (await engine.submit("Hi"))
        return answer.text + "".join(pieces)


def wrong(engine: Engine) -> None:
"""


def test_types_say_what_is_accepted() -> None:
    assert set(get_type_hints(EngineArgs)) == set(EngineConfig.model_fields)
    assert set(get_type_hints(PromptArgs)) == set(Request.__dataclass_fields__) - {"prompt", "answer"}
    assert set(get_type_hints(GenerateArgs)) - set(get_type_hints(PromptArgs)) == {
        "session",
        *Decoding.__dataclass_fields__,
    }


def test_the_package_says_that_it_is_typed() -> None:
    assert keepwarm.__file__ is not None
    assert (Path(keepwarm.__file__).parent / "py.typed").is_file()


@pytest.mark.slow
def test_mypy_finds_a_misspelt_setting(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(RIGHT + "".join(f"    {line}\n" for line in WRONG))
    (tmp_path / "mypy.ini").write_text(
        f"[mypy]\nmypy_path = {ROOT / 'src'}\nfollow_imports = silent\nstrict = true\n"
        "[mypy-torch.*,transformers.*,pydantic.*]\nfollow_imports = skip\n"  # reading them takes most of the time
    )
    command = [sys.executable, "-m", "mypy", "--config-file", "mypy.ini", "--cache-dir", ".cache", "program.py"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    found = re.findall(r"^program\.py:(\d+): error: (.*)$", done.stdout, re.MULTILINE)
    first = RIGHT.count("\n") + 1
    said = {int(line) - first: complaint for line, complaint in found}
    assert sorted(said) == list(range(len(WRONG))), done.stdout + done.stderr
    for number, word in enumerate(WRONG.values()):
        assert word in said[number], said[number]
