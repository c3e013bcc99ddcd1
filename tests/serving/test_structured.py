"""Structured answers through the real client and a real server, with drafts."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jsonschema
import openai
import pytest
from random_schemas import UNSUPPORTED, WORDS, Schema, random_schemas

from served import Served

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


@pytest.fixture
def server(drafting_reasoner: Served) -> Served:
    return drafting_reasoner


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


def check_random_schemas(server: Served, count: int) -> Counter[str]:
    """Finished answers and calls are documents of their schema; others are refused by keyword.

    Returns how many answers were finished, cut and refused, and by which keyword.
    """
    found = Counter[str]()
    with server.client() as client:
        for i, schema in enumerate(random_schemas(count)):
            # the reasoner, which knows no JSON, seldom ends where it may add spaces
            dense = {"structured_outputs": {"json": schema, "disable_any_whitespace": True}}
            spaced = {"response_format": format_of(schema)}
            call = ASK | {"seed": i, "extra_body": dense}
            try:
                first = whole(client, 1, **call)
                check_answers(first, schema, found)
                answers = streamed(client, 4, **call)
                check_answers(answers, schema, found)
                check_answers(streamed(client, 1, **ASK, seed=i, extra_body=spaced), schema, found)
                check_answers(whole(client, 4, **ASK, seed=i, extra_body=spaced), schema, found)
            except openai.BadRequestError as error:
                assert error.param in (
                    "response_format.json_schema.schema",
                    "structured_outputs.json",
                )
                keyword = re.search(r"keywords that are not supported: #/(?:.*/)?(\w+)", str(error))
                assert keyword and keyword[1] in WORDS, (schema, str(error))
                found[f"refused {keyword[1]}"] += 1
                continue
            assert not WORDS & {*words_of(schema)}, schema
            check_seed_logprobs_and_stop(client, call, first)
            check_calls(client, schema, i, found)
    print(dict(found))
    return found


def check_answers(
    answers: list[tuple[str, str | None]], schema: Schema, found: Counter[str]
) -> None:
    for text, finish in answers:
        assert finish in ("stop", "length")
        if finish == "stop":
            jsonschema.validate(json.loads(text), schema)
        found[finish] += 1


def check_seed_logprobs_and_stop(
    client: openai.OpenAI, call: Any, first: list[tuple[str, str | None]]
) -> None:
    """The same text streamed, with log-probabilities, and up to a stop string."""
    assert streamed(client, 1, **call) == first
    text, finish = first[0]
    (choice,) = client.chat.completions.create(**call, logprobs=True, top_logprobs=2).choices
    assert (choice.message.content, choice.finish_reason) == (text, finish)
    assert choice.logprobs is not None and choice.logprobs.content is not None
    shown = b"".join(bytes(one.bytes or ()) for one in choice.logprobs.content)
    assert shown.startswith(text.encode())
    stop = text[len(text) // 2 :][:2] or "{"
    ((cut, why),) = whole(client, 1, **call, stop=[stop])
    assert why == "stop" and cut == text[: text.index(stop)]


def check_calls(client: openai.OpenAI, schema: Schema, seed: int, found: Counter[str]) -> None:
    """Required calls of a function with this schema, streamed and not."""
    tool: Any = {"type": "function", "function": {"name": "f", "parameters": schema}}
    call = ASK | {"seed": seed, "tools": [tool], "tool_choice": "required"}
    answer = client.chat.completions.create(**call).choices[0]
    arguments, finish = dict[int, str](), None
    for chunk in client.chat.completions.create(**call, stream=True):
        for choice in chunk.choices:
            for part in choice.delta.tool_calls or ():
                more = (part.function and part.function.arguments) or ""
                arguments[part.index] = arguments.get(part.index, "") + more
            finish = choice.finish_reason or finish
    assert finish == answer.finish_reason
    found[f"call {finish}"] += 1
    if finish == "tool_calls":
        made = [call.function for call in answer.message.tool_calls or ()]  # type: ignore[union-attr]
        assert made and all(call.name == "f" for call in made)
        assert [call.arguments for call in made] == [arguments[i] for i in range(len(made))]
        for call in made:
            jsonschema.validate(json.loads(call.arguments), schema)


def words_of(schema: Any) -> Iterator[str]:
    """All keywords and names in a schema."""
    if isinstance(schema, list):
        for one in schema:
            yield from words_of(one)
    elif isinstance(schema, dict):
        for name, value in schema.items():
            yield name
            yield from words_of(value)


def test_four_random_schemas(server: Served) -> None:
    assert check_random_schemas(server, 4)["stop"]


@pytest.mark.slow
def test_two_hundred_random_schemas(server: Served) -> None:
    found = check_random_schemas(server, 200)
    assert found["stop"] > (found["stop"] + found["length"]) / 3
    assert found["call tool_calls"] > 20
    assert sum(found[key] for key in found if "refused" in key) < 100


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
        ({"structured_outputs": {"regex": "a|b"}}, lambda text: text in ("a", "b")),
        ({"structured_outputs": {"choice": ["c", "d"]}}, lambda text: text in ("c", "d")),
        ({"structured_outputs": {"grammar": 'start: "e"'}}, lambda text: text == "e"),
        (
            {"structured_outputs": {"json_object": True}},
            lambda text: isinstance(json.loads(text), dict),
        ),
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


def test_a_seed_gives_the_same_text_streamed_or_not_among_others(
    server: Served,
) -> None:
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


@pytest.mark.parametrize("how", ["mask", "asap", "awrs"])
def test_texts_without_the_marker_are_answered_as_not_valid(server: Served, how: str) -> None:
    """All of them, streamed or not, whether they ended by themselves or were cut."""
    body: Any = {"guided_choice": ["one"], "constraint_start": "no such marker", **STATISTICS}
    body |= {"constraint_sampling": how}
    for limit in (4, 200):
        call = ASK | {"seed": 1, "n": 3, "max_tokens": limit, "extra_body": body}
        answer = server.client().chat.completions.create(**call)
        statistics = [answer.model_extra["speculation"]]
        assert len({*(choice.index for choice in answer.choices)}) == 3
        assert all(choice.message.content for choice in answer.choices)
        assert all(choice.finish_reason in ("stop", "length") for choice in answer.choices)
        chunks = list(server.client().chat.completions.create(**call, stream=True))
        statistics += [
            c.model_extra["speculation"] for c in chunks if "speculation" in c.model_extra
        ]
        for found in statistics:
            assert len(found["choices"]) == 3
            for one in found["choices"]:
                assert one["constraint"]["valid"] is False and "error" not in one["constraint"]
                missing = "the marker 'no such marker' did not come"
                assert one["constraint"]["missing"] == missing
                assert one["constraint"]["logw"] == (None if how == "awrs" else 0.0)
        assert len(statistics) == 2


def test_samplings_of_the_server_are_listed_and_work(server: Served) -> None:
    """A weighted one gives each finished text its weight."""
    (model,) = server.client().models.list().data
    offered = model.model_extra["speculation"]["constraint_sampling"]
    assert offered[0] == "mask" and not {*offered} - {"mask", "asap", "awrs"}
    for how in offered:
        fields = {"guided_regex": "[a-z]{4}", "constraint_sampling": how, **STATISTICS}
        answer = server.client().chat.completions.create(**ASK, n=4, seed=1, extra_body=fields)
        stats = answer.model_extra["speculation"]["choices"]
        for choice, found in zip(answer.choices, stats, strict=True):
            weight = found["constraint"]["logw"]
            if found["constraint"]["valid"]:
                assert re.fullmatch("[a-z]{4}", choice.message.content or "")
                assert weight <= 0.0 if how == "awrs" else weight == 0.0
