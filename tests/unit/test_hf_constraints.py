"""Constraints in transformers' generate: forerun's own, and masks of other grammar libraries."""

from __future__ import annotations

import json
import re
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tiny import make_tiny
from transformers import AutoModelForCausalLM, AutoTokenizer, LogitsProcessor, set_seed

import forerun
from forerun.constraints.choice import Choice
from forerun.constraints.json_schema import JsonSchema
from forerun.constraints.python import Predicate
from forerun.constraints.regex import Regex
from forerun.errors import ConfigError, DataError, UnknownName
from forerun.integrations.hf import generate
from forerun.integrations.hf_constraints import tokenizer_of
from forerun.models.tokenizer import Tokenizer

SCHEMA = {
    "type": "object",
    "properties": {"one": {"enum": ["two", "three"]}, "four": {"type": "boolean"}},
    "required": ["one", "four"],
    "additionalProperties": False,
}
TEXTS = ("the cat", "the dog sat", "one two", "nine ten nine")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def model(folder: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder).eval()


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> Any:
    return AutoTokenizer.from_pretrained(folder, padding_side="left")


def rows(tokenizer: Any, *prompts: str) -> dict[str, Any]:
    tokenizer.pad_token = tokenizer.eos_token
    found = tokenizer(list(prompts), return_tensors="pt", padding=True)
    return {name: found[name] for name in ("input_ids", "attention_mask")}


def made(model: Any, tokenizer: Any, *prompts: str, **options: Any) -> list[str]:
    """The new texts of our loop."""
    given = rows(tokenizer, *prompts)
    options = {"max_new_tokens": 60, "do_sample": False, "custom_generate": generate} | options
    out = model.generate(**given, **options)
    new = out[:, given["input_ids"].shape[1] :]
    return tokenizer.batch_decode(new, skip_special_tokens=True)


class TestOwnConstraints:
    def test_a_schema_holds_in_every_row_and_forced_tokens_are_drafted(
        self, model: Any, tokenizer: Any
    ) -> None:
        passes: list[int] = []
        hook = model.register_forward_hook(lambda *_: passes.append(1))
        try:
            for drafter in ("none", "forced"):
                passes.append(0)
                own = JsonSchema(SCHEMA, whitespace=False)
                found = made(
                    model, tokenizer, "one two", "the", "six", constraint=own, drafter=drafter
                )
                for text in found:
                    assert set(json.loads(text)) == {"one", "four"}
        finally:
            hook.remove()
        plain, forced = (passes[1 : passes.index(0, 1)], passes[passes.index(0, 1) + 1 :])
        assert len(forced) < len(plain) / 2

    @pytest.mark.parametrize("drafter", ["none", "auto", "stand", "prompt_lookup"])
    def test_greedy_texts_are_those_of_a_loaded_model(
        self, model: Any, tokenizer: Any, folder: Path, drafter: str
    ) -> None:
        ours, own = forerun.load(folder), Regex("[a-z]+( [a-z]+){3}")
        how = {"constraint": own, "temperature": 0.0, "max_new_tokens": 60}
        expected = [ours.generate([p], **how)[0].text for p in ("one two", "the cat")]
        options = {"constraint": own, "drafter": drafter, "controller": "fixed"}
        assert made(model, tokenizer, "one two", "the cat", **options) == expected

    @pytest.mark.parametrize("warpers", [{}, {"top_k": 4}, {"top_p": 0.8, "temperature": 1.5}])
    def test_samples_have_the_law_of_a_mask_in_plain_generate(
        self, model: Any, tokenizer: Any, warpers: dict[str, Any]
    ) -> None:
        """The mask of the same grammar as a processor of plain `generate`: where it stands too."""
        set_seed(5)
        options = {"do_sample": True, "top_k": 0, **warpers, "constraint": Choice(TEXTS)}
        prompts = ["one two"] * 100
        ours = Counter(
            text
            for _ in range(6)
            for text in made(model, tokenizer, *prompts, drafter="stand", **options)
        )
        given, mask = rows(tokenizer, "one two"), Mask(model, tokenizer, Choice(TEXTS))
        options.pop("constraint")
        out = model.generate(
            **given, max_new_tokens=60, num_return_sequences=600, logits_processor=[mask], **options
        )
        new = out[:, given["input_ids"].shape[1] :]
        plain = Counter(tokenizer.batch_decode(new, skip_special_tokens=True))
        assert set(ours) <= set(TEXTS) and set(plain) <= set(TEXTS)
        for text in TEXTS:
            share = (ours[text] + plain[text]) / 1200
            error = (share * (1 - share) * 2 / 600) ** 0.5
            assert abs(ours[text] - plain[text]) / 600 < 4 * error + 1e-9

    def test_names_markers_and_several_constraints(self, model: Any, tokenizer: Any) -> None:
        [text] = made(model, tokenizer, "one", constraint="choice:options=the cat|the dog sat")
        assert text in ("the cat", "the dog sat")
        both = [Regex("[a-z ]{4,20}"), Predicate(lambda text: b"e" not in text)]
        [text] = made(model, tokenizer, "one", constraint=both)
        assert re.fullmatch("[a-z ]{4,20}", text) and "e" not in text
        [free] = made(model, tokenizer, "one two three")
        after = {"constraint": Choice(["the cat"]), "constraint_start": "*&"}
        [text] = made(model, tokenizer, "one two three", **after)
        before = free[: free.index("*&")]
        assert before and text == f"{before}*&the cat"

    def test_scores_hold_the_mask(self, model: Any, tokenizer: Any) -> None:
        given = rows(tokenizer, "one two")
        options = {"output_scores": True, "return_dict_in_generate": True, "max_new_tokens": 30}
        out = model.generate(
            **given, custom_generate=generate, constraint=Choice(["the cat"]), **options
        )
        new = out.sequences[0, given["input_ids"].shape[1] :].tolist()
        assert tokenizer.decode(new, skip_special_tokens=True) == "the cat"
        for token, scores in zip(new, out.scores, strict=True):
            assert scores[0, token] > -torch.inf and torch.isneginf(scores[0]).sum() > 200

    def test_penalties_act_before_the_mask(self, model: Any, tokenizer: Any) -> None:
        """Also one that gives the end token a score where the mask forbids it."""
        own = {"constraint": Regex("[a-z]{30}"), "exponential_decay_length_penalty": (2, 1.5)}
        [text] = made(model, tokenizer, "one two", repetition_penalty=1.3, **own)
        assert re.fullmatch("[a-z]{30}", text)

    def test_a_text_that_cannot_go_on_ends(self, model: Any, tokenizer: Any) -> None:
        banned = [[token] for token in range(1, len(tokenizer))]
        assert made(model, tokenizer, "one", constraint=Choice(["cat"]), bad_words_ids=banned) == [
            ""
        ]

    @pytest.mark.parametrize(
        ("options", "error", "message"),
        [
            ({"constraint_sampling": "smc"}, ConfigError, "forerun.load"),
            ({"constraint_sampling": "smk"}, UnknownName, "smk"),
            ({"constraint": 3}, ConfigError, "constraint must be"),
            ({"constraint": "regexx:pattern=a"}, UnknownName, "regexx"),
            ({"constraint": Regex("(")}, DataError, "regex"),
            ({"constraint": (), "constraint_start": "x"}, ConfigError, "needs a constraint"),
            ({"constraint": (), "constraints": [Choice("a")]}, ConfigError, "constraint=..."),
            ({"constraint": (), "logits_processor": [Choice("a")]}, ConfigError, "constraint=..."),
            (
                {"constraint": (), "prefix_allowed_tokens_fn": Choice("a")},
                ConfigError,
                "constraint=...",
            ),
        ],
    )
    def test_what_cannot_be_served_is_refused(
        self, model: Any, tokenizer: Any, options: dict[str, Any], error: Any, message: str
    ) -> None:
        with pytest.raises(error, match=re.escape(message)):
            made(model, tokenizer, "one", **{"constraint": Choice("a|b"), **options})

    def test_a_model_without_a_folder_needs_a_tokenizer(self, model: Any, tokenizer: Any) -> None:
        fresh = type(model)(model.config).eval()
        fresh.config._name_or_path = ""
        [text] = made(
            fresh, tokenizer, "one", constraint=Choice(TEXTS), constraint_tokenizer=tokenizer
        )
        assert text in TEXTS
        with pytest.raises(ConfigError, match="constraint_tokenizer"):
            made(fresh, tokenizer, "one", constraint=Choice(TEXTS))
        fresh.generation_config.eos_token_id = None
        with pytest.raises(ConfigError, match="needs an end token"):
            made(fresh, tokenizer, "one", constraint=Choice(TEXTS))


def test_a_tokenizer_is_not_mistaken_for_one_that_is_gone(model: Any, folder: Path) -> None:
    """Objects that are freed leave their addresses to later ones."""
    inners = [AutoTokenizer.from_pretrained(folder) for _ in range(2)]
    for inner in inners * 5:
        assert tokenizer_of(model, [0], Tokenizer(inner)).inner is inner


class Mask(LogitsProcessor):
    """A mask without state, from the same grammar."""

    def __init__(self, model: Any, tokenizer: Any, own: Any) -> None:
        self.own = own.bind(Tokenizer(tokenizer), model.config.vocab_size)
        self.length: int | None = None

    def __call__(self, ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self.length = ids.shape[1] if self.length is None else self.length
        shaped = []
        for row, values in zip(ids[:, self.length :].tolist(), scores.numpy(), strict=True):
            shaped.append(self.own.logits(self.own.after(row), values))
        return torch.from_numpy(np.stack(shaped))


class OneGrammar(LogitsProcessor):
    """As grammar libraries do it: a matcher that consumes the last token at every call."""

    def __init__(self, folder: Path, model: Any, pattern: str) -> None:
        from llguidance import LLMatcher
        from llguidance.hf import from_tokenizer

        inner = AutoTokenizer.from_pretrained(folder)
        self.matcher = LLMatcher(
            from_tokenizer(inner, n_vocab=model.config.vocab_size),
            LLMatcher.grammar_from_regex(pattern),
        )
        self.has_begun = False

    def __call__(self, ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        if self.has_begun:
            assert self.matcher.consume_token(int(ids[0, -1])), "tokens came out of order"
        self.has_begun = True
        allowed = torch.frombuffer(bytearray(self.matcher.compute_logit_bias()), dtype=torch.uint8)
        return scores.masked_fill(allowed[: scores.shape[1]] == 0, -torch.inf)


class TestOtherGrammarLibraries:
    @pytest.mark.parametrize("drafter", ["auto", "stand", "suffix", "prompt_lookup"])
    def test_a_matcher_with_state_gives_the_text_of_plain_generate(
        self, model: Any, tokenizer: Any, folder: Path, drafter: str
    ) -> None:
        pattern, prompt = "[a-z]+( [a-z]+){5}\\.", "one two three one two three one"
        given, options = rows(tokenizer, prompt), {"max_new_tokens": 60, "do_sample": False}
        plain = model.generate(
            **given, **options, logits_processor=[OneGrammar(folder, model, pattern)]
        )
        ours = model.generate(
            **given,
            **options,
            logits_processor=[OneGrammar(folder, model, pattern)],
            custom_generate=generate,
            drafter=drafter,
        )
        assert ours.tolist() == plain.tolist()

    def test_a_batch_points_to_our_constraints(
        self, model: Any, tokenizer: Any, folder: Path
    ) -> None:
        mask = OneGrammar(folder, model, "[a-z]+")
        with pytest.raises(ConfigError, match="OneGrammar cannot.*constraint=..."):
            made(model, tokenizer, "one", "two", logits_processor=[mask])

    def test_a_prefix_function_and_a_constraint_hold_together(
        self, model: Any, tokenizer: Any
    ) -> None:
        """The function bans the tokens that begin the text which the constraint alone gives."""
        own = {"constraint": Choice(["the cat", "one pig"])}
        [free] = made(model, tokenizer, "the", **own)
        kept = [i for i in range(len(tokenizer)) if tokenizer.decode([i])[:1] != free[0]]
        options = {"prefix_allowed_tokens_fn": lambda row, ids: kept}
        [text] = made(model, tokenizer, "the", **own, **options)
        assert {free, text} == {"the cat", "one pig"}
