"""The text is that of plain decoding, however it was drafted and however it is sent."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
from spm import ids, says, spm

import forerun
from forerun.core.cost import Cost
from served import Served, scripted, thread

TEXT = "one two three four five STOP six seven eight nine ten "
WIDE = "Zoë 你好 \U0001f642\U0001f642 done "
PROBLEM = "Problem: Ann has 3 boxes with 12 pens each. How many pens does she have?\nSolution:\n"


def streamed(served: Served, **call: Any) -> tuple[str, list[Any]]:
    """The joined text of a streamed completion, and its choices chunk by chunk."""
    stream = served.client().completions.create(stream=True, **call)
    choices = [choice for chunk in stream for choice in chunk.choices]
    return "".join(choice.text for choice in choices), choices


@pytest.mark.parametrize("stop", ["STOP", ["x", "P six"], "seven eight", "ten one two"])
def test_a_stop_string_inside_an_accepted_block(tiny_chat: Path, stop: str | list[str]) -> None:
    """The prediction is right, so that whole blocks are accepted and the stop lies within one."""
    model = scripted(tiny_chat, TEXT)
    twice = TEXT + TEXT
    expected = twice[: twice.index(stop if isinstance(stop, str) else stop[1])]
    call = {
        "model": "tiny",
        "prompt": "go",
        "stop": stop,
        "max_tokens": 200,
        "temperature": 0,
        "logprobs": 1,
        "extra_body": {"prediction": {"type": "content", "content": twice}},
    }
    with thread(model) as served:
        whole = served.client().completions.create(**call)
        text, choices = streamed(served, **call)
    assert whole.choices[0].text == text == expected
    assert whole.choices[0].finish_reason == choices[-1].finish_reason == "stop"
    details = whole.usage.completion_tokens_details
    assert details.accepted_prediction_tokens > 8
    tokens = [token for choice in choices for token in choice.logprobs.tokens]
    assert tokens == whole.choices[0].logprobs.tokens
    assert len(tokens) == whole.usage.completion_tokens
    assert "".join(tokens).startswith(expected)  # the last token may reach into the stop string
    assert len("".join(tokens[:-1])) < len(expected)


def test_characters_split_across_tokens_come_whole(tiny_chat: Path) -> None:
    model = scripted(tiny_chat, WIDE)
    length = len(model.tokenizer.encode(WIDE))
    assert length > len(WIDE), "characters must lie across tokens"
    call = {"model": "tiny", "prompt": "go", "temperature": 0, "logprobs": 0}
    with thread(model) as served:
        for method in ("none", "prompt_lookup"):
            extra = {"extra_body": {"speculation": {"method": method}}}
            text, choices = streamed(served, **call, **extra, max_tokens=3 * length)
            assert text == 3 * WIDE
            assert all("\ufffd" not in choice.text for choice in choices)
            offsets = [o for choice in choices for o in choice.logprobs.text_offset]
            assert len(offsets) == 3 * length and offsets == sorted(offsets)
        cut = served.client().completions.create(**call, max_tokens=length - 6)
        assert WIDE.startswith(cut.choices[0].text.rstrip("\ufffd"))


def test_bytes_of_tokens_join_to_the_text(tiny_chat: Path) -> None:
    model = scripted(tiny_chat, WIDE)
    length = len(model.tokenizer.encode(WIDE))
    user = [{"role": "user", "content": "x"}]
    with thread(model) as served:
        said = served.client().chat.completions.create(
            model="tiny", messages=user, max_tokens=length, temperature=0, logprobs=True
        )
    (choice,) = said.choices
    joined = b"".join(bytes(token.bytes) for token in choice.logprobs.content)
    assert joined.decode("utf-8", "replace") == choice.message.content


@pytest.mark.parametrize("method", ["stand", "prompt_lookup"])
def test_logprobs_equal_those_of_plain_decoding(chat: Served, tiny_chat: Path, method: str) -> None:
    call = {
        "model": "tiny",
        "prompt": "the cat sat on the mat",
        "max_tokens": 40,
        "temperature": 0,
        "seed": 0,
        "logprobs": 3,
        "extra_body": {"speculation": {"method": method}},
    }
    model = forerun.load(tiny_chat)
    options = {"temperature": 0.0, "max_new_tokens": 40, "logprobs": 3}
    (plain,) = model.generate(call["prompt"], drafter="none", **options)
    found = chat.client().completions.create(**call).choices[0]
    assert found.text == plain.text
    expected = plain.samples[0].logprobs
    own = [row[token] for row, token in zip(expected, plain.samples[0].tokens, strict=True)]
    assert found.logprobs.token_logprobs == pytest.approx(own, abs=1e-4)
    for got, row in zip(found.logprobs.top_logprobs, expected, strict=True):
        assert sorted(got.values()) == pytest.approx(sorted(row.values()), abs=1e-4)
    _, choices = streamed(chat, **call)
    joined = [value for choice in choices for value in choice.logprobs.token_logprobs]
    assert joined == pytest.approx(found.logprobs.token_logprobs, abs=1e-4)


def alone_and_in_company(served: Served, most: int, rounds: int) -> tuple[list[str], list[Any]]:
    """What a call with a seed is answered before others come, and then beside them."""
    call = {"model": "reasoner", "prompt": PROBLEM, "max_tokens": most, "seed": 11, "n": 2}

    def ask() -> list[str]:
        return [choice.text for choice in served.client().completions.create(**call).choices]

    alone, crowded = ask(), []
    for _ in range(rounds):
        others = [
            threading.Thread(
                target=served.client().completions.create,
                kwargs={"model": "reasoner", "prompt": PROBLEM + "First", "max_tokens": longest}
                | ({} if seed is None else {"seed": seed, "n": 2}),
            )
            for longest, seed in ((220, None), (190, None), (60, None), (100, 4), (110, 5))
        ]
        for other in others:
            other.start()
        crowded += [ask(), ask()]
        for other in others:
            other.join()
    return alone, crowded


def test_a_seed_means_the_same_text_in_any_company(reasoner: Served) -> None:
    """Batch, cache and what others taught must not show."""
    alone, crowded = alone_and_in_company(reasoner, 50, 1)
    assert crowded == [alone, alone] and alone[0] != alone[1]


def test_a_seed_means_the_same_text_where_others_draft() -> None:
    """Nor when others draft: at a larger model's prices drafts pay, and memories hear sooner."""
    model = forerun.load("reasoner")
    more = {"per_seq": 8e-5, "per_draft": 1.6e-4, "per_empty_draft": 1.1e-5, "fixed_empty": 1.45e-4}
    rows, seconds = (1, 5, 9, 13, 17, 25, 33, 129), (1.94, 1.99, 2.31, 3.03, 3.84, 4.93, 5.91, 22.4)
    model.target.cost = Cost(rows, tuple(each / 1000 for each in seconds), **more)
    with thread(model, name="reasoner", max_seqs=8) as served:
        alone, crowded = alone_and_in_company(served, 120, 5)
    assert crowded == [alone] * 10


def test_a_seed_means_what_it_means_in_python() -> None:
    """With plans that hang on nothing measured."""
    model = forerun.load("reasoner", max_seqs=4)
    options = {"n": 2, "seed": 11, "max_new_tokens": 50}
    (result,) = model.generate(PROBLEM, batch=2, controller="fixed", **options)
    with thread(model, max_seqs=4, controller="fixed") as served:
        call = {"model": "tiny", "prompt": PROBLEM, "max_tokens": 50, "seed": 11, "n": 2}
        answer = served.client().completions.create(**call)
    assert [choice.text for choice in answer.choices] == [s.text for s in result.samples]


def test_predictions_are_copied_counted_and_change_nothing(reasoner: Served) -> None:
    client = reasoner.client()
    call = {"model": "reasoner", "prompt": PROBLEM, "max_tokens": 80, "temperature": 0, "seed": 0}
    plain = client.completions.create(**call, extra_body={"speculation": {"method": "none"}})
    text = plain.choices[0].text

    def predicted(content: str, **speculation: Any) -> Any:
        spec = {"method": "prompt_lookup", "statistics": True} | speculation
        prediction = {"type": "content", "content": content}
        body = {"prediction": prediction, "speculation": spec}
        answer = client.completions.create(**call, extra_body=body)
        assert answer.choices[0].text == text
        return answer

    good = predicted(text)
    details = good.usage.completion_tokens_details
    assert details.accepted_prediction_tokens > 0.8 * good.usage.completion_tokens
    assert details.rejected_prediction_tokens == 0
    assert good.model_extra["speculation"]["passes"] < 12
    changed = predicted(text.replace("Ann", "Bob", 1), method="stand").usage
    details = changed.completion_tokens_details
    assert details.accepted_prediction_tokens > 30 and details.rejected_prediction_tokens > 0
    bad = predicted("nothing of this is ever said", method="stand").usage
    assert bad.completion_tokens_details.accepted_prediction_tokens < 5
    small = predicted(text, max_nodes=2).model_extra["speculation"]
    assert small["drafted"] <= 2 * small["passes"]
    none = predicted(text, max_nodes=0)
    assert none.usage.completion_tokens_details.accepted_prediction_tokens == 0


def test_turns_of_a_conversation_reuse_its_prefix(chat: Served) -> None:
    client, messages = chat.client(), [{"role": "user", "content": "the dog sat on the log " * 8}]
    call = {"model": "tiny", "max_tokens": 10, "temperature": 0}
    first = client.chat.completions.create(messages=messages, **call)
    messages += [
        {"role": "assistant", "content": first.choices[0].message.content},
        {"role": "user", "content": "and then"},
    ]
    second = client.chat.completions.create(messages=messages, **call)
    cached = second.usage.prompt_tokens_details.cached_tokens
    assert cached >= first.usage.prompt_tokens - 1
    assert cached < second.usage.prompt_tokens
    assert chat.metric("vllm:prefix_cache_hits_total") >= cached


def test_samples_of_one_prompt_share_its_prefill(tiny_model: Any) -> None:
    with thread(tiny_model) as served:
        call = {"prompt": "one two three four " * 20, "max_tokens": 2, "n": 8}
        before = tiny_model.target.num_rows
        served.client().completions.create(model="tiny", **call)
        length = len(tiny_model.tokenizer.encode(call["prompt"]))
        assert tiny_model.target.num_rows - before < 2 * length  # not 8 times


def test_sampling_parameters_act(chat: Served, tiny_chat: Path) -> None:
    client = chat.client()
    call = {"model": "tiny", "prompt": "the cat", "max_tokens": 12, "temperature": 0}
    plain = client.completions.create(**call).choices[0].text
    (result,) = forerun.load(tiny_chat).generate("the cat", temperature=0.0, max_new_tokens=12)
    assert result.text == plain
    first = result.samples[0].tokens[0]
    for change in ({"banned_tokens": [first]}, {"logit_bias": {str(first): -100}}):
        changed = client.completions.create(**call, extra_body=change).choices[0]
        assert changed.text != plain
    stopped = client.completions.create(**call, extra_body={"stop_token_ids": [first]})
    assert stopped.choices[0].finish_reason == "stop" and stopped.usage.completion_tokens == 1
    sampled = call | {"temperature": 1.5, "seed": 5}
    assert client.completions.create(**sampled).choices[0].text != plain
    for change in ({"top_k": 1}, {"min_p": 1.0}, {"top_p": 1e-6}):
        assert client.completions.create(**sampled, extra_body=change).choices[0].text == plain


@pytest.mark.parametrize("stop", [None, "never"])
def test_the_texts_of_tokens_join_to_the_text(stop: str | None) -> None:
    """With a stripped space, split and broken characters, and special tokens."""
    tokenizer = spm()
    names = ("▁a", 0xE2, 0x82, 0xAC, "</s>", "▁little", 0xFF, 0xE2, "girl", "<s>", 0xC3)
    tokens, prompt = ids(tokenizer, *names), ids(tokenizer, "<s>", "▁was")
    call: dict[str, Any] = {"model": "tiny", "temperature": 0, "logprobs": 1, "stop": stop}
    call["extra_body"] = {"ignore_eos": True}
    with thread(says(tokenizer, tokens, len(prompt))) as served:
        for most in range(1, len(names) + 1):
            how = call | {"prompt": prompt, "max_tokens": most}
            (choice,) = served.client().completions.create(**how).choices
            text, choices = streamed(served, **how)
            assert choice.text == text == tokenizer.decode(tokens[:most], prompt)
            assert text.startswith(" a")
            assert "".join(choice.logprobs.tokens) == text
            shown = [token for one in choices for token in one.logprobs.tokens]
            assert shown == choice.logprobs.tokens and len(shown) == most
