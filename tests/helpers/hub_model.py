"""A model whose code comes with it, as on a hub: an attention layer, and one that averages what came before it in a
state of transformers' cache. The folder's code knows nothing of this project."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

CONFIGURATION = """
from transformers import PreTrainedConfig


class AveragingConfig(PreTrainedConfig):
    model_type = "averaging"

    def __init__(self, vocab_size=128, hidden_size=32, num_hidden_layers=2, layer_types=None, **more):
        self.vocab_size = vocab_size
        self.hidden_size = hidden_size
        self.num_hidden_layers = num_hidden_layers
        self.num_attention_heads = 2
        self.max_position_embeddings = 512
        self.layer_types = layer_types or ["linear_attention", "full_attention"]
        super().__init__(**more)
"""

MODEL = '''
import torch
from torch import nn
from transformers import DynamicCache, GenerationMixin, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutputWithPast

from .configuration_averaging import AveragingConfig


class Averaging(nn.Module):
    """h becomes 0.9 h + 0.1 x, one token after another; the last h is the state."""

    def __init__(self, config, number):
        super().__init__()
        self.number = number
        self.project = nn.Linear(config.hidden_size, config.hidden_size)

    def forward(self, hidden, cache):
        rows = self.project(hidden)
        layer = cache.layers[self.number]
        state = layer.recurrent_states[0] if layer.is_recurrent_states_initialized[0] else torch.zeros_like(rows[:, 0])
        if READ_STATE is False:
            state = torch.zeros_like(state)
        found = []
        for at in range(rows.shape[1]):
            state = 0.9 * state + 0.1 * rows[:, at]
            found.append(state)
        cache.update_recurrent_state(state, self.number)
        return torch.stack(found, dim=1)


class Attention(nn.Module):
    def __init__(self, config, number):
        super().__init__()
        self.number, self.heads = number, config.num_attention_heads
        self.width = config.hidden_size // self.heads
        self.qkv = nn.Linear(config.hidden_size, 3 * config.hidden_size)

    def forward(self, hidden, cache):
        batch, length, size = hidden.shape
        parts = self.qkv(hidden).view(batch, length, 3, self.heads, self.width).permute(2, 0, 3, 1, 4)
        keys, values = cache.update(parts[1], parts[2], self.number)
        before = keys.shape[2] - length
        mask = torch.ones(length, keys.shape[2], dtype=torch.bool, device=hidden.device).tril(before)
        found = nn.functional.scaled_dot_product_attention(parts[0], keys, values, attn_mask=mask)
        return found.transpose(1, 2).reshape(batch, length, size)


class AveragingForCausalLM(PreTrainedModel, GenerationMixin):
    config_class = AveragingConfig

    def __init__(self, config):
        super().__init__(config)
        kinds = {"linear_attention": Averaging, "full_attention": Attention}
        self.embed = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList([kinds[kind](config, number) for number, kind in enumerate(config.layer_types)])
        self.head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    def get_input_embeddings(self):
        return self.embed

    def get_output_embeddings(self):
        return self.head

    def forward(self, input_ids, NAMED=None, use_cache=None, **more):
        cache = DynamicCache(config=self.config) if NAMED is None else NAMED
        hidden = self.embed(input_ids)
        for layer in self.layers:
            hidden = hidden + layer(hidden, cache)
        return CausalLMOutputWithPast(None, self.head(hidden), cache)
'''


def write(folder: Path, tokenizer: Any, *, reads_its_state: bool, named: str = "past_key_values") -> Path:
    """Its code, random weights and a tokenizer. One that does not read its state starts anew at each step. `named` is
    what `forward` calls the cache."""
    from safetensors.torch import save_file

    folder.mkdir(parents=True, exist_ok=True)
    (folder / "configuration_averaging.py").write_text(CONFIGURATION)
    (folder / "modeling_averaging.py").write_text(
        MODEL.replace("NAMED", named) + f"\n\nREAD_STATE = {reads_its_state}\n"
    )
    names = {"AutoConfig": "configuration_averaging.AveragingConfig"}
    names["AutoModelForCausalLM"] = "modeling_averaging.AveragingForCausalLM"
    config = {"architectures": ["AveragingForCausalLM"], "model_type": "averaging", "auto_map": names}
    config |= {"hidden_size": 32, "num_hidden_layers": 2, "vocab_size": 128, "torch_dtype": "float32"}
    config |= {"layer_types": ["linear_attention", "full_attention"]}
    (folder / "config.json").write_text(json.dumps(config))
    tokenizer.save_pretrained(folder)
    torch.manual_seed(0)
    shapes = {"embed.weight": (128, 32), "head.weight": (128, 32)}
    shapes |= {"layers.0.project.weight": (32, 32), "layers.0.project.bias": (32,)}
    shapes |= {"layers.1.qkv.weight": (96, 32), "layers.1.qkv.bias": (96,)}
    save_file({name: torch.randn(shape) * 0.3 for name, shape in shapes.items()}, folder / "model.safetensors")
    return folder
