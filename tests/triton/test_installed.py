"""The other tests of this folder are only collected where the interpreter runs."""

from __future__ import annotations

import pytest
from tests.helpers.interpreter import WHY_NOT


@pytest.mark.skipif(WHY_NOT != "", reason=WHY_NOT)
def test_the_interpreter_is_used() -> None:
    from keepwarm.runtime.gpu_kernels.launch import INTERPRETED

    assert INTERPRETED
