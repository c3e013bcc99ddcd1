"""Bad constraints are refused with their field, and never hang or end anything else."""

from __future__ import annotations

import json
import os
import re
import signal
import sys
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx
import pytest

from forerun.models.tokenizer import Tokenizer
from forerun.serving.tenants import Keys
from served import Served, command, thread

pytest.importorskip("llguidance")

USER = [{"role": "user", "content": "a"}]
ASK: Any = {"messages": USER, "max_tokens": 8}
F = {"type": "function", "function": {"name": "f"}}
# a terminal of 2^24 letters, which takes a compiler seconds
SLOW = "start: A0\n" + "\n".join(f"A{i}: A{i + 1} A{i + 1}" for i in range(24)) + "\nA24: /[a-z]/"
# a chain of rules that overflows the stack of the compiler
CRASH = "start: r0\n" + "\n".join(f'r{i}: "x" r{i + 1}?' for i in range(30000)) + '\nr30000: "y"'
# masks that need too many items of the parser, from the second token on
HOSTILE = "start: /[^x]/ r0\n" + "\n".join(
    f"r{i}: /[a-z ]/ r{(i * 7 + 1) % 400} | /[a-z ]/ r{(i * 13 + 5) % 400} | /[a-f ]/"
    for i in range(400)
)


@pytest.fixture(scope="module")
def server(tiny_chat: Path) -> Iterator[Served]:
    with command(tiny_chat, "--name", "tiny", "--max-seqs", 4, "--grammar-timeout", 2) as served:
        yield served


def tools_with(**parameters: Any) -> list[Any]:
    return [F, {"type": "function", "function": {"name": "g", "parameters": parameters}}]


def schema_of(**schema: Any) -> Any:
    return {"type": "json_schema", "json_schema": {"name": "s", "schema": schema}}


def refused(server: Served, **fields: Any) -> dict[str, Any]:
    answer = server.post("/v1/chat/completions", json=ASK | fields)
    assert answer.status_code == 400, answer.text[:300]
    return answer.json()["error"]


@pytest.mark.parametrize(
    ("fields", "param", "said"),
    [
        # two constraints, and options without one
        (
            {"response_format": {"type": "json_object"}, "guided_json": {}},
            "guided_json",
            "response_format and guided_json both constrain the text",
        ),
        ({"guided_regex": "a", "structured_outputs": {"regex": "a"}}, "guided_regex", "both"),
        ({"constraint_start": "x"}, "constraint_start", "needs a constraint"),
        (
            {"constraint_sampling": "smc", "guided_regex": "a"},
            "constraint_sampling",
            "'smc' is not offered by this server; known: mask, asap, awrs; use awrs with n choices",
        ),
        (
            {"constraint_sampling": "awrs", "guided_regex": "a", "top_p": 0.9},
            "constraint_sampling",
            "without top_k, top_p and min_p",
        ),
        (
            {"constraint_sampling": "asap", "guided_regex": "a", "temperature": 0},
            "constraint_sampling",
            "a temperature above 0",
        ),
        ({"constraint_sampling": "asap"}, "constraint_sampling", "needs a constraint"),
        ({"constraint_sampling": "x"}, "constraint_sampling", "'mask', 'asap'"),
        # schemas
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema", "a schema"),
        ({"response_format": {"type": "xml"}}, "response_format.type", "'json_object'"),
        (
            {"response_format": schema_of(properties={"a": {"not": {}}})},
            "response_format.json_schema.schema",
            "not supported: #/properties/a/not",
        ),
        ({"guided_json": {"type": "strin"}}, "guided_json", "Invalid type: strin; at #/type"),
        (
            {"response_format": schema_of(properties={"a/b~": {"format": "zip"}})},
            "response_format.json_schema.schema",
            "Unknown format: zip; at #/properties/a~1b~0/format",
        ),
        (
            {"response_format": schema_of(**{"x-guidance": {"lenient": True}})},
            "response_format.json_schema.schema",
            "leave #/x-guidance out",
        ),
        (
            {"guided_json": {"properties": {"a": {"x-guidance": {}}}}},
            "guided_json",
            "leave #/properties/a/x-guidance out",
        ),
        ({"guided_grammar": 'start: "a"\n%llguidance {"bogus": 1}'}, "guided_grammar",
         "line 2: unknown option 'bogus' of %llguidance; known: allow_initial_skip"),
        ({"guided_grammar": "start: start"}, "guided_grammar", "it allows no text at all"),
        ({"guided_json": [1]}, "guided_json", "a JSON schema is an object, got [1]"),
        ({"guided_json": "{"}, "guided_json", "the schema is no JSON"),
        ({"guided_json": "[" * 100_000}, "guided_json", "nested too deeply"),
        ({"guided_json": {"$ref": "http://a.b/c"}}, "guided_json", "not present in a registry"),
        ({"guided_json": False}, "guided_json", "allows no document"),
        ({"guided_json": {"maximum": 10**300}}, "guided_json", ""),
        ({"guided_json": {"description": "x" * 2**20}}, "guided_json", "at most 1048576"),
        (
            {"guided_json": {"properties": {f"k{i}": {} for i in range(60_000)}}},
            "guided_json",
            "schema too large",
        ),
        # grammars and regular expressions
        ({"guided_grammar": " "}, "guided_grammar", "the grammar is empty"),
        ({"guided_grammar": "start: b"}, "guided_grammar", 'unknown name: "b"'),
        ({"guided_grammar": "start: " + "(" * 10**5}, "guided_grammar", "too deeply nested"),
        ({"guided_grammar": 'root ::= "a" | ('}, "guided_grammar", "no GBNF"),
        ({"guided_regex": "a(?=b)"}, "guided_regex", "look-around"),
        ({"guided_regex": "("}, "guided_regex", "regex"),
        ({"guided_regex": "x" * 2**20 + "y"}, "guided_regex", "at most 1048576"),
        ({"guided_choice": []}, "guided_choice", "one or more texts"),
        ({"structured_outputs": {"structural_tag": {}}}, "structured_outputs.structural_tag", ""),
        ({"structured_outputs": {"jsn": 1}}, "structured_outputs.jsn", "did you mean 'json'?"),
        # tools
        ({"tools": [{"type": "function"}]}, "tools.0.function", "is required"),
        ({"tools": [{"type": "custom"}]}, "tools.0.type", "'function'"),
        ({"tools": [F, F]}, "tools.1.function.name", "listed twice"),
        ({"tools": [F], "tool_choice": {"type": "function", "function": {"name": "g"}}},
         "tool_choice.function.name", "unknown function 'g'; known: f"),
        ({"tool_choice": "required"}, "tool_choice", "needs tools"),
        ({"tools": [F], "tool_choice": "always"}, "tool_choice", "'required'"),
        ({"tools": [F], "guided_regex": "a"}, "guided_regex", "cannot be combined with tools"),
        ({"tools": tools_with(type="array")}, "tools.1.function.parameters", "of type object"),
        (
            {"tools": tools_with(properties={"a": {"not": {}}}), "tool_choice": "required"},
            "tools.1.function.parameters",
            "not supported: #/properties/a/not",
        ),
        (
            {"tools": tools_with(**{"x-guidance": {"lenient": True}})},
            "tools.1.function.parameters",
            "leave #/x-guidance out",
        ),
        (
            {"tools": tools_with(properties={"a": {"x-guidance": {}}}), "tool_choice": "required"},
            "tools.1.function.parameters",
            "leave #/properties/a/x-guidance out",
        ),
        (
            {"tools": tools_with(properties={"a/b": {"type": "strin"}})},
            "tools.1.function.parameters",
            "Invalid type: strin; at #/properties/a~1b/type",
        ),
        (
            {"messages": [*USER, {"role": "assistant", "tool_calls": [
                {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{"}}]}]},
            "messages.1.tool_calls.0.function.arguments",
            "expected a JSON object as text",
        ),
    ],
)  # fmt: skip
def test_what_is_refused(server: Served, fields: Any, param: str, said: str) -> None:
    error = refused(server, **fields)
    assert error["param"] == param and said in error["message"], error


linux = pytest.mark.skipif(sys.platform != "linux", reason="workers are forked on Linux only")


@linux
def test_grammars_that_take_too_long_or_crash_their_compiler(tiny_chat: Path) -> None:
    with command(tiny_chat, "--name", "tiny", "--grammar-timeout", 2) as server:
        with ThreadPoolExecutor(1) as pool, stopped_compiler(server, pool) as slow:
            error = slow.result().json()["error"]
            assert error["code"] == "grammar_limit" and "took more than 2 s" in error["message"]
        assert refused(server, guided_grammar=CRASH)["code"] == "grammar_limit"
        server.wait_until(
            lambda: (
                server.post("/v1/chat/completions", json=ASK | {"guided_regex": "ab"}).is_success
            )
        )


@linux
def test_others_are_served_while_a_grammar_is_compiled(tiny_chat: Path) -> None:
    with (
        command(tiny_chat, "--name", "tiny", "--grammar-timeout", 600, "--drain", 0) as server,
        ThreadPoolExecutor(1) as pool,
        stopped_compiler(server, pool) as slow,
    ):
        for i in range(20):
            fields: Any = {"guided_regex": f"[a-z]{{{i + 1}}}", "max_tokens": 30}
            answer = server.post("/v1/chat/completions", json=ASK | fields).json()
            assert len(answer["choices"][0]["message"]["content"]) == i + 1
        assert not slow.done()
        assert server.process is not None
        server.process.terminate()
        assert slow.result().status_code == 503


@contextmanager
def stopped_compiler(server: Served, pool: ThreadPoolExecutor) -> Iterator[Future[httpx.Response]]:
    """A request of which the compiler's process is stopped in the middle of its work."""
    assert server.process is not None
    (fork_server,) = children(server.process.pid)
    body = {"prompt": "a", "max_tokens": 8, "guided_grammar": SLOW}
    slow = pool.submit(server.post, "/v1/completions", json=body)
    server.wait_until(lambda: len(children(fork_server)) == 1, seconds=60.0)
    (compiler,) = children(fork_server)
    os.kill(compiler, signal.SIGSTOP)
    try:
        yield slow
    finally:
        with suppress(ProcessLookupError):
            os.kill(compiler, signal.SIGKILL)


def children(parent: int) -> list[int]:
    """The processes that a process has started."""
    found = []
    for file in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):  # it has ended
            number, _, rest = file.read_text().partition(" ")
            if int(rest.rpartition(")")[2].split()[1]) == parent:
                found.append(int(number))
    return found


def test_grammars_without_an_end_are_cut_and_others_go_on(server: Served) -> None:
    """Left recursion, a rule without text, and work that grows: each request ends."""
    statistics = {"speculation": {"statistics": True}}
    grammars = [
        'start: start "a" | "a"',
        "start: start",
        'start: a a a a a a\na: (b|c|d)*\nb: "x" a?\nc: "x" b?\nd: "x" c?',
        'start: a{1000000}\na: "x"',
    ]
    with ThreadPoolExecutor(8) as pool:
        odd = [
            pool.submit(
                server.post,
                "/v1/chat/completions",
                json=ASK | {"guided_grammar": one, "max_tokens": 20} | statistics,
            )
            for one in grammars
        ]
        good = [
            pool.submit(server.post, "/v1/chat/completions", json=ASK | {"guided_regex": "ab+c"})
            for _ in range(4)
        ]
    for one in odd:
        body = one.result().json()
        if not one.result().is_success:
            assert body["error"]["param"] == "guided_grammar", body
            continue
        valid = body["speculation"]["choices"][0]["constraint"]["valid"]
        assert body["choices"][0]["finish_reason"] == "stop" or not valid
    for one in good:
        (choice,) = one.result().json()["choices"]
        assert re.fullmatch("a|ab+c?", choice["message"]["content"])
    assert "allows no text" in odd[1].result().json()["error"]["message"]


def test_a_grammar_with_slow_masks_fails_its_request_only(server: Served) -> None:
    """400, or an error in the stream; others in the batch go on."""
    hostile = ASK | {"guided_grammar": HOSTILE, "n": 2}
    with ThreadPoolExecutor(4) as pool:
        others = [
            pool.submit(server.post, "/v1/chat/completions", json=ASK | {"guided_regex": "ab{5}"})
            for _ in range(2)
        ]
        error = refused(server, **hostile)
        stream = server.post("/v1/chat/completions", json=hostile | {"stream": True})
    events = [line.removeprefix("data: ") for line in stream.text.split("\n\n") if line]
    for found in (error, json.loads(events[-1])["error"]):
        assert (found["param"], found["code"]) == ("guided_grammar", "grammar_limit")
        assert "Too many items" in found["message"]
    assert all(one.result().json()["choices"] for one in others)
    assert server.metric("forerun:engine_faults_total") == 0


def test_forced_text_without_an_end_is_cut_at_the_limit(server: Served) -> None:
    for endless in ({"guided_regex": "a{1000000000}"}, {"guided_grammar": "start: /a{99}/ start"}):
        (choice,) = server.post("/v1/chat/completions", json=ASK | endless).json()["choices"]
        assert choice["finish_reason"] == "length"
        assert {*choice["message"]["content"]} == {"a"}


def test_a_text_that_no_token_can_end_fails(server: Served, tiny_chat: Path) -> None:
    tokenizer = Tokenizer.load(tiny_chat)
    pieces = tokenizer.token_bytes(tokenizer.vocab_size)
    banned = [token for token, piece in enumerate(pieces) if piece and b"b" in piece]
    error = refused(server, guided_choice=["ab"], banned_tokens=banned)
    assert (error["param"], error["code"]) == ("guided_choice", "no_token_left")


def test_a_schema_at_the_limit_is_compiled_or_refused(server: Served) -> None:
    schema = {"enum": ["x" * 100 + str(i) for i in range(9000)]}
    assert 900_000 < len(json.dumps(schema)) < 2**20
    answer = server.post("/v1/chat/completions", json=ASK | {"guided_json": schema})
    assert answer.is_success or answer.json()["error"]["param"] == "guided_json"


def test_tenants_do_not_see_what_others_have_compiled(tiny_model: Any) -> None:
    """The second request of a tenant is not compiled again, the first of another one is."""
    keys = Keys([("one", "key-one"), ("two", "key-two")])
    with thread(tiny_model, keys) as served:
        calls: list[str] = []
        texts = served.server.service.texts
        call, texts.call = (
            texts.call,
            lambda name, *args: (calls.append(name), call(name, *args))[1],
        )
        for key in ("key-one", "key-one", "key-two"):
            served.client(key).chat.completions.create(
                model="tiny", messages=USER, extra_body={"guided_regex": "abc"}
            )
        assert calls.count("compile") == 2
