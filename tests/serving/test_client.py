"""The real OpenAI client against the real server."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import openai
import pytest

from served import GO, TEXT, Served, scripted, thread

PROBLEM = "Problem: Ann has 3 boxes with 12 pens each. How many pens does she have?\nSolution:\n"


def test_models_are_listed(reasoner: Served) -> None:
    (model,) = reasoner.client().models.list().data
    assert model.id == "reasoner" and model.model_extra is not None
    assert model.model_extra["max_model_len"] == 1024
    assert "stand" in model.model_extra["speculation"]["methods"]
    assert reasoner.client().models.retrieve("reasoner").id == "reasoner"


def test_a_completion_with_usage_and_statistics(reasoner: Served) -> None:
    answer = reasoner.client().completions.create(
        model="reasoner",
        prompt=PROBLEM,
        max_tokens=40,
        temperature=0.0,
        extra_body={"speculation": {"method": "stand", "max_nodes": 4, "statistics": True}},
    )
    assert answer.object == "text_completion" and answer.choices[0].finish_reason == "length"
    assert answer.usage is not None and answer.usage.completion_tokens == 40
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + 40
    stats = answer.model_extra["speculation"]
    assert stats["method"] == "stand" and stats["generated"] == 40
    assert stats["drafted"] <= 4 * stats["passes"]
    assert answer.model_extra["metrics"]["speculative_decoding"]["num_spec_steps"] > 0


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("method", ["none", "stand", "prompt_lookup"])
def test_streaming_equals_non_streaming(reasoner: Served, method: str, temperature: float) -> None:
    client = reasoner.client()
    call = {
        "model": "reasoner",
        "prompt": PROBLEM,
        "max_tokens": 60,
        "temperature": temperature,
        "seed": 7,
        "n": 3,
        "extra_body": {"speculation": {"method": method}},
    }
    whole = client.completions.create(**call)
    texts, ends = ["", "", ""], [None, None, None]
    for chunk in client.completions.create(**call, stream=True):
        for choice in chunk.choices:
            texts[choice.index] += choice.text
            ends[choice.index] = choice.finish_reason or ends[choice.index]
    assert texts == [choice.text for choice in whole.choices]
    assert ends == [choice.finish_reason for choice in whole.choices]
    assert temperature == 0 or len(set(texts)) == 3


def test_chat_in_one_piece_and_in_chunks(chat: Served) -> None:
    client = chat.client()
    messages = [{"role": "user", "content": [{"type": "text", "text": "the cat sat"}]}]
    call = {"model": "tiny", "messages": messages, "max_completion_tokens": 24, "seed": 3}
    whole = client.chat.completions.create(**call)
    stream = client.chat.completions.create(
        **call, stream=True, stream_options={"include_usage": True}
    )
    chunks = list(stream)
    assert chunks[0].choices[0].delta.role == "assistant"
    text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert text == whole.choices[0].message.content
    assert chunks[-1].choices == [] and chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens
    assert all(c.usage is None for c in chunks[:-1])


def test_usage_in_every_chunk(chat: Served) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    call = {"model": "tiny", "messages": [{"role": "user", "content": "the cat"}], "n": 2}
    stream = chat.client().chat.completions.create(
        **call, max_tokens=24, seed=3, stream=True, stream_options=options
    )
    counts = [chunk.usage for chunk in stream]
    assert {usage.prompt_tokens for usage in counts} == {counts[-1].prompt_tokens}
    said = [usage.completion_tokens for usage in counts]
    assert said[:2] == [0, 0] and said == sorted(said) and len(set(said)) > 3
    assert said[-2] == said[-1] and counts[-2].total_tokens == counts[-1].total_tokens


def test_log_probabilities_of_a_chat_in_chunks_are_those_of_the_whole(chat: Served) -> None:
    call = {"model": "tiny", "messages": [{"role": "user", "content": "the cat"}], "seed": 3}
    call |= {"max_tokens": 24, "logprobs": True, "top_logprobs": 2}
    client = chat.client()
    whole = client.chat.completions.create(**call).choices[0].logprobs.content
    chunks = client.chat.completions.create(**call, stream=True)
    parts = [c.choices[0].logprobs for c in chunks if c.choices and c.choices[0].logprobs]
    told = [row for part in parts for row in part.content]
    assert [row.token for row in told] == [row.token for row in whole]
    assert len(told) > 8
    assert [row.logprob for row in told] == pytest.approx([row.logprob for row in whole], abs=1e-4)
    assert all(len(row.top_logprobs) == 2 for row in told)
    assert all(row.top_logprobs[0].logprob >= row.logprob - 1e-6 for row in told)


@pytest.mark.parametrize("streams", [False, True])
def test_predicted_outputs_by_the_client_s_own_parameter(reasoner: Served, streams: bool) -> None:
    create = reasoner.client().chat.completions.create
    user = PROBLEM.removeprefix("Problem: ").partition("\n")[0]
    call = {"model": "reasoner", "messages": [{"role": "user", "content": user}], "temperature": 0}
    call |= {"max_completion_tokens": 60, "seed": 0}
    plain = create(**call)
    said = plain.choices[0].message.content
    assert plain.usage.completion_tokens_details.accepted_prediction_tokens == 0
    call["prediction"] = {"type": "content", "content": said.replace("Ann", "Eve", 1)}
    if streams:
        *parts, last = create(**call, stream=True, stream_options={"include_usage": True})
        text, usage = "".join(c.choices[0].delta.content or "" for c in parts), last.usage
    else:
        answer = create(**call)
        text, usage = answer.choices[0].message.content, answer.usage
    assert text == said
    assert usage.completion_tokens_details.accepted_prediction_tokens > 10


def test_the_client_comes_again_by_itself_when_the_queue_was_full(tiny_chat: Path) -> None:
    slow = scripted(tiny_chat, TEXT, seconds=0.005)
    with thread(slow, max_seqs=1, max_waiting=1) as served, ThreadPoolExecutor(4) as pool:
        client = served.client(max_retries=5)
        body = GO | {"max_tokens": 40, "extra_body": {"speculation": {"method": "none"}}}
        found = list(pool.map(lambda _: client.completions.create(**body), range(4)))
        assert {answer.usage.completion_tokens for answer in found} == {40}
        assert served.metric("forerun:request_errors_total") >= 1  # 429 came, with Retry-After


def test_the_reasoner_speaks_chat_in_its_own_form(reasoner: Served) -> None:
    client = reasoner.client()
    user = PROBLEM.removeprefix("Problem: ").partition("\n")[0]
    said = client.chat.completions.create(
        model="reasoner",
        messages=[{"role": "user", "content": user}],
        temperature=0,
        max_tokens=40,
    )
    plain = client.completions.create(
        model="reasoner", prompt=PROBLEM, temperature=0, max_tokens=40
    )
    assert said.choices[0].message.content == plain.choices[0].text


def test_an_error_reaches_the_client_as_its_own(reasoner: Served) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        reasoner.client().completions.create(
            model="reasoner", prompt="x", extra_body={"speculation": {"method": "stend"}}
        )
    assert "did you mean 'stand'?" in caught.value.message
    assert caught.value.code == "unknown_method" and caught.value.param == "speculation.method"


@pytest.mark.parametrize("plain", [{"method": "none"}, {"method": "stand", "max_nodes": 0}])
def test_plain_decoding_copies_no_prediction(tiny_chat: Path, plain: dict[str, object]) -> None:
    with thread(scripted(tiny_chat, TEXT)) as served:
        body = GO | {"max_tokens": 40, "prediction": {"type": "content", "content": TEXT}}
        for spec, copies in (({}, True), (plain, False)):
            asked = body | {"speculation": spec | {"statistics": True}}
            told = served.post("/v1/completions", json=asked).json()
            details = told["usage"]["completion_tokens_details"]
            assert (details["accepted_prediction_tokens"] > 0) is copies
            assert (told["speculation"]["drafted"] > 0) is copies


def test_the_default_method_is_auto(chat: Served) -> None:
    told = chat.client().models.retrieve("tiny").model_extra["speculation"]
    assert told["default"] == "auto" and told["lossless"]
    body = {"prompt": "the cat", "max_tokens": 4, "speculation": {"statistics": True}}
    assert chat.post("/v1/completions", json=body).json()["speculation"]["method"] == "auto"
