"""Chat templates in a checkpoint's files, and what split files are called."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from keepwarm.errors import ModelNotFound
from keepwarm.models.chat_files import has_template, template_in
from keepwarm.models.places import gguf_file, gguf_parts, model_folder, model_id


@pytest.mark.parametrize("name", ["tokenizer_config.json", "chat_template.json", "processor_config.json"])
def test_a_template_may_be_in_any_of_its_files(tmp_path: Path, name: str) -> None:
    assert not has_template(tmp_path)
    file = tmp_path / name
    for told, expected in (({}, False), ({"chat_template": "a"}, True), ({"chat_template": None}, False), ([], False)):
        file.write_text(json.dumps(told))
        assert has_template(tmp_path) is expected
    file.write_text(json.dumps({"chat_template": [{"name": "default", "template": "a"}]}))
    assert template_in(file) == {"default": "a"}


def test_a_template_by_itself_counts(tmp_path: Path) -> None:
    (tmp_path / "chat_template.jinja").write_text("a")
    assert has_template(tmp_path)


@pytest.mark.parametrize("told", ['{"chat_template": 3}', "<html>", ""])
def test_what_is_no_template_is_said(tmp_path: Path, told: str) -> None:
    (tmp_path / "chat_template.json").write_text(told)
    with pytest.raises(ValueError, match=r"chat_template\.json"):
        has_template(tmp_path)


def test_a_split_model_has_the_name_of_the_whole() -> None:
    assert model_id("models/gem-00002-of-00003.gguf") == "models/gem-00002-of-00003.gguf"  # as of a hub: not here
    assert model_id("gem-00002-of-00003.gguf") == "gem.gguf"
    assert model_id("gem.gguf") == "gem.gguf"


def test_only_numbers_within_their_count_are_parts() -> None:
    assert [path.name for path in gguf_parts(Path("a-00002-of-00002.gguf"))] == [
        "a-00001-of-00002.gguf",
        "a-00002-of-00002.gguf",
    ]
    for name in ("a.gguf", "a-00003-of-00002.gguf", "a-00000-of-00002.gguf", "a-00001-of-00000.gguf", "a-1-of-2.gguf"):
        assert gguf_parts(Path(name)) == [Path(name)]


def test_what_lies_beside_a_missing_file_is_said(tmp_path: Path) -> None:
    part = tmp_path / "a-00002-of-00003.gguf"
    part.write_bytes(b"")
    for name in ("a.gguf", "a-00001-of-00003.gguf"):
        with pytest.raises(ModelNotFound, match="of its parts, .*a-00002-of-00003"):
            gguf_file(tmp_path / name)
    with pytest.raises(ModelNotFound, match=r"one of its GGUF files \(.*a-00002"):
        model_folder(tmp_path)
