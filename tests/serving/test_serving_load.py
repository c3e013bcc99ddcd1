"""Many clients, too many, slow ones and those that vanish; faults; the end."""

from __future__ import annotations

import asyncio
import json
import signal
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from forerun.serving.tenants import Keys
from served import GO, SHORT, TEXT, asked, check_clean, command, scripted, thread


def test_requests_join_and_leave_at_any_step(tiny_chat: Path) -> None:
    """More clients than places, all streaming, of all methods: none is lost, none is mixed up."""
    with thread(scripted(tiny_chat, TEXT), max_seqs=4) as served:

        async def one(client: openai.AsyncOpenAI, i: int) -> tuple[str, int]:
            await asyncio.sleep(0.01 * (i % 7))
            method = ("stand", "none", "prompt_lookup")[i % 3]
            stream = await client.completions.create(
                **GO,
                max_tokens=10 + i,
                stream=True,
                stream_options={"include_usage": True},
                extra_body={"speculation": {"method": method, "max_nodes": i % 5}},
            )
            chunks = [chunk async for chunk in stream]
            text = "".join(c.choices[0].text for c in chunks if c.choices)
            return text, chunks[-1].usage.completion_tokens

        async def everybody() -> list[tuple[str, int]]:
            async with openai.AsyncOpenAI(base_url=f"{served.url}/v1", api_key="x") as client:
                return await asyncio.gather(*(one(client, i) for i in range(40)))

        found = asyncio.run(everybody())
        model = served.server.service.model
        long = 5 * model.target.script
        assert [count for _, count in found] == list(range(10, 50))
        for i, (text, _) in enumerate(found):
            assert text == model.tokenizer.decode(long[: 10 + i])
        served.wait_idle()
        assert served.metric("vllm:request_success_total") == 40
        assert served.metric("vllm:spec_decode_num_drafts_total") > 0
        assert model.target.released == 40


def test_a_full_queue_says_429_and_when_to_return(tiny_chat: Path) -> None:
    with (
        thread(scripted(tiny_chat, TEXT, seconds=0.02), max_seqs=1, max_waiting=2) as served,
        ThreadPoolExecutor(8) as pool,
    ):
        body = GO | {"max_tokens": 40, "speculation": {"method": "none"}}
        answers = list(pool.map(lambda _: served.post("/v1/completions", json=body), range(8)))
        statuses = sorted(answer.status_code for answer in answers)
        assert statuses[:3] == [200] * 3 and statuses[-1] == 429
        late = next(answer for answer in answers if answer.status_code == 429)
        assert int(late.headers["retry-after"]) >= 1
        assert late.json()["error"]["code"] == "queue_full"
        assert "your queue of 2 waiting requests" in late.json()["error"]["message"]
        assert served.metric("forerun:request_errors_total") == statuses.count(429)


def test_a_crowd_that_has_room_is_not_refused(tiny_chat: Path) -> None:
    """All come within one step of the engine, which has admitted none of them yet."""
    slow = scripted(tiny_chat, TEXT, seconds=0.3)
    with thread(slow, max_seqs=20, max_waiting=2) as served, ThreadPoolExecutor(16) as pool:
        body = GO | {"max_tokens": 2, "speculation": {"method": "none"}}
        with asked(served, max_tokens=4000):
            served.wait_until(lambda: served.metric("vllm:num_requests_running") == 1)
            crowd = [pool.submit(served.post, "/v1/completions", json=body) for _ in range(16)]
            assert {one.result().status_code for one in crowd} == {200}


def test_a_request_that_takes_too_long_is_ended(tiny_chat: Path) -> None:
    slow = scripted(tiny_chat, TEXT, seconds=0.02)
    with thread(slow, request_timeout=0.5) as served:
        body = GO | {"max_tokens": 4000}
        answer = served.post("/v1/completions", json=body)
        assert answer.status_code == 504
        assert answer.json()["error"]["code"] == "request_timeout"
        with pytest.raises(openai.APIError, match=r"within 0.5 s"):
            for _ in served.client().completions.create(**GO, max_tokens=4000, stream=True):
                pass
        served.wait_idle()
        assert slow.target.released == 2


@pytest.mark.parametrize("streams", [True, False])
def test_a_client_that_vanishes_frees_its_place(tiny_chat: Path, streams: bool) -> None:
    model = scripted(tiny_chat, TEXT, seconds=0.01)
    with thread(model, max_seqs=1) as served:
        with asked(served, max_tokens=4000, stream=streams) as client:
            served.wait_until(lambda: served.metric("vllm:num_requests_running") == 1)
            if streams:
                assert client.recv(10)
        served.wait_idle()
        assert model.target.released == 1
        assert served.metric("forerun:requests_cancelled_total") == 1
        assert served.post("/v1/completions", json=GO | {"max_tokens": 5}).is_success


def test_what_clients_do_to_a_connection_is_no_warning(
    tiny_chat: Path, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    with thread(scripted(tiny_chat, TEXT, seconds=0.005), max_seqs=8) as served:
        for _ in range(4):
            with asked(served, max_tokens=400, stream=True, n=8) as client:
                assert client.recv(10)
        served.wait_idle()
        upgrade = {"Connection": "Upgrade", "Upgrade": "websocket"}
        assert httpx.get(f"{served.url}/health", headers=upgrade).is_success
        assert served.metric("forerun:requests_cancelled_total") == 4
    assert not [record for record in caplog.records if record.name == "asyncio"]
    assert "upgrade" not in capfd.readouterr().err


def test_tenants_share_the_places_evenly(tiny_chat: Path) -> None:
    """One tenant's heap of requests, all there first, does not keep another waiting."""
    keys = Keys.read(["red:r", "blue:b"])
    with thread(scripted(tiny_chat, TEXT), keys=keys, max_seqs=2, max_waiting=50) as served:
        admission = served.server.service.worker._admission
        order, take = [], admission.take
        admission.take = lambda *_: []
        with ThreadPoolExecutor(13) as pool:

            def ask(key: str) -> None:
                served.client(key).completions.create(**GO, max_tokens=40)

            found = [pool.submit(ask, key) for key in 12 * "r"]
            served.wait_until(lambda: served.get("/health").json()["waiting"] == 12, 60)
            found.append(pool.submit(ask, "b"))
            served.wait_until(lambda: served.get("/health").json()["waiting"] == 13, 60)

            def note(*limits: int) -> Any:
                groups = take(*limits)
                order.extend(group.job.tenant for group in groups)
                return groups

            admission.take = note
            for one in found:
                one.result()
        assert order[:2] == ["red", "blue"] and order[2:] == ["red"] * 11


def fault_in(target: Any, is_bad: Callable[[Any], bool]) -> None:
    """Makes passes fail that hold a certain sequence."""
    whole = target.forward

    def forward(batch: Any) -> Any:
        if any(is_bad(seq) for seq in batch.seqs):
            raise RuntimeError("a kernel has failed")
        return whole(batch)

    target.forward = forward


def test_a_fault_drops_the_request_at_fault_and_no_other(tiny_chat: Path) -> None:
    model = scripted(tiny_chat, TEXT, seconds=0.01)
    poison = model.tokenizer.encode("rain")
    fault_in(model.target, lambda seq: seq.tokens[: len(poison)] == poison)
    with thread(model, max_seqs=4) as served, ThreadPoolExecutor(4) as pool:
        client = served.client()
        good = [
            pool.submit(lambda: client.completions.create(**GO, max_tokens=60)) for _ in range(2)
        ]
        served.wait_until(lambda: served.metric("vllm:num_requests_running") == 2)
        for stream in (False, True):
            with pytest.raises(openai.InternalServerError) as caught:
                client.completions.create(**GO | {"prompt": "rain"}, stream=stream, max_tokens=30)
            assert caught.value.status_code == 503
            assert caught.value.code == "engine_fault"
            assert "kernel" not in caught.value.message  # what went wrong stays in the log
        texts = [future.result().choices[0].text for future in good]
        expected = model.tokenizer.decode((5 * model.target.script)[:60])
        assert texts == [expected] * 2
        served.wait_idle()
        assert client.completions.create(**GO, max_tokens=5).choices
        assert served.metric("forerun:engine_faults_total") >= 1


def test_parameters_that_leave_no_token_are_the_clients_mistake(tiny_chat: Path) -> None:
    """They are known before anything runs: no step fails, and nobody else's is repeated."""
    model = scripted(tiny_chat, TEXT)
    ends = list(model.tokenizer.eos_ids)
    others = [token for token in range(model.tokenizer.vocab_size) if token not in ends]
    late = {"banned_tokens": others, "min_tokens": 1, "max_tokens": 5}
    early = {"banned_tokens": others[1:], "stop_token_ids": others[:1], "min_tokens": 2}
    with thread(model) as served:
        for body in ({"banned_tokens": others + ends}, late, early):
            answer = served.post("/v1/completions", json=GO | body)
            assert answer.status_code == 400, answer.text
            error = answer.json()["error"]
            assert error["param"] == "banned_tokens" and "no token is allowed" in error["message"]
        for body in ({"banned_tokens": others}, late | {"ignore_eos": True}):
            assert served.post("/v1/completions", json=GO | body | {"max_tokens": 5}).is_success
        assert served.metric("forerun:engine_faults_total") == 0


def test_an_engine_that_cannot_go_on_is_made_anew(tiny_chat: Path) -> None:
    """A fault outside a pass: what runs gets 503, what waits is served by the new engine."""
    model = scripted(tiny_chat, TEXT, seconds=0.01)
    with thread(model, max_seqs=1) as served, ThreadPoolExecutor(4) as pool:
        batch = served.server.service.worker._batch
        broken = batch.engine

        def retire() -> Any:
            if batch.engine is broken and served.metric("vllm:num_requests_waiting") >= 1:
                raise RuntimeError("the scheduler is confused")
            return type(broken).retire(broken)

        first = pool.submit(served.post, "/v1/completions", json=GO | {"max_tokens": 100})
        served.wait_until(lambda: served.metric("vllm:num_requests_running") == 1)
        second = pool.submit(served.post, "/v1/completions", json=GO | {"max_tokens": 7})
        served.wait_until(lambda: served.metric("vllm:num_requests_waiting") == 1)
        broken.retire = retire
        assert first.result().status_code == 503
        assert second.result().is_success
        assert batch.engine is not broken
        assert httpx.get(f"{served.url}/health").is_success


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_dead_engine_thread_is_told(tiny_chat: Path) -> None:
    with thread(scripted(tiny_chat, TEXT, seconds=0.01)) as served:
        worker = served.server.service.worker

        def die(*_: Any) -> Any:
            raise SystemExit("no exception of ours")

        worker._admission.take = die
        answer = served.post("/v1/completions", json=GO | {"max_tokens": 10})
        late = served.post("/v1/completions", json=GO)
        for one in (answer, late):
            assert one.status_code == 503 and one.json()["error"]["code"] == "engine_fault"
            assert "stopped after an internal error" in one.json()["error"]["message"]
        health = httpx.get(f"{served.url}/health")
        assert health.status_code == 503 and health.json()["status"] == "stopped"


@pytest.mark.slow
def test_a_signal_lets_requests_finish(tiny_chat: Path) -> None:
    with command(tiny_chat, "--name", "tiny", "--drain", 20) as served:
        assert served.process is not None
        call = {"prompt": "the cat", "max_tokens": 400, "temperature": 0, "ignore_eos": True}
        body = call | {"stream": True, "stream_options": {"include_usage": True}}
        with httpx.stream("POST", f"{served.url}/v1/completions", json=body, timeout=60) as stream:
            lines = stream.iter_lines()
            next(lines)
            served.process.send_signal(signal.SIGTERM)
            rest = [line for line in lines if line]
        assert rest[-1] == "data: [DONE]"
        assert json.loads(rest[-2].removeprefix("data: "))["usage"]["completion_tokens"] == 400
        assert served.process.wait(20) == 0
        with pytest.raises(httpx.ConnectError):
            httpx.get(f"{served.url}/health")


def test_what_outlasts_the_drain_is_ended_with_an_error(tiny_chat: Path) -> None:
    with thread(scripted(tiny_chat, TEXT, seconds=0.02), drain=0.3) as served:
        with pytest.raises(openai.APIError, match="shutting down"):
            for i, _ in enumerate(
                served.client().completions.create(**GO, max_tokens=4000, stream=True)
            ):
                if i == 0:
                    served.server.drain()
        start = time.monotonic()
        served.wait_until(lambda: not served.server.service.worker._thread.is_alive())
        assert time.monotonic() - start < 5


def test_a_tenants_memory_serves_nobody_else(tiny_chat: Path) -> None:
    """What red's requests taught is drafted for red and not for blue."""
    import forerun

    keys = Keys.read(["red:r", "blue:b"])
    with thread(forerun.load(tiny_chat, max_seqs=4), keys=keys) as served:

        def drafted(key: str) -> int:
            answer = served.client(key).completions.create(
                model="tiny",
                prompt="the cat",
                temperature=0,
                max_tokens=20,
                extra_body={"speculation": {"statistics": True}},
            )
            return answer.model_extra["speculation"]["accepted"]

        first, again = drafted("r"), drafted("r")
        assert again > first and again >= 10
        assert drafted("b") == first
        assert drafted("b") == again


def test_a_cancelled_request_frees_its_cells_at_the_next_step(tiny_model: Any) -> None:
    from forerun.core.sampling import Sampling
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
