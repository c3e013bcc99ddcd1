"""What a constraint reports of a text that a stop string has cut."""

from __future__ import annotations

import numpy as np
import pytest
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

import forerun
from fakes import FakeTarget
from forerun.constraints._request import cut_tokens
from forerun.constraints.regex import Regex
from forerun.models.tokenizer import Tokenizer

pytest.importorskip("llguidance")

# "Ã" and "©" are the bytes of "é", "Ċ" is a line break
NAMES = ["a", "b", ";", "Ã", "©", "Ċ", "b;", "©;", "<end>", "<mark>"]
A, B, SEMICOLON, FIRST, SECOND, _, B_SEMICOLON, SECOND_SEMICOLON, END, MARK = range(10)


@pytest.fixture
def tokenizer() -> Tokenizer:
    """Byte-level BPE with a special token that marks the end of thoughts."""
    vocab = {name: i for i, name in enumerate(NAMES)}
    backend = Backend(models.BPE(vocab, [("b", ";"), ("©", ";")]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    inner = PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token="<end>", additional_special_tokens=["<mark>"]
    )
    return Tokenizer(inner, [END])


@pytest.mark.parametrize(
    ("tokens", "text", "kept"),
    [
        ([MARK, A, B], "ab", [MARK, A, B]),
        ([MARK, A, B_SEMICOLON], "ab", [MARK, A, B]),  # the cut is inside the last token
        ([A, MARK, FIRST, SECOND_SEMICOLON], "aé", [A, MARK, FIRST, SECOND]),  # in its character
        ([A, MARK], "a", [A, MARK]),
        ([A, FIRST], "a\ufffd", None),  # half of a character has no tokens of its own
        ([], "", []),
    ],
)
def test_tokens_of_a_cut_text(
    tokenizer: Tokenizer, tokens: list[int], text: str, kept: list[int] | None
) -> None:
    found = cut_tokens(tokenizer, tokens, text)
    assert found == kept if kept is not None else found[0] == A


@pytest.mark.parametrize(
    ("said", "valid"),
    [
        ([A, MARK, A, SEMICOLON], True),
        ([A, MARK, A, B_SEMICOLON], True),
        ([A, MARK, B_SEMICOLON], False),  # "b" alone is not allowed
        ([MARK, FIRST, SECOND_SEMICOLON], True),
    ],
)
def test_a_special_marker_stays_before_a_stop_string(
    tokenizer: Tokenizer, said: list[int], valid: bool
) -> None:
    def law(tokens: list[int]) -> np.ndarray:
        place = len(tokens) - 2
        probs = np.full(len(NAMES), 1e-9)
        probs[said[place] if place < len(said) else END] = 1.0
        return probs

    model = forerun.Model(FakeTarget(law, len(NAMES)), tokenizer)
    result = model.generate(
        [[A, B]],
        constraint=Regex("(ab?;?|b;|é;?)b?"),
        constraint_start="<mark>",
        stop=";",
        temperature=0.0,
        max_new_tokens=8,
        drafter="none",
    )[0]
    (sample,) = result.samples
    assert sample.finish == "stop" and not sample.constraint.missing
    assert sample.valid is valid and ";" not in sample.text
