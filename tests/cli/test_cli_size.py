"""`keepwarm size` against figures that were worked out by hand."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tests.helpers.cli import Cli
from tests.helpers.gguf_files import DIM, KV_HEADS, LAYERS, WINDOW, write

LLAMA_2_7B = {"hidden_size": 4096, "num_attention_heads": 32, "num_hidden_layers": 32, "torch_dtype": "float16"}
QWEN3_8B = {
    "hidden_size": 4096,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "num_hidden_layers": 36,
    "head_dim": 128,
    "dtype": "bfloat16",
}
GEMMA = {
    "hidden_size": 640,
    "num_attention_heads": 4,
    "num_key_value_heads": 1,
    "head_dim": 256,
    "num_hidden_layers": 3,
    "sliding_window": 512,
    "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
    "dtype": "bfloat16",
}
HYBRID = QWEN3_8B | {"num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"]}


@pytest.fixture
def folder(tmp_path: Path) -> Any:
    def write(config: dict[str, Any]) -> Path:
        (tmp_path / "config.json").write_text(json.dumps(config))
        return tmp_path

    return write


def test_multi_head_attention_needs_the_naive_bytes(cli: Cli, folder: Any) -> None:
    report = cli("size", folder(LLAMA_2_7B), "4096", "--json").json
    assert report["bytes_per_token"] == report["naive_bytes_per_token"] == 512 << 10
    assert report["bytes"] == 2 << 30
    assert report["overestimate"] == 1
    assert "is right here" in report["why"]


def test_grouped_queries_need_a_quarter(cli: Cli, folder: Any) -> None:
    report = cli("size", folder(QWEN3_8B), "1000", "--json").json
    assert report["bytes_per_token"] == 144 << 10
    assert report["overestimate"] == 4
    assert "32 query heads share 8 key/value heads" in report["why"]
    assert len(report["layers"]) == 1


def test_dtype_is_the_one_asked_for(cli: Cli, folder: Any) -> None:
    path = folder(QWEN3_8B)
    assert cli("size", path, "1", "--dtype", "float32", "--json").json["bytes_per_token"] == 288 << 10
    refused = cli("size", path, "1", "--dtype", "int7", "--json")
    assert refused.code == 2
    assert "bfloat16" in refused.err


def test_windows_bound_a_prompt(cli: Cli, folder: Any) -> None:
    path = folder(GEMMA)
    report = cli("size", path, "2000", "--json").json
    per_layer = 256 * 2 * 2
    assert report["bytes_per_token"] == 3 * per_layer
    assert report["bytes"] == per_layer * (2 * (511 + 511) + 2000)  # two steps
    assert report["loaded_bytes"] == per_layer * (2 * 511 + 2000)
    assert cli("size", path, "300", "--json").json["bytes"] == 300 * 3 * per_layer
    assert [run["layers"] for run in report["layers"]] == [2, 1]
    assert "window" in report["why"]
    text = cli("size", path, "2000").out
    assert "0-1" in text
    assert "window 512" in text
    assert "a hit loads" in text


def test_recurrent_layers_keep_no_kv(cli: Cli, folder: Any) -> None:
    report = cli("size", folder(HYBRID), "10", "--json").json
    assert report["layers_without_kv"] == 1
    assert report["bytes_per_token"] == 4 << 10
    assert "recurrent" in report["why"]
    assert report["state"] == {
        "layers": 1,
        "kind": None,
        "bytes": None,
        "tokens": None,
        "most": None,
        "most_bytes": None,
    }
    assert "does not tell" in cli("size", folder(HYBRID), "10").out


def test_a_snapshot_is_weighed_in_tokens(cli: Cli, folder: Any) -> None:
    delta = {
        "linear_conv_kernel_dim": 4,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 32,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
    }
    state = cli("size", folder(HYBRID | delta), "10", "--json").json["state"]
    assert (state["layers"], state["kind"]) == (1, "gated delta net")
    assert state["bytes"] == 32 * 128 * 128 * 4 + 8192 * 4 * 2 + 350
    assert state["tokens"] == pytest.approx(state["bytes"] / 4096)
    assert (state["most"], state["most_bytes"]) == (2, 2 * state["bytes"])
    text = cli("size", folder(HYBRID | delta), "5000").out
    assert "as much as the KV of 528 tokens" in text
    assert "9 at most along a prompt of this length" in text


def test_a_model_without_kv(cli: Cli, folder: Any) -> None:
    mamba = {"hidden_size": 64, "num_hidden_layers": 2, "state_size": 16, "conv_kernel": 4, "expand": 2}
    report = cli("size", folder(mamba), "10", "--json").json
    assert (report["bytes_per_token"], report["overestimate"]) == (0, None)
    assert report["state"]["tokens"] is None
    text = cli("size", folder(mamba), "10").out
    assert "(Mamba-1)" in text
    fleet = cli("size", folder(mamba), "10", "--fleet", "--prefill-speed", "100")
    assert fleet.code == 0, fleet.err


def test_known_names_and_demo(cli: Cli) -> None:
    assert cli("size", "demo", "1", "--json").json["bytes_per_token"] == 30 * 3 * 64 * 2 * 2
    unknown = cli("size", "no-such-model", "1")
    assert unknown.code == 3
    assert "demo" in unknown.err


@pytest.mark.parametrize("text", ["{", "[]", "{}", '{"hidden_size": 8}'])
def test_what_is_no_configuration_is_refused(cli: Cli, tmp_path: Path, text: str) -> None:
    (tmp_path / "config.json").write_text(text)
    result = cli("size", tmp_path, "1")
    assert result.code == 3
    assert result.err.startswith("keepwarm: ")


def test_plain_text_when_piped(cli: Cli, folder: Any) -> None:
    text = cli("size", folder(QWEN3_8B), "1000").out
    assert "147,456 bytes (144 KiB)" in text
    assert "\x1b" not in text
    assert "4 times the real size" in text


def test_a_gguf_file_has_its_configuration_in_itself(cli: Cli, tmp_path: Path) -> None:
    report = cli("size", write(tmp_path / "m.gguf", architecture="gemma3", is_tied=True), "1000", "--json").json
    assert (report["dtype"], report["bytes_per_token"]) == ("bfloat16", LAYERS * 2 * KV_HEADS * DIM * 2)
    assert [layer["window"] for layer in report["layers"]] == [WINDOW]
    assert cli("size", tmp_path / "none.gguf").code == 3
