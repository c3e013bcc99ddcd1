"""Whatever fails inside costs the request that it belongs to, and no place, no memory, no other."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

import forerun
from forerun.records import Plan
from forerun.roles import Drafter
from forerun.serving.tenants import Keys
from served import GO, TEXT, Served, asked, scripted, thread

SHORT = GO | {"max_tokens": 12}
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


def check_clean(served: Served) -> None:
    """Nothing runs, and nothing is kept of what ran."""
    served.wait_idle()
    worker = served.server.service.worker
    assert not worker._batch._progress and not worker._batch._choices
    assert not +worker._admission._running


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
    with thread(scripted(tiny_chat, TEXT)) as served, ThreadPoolExecutor(2) as pool:
        worker = served.server.service.worker
        take, make = worker._admission.take, worker._batch._make
        begun, go_on = threading.Event(), threading.Event()

        def slowly(recorder: Any) -> Any:
            begun.set()
            assert go_on.wait(30)
            return make(recorder)

        worker._admission.take, worker._batch._make = lambda *_: 1 / 0, slowly
        first = pool.submit(served.post, "/v1/completions", json=SHORT)
        try:
            assert begun.wait(20)
            worker._admission.take = take
            second = pool.submit(served.post, "/v1/completions", json=SHORT)
            served.wait_until(lambda: len(worker._admission) == 2)
            assert httpx.get(f"{served.url}/health", timeout=10).is_success
        finally:
            go_on.set()
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

    def overflow(seqs: Any, trees: Any, needs: Any) -> Any:
        found = forward(seqs, trees, needs)
        for seq, rows in zip(seqs, found, strict=True):
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


class Shaky(Drafter):
    """A drafter that fails half the time, wherever it is called."""

    def __init__(self, inner: Drafter) -> None:
        self.inner, self.random = inner, np.random.default_rng(3)

    def _shake(self) -> None:
        if self.random.random() < 0.5:
            raise RuntimeError("the drafter fell over")

    def start(self, seq: Any) -> None:
        self.inner.start(seq)
        self._shake()

    def propose_one(self, seq: Any, plan: Plan, dice: Any) -> Any:
        self._shake()
        return self.inner.propose_one(seq, plan, dice)

    def observe(self, step: Any) -> None:
        self.inner.observe(step)
        self._shake()

    def finish(self, seq: Any) -> None:
        self.inner.finish(seq)
        self._shake()


@pytest.mark.parametrize("temperature", [0, 0.8])
def test_a_drafter_that_fails_costs_drafts_and_one_warning(
    tiny_chat: Path, temperature: float, caplog: pytest.LogCaptureFixture
) -> None:
    model = scripted(tiny_chat, TEXT)
    with thread(model, max_seqs=4) as served, ThreadPoolExecutor(8) as pool:
        (guarded,) = [
            part
            for name, part in served.server.service.worker._batch.router.parts.items()
            if name == "stand"
        ]
        guarded.drafter = Shaky(guarded.drafter)
        body = SHORT | {"temperature": temperature, "max_tokens": 40}
        body["speculation"] = {"method": "stand", "statistics": True}
        with caplog.at_level(logging.WARNING):
            found = list(pool.map(lambda _: served.post("/v1/completions", json=body), range(12)))
        assert {answer.status_code for answer in found} == {200}
        expected = model.tokenizer.decode((3 * model.target.script)[:40])
        assert {answer.json()["choices"][0]["text"] for answer in found} == {expected}
        told = [answer.json()["speculation"] for answer in found]
        counted = sum(one["failures"] for one in told)
        assert served.metric("forerun:drafter_failures_total") == counted > 12
        assert served.metric("forerun:engine_faults_total") == 0
        assert served.metric("vllm:spec_decode_num_accepted_tokens_total") > 0
        check_clean(served)
    warned = [record for record in caplog.records if "drafter" in record.getMessage()]
    assert len(warned) == 1 and "going on without its drafts" in warned[0].getMessage()


def test_neither_keys_nor_prompts_are_logged(
    tiny_chat: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Whatever goes well or wrong, at any level of logging."""
    model = scripted(tiny_chat, TEXT)
    keys = Keys.read(["red:secret-one"])
    with caplog.at_level(logging.DEBUG), thread(model, keys) as served:
        whole = model.target.forward

        def fail(seqs: Any, *rest: Any) -> Any:
            if any(len(seq.tokens) > 30 for seq in seqs):
                raise RuntimeError("a kernel has failed")
            return whole(seqs, *rest)

        model.target.forward = fail
        said = "my own words, which nobody else may read, however this request may end"
        good = {"Authorization": "Bearer secret-one"}
        for headers in (good, {"Authorization": "Bearer secret-too"}, {}):
            for body in (SHORT | {"prompt": said}, SHORT, SHORT | {"prompt": [said, 3]}):
                served.post("/v1/completions", json=body, headers=headers)
            served.post("/v1/completions", content=f'{{"{said}', headers=headers)
        assert served.metric("forerun:engine_faults_total") > 0
    assert "a kernel has failed" in caplog.text  # the cause is there
    for secret in ("secret-one", "secret-too", "my own words"):
        assert secret not in caplog.text


def test_a_cancelled_request_frees_its_cells_at_the_next_step(tiny_model: Any) -> None:
    from forerun.sampling import Sampling
    from forerun.serving.admission import Group
    from forerun.serving.jobs import Job

    with thread(tiny_model) as served:
        batch = served.server.service.worker._batch  # its thread sleeps: nothing was sent
        cache = tiny_model.target.cache
        sampling = Sampling(max_new_tokens=100, ignore_eos=True, n=2)
        jobs = [Job([[5, 6, 7]], sampling, i, "stand", "") for i in range(2)]
        for job in jobs:
            batch.begin(Group(job, 0))
        for _ in range(3):
            batch.step()
        assert len(cache._of) == 4
        batch.drop(jobs[0])
        batch.step()
        assert {seq.group for seq in cache._of} == {(jobs[1].number, 0)}
        assert batch.num_running == 2 and batch.jobs() == [jobs[1]]


@pytest.mark.slow
def test_a_client_that_never_reads_is_cut_off_in_time(tiny_chat: Path) -> None:
    """Its answer fills all buffers; others are served meanwhile, and its places come free."""
    with thread(scripted(tiny_chat, TEXT), max_seqs=8, request_timeout=1.0) as served:
        call = {"max_tokens": 4000, "n": 7, "stream": True, "logprobs": 20}
        with asked(served, buffer=4096, **call):
            served.wait_until(lambda: served.metric("vllm:num_requests_running") == 7)
            assert served.post("/v1/completions", json=SHORT).is_success
            served.wait_until(lambda: served.metric("vllm:num_requests_running") == 0, 30)
        check_clean(served)


def test_dashboards_find_vllm_s_metrics_and_they_agree(drafting: Served) -> None:
    """Names, types and labels as vLLM has them; the counts are those of the statistics."""
    from prometheus_client.parser import text_string_to_metric_families

    def read() -> dict[str, Any]:
        text = httpx.get(f"{drafting.url}/metrics").text
        return {family.name: family for family in text_string_to_metric_families(text)}

    def value(families: dict[str, Any], name: str) -> float:
        samples = families[f"vllm:{name}"].samples
        return sum(one.value for one in samples if one.name == f"vllm:{name}_total")

    before = read()
    call = {"prompt": "the cat sat on the mat and the cat sat on", "max_tokens": 60, "seed": 1}
    call |= {"n": 2, "temperature": 0, "ignore_eos": True}
    call |= {"speculation": {"method": "prompt_lookup", "statistics": True}}
    told = drafting.post("/v1/completions", json=call).json()
    after = read()
    grown = {
        name: value(after, name) - value(before, name)
        for name in (
            "spec_decode_num_drafts",
            "spec_decode_num_draft_tokens",
            "spec_decode_num_accepted_tokens",
            "spec_decode_num_accepted_tokens_per_pos",
            "prompt_tokens",
            "generation_tokens",
            "request_success",
        )
    }
    accepted = grown["spec_decode_num_accepted_tokens"]
    assert accepted == told["speculation"]["accepted"] > 0
    assert grown["spec_decode_num_accepted_tokens_per_pos"] == accepted
    assert grown["spec_decode_num_draft_tokens"] == told["speculation"]["drafted"]
    passes = told["metrics"]["speculative_decoding"]["num_spec_steps"]  # those without a draft, too
    assert 0 < grown["spec_decode_num_drafts"] <= passes
    assert grown["generation_tokens"] == 120 and grown["request_success"] == 2
    for name, kind in (
        ("num_requests_running", "gauge"),
        ("num_requests_waiting", "gauge"),
        ("time_to_first_token_seconds", "histogram"),
        ("inter_token_latency_seconds", "histogram"),
        ("e2e_request_latency_seconds", "histogram"),
        ("prefix_cache_queries", "counter"),
        ("prefix_cache_hits", "counter"),
    ):
        family = after[f"vllm:{name}"]
        assert family.type == kind
        assert {"model_name", "engine"} <= family.samples[0].labels.keys()
    positions = [
        one.labels["position"]
        for one in after["vllm:spec_decode_num_accepted_tokens_per_pos"].samples
        if "position" in one.labels
    ]
    assert {"0", "1", "2"} <= set(positions)


def test_the_default_method_is_auto(chat: Served) -> None:
    told = chat.client().models.retrieve("tiny").model_extra["speculation"]
    assert told["default"] == "auto" and told["lossless"]
    body = {"prompt": "the cat", "max_tokens": 4, "speculation": {"statistics": True}}
    assert chat.post("/v1/completions", json=body).json()["speculation"]["method"] == "auto"


def test_a_draft_model_without_room_costs_its_drafts_only(
    tiny_chat: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Target and draft are asked for room together: what one takes the other has not."""
    model = forerun.load(str(tiny_chat))
    methods = {"two": f"draft_model:model={tiny_chat}"}
    spec = {"method": "two", "statistics": True}
    body = SHORT | {"ignore_eos": True, "speculation": spec}
    with thread(model, methods=methods, max_seqs=2) as served:
        batch = served.server.service.worker._batch
        target, draft = model.target.cache, batch.router.parts["two"].drafter.runner.cache
        for cache in (target, draft):  # as if nothing had been measured
            cache.slots.clear()
            cache._hold(cache.data[:, :0, :0])
        longest = len(model.tokenizer.encode("go")) + SHORT["max_tokens"]
        need = target.check_room(2, longest)
        assert need == draft.check_room(2, longest) > 0

        free = need + need // 2
        monkeypatch.setattr("forerun.engine.cache.available_bytes", lambda device: free)
        told = served.post("/v1/completions", json=body | {"n": 2}).json()["speculation"]
        assert draft.nbytes == 0 and "goes on without drafts of two" in caplog.text
        assert told["method"] == "none" and [c["method"] for c in told["choices"]] == ["none"] * 2
        told = served.post("/v1/completions", json=body).json()["speculation"]
        assert draft.nbytes > 0, "a smaller request is drafted for again"
        assert told["method"] == told["choices"][0]["method"] == "two"
        check_clean(served)
