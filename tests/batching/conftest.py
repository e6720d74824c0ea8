"""An engine for the tests of batches."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from tests.helpers.batches import STEP
from tests.helpers.models import tiny

from keepwarm import Engine


@pytest.fixture(scope="module")
def llama(tokenizer: Any) -> Iterator[Engine]:
    with Engine.from_pretrained((tiny("llama"), tokenizer), step=STEP, min_step=4, max_pages="2MiB") as engine:
        yield engine
