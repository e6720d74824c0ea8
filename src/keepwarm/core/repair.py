"""How much relocated KV is recomputed, and by which rule: a strategy's name with its budget."""

from __future__ import annotations

from dataclasses import dataclass

from keepwarm.errors import ConfigError

_TOKENS = {"seam": 16, "leading": 32}  # strategies whose budget is tokens per border or chunk, and their defaults
_SHARES = {"deviation": 0.15, "attention": 0.15, "impact": 0.13}  # whose budget is the share of all relocated tokens


@dataclass(frozen=True)
class RepairRule:
    """A strategy and its budget.

    * `none`: relocated KV stays as it is.
    * `seam:R`: the last R tokens before each chunk's beginning, and the first R after it.
    * `leading:k`: the first k tokens of each chunk (EPIC, arXiv 2410.15332).
    * `deviation:r`: the share r whose values deviate most from those of the whole prompt in an early layer (CacheBlend,
      arXiv 2405.16444).
    * `attention:r`: the share r to which the prompt's own, computed tokens attend most.
    * `impact:r`: the share r to which the prompt's last rows attend most (a token or its neighbours), in the middle and
      the last third of the layers alike.
    """

    strategy: str
    budget: float = 0.0

    @classmethod
    def parse(cls, text: str) -> RepairRule:
        """Parse "none", "seam:16", "leading:32", "deviation:0.15", "attention:0.15", "impact:0.13", or a bare name with
        its default.

        Raises ConfigError.
        """
        name, colon, number = text.partition(":") if isinstance(text, str) else ("", "", "")
        known = {"none": 0.0, **_TOKENS, **_SHARES}
        try:
            if name not in known or (name == "none" and colon):
                raise ValueError
            budget = float(number) if colon else known[name]
            whole = name in _TOKENS
            if not (0 <= budget < float("inf")) or (whole and budget != int(budget)) or (not whole and budget > 1):
                raise ValueError
        except ValueError:
            raise ConfigError(
                f"repair must be none, seam:TOKENS, leading:TOKENS, deviation:SHARE, attention:SHARE or impact:SHARE "
                f"(a share lies between 0 and 1), got {text!r}"
            ) from None
        return cls(name, budget)

    @property
    def is_none(self) -> bool:
        """Whether nothing is recomputed."""
        return self.strategy == "none" or self.budget == 0

    def __str__(self) -> str:
        return self.strategy if self.strategy == "none" else f"{self.strategy}:{self.budget:g}"
