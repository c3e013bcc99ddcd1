"""Randomised requests: no 5xx, no hang, and the server still serves."""

from __future__ import annotations

import json
import socket
from typing import Any

import httpx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from forerun.serving.schemas import UNSUPPORTED, ChatRequest, CompletionRequest
from served import JSON_TYPE, Served

JSON = dict([JSON_TYPE.split(": ")])

ROUTES = {"/v1/completions": CompletionRequest, "/v1/chat/completions": ChatRequest}
TEXTS = st.one_of(
    st.text(max_size=40), st.sampled_from(["", "the cat sat", "\x00", "\ufffd", "a" * 999])
)
NUMBERS = st.one_of(
    st.integers(-3, 30), st.floats(), st.sampled_from([10**30, -(2**63), 2**63 - 1, 0.0, 1e-300])
)
ANY = st.recursive(
    st.one_of(st.none(), st.booleans(), NUMBERS, TEXTS),
    lambda inner: st.one_of(st.lists(inner, max_size=4), st.dictionaries(TEXTS, inner, max_size=4)),
    max_leaves=8,
)
MESSAGES = st.lists(
    st.fixed_dictionaries({"role": st.sampled_from(["user", "assistant", "system", "tool", "x"])})
    | st.fixed_dictionaries({"role": st.just("user"), "content": TEXTS}),
    max_size=4,
)
GOOD: dict[str, st.SearchStrategy[Any]] = {
    "model": st.just("tiny"),
    "temperature": st.floats(0, 2),
    "top_p": st.floats(0.01, 1),
    "top_k": st.integers(-1, 20),
    "min_p": st.floats(0, 1),
    "n": st.integers(1, 4),
    "seed": st.integers(-(2**40), 2**40),
    "stop": st.one_of(TEXTS, st.lists(TEXTS, max_size=4)),
    "stream": st.booleans(),
    "presence_penalty": st.floats(-2, 2),
    "frequency_penalty": st.floats(-2, 2),
    "repetition_penalty": st.floats(0.5, 2),
    "logit_bias": st.dictionaries(st.integers(0, 290).map(str), st.floats(-100, 100), max_size=4),
    "banned_tokens": st.lists(st.integers(0, 290), max_size=4),
    "stop_token_ids": st.lists(st.integers(0, 290), max_size=4),
    "min_tokens": st.integers(0, 4),
    "ignore_eos": st.booleans(),
    "prediction": st.fixed_dictionaries({"type": st.just("content"), "content": TEXTS}),
    "speculation": st.fixed_dictionaries(
        {"method": st.sampled_from(["stand", "none", "prompt_lookup", "stnd"])},
        optional={"max_nodes": st.integers(0, 70), "statistics": st.booleans()},
    ),
    "stream_options": st.fixed_dictionaries({"include_usage": st.booleans()}),
    "max_tokens": st.integers(1, 12),
}


@st.composite
def bodies(draw: st.DrawFn) -> tuple[str, bytes]:
    """A route and a body: mostly nearly right, sometimes nothing of the kind."""
    route = draw(st.sampled_from(sorted(ROUTES)))
    if draw(st.integers(0, 9)) == 0:
        return route, draw(st.one_of(st.binary(max_size=200), ANY.map(_dumped)))
    names = draw(st.lists(st.sampled_from(sorted(GOOD)), max_size=6, unique=True))
    body = {"max_tokens": 4} | {name: draw(GOOD[name]) for name in names}
    if route == "/v1/completions":
        body["prompt"] = draw(
            st.one_of(
                TEXTS, st.lists(TEXTS, max_size=3), st.lists(st.integers(-1, 290), max_size=9)
            )
        )
        body["logprobs"] = draw(st.sampled_from([None, None, 0, 3, 30]))
    else:
        body["messages"] = draw(MESSAGES)
        body["logprobs"] = draw(st.sampled_from([None, None, True]))
    if draw(st.integers(0, 3)) == 0:
        fields = [*ROUTES[route].model_fields, *UNSUPPORTED, "unknown"]
        body[draw(st.sampled_from(fields))] = draw(ANY)
    return route, _dumped(body)


def _dumped(value: Any) -> bytes:
    return json.dumps(value).encode("utf-8", "surrogatepass")


def check(answer: httpx.Response) -> None:
    """200 with an answer, or an error object of the client's own making."""
    assert answer.status_code < 500, answer.text
    if answer.status_code != 200:
        assert set(answer.json()["error"]) == {"message", "type", "param", "code"}
    elif answer.headers["content-type"].startswith("text/event-stream"):
        events = [line for line in answer.text.split("\n\n") if line]
        assert all(event.startswith("data: ") for event in events)
        last = events[-1].removeprefix("data: ")
        assert last == "[DONE]" or json.loads(last)["error"]["type"] == "invalid_request_error"
    else:
        assert all(choice["finish_reason"] for choice in answer.json()["choices"])


def storm(chat: Served, examples: int) -> None:
    """So many random requests; every tenth client goes away without reading its answer."""
    host, port = chat.url.removeprefix("http://").split(":")
    count = 0

    with httpx.Client(timeout=60.0) as client:

        @settings(
            max_examples=examples,
            deadline=None,
            suppress_health_check=list(HealthCheck),
            derandomize=True,
            database=None,
        )
        @given(bodies())
        def one(given_: tuple[str, bytes]) -> None:
            nonlocal count
            count += 1
            route, body = given_
            if count % 10 == 0:
                length = f"Content-Length: {len(body) + count % 2}"
                head = f"POST {route} HTTP/1.1\r\nHost: x\r\n{JSON_TYPE}\r\n{length}"
                with socket.create_connection((host, int(port))) as vanishing:
                    vanishing.sendall(f"{head}\r\n\r\n".encode() + body)
            else:
                check(client.post(chat.url + route, content=body, headers=JSON))

        one()
    chat.wait_idle()
    good = {"prompt": "the cat", "max_tokens": 4, "temperature": 0}
    assert chat.post("/v1/completions", json=good).is_success
    assert chat.metric("forerun:engine_faults_total") <= chat.metric("forerun:request_errors_total")


def test_random_requests(chat: Served) -> None:
    storm(chat, 50)


@pytest.mark.slow
def test_a_thousand_random_requests(chat: Served) -> None:
    storm(chat, 1000)
