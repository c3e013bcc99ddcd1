"""Threads that share a model take turns; nobody waits for one to clear up what was left."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from threading import Thread

import pytest
from test_api import PROMPT

import forerun
from forerun import registry
from forerun.core.sampling import Sampling
from forerun.lossless.distribution import next_law
from forerun.search.best_of import best_of
from forerun.search.superposed import superposed

pytestmark = pytest.mark.usefixtures("short_collections")


def test_threads_share_a_model(tiny_folder) -> None:
    """Runs take turns: each says what it says alone."""
    shared, twin = (model := forerun.load(tiny_folder, dtype="fp32", max_seqs=64)), model.twin()
    options = {"max_new_tokens": 60, "temperature": 0.9, "n": 2, "controller": "fixed:nodes=4"}

    def texts(seed: int) -> list[list[int]]:
        on = twin if seed % 4 == 3 else shared
        (found,) = on.generate(PROMPT, seed=seed, **options)
        return [sample.tokens for sample in found.samples]

    alone = list(map(texts, range(12)))
    with ThreadPoolExecutor(6) as pool:
        assert list(pool.map(texts, range(12), timeout=60)) == alone


USES: dict[str, Callable[[forerun.Model], object]] = {
    "generate": lambda model: model.generate(PROMPT, max_new_tokens=8, n=3),
    "a stream that is left": lambda model: next(iter(model.stream(PROMPT, max_new_tokens=8))),
    "best_of": lambda model: best_of(model, PROMPT, n=3, max_new_tokens=8),
    "next_law": lambda model: next_law(model, [5, 6], [7], Sampling()),
    "superposed": lambda model: superposed(model, PROMPT, max_new_tokens=4, ngram_weight=0),
}


@pytest.mark.parametrize("use", USES)
def test_who_uses_a_target_or_a_drafter_holds_its_turn(tiny_folder, monkeypatch, use) -> None:
    model, uses = forerun.load(tiny_folder, dtype="fp32"), list[str]()
    turns, drafter = model.target.lock, model.drafter("auto")

    def is_free() -> bool:
        if free := turns.acquire(blocking=False):
            turns.release()
        return free

    def watch(part: object, name: str) -> None:
        does = getattr(part, name)

        def watched(*given: object, **named: object) -> object:
            with ThreadPoolExecutor(1) as other:
                uses.append(name if other.submit(is_free).result(10) else "")
            return does(*given, **named)

        monkeypatch.setattr(part, name, watched)

    for part, names in {
        model.target: ("forward", "decode", "release", "check_room"),
        drafter: ("bind", "start", "propose", "observe", "finish", "forget"),
    }.items():
        for name in names:
            watch(part, name)
    USES[use](model)
    gc.collect()
    assert len(uses) > 1 and set(uses) == {""}


def test_a_report_is_made_beside_threads_that_generate_or_make_drafters(
    tiny_folder, monkeypatch
) -> None:
    model = forerun.load(tiny_folder, dtype="fp32")

    def report() -> dict[str, int]:
        model.drafter("sam")
        with ThreadPoolExecutor(1) as other:
            return {"free": other.submit(model.target.lock.acquire, False).result(10)}

    monkeypatch.setattr(model.drafter("stand"), "memory_report", report)
    assert model.memory_report()["stand: free"] is False


@pytest.mark.parametrize("taken", ["by another thread", "by its own"])
def test_who_collects_a_stream_that_is_left_does_not_wait_for_a_turn(tiny_folder, taken) -> None:
    """Any thread may be made to collect it, whatever locks it holds, amidst any step."""
    model, cycle = forerun.load(tiny_folder, dtype="fp32"), list[object]()
    turns, target = model.target.lock, model.target
    events = model.stream(PROMPT, max_new_tokens=8)
    next(events)
    cycle += [cycle, events]
    del events

    def collect() -> None:
        cycle.clear()
        gc.collect()

    assert target.num_held
    with turns:
        if taken == "by its own":
            collect()
        else:
            other = Thread(target=collect, daemon=True)
            other.start()
            other.join(20)
            assert not other.is_alive()
        assert target.num_held, "a step may be under way"
    with turns:
        assert not target.num_held


def test_a_drafter_is_made_once_by_all_threads(tiny_folder, monkeypatch) -> None:
    model, calls, make = forerun.load(tiny_folder, dtype="fp32"), list[str](), registry.make

    def slow(kind: str, spec: str, **options: object) -> object:
        calls.append(spec)
        time.sleep(0.1)
        return make(kind, spec, **options)

    monkeypatch.setattr(registry, "make", slow)
    with ThreadPoolExecutor(8) as pool:
        made = list(pool.map(model.drafter, ["stand"] * 8, timeout=60))
    assert calls == ["stand"] and len(set(map(id, made))) == 1
