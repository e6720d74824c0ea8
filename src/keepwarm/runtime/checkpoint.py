"""Loads a checkpoint through transformers: with all the tensors that its model needs, and without other parts.

A checkpoint that reads pictures or sound, too, holds a language model. Prompts are texts here, so it is loaded alone:
the other parts would only take memory, and alone it is of a class that the kernels know.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.utils.hub import cached_file

from keepwarm.errors import UnsupportedModel
from keepwarm.models.chat_files import OF_PROCESSORS, template_in

log = logging.getLogger(__name__)

# What tensors of the language model are called in the checkpoint, and when it is alone.
_NAMES = {
    r"^(model\.)?(language_model|text_model)\.(model\.)?(?!lm_head)": "model.",
    r"^(model\.)?language_model\.lm_head": "lm_head",
}
_LAYERS, _AROUND = "model.layers.", ("model.embed_tokens.", "model.norm.", "model.embedding_norm.", "lm_head.")
# Language models without a class of their own, and those that compute the same for texts: a token of a text has one
# position, where one of a picture has three.
_SAME = {"qwen2_vl_text": "qwen2", "qwen2_5_vl_text": "qwen2", "qwen3_vl_text": "qwen3"}
_OF_PICTURES = ("mrope_section", "mrope_interleaved")
_ATTEND_AHEAD = ("paligemma",)  # tokens of a prompt attend to those behind them, so the language model alone differs
_OF_THE_WHOLE = ("eos_token_id", "_commit_hash")  # what its language model goes by
_SKIPPED = ("modules_to_not_convert", "llm_int8_skip_modules", "ignore")  # what formats call modules left in floats
_WRONG = re.compile("MISMATCH|CONVERSION")  # what a report of tensors says of those that do not fit
_SHOWN = 3  # tensors that an error names


def weights_on(
    device: torch.device,
    where: str,
    dtype: torch.dtype,
    settings: PreTrainedConfig | None = None,
    *,
    trust_remote_code: bool,
) -> PreTrainedModel:
    """Load a model from a folder or a hub. Its tensors move to the device one by one as they are read, so the host's
    memory never holds all of them. With the checkpoint's `settings`, the language model is loaded alone where there are
    other parts. Raises UnsupportedModel if tensors are missing, for which transformers takes random numbers."""
    text = None if settings is None else language_model(settings)
    alone: dict[str, Any] = {} if text is None else {"config": text, "key_mapping": _NAMES}
    loads: Any = AutoModelForCausalLM.from_pretrained  # transformers' types do not tell of what was loaded
    with _unreported():
        model, told = loads(
            where,
            dtype=dtype,
            trust_remote_code=trust_remote_code,
            device_map={"": device},
            output_loading_info=True,
            **alone,
        )
    kind = type(model).__name__
    if missing := sorted(told["missing_keys"]):
        raise UnsupportedModel(f"{where} lacks weights that {kind} needs: {_some(missing)}. Fetch it again")
    if text is not None:
        if beside := sorted(name for name in told["unexpected_keys"] if name.startswith(_LAYERS)):
            raise UnsupportedModel(f"{where} has weights that its language model, as {kind}, has not: {_some(beside)}")
        log.info("%s is loaded as %s alone: prompts are texts", where, kind)
    elif others := sorted(told["unexpected_keys"]):
        log.warning("%s has weights for which %s has no place: %s", where, kind, _some(others))
    found: PreTrainedModel = model
    return found


def tokenizer_on(where: str, *, trust_remote_code: bool) -> Any:
    """Load a tokenizer from a folder or a hub. A checkpoint that reads pictures or sound may keep its chat template
    with the processor of these; it is the tokenizer's then. Raises ValueError for a template that is none."""
    tokenizer = AutoTokenizer.from_pretrained(where, trust_remote_code=trust_remote_code)
    if tokenizer.chat_template is None:
        quiet = {"_raise_exceptions_for_missing_entries": False, "_raise_exceptions_for_connection_errors": False}
        files = (cached_file(where, name, **quiet) for name in OF_PROCESSORS)
        found = (template_in(Path(file)) for file in files if file)
        tokenizer.chat_template = next(filter(None, found), None)
    return tokenizer


def base_of(folder: Path) -> str:
    """Return the folder or name of the model that an adapter's folder belongs to. Raises ValueError if it says none."""
    told = json.loads((folder / "adapter_config.json").read_bytes())
    if not isinstance(told, dict) or not told.get("base_model_name_or_path"):
        raise ValueError("its adapter_config.json has no base_model_name_or_path")
    return str(told["base_model_name_or_path"])


def language_model(settings: PreTrainedConfig) -> PreTrainedConfig | None:
    """Return the configuration of the language model in a checkpoint of several parts. None if the checkpoint is one
    whole, if transformers takes the part by itself, or if it has no class that runs it alone. Raises UnsupportedModel
    for one whose prompts cannot be cached."""
    try:
        text = settings.get_text_config(decoder=True)
    except ValueError:  # it has several
        return None
    known: Any = AutoModelForCausalLM._model_mapping
    own = type(settings).__module__.startswith("transformers.models.") and not getattr(settings, "auto_map", None)
    if text is settings or not own:
        return None
    if settings.model_type in _ATTEND_AHEAD:
        raise UnsupportedModel(
            f"in prompts of {settings.model_type}, tokens attend to those behind them, so no beginning can be reused. "
            "Keepwarm runs models whose tokens attend to those before them (docs/models.md)"
        )
    if type(settings) in known and not known[type(settings)].__name__.endswith("ForConditionalGeneration"):
        return None
    if (same := _SAME.get(text.model_type)) is not None:
        rope = {name: value for name, value in text.rope_parameters.items() if name not in _OF_PICTURES}
        text = AutoConfig.for_model(**(text.to_dict() | {"model_type": same, "rope_parameters": rope}))
    if type(text) not in known:
        return None
    for name in _OF_THE_WHOLE:
        if (found := getattr(settings, name, None)) is not None:
            setattr(text, name, found)
    # Either may say it, also by its class's default. A head that differs from the embeddings is not tied to them.
    text.tie_word_embeddings = bool(text.tie_word_embeddings or getattr(settings, "tie_word_embeddings", False))
    if isinstance(how := getattr(settings, "quantization_config", None), dict):
        skipped = {name: [*map(_module_alone, how[name])] for name in _SKIPPED if isinstance(how.get(name), list)}
        text.quantization_config = how | skipped
    elif how is not None:
        text.quantization_config = how
    return text


def _module_alone(name: str) -> str:
    return name_alone(f"{name}.").removesuffix(".")


def loaded_class(folder: Path) -> tuple[str, bool]:
    """Return the class as which a folder's model is loaded, and whether it is only a part of what the folder holds: the
    language model. Raises ValueError or KeyError for a model that transformers does not know, or not as one."""
    config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
    text = language_model(config)
    mapping: Any = AutoModelForCausalLM._model_mapping
    return str(mapping[type(config if text is None else text)].__name__), text is not None


def generation_on(folder: Path) -> GenerationConfig:
    """Return a folder's settings for generation; where it has no file of them, those in its configuration, as
    transformers does."""
    try:
        return GenerationConfig.from_pretrained(folder)
    except OSError:
        return GenerationConfig.from_pretrained(folder, config_file_name="config.json", _from_model_config=True)


def name_alone(name: str) -> str:
    """Return what a tensor of a checkpoint of several parts is called when the language model is alone."""
    return next((re.sub(pattern, alone, name) for pattern, alone in _NAMES.items() if re.match(pattern, name)), name)


def is_of_text(name: str) -> bool:
    """Whether a tensor, by its name when it is alone, is one of the language model's."""
    return name.startswith((_LAYERS, *_AROUND))


def _some(names: list[str]) -> str:
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return f"{', '.join(names[:_SHOWN])}{more}"


def without_hints() -> AbstractContextManager[None]:
    """Keep transformers from recommending packages for recurrent layers: the compiled kernels need none, and some of
    these packages only exist for GPUs."""
    return _filtered(
        "transformers.integrations.hub_kernels", lambda text: "reference PyTorch implementation" not in text
    )


def _unreported() -> AbstractContextManager[None]:
    """Keep transformers from listing tensors that are missing or have no place: `weights_on` says so. What else is
    wrong is still reported."""
    return _filtered(
        "transformers.modeling_utils", lambda text: "LOAD REPORT" not in text or _WRONG.search(text) is not None
    )


@contextmanager
def _filtered(logger: str, wanted: Callable[[str], bool]) -> Iterator[None]:
    """Drop a logger's lines whose text is not wanted."""

    def passes(record: logging.LogRecord) -> bool:
        return wanted(record.getMessage())

    theirs = logging.getLogger(logger)
    theirs.addFilter(passes)
    try:
        yield
    finally:
        theirs.removeFilter(passes)
