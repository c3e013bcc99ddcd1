"""Drafts inside transformers' own generate: the same greedy text, the same law, what it returns."""

from __future__ import annotations

import copy
import itertools
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM, set_seed
from transformers.generation.stopping_criteria import StoppingCriteria, StoppingCriteriaList
from transformers.generation.streamers import BaseStreamer

from forerun import registry
from forerun.core.sampling import Sampling
from forerun.core.tree import TreeBuilder
from forerun.errors import ConfigError
from forerun.integrations import hf
from forerun.integrations.hf import generate, split_processors
from forerun.integrations.hf_candidates import candidates, first_path

VOCAB = 24


@pytest.fixture(scope="module", params=["llama", "gpt2"])
def model(request: pytest.FixtureRequest) -> Any:
    torch.manual_seed(3)
    if request.param == "gpt2":
        config = GPT2Config(vocab_size=VOCAB, n_positions=128, n_embd=32, n_layer=2, n_head=2)
        made: Any = GPT2LMHeadModel(config)
    else:
        made = LlamaForCausalLM(
            LlamaConfig(
                vocab_size=VOCAB,
                hidden_size=32,
                intermediate_size=48,
                num_hidden_layers=2,
                num_attention_heads=2,
                max_position_embeddings=128,
            )
        )
    for p in made.parameters():  # sharper laws than at a random start
        p.data *= 3 if p.dim() > 1 else 1
    made.generation_config.eos_token_id = None
    made.generation_config.pad_token_id = 0
    return made.eval()


def padded(*rows: list[int]) -> dict[str, torch.Tensor]:
    most = max(map(len, rows))
    ids = torch.tensor([[0] * (most - len(row)) + row for row in rows])
    mask = torch.tensor([[0] * (most - len(row)) + [1] * len(row) for row in rows])
    return {"input_ids": ids, "attention_mask": mask}


PROMPTS = padded([5, 6, 7, 5, 6], [9, 3], [4, 4, 4, 4])
SETTINGS = {
    "plain": {},
    "penalties": {"repetition_penalty": 1.4},
    "no repeated pair": {"no_repeat_ngram_size": 2},
    "bad words": {"bad_words_ids": [[7], [5, 6]]},
    "least": {"min_new_tokens": 6, "eos_token_id": [5, 7]},
    "ends": {"eos_token_id": [6]},
}


def test_threads_share_a_model(model: Any) -> None:
    """Also when all of them come first, and when one needs a larger target."""
    fresh = copy.deepcopy(model)
    options = {"max_new_tokens": 16, "do_sample": False, "custom_generate": generate}

    def texts(number: int) -> list[list[int]]:
        rows = {name: x.repeat(90 if number == 5 else 1, 1) for name, x in PROMPTS.items()}
        return fresh.generate(**rows, **options).tolist()

    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(texts, range(16), timeout=400))
    want = model.generate(**PROMPTS, max_new_tokens=16, do_sample=False).tolist()
    assert found[5] == want * 90
    assert found[:5] + found[6:] == [want] * 15
    copy.deepcopy(fresh)


@pytest.mark.parametrize("drafter", ["stand", "prompt_lookup", "token_recycling"])
@pytest.mark.parametrize("name", SETTINGS)
def test_greedy_text_is_that_of_plain_generate(model: Any, name: str, drafter: str) -> None:
    options = {"max_new_tokens": 24, "do_sample": False, **SETTINGS[name]}
    want = model.generate(**PROMPTS, **options)
    got = model.generate(
        **PROMPTS, **options, custom_generate=generate, drafter=drafter, controller="fixed"
    )
    assert torch.equal(got, want)


LAWS = (
    {"temperature": 0.8, "top_k": 5},
    {"temperature": 1.2, "top_p": 0.8},
    {"min_p": 0.2, "top_k": 0},
    {"typical_p": 0.7, "top_k": 0},
    {"repetition_penalty": 1.5, "temperature": 0.7, "top_k": 0},
)


def laws() -> list:
    """Quick: llama, but for `typical_p`, which is called for every row, as a penalty is."""
    quick = [("llama", options) for options in LAWS if "typical_p" not in options]
    return [
        pytest.param(*one, id=f"{one[0]}-{one[1]}", marks=() if one in quick else pytest.mark.slow)
        for one in itertools.product(("llama", "gpt2"), LAWS)
    ]


@pytest.mark.parametrize(("model", "options"), laws(), indirect=["model"])
def test_samples_follow_the_law_of_generate(model: Any, options: dict[str, Any]) -> None:
    """Second tokens after every first one, 3000 samples that share a memory, chi-square."""
    prompt, num = torch.tensor([[5, 6, 7, 5, 6]]), 3000
    set_seed(1)
    out = model.generate(
        prompt,
        max_new_tokens=2,
        do_sample=True,
        num_return_sequences=num,
        custom_generate=generate,
        drafter="stand:context=2",
        controller="fixed",
        **options,
    )[:, 5:].tolist()
    counts, expected = np.zeros((VOCAB, VOCAB)), np.zeros((VOCAB, VOCAB))
    for a, b in out:
        counts[a, b] += 1
    first = law(model, prompt, options)
    for a in np.flatnonzero(first):
        then = law(model, torch.cat([prompt, torch.tensor([[a]])], 1), options)
        expected[a] = first[a] * then * num
    assert counts[expected == 0].sum() == 0
    big = expected >= 5
    observed = np.append(counts[big], counts[~big].sum())
    wanted = np.append(expected[big], expected[~big].sum())
    kept = wanted > 0
    score = ((observed - wanted)[kept] ** 2 / wanted[kept]).sum()
    freedom = kept.sum() - 1
    assert score < freedom + 5 * np.sqrt(2 * freedom)


def law(model: Any, ids: torch.Tensor, options: dict[str, Any]) -> np.ndarray:
    """Probabilities [V] of the next token, from plain generate's own scores."""
    out = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),  # or token 0 would be taken for padding
        max_new_tokens=1,
        do_sample=True,
        return_dict_in_generate=True,
        output_scores=True,
        **options,
    )
    return out.scores[0][0].softmax(-1).double().numpy()


def test_what_other_calls_taught_does_not_show(model: Any) -> None:
    def drawn(seed: int) -> list[list[int]]:
        set_seed(seed)
        options = {"max_new_tokens": 40, "do_sample": True, "controller": "fixed"}
        return model.generate(**PROMPTS, **options, custom_generate=generate).tolist()

    first = drawn(1)
    drawn(2)
    assert drawn(1) == first


def test_the_seed_is_torchs(model: Any) -> None:
    texts = []
    for seed in (1, 1, 2):
        set_seed(seed)
        texts.append(
            model.generate(
                **PROMPTS,
                max_new_tokens=20,
                do_sample=True,
                custom_generate=generate,
                drafter="stand:scope=request",
                controller="fixed",
            ).tolist()
        )
    assert texts[0] == texts[1] != texts[2]


def test_outputs_hold_the_scores_of_plain_generate(model: Any) -> None:
    options = {
        "max_new_tokens": 12,
        "do_sample": False,
        "repetition_penalty": 1.3,
        "return_dict_in_generate": True,
        "output_scores": True,
        "output_logits": True,
    }
    want = model.generate(**PROMPTS, **options)
    got = model.generate(**PROMPTS, **options, custom_generate=generate, controller="fixed")
    assert torch.equal(got.sequences, want.sequences)
    for name in ("scores", "logits"):
        ours, theirs = getattr(got, name), getattr(want, name)
        assert len(ours) == len(theirs) == 12
        for a, b in zip(ours, theirs, strict=True):
            assert torch.allclose(a, b.float(), atol=1e-4)


class Kept(BaseStreamer):
    def __init__(self) -> None:
        self.got: list[int] = []
        self.ended = False

    def put(self, value: torch.Tensor) -> None:
        self.got += value.flatten().tolist()

    def end(self) -> None:
        self.ended = True


def test_a_streamer_hears_every_token_once(model: Any) -> None:
    streamer = Kept()
    out = model.generate(
        PROMPTS["input_ids"][:1],
        max_new_tokens=20,
        do_sample=False,
        stream_to=streamer,
        custom_generate=generate,
        controller="fixed",
    )
    assert streamer.got == out[0].tolist() and streamer.ended


class After(StoppingCriteria):
    """Ends a text of more than so many tokens."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __call__(self, input_ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
        return torch.full((len(input_ids),), input_ids.shape[1] >= self.length)


def test_own_stopping_criteria_are_asked_after_every_token(model: Any) -> None:
    options = {
        "max_new_tokens": 20,
        "do_sample": False,
        "stopping_criteria": StoppingCriteriaList([After(12)]),
    }
    ids = torch.tensor([[5, 6, 7, 5, 6]])
    want = model.generate(ids, **options)
    got = model.generate(ids, **options, custom_generate=generate, controller="fixed")
    assert torch.equal(got, want) and got.shape[1] == 12


def test_warpers_at_the_end_of_the_list_are_ours() -> None:
    from transformers.generation.logits_process import (
        NoRepeatNGramLogitsProcessor,
        TemperatureLogitsWarper,
        TopKLogitsWarper,
        TopPLogitsWarper,
        TypicalLogitsWarper,
    )

    heat, top_k, top_p = TemperatureLogitsWarper(0.7), TopKLogitsWarper(9), TopPLogitsWarper(0.8)
    no_repeats, typical = NoRepeatNGramLogitsProcessor(2), TypicalLogitsWarper(0.9)
    sampling, kept, warpers = split_processors([no_repeats, heat, top_k, top_p], True)
    assert sampling == Sampling(temperature=0.7)
    assert kept == [no_repeats] and warpers == [heat, top_k, top_p]
    sampling, kept, warpers = split_processors([heat, top_k, typical], True)
    assert sampling == Sampling() and kept == [heat, top_k, typical] and not warpers
    sampling, kept, _ = split_processors([top_p, heat], True)  # not our order: theirs first
    assert sampling == Sampling(temperature=0.7) and kept == [top_p]
    assert split_processors([no_repeats], False)[0].is_greedy


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"num_beams": 2}, "num_beams"),
        ({"output_attentions": True, "return_dict_in_generate": True}, "output_attentions"),
        ({"drafter": "stnd"}, "'stand'"),
        ({"stream_to": 5}, "stream_to must be a streamer with put and end, got 5"),
        ({"stream_to": 0}, "got 0; use e.g. transformers' TextStreamer"),
    ],
    ids=lambda value: str(value)[:30],
)
def test_what_is_not_served_is_refused(model: Any, options: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        model.generate(**PROMPTS, max_new_tokens=4, custom_generate=generate, **options)


def test_prompts_padded_on_the_right_are_refused(model: Any) -> None:
    mask = torch.tensor([[1, 1, 0]])
    with pytest.raises(ConfigError, match="left"):
        model.generate(
            torch.tensor([[5, 6, 0]]),
            attention_mask=mask,
            max_new_tokens=4,
            custom_generate=generate,
        )


def test_a_model_becomes_a_target_once(model: Any) -> None:
    assert hf.target_of(model, 1) is hf.target_of(model, 3)


# as candidates of assisted generation


@pytest.mark.parametrize("drafter", ["stand", "prompt_lookup"])
def test_assisted_generation_with_our_candidates_is_greedy_generate(
    model: Any, drafter: str
) -> None:
    prompt = torch.tensor([[5, 6, 7, 5, 6, 7, 5, 6]])
    options = {"max_new_tokens": 40, "do_sample": False}
    want = model.generate(prompt, **options)
    with candidates(model, drafter):
        got = model.generate(prompt, **options, prompt_lookup_num_tokens=4)
    assert torch.equal(got, want)
    assert "_get_candidate_generator" not in vars(model)


def test_threads_wait_for_the_end_of_a_block_of_candidates(model: Any) -> None:
    prompt = torch.tensor([[5, 6, 7, 5, 6, 7, 5, 6]])
    options = {"max_new_tokens": 8, "do_sample": False}
    want, inside = model.generate(prompt, **options).tolist(), list[int]()

    def text(number: int) -> list[list[int]]:
        for _ in range(4):
            with candidates(model, "stand"):
                inside.append(number)
                found = model.generate(prompt, **options, prompt_lookup_num_tokens=4)
                assert inside.pop() == number and not inside, "one thread at a time"
        return found.tolist()

    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(text, range(4), timeout=400)) == [want] * 4
    assert "_get_candidate_generator" not in vars(model)


def test_a_block_within_a_block_gives_back_what_it_found(model: Any) -> None:
    with candidates(model, "stand"):
        outer = model._get_candidate_generator
        with candidates(model, "suffix"):
            assert model._get_candidate_generator is not outer
        assert model._get_candidate_generator is outer
    assert "_get_candidate_generator" not in vars(model)


def test_assisted_samples_follow_the_law(model: Any) -> None:
    """Third tokens, 400 samples of one shared memory each: a loose check of the plumbing of q."""
    prompt, num = torch.tensor([[5, 6, 7, 5, 6]]), 400
    drafter = registry.make("drafter", "stand:scope=global,context=2")
    counts = np.zeros(VOCAB)
    set_seed(5)
    with candidates(model, drafter, num_tokens=2):
        for _ in range(num):
            out = model.generate(
                prompt, max_new_tokens=2, do_sample=True, top_k=4, prompt_lookup_num_tokens=2
            )
            counts[int(out[0, 6])] += 1
    first = law(model, prompt, {"top_k": 4})
    expected = sum(
        first[a] * law(model, torch.cat([prompt, torch.tensor([[a]])], 1), {"top_k": 4})
        for a in np.flatnonzero(first)
    )
    big = num * expected >= 5
    observed = np.append(counts[big], counts[~big].sum())
    wanted = num * np.append(expected[big], expected[~big].sum())
    kept = wanted > 0
    score = ((observed - wanted)[kept] ** 2 / wanted[kept]).sum()
    assert score < kept.sum() - 1 + 5 * np.sqrt(2 * (kept.sum() - 1))


def test_the_first_path_of_a_tree() -> None:
    tree = TreeBuilder()
    for token, parent in ((3, -1), (4, -1), (5, 0), (6, 0), (7, 2)):
        tree.add(token, parent)
    assert first_path(tree.build()).tokens.tolist() == [3, 5, 7]


class Numbers:
    """A tokenizer whose texts are digits."""

    def encode(self, text: str, special: bool = True) -> list[int]:
        return [int(letter) for letter in text]


def test_a_rule_that_needs_a_tokenizer_says_so_by_name_and_runs_when_built(model: Any) -> None:
    """There is no tokenizer in `generate`: `reflective` by name cannot know its template."""
    from forerun.verifiers.reflective import Reflective

    options = {**PROMPTS, "max_new_tokens": 12, "do_sample": False, "custom_generate": generate}
    with pytest.raises(ConfigError, match=r"or construct Reflective\(tokenizer=Tokenizer.load"):
        model.generate(**options, verifier="reflective")
    plain = model.generate(**PROMPTS, max_new_tokens=12, do_sample=False)
    for weight in (0.0, 0.3):
        rule = Reflective(weight=weight, template="56", tokenizer=Numbers())  # type: ignore[arg-type]
        ids = model.generate(**options, verifier=rule, drafter="prompt_lookup")
        assert ids.shape == plain.shape and (weight or torch.equal(ids, plain))
