"""GGUF files in a hub's repository, by their type."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from tests.helpers.gguf_files import write
from tests.helpers.hub import Hub, hub

from keepwarm.errors import ModelNotFound
from keepwarm.models.hub_gguf import downloaded_gguf, files_of, names_hub_gguf, types_of
from keepwarm.models.places import model_id

THERE = [
    "README.md",
    "mmproj-Q8_0.gguf",
    "tiny.imatrix.gguf",
    "tiny-Q4_K_M.gguf",
    "tiny-UD-Q4_K_XL.gguf",
    "tiny-Q4_K_XL.gguf",
    "tiny.q8_0.gguf",
    "tiny-fp16.gguf",
    "tiny-mxfp4.gguf",
    "BF16/tiny-BF16-00002-of-00002.gguf",
    "BF16/tiny-BF16-00001-of-00002.gguf",
    "Q2_K/tiny-00001-of-00002.gguf",
    "Q6_K/small.gguf",
    "Q6_K/large.gguf",
    "tiny-Q5_0.gguf",
    "tiny-Q5_0-00001-of-00002.gguf",
]


@pytest.mark.parametrize(
    ("kind", "files"),
    [
        ("Q4_K_M", ["tiny-Q4_K_M.gguf"]),
        ("q4_k_m", ["tiny-Q4_K_M.gguf"]),
        ("Q4_K", []),
        ("M", []),
        ("Q4_K_XL", ["tiny-Q4_K_XL.gguf"]),
        ("UD-Q4_K_XL", ["tiny-UD-Q4_K_XL.gguf"]),
        ("Q8_0", ["tiny.q8_0.gguf"]),
        ("F16", ["tiny-fp16.gguf"]),
        ("mxfp4", ["tiny-mxfp4.gguf"]),
        ("bf16", ["BF16/tiny-BF16-00001-of-00002.gguf", "BF16/tiny-BF16-00002-of-00002.gguf"]),
        ("Q2_K", ["Q2_K/tiny-00001-of-00002.gguf", "Q2_K/tiny-00002-of-00002.gguf"]),  # the second one is not there
        ("small", ["Q6_K/small.gguf"]),
        ("Q5_0", ["tiny-Q5_0.gguf"]),
        ("imatrix", []),
    ],
)
def test_a_type_finds_its_model(kind: str, files: list[str]) -> None:
    assert files_of(THERE, kind) == files


def test_two_models_of_one_type_are_named() -> None:
    with pytest.raises(ModelNotFound, match=r"of type Q6_K\. Name the file instead of it: large, small"):
        files_of(THERE, "Q6_K")
    types = "BF16 FP16 MXFP4 Q2_K Q4_K_M Q4_K_XL Q5_0 Q6_K Q8_0 UD-Q4_K_XL"
    assert types_of(THERE) == types.split()


def test_other_names_are_none_of_the_hubs_gguf_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "owner").mkdir()
    (tmp_path / "owner" / "model:Q4_K_M").touch()
    monkeypatch.chdir(tmp_path)
    for name in ("demo", "owner/model", "owner/model:Q4_K_M", "C:/models/x.gguf", "./model:v2"):
        assert not names_hub_gguf(name)
        assert downloaded_gguf(name) is None
    assert model_id("owner/other:Q4_K_M") == "owner/other:Q4_K_M"


FETCH = """
import sys
from keepwarm.errors import KeepwarmError
from keepwarm.models.hub_gguf import fetched_gguf
for name in sys.argv[1:]:
    try:
        print(fetched_gguf(name))
    except KeepwarmError as error:
        print(type(error).__name__, error)
"""


def _fetched(there: Hub, *names: str) -> list[str]:
    command = [sys.executable, "-c", FETCH, *names]
    done = subprocess.run(command, env=there.environment, capture_output=True, text=True, check=True, timeout=240)
    return done.stdout.splitlines()


def _spoken(text: str) -> str:
    return " ".join(text.split())


@pytest.mark.slow
def test_what_the_hub_does_not_tell_is_taken_from_an_earlier_download(tmp_path: Path) -> None:
    folder = tmp_path / "there"
    folder.mkdir()
    for name in ("tiny-Q4_K_M.gguf", "tiny-Q8_0.gguf", "other-00001-of-00002.gguf"):
        (folder / name).write_bytes(name.encode() * 100)
    four, eight = "somebody/tiny-GGUF:Q4_K_M", "somebody/tiny-GGUF:Q8_0"
    with hub("somebody/tiny-GGUF", folder, tmp_path / "home") as there:
        there.broken = True
        assert "DownloadError somebody/tiny-GGUF (Q4_K_M) was not downloaded" in _fetched(there, four)[0]
        there.broken = False
        first = Path(_fetched(there, four)[0])
        assert first.read_bytes() == (folder / first.name).read_bytes()
        there.commit = "1" * 40  # of a new revision one type alone is downloaded
        second = Path(_fetched(there, eight)[0])
        assert second.parent != first.parent
        assert there.sent.count("tiny-Q8_0.gguf") == 1
        there.refuses = True
        assert _fetched(there, four, eight) == [str(first), str(second)]
        assert "ask its owner. Expected a repository" in _fetched(there, "somebody/tiny-GGUF:Q2_K")[0]
        there.refuses = False
        assert "lacks a part of the model: other-00002-of-00002.gguf" in _fetched(there, "somebody/tiny-GGUF:other")[0]
        assert "cannot load 'nobody/x:Q4_K_M'" in _fetched(there, "nobody/x:Q4_K_M")[0]
        assert "of type Q5_K_M; it has Q4_K_M, Q8_0, other" in _fetched(there, "somebody/tiny-GGUF:Q5_K_M")[0]
    assert _fetched(there, four, eight) == [str(first), str(second)]  # the hub is away
    assert "not in the local cache" in _fetched(there, "somebody/tiny-GGUF:Q2_K")[0]


@pytest.mark.slow
def test_commands_take_a_type(tmp_path: Path) -> None:
    folder = tmp_path / "there"
    folder.mkdir()
    write(folder / "tiny-Q4_K_M", each=20)
    (folder / "config.json").write_text("{}")
    run = ["run", "--raw", "hi", "-n", "2", "--json", "--store", str(tmp_path / "store"), "--model"]
    with hub("somebody/tiny-GGUF", folder, tmp_path / "home") as there:

        def asked(*command: str) -> subprocess.CompletedProcess[str]:
            line = [sys.executable, "-m", "keepwarm.cli", *command]
            return subprocess.run(line, env=there.environment, capture_output=True, text=True, check=False, timeout=240)

        assert "was not downloaded yet" in _spoken(asked("doctor", "--model", "somebody/tiny-GGUF:Q4_K_M").stdout)
        assert asked(*run, "somebody/tiny-GGUF:Q4_K_M", "--dtype", "float16").returncode == 2
        assert there.sent == []
        done = asked(*run, "somebody/tiny-GGUF:q4_k_m")
        assert done.returncode == 0, done.stderr
        assert len(json.loads(done.stdout)["token_ids"]) == 2
        assert sorted(there.sent) == sorted(each.name for each in folder.glob("*.gguf"))
        bare = asked(*run, "somebody/tiny-GGUF")
        assert bare.returncode == 3
        assert "It has GGUF files (Q4_K_M): name one as somebody/tiny-GGUF:Q4_K_M" in _spoken(bare.stderr)
    assert "is there and runs" in _spoken(asked("doctor", "--model", "somebody/tiny-GGUF:Q4_K_M").stdout)
