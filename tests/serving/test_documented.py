"""The documentation's examples, run as they are printed; container, unit and configuration name what there is."""

from __future__ import annotations

import configparser
import importlib.util
import os
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import httpx2 as httpx
import pytest
import yaml
from tests.helpers.deploying import DEPLOY, ROOT, check_command, check_variables
from tests.helpers.processes import DEADLINE, ServerProcess

from keepwarm.serving.settings import ServeConfig

DOCS = ROOT / "docs" / "serving"
BLOCK = re.compile(r"^```(python|sh)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
PROGRAMS = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"  # those of this environment first
QUICKSTART = "../quickstart/server.md"
OUR_ADDRESS = "http://127.0.0.1:8000"


def examples(*pages: str) -> list[Any]:
    found = []
    for page in pages:
        blocks = BLOCK.findall((DOCS / page).read_text())
        if page == "native.md":  # what one example registers, the next ones ask
            blocks = [("sh", "\n".join(text for _, text in blocks))]
        if page == QUICKSTART:  # its shell lines install and start what runs here already
            blocks = [(language, text) for language, text in blocks if language == "python"]
        for number, (language, text) in enumerate(blocks, 1):
            found.append(pytest.param(language, text, id=f"{page}-{number}-{language}"))
    return found


def run(language: str, text: str, folder: Path, environment: dict[str, str]) -> str:
    command = [sys.executable, "-c", text] if language == "python" else ["bash", "-euo", "pipefail", "-c", text]
    paths = os.pathsep.join(path for path in sys.path if path)
    known = os.environ | {"PYTHONPATH": paths, "HOME": str(folder), "XDG_CONFIG_HOME": str(folder), "PATH": PROGRAMS}
    known |= environment
    done = subprocess.run(command, cwd=ROOT, env=known, capture_output=True, text=True, timeout=DEADLINE, check=False)
    assert done.returncode == 0, f"{text}\n{done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.mark.slow
@pytest.mark.parametrize(
    ("language", "text"), examples("native.md", "openai.md", "anthropic.md", "sglang.md", QUICKSTART)
)
def test_examples_of_the_protocols(server: ServerProcess, tmp_path: Path, language: str, text: str) -> None:
    if language == "python":
        for package in re.findall(r"^from (\w+) import", text, re.MULTILINE):
            if importlib.util.find_spec(package) is None:
                pytest.skip(f"{package} is not installed")
    for tool in re.findall(r"^(curl|llm) ", text, re.MULTILINE):
        if shutil.which(tool, path=PROGRAMS) is None:
            pytest.skip(f"there is no {tool}")
    assert OUR_ADDRESS in text
    httpx.post(f"{server.url}/v1/cache/purge", timeout=DEADLINE).raise_for_status()
    assert run(language, text.replace(OUR_ADDRESS, server.url), tmp_path, {}).strip()
    httpx.post(f"{server.url}/v1/cache/purge", timeout=DEADLINE).raise_for_status()


@pytest.mark.slow
@pytest.mark.parametrize(("language", "text"), examples("deployment.md"))
def test_examples_of_the_command(tmp_path: Path, language: str, text: str) -> None:
    """Each in a folder of its own that has `deploy/`."""
    (tmp_path / "deploy").symlink_to(DEPLOY)
    call = f'keepwarm() {{ {shlex.quote(sys.executable)} -m keepwarm.cli "$@"; }}\ncd {shlex.quote(str(tmp_path))}\n'
    assert run(language, call + text, tmp_path, {}).strip()


def test_the_example_configuration_is_whole(tmp_path: Path) -> None:
    text = (DEPLOY / "keepwarm.toml").read_text()
    assert ServeConfig.load(DEPLOY / "keepwarm.toml", {}, {}).server.host == "127.0.0.1"
    every = re.sub(r"^#(?=\S)", "", text, flags=re.MULTILINE)
    (tmp_path / "every.toml").write_text(every)
    ServeConfig.load(tmp_path / "every.toml", {}, {})
    shown = tomllib.loads(every)
    for section in ("server", "batch", "limits", "tenants", "log", "tracing"):
        annotation: Any = ServeConfig.model_fields[section].annotation
        assert set(shown[section]) == set(annotation.model_fields), section
    plain = ServeConfig.load(None, {}, {}).model_dump(mode="json")
    for name, value in shown["limits"].items():
        if plain["limits"][name] is not None and name != "max_body":
            assert value == plain["limits"][name], name


@pytest.mark.parametrize("page", ["models.md", "rewrite.md"])
def test_configurations_in_pages_can_be_used(tmp_path: Path, page: str) -> None:
    blocks = re.findall(r"^```toml\n(.*?)^```$", (DOCS / page).read_text(), re.MULTILINE | re.DOTALL)
    assert blocks
    for text in blocks:
        (tmp_path / "page.toml").write_text(text)
        ServeConfig.load(tmp_path / "page.toml", {}, {})


def test_the_unit(tmp_path: Path) -> None:
    class Repeated(dict[str, Any]):
        def __setitem__(self, name: str, value: Any) -> None:
            if name in self and isinstance(value, list):
                value = self[name] + value
            super().__setitem__(name, value)

    unit = configparser.RawConfigParser(strict=False, dict_type=Repeated)
    unit.optionxform = str  # type: ignore[method-assign,assignment]
    unit.read(DEPLOY / "systemd" / "keepwarm.service")
    assert set(unit.sections()) == {"Unit", "Service", "Install"}
    service = unit["Service"]
    for name in ("ExecStartPre", "ExecStart"):
        program, *words = shlex.split(service[name])
        assert Path(program).name == "keepwarm"
        check_command(words)
    check_variables(dict(line.split("=", 1) for line in service["Environment"].splitlines()))
    if shutil.which("systemd-analyze"):
        copy = tmp_path / "keepwarm.service"
        copy.write_text(
            (DEPLOY / "systemd" / "keepwarm.service").read_text().replace("/opt/keepwarm/bin/keepwarm", "/bin/true")
        )
        done = subprocess.run(["systemd-analyze", "verify", copy], capture_output=True, text=True, check=False)
        assert "Unknown" not in done.stderr, done.stderr


def test_the_container_file() -> None:
    text = (DEPLOY / "container" / "Dockerfile").read_text().replace("\\\n", " ")
    lines = [line.split(maxsplit=1) for line in text.splitlines() if line and not line.startswith("#")]
    known = [
        "FROM",
        "RUN",
        "WORKDIR",
        "COPY",
        "ARG",
        "USER",
        "ENV",
        "VOLUME",
        "EXPOSE",
        "HEALTHCHECK",
        "STOPSIGNAL",
        "ENTRYPOINT",
        "CMD",
    ]
    assert {name for name, _ in lines} <= set(known)
    assert (lines[0][0], lines[-1][0]) == ("FROM", "CMD")
    ignored = (ROOT / ".dockerignore").read_text().splitlines()
    for name, rest in lines:
        if name == "COPY":
            for source in rest.split()[:-1]:
                assert (ROOT / source).exists(), source
                assert f"!{source.removeprefix('./')}" in ignored, source
    check_variables(dict(rest.split("=", 1) for name, rest in lines if name == "ENV"))
    check_command(yaml.safe_load(lines[-1][1]))
    extras = set(re.search(r"'\.\[(.*?)\]'", text)[1].split(","))  # type: ignore[index]
    assert extras <= set(tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"])


def test_the_compose_file() -> None:
    folder = DEPLOY / "container"
    text = (folder / "compose.yaml").read_text()
    found = yaml.safe_load(text)
    services = found["services"]
    proxied = set(re.findall(r"server ([\w-]+):8000", (folder / "nginx.conf").read_text()))
    assert proxied == {name for name in services if name.startswith("replica")}
    for name in proxied:
        one = services[name]
        check_variables({
            key: value.replace("${KEEPWARM_MODEL:-demo}", "demo") for key, value in one["environment"].items()
        })
        assert (folder / one["build"]["context"] / one["build"]["dockerfile"]).exists()
        assert {volume.split(":")[0] for volume in one["volumes"]} <= set(found["volumes"])
        assert set(one["depends_on"]) <= set(services)
    made = re.search(r"replica-1 (keys add .*)", text)
    assert made is not None
    check_command(made[1].split())
    nginx = (folder / "nginx.conf").read_text()
    assert nginx.count("{") == nginx.count("}")
    if shutil.which("redis-server"):
        assert services["redis"]["command"][0] == "redis-server"
