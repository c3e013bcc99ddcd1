"""Threads of a pass on machines that are made up: what a pass takes by how many, and when."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from forerun.runner.native import threads
from forerun.runner.native.threads import ThreadCount

Machine = Callable[[int, float], tuple[float, float]]  # threads, clock -> seconds, halts in a pass


@pytest.fixture
def sizes(monkeypatch: pytest.MonkeyPatch) -> Callable[..., dict[int, float]]:
    """Runs passes until a time; gives the seconds that passes of each size have had."""
    halted, clock = [0.0], [0.0]
    held = ThreadCount(lambda: clock[0])
    monkeypatch.setattr(threads, "_switches", lambda: halted[0])

    def run(
        machine: Machine, until: float, most: int = 2, rows: int = 1, pause: float = 0.0
    ) -> dict[int, float]:
        spent = dict[int, float]()
        while clock[0] < until:
            size = held.size(most)
            seconds, halts = machine(size, clock[0])
            halted[0] += halts
            clock[0] += seconds
            spent[size] = spent.get(size, 0.0) + seconds
            held.took(rows)
            clock[0] += pause
        return spent

    return run


def quiet(size: int, clock: float) -> tuple[float, float]:
    return 0.0001 + 0.0018 / size, 0.0


def halting(size: int, clock: float) -> tuple[float, float]:
    """Another program has two of three turns of 4 ms on the last core."""
    seconds, _ = quiet(size, clock)
    is_halted = size > 1 and clock % 0.012 < 0.008
    return (seconds + 0.004, 20.0) if is_halted else (seconds, 0.0)


@pytest.mark.parametrize("rows", [1, 72, 512])
def test_threads_are_fewer_while_another_program_takes_a_core(sizes, rows) -> None:
    assert sizes(quiet, 1.0, rows=rows) == {2: pytest.approx(1.0, abs=0.01)}, "nothing is tried"
    busy = sizes(halting, 3.0, rows=rows)
    assert busy[1] > 1.5
    assert sizes(quiet, 9.0, rows=rows)[2] > 4.0, "soon after it has gone all are back"


def test_passes_of_another_kind_end_it_too(sizes) -> None:
    sizes(halting, 2.0, rows=1)
    assert sizes(quiet, 8.0, rows=300)[2] > 4.0


def test_all_are_back_by_the_clock_where_passes_are_few(sizes) -> None:
    sizes(halting, 2.0)
    sizes(quiet, 60.0, pause=0.2)
    assert set(sizes(quiet, 90.0, pause=0.2)) == {2}


def test_who_begins_on_a_busy_machine_has_never_seen_a_fast_pass(sizes) -> None:
    def always(size: int, clock: float) -> tuple[float, float]:
        return (0.027, 90.0) if size > 1 else (0.016, 1.0)

    assert sizes(always, 10.0)[1] > 8.0


def test_what_makes_all_slow_costs_little(sizes) -> None:
    """As a neighbour who takes memory's bandwidth, or longer texts: fewer threads are no faster."""

    def crowded(size: int, clock: float) -> tuple[float, float]:
        return 4 * quiet(size, clock)[0], 0.0

    sizes(quiet, 1.0)
    assert sizes(crowded, 11.0).get(1, 0.0) < 0.5


def test_trials_of_long_passes_are_rare(sizes) -> None:
    def long(size: int, clock: float) -> tuple[float, float]:
        return 0.2 * (1 + clock) / size, 0.0

    spent = sizes(long, 100.0, rows=512)
    assert spent.get(1, 0.0) < 0.1 * spent[2]


def test_threads_are_halved_as_far_as_that_helps(sizes) -> None:
    def machine(size: int, clock: float) -> tuple[float, float]:
        return (0.008 / size, 0.0) if size <= 2 else (0.004 * size, 10.0 * size)

    spent = sizes(machine, 5.0, most=8)
    assert spent[2] > 2.5 and spent.keys() == {8, 4, 2}
    assert sizes(quiet, 6.0, most=2) == {2: pytest.approx(1.0, abs=0.01)}, "torch.set_num_threads"


def test_one_thread_stays(sizes) -> None:
    assert set(sizes(halting, 2.0, most=1)) == {1}


def test_where_the_system_counts_no_switches(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on Windows: slowness alone tells."""
    monkeypatch.setattr(threads, "getrusage", None)
    clock = [0.0]
    held, fewest = ThreadCount(lambda: clock[0]), 2
    for number in range(4000):
        size = held.size(2)
        clock[0] += 0.001 if size == 1 else 0.0006 if number < 1000 else 0.004
        held.took(1)
        fewest = min(fewest, size)
    assert fewest == 1
