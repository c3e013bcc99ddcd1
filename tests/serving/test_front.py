"""Several engines behind one port: the real client, and engines that go away."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path

import httpx
import openai
import pytest
from prometheus_client.parser import text_string_to_metric_families

from forerun.serving.proxy import MAX_EXTRA_REQUESTS, Proxy, _routing_key, merged
from forerun.serving.server import DrainingServer, bind_sockets
from forerun.serving.settings import Settings
from forerun.serving.tenants import Keys
from forerun.serving.upstream import Upstream
from served import GO, TEXT, Served, asked, command, scripted, thread

HEAD = "HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"


class Still:
    """Servers that somebody else keeps alive."""

    def __init__(self, urls: list[str]) -> None:
        self.up = {i: Upstream(i, url) for i, url in enumerate(urls)}
        self.was_ended = False

    async def start(self) -> None:
        """They run."""

    async def stop(self) -> None:
        """They run on."""

    def abort(self) -> None:
        self.was_ended = True


@contextmanager
def fronted(*urls: str, **settings: float) -> Iterator[Served]:
    """A front over servers."""
    backend, up = Still(list(urls)), threading.Event()
    front = Proxy(backend, Settings(**settings))
    server = DrainingServer(front, front, 5.0, bind_sockets("127.0.0.1", 0), lambda url: up.set())
    runner = threading.Thread(target=server.run, daemon=True)
    runner.start()
    assert up.wait(20)
    try:
        yield Served(server.url, server=front)
    finally:
        server.should_exit = True
        runner.join(20)
        assert not runner.is_alive()


@contextmanager
def two(folder: Path, seconds: float = 0.0, keys: Keys | None = None, **settings: int) -> Iterator:
    """Two engines and a front over them."""
    with ExitStack() as stack:
        engines = [
            stack.enter_context(
                thread(scripted(folder, TEXT, seconds=seconds), keys, engine=i, **settings)
            )
            for i in range(2)
        ]
        yield stack.enter_context(fronted(*(one.url for one in engines))), engines


@contextmanager
def dying(said: str) -> Iterator[str]:
    """The URL of a server that takes a request, says so much and goes away."""
    with socket.create_server(("127.0.0.1", 0)) as door:

        def answer() -> None:
            while True:
                try:
                    link, _ = door.accept()
                except OSError:
                    return
                with link:
                    link.recv(65536)
                    link.sendall(said.encode())

        runner = threading.Thread(target=answer, daemon=True)
        runner.start()
        yield f"http://127.0.0.1:{door.getsockname()[1]}"
        door.shutdown(socket.SHUT_RDWR)
        runner.join(5)


def chunk(text: str) -> str:
    return f"{len(text):x}\r\n{text}\r\n"


def test_the_client_sees_one_server(tiny_chat: Path) -> None:
    with two(tiny_chat) as (served, engines):
        client = served.client()
        assert [model.id for model in client.models.list().data] == ["tiny"]
        whole = client.completions.create(**GO, max_tokens=60, logprobs=1)
        stream = client.completions.create(**GO, max_tokens=60, stream=True)
        text = "".join(c.text for event in stream for c in event.choices)
        expected = engines[0].server.service.model.tokenizer.decode(
            (5 * engines[0].server.service.model.target.script)[:60]
        )
        assert text == whole.choices[0].text == expected
        with pytest.raises(openai.BadRequestError, match="did you mean 'stand'"):
            client.completions.create(**GO, extra_body={"speculation": {"method": "stnd"}})
        with pytest.raises(openai.NotFoundError):
            client.models.retrieve("other")
        assert httpx.get(f"{served.url}/").text == httpx.get(f"{engines[0].url}/").text
        assert served.post("/v1/completions", content=b"{").status_code == 400
        found = httpx.get(f"{served.url}/health").json()
        assert found["status"] == "ok" and found["engines"] == {"0": "ok", "1": "ok"}


def test_conversations_stay_and_crowds_spread(tiny_chat: Path) -> None:
    with two(tiny_chat, seconds=0.005) as (served, engines):
        counts = []
        for _ in range(6):  # the same beginning, one after the other
            assert served.post("/v1/completions", json=GO | {"max_tokens": 3}).is_success
        counts = [one.metric("vllm:request_success_total") for one in engines]
        assert sorted(counts) == [0, 6]
        with ThreadPoolExecutor(3 * MAX_EXTRA_REQUESTS) as pool:  # at once
            body = GO | {"max_tokens": 60, "speculation": {"method": "none"}}
            call = [pool.submit(served.post, "/v1/completions", json=body) for _ in range(12)]
            assert all(one.result().is_success for one in call)
        after = [one.metric("vllm:request_success_total") for one in engines]
        assert sum(after) == 18 and min(after) >= 2
        keyed = [{"prompt_cache_key": f"conversation {i}"} for i in range(20)]
        for body in keyed:  # not refused, and told apart
            assert served.post("/v1/completions", json=GO | body | {"max_tokens": 1}).is_success
        last = [one.metric("vllm:request_success_total") for one in engines]
        assert min(b - a for a, b in zip(after, last, strict=True)) >= 3


def test_a_stream_that_was_cut_ends_with_an_error_event() -> None:
    said = HEAD + chunk('data: {"choices": [{"index": 0, "text": "one"}]}\n\n')
    with dying(said) as url, fronted(url) as served:
        seen = []
        with pytest.raises(openai.APIError, match="was lost and is restarting") as caught:
            for event in served.client().completions.create(**GO, stream=True):
                seen.append(event.choices[0].text)
        assert seen == ["one"] and caught.value.code == "engine_fault"
        assert served.metric("forerun:streams_cut_total") == 1
        assert served.metric("forerun:replicas_up") == 0
        late = served.post("/v1/completions", json=GO)  # nobody is left
        assert late.status_code == 503 and int(late.headers["retry-after"]) == 10
        assert late.json()["error"]["code"] == "engine_fault"
        health = httpx.get(f"{served.url}/health")
        assert health.status_code == 503 and health.json()["status"] == "no engine is up"


@pytest.mark.parametrize(
    "said", ["", "HTTP/1.1 200 OK\r\nContent-Length: 90\r\nContent-Type: application/json\r\n\r\n{"]
)
def test_what_had_not_begun_is_sent_to_another_engine(tiny_chat: Path, said: str) -> None:
    with (
        thread(scripted(tiny_chat, TEXT)) as good,
        dying(said) as bad,
        fronted(bad, good.url) as served,
    ):
        for i in range(8):  # some belong to the one that dies
            body = GO | {"max_tokens": 4, "prompt_cache_key": f"conversation {i}"}
            assert served.post("/v1/completions", json=body).is_success
        assert served.metric("forerun:requests_retried_total") == 1  # then it is known


def refusal(status: str, code: str, seconds: int) -> str:
    """What a server says that answers nothing else."""
    body = json.dumps({"error": {"message": f"of {status[:3]}", "code": code}})
    return (
        f"HTTP/1.1 {status}\r\nContent-Type: application/json\r\nRetry-After: {seconds}\r\n"
        f"Content-Length: {len(body)}\r\n\r\n{body}"
    )


REFUSAL = refusal("503 Service Unavailable", "engine_fault", 1)
FULL = refusal("429 Too Many Requests", "queue_full", 7)


def test_what_one_engine_failed_at_is_sent_to_another_one(tiny_chat: Path) -> None:
    """Its thread has ended, or it has no memory left: it still answers, with 503."""
    with (
        thread(scripted(tiny_chat, TEXT)) as good,
        dying(REFUSAL) as bad,
        fronted(bad, good.url) as served,
    ):
        for i in range(8):
            body = GO | {"max_tokens": 4, "prompt_cache_key": f"conversation {i}"}
            assert served.post("/v1/completions", json=body).is_success
        assert served.metric("forerun:requests_retried_total") >= 1
        assert served.metric("forerun:replicas_up") == 2  # it is not given up for that
    with dying(REFUSAL) as one, dying(REFUSAL) as other, fronted(one, other) as served:
        answer = served.post("/v1/completions", json=GO)  # no more than two are asked
        assert answer.status_code == 503 and answer.json()["error"]["message"] == "of 503"
        assert answer.headers["retry-after"] == "1"


def test_a_request_over_which_engines_die_does_not_kill_them_all(tiny_chat: Path) -> None:
    with (
        thread(scripted(tiny_chat, TEXT)) as good,
        dying("") as one,
        dying("") as other,
        fronted(one, other, good.url) as served,
    ):
        keys = ({"prompt_cache_key": f"conversation {i}"} for i in range(50))
        answers = (served.post("/v1/completions", json=GO | key) for key in keys)
        answer = next(answer for answer in answers if not answer.is_success)
        assert answer.status_code == 503
        assert "send the request again" in answer.json()["error"]["message"]
        assert int(answer.headers["retry-after"]) == 1
        assert served.metric("forerun:replicas_up") == 1


def test_a_full_engine_passes_requests_on_and_all_full_is_429(tiny_chat: Path) -> None:
    with two(tiny_chat, seconds=0.02, max_seqs=1, max_waiting=1) as (served, engines):
        body = GO | {"max_tokens": 60, "speculation": {"method": "none"}}
        with ThreadPoolExecutor(8) as pool:
            call = [pool.submit(served.post, "/v1/completions", json=body) for _ in range(8)]
            answers = [one.result() for one in call]
        assert sorted(answer.status_code for answer in answers) == [200] * 4 + [429] * 4
        late = next(answer for answer in answers if answer.status_code == 429)
        assert int(late.headers["retry-after"]) >= 1
        assert late.json()["error"]["code"] == "queue_full"
        assert [one.metric("vllm:request_success_total") for one in engines] == [2, 2]


@pytest.mark.parametrize("said", [REFUSAL, "", FULL])
def test_when_to_come_again_is_told_whoever_was_asked_last(said: str) -> None:
    """One engine is full; the other fails, dies, or is full, before it or after it."""
    with dying(FULL) as full, dying(said) as other, fronted(full, other) as served:
        engines, first = served.server.backend.up, set()
        for i in range(8):
            named = GO | {"prompt_cache_key": f"conversation {i}"}
            first.add(served.server._pick(_routing_key([], json.dumps(named).encode()), ()).number)
            answer = served.post("/v1/completions", json=named)
            assert answer.status_code == 429 and answer.headers["retry-after"] == "7"
            assert answer.json()["error"]["code"] == "queue_full"
            engines[1].is_lost = False  # as when its keeper has seen it again
        assert first == {0, 1}


def test_a_request_that_ends_two_engines_is_not_told_to_come_again_soon() -> None:
    """Also where a third one is full, whose answer would be to come again."""
    with (
        dying(FULL) as full,
        dying("") as one,
        dying("") as other,
        fronted(full, one, other) as served,
    ):
        for i in range(8):
            named = GO | {"prompt_cache_key": f"conversation {i}"}
            answer = served.post("/v1/completions", json=named)
            assert answer.status_code == 503
            for engine in served.server.backend.up.values():
                engine.is_lost = False  # as when its keeper has seen it again


@pytest.mark.parametrize("streams", [True, False])
def test_a_client_that_vanishes_frees_its_place(tiny_chat: Path, streams: bool) -> None:
    with two(tiny_chat, seconds=0.01) as (served, engines):
        with asked(served, max_tokens=4000, stream=streams) as client:
            served.wait_until(lambda: served.metric("vllm:num_requests_running") == 1)
            if streams:
                assert client.recv(10)
        served.wait_idle()
        gone = sum(one.metric("forerun:requests_cancelled_total") for one in engines)
        assert gone == 1


def test_keys_are_each_engine_s_own_business(tiny_chat: Path) -> None:
    with two(tiny_chat, keys=Keys.read(["red:secret"])) as (served, _):
        with pytest.raises(openai.AuthenticationError):
            served.client("wrong").completions.create(**GO)
        assert served.client("secret").completions.create(**GO, max_tokens=2).choices


def test_metrics_are_those_of_all_engines(tiny_chat: Path) -> None:
    with two(tiny_chat) as (served, engines):
        for i in range(10):
            body = GO | {"max_tokens": 4, "prompt_cache_key": f"conversation {i}"}
            assert served.post("/v1/completions", json=body).is_success
        text = httpx.get(f"{served.url}/metrics").text
        families = {family.name: family for family in text_string_to_metric_families(text)}
        for name in ("prompt_tokens", "spec_decode_num_drafts", "num_requests_running"):
            samples = families[f"vllm:{name}"].samples
            assert sorted({sample.labels["engine"] for sample in samples}) == ["0", "1"]
        assert served.metric("vllm:generation_tokens_total") == 40
        types = re.findall(r"# TYPE (\S+)", text)
        assert len(types) == len(set(types))
        assert merged([text]) == text


def test_what_is_under_way_is_finished_and_nothing_new_is_taken(tiny_chat: Path) -> None:
    with two(tiny_chat, seconds=0.01) as (served, _), ThreadPoolExecutor(1) as pool:
        body = GO | {"max_tokens": 100, "speculation": {"method": "none"}}
        first = pool.submit(served.post, "/v1/completions", json=body)
        served.wait_until(lambda: served.metric("vllm:num_requests_running") == 1)
        served.server.close()
        late = served.post("/v1/completions", json=GO)
        assert late.status_code == 503 and late.json()["error"]["code"] == "shutting_down"
        assert first.result().json()["usage"]["completion_tokens"] == 100
        served.server.abort()
        assert served.server.backend.was_ended


# --- on a Ray cluster


def engines_of(served: Served) -> list[int]:
    """Processes of the engines that this server has started."""
    assert served.process is not None
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            name = (folder / "cmdline").read_bytes()
            above = pid = int(folder.name)
            while above > 1 and above != served.process.pid:
                above = int(Path(f"/proc/{above}/stat").read_text().rpartition(")")[2].split()[1])
        except OSError:
            continue
        if above == served.process.pid and name.startswith(b"ray::Replica"):
            found.append(pid)
    return sorted(found)


@pytest.mark.slow
def test_a_killed_engine_costs_its_streams_an_event_and_is_replaced(tiny_chat: Path) -> None:
    pytest.importorskip("ray", reason="ray is not installed")
    with command(tiny_chat, "--name", "tiny", "--max-seqs", 8, "--replicas", 2) as served:

        def number_up() -> int:
            return len(httpx.get(f"{served.url}/health", timeout=30).json()["engines"])

        served.wait_until(lambda: number_up() == 2, 120)

        async def ask(client: openai.AsyncOpenAI, i: int, streams: bool) -> str:
            extra = {"ignore_eos": True, "prompt_cache_key": f"conversation {i}"}
            call = GO | {"prompt": "the cat", "max_tokens": 450, "extra_body": extra}
            found = await client.completions.create(**call, stream=streams)
            if not streams:
                return found.choices[0].text
            began.append(i)
            try:
                return "".join([event.choices[0].text async for event in found])
            except openai.APIError as error:
                assert error.code == "engine_fault" and "was lost" in error.message
                return "cut"

        began: list[int] = []
        victims = engines_of(served)
        assert len(victims) == 2

        async def everybody() -> tuple[list[str], list[str]]:
            url = f"{served.url}/v1"
            async with openai.AsyncOpenAI(base_url=url, api_key="x", max_retries=0) as client:
                streams = [asyncio.ensure_future(ask(client, i, True)) for i in range(6)]
                wholes = [asyncio.ensure_future(ask(client, i, False)) for i in range(6)]
                while len(began) < 6:
                    await asyncio.sleep(0.01)
                os.kill(victims[0], signal.SIGKILL)
                return await asyncio.gather(*streams), await asyncio.gather(*wholes)

        streams, wholes = asyncio.run(everybody())
        assert len(set(wholes)) == 1  # all were answered, some by another engine
        assert 1 <= streams.count("cut") < 6 and set(streams) == {"cut", wholes[0]}
        assert served.metric("forerun:streams_cut_total") == streams.count("cut")
        served.wait_until(lambda: number_up() == 2, 120)
        assert len(engines_of(served)) == 2 and victims[0] not in engines_of(served)
        assert served.client().completions.create(**GO, max_tokens=3).choices
        served.process.send_signal(signal.SIGTERM)
        assert served.process.wait(30) == 0
    assert not any(Path(f"/proc/{pid}").exists() for pid in victims)
