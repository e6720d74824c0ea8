"""`keepwarm doctor` over real folders, ports and models: what is wrong is found, and told with a remedy."""

from __future__ import annotations

import fcntl
import json
import os
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.helpers.cli import Cli
from tests.helpers.remotes import free_port

from keepwarm.store import Archive
from keepwarm.testing.kv import UNEVEN, MemoryKV, blocks_of, namespace, prompt

KEY = bytes(range(32))


def filled(folder: Path, key: bytes | None = None) -> Path:
    with Archive.open(folder, max_ram=0, max_disk=1 << 24, key=key) as archive:
        archive.put(MemoryKV.random(UNEVEN, 40, 1), blocks_of(prompt(40, 1)), namespace())
        archive.flush()
    return folder


@pytest.fixture
def look(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[int, dict[str, Any]]]:
    """Run the doctor on a free port; the exit code, and findings by name."""
    monkeypatch.setenv("KEEPWARM__SERVER__PORT", str(free_port()))

    def looked(*arguments: str | Path) -> tuple[int, dict[str, Any]]:
        result = cli("doctor", "--json", *arguments)
        assert all(each["advice"] for each in result.json["findings"] if each["status"] != "ok")
        return result.code, {each["name"]: each for each in result.json["findings"]}

    return looked


Look = Callable[..., tuple[int, dict[str, Any]]]


def test_everything_is_looked_at(look: Look, tmp_path: Path) -> None:
    code, found = look("--store", filled(tmp_path / "store"))
    assert code == 0
    assert list(found) == [
        "machine",
        "packages",
        "cache",
        "settings",
        "kernels",
        "device",
        "store",
        "space",
        "locks",
        "contents",
        "model",
        "port",
    ]
    assert found["store"]["status"] == found["locks"]["status"] == found["contents"]["status"] == "ok"
    assert "1 run" in found["contents"]["detail"]


def test_the_text_names_status_and_remedy(cli: Cli, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    shown = cli("doctor", "--store", tmp_path / "file")
    assert shown.code == 7
    assert f"fail  store      {tmp_path / 'file'} is a file\n" in shown.out
    assert "-> name another folder with --store" in shown.out
    assert "1 fail" in shown.err


def test_a_store_that_is_not_there_is_not_made(look: Look, tmp_path: Path) -> None:
    code, found = look("--store", tmp_path / "none")
    assert (code, found["store"]["status"]) == (0, "ok")
    assert not (tmp_path / "none").exists()
    (tmp_path / "file").write_text("")
    code, found = look("--store", tmp_path / "file" / "store")
    assert (code, found["store"]["status"]) == (7, "fail")


def test_a_store_that_others_can_read(look: Look, tmp_path: Path) -> None:
    store = filled(tmp_path / "store")
    store.chmod(0o755)
    code, found = look("--store", store)
    assert (code, found["store"]["status"], found["store"]["advice"]) == (0, "warn", f"chmod 700 {store}")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_store_that_cannot_be_written(look: Look, tmp_path: Path) -> None:
    store = filled(tmp_path / "store")
    store.chmod(0o500)
    code, found = look("--store", store)
    assert (code, found["store"]["status"]) == (7, "fail")


def test_damage_and_leftovers(look: Look, tmp_path: Path) -> None:
    store = filled(tmp_path / "store")
    (store / "quarantine" / "stray").write_bytes(bytes(5000))
    code, found = look("--store", store)
    assert (code, found["contents"]["status"]) == (0, "warn")
    assert "keepwarm gc" in found["contents"]["advice"]
    (store / "catalogue.sqlite").write_bytes(b"SQLite format 3\0" + bytes(5000))
    code, found = look("--store", store)
    assert (code, found["contents"]["status"]) == (7, "fail")
    assert "keepwarm verify --repair" in found["contents"]["advice"]


def test_an_encrypted_store_and_its_key(look: Look, tmp_path: Path) -> None:
    (tmp_path / "key").write_bytes(KEY)
    store = filled(tmp_path / "store", KEY)
    code, found = look("--store", store)
    assert (code, found["contents"]["status"]) == (7, "fail")
    assert "is encrypted" in found["contents"]["detail"]
    assert look("--store", store, "--store-key-file", tmp_path / "key")[0] == 0


def test_a_lock_that_is_held(look: Look, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("keepwarm.cli.doctor.stores._PATIENCE", 0.05)
    store = filled(tmp_path / "store")
    with open(store / "writing", "rb") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        code, found = look("--store", store)
    assert (code, found["locks"]["status"]) == (0, "warn")
    assert "writing to" in found["locks"]["detail"]


def test_a_port_that_something_else_has(look: Look, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("keepwarm.cli.doctor.ports._ASKING", 0.1)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        monkeypatch.setenv("KEEPWARM__SERVER__PORT", str(taken.getsockname()[1]))
        code, found = look("--store", tmp_path / "none")
    assert (code, found["port"]["status"]) == (0, "warn")
    assert "in use" in found["port"]["detail"]


def test_a_model_that_is_not_there(look: Look, tmp_path: Path) -> None:
    code, found = look("--model", tmp_path / "none")
    assert (code, found["model"]["status"]) == (7, "fail")
    code, found = look("--model", "nobody/nothing")
    assert (code, found["model"]["status"]) == (0, "warn")
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "unheard-of"}))
    assert look("--model", tmp_path)[1]["model"]["status"] == "warn"


def test_a_loaded_model_says_how_it_is_cached(look: Look, saved: Callable[..., Path], tmp_path: Path) -> None:
    code, found = look("--model", saved("llama"), "--load", "--store", tmp_path / "none")
    assert (code, found["model"]["status"]) == (0, "ok")
    assert "loaded and cached, on Keepwarm's kernels" in found["model"]["detail"]


def test_wrong_settings_and_devices(look: Look, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KEEPWARM__ENGINE__DEVICE", "cuda:7")
    code, found = look("--store", tmp_path / "none")
    assert (code, found["device"]["status"]) == (7, "fail")
    monkeypatch.setenv("KEEPWARM__ENGINE__MAX_RAM", "lots")
    code, found = look("--store", tmp_path / "none")
    assert (code, found["settings"]["status"]) == (7, "fail")
    assert "lots" in found["settings"]["detail"]


@pytest.mark.parametrize(
    ("arguments", "name", "said"),
    [
        (("--store-key-file", "/no/such/key"), "settings", "/no/such/key cannot be read"),
        (("--dtype", "float12"), "settings", "float12"),
        (("--device", "tpu"), "settings", "got 'tpu'"),
        (("--config", "/no/such/file"), "settings", "/no/such/file"),
        (("--remote", "ftp://x"), "remote", "ftp://x"),
    ],
)
def test_a_wrong_option_is_a_finding(
    look: Look, tmp_path: Path, arguments: tuple[str, ...], name: str, said: str
) -> None:
    code, found = look("--store", tmp_path / "none", *arguments)
    assert (code, found[name]["status"]) == (7, "fail")
    assert said in found[name]["detail"]


def test_the_services_file_names_what_is_looked_at(look: Look, tmp_path: Path) -> None:
    file = tmp_path / "keepwarm.toml"
    file.write_text(f'model = "/no/such/model"\n[engine]\nstore = "{tmp_path / "elsewhere"}"\n')
    code, found = look("--config", file)
    assert (code, found["model"]["status"]) == (7, "fail")
    assert str(tmp_path / "elsewhere") in found["store"]["detail"]


def test_each_of_several_models_is_looked_at(cli: Cli, saved: Callable[..., Path], tmp_path: Path) -> None:
    file = tmp_path / "keepwarm.toml"
    file.write_text(
        f'model = "quick"\n[models]\nquick = "{saved("llama")}"\nclever = {{ path = "/no/such/model" }}\n'
        f'[engine]\nstore = "{tmp_path / "none"}"\n[server]\nport = {free_port()}\n'
    )
    result = cli("doctor", "--json", "--config", file)
    found = [each for each in result.json["findings"] if each["name"] == "model"]
    assert [each["status"] for each in found] == ["ok", "fail"]
    assert "/no/such/model" in found[1]["detail"]
    assert result.code == 7


def test_a_folder_of_an_adapter_is_a_model(look: Look, tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_text('{"peft_type": "LORA"}')
    code, found = look("--model", tmp_path, "--store", tmp_path / "none")
    assert (code, found["model"]["status"]) == (0, "ok")


def test_a_store_that_cannot_be_looked_at(look: Look, tmp_path: Path) -> None:
    code, found = look("--store", tmp_path / ("x" * 300))
    assert (code, found["store"]["status"]) == (7, "fail")
    assert "too long" in found["store"]["detail"]


def test_a_remote_that_does_not_answer_is_a_warning(look: Look, tmp_path: Path) -> None:
    (tmp_path / "shared").mkdir()
    answering = look("--store", tmp_path / "none", "--remote", f"file://{tmp_path / 'shared'}")
    assert (answering[0], answering[1]["remote"]["status"]) == (0, "ok")
    url = f"redis://:secret@127.0.0.1:{free_port()}"
    code, found = look("--store", tmp_path / "none", "--remote", url)
    assert (code, found["remote"]["status"]) == (0, "warn")
    assert "secret" not in json.dumps(found)
