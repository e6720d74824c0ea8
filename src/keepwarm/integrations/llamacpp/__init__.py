"""Keepwarm's store under llama-cpp-python: a cache for `Llama.set_cache`, without changes to the library.

    llm = Llama("model.gguf", n_ctx=8192)
    llm.set_cache(KeepwarmCache(llm, store="~/.cache/keepwarm"))

No module here imports torch, and none needs it to be installed. `cache.py` is the interface for the library. `form.py`
knows how llama.cpp writes a state, `memory.py` shows one to the store, and `context.py` reads and writes a context's.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from keepwarm.integrations.llamacpp.cache import KeepwarmCache

__all__ = ["KeepwarmCache"]


def __getattr__(name: str) -> Any:
    """Load the cache on first use: `keepwarm slots` uses other modules, and has no llama-cpp-python."""
    if name == "KeepwarmCache":
        from keepwarm.integrations.llamacpp.cache import KeepwarmCache

        return KeepwarmCache
    raise AttributeError(name)
