"""The plan of the Triton decoder's attention: each row attends to each part of its own pages exactly once."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from keepwarm.runtime.gpu_kernels.plan import PART, planned
from keepwarm.runtime.native.places import PAGE, Region, Sequenced, works

REGION = Region(0, 0, 0, (0, 0))
lengths = st.integers(0, 1400)


@st.composite
def batches(draw: st.DrawFn) -> tuple[list[int], list[int], list[list[int]]]:
    """Starts, ends and pages of some sequences, of which each begins like the one before."""
    tables: list[list[int]] = []
    starts, ends = [], []
    for number in range(draw(st.integers(1, 5))):
        start = draw(lengths)
        end = start + draw(st.integers(1, 40))
        pages = -(-end // PAGE)
        shared = min(draw(lengths) // PAGE, start // PAGE, len(tables[-1]) if tables else 0)
        before = tables[-1][:shared] if tables else []
        tables.append([*before, *range(1000 * (number + 1), 1000 * (number + 1) + pages - shared)])
        starts.append(start)
        ends.append(end)
    return starts, ends, tables


@settings(max_examples=150, deadline=None, derandomize=True)
@given(batch=batches(), tile=st.sampled_from([1, 4, 16]), most=st.sampled_from([1, 7, 10000]), data=st.data())
def test_each_row_attends_to_each_part_of_its_pages_once(
    batch: tuple[list[int], list[int], list[list[int]]], tile: int, most: int, data: st.DataObject
) -> None:
    starts, ends, tables = batch
    sequences = [Sequenced((REGION,), np.array(table, dtype=np.int64) * PAGE) for table in tables]
    placed = works(starts, ends, sequences)
    positions = np.concatenate([np.arange(a, b, dtype=np.int64) for a, b in zip(starts, ends, strict=True)])
    owner = np.repeat(np.arange(len(starts)), np.subtract(ends, starts))
    chosen = np.array(sorted(data.draw(st.sets(st.integers(0, len(positions) - 1)))), dtype=np.int64)
    window = data.draw(st.sampled_from([None, 64, 700]))
    done: dict[tuple[int, int], int] = {}
    for jobs in planned(placed, positions, chosen, tile, most):
        cells = [jobs.cells[row] + part for row in jobs.rows for part in range(positions[row] // PART + 1)]
        assert sorted(cells) == list(range(jobs.results))
        assert jobs.results <= most or len(jobs.rows) == 1
        for first, count, part, table, flat in jobs.within(window, positions).tolist():
            assert 1 <= count <= tile
            for row in jobs.members[first : first + count].tolist():
                if positions[row] < part * PART:
                    continue
                done[row, part] = done.get((row, part), 0) + 1
                end = min((part + 1) * PART, int(positions[row]) + 1)
                pages = np.arange(part * PART // PAGE, -(-end // PAGE))
                slots = [tables[owner[row]][page] * PAGE for page in pages]
                assert placed.pages[table + pages].tolist() == slots
                assert flat in (-1, slots[0])
                assert flat == -1 or slots == list(range(flat, flat + len(slots) * PAGE, PAGE))
    for row in chosen.tolist():
        last = int(positions[row]) // PART
        lowest = 0 if window is None else max(0, int(positions[row]) - window + 1) // PART
        assert all(done.get((row, part)) == 1 for part in range(lowest, last + 1))
    assert {row for row, _ in done} <= set(chosen.tolist())


def test_pages_that_follow_each_other_are_told_by_the_first() -> None:
    tables = [range(100), [*range(40), *range(60, 120)]]
    sequences = [Sequenced((REGION,), np.array(table, dtype=np.int64) * PAGE) for table in tables]
    ends = [len(table) * PAGE for table in tables]
    placed = works([end - 1 for end in ends], ends, sequences)
    (jobs,) = planned(placed, np.array([end - 1 for end in ends]), np.arange(2), 16, 1000)
    found = sorted((part, rows, flat) for _, rows, part, _, flat in jobs.jobs.tolist())
    pages = PART // PAGE
    one, other = [(part, 1, part * PART) for part in (1, 2, 3)], [(1, 1, -1), (2, 1, (2 * pages + 20) * PAGE)]
    assert found == sorted([(0, 2, 0), *one, *other, (3, 1, (3 * pages + 20) * PAGE)])


@pytest.mark.parametrize("count", [2, 5])
def test_rows_that_share_a_part_attend_to_it_in_one_job(count: int) -> None:
    """A part that is shared as a whole is read once; of the next one, each sequence reads its own pages."""
    shared = list(range(PART // PAGE + 4))
    tables = [[*shared, 1000 * (number + 1)] for number in range(count)]
    end = len(tables[0]) * PAGE
    sequences = [Sequenced((REGION,), np.array(table, dtype=np.int64) * PAGE) for table in tables]
    placed = works([end - 1] * count, [end] * count, sequences)
    (jobs,) = planned(placed, np.full(count, end - 1, dtype=np.int64), np.arange(count), 16, 1000)
    assert sorted((part, rows) for _, rows, part, *_ in jobs.jobs.tolist()) == [(0, count), *[(1, 1)] * count]
