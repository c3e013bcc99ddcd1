"""Structured answers through the real client and a real server, with drafts."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jsonschema
import openai
import pytest
from random_schemas import UNSUPPORTED, Schema, random_schemas

from forerun.serving.request_parser import parse
from forerun.serving.schemas import ChatRequest
from served import Served, command, scripted, thread

pytest.importorskip("llguidance")

MESSAGES: Any = [{"role": "user", "content": "Ann has 3 boxes with 12 pens each."}]
PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 9}, "age": {"type": "integer"}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
NUMBER = {"type": "object", "properties": {"x": {"type": "integer", "minimum": 1, "maximum": 9}}}
NUMBER |= {"required": ["x"], "additionalProperties": False}
STATISTICS = {"speculation": {"statistics": True}}
ASK: Any = {"model": "reasoner", "messages": MESSAGES, "max_tokens": 200}


@pytest.fixture(scope="module")
def server() -> Any:
    with command("reasoner", "--max-seqs", 8, "--controller", "fixed") as served:
        yield served


def tool(name: str, schema: Schema | None) -> Any:
    more = {} if schema is None else {"parameters": schema}
    return {"type": "function", "function": {"name": name, "description": name} | more}


def format_of(schema: Schema, **more: Any) -> Any:
    return {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema} | more}


def streamed(client: openai.OpenAI, n: int, **call: Any) -> list[tuple[str, str | None]]:
    """Text and finish reason of each choice of a stream."""
    found: list[tuple[str, str | None]] = [("", None)] * n
    for chunk in client.chat.completions.create(**call, n=n, stream=True):
        for choice in chunk.choices:
            text, finish = found[choice.index]
            text += choice.delta.content or ""
            found[choice.index] = text, choice.finish_reason or finish
    return found


def whole(client: openai.OpenAI, n: int, **call: Any) -> list[tuple[str, str | None]]:
    answer = client.chat.completions.create(**call, n=n)
    return [(choice.message.content or "", choice.finish_reason) for choice in answer.choices]


def check_random_schemas(server: Served, count: int) -> None:
    """Finished answers are documents of their schema; unsupported schemas are refused by path."""
    client, finishes, num_refused = server.client(), list[str | None](), 0
    for i, schema in enumerate(random_schemas(count)):
        # the reasoner, which knows no JSON, seldom ends where it may add spaces
        dense = {"structured_outputs": {"json": schema, "disable_any_whitespace": True}}
        spaced = {"response_format": format_of(schema)}
        for ask, n, fields in (
            (whole, 1, dense),
            (streamed, 4, dense),
            (streamed, 1, dense),
            (whole, 4, spaced),
        ):
            try:
                found = ask(client, n, **ASK, seed=i, extra_body=fields)
            except openai.BadRequestError as error:
                assert error.param in (
                    "response_format.json_schema.schema",
                    "structured_outputs.json",
                )
                assert "keywords that are not supported: #/" in str(error), schema
                num_refused += 1
                break
            for text, finish in found:
                assert finish in ("stop", "length")
                if finish == "stop":
                    jsonschema.validate(json.loads(text), schema)
                finishes.append(finish)
    assert finishes.count("stop") > len(finishes) / 3, (len(finishes), finishes.count("stop"))
    assert num_refused < count / 2


def test_ten_random_schemas(server: Served) -> None:
    check_random_schemas(server, 10)


@pytest.mark.slow
def test_two_hundred_random_schemas(server: Served) -> None:
    check_random_schemas(server, 200)


def test_unsupported_schemas_of_the_generator_are_refused_by_path(server: Served) -> None:
    for leaf in UNSUPPORTED:
        schema = {"type": "object", "properties": {"deep": {"items": leaf, "type": "array"}}}
        with pytest.raises(openai.BadRequestError, match="#/properties/deep/items/") as caught:
            whole(server.client(), 1, **ASK, response_format=format_of(schema))
        assert caught.value.param == "response_format.json_schema.schema"


def test_every_field_constrains(server: Served) -> None:
    client = server.client()
    json_object = {"response_format": {"type": "json_object"}}
    lark = 'start: "a" b+\nb: /[0-9]/ ";"'
    for fields, holds in (
        (json_object, lambda text: isinstance(json.loads(text), dict)),
        ({"response_format": format_of(NUMBER, strict=False)}, lambda t: json.loads(t)["x"]),
        ({"guided_json": NUMBER}, lambda text: json.loads(text)["x"]),
        ({"guided_json": json.dumps(NUMBER)}, lambda text: json.loads(text)["x"]),
        ({"guided_regex": "[ab]{3}"}, lambda text: len(text) == 3 and not {*text} - {*"ab"}),
        ({"guided_choice": ["yes", "no way"]}, lambda text: text in ("yes", "no way")),
        ({"guided_grammar": lark}, lambda text: text[0] == "a" and text[-1] == ";"),
        ({"guided_grammar": 'root ::= "x" [yz]'}, lambda text: text in ("xy", "xz")),
        ({"structured_outputs": {"json": NUMBER}}, lambda text: json.loads(text)["x"]),
        ({"structured_outputs": {"regex": "a|b"}}, lambda text: text in "ab"),
        ({"structured_outputs": {"choice": ["c", "d"]}}, lambda text: text in "cd"),
        ({"structured_outputs": {"grammar": 'start: "e"'}}, lambda text: text == "e"),
        ({"structured_outputs": {"json_object": True}}, lambda text: json.loads(text) is not None),
    ):
        call: Any = {"model": "reasoner", "max_tokens": 200, "seed": 4, "extra_body": fields}
        chat = client.chat.completions.create(messages=MESSAGES, **call).choices[0]
        plain = client.completions.create(prompt="Problem: 1 and 1?", **call).choices[0]
        assert chat.finish_reason == "length" or holds(chat.message.content or ""), fields
        assert plain.finish_reason == "length" or holds(plain.text), fields


def test_spaces_between_tokens_of_json_can_be_turned_off(server: Served) -> None:
    outputs = {"json": NUMBER, "disable_any_whitespace": True}
    for text, finish in whole(
        server.client(), 4, **ASK, extra_body={"structured_outputs": outputs}, temperature=1.5
    ):
        assert finish == "stop" and " " not in text and "\n" not in text


def test_statistics_say_whether_the_text_is_valid(server: Served) -> None:
    schema = format_of(PERSON)
    for limit in (3, 200):
        call = ASK | {"max_tokens": limit, "response_format": schema, "seed": 8}
        answer = server.client().chat.completions.create(**call, extra_body=STATISTICS, n=2)
        for choice, stats in zip(
            answer.choices, answer.model_extra["speculation"]["choices"], strict=True
        ):
            found = stats["constraint"]
            assert found["valid"] == (choice.finish_reason == "stop")
            assert found["logw"] == 0.0 and found["masks"] > 0 and found["tests"] >= 0
    plain = server.client().chat.completions.create(**ASK, extra_body=STATISTICS)
    assert "constraint" not in plain.model_extra["speculation"]["choices"][0]


def test_metrics_count_constrained_samples(server: Served) -> None:
    name = "forerun:constrained_samples_total"
    before, masks = server.metric(name), server.metric("forerun:constraint_masks_total")
    whole(server.client(), 3, **ASK, extra_body={"guided_choice": ["a", "b"]})
    assert server.metric(name) == before + 3
    assert server.metric("forerun:constraint_masks_total") > masks
    assert server.metric("forerun:grammar_compile_seconds_total") > 0


def test_a_seed_gives_the_same_text_streamed_or_not_and_beside_others(server: Served) -> None:
    call = ASK | {"response_format": format_of(PERSON), "seed": 5, "temperature": 0.9}
    client = server.client()
    expected = whole(client, 2, **call)
    with ThreadPoolExecutor(4) as pool:
        others = [
            pool.submit(whole, client, 1, **ASK, extra_body={"guided_regex": "[a-z ]{40}"}, seed=i)
            for i in range(3)
        ]
        assert streamed(client, 2, **call) == expected
    assert all(len(one.result()[0][0]) == 40 for one in others)


def test_greedy_text_does_not_depend_on_drafts_or_a_prediction(server: Served) -> None:
    call = ASK | {"response_format": format_of(PERSON), "temperature": 0.0}
    plain = whole(server.client(), 1, **call, extra_body={"speculation": {"max_nodes": 0}})
    for more in (
        {"extra_body": {"speculation": {"method": "stand"}}},
        {"extra_body": {"speculation": {"method": "auto", "max_nodes": 16}}},
        {"prediction": {"type": "content", "content": '{"name": "Ann", "age": 12} and more'}},
    ):
        assert whole(server.client(), 1, **call, **more) == plain


def test_logprobs_and_stop_strings_stay_right(server: Served) -> None:
    call = ASK | {"extra_body": {"guided_regex": "[ab]{4}X[ab]{4}"}, "seed": 2}
    answer = server.client().chat.completions.create(**call, logprobs=True, top_logprobs=2)
    (choice,) = answer.choices
    assert choice.logprobs is not None and choice.logprobs.content is not None
    shown = b"".join(bytes(one.bytes or ()) for one in choice.logprobs.content)
    assert shown.decode().startswith(choice.message.content or "?")
    assert all(one.logprob <= 0 and len(one.top_logprobs) == 2 for one in choice.logprobs.content)
    cut = server.client().chat.completions.create(
        **call | {"extra_body": call["extra_body"] | STATISTICS}, stop=["X"]
    )
    assert cut.choices[0].message.content == (choice.message.content or "")[:4]
    assert cut.choices[0].finish_reason == "stop"
    assert not cut.model_extra["speculation"]["choices"][0]["constraint"]["valid"]


def test_a_grammar_that_starts_after_a_text(server: Served) -> None:
    body = {"guided_choice": ["one", "two"], "constraint_start": " is", **STATISTICS}
    answer = server.client().chat.completions.create(**ASK, n=4, seed=1, extra_body=body)
    stats = answer.model_extra["speculation"]["choices"]
    for choice, found in zip(answer.choices, stats, strict=True):
        _, start, rest = (choice.message.content or "").partition(" is")
        assert found["constraint"]["valid"] == (bool(start) and rest in ("one", "two"))
    assert any(found["constraint"]["valid"] for found in stats)


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
    from forerun.serving.service import Service
    from forerun.serving.settings import Settings

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
    assert shown(tiny_model, tools=[tool("g", None)], messages=[first, TURNS[0]]).startswith("[system] Be brief.")
