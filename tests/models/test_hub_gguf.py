"""GGUF files in a hub's repository, by their type."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest
from tests.helpers.gguf_files import write
from tests.helpers.hub import hub

from keepwarm.models.hub_gguf import fetched_gguf, files_of
from keepwarm.models.places import model_id

THERE = [
    "README.md",
    "mmproj-Q8_0.gguf",
    "tiny.imatrix.gguf",
    "tiny-Q4_K_M.gguf",
    "tiny-UD-Q4_K_XL.gguf",
    "tiny-Q4_K_XL.gguf",
    "tiny.q8_0.gguf",
    "BF16/tiny-BF16-00002-of-00002.gguf",
    "BF16/tiny-BF16-00001-of-00002.gguf",
]


@pytest.mark.parametrize(
    ("kind", "files"),
    [
        ("Q4_K_M", ["tiny-Q4_K_M.gguf"]),
        ("q4_k_m", ["tiny-Q4_K_M.gguf"]),
        ("Q4_K", []),
        ("Q4_K_XL", ["tiny-Q4_K_XL.gguf"]),
        ("UD-Q4_K_XL", ["tiny-UD-Q4_K_XL.gguf"]),
        ("Q8_0", ["tiny.q8_0.gguf"]),
        ("bf16", ["BF16/tiny-BF16-00001-of-00002.gguf", "BF16/tiny-BF16-00002-of-00002.gguf"]),
        ("imatrix", []),
    ],
)
def test_a_type_finds_its_model(kind: str, files: list[str]) -> None:
    assert files_of(THERE, kind) == files


def test_other_names_are_none_of_the_hubs_gguf_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "owner").mkdir()
    (tmp_path / "owner" / "model:Q4_K_M").touch()
    monkeypatch.chdir(tmp_path)
    assert [fetched_gguf(name) for name in ("demo", "owner/model", "owner/model:Q4_K_M", "C:/models/x.gguf")] == [
        None
    ] * 4
    assert model_id("owner/other:Q4_K_M") == "owner/other:Q4_K_M"


def _ran(model: str, where: Mapping[str, str], store: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "keepwarm.cli", "run", "--raw", "hi", "-n", "2", "--json", "--model", model]
    return subprocess.run(
        [*command, "--store", str(store)], env=where, capture_output=True, text=True, check=False, timeout=240
    )


@pytest.mark.slow
def test_a_type_is_downloaded_once_and_its_parts_alone(tmp_path: Path) -> None:
    there = tmp_path / "there"
    there.mkdir()
    write(there / "tiny-Q4_K_M", each=20)
    write(there / "tiny-Q8_0.gguf")
    parts = [each.name for each in sorted(there.glob("*Q4_K_M*"))]
    assert len(parts) > 1
    with hub("somebody/tiny-GGUF", there, tmp_path / "home") as (where, sent):
        done = _ran("somebody/tiny-GGUF:q4_k_m", where, tmp_path / "store")
        assert done.returncode == 0, done.stderr
        assert sorted(sent) == parts
        other = _ran("somebody/tiny-GGUF:Q5_K_M", where, tmp_path / "store")
        assert other.returncode == 3
        assert "has no GGUF file with Q5_K_M in its name; it has Q4_K_M, Q8_0" in " ".join(other.stderr.split())
        whole = _ran("somebody/tiny-GGUF", where, tmp_path / "store")
        assert whole.returncode == 3
        assert "It has GGUF files (Q4_K_M, Q8_0): name one as somebody/tiny-GGUF:Q4_K_M" in " ".join(
            whole.stderr.split()
        )
        unknown = _ran("nobody/tiny-GGUF:Q4_K_M", where, tmp_path / "store")
        assert unknown.returncode == 3
        assert "cannot load 'nobody/tiny-GGUF:Q4_K_M'" in " ".join(unknown.stderr.split())
        assert sorted(sent) == parts
    again = _ran("somebody/tiny-GGUF:Q4_K_M", where, tmp_path / "store")  # the hub is away
    assert again.returncode == 0, again.stderr
    assert json.loads(again.stdout)["token_ids"] == json.loads(done.stdout)["token_ids"]
    asked = [sys.executable, "-m", "keepwarm.cli", "doctor", "--model"]
    for name, told in (("Q4_K_M", "is there and runs"), ("Q8_0", "was not downloaded yet")):
        found = subprocess.run(
            [*asked, f"somebody/tiny-GGUF:{name}"], env=where, capture_output=True, text=True, check=False, timeout=240
        )
        assert told in " ".join(found.stdout.split()), found.stdout
