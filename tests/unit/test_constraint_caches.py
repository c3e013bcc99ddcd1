"""Compiled grammars are cached by tokenizer, within bounds."""

from __future__ import annotations

import gc
import weakref

import pytest

import forerun
from forerun.constraints import _compiled
from forerun.constraints._compiled import compiled
from forerun.constraints.regex import Regex
from forerun.models.paths import located
from forerun.models.tokenizer import Tokenizer

pytest.importorskip("llguidance")


def some_tokenizer() -> Tokenizer:
    return Tokenizer.load(located("reasoner"))


def test_caches_do_not_keep_tokenizers_alive() -> None:
    tokenizer = some_tokenizer()
    vocab = tokenizer.vocab_size
    bound = Regex("[0-9]{3}").bind(tokenizer, vocab)
    start = weakref.ref(bound._start)
    (token,) = bound.forced(bound.after(tokenizer.encode_inside("123")))
    assert token in tokenizer.eos_ids
    alone, inner = weakref.ref(tokenizer), weakref.ref(tokenizer.inner)
    del tokenizer
    gc.collect()
    assert bound.allowed(bound.after([])).any()  # a constraint in use goes on
    assert bound.begin(b"12") is not None
    del bound
    gc.collect()
    assert alone() is None and inner() is None and start() is None


def test_equal_grammars_are_compiled_once() -> None:
    tokenizer = some_tokenizer()
    vocab = tokenizer.vocab_size
    first = compiled(tokenizer, vocab, 'start: "a"')
    assert compiled(tokenizer, vocab, 'start: "a"') is first
    other = some_tokenizer()
    assert compiled(other, vocab, 'start: "a"') is not first


def test_the_least_recently_used_grammars_are_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    """Beyond a number, and beyond a sum of their lengths."""
    tokenizer = some_tokenizer()
    vocab = tokenizer.vocab_size

    def is_kept(text: str, made: object) -> bool:
        return compiled(tokenizer, vocab, text) is made

    texts = ['start: "a"', 'start: "b"', 'start: "c"']
    monkeypatch.setattr(_compiled, "MAX_COMPILED", 2)
    a, b = (compiled(tokenizer, vocab, text) for text in texts[:2])
    assert is_kept(texts[0], a)
    compiled(tokenizer, vocab, texts[2])
    assert is_kept(texts[0], a) and not is_kept(texts[1], b)

    monkeypatch.setattr(_compiled, "MAX_COMPILED", 100)
    monkeypatch.setattr(_compiled, "MAX_COMPILED_CHARS", 1000)
    long = [f'start: "{letter * 400}"' for letter in "xyz"]
    made = [compiled(tokenizer, vocab, text) for text in long]
    assert is_kept(long[1], made[1]) and is_kept(long[2], made[2])
    assert not is_kept(long[0], made[0])


def test_a_grammar_above_the_bound_is_used_but_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_compiled, "MAX_COMPILED_CHARS", 5)
    model = forerun.load()
    assert model.generate("x", constraint=Regex("abc"), max_new_tokens=5)[0].text == "abc"
