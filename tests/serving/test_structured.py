"""Structured answers through the real client and a real server, with drafts."""

from __future__ import annotations

import json
import re
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jsonschema
import openai
import pytest
from random_schemas import UNSUPPORTED, Schema, random_schemas

from served import Served, command

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


def test_samplings_of_the_server_are_listed_and_work(server: Served) -> None:
    """A weighted one gives each finished text its weight."""
    (model,) = server.client().models.list().data
    offered = model.model_extra["speculation"]["constraint_sampling"]
    assert offered[0] == "mask" and not {*offered} - {"mask", "awrs"}
    for how in offered:
        fields = {"guided_regex": "[a-z]{4}", "constraint_sampling": how, **STATISTICS}
        answer = server.client().chat.completions.create(**ASK, n=4, seed=1, extra_body=fields)
        stats = answer.model_extra["speculation"]["choices"]
        for choice, found in zip(answer.choices, stats, strict=True):
            weight = found["constraint"]["logw"]
            if found["constraint"]["valid"]:
                assert re.fullmatch("[a-z]{4}", choice.message.content or "")
                assert weight == 0.0 if how == "mask" else weight <= 0.0
