"""FairLock: one thread at a time, in the order of arrival, reentrant."""

from __future__ import annotations

import copy
import signal
import sys
from collections.abc import Callable
from threading import Barrier, Thread
from time import sleep
from typing import Any

import pytest

from forerun.utils.locks import FairLock


def ended(work: Callable[[], None]) -> bool:
    """Whether another thread does this within seconds."""
    thread = Thread(target=work, daemon=True)
    thread.start()
    thread.join(10)
    return not thread.is_alive()


def is_free(lock: FairLock) -> bool:
    def take() -> None:
        with lock:
            pass

    return ended(take)


def test_nobody_is_passed_over() -> None:
    lock, start, order = FairLock(), Barrier(3), list[int]()

    def work(who: int) -> None:
        start.wait(10)
        for _ in range(20):
            with lock, lock:
                inside.append(who)
                sleep(0.001)
                assert inside == [who]
                order.append(inside.pop())

    inside: list[int] = []
    threads = [Thread(target=work, args=(who,), daemon=True) for who in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
    again = sum(one == other for one, other in zip(order[:40], order[1:40], strict=False))
    assert len(order) == 60 and again < 10, (
        "Python's own lock gives one thread all of its turns first"
    )


def test_an_error_gives_the_turn_back() -> None:
    lock = FairLock()
    with pytest.raises(ValueError), lock:
        raise ValueError
    assert is_free(lock)


class Interrupted(Exception):
    pass


@pytest.mark.skipif(not hasattr(signal, "setitimer"), reason="the system has no such timers")
@pytest.mark.parametrize("depth", [1, 2])
def test_interrupts_at_any_moment_give_the_turn_back(depth: int) -> None:
    def interrupt(*_: object) -> None:
        raise Interrupted

    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        for number in range(970):  # ten times each moment
            lock = FairLock()
            try:
                signal.setitimer(signal.ITIMER_REAL, 1e-5 + number % 97 * 1.3e-6)
                while True:
                    with lock:
                        if depth == 2:
                            with lock:
                                pass
            except Interrupted:
                assert is_free(lock)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def test_a_finalizer_that_comes_while_a_turn_is_waited_for_has_its_own() -> None:
    """It may run between any two lines of the thread that waits, and use what it closes."""
    lock, came = FairLock(), list[int]()

    def finalizer(frame: Any, event: str, _: object) -> Any:
        if frame.f_code.co_name == "__enter__":
            if event == "line":
                with lock:
                    came.append(frame.f_lineno)
            return finalizer
        return None

    def work() -> None:
        sys.settrace(finalizer)
        with lock:
            sys.settrace(None)

    def hold() -> None:
        with lock:
            sleep(0.2)

    holder = Thread(target=hold, daemon=True)
    holder.start()
    assert ended(work) and len(came) > 3
    assert is_free(lock)


def test_what_is_due_soon_is_done_with_the_next_turn_and_never_waits() -> None:
    lock, done = FairLock(), list[str]()
    lock.run_when_free(lambda: done.append("at once"))
    assert done == ["at once"] and is_free(lock)

    def of_another_thread() -> None:
        lock.run_when_free(lambda: done.append("after another's turn"))
        lock.run_when_free(lambda: done.append("in order"))

    with lock:
        lock.run_when_free(lambda: done.append("not amidst its own turn"))
        assert ended(of_another_thread)
        with lock:
            assert done == ["at once"]
    with lock:
        assert done[1:] == ["not amidst its own turn", "after another's turn", "in order"]
    lock.run_when_free(lambda: lock.run_when_free(lambda: done.append("and what that wants")))
    assert done[4:] == ["and what that wants"] and is_free(lock)


def fail() -> None:
    raise ValueError("of another call")


def test_an_error_of_what_was_due_gives_the_turn_back(caplog: pytest.LogCaptureFixture) -> None:
    lock = FairLock()
    with pytest.raises(ValueError):
        lock.run_when_free(fail)
    assert is_free(lock)
    with lock:
        pass
    assert not caplog.text, "it is not done again"


@pytest.mark.parametrize("how", ["with", "soon"])
def test_an_error_of_what_was_due_is_told_and_spares_who_comes_next(
    caplog: pytest.LogCaptureFixture, how: str
) -> None:
    lock, done = FairLock(), list[int]()
    with lock:
        lock.run_when_free(fail)
        lock.run_when_free(lambda: done.append(1))
    if how == "with":
        with lock:
            done.append(2)
    else:
        lock.run_when_free(lambda: done.append(2))
    assert done == [1, 2] and "of another call" in caplog.text


def test_what_was_due_and_is_interrupted_is_done_in_the_next_turn() -> None:
    lock, done = FairLock(), list[int]()

    def work() -> None:
        done.append(1)
        if len(done) == 1:
            raise KeyboardInterrupt

    with lock:
        lock.run_when_free(work)
    with pytest.raises(KeyboardInterrupt):
        lock.__enter__()
    assert is_free(lock) and done == [1, 1]
    with lock:
        assert done == [1, 1]


def test_copies_share_and_deep_copies_do_not() -> None:
    held = {"lock": FairLock()}
    assert copy.copy(held)["lock"] is held["lock"]
    assert copy.deepcopy(held)["lock"] is not held["lock"]
