"""Turns: one thread at a time, in the order in which they came, and again by who holds it."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from threading import Barrier
from time import sleep

import pytest

from forerun.turns import Turns


def test_nobody_is_passed_over() -> None:
    turns, start, order = Turns(), Barrier(3), list[int]()

    def work(who: int) -> None:
        start.wait(10)
        for _ in range(20):
            with turns, turns:
                inside.append(who)
                sleep(0.001)
                assert inside == [who]
                order.append(inside.pop())

    inside: list[int] = []
    with ThreadPoolExecutor(3) as pool:
        list(pool.map(work, range(3), timeout=60))
    halves = [order[:30].count(who) for who in range(3)]
    assert len(order) == 60 and min(halves) >= 5, (
        "Python's own lock gives one all of its turns first"
    )


def test_an_error_gives_the_turn_back() -> None:
    turns = Turns()
    with pytest.raises(ValueError), turns:
        raise ValueError
    with ThreadPoolExecutor(1) as pool:
        pool.submit(turns.__enter__).result(10)
