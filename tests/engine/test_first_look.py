"""What an engine refuses before it loads a model, and in what a message says."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import transformers
from tests.helpers.models import tiny

from keepwarm import Engine
from keepwarm.errors import ConfigError, PromptError, StoreNotWritable


@pytest.mark.parametrize(
    ("settings", "kind"),
    [
        ({"store": "{folder}/a-file"}, StoreNotWritable),
        ({"store": "{folder}/a-file/below"}, StoreNotWritable),
        ({"repair": "prayer"}, ConfigError),
        ({"chunk_size": 4, "chunk_least": 8}, ConfigError),
        ({"remote": "ftp://host"}, ConfigError),
        ({"dtype": "float12"}, ConfigError),
    ],
)
def test_wrong_settings_are_told_before_the_model_is_loaded(
    tmp_path: Path, settings: dict[str, Any], kind: type[Exception]
) -> None:
    (tmp_path / "a-file").write_text("")
    given = {name: str(value).format(folder=tmp_path) if name == "store" else value for name, value in settings.items()}
    with pytest.raises(kind):  # and not ModelNotFound
        Engine.from_pretrained("/no/such/model", **given)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a-file"]


def test_a_store_that_is_not_there_is_not_made_for_a_model_that_is_not_there_either(tmp_path: Path) -> None:
    with pytest.raises(Exception, match="/no/such/model"):
        Engine.from_pretrained("/no/such/model", store=tmp_path / "store")
    assert not (tmp_path / "store").exists()


def test_a_role_that_nobody_knows_is_refused(saved: Callable[..., Path]) -> None:
    with Engine.from_pretrained(saved("llama")) as engine:
        for call in (engine.generate, engine.warm, engine.explain):
            with pytest.raises(PromptError, match=r"messages\[1\]\.role must be one of system, .*got 'usr'"):
                call(messages=[{"role": "system", "content": "Brief."}, {"role": "usr", "content": "Hello"}])
        session = engine.sessions.open("s")
        with pytest.raises(PromptError, match="'usr'"):
            engine.generate(messages=[{"role": "usr", "content": "Hello"}], session="s")
        assert not session.show().messages


def test_a_role_of_the_models_own_template_is_taken(tokenizer: Any) -> None:
    own = transformers.AutoTokenizer.from_pretrained(tokenizer.name_or_path)
    own.chat_template = (
        "{% for m in messages %}{% if m['role'] == 'observation' %}saw: {{ m['content'] }}\n"
        "{% else %}{{ m['role'] }}: {{ m['content'] }}\n{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}assistant: {% endif %}"
    )
    chat = [{"role": "user", "content": "Look."}, {"role": "observation", "content": "A ship."}]
    with Engine.from_pretrained((tiny("llama"), own)) as engine:
        assert engine.generate(messages=chat, max_new_tokens=2).token_ids
        with pytest.raises(PromptError, match="'sight'"):
            engine.generate(messages=[*chat, {"role": "sight", "content": "A ship."}], max_new_tokens=2)
