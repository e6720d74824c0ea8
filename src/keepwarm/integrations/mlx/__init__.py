"""Keepwarm's store under mlx-lm: a prompt cache for its server and for programs, without changes to the library.

    python -m keepwarm.integrations.mlx.server --store ~/.cache/keepwarm/mlx --model MODEL

No module here imports torch, and none needs it to be installed. `cache.py` is the interface for the library. `form.py`
knows what mlx-lm's caches hold, `memory.py` shows them to the store, and `identity.py` names what their KV depends on.
"""

from keepwarm.integrations.mlx.cache import KeepwarmPromptCache
from keepwarm.integrations.mlx.identity import Loaded

__all__ = ["KeepwarmPromptCache", "Loaded"]
