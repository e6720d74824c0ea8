"""Programs that end, or let go of an engine, without closing it: what they computed is stored all the same."""

from __future__ import annotations

import fcntl
import gc
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable
from pathlib import Path

import pytest
import transformers
from tests.helpers.models import tiny

from keepwarm import Batcher, Engine

START = """
import gc, os, sys, time
from keepwarm import Batcher, Engine
MODEL, STORE = sys.argv[1:]
WORDS = " ".join(f"word{n}" for n in range(300))
def made(**settings):
    return Engine.from_pretrained(MODEL, step=64, **({"store": STORE} | settings))
"""
WORDS = " ".join(f"word{n}" for n in range(300))


class Script:
    """Runs programs as a user does, over one model and one store."""

    def __init__(self, model: Path, store: Path) -> None:
        self.model, self.store = model, store

    def command(self, code: str) -> list[str]:
        return [sys.executable, "-c", START + code, str(self.model), str(self.store)]

    def run(self, code: str, expected: int = 0) -> subprocess.CompletedProcess[str]:
        done = subprocess.run(self.command(code), capture_output=True, text=True, timeout=240, check=False)
        assert done.returncode == expected, done.stderr
        return done

    def finds(self, text: str = WORDS) -> bool:
        """Whether another process, this one, finds what was computed."""
        with _engine(self.model, self.store) as engine:
            return engine.explain(text).cached_tokens > 0


elsewhere = pytest.mark.host_memory("its engines are in processes of their own, on the processor")


@pytest.fixture(scope="module")
def model(saved: Callable[..., Path]) -> Path:
    return saved("llama")


@pytest.fixture
def script(model: Path, tmp_path: Path) -> Script:
    return Script(model, tmp_path / "store")


@pytest.mark.slow
@elsewhere
def test_a_script_that_never_closes_stores_what_it_computed(script: Script) -> None:
    done = script.run("engine = made()\nengine.generate(WORDS, max_new_tokens=2)\n")
    assert "Traceback" not in done.stderr
    assert script.finds()


@pytest.mark.slow
@elsewhere
@pytest.mark.parametrize(
    ("end", "code"), [("raise ValueError('mine')", 1), ("sys.exit(3)", 3), ("del engine", 0), ("engine.close()", 0)]
)
def test_however_it_ends(script: Script, end: str, code: int) -> None:
    script.run(f"engine = made()\nengine.generate(WORDS, max_new_tokens=2)\n{end}\n", code)
    assert script.finds()


@pytest.mark.slow
@elsewhere
def test_an_interrupted_script_stores_what_it_computed(script: Script) -> None:
    code = (
        "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "engine = made()\nengine.generate(WORDS, max_new_tokens=2)\nprint('up', flush=True)\ntime.sleep(100)\n"
    )
    with subprocess.Popen(script.command(code), stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == b"up\n"
        child.send_signal(signal.SIGINT)
        child.wait(timeout=120)
    assert script.finds()


@pytest.mark.slow
@elsewhere
def test_two_engines_on_one_store_of_which_one_is_left_open(script: Script) -> None:
    done = script.run(
        "a, b = made(), made()\n"
        "for engine in (a, b):\n    engine.generate(WORDS, max_new_tokens=2)\n"
        "a.generate('other ' + WORDS, max_new_tokens=2)\nb.close()\n"
    )
    assert "Traceback" not in done.stderr
    assert script.finds()
    assert script.finds("other " + WORDS)


@pytest.mark.slow
@elsewhere
def test_threads_that_outlive_the_main_one_are_stored_too(script: Script) -> None:
    script.run(
        "import threading\nengine = made()\n"
        "def late():\n    threading.main_thread().join()\n    engine.generate(WORDS, max_new_tokens=2)\n"
        "threading.Thread(target=late).start()\n"
    )
    assert script.finds()


@pytest.mark.slow
@elsewhere
def test_a_forked_child_leaves_the_store_to_its_parent(script: Script) -> None:
    done = script.run(
        "engine = made()\nengine.generate(WORDS, max_new_tokens=2)\n"
        "if os.fork() == 0:\n    sys.exit(0)\n"  # as programs do: its own end runs what is registered for it
        "os.wait()\nengine.generate('other ' + WORDS, max_new_tokens=2)\n"
    )
    assert "Traceback" not in done.stderr
    assert script.finds()
    assert script.finds("other " + WORDS)


@pytest.mark.slow
@elsewhere
def test_a_batch_that_is_left_open(script: Script) -> None:
    done = script.run("b = Batcher(made())\nb.submit(WORDS, max_new_tokens=2).result()\n")
    assert "Traceback" not in done.stderr
    assert script.finds()


@pytest.mark.slow
@elsewhere
def test_a_session_that_is_left_open_is_settled(script: Script) -> None:
    script.run(
        "engine = made(min_step=1, settle_after=600.0)\n"
        "engine.sessions.open('s', system=WORDS).say('Hello', max_new_tokens=2)\n"
    )
    with Engine.from_pretrained(script.model, store=script.store, step=64, min_step=1) as engine:
        assert engine.sessions.open("s").show().info.settled


@pytest.mark.slow
@elsewhere
def test_a_remote_tier_gets_what_was_not_written_yet(script: Script, tmp_path: Path) -> None:
    pytest.importorskip("obstore")
    remote = (tmp_path / "remote").as_uri()
    far = {"store": None, "remote": remote, "remote_timeout": 20.0}
    script.run(f"engine = made(**{far})\nengine.generate(WORDS, max_new_tokens=2)\n")
    with Engine.from_pretrained(script.model, step=64, **far) as engine:
        assert engine.explain(WORDS).cached_tokens > 0


@pytest.mark.slow
@elsewhere
def test_the_end_is_not_held_up_for_ever(script: Script) -> None:
    code = (
        "engine = made(exit_timeout=0.2)\nprint('up', flush=True)\nsys.stdin.readline()\n"
        "engine.generate(WORDS, max_new_tokens=2)\n"
    )
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen(script.command(code), text=True, **pipes) as child:  # type: ignore[call-overload]
        assert child.stdout.readline() == "up\n"
        with (script.store / "writing").open("rb+") as turn:
            fcntl.flock(turn, fcntl.LOCK_EX)  # whoever writes to the store waits for this
            _, said = child.communicate("\n", timeout=240)
    assert child.returncode == 0
    assert "was not closed" in said
    assert "Traceback" not in said


def _engine(model: Path, store: Path | None) -> Engine:
    return Engine.from_pretrained(model, store=store, step=64)


def _threads() -> set[threading.Thread]:
    """Those of engines; the ones that wait for a folder hold nothing and linger."""
    return {t for t in threading.enumerate() if t.name.startswith("keepwarm") and t.name != "keepwarm-disk"}


def _wait(done: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not done():
        assert time.monotonic() < deadline
        time.sleep(0.01)


SOME = WORDS[: len(WORDS) // 4]


def test_an_engine_that_nobody_holds_is_collected_and_what_it_computed_is_stored(model: Path, tmp_path: Path) -> None:
    before = _threads()
    engine = _engine(model, tmp_path)
    engine.generate(WORDS, max_new_tokens=2)
    gone = weakref.ref(engine.pipeline)
    del engine
    gc.collect()
    assert gone() is None
    _wait(lambda: _threads() <= before)  # the one that writes has written, and ended
    with _engine(model, tmp_path) as again:
        assert again.generate(WORDS, max_new_tokens=2).cached_by_tier["disk"]


@pytest.mark.slow
def test_sessions_sets_chunks_and_batches_hold_no_engine(model: Path, tmp_path: Path) -> None:
    before = _threads()
    engine = Engine.from_pretrained(model, store=tmp_path, step=64, min_step=1, settle_after=0.0, reuse="chunks")
    engine.sessions.open("s").say("Hello", max_new_tokens=2)
    engine.tools([{"name": "f", "input_schema": {"type": "object"}}], name="set")
    engine.generate(messages=[{"role": "user", "content": "?"}], documents=[SOME, SOME + "!"], max_new_tokens=2)
    engine.pipeline.chunks.wait_until_idle(60)
    batcher = Batcher(engine)
    batcher.submit(WORDS, max_new_tokens=2).result()
    while engine.sessions.waiting():
        time.sleep(0.01)
    gone = weakref.ref(engine.pipeline)
    del engine, batcher
    _wait(lambda: gc.collect() >= 0 and gone() is None)  # a thread lets go of it a moment after its work
    _wait(lambda: _threads() <= before)


def test_a_closed_engine_leaves_no_thread(model: Path, tmp_path: Path) -> None:
    before = _threads()
    with _engine(model, tmp_path) as engine:
        engine.generate(WORDS, max_new_tokens=2)
    assert _threads() <= before


def test_a_passed_model_is_not_held_either(tokenizer: transformers.PreTrainedTokenizerBase) -> None:
    passed = tiny("llama")
    engine = Engine.from_pretrained((passed, tokenizer))
    engine.generate("Hello", max_new_tokens=2)
    gone = weakref.ref(engine.pipeline)
    del engine
    gc.collect()
    assert gone() is None
