"""`keepwarm doctor` over real folders, ports and models: what is wrong is found, and told with a remedy."""

from __future__ import annotations

import fcntl
import json
import os
import shlex
import shutil
import socket
import sys
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
from tests.helpers.cli import Cli
from tests.helpers.doctor import KEY, Look, filled
from tests.helpers.remotes import free_port
from transformers import AutoConfig, GPTNeoXConfig

from keepwarm.runtime.demo_model import DOWNLOAD, file_place, folder_place
from keepwarm.runtime.place import device_of, dtype_of


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
    assert f"`keepwarm gc --store {store}` removes them" in found["contents"]["advice"]
    (store / "catalogue.sqlite").write_bytes(b"SQLite format 3\0" + bytes(5000))
    code, found = look("--store", store)
    assert (code, found["contents"]["status"]) == (7, "fail")
    assert f"`keepwarm verify --repair --store {store}`" in found["contents"]["advice"]


def test_advice_names_the_store_and_its_key_for_a_shell(look: Look, tmp_path: Path) -> None:
    key = tmp_path / "my key"
    key.write_bytes(KEY)
    store = filled(tmp_path / "my store", KEY)
    (store / "quarantine" / "stray").write_bytes(bytes(5000))
    with open(store / "writing", "rb") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        _, found = look("--store", store, "--store-key-file", key)
    advice = found["contents"]["advice"]
    line = shlex.split(advice.split("`")[1])
    assert line == ["keepwarm", "gc", "--store", str(store), "--store-key-file", str(key)]
    assert found["locks"]["advice"].endswith(f"fuser -v '{store}'/*")


def test_a_full_disk_under_a_store_that_is_not_there(
    look: Look, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("keepwarm.cli.doctor.stores._LITTLE_SPACE", 1 << 60)
    _, found = look("--store", tmp_path / "none")
    assert "gc" not in found["space"]["advice"]
    _, found = look("--store", filled(tmp_path / "store"))
    assert f"`keepwarm gc --max-disk 1GiB --store {tmp_path / 'store'}`" in found["space"]["advice"]


def test_an_encrypted_store_and_its_key(look: Look, tmp_path: Path) -> None:
    (tmp_path / "key").write_bytes(KEY)
    store = filled(tmp_path / "store", KEY)
    code, found = look("--store", store)
    assert (code, found["contents"]["status"]) == (7, "fail")
    assert "is encrypted" in found["contents"]["detail"]
    assert look("--store", store, "--store-key-file", tmp_path / "key")[0] == 0


def test_a_lock_that_is_held(look: Look, tmp_path: Path) -> None:
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
    assert found["port"]["detail"].endswith("of 127.0.0.1 is in use already")
    assert "--port" in found["port"]["advice"]


@pytest.mark.parametrize("host", ["no.such.host.invalid", "fe80::1:2:3"])
def test_a_host_that_is_none_of_this_machines(
    look: Look, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, host: str
) -> None:
    monkeypatch.setenv("KEEPWARM__SERVER__HOST", host)
    monkeypatch.setenv("KEEPWARM__TENANTS__KEYS_FILE", str(tmp_path / "keys"))  # others could reach it
    code, found = look("--store", tmp_path / "none")
    assert (code, found["port"]["status"]) == (7, "fail")
    assert repr(host) in found["port"]["detail"]
    assert "--host" in found["port"]["advice"]


class Healthy(BaseHTTPRequestHandler):
    """Answers as a server of Keepwarm does."""

    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()
        self.wfile.write(b'{"status": "ready", "progress": null}')


class OnSix(HTTPServer):
    address_family = socket.AF_INET6


@pytest.mark.skipif(not socket.has_dualstack_ipv6(), reason="no IPv6 here")
def test_a_server_of_its_own_is_known_on_any_address(
    look: Look, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with OnSix(("::1", 0), Healthy) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        monkeypatch.setenv("KEEPWARM__SERVER__HOST", "::1")
        monkeypatch.setenv("KEEPWARM__SERVER__PORT", str(server.server_port))
        code, found = look("--store", tmp_path / "none")
        server.shutdown()
    assert (code, found["port"]["status"]) == (0, "ok")
    assert "a Keepwarm server answers" in found["port"]["detail"]


def test_a_model_that_is_not_there(look: Look, tmp_path: Path) -> None:
    code, found = look("--model", tmp_path / "none")
    assert (code, found["model"]["status"]) == (7, "fail")
    code, found = look("--model", "nobody/nothing")
    assert (code, found["model"]["status"]) == (0, "warn")
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "unheard-of"}))
    (tmp_path / "model.safetensors").write_bytes(b"")
    assert look("--model", tmp_path)[1]["model"]["status"] == "warn"
    assert look("--model", tmp_path / ("x" * 300))[1]["model"]["status"] == "fail"


def test_a_model_that_reads_pictures_is_loaded_in_part_or_not_at_all(look: Look, tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"")
    for kind in ("gemma3", "paligemma"):
        AutoConfig.for_model(kind).save_pretrained(tmp_path)
        code, found = look("--model", tmp_path)
        told = found["model"]
        if kind == "gemma3":
            assert (code, told["status"]) == (0, "ok")
            assert "its language model is loaded alone, as Gemma3ForCausalLM: prompts are texts" in told["detail"]
        else:
            assert (code, told["status"]) == (7, "fail")
            assert "attend to those behind them" in told["detail"]


def test_a_model_without_all_its_weights_is_not_there(
    look: Look, saved: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = tmp_path / "hub" / "models--somebody--something" / "snapshots" / "c0ffee"
    shutil.copytree(saved("llama"), kept)
    (kept.parents[1] / "refs").mkdir()
    (kept.parents[1] / "refs" / "main").write_text("c0ffee")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))

    def both() -> tuple[dict[str, Any], dict[str, Any]]:
        return look("--model", kept)[1]["model"], look("--model", "somebody/something")[1]["model"]

    assert [each["status"] for each in both()] == ["ok", "ok"]
    (kept / "model.safetensors").rename(kept / "model-00001-of-00002.safetensors")
    index = {"weight_map": {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}}
    (kept / "model.safetensors.index.json").write_text(json.dumps(index))
    folder, hub = both()
    assert (folder["status"], hub["status"]) == ("fail", "warn")
    assert "1 of 2 files of weights are missing (model-00002" in folder["detail"]
    assert "downloads the rest" in hub["advice"]
    (kept / "model.safetensors.index.json").unlink()
    (kept / "model-00001-of-00002.safetensors").unlink()
    assert "there are no files of weights" in both()[0]["detail"]


def test_the_demo_model_needs_pip_until_it_is_there(
    look: Look, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KEEPWARM_CACHE", str(tmp_path))
    assert DOWNLOAD in look("--store", tmp_path / "none")[1]["model"]["advice"]
    monkeypatch.setitem(sys.modules, "pip", None)
    found = look("--store", tmp_path / "none")[1]["model"]
    assert (found["status"], "ensurepip" in found["advice"]) == ("warn", True)
    file, folder = file_place(), folder_place()
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    found = look("--store", tmp_path / "none")[1]["model"]
    assert (found["status"], f"rm -r {folder}" in found["advice"]) == ("fail", True)
    (folder / "config.json").unlink()
    file.write_bytes(b"GGUF, but no more")
    assert "not downloaded yet" in look("--store", tmp_path / "none")[1]["model"]["detail"]
    monkeypatch.setattr("keepwarm.runtime.demo_model.GGUF_BYTES", file.stat().st_size)
    found = look("--store", tmp_path / "none")[1]["model"]
    assert (found["status"], str(file) in found["detail"]) == ("ok", True)


def test_it_says_whether_the_kernels_have_a_models_class(
    look: Look, saved: Callable[..., Path], tmp_path: Path
) -> None:
    def told(folder: Path, *more: str) -> str:
        return str(look("--store", tmp_path / "none", "--model", folder, *more)[1]["model"]["detail"])

    assert "Keepwarm's kernels for the CPU have LlamaForCausalLM" in told(saved("llama"))
    assert "LlamaForCausalLM runs through transformers: reuse ends" in told(saved("llama"), "--dtype", "float16")
    (other := tmp_path / "other").mkdir()
    (other / "model.safetensors").write_bytes(b"")
    GPTNeoXConfig(architectures=["GPTNeoXForCausalLM"]).save_pretrained(other)
    assert "GPTNeoXForCausalLM runs through transformers: reuse ends" in told(other)


def test_kv_is_told_in_the_dtype_that_the_model_gets(look: Look, saved: Callable[..., Path], tmp_path: Path) -> None:
    folder = saved("llama")
    told = {
        dtype: look("--store", tmp_path / "none", "--model", folder, *(("--dtype", dtype) if dtype else ()))[1]["model"]
        for dtype in ("", "float32", "float16")
    }
    here = str(dtype_of(None, device_of(None))).removeprefix("torch.")
    for dtype, found in told.items():
        assert f"of KV per token in {dtype or here}" in found["detail"]


def test_the_chat_template_of_a_folder_is_looked_for(look: Look, saved: Callable[..., Path], tmp_path: Path) -> None:
    folder = tmp_path / "own"
    shutil.copytree(saved("llama"), folder)
    assert "no chat template" not in look("--model", folder)[1]["model"]["detail"]
    (folder / "chat_template.jinja").unlink()
    found = look("--model", folder)[1]["model"]
    assert (found["status"], "no chat template" in found["detail"]) == ("ok", True)
    (folder / "chat_template.json").write_text('{"chat_template": "abc')
    found = look("--model", folder)[1]["model"]
    assert (found["status"], "chat_template.json is no JSON" in found["detail"]) == ("fail", True)
    assert "config.json cannot be read" not in found["detail"]


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
