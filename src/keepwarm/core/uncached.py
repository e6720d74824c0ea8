"""Why a model, or a request, runs without the cache: every reason that can be given.

`tools/manual/cures.toml` has a line for each. Only `Uncached.told` makes a `Why`, so no other text becomes a reason.
"""

from __future__ import annotations

from enum import StrEnum
from typing import NewType

Why = NewType("Why", str)
CACHED = Why("")  # no reason: it runs with the cache


class Uncached(StrEnum):
    """The reasons, as they are told. What stands in braces is filled in."""

    # of a model
    TRAINING = "the model is in training mode, where dropout makes KV random: call model.eval()"
    NOT_CONTINUED = "{model} does not go on from what was kept of it: {seen}"
    IN_MODULES = "{model} does not go on from what was kept of it: {seen} (part of its state lies in its modules)"
    SEVERAL_DTYPES = "its layers keep KV of several dtypes ({dtypes})"

    # of a request
    REUSE_OFF = "reuse is off"
    LONG = (
        "the model's rotary embedding changes for all tokens beyond {window} tokens, and this sequence may reach "
        "{length}: its KV depends on the length"
    )

    # of a call of an attached model's generate
    CHANGED = "the model was changed, and the engine's decoder does not run it any more"
    POSITIONAL = "positional arguments after generation_config are not read; pass them by name"
    NO_IDS = "there are no input_ids"
    UNKNOWN = "{names} given, which may shape the prompt's KV"
    SEVERAL = "only one sequence at a time is cached, without beams"
    PADDED = "the attention mask hides tokens (padding)"
    PAD_TOKENS = "without an attention mask, transformers takes the pad tokens in the prompt for padding"
    FOREIGN = "{names} given, with which transformers runs another model, or a cache of its own"
    HEALED = "token_healing changes the prompt after it is looked up"
    NO_CACHE = "use_cache is off"
    HANDED_OUT = "return_dict_in_generate would hand out the cache's own memory"
    OWN_CACHE = "the model has a cache of its own, which generate makes itself"
    OTHER_ARGUMENT = "generate gives the model its cache under a name that the model does not take: use Engine"
    STATE_ALONE = "the model keeps a state alone, and generate cannot tell how much of a prompt that holds: use Engine"
    SERIAL = "the model goes on from its state token by token, and generate gives it several: use Engine"
    ATTENTIONS = "kernels='own' keep neither attentions nor hidden states"
    AUTOCAST = "autocast is on, which computes in another precision"

    def told(self, **values: object) -> Why:
        """Return the reason with its values filled in."""
        return Why(self.value.format(**values))
