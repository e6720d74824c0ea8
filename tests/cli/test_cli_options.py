"""Every documented variable and option against every command: it works there, or it is refused, and before a model is
loaded. A wrong value that is refused by its own message is one that arrives where it is used."""

from __future__ import annotations

import re
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer
from tests.helpers.cli import Cli

from keepwarm.cli.app import app

ROOT = Path(__file__).parents[2]
ENGINES = ("demo", "run", "warm", "chat", "explain", "prove", "serve", "launch")
MEASURING = ("bench tools",)
STORES = ("ls", "show", "verify", "gc", "purge", "export", "import", "stats")
REST = ("slots", "lint", "size", "simulate", "keys add", "keys list", "keys revoke", "config check")
NEEDED = {  # what a command cannot do without
    "run": ["hi"],
    "warm": ["hi"],
    "explain": ["hi"],
    "prove": ["hi"],
    "launch": ["aider"],
    "slots": ["--slot-path=."],
    "show": ["x"],
    "purge": ["--salt", "s"],
    "export": ["x", "y"],
    "import": ["y"],
}
PLAIN = {"--json", "--help", "--install-completion", "--show-completion"}

# A wrong value of an option, and what is said of it, wherever the option is.
WRONG: dict[str, tuple[str, str]] = {
    "--model": ("/no/such/model", "no model folder at /no/such/model"),
    "--store": ("{file}/store", "store"),
    "--store-key-file": ("/no/such/key", "/no/such/key cannot be read"),
    "--reuse": ("sometimes", "got 'sometimes'"),
    "--dtype": ("float12", "float12"),
    "--device": ("tpu", "got 'tpu'"),
    "--kv-codec": ("zip", "got 'zip'"),
    "--kv-in-memory": ("folded", "got 'folded'"),
    "--remote": ("ftp://x", "ftp://x"),
    "--to": ("ftp://x", "ftp://x"),
    "--max-ram": ("lots", "got 'lots'"),
    "--max-disk": ("lots", "got 'lots'"),
    "--model-memory": ("lots", "got 'lots'"),
    "--max-new-tokens": ("0", "--max-new-tokens"),
    "--temperature": ("-1", "--temperature"),
    "--top-p": ("7", "got 7.0"),
    "--top-k": ("0", "got 0"),
    "--repetition-penalty": ("0", "got 0.0"),
    "--messages": ("/no/such/file", "/no/such/file"),
    "--tools": ("/no/such/file", "/no/such/file"),
    "--documents": ("/no/such/file", "/no/such/file"),
    "--host": ("0.0.0.0", "keepwarm keys add"),
    "--port": ("70000", "port"),
    "--config": ("/no/such/file", "/no/such/file"),
    "--keys-file": ("/no/such/file", "/no/such/file"),
    "--log-format": ("xml", "log.format"),
    "--warm-last": ("-1", "warm_last"),
    "--adapter": ("one", "--adapter takes NAME=PATH"),
    "--questions": ("9", "--questions"),
    "--counts": ("many", "'many'"),
    "--rounds": ("0", "--rounds"),
    "--limit": ("0", "--limit"),
    "--prices": ("/no/such/file", "/no/such/file"),
    "--vendor": ("nobody", "got 'nobody'"),
    "--prefill-speed": ("0", "--prefill-speed"),
    "--capacity": ("0", "--capacity"),
    "--policy": ("mru", "'mru'"),
    "--replicas": ("0", "--replicas"),
    "--cache": ("none", "'none'"),
    "--match": ("parts", "'parts'"),
    "--copies": ("0", "--copies"),
    "--jobs": ("0", "--jobs"),
    "--url": ("ftp://x", "got 'ftp://x'"),
    "--endpoint": ("post", "belong to --url"),
    "--api-key-env": ("X", "belong to --url"),
    "--restart-command": ("x", "belong to --url"),
    "--save": ("x", "belong to --url"),
    "--compare": ("x", "belong to --url"),
    "--server": ("ftp://x", "got 'ftp://x'"),
    "--slot-path": ("/no/such/folder", "/no/such/folder"),
    "--save-tokens": ("0", "--save-tokens"),
    "--model-file": ("/no/such/file", "/no/such/file"),
}
# Options that take any text or none: tests of their commands show what they do.
FREE = {
    "--all",
    "--system",
    "--raw",
    "--salt",
    "--stop",
    "--seed",
    "--trace",
    "--name",
    "--session",
    "--keep",
    "--repair",
    "--dry-run",
    "--sign-key",
    "--verify-key",
    "--fleet",
    "--output",
    "--out",
    "--together",
    "--plot",
    "--prompts",
    "--rate",
    "--file",
    "--admin",
    "--print",
    "--rules",
    "--tenants",
}
ALONE = {  # options that mean something else here, or nothing without another one
    ("size", "--dtype"): ("float12", "got 'float12'"),
    ("demo", "--store"): ("{file}/store", "store"),
    ("keys add", "--limit"): ("tokens_per_day=none", "tokens_per_day"),
    ("stats", "--remote"): ("ftp://x", "belongs to --fleet"),
    ("purge", "--remote"): ("ftp://x", ""),  # what it purges must be there first
    ("import", "--dtype"): ("float32", "belong to --model"),
    ("import", "--device"): ("cpu", "belong to --model"),
    ("launch", "--api-key-env"): ("NOT_SET_HERE", "NOT_SET_HERE"),
    ("slots", "--host"): ("192.0.2.1", "192.0.2.1"),
    ("slots", "--api-key-env"): ("NOT_SET_HERE", "NOT_SET_HERE"),
    ("size", "--prompts"): ("5", "belong to --fleet"),
    ("size", "--rate"): ("5", "belong to --fleet"),
}


def _commands() -> Iterator[tuple[str, Any]]:
    for name, command in typer.main.get_command(app).commands.items():  # type: ignore[attr-defined]
        if hasattr(command, "commands"):
            yield from ((f"{name} {inner}", each) for inner, each in command.commands.items())
        elif name not in ("replay", "doctor"):  # the other half of `prove`; what reports wrong values as findings
            yield name, command


COMMANDS = dict(_commands())
OPTIONS = [
    (name, max(option.opts, key=len))
    for name, command in COMMANDS.items()
    for option in command.params
    if option.param_type_name == "option" and not set(option.opts) & PLAIN
]
TRIED = [(name, option) for name, option in OPTIONS if (name, option) in ALONE or option in WRONG]


@pytest.fixture(autouse=True)
def _own_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("KEEPWARM_REMOTE", "KEEPWARM_STORE_KEY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("KEEPWARM_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)


def test_every_command_and_option_is_in_a_table() -> None:
    assert sorted(COMMANDS) == sorted((*ENGINES, *MEASURING, *STORES, *REST))
    assert {option for _, option in OPTIONS} == {*WRONG, *FREE}


def _arguments(command: str, option: str, value: str) -> list[str]:
    given = [part for part in NEEDED.get(command, []) if part != option]
    if command == "purge" and option == "--salt":
        given = []
    extra = {
        "keys add": ["me", "--file", "keys.json"],
        "size": ["demo", "10"],
        "lint": ["log"],
        "simulate": ["trace"],
        "keys list": [],
        "keys revoke": ["0"],
    }.get(command, [])
    if command == "size" and option == "--prefill-speed":
        extra = [*extra, "--fleet"]
    if command == "launch":  # what stands behind the agent is the agent's
        return [command, option, value, *given]
    return [*command.split(), *given, *extra, option, value]


@pytest.mark.parametrize(("command", "option"), TRIED)
def test_a_wrong_value_is_refused_in_one_line_before_a_model_is_loaded(
    cli: Cli, tmp_path: Path, command: str, option: str
) -> None:
    value, said = ALONE.get((command, option)) or WRONG[option]
    (tmp_path / "file").write_text("a file, not a folder")
    (tmp_path / "log").write_text("{}")
    if option != "--store":
        (tmp_path / "cache" / "store").mkdir(parents=True)
    result = cli(*_arguments(command, option, value.replace("{file}", str(tmp_path / "file"))))
    assert result.code in (2, 3, 4), result.err
    assert said in result.err
    assert "loading" not in result.err
    assert not result.out
    ours = [line for line in result.err.splitlines() if line.startswith("keepwarm: ")]
    assert len(ours) <= 1
    assert result.err.count(f"got {value!r}") <= 1, "told once"


# What each documented variable does in each kind of command; a wrong value shows that it arrives.
VARIABLES: dict[str, tuple[str, str, tuple[str, ...]]] = {
    "KEEPWARM_REMOTE": ("ftp://x", "ftp://x", ("run", "warm", "chat", "explain", "serve", "slots")),
    "KEEPWARM_STORE_KEY": ("short", "KEEPWARM_STORE_KEY holds no key", (*ENGINES, "slots")),
    "KEEPWARM_CACHE": ("{file}", "store", ("run", "warm", "chat", "explain", "serve")),
    "KEEPWARM_KERNELS": ("sse9", "got 'sse9'", (*ENGINES, *MEASURING)),
    "KEEPWARM__MODEL": ("/no/such/model", "/no/such/model", (*ENGINES, *MEASURING)),
    "KEEPWARM__ENGINE__REUSE": ("sometimes", "got 'sometimes'", (*ENGINES, *MEASURING, "import", "config check")),
    "KEEPWARM__ENGINE__MAX_RAM": ("lots", "got 'lots'", (*ENGINES, *MEASURING, "import", "config check")),
    "KEEPWARM__ENGINE__COLOUR": ("red", "unknown setting 'colour'", (*ENGINES, *MEASURING, "import", "config check")),
    "KEEPWARM__ENGINE__STORE": ("{file}/x", "store", ("run", "warm", "chat", "explain", "serve", *STORES)),
    "KEEPWARM__ENGINE__STORE_KEY_FILE": ("/no/such/key", "/no/such/key cannot be read", ENGINES),
    "KEEPWARM__SERVER__PORT": ("many", "server.port", ("serve", "config check")),
    "KEEPWARM__SERVER__PROT": ("1", "unknown setting 'server.prot'", ("serve", "config check")),
}


@pytest.mark.parametrize(
    ("variable", "command"), [(name, command) for name, (_, _, where) in VARIABLES.items() for command in where]
)
def test_a_variable_arrives_in_every_command_it_is_for(
    cli: Cli, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, variable: str, command: str
) -> None:
    value, said, _ = VARIABLES[variable]
    (tmp_path / "file").write_text("a file, not a folder")
    monkeypatch.setenv(variable, value.replace("{file}", str(tmp_path / "file")))
    result = cli(*command.split(), *NEEDED.get(command, []))
    assert result.code in (2, 3, 4), result.err
    assert said in result.err
    assert "loading" not in result.err


@pytest.mark.parametrize("command", ["demo", "prove"])
def test_a_command_with_a_store_of_its_own_says_that_it_takes_no_remote(
    cli: Cli, monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    monkeypatch.setenv("KEEPWARM_REMOTE", "redis://cache:6379")
    result = cli(command, *NEEDED.get(command, []), "--model", "/no/such/model")
    assert "KEEPWARM_REMOTE is not used" in result.err


def test_options_win_over_variables(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KEEPWARM__ENGINE__REUSE", "sometimes")
    monkeypatch.setenv("KEEPWARM__ENGINE__MAX_RAM", "lots")
    result = cli("run", "hi", "--reuse", "off")
    assert "lots" in result.err
    assert "sometimes" not in result.err
    monkeypatch.setenv("KEEPWARM__ENGINE__REMOTE", "s3://bucket")
    monkeypatch.setenv("KEEPWARM_REMOTE", "redis://cache")
    monkeypatch.delenv("KEEPWARM__ENGINE__REUSE")
    monkeypatch.delenv("KEEPWARM__ENGINE__MAX_RAM")
    assert cli("config", "check", "--json").json["engine"]["remote"] == ["s3://bucket"]


def test_the_service_takes_the_remote_that_other_commands_take(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KEEPWARM_REMOTE", "redis://:secret@cache:6379/0 s3://bucket/kv")
    shown = cli("config", "check", "--json")
    assert shown.json["engine"]["remote"] == ["redis://cache:6379/0", "s3://bucket/kv"]
    assert "secret" not in shown.out


def test_documented_variables_are_the_tested_ones() -> None:
    texts = [ROOT / "README.md", *ROOT.glob("docs/*.md"), *ROOT.glob("docs/serving/*.md")]
    named = set(re.findall(r"KEEPWARM_[A-Z_]+[A-Z]", "".join(text.read_text(encoding="utf-8") for text in texts)))
    general = {name for name in named if not name.startswith("KEEPWARM__")} - {"KEEPWARM_WHEEL"}  # setup.py's alone
    assert general == {name for name in VARIABLES if not name.startswith("KEEPWARM__")}


def test_a_port_in_use_is_told_at_once(cli: Cli) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        result = cli("serve", "--port", str(port))
    assert result.code == 2
    assert result.err.startswith(f"keepwarm: port {port} of 127.0.0.1 is in use")
    assert len(result.err.splitlines()) == 1


@pytest.mark.slow
@pytest.mark.parametrize(
    ("missing", "arguments", "extra"),
    [
        ("uvicorn", "serve", "serve"),
        ("fastapi", "serve", "serve"),
        ("prometheus_client", "serve", "serve"),
        ("httpx", "slots --slot-path .", "serve"),
        ("matplotlib", "bench tools --output figures", "plot"),
        ("matplotlib", "simulate --plot rates.png trace.jsonl", "plot"),
        ("llguidance", "bench tools", "constrain"),
        ("redis", "run --remote redis://cache hi", "redis"),
        ("obstore", "serve --remote s3://bucket", "objects"),
    ],
)
def test_a_missing_package_is_one_line_before_any_work(missing: str, arguments: str, extra: str) -> None:
    code = f"import sys; sys.modules[{missing!r}] = None; from keepwarm.cli import main; main({arguments.split()!r})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 2, done.stderr
    assert f"pip install 'keepwarm[{extra}]'" in done.stderr
    assert len(done.stderr.splitlines()) == 1
