"""Whatever fails inside costs the request that it belongs to, and no place, no memory, no other."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from served import SHORT, TEXT, Served, check_clean, scripted, thread

Post = Callable[[dict[str, Any]], Any]


@contextmanager
def held(served: Served, count: int) -> Iterator[Post]:
    """Requests that are posted within join in one step, in their order, when all are there."""
    admission = served.server.service.worker._admission
    take, admission.take = admission.take, lambda *_: []
    with ThreadPoolExecutor(count) as pool:
        sent = 0

        def post(body: dict[str, Any]) -> Any:
            nonlocal sent
            sent += 1
            found = pool.submit(served.post, "/v1/completions", json=SHORT | body)
            served.wait_until(lambda: len(admission) == sent)
            return found

        yield post
        admission.take = take


def fails_at(engine: Any, is_bad: Callable[[Any], bool]) -> None:
    """Some sequences cannot be submitted."""
    submit = engine.submit

    def refuse(seq: Any) -> None:
        if is_bad(seq):
            raise RuntimeError("cannot be checked")
        submit(seq)

    engine.submit = refuse


def test_a_request_that_cannot_join_takes_no_other_along(tiny_chat: Path) -> None:
    model = scripted(tiny_chat, TEXT)
    rain = model.tokenizer.encode("rain")
    with thread(model, max_seqs=8) as served:
        fails_at(served.server.service.worker._batch.engine, lambda s: s.tokens[:4] == rain[:4])
        with held(served, 3) as post:
            found = [post({"prompt": prompt}) for prompt in ("go", "rain", "go")]
        answers = [one.result() for one in found]
        assert [answer.status_code for answer in answers] == [200, 503, 200]
        assert answers[1].json()["error"]["code"] == "engine_fault"
        check_clean(served)


def test_the_places_of_samples_that_never_joined_are_free_again(tiny_chat: Path) -> None:
    with thread(scripted(tiny_chat, TEXT), max_seqs=3) as served:
        fails_at(served.server.service.worker._batch.engine, lambda s: s.index == 1)
        for _ in range(3):
            assert served.post("/v1/completions", json=SHORT | {"n": 3}).status_code == 503
            check_clean(served)
        assert served.post("/v1/completions", json=SHORT).is_success


def test_a_second_prompt_of_a_request_that_failed_does_not_run(tiny_chat: Path) -> None:
    model = scripted(tiny_chat, TEXT)
    rain = model.tokenizer.encode("rain")
    with thread(model, max_seqs=8) as served:
        fails_at(served.server.service.worker._batch.engine, lambda s: s.tokens[:4] == rain[:4])
        with held(served, 2) as post:
            found = [post({"prompt": ["rain", "go", "go"]}), post({})]
        assert [one.result().status_code for one in found] == [503, 200]
        check_clean(served)
        assert served.metric("vllm:generation_tokens_total") == 12


def test_a_fault_beside_all_requests_is_told_to_those_about_to_join(tiny_chat: Path) -> None:
    """Not only to what ran: the rest of the round would be waited for in vain."""
    with thread(scripted(tiny_chat, TEXT), max_seqs=8) as served:
        batch = served.server.service.worker._batch
        begin, batch.begin = batch.begin, lambda group: 1 / 0
        with held(served, 2) as post:
            found = [post({}), post({})]
        assert [one.result().status_code for one in found] == [503, 503]
        batch.begin = begin
        check_clean(served)
        assert served.post("/v1/completions", json=SHORT).is_success


def test_a_fault_beside_all_steps_costs_what_runs_and_what_waits_is_served(tiny_chat: Path) -> None:
    with (
        thread(scripted(tiny_chat, TEXT, seconds=0.01), max_seqs=1) as served,
        ThreadPoolExecutor(2) as pool,
    ):
        worker = served.server.service.worker
        take, broken = worker._admission.take, worker._batch.engine

        def fail_once(*limits: int) -> Any:
            if worker._batch.engine is broken and len(worker._admission) == 1:
                raise RuntimeError("the queue is confused")
            return take(*limits)

        first = pool.submit(served.post, "/v1/completions", json=SHORT | {"max_tokens": 4000})
        served.wait_until(lambda: served.metric("vllm:num_requests_running") == 1)
        worker._admission.take = fail_once
        second = pool.submit(served.post, "/v1/completions", json=SHORT)
        assert first.result().status_code == 503
        assert first.result().json()["error"]["code"] == "engine_fault"
        assert second.result().is_success and served.post("/v1/completions", json=SHORT).is_success
        assert httpx.get(f"{served.url}/health").json()["status"] == "ok"
        check_clean(served)


def test_others_are_heard_while_an_engine_is_made_anew(tiny_chat: Path) -> None:
    """Making one takes a while; the event loop must not wait for it, and what comes is served."""
    with ThreadPoolExecutor(3) as pool, thread(scripted(tiny_chat, TEXT)) as served:
        served.timeout = None  # what is waited for is an order, not a time
        worker = served.server.service.worker
        take, make = worker._admission.take, worker._batch._make
        begun, go_on = threading.Event(), threading.Event()

        def slowly(recorder: Any) -> Any:
            begun.set()
            go_on.wait()
            return make(recorder)

        worker._admission.take, worker._batch._make = lambda *_: 1 / 0, slowly
        first = pool.submit(served.post, "/v1/completions", json=SHORT)
        try:
            served.wait_until(begun.is_set)
            worker._admission.take = take
            second = pool.submit(served.post, "/v1/completions", json=SHORT)
            served.wait_until(lambda: len(worker._admission) == 2)
            health = pool.submit(served.get, "/health")
            served.wait_until(health.done)
            assert health.result().is_success
        finally:
            go_on.set()
        served.wait_until(lambda: first.done() and second.done())
        assert second.result().is_success
        assert first.result().is_success  # it was waiting: the first try is not its last
        check_clean(served)


def test_a_fault_that_stays_is_told_to_all_and_health_says_so_until_it_goes(
    tiny_chat: Path,
) -> None:
    with thread(scripted(tiny_chat, TEXT)) as served:
        admission = served.server.service.worker._admission
        take, admission.take = admission.take, lambda *_: 1 / 0
        for _ in range(3):
            answer = served.post("/v1/completions", json=SHORT)
            assert answer.status_code == 503 and answer.json()["error"]["code"] == "engine_fault"
        health = httpx.get(f"{served.url}/health")
        assert health.status_code == 503 and health.json()["status"] == "failing"
        admission.take = take
        assert served.post("/v1/completions", json=SHORT).is_success
        assert httpx.get(f"{served.url}/health").is_success
        check_clean(served)


def test_what_cannot_be_told_of_one_request_costs_that_request_only(tiny_chat: Path) -> None:
    with thread(scripted(tiny_chat, TEXT), max_seqs=8) as served:
        batch = served.server.service.worker._batch
        report = batch._report

        def choke(choice: Any, now: float) -> None:
            if choice.job.sampling.n == 2 and choice.number == 0:
                raise ValueError("no such character")
            report(choice, now)

        batch._report = choke
        with held(served, 2) as post:
            found = [post({"n": 2}), post({})]
        assert [one.result().status_code for one in found] == [503, 200]
        check_clean(served)


@pytest.mark.parametrize("temperature", [0, 1])
def test_logits_that_are_no_law_are_the_servers_fault(tiny_chat: Path, temperature: int) -> None:
    model = scripted(tiny_chat, TEXT)
    rain, forward = model.tokenizer.encode("rain"), model.target.forward

    def overflow(batch: Any) -> Any:
        found = forward(batch)
        for seq, rows in zip(batch.seqs, found, strict=True):
            if seq.tokens[: len(rain)] == rain:
                rows.logits[:] = np.nan
        return found

    model.target.forward = overflow
    with thread(model, max_seqs=8) as served:
        with held(served, 2) as post:
            found = [post({"prompt": p, "temperature": temperature}) for p in ("rain", "go")]
        answers = [one.result() for one in found]
        assert [answer.status_code for answer in answers] == [500, 200]
        error = answers[0].json()["error"]
        assert (error["type"], error["code"]) == ("api_error", "model_fault")
        assert "Retry-After" not in answers[0].headers
        check_clean(served)
