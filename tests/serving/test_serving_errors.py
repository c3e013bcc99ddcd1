"""Bad input: the OpenAI error object with a sentence that helps, never a stack trace."""

from __future__ import annotations

import http.client
import json
import re
import socket
from collections.abc import Iterator
from contextlib import closing
from typing import Any

import httpx
import pytest

from forerun.core.roles import Verifier
from forerun.errors import ConfigError, DataError
from forerun.serving.methods import check_lossless
from forerun.serving.tenants import Keys
from served import JSON_TYPE, Served, thread

USER = [{"role": "user", "content": "the cat"}]
Body = dict[str, Any]
JSON_HEADERS = {"Content-Type": "application/json"}


def refused(answer: httpx.Response, status: int = 400) -> dict[str, Any]:
    """The error object of an answer that must be one."""
    assert answer.status_code == status, answer.text
    assert answer.headers["content-type"] == "application/json"
    assert set(answer.json()) == {"error"}
    error = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"} and error["message"]
    assert "Traceback" not in answer.text and 'File "' not in answer.text
    return error


@pytest.mark.parametrize(
    ("body", "key"),
    [
        ('{"prompt": "a", "prompt": "b"}', "prompt"),
        ('{"prompt": "a", "max_tokens": 2, "max_t\\u006fkens": 2}', "max_tokens"),
        ('{"prompt": "a", "logit_bias": {"5": 1, "5": 2}}', "5"),
        ('{"prompt": "a", "speculation": {"max_nodes": 1, "max_nodes": 2}}', "max_nodes"),
        ('{"messages": [{"role": "user", "content": "a", "role": "system"}]}', "role"),
    ],
)
def test_a_key_that_occurs_twice_is_refused(drafting: Served, body: str, key: str) -> None:
    path = "/v1/chat/completions" if "messages" in body else "/v1/completions"
    error = refused(drafting.post(path, content=body, headers=JSON_HEADERS))
    assert error["message"] == f"the body: duplicate key {key!r} in one object; remove one"


@pytest.mark.parametrize(
    ("body", "param", "said"),
    [
        ({"prompt": "a", "temperatur": 1}, "temperatur", "did you mean 'temperature'?"),
        ({"prompt": "a", "temperature": "hot"}, "temperature", "valid number, got 'hot'"),
        ({"prompt": "a", "temperature": -1}, "temperature", "finite number >= 0"),
        ({"prompt": "a", "top_p": 0}, "top_p", "in (0, 1]"),
        ({"prompt": "a", "max_tokens": 0}, "max_tokens", ">= 1, got 0"),
        ({"prompt": "a", "min_tokens": 9, "max_tokens": 3}, "min_tokens", "exceeds max_tokens=3"),
        ({"prompt": "a", "n": 0}, "n", "greater than or equal to 1, got 0"),
        ({"prompt": "a", "n": 9}, "n", "n is 9, but this server runs at most 8"),
        ({"prompt": ["a"] * 300}, "n", "300 sequences, but a request may have 256"),
        ({"prompt": ""}, "prompt", "empty"),
        ({"prompt": []}, "prompt", "empty list"),
        ({"prompt": [[]]}, "prompt", "list of token ids"),
        ({"prompt": [1, "a"]}, "prompt", 'got "a" at position 1 of token ids'),
        ({"prompt": ["a", 1]}, "prompt", "got 1 at position 1 of the list"),
        ({"prompt": ["a", [1, None]]}, "prompt", "got [1, null] at position 1 of the list"),
        ({"prompt": [True]}, "prompt", "list of token ids"),
        ({"prompt": [999_999]}, "prompt", "token 999999 at position 0; ids of this model are 0 to"),
        ({"prompt": [5, -1]}, "prompt", "token -1 at position 1; ids of this model are 0 to 287"),
        ({}, "prompt", "required"),
        ({"prompt": "a", "logprobs": 21}, "logprobs", "less than or equal to 20, got 21"),
        ({"prompt": "a", "stop": ["x"] * 17}, "stop", "at most 16 items"),
        ({"prompt": "a", "stop": "x" * 4097}, "stop", "at most 4096 characters"),
        ({"prompt": "a", "stop": ["x", 3]}, "stop.1", "valid string, got 3"),
        ({"prompt": 5}, "prompt", "valid string, got 5"),
        ({"prompt": None}, "prompt", "valid string, got None"),
        ({"prompt": "a", "temperature of": 1}, "temperature of", "did you mean 'temperature'?"),
        (
            {"prompt": "a", "logit_bias": {"5": 1e300}},
            "logit_bias.5",
            "equal to 100, got 1e+300",
        ),
        (
            {"prompt": "a", "frequency_penalty": -3},
            "frequency_penalty",
            "equal to -2, got -3",
        ),
        ({"prompt": "a", "repetition_penalty": 1e-9}, "repetition_penalty", "equal to 0.01"),
        ({"prompt": "a"} | {f"x{i}": 1 for i in range(2000)}, "x0", "unknown parameter"),
        ({"prompt": "a", "seed": -(2**63) - 1}, "seed", f"equal to {-(2**63)}, got {-(2**63) - 1}"),
        ({"prompt": "a", "top_k": 2**63}, "top_k", f"less than {2**63}"),
        ({"prompt": "a", "stop": ""}, "stop", "non-empty"),
        ({"prompt": "a", "logit_bias": {"05": 1}}, "logit_bias", "write ids as plain digits"),
        ({"prompt": "a", "logit_bias": {"x": 1}}, "logit_bias", "write ids as plain digits"),
        ({"prompt": "a", "logit_bias": {"288": 1}}, "logit_bias", "token 288, but ids end at 287"),
        ({"prompt": "a", "stop_token_ids": [288]}, "stop_token_ids", "ids end at 287"),
        ({"prompt": "a", "echo": True}, "echo", "not supported"),
        ({"prompt": "a", "best_of": 3}, "best_of", "not supported"),
        ({"prompt": "a", "stream_options": {"x": 1}}, "stream_options.x", "include_usage"),
        ({"prompt": "a", "stream_options": {}}, "stream_options", "needs stream to be true"),
        ({"prompt": [5] * 500}, "max_tokens", "16 are to be generated (the default of max_tokens)"),
        ({"prompt": "a", "speculation": {"methd": 1}}, "speculation.methd", "mean 'method'?"),
        ({"prompt": "a", "speculation": {"method": "stnd"}}, "speculation.method", "'stand'?"),
        ({"prompt": "a", "speculation": {"method": ""}}, "speculation.method", "method ''; known"),
        ({"prompt": "a", "speculation": {"max_nodes": 65}}, "speculation.max_nodes", "at most 64"),
        (
            {"prompt": "a", "prediction": {"type": "x", "content": "a"}},
            "prediction.type",
            "'content', got 'x'",
        ),
    ],
)
def test_completions(chat: Served, body: Body, param: str | None, said: str) -> None:
    error = refused(chat.post("/v1/completions", json=body))
    assert error["type"] == "invalid_request_error"
    assert said in error["message"] and error["param"] == param


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ({"messages": []}, "messages: list should have at least 1 item"),
        ({"messages": "hello"}, "messages: input should be a valid array, got 'hello'"),
        ({"messages": [{"role": "user"}]}, "messages.0.content: expected a text or a list of"),
        ({"messages": [{"role": "user", "content": []}]}, "of text parts, got an empty list"),
        ({"messages": [{"role": "user", "content": [{"typ": "text"}]}]}, "did you mean 'type'?"),
        ({"messages": [{"role": "robot", "content": "a"}]}, "'system', 'developer'"),
        ({"messages": [{"role": "tool", "content": "a"}]}, "rejects these messages: no tools"),
        ({"messages": USER, "tools": [{"type": "function"}]}, "tools.0.function is required"),
        ({"messages": USER, "top_logprobs": 3}, "top_logprobs needs logprobs"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": 1}]}]},
            "got 'image_url'; this model reads text only",
        ),
    ],
)
def test_chat(chat: Served, body: Body, said: str) -> None:
    assert said in refused(chat.post("/v1/chat/completions", json=body))["message"]


@pytest.mark.parametrize("missing", [{}, {"text": None}])
def test_a_part_without_its_text_is_told_so(chat: Served, missing: Body) -> None:
    parts = [{"type": "text", "text": "the"}, {"type": "text"} | missing]
    body = {"messages": [*USER, {"role": "user", "content": parts}]}
    error = refused(chat.post("/v1/chat/completions", json=body))
    assert error["param"] == "messages.1.content.1.text" and "is required" in error["message"]


@pytest.mark.parametrize(
    "body",
    [b"", b"{", b"[]", b"null", b"\xff\xfe", b'{"prompt": "\\ud800"}', b"[" * 100_000, b"nan",
     b'{"prompt": "a", "temperature": NaN}', b'{"prompt": "a", "temperature": 1e999}',
     b'{"prompt": "a", "max_tokens": ' + b"9" * 5000 + b"}", b'{"prompt": "a"} x'],
)  # fmt: skip
def test_what_is_no_request_at_all(chat: Served, body: bytes) -> None:
    refused(chat.post("/v1/completions", content=body))


def test_neutral_values_of_what_is_not_supported_are_accepted(chat: Served) -> None:
    body = {"messages": USER, "max_tokens": 2, "tools": [], "response_format": {"type": "text"}}
    assert chat.post("/v1/chat/completions", json=body | {"user": "u"}).status_code == 200
    body = {"prompt": "a", "max_tokens": 2, "n": 2, "best_of": 2, "echo": False, "top_k": -1}
    assert chat.post("/v1/completions", json=body | {"logit_bias": None}).status_code == 200


def test_null_is_the_default_of_inner_fields_too(chat: Served) -> None:
    """And of whatever the client library writes into an answer that is sent back."""
    body: Body = {"prompt": "a", "max_tokens": 2, "stream": True}
    for name in ("method", "max_nodes", "statistics", "trace"):
        inner = {"speculation": {name: None}}
        assert chat.post("/v1/completions", json=body | inner).is_success
    for name in ("include_usage", "include_obfuscation", "continuous_usage_stats"):
        inner = {"stream_options": {name: None}}
        assert chat.post("/v1/completions", json=body | inner).is_success
    client, messages = chat.client(), [*USER]
    for _ in range(2):
        answer = client.chat.completions.create(model="tiny", messages=messages, max_tokens=2)
        messages += [answer.choices[0].message.model_dump(), *USER]
    messages[1] |= {"annotations": []}
    assert client.chat.completions.create(model="tiny", messages=messages, max_tokens=2).choices
    messages[1] |= {"annotations": [{"type": "url_citation"}]}
    error = refused(chat.post("/v1/chat/completions", json={"messages": messages}))
    assert "annotations" in error["message"]


def test_empty_texts_are_messages_as_elsewhere(chat: Served) -> None:
    """OpenAI and vLLM take them, too; null and no parts at all they do not."""
    for content in ("", [{"type": "text", "text": ""}]):
        body = {"messages": [{"role": "user", "content": content}], "max_tokens": 2}
        assert chat.post("/v1/chat/completions", json=body).is_success


def test_context_overflow_says_the_numbers_and_who_is_to_blame(chat: Served) -> None:
    error = refused(chat.post("/v1/completions", json={"prompt": [5] * 500, "max_tokens": 13}))
    assert error["code"] == "context_length_exceeded" and error["param"] == "max_tokens"
    for number in ("512", "500", "13", "513", "at most 12"):
        assert number in error["message"]
    for count in (512, 513):  # no answer would find room
        for more in ({}, {"max_tokens": 7}):
            error = refused(chat.post("/v1/completions", json={"prompt": [5] * count} | more))
            assert error["code"] == "context_length_exceeded" and error["param"] == "prompt"
            assert str(count) in error["message"] and "512" in error["message"]
    assert chat.post("/v1/completions", json={"prompt": [5] * 500, "max_tokens": 12}).is_success
    long = {"messages": [{"role": "user", "content": "the cat " * 300}]}
    error = refused(chat.post("/v1/chat/completions", json=long | {"max_tokens": 7}))
    assert error["param"] == "messages"
    short = {"messages": USER, "max_completion_tokens": 600}
    error = refused(chat.post("/v1/chat/completions", json=short))
    assert error["param"] == "max_completion_tokens"


def test_a_text_that_cannot_fit_is_refused_without_tokenising_it(tiny_model: Any) -> None:
    def refuse(text: str, special: bool = True) -> list[int]:
        assert len(text) < 10_000, "this would take seconds"
        return [5] * 20

    with thread(tiny_model) as served:
        tiny_model.tokenizer.encode = refuse
        error = refused(served.post("/v1/completions", json={"prompt": "the cat " * 100_000}))
        assert error["param"] == "prompt" and "tokens or more" in error["message"]
        body = {"messages": [{"role": "user", "content": "the cat " * 100_000}]}
        assert refused(served.post("/v1/chat/completions", json=body))["param"] == "messages"
        error = refused(served.post("/v1/completions", json={"prompt": ["the cat"] * 100_000}))
        assert error["param"] == "n"
        said = {"type": "content", "content": "the cat " * 100_000}
        good = {"prompt": "the cat", "max_tokens": 2, "prediction": said}
        assert served.post("/v1/completions", json=good).is_success


def test_what_does_not_fit_into_memory_says_the_numbers(tiny_model: Any) -> None:
    cache = tiny_model.target.cache
    available = "forerun.runner.kv_cache.available_bytes"
    with pytest.MonkeyPatch.context() as patch, thread(tiny_model, max_seqs=8) as served:
        patch.setattr(available, lambda device: 100_000)
        before = cache.nbytes
        body = {"prompt": "a b c", "n": 8, "max_tokens": 200}
        error = refused(served.post("/v1/completions", json=body))
        assert error["code"] == "out_of_memory" and "sequences: 8" in error["message"]
        assert cache.nbytes == before
        assert served.post("/v1/completions", json={"prompt": "a", "max_tokens": 4}).is_success


def test_unknown_model_and_path(chat: Served) -> None:
    error = refused(chat.post("/v1/completions", json={"model": "tini", "prompt": "a"}), 404)
    assert error["code"] == "model_not_found" and "did you mean 'tiny'?" in error["message"]
    refused(httpx.get(f"{chat.url}/v1/models/other"), 404)
    error = refused(chat.post("/v1/complitions", json={}), 404)
    assert "POST /v1/completions" in error["message"]
    error = refused(chat.post("/v1/completions/", json={"prompt": "a"}), 404)
    assert "did you mean 'POST /v1/completions'" in error["message"]


@pytest.mark.parametrize(
    ("method", "path", "allowed"),
    [
        ("GET", "/v1/completions", "POST"),
        ("HEAD", "/v1/completions", "POST"),
        ("POST", "/health", "GET, HEAD"),
        ("DELETE", "/v1/models", "GET, HEAD"),
    ],
)
def test_a_method_that_a_path_lacks_is_told_those_that_it_has(
    chat: Served, method: str, path: str, allowed: str
) -> None:
    answer = httpx.request(method, f"{chat.url}{path}")
    assert answer.status_code == 405 and answer.headers["allow"] == allowed
    if method != "HEAD":
        message = refused(answer, 405)["message"]
        assert "POST /v1/completions" in message
        assert "/learning" not in message, "this server does not learn"


@pytest.mark.parametrize("path", ["/", "/health", "/metrics", "/v1/models"])
def test_head_is_get_without_a_body(chat: Served, path: str) -> None:
    with httpx.Client(base_url=chat.url) as client:
        head, whole = client.head(path), client.get(path)
        assert head.status_code == whole.status_code == 200 and head.content == b""
        assert head.headers["content-type"] == whole.headers["content-type"]


def test_a_request_that_is_too_large_or_too_slow(tiny_model: Any) -> None:
    with thread(tiny_model, max_body=1000, body_timeout=0.3) as served:
        error = refused(served.post("/v1/completions", json={"prompt": "a" * 2000}), 413)
        assert "1000" in error["message"]

        def pieces() -> Iterator[bytes]:
            for _ in range(300):  # no length is announced
                yield b"a" * 10

        refused(served.post("/v1/completions", content=pieces()), 413)
        host, port = served.url.removeprefix("http://").split(":")
        with socket.create_connection((host, int(port))) as slow:
            slow.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 50\r\n\r\n{")
            slow.settimeout(10)
            assert slow.recv(100).startswith(b"HTTP/1.1 408")
        for status, count in (("413", 2), ("408", 1)):
            series = (
                f'forerun:request_errors_total{{engine="0",model_name="tiny",status="{status}"}}'
            )
            assert served.metric(re.escape(series)) == count


def post_head(served: Served, *lines: str) -> tuple[socket.socket, bytes]:
    """A connection, and the head of a completion with these header lines."""
    host, port = served.url.removeprefix("http://").split(":")
    head = "\r\n".join(["POST /v1/completions HTTP/1.1", "Host: x", JSON_TYPE, *lines, "", ""])
    return socket.create_connection((host, int(port)), timeout=20), head.encode()


def test_who_sends_all_before_it_listens_hears_that_it_was_too_much(tiny_model: Any) -> None:
    size = 4 * 2**20  # more than the buffers between them hold
    with thread(tiny_model, max_body=size // 3) as served:
        address = served.url.removeprefix("http://")
        with closing(http.client.HTTPConnection(address, timeout=20)) as client:
            client.request("POST", "/v1/completions", b"x" * size)
            answer = client.getresponse()
            assert answer.status == 413 and answer.headers["connection"] == "close"
            assert f"at least {size} bytes" in json.loads(answer.read())["error"]["message"]


def test_a_body_without_end_is_cut(tiny_model: Any) -> None:
    with thread(tiny_model, max_body=2**18) as served:
        client, head = post_head(served, "Transfer-Encoding: chunked")
        sent, chunk = 0, b"%x\r\n%s\r\n" % (2**16, b"x" * 2**16)
        with client, pytest.raises(ConnectionError):
            client.sendall(head)
            while sent < 2**28:
                sent += client.send(chunk)
        assert sent < 2**25  # what was read and what buffers hold


def test_who_waits_for_leave_to_send_is_refused_at_once(tiny_model: Any) -> None:
    with thread(tiny_model, max_body=1000) as served:
        client, head = post_head(served, "Content-Length: 9999", "Expect: 100-continue")
        with client:
            client.sendall(head)
            assert client.recv(100).startswith(b"HTTP/1.1 413")
            while client.recv(1000):  # and then it is over
                pass


def test_keys(tiny_model: Any) -> None:
    keys = Keys.read(["# ours", "", "red:secret-one", "secret-two"])
    with thread(tiny_model, keys=keys) as served:
        body = {"prompt": "a", "max_tokens": 2}
        for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": "secret-one"}):
            error = refused(served.post("/v1/completions", json=body, headers=headers), 401)
            assert error["code"] == "invalid_api_key"
        for key in ("secret-one", "secret-two"):
            good = {"Authorization": f"Bearer {key}"}
            assert served.post("/v1/completions", json=body, headers=good).is_success
        assert httpx.get(f"{served.url}/v1/models").status_code == 401
        assert httpx.get(f"{served.url}/health").is_success


def test_keys_are_not_kept_and_bad_lines_do_not_show_them() -> None:
    keys = Keys.read(["red:secret-one"])
    assert "secret-one" not in repr(vars(keys)) and keys.tenant("Bearer secret-one") == "red"
    with pytest.raises(DataError) as caught:
        Keys.read(["red:", "x"])
    assert "line 1" in str(caught.value)
    with pytest.raises(DataError) as caught:
        Keys.read(["red:sécret"])
    assert "cret" not in str(caught.value).replace("secrets", "")


def test_a_lossy_verifier_is_refused_unless_allowed() -> None:
    class Loose(Verifier):
        lossless = False

        def verify(self, tree: Any, laws: Any, dice: Any) -> Any:
            raise NotImplementedError

    with pytest.raises(ConfigError, match="'loose' is lossy"):
        check_lossless(Loose(), "loose", False)
    assert check_lossless(Loose(), "loose", True)
