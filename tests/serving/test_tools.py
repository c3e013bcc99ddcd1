"""Tool calls through the real client and a real server, and what models see of tools."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jsonschema
import openai
import pytest
from random_schemas import Schema

from forerun.serving.request_parser import parse
from forerun.serving.schemas import ChatRequest
from forerun.serving.service import Service
from forerun.serving.settings import Settings
from served import Served, scripted, thread

pytest.importorskip("llguidance")

MESSAGES: Any = [{"role": "user", "content": "Ann has 3 boxes with 12 pens each."}]
ASK: Any = {"model": "reasoner", "messages": MESSAGES, "max_tokens": 200}
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 9},
        "age": {"type": "integer", "minimum": 0, "maximum": 99},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}
NUMBER = {"type": "object", "properties": {"x": {"type": "integer", "minimum": 1, "maximum": 9}}}
NUMBER |= {"required": ["x"], "additionalProperties": False}


@pytest.fixture
def server(drafting_reasoner: Served) -> Served:
    return drafting_reasoner


def tool(name: str, schema: Schema | None) -> Any:
    more = {} if schema is None else {"parameters": schema}
    return {"type": "function", "function": {"name": name, "description": name} | more}


def format_of(schema: Schema, **more: Any) -> Any:
    return {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema} | more}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("n", [1, 4])
@pytest.mark.parametrize(
    "choice", ["required", {"type": "function", "function": {"name": "second"}}]
)
def test_calls_that_must_be_made(server: Served, choice: Any, n: int, stream: bool) -> None:
    tools = [tool("first", NUMBER), tool("second", PERSON), tool("third", None)]
    for calls, content, finish in called(
        server.client(), n, stream, tools=tools, tool_choice=choice, seed=6
    ):
        assert not content and (finish == "tool_calls" or finish == "length")
        for i, (name, arguments) in enumerate(calls):
            is_last = i == len(calls) - 1
            assert choice == "required" or (name == "second" and len(calls) == 1)
            if finish == "tool_calls" or not is_last:
                schema = {"first": NUMBER, "second": PERSON, "third": {"maxProperties": 0}}[name]
                jsonschema.validate(json.loads(arguments), schema)
        assert calls or finish == "length"


def called(
    client: openai.OpenAI, n: int, stream: bool, **call: Any
) -> list[tuple[list[tuple[str, str]], str, str | None]]:
    """Calls (name and arguments), content and finish reason of each choice, by the client."""
    call = ASK | call
    if not stream:
        answer = client.chat.completions.create(**call, n=n)
        return [
            (
                [(c.function.name, c.function.arguments) for c in one.message.tool_calls or ()],
                one.message.content or "",
                one.finish_reason,
            )
            for one in answer.choices
        ]
    found: list[Any] = [([], "", None) for _ in range(n)]
    for chunk in client.chat.completions.create(**call, n=n, stream=True):
        for one in chunk.choices:
            calls, content, finish = found[one.index]
            for delta in one.delta.tool_calls or ():
                if delta.index == len(calls):  # first its id and name
                    assert delta.id and delta.function.name and delta.type == "function"
                    calls.append((delta.function.name, ""))
                else:
                    assert delta.id is None and delta.function.name is None
                name, arguments = calls[delta.index]
                calls[delta.index] = name, arguments + (delta.function.arguments or "")
            content += one.delta.content or ""
            found[one.index] = calls, content, one.finish_reason or finish
    return found


def test_streamed_calls_equal_whole_ones(server: Served) -> None:
    call = {"tools": [tool("f", PERSON), tool("g", NUMBER)], "tool_choice": "required", "seed": 3}
    assert called(server.client(), 4, True, **call) == called(server.client(), 4, False, **call)
    call["parallel_tool_calls"] = False  # the helper raises for a text that max_tokens cut
    with server.client().chat.completions.stream(**ASK, **call) as events:
        (choice,) = events.get_final_completion().choices
    ((calls, _, finish),) = called(server.client(), 1, False, **call)
    assert choice.finish_reason == finish == "tool_calls"
    assert [(c.function.name, c.function.arguments) for c in choice.message.tool_calls] == calls


def test_one_call_only_without_parallel_calls(server: Served) -> None:
    call: Any = {"tools": [tool("g", NUMBER)], "tool_choice": "required", "seed": 3}
    for calls, _, finish in called(server.client(), 4, False, **call, parallel_tool_calls=False):
        assert len(calls) == 1 and finish == "tool_calls"


CALL = '<tool_call>\n{"name": "g", "arguments": {"x": 4}}\n</tool_call>'


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("said", "choice", "calls", "content"),
    [
        (f"one two\n{CALL}", "auto", [("g", '{"x": 4}')], "one two"),
        (f"{CALL}\n{CALL}", "auto", [("g", '{"x": 4}')] * 2, ""),
        ("one <tool two", "auto", [], "one <tool two"),
        (f"one {CALL}", "none", [], f"one {CALL}"),
        ('<tool_call>\n{"name": "h", "arguments": 1}', "auto", None, ""),  # "h" is forbidden
    ],
)
def test_auto_takes_calls_out_of_the_text(
    tiny_chat: Path, said: str, choice: str, calls: Any, content: str, stream: bool
) -> None:
    """A model that says one text and ends."""
    model = scripted(tiny_chat, said)
    model.target.script.append(model.tokenizer.eos_ids[0])
    body: Any = {"model": "tiny", "messages": [{"role": "user", "content": "go"}]}
    body |= {"temperature": 0.0, "tools": [tool("g", NUMBER)], "tool_choice": choice}
    with thread(model) as served:
        intake = served.server.service.intake
        job = intake.chat(parse(ChatRequest, json.dumps(body).encode()), "")
        model.target.start = len(job.prompts[0])
        ((found, text, finish),) = called(served.client(), 1, stream, **body, max_tokens=150)
    if calls is None:
        assert found[0][0] == "g" and finish in ("tool_calls", "length") and not text
    else:
        assert (found, text) == (calls, content)
        assert finish == ("tool_calls" if calls else "stop")


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("stop", "calls", "content", "finish"),
    [
        ('"x"', [], '<tool_call>\n{"name": "g", "arguments": {', "stop"),
        ("\n", [], "<tool_call>", "stop"),
        ("</tool_call>", [("g", '{"x": 4}')], "", "tool_calls"),
    ],
)
def test_a_stop_string_in_a_required_call(
    tiny_chat: Path, stop: str, calls: Any, content: str, finish: str, stream: bool
) -> None:
    """It ends the answer. A call that it cuts is content, never a call with broken arguments."""
    model = scripted(tiny_chat, CALL)
    body: Any = {"model": "tiny", "messages": [{"role": "user", "content": "go"}], "stop": stop}
    body |= {"temperature": 0.0, "tools": [tool("g", NUMBER)], "tool_choice": "required"}
    with thread(model) as served:
        job = served.server.service.intake.chat(parse(ChatRequest, json.dumps(body).encode()), "")
        model.target.start = len(job.prompts[0])
        found = called(served.client(), 1, stream, **body, max_tokens=150)
    assert found == [(calls, content, finish)]


def test_an_answer_is_a_document_or_calls_where_both_are_offered(server: Served) -> None:
    call: Any = {"tools": [tool("g", NUMBER)], "response_format": format_of(NUMBER)}
    for calls, content, finish in called(server.client(), 8, False, **call, seed=1):
        if finish == "tool_calls":
            assert calls and not content
        elif finish == "stop":
            jsonschema.validate(json.loads(content), NUMBER)


TEMPLATE = (
    "{% if tools %}{% for t in tools %}{{ t | tojson }}|{% endfor %}{% endif %}"
    "{% for m in messages %}{{ m.role }}: {{ m.content }}{% for c in m.tool_calls %}<tool_call>"
    "{{ c.function.name }} {{ c.function.arguments.x }}{% endfor %}|{% endfor %}"
)
TURNS: Any = [
    {"role": "user", "content": "hi"},
    {
        "role": "assistant",
        "content": None,
        "tool_calls": [
            {"id": "c1", "type": "function", "function": {"name": "g", "arguments": '{"x": 4}'}}
        ],
    },
    {"role": "tool", "tool_call_id": "c1", "content": "36"},
]


def shown(model: Any, **body: Any) -> str:
    """The prompt that a model gets."""
    intake = Service(model, Settings()).intake
    job = intake.chat(parse(ChatRequest, json.dumps({"messages": TURNS} | body).encode()), "")
    return model.tokenizer.decode(job.prompts[0])


def test_templates_with_and_without_tools(tiny_model: Any) -> None:
    inner, tools = tiny_model.tokenizer.inner, [tool("g", NUMBER)]
    inner.chat_template = TEMPLATE
    text = shown(tiny_model, tools=tools)
    function = {"name": "g", "description": "g", "parameters": NUMBER}
    assert json.loads(text.split("|")[0]) == {"type": "function", "function": function}
    assert text.split("|")[1:] == ["user: hi", "assistant: <tool_call>g 4", "tool: 36", ""]
    assert "function" not in shown(tiny_model, tools=tools, tool_choice="none")

    inner.chat_template = "{% for m in messages %}[{{ m.role }}] {{ m.content }}{% endfor %}"
    text = shown(tiny_model, tools=[tool("g", None)])
    assert text.startswith("[system] ") and '"name": "g"' in text.split("[user]")[0]
    assert text.split("[assistant] ")[1] == (
        '<tool_call>\n{"name": "g", "arguments": {"x": 4}}\n</tool_call>'
        "[user] <tool_response>\n36\n</tool_response>"
    )
    first = {"role": "system", "content": "Be brief."}
    text = shown(tiny_model, tools=[tool("g", None)], messages=[first, TURNS[0]])
    assert text.startswith("[system] Be brief.")
