"""The connector's half in vLLM's own scheduler, as for pages on a device, without a model."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("vllm")

from tests.helpers.vllm_process import ids
from vllm import SamplingParams
from vllm.config import KVEventsConfig, KVTransferConfig
from vllm.distributed.kv_events import EventBatch, EventPublisher
from vllm.engine.arg_utils import EngineArgs
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager

from keepwarm.core.blocks import chain, token_ids
from keepwarm.integrations.vllm.variants import variant_of
from keepwarm.testing.kv import UNEVEN, MemoryKV

PAGE = 32


@pytest.fixture(scope="module")
def config(saved: Callable[..., Path]) -> Any:
    folder = saved("llama", hidden_size=128, head_dim=32, max_position_embeddings=4096)
    return EngineArgs(
        model=str(folder), dtype="float32", enforce_eager=True, max_model_len=256, block_size=PAGE, max_num_seqs=4
    ).create_engine_config()


@pytest.fixture
def scheduler(config: Any, tmp_path: Path) -> Any:
    """vLLM's scheduler with 8 pages, one of which it never uses."""
    config.kv_transfer_config = KVTransferConfig(
        kv_connector="KeepwarmConnector",
        kv_connector_module_path="keepwarm.integrations.vllm.connector",
        kv_role="kv_both",
        kv_load_failure_policy="recompute",
        kv_connector_extra_config={"store": str(tmp_path / "store"), "max_ram": 0},
    )
    config.kv_events_config = KVEventsConfig(enable_kv_cache_events=True, publisher="null")
    config.cache_config.num_gpu_blocks = 8
    spec = FullAttentionSpec(block_size=PAGE, num_kv_heads=2, head_size=32, dtype=torch.float32)
    pages = KVCacheConfig(num_blocks=8, kv_cache_tensors=[], kv_cache_groups=[KVCacheGroupSpec(["layer"], spec)])
    init_none_hash(sha256)
    made = Scheduler(config, pages, StructuredOutputManager(config), block_size=PAGE)
    made.connector._at_scheduler._on_device = True
    yield made
    made.connector.shutdown()


def request(name: str, count: int, seed: int, tokens: int) -> Request:
    sampling = SamplingParams(max_tokens=tokens, ignore_eos=True)
    sampling.update_from_generation_config({}, 1)
    hasher = get_request_block_hasher(PAGE, sha256)
    return Request(name, ids(count, seed), sampling, None, block_hasher=hasher)


def step(scheduler: Any, sent: set[str] | None = None, **told: set[Any]) -> Any:
    """One step whose model says 7 for everybody."""
    planned = scheduler.schedule()
    names = list(planned.num_scheduled_tokens)
    done = [name for name in names if not scheduler.requests[name].is_prefill_chunk]
    output = ModelRunnerOutput(
        req_ids=names,
        req_id_to_index={name: at for at, name in enumerate(names)},
        sampled_token_ids=[[7] if name in done else [] for name in names],
        kv_connector_output=KVConnectorOutput(finished_sending=sent, **told),
    )
    scheduler.update_from_output(planned, output)
    return planned


def test_pages_that_are_being_copied_are_waited_for(scheduler: Any) -> None:
    """Nobody is preempted for want of a page while those of a request that ended are given back soon."""
    one, two = request("one", 3 * PAGE - 1, 1, 1), request("two", 2 * PAGE - 1, 2, 40)
    three = request("three", 40, 3, 40)
    for each in (one, two, three):
        scheduler.add_request(each)
    step(scheduler)
    assert one.is_finished()
    for _ in range(3):
        step(scheduler)
    assert (two.num_preemptions, three.num_preemptions) == (0, 0)
    assert "one" in scheduler.requests
    step(scheduler, {"one"})
    before = two.num_computed_tokens
    step(scheduler)
    assert two.num_computed_tokens == before + 1


def store(scheduler: Any, asked: Request, end: int | None = None) -> None:
    """Put the KV of a prompt's whole pages into the store, or of those up to `end`."""
    half = scheduler.connector._scheduler
    (space,), tokens = half._namespaces, token_ids(asked.prompt_token_ids[:end])
    blocks = chain(tokens, range(PAGE, len(tokens) + 1, PAGE), space)
    half._archive.put(MemoryKV.random(UNEVEN, len(tokens), 0), blocks, space)
    half._archive.flush()


@pytest.mark.parametrize("fails", [False, True])
def test_pages_of_an_aborted_load_stay_until_it_ended(scheduler: Any, fails: bool) -> None:
    one = request("one", 3 * PAGE - 1, 1, 1)
    free = scheduler.kv_cache_manager.block_pool.get_num_free_blocks
    store(scheduler, one)
    scheduler.add_request(one)
    (load,) = step(scheduler).kv_connector_metadata.loads
    assert load.apart
    scheduler.finish_requests("one", RequestStatus.FINISHED_ABORTED)
    step(scheduler)
    assert free() == 5
    assert scheduler.has_requests()
    step(scheduler, finished_recving={"one"}, invalid_block_ids=set(load.prefix.pages) if fails else set())
    assert free() == 7
    step(scheduler)
    assert not scheduler.has_requests()


def test_a_request_whose_load_failed_is_computed_and_saved(scheduler: Any) -> None:
    one = request("one", 3 * PAGE - 1, 1, 1)
    store(scheduler, one)
    scheduler.add_request(one)
    (load,) = step(scheduler).kv_connector_metadata.loads
    step(scheduler, finished_recving={"one"}, invalid_block_ids=set(load.prefix.pages))
    planned = step(scheduler)
    assert not planned.kv_connector_metadata.loads
    assert planned.num_scheduled_tokens == {"one": 3 * PAGE - 1}
    assert one.is_finished()


def test_a_preempted_request_that_is_aborted_gives_nothing_back_twice(scheduler: Any) -> None:
    one = request("one", 3 * PAGE - 1, 1, 40)
    free = scheduler.kv_cache_manager.block_pool.get_num_free_blocks
    scheduler.add_request(one)
    assert step(scheduler).kv_connector_metadata.saves
    scheduler.reset_prefix_cache(reset_running_requests=True)
    assert free() == 7
    scheduler.finish_requests("one", RequestStatus.FINISHED_ABORTED)
    planned = step(scheduler).kv_connector_metadata
    assert planned.preempted == {"one"}
    step(scheduler, {save.prefix.request_id for save in planned.saves if save.last})
    step(scheduler)
    assert not scheduler.has_requests()
    assert free() == 7


def test_a_preempted_prompt_is_saved_from_the_pages_it_has_then(
    scheduler: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("keepwarm.integrations.vllm.scheduler.CHUNK", PAGE)
    scheduler.max_num_scheduled_tokens = 2 * PAGE
    one = request("one", 5 * PAGE - 1, 1, 1)
    scheduler.add_request(one)
    (first,) = step(scheduler).kv_connector_metadata.saves
    assert (first.start, len(first.prefix.tokens)) == (0, 2 * PAGE)
    assert scheduler.reset_prefix_cache(reset_running_requests=True)
    taken = scheduler.kv_cache_manager.block_pool.get_new_blocks(2)  # so that it gets others
    saves = []
    while not one.is_finished():
        planned = step(scheduler)
        assert planned.kv_connector_metadata.preempted == (set() if saves else {"one"})
        saves += planned.kv_connector_metadata.saves
    assert [(save.start, len(save.prefix.tokens)) for save in saves] == [(0, 2 * PAGE), (2 * PAGE, 4 * PAGE)]
    assert not {block.block_id for block in taken} & set(saves[-1].prefix.pages)
    assert saves[-1].prefix.pages[:2] == saves[0].prefix.pages
    assert len(set(saves[-1].prefix.pages)) == 4


class Published(EventPublisher):  # type: ignore[misc]  # vLLM has no types
    """What vLLM publishes, of what is stored."""

    def __init__(self) -> None:
        self.events: list[Any] = []

    def publish(self, events: EventBatch) -> None:
        self.events += [event for event in events.events if event.medium == "STORAGE"]

    def shutdown(self) -> None:
        pass


def published(scheduler: Any, *, count: int = 1) -> list[Any]:
    """What is published by steps, until there is something or enough time for it went by."""
    looked = time.monotonic() + (20 if count else 0.5)
    while len(scheduler.kv_event_publisher.events) < count or not count:
        step(scheduler)
        if time.monotonic() > looked:
            break
        time.sleep(0.01)
    return list(scheduler.kv_event_publisher.events)


def test_what_is_not_stored_yet_is_not_published(scheduler: Any) -> None:
    scheduler.kv_event_publisher = Published()
    one = request("one", 3 * PAGE - 1, 1, 60)
    scheduler.add_request(one)
    (save,) = step(scheduler).kv_connector_metadata.saves
    assert len(save.prefix.tokens) == 2 * PAGE
    assert published(scheduler, count=0) == []
    store(scheduler, one)
    (event,) = published(scheduler)
    assert event.token_ids == one.prompt_token_ids[: 2 * PAGE]
    assert len(event.block_hashes) == 2


def test_what_is_stored_in_part_is_published_in_part(scheduler: Any) -> None:
    """The store may drop or refuse the rest; it is waited for, but not for ever."""
    scheduler.kv_event_publisher = Published()
    one, two = request("one", 3 * PAGE - 1, 1, 60), request("two", 2 * PAGE - 1, 2, 60)
    scheduler.add_request(one)
    scheduler.add_request(two)
    assert len(step(scheduler).kv_connector_metadata.saves) == 2
    store(scheduler, one, PAGE)
    waiting = scheduler.connector._scheduler._events
    waiting.rename()  # a look from before does not count
    for held in waiting._held:
        held.until = 0.0
    (event,) = published(scheduler)
    assert event.token_ids == one.prompt_token_ids[:PAGE]
    assert (len(event.block_hashes), len(event.extra_keys or [None])) == (1, 1)
    assert not any(held.first == 0 for held in waiting._held)


def test_what_one_rank_lacks_is_not_published(scheduler: Any) -> None:
    scheduler.kv_event_publisher = Published()
    half = scheduler.connector._at_scheduler
    one, mine = request("one", 3 * PAGE - 1, 1, 60), half._namespaces
    half.rename([*mine, variant_of(mine[0], "another rank's")])
    scheduler.add_request(one)
    step(scheduler)
    both = half._namespaces
    half.rename(mine)
    store(scheduler, one)
    half.rename(both)
    assert published(scheduler, count=0) == []
    half.rename(both[1:])
    store(scheduler, one)
    half.rename(both)
    assert len(published(scheduler)) == 1


def test_what_is_too_short_to_be_stored_is_not_waited_for(scheduler: Any) -> None:
    half = scheduler.connector._at_scheduler
    half._min_tokens = 3 * PAGE
    scheduler.add_request(request("one", 3 * PAGE - 1, 1, 60))
    assert step(scheduler).kv_connector_metadata.saves
    assert half._events._held == []
