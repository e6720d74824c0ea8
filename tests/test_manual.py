"""The manual: what is made is whole, and every snippet runs. Nothing here needs mkdocs."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from keepwarm.cli.app import app
from keepwarm.config import cache_dir
from keepwarm.runtime.demo_model import DOWNLOAD
from tools.manual import commands, configuration, http, notebook, python, troubleshooting
from tools.manual.pages import PAGES

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
PYTHON = (  # pages whose Python runs here; RUN_BY has the others
    "quickstart/python.md",
    "howto/tools.md",
    "howto/sessions.md",
    "howto/documents.md",
    "howto/attach.md",
    "howto/why-it-missed.md",
    "kernels.md",
)
README_BYTES = 6000


# ---- what is made ----


def test_every_setting_says_what_it_does_and_when_to_change_it() -> None:
    assert list(configuration.undescribed()) == []


def test_every_error_and_reason_says_what_to_do() -> None:
    assert list(troubleshooting.uncured()) == []
    page = troubleshooting.page()
    assert "| ... given, with which transformers runs another model, or a cache of its own | Under `attach`" in page


def test_every_setting_that_attach_leaves_alone_is_named() -> None:
    """`_FOREIGN` is read from the source: the module needs torch."""
    source = (ROOT / "src/keepwarm/integrations/transformers.py").read_text(encoding="utf-8")
    names = re.findall(r'"(\w+)"', source.partition("_FOREIGN = (")[2].partition(")")[0])
    (line,) = (each for each in troubleshooting.cures()["uncached"] if each["reason"] == "foreign")
    assert names
    assert [name for name in names if f"`{name}`" not in line["because"]] == []


def test_the_page_of_settings_has_them_all() -> None:
    page = configuration.page()
    for section, kind in configuration.sections().items():
        for name in kind.model_fields:
            assert f"### `{name}` {{#{section}-{name.replace('_', '-')}}}" in page
    assert "KEEPWARM__ENGINE__MAX_RAM" in page
    assert "default `4GiB`" in page


def test_the_page_of_commands_has_every_command_and_option() -> None:
    page = commands.page()
    shown = dict(commands.commands())
    assert {"doctor", "bench tools", "keys add"} <= set(shown)
    for name, command in shown.items():
        (part,) = re.findall(rf"## `keepwarm {name}` .*?(?=\n## |\Z)", page, re.DOTALL)
        options = [max(each.opts, key=len) for each in command.params if each.param_type_name == "option"]
        assert [option for option in options if option not in part and option != "--help"] == [], name


def test_the_page_of_http_has_every_operation() -> None:
    page = http.page()
    for path, operations in http.document()["paths"].items():
        for method in operations:
            assert f"### `{method.upper()} {path}`" in page


def test_the_page_of_python_names_what_exists() -> None:
    import importlib

    for name in python.SHOWN:
        module, _, attribute = name.rpartition(".")
        if name != "keepwarm.errors":
            assert getattr(importlib.import_module(module), attribute).__doc__, name
    page = python.page()
    assert "`max_new_tokens`" in page
    assert "`messages`" in page


# ---- how it hangs together ----


class _Loader(yaml.SafeLoader):
    """Reads mkdocs.yml, whose tags name Python objects."""


_Loader.add_multi_constructor("tag:yaml.org,2002:python/", lambda loader, suffix, node: suffix)


def _menu(entries: list[object]) -> Iterator[str]:
    for entry in entries:
        for value in entry.values() if isinstance(entry, dict) else [entry]:
            if isinstance(value, list):
                yield from _menu(value)
            else:
                yield str(value)


def test_the_menu_names_every_page_once() -> None:
    menu = list(_menu(yaml.load((ROOT / "mkdocs.yml").read_text(), _Loader)["nav"]))
    assert len(menu) == len(set(menu))
    written = {str(path.relative_to(DOCS)) for path in DOCS.rglob("*.md") if path.parent.name != "decisions"}
    assert set(menu) == written | set(PAGES) | {"decisions/README.md"}


def _pages() -> list[Path]:
    return [ROOT / "README.md", *(path for path in sorted(DOCS.rglob("*.md")) if path.parent.name != "decisions")]


@pytest.mark.parametrize("page", _pages(), ids=lambda path: str(path.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    text = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    for link in re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", text):
        if "://" not in link:
            made = str((page.parent / link).resolve()).removeprefix(f"{DOCS}/")
            assert (page.parent / link).exists() or made in PAGES, link


def _lines() -> list[str]:
    """Every `keepwarm ...` of a fenced block, and of the README's text. Prose elsewhere names parts of commands."""
    found = []
    for page in _pages():
        text = page.read_text(encoding="utf-8")
        fenced = "\n".join(re.findall(r"```[a-z]*\n(.*?)```", text, re.DOTALL)).replace("\\\n", " ")
        found += re.findall(r"^\s*(?:\$ )?(keepwarm .*)$", fenced, re.MULTILINE)
        if page.parent == ROOT:
            found += re.findall(r"(?<!`)`(keepwarm [^`]+)`", re.sub(r"```.*?```", "", text, flags=re.DOTALL))
    return sorted(set(found))


@pytest.mark.parametrize("line", _lines())
def test_command_lines_parse(line: str) -> None:
    import typer

    arguments = shlex.split(line.split(" | ")[0].split(" > ")[0].rstrip("&"), comments=True)[1:]
    here = typer.main.get_command(app)
    name = "keepwarm"
    while True:
        with here.make_context(name, arguments, resilient_parsing=not arguments) as context:
            if not hasattr(here, "commands") or not arguments or arguments[0].startswith("-"):
                return
            name, here, arguments = here.resolve_command(context, arguments)  # type: ignore[assignment]


# ---- size ----


def test_the_demo_models_size_is_that_of_the_program() -> None:
    for text in ((DOCS / "install.md").read_text(encoding="utf-8"), notebook.page()):
        assert set(re.findall(r"[\d.]+ MB", text)) == {DOWNLOAD}


def test_the_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_bytes()) <= README_BYTES


def test_the_notebook_shows_no_time_of_some_machine() -> None:
    assert not re.search(r"\d (?:ms|s)\b", notebook.page())


# ---- snippets ----


def blocks(page: Path) -> list[str]:
    return re.findall(r"```python\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL)


@pytest.fixture
def _at_home(demo_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KEEPWARM_CACHE", str(cache_dir()))
    monkeypatch.setenv("HOME", str(tmp_path))


@pytest.mark.slow
@pytest.mark.usefixtures("_at_home")
def test_the_readmes_python_prints_what_stands_there(capsys: pytest.CaptureFixture[str]) -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    (block,), (output,) = blocks(ROOT / "README.md"), re.findall(r"```text\n(.*?)```", text, re.DOTALL)
    code = compile(block, "README.md", "exec")
    exec(code, {"__name__": "__main__"})
    assert capsys.readouterr().out == output
    exec(code, {"__name__": "__main__"})
    (again,) = re.findall(r"Run it again: (.*?) tokens are reused", text)
    assert capsys.readouterr().out.startswith(f"{again} tokens reused, exact")


@pytest.mark.slow
@pytest.mark.usefixtures("_at_home")
@pytest.mark.parametrize("name", PYTHON)
def test_python_of_the_manual(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    names: dict[str, object] = {"__name__": "__main__"}
    for block in blocks(DOCS / name):
        exec(compile(block, name, "exec"), names)
    said = capsys.readouterr().out
    assert _SAYS.get(name, "tokens") in said


RUN_BY = {  # what runs the Python of the other pages
    "async.md": "tests/test_examples.py",
    "lora.md": "tests/test_examples.py",
    "gguf.md": "tests/test_examples.py",
    "int4.md": "tests/test_examples.py",
    "fleet.md": "tests/test_examples.py",
    "llama-cpp.md": "tests/llamacpp/test_example.py",
    "mlx-lm.md": "tests/mlx/test_example.py",
    "quickstart/server.md": "tests/serving/test_documented.py",
    "serving/openai.md": "tests/serving/test_documented.py",
    "serving/anthropic.md": "tests/serving/test_documented.py",
    "serving/agents.md": "tests/clients/test_clients.py",
}


def test_all_python_of_the_manual_runs_somewhere() -> None:
    with_python = {str(page.relative_to(DOCS)) for page in _pages()[1:] if blocks(page)}
    assert with_python == set(PYTHON) | set(RUN_BY)
    for page, test in RUN_BY.items():
        assert Path(page).name in (ROOT / test).read_text(encoding="utf-8"), f"{test} does not run {page}"


_SAYS = {
    "howto/documents.md": "recomputed, blended",
    "howto/sessions.md": "tokens reused, exact",
    "howto/why-it-missed.md": "tokens_differ in the system",
}
