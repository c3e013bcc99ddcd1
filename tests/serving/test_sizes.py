"""The bound on a text's tokens holds for any text, and is given only where it must hold."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, models, normalizers, pre_tokenizers
from tokenizers import Tokenizer as Backend

from forerun.models.token_bounds import TokenBounds, max_bytes_per_token
from forerun.models.token_bytes import byte_alphabet

LETTERS = sorted(byte_alphabet())
WORDS = ["ab", "abc", "\u0120abc"]
PIECES = ["abc", " abc", "\u1100\u1161\u11a8", "\u03c9\u0313\u0301\u0345", "\u212a", "\U0001f642"]


def made(normalizer: Any = None, before: Any = None, letters: list[str] = LETTERS) -> Any:
    """A byte-level BPE of all bytes and three words."""
    vocabulary = {piece: i for i, piece in enumerate([*letters, *WORDS])}
    merges = [("a", "b"), ("ab", "c"), ("\u0120", "abc")]
    backend = Backend(models.BPE(vocabulary, merges))
    backend.pre_tokenizer = before or pre_tokenizers.ByteLevel(add_prefix_space=False)
    if normalizer is not None:
        backend.normalizer = normalizer
    inner = SimpleNamespace(backend_tokenizer=backend)
    return SimpleNamespace(inner=inner, vocabulary=backend.get_vocab)


@pytest.mark.parametrize("normalizer", [None, normalizers.NFC()])
def test_no_text_has_fewer_tokens(normalizer: Any) -> None:
    tokenizer = made(normalizer)
    sizes = TokenBounds(tokenizer)
    assert sizes.max_bytes > 0

    @settings(max_examples=300, deadline=None, derandomize=True, database=None)
    @given(st.lists(st.one_of(st.sampled_from(PIECES), st.characters(codec="utf-8"))))
    def check(pieces: list[str]) -> None:
        text = "".join(pieces)
        assert sizes.min_tokens(text) <= len(tokenizer.inner.backend_tokenizer.encode(text).ids)

    check()
    assert sizes.min_tokens("\u1100\u1161\u11a8" * 1000) >= 100  # and it is of use


def split(behaviour: str) -> Any:
    return pre_tokenizers.Sequence(
        [pre_tokenizers.Split(" ", behaviour), pre_tokenizers.ByteLevel()]
    )


@pytest.mark.parametrize(
    "tokenizer",
    [
        made(normalizers.Lowercase()),
        made(normalizers.Sequence([normalizers.NFC(), normalizers.StripAccents()])),
        made(before=split("removed")),
        made(before=pre_tokenizers.Whitespace()),
        made(letters=LETTERS[1:]),
        SimpleNamespace(inner=SimpleNamespace()),
    ],
)
def test_who_may_drop_or_join_text_has_no_bound(tokenizer: Any) -> None:
    assert (
        max_bytes_per_token(tokenizer) == 0 and TokenBounds(tokenizer).min_tokens("a" * 10_000) == 0
    )


def test_a_token_that_takes_the_spaces_around_it_leaves_no_bound() -> None:
    tokenizer = made(before=split("isolated"))
    assert max_bytes_per_token(tokenizer) > 0
    tokenizer.inner.backend_tokenizer.add_special_tokens([AddedToken("<mask>", lstrip=True)])
    assert max_bytes_per_token(tokenizer) == 0
