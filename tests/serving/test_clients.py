"""A small share of `tests/stress/clients.py`: many clients, random cancels and disconnects, nothing left behind."""

from __future__ import annotations

import asyncio

import pytest
from tests.helpers.services import Keyed
from tests.stress.clients import hammer


@pytest.mark.slow
def test_many_clients_get_their_own_answers_and_leave_nothing(keyed: Keyed) -> None:
    headers = {"x-api-key": keyed.admin}
    outcome = asyncio.run(hammer(keyed.url, keyed.process.pid, model="tiny", clients=24, seconds=4, headers=headers))
    assert not outcome.wrong
    assert outcome.answered > 20
    assert outcome.broken_off > 5
    assert not outcome.refused
    assert outcome.left == {"requests": 0, "running": 0, "pages": 0, "tasks": 0}
