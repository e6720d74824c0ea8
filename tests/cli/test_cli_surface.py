"""What needs no model: help, usage, exit codes, inputs, and that nothing of it imports torch."""

from __future__ import annotations

import fcntl
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from tests.helpers.cli import Cli

from keepwarm import __version__
from keepwarm.cli import output
from keepwarm.cli.app import app, exit_code
from keepwarm.cli.demo.command import questions, requests, tools
from keepwarm.cli.request import RequestOptions
from keepwarm.core.tools import shown_tools
from keepwarm.errors import ConfigError, DownloadError, EmptyPrompt, KeepwarmError, ModelNotFound, StoreTooNew

COMMANDS = (
    "demo",
    "run",
    "warm",
    "chat",
    "explain",
    "lint",
    "prove",
    "doctor",
    "ls",
    "show",
    "verify",
    "gc",
    "purge",
    "export",
    "import",
    "size",
    "stats",
    "simulate",
)
GROUPS = ("serve", "launch", "slots", "bench", "keys", "config")  # they have commands of their own, or no --json


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_explains_itself_and_has_json(cli: Cli, command: str) -> None:
    result = cli(command, "--help")
    assert result.code == 0
    assert "--json" in result.out
    assert not result.err


def test_commands_are_the_listed_ones(cli: Cli) -> None:
    listed = re.findall(r"^  (\w+)  ", cli("--help").out.split("Commands:")[1], re.MULTILINE)
    assert tuple(listed) == (*COMMANDS, *GROUPS)
    names = {command.name or command.callback.__name__ for command in app.registered_commands if command.callback}
    assert names == {*COMMANDS, "serve", "launch", "slots", "replay"}


def test_no_command_is_an_invitation(cli: Cli) -> None:
    shown = cli()
    assert (shown.code, shown.err) == (0, "")
    told = re.findall(r"^  keepwarm (\w+)  ", shown.out, re.MULTILINE)
    assert len(told) == 4
    assert set(told) <= {*COMMANDS, *GROUPS}


def test_version(cli: Cli) -> None:
    assert cli("--version").out == f"keepwarm {__version__}\n"


@pytest.mark.parametrize(
    "arguments",
    [
        ("bake",),
        ("run", "--no-such-option"),
        ("size",),
        ("size", "demo", "many"),
        ("size", "demo", "0"),
        ("run",),
        ("run", "--raw"),
        ("run", "--raw", "--system", "Be brief.", "Hello"),
        ("run", "--messages", "no-such-file.json"),
        ("demo", "--questions", "9"),
    ],
)
def test_wrong_usage_is_code_2_and_prints_no_result(cli: Cli, arguments: tuple[str, ...]) -> None:
    result = cli(*arguments)
    assert result.code == 2
    assert not result.out
    assert result.err


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (ConfigError("x"), 2),
        (EmptyPrompt("x"), 2),
        (ModelNotFound("x"), 3),
        (DownloadError("x"), 3),
        (StoreTooNew("x"), 4),
        (KeepwarmError("x"), 1),
    ],
)
def test_exit_code_by_kind(error: KeepwarmError, code: int) -> None:
    assert exit_code(error) == code


def test_light_commands_import_no_torch() -> None:
    code = (
        "import sys\n"
        "from keepwarm.cli import main\n"
        "for arguments in (['--help'], ['run', '--help'], ['size', 'demo', '10'], ['ls', '--store', '/no/such']):\n"
        "    try: main(arguments)\n"
        "    except SystemExit: pass\n"
        "heavy = {'torch', 'transformers'} & set(sys.modules)\n"
        "sys.exit(f'imported {heavy}' if heavy else 0)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_module_runs_as_command() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "keepwarm.cli", "size", "--json", "no-such-model", "5"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 3
    assert "no-such-model" in done.stderr
    assert not done.stdout


def test_interrupt_is_code_130() -> None:
    command = [
        sys.executable,
        "-c",
        # a process started in the background ignores SIGINT from birth: the handler is Python's own again
        "import signal; signal.signal(signal.SIGINT, signal.default_int_handler); "
        "from keepwarm.cli import main; print('up', flush=True); main()",
        "run",
        "-",
    ]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == b"up\n"
        time.sleep(4)  # until it waits for standard input
        child.send_signal(signal.SIGINT)
        assert child.wait(timeout=30) == 130


def test_prompt_alone_is_a_user_message() -> None:
    assert RequestOptions(prompt="Hello").build() == {"messages": [{"role": "user", "content": "Hello"}]}
    assert RequestOptions(prompt="Hello", raw=True, salt="s").build() == {"prompt": "Hello", "salt": "s"}


def test_inputs_become_one_request(tmp_path: Path) -> None:
    conversation = tmp_path / "chat.json"
    earlier = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]
    schemas = [{"type": "function", "function": {"name": "f"}}]
    conversation.write_text(json.dumps({"model": "any", "messages": earlier, "tools": schemas}))
    document = tmp_path / "notes.txt"
    document.write_text("Über alles")
    built = RequestOptions(
        prompt="And now?", system="Be brief.", messages=str(conversation), documents=[document]
    ).build()
    assert built == {
        "messages": [{"role": "system", "content": "Be brief."}, *earlier, {"role": "user", "content": "And now?"}],
        "tools": schemas,
        "documents": [{"title": "notes.txt", "text": "Über alles"}],
    }


@pytest.mark.parametrize(
    ("text", "complaint"),
    [("{", "not JSON"), ('"hello"', "list of messages"), ("[1]", "list of messages"), ("{}", "list of messages")],
)
def test_bad_messages_file_is_named(cli: Cli, tmp_path: Path, text: str, complaint: str) -> None:
    file = tmp_path / "chat.json"
    file.write_text(text)
    result = cli("run", "--messages", file)
    assert result.code == 2
    assert complaint in result.err
    assert str(file) in result.err


def test_one_standard_input(cli: Cli) -> None:
    result = cli("run", "-", "--messages", "-", stdin='[{"role": "user", "content": "Hi"}]')
    assert result.code == 2
    assert "standard input" in result.err


def test_two_system_prompts_are_refused(cli: Cli) -> None:
    given = '[{"role": "system", "content": "Be brief."}]'
    result = cli("run", "Hi", "--messages", "-", "--system", "Be long.", stdin=given)
    assert result.code == 2
    assert "twice" in result.err


def test_demo_tools_are_twenty_whole_schemas() -> None:
    schemas = tools()
    assert len(schemas) == 20
    assert len({schema["function"]["name"] for schema in schemas}) == 20
    assert shown_tools(schemas) == schemas, "shown as they are"
    for schema in schemas:
        assert schema["type"] == "function"
        parameters = schema["function"]["parameters"]
        assert set(parameters["required"]) <= set(parameters["properties"])
        assert all({"type", "description"} <= set(value) for value in parameters["properties"].values())
    assert 11_000 < len(json.dumps(schemas, separators=(",", ":"))) < 13_000  # about 3,000 tokens of SmolLM2's
    assert len(questions()) == 4
    assert all(request["tools"] == schemas for request in requests(questions()))


def test_demo_never_empties_a_folder_that_is_not_its_own(cli: Cli, tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("years of work")
    result = cli("demo", "--store", tmp_path)
    assert result.code == 2
    assert (tmp_path / "thesis.txt").read_text() == "years of work"


def test_a_demo_leaves_the_store_of_one_that_runs(cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KEEPWARM_CACHE", str(tmp_path))
    stored = tmp_path / "demo-store" / "stored"
    stored.parent.mkdir()
    stored.write_text("of the first demo")
    folder = os.open(tmp_path / "demo-store", os.O_RDONLY)
    fcntl.flock(folder, fcntl.LOCK_EX)
    second = cli("demo")
    assert second.code == 4
    assert "another `keepwarm demo` is using" in second.err
    assert stored.exists()
    os.close(folder)
    assert cli("demo", "--keep", "--model", tmp_path / "none").code == 3
    assert stored.exists()
    assert cli("demo", "--model", tmp_path / "none").code == 3
    assert not stored.exists()


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1536, "1.5 KiB"),
        (512 << 10, "512 KiB"),
        (3 << 40, "3 TiB"),
        (5 << 50, "5120 TiB"),
    ],
)
def test_bytes_as_text(count: int, text: str) -> None:
    assert output.in_bytes(count) == text


def test_plain_table_aligns(capsys: pytest.CaptureFixture[str]) -> None:
    output.print_table(("name", "tokens"), [("a", "12"), ("long [red]name", "3")], right=(1,))
    assert capsys.readouterr().out == "name            tokens\na                   12\nlong [red]name       3\n"
