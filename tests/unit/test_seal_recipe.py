"""The recipe of SEAL's generator, and the rules that make passages and questions from books."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from forerun.errors import ConfigError, DataError
from forerun.models.tokenizer import Tokenizer
from forerun.retrieval import books
from forerun.retrieval.passages import BODY, PASSAGE, TITLE, TITLE_END, Passage, write_passages
from forerun.training.language_model import Size
from forerun.training.recipes import seal as recipe

WORDS = ["one", "two", "three", "four", "five", "six"]
SENTENCE = "The quick brown fox jumped over the very lazy dog number {}."
CHAPTER = " ".join(SENTENCE.format(word) for word in WORDS * 6)
CONTENTS = "".join(f"CHAPTER {n}.\n\nWHAT HAPPENED {n}\n\n" for n in ("I", "II", "III", "IV"))
BOOK = f"{CONTENTS}A preface. {CHAPTER}\n\nCHAPTER I.\n\nWHAT HAPPENED FIRST.\n\n{CHAPTER}\n" + (
    f"\nII. A STORY OF ITS OWN\n\nI.\n\n{CHAPTER}\n\n*** END\n\nCHAPTER X.\n\nTERMS\n\n{CHAPTER}"
)


def test_chapters_passages_and_what_is_held_out() -> None:
    titles = [title for title, _ in books.chapters(BOOK)]
    assert titles == ["What happened first", "A story of its own"]
    passages = books.passages_of(BOOK)
    assert len(passages) == 18 and {p.title for p in passages} == set(titles)
    for passage in passages:
        assert passage.held_out in CHAPTER and passage.held_out not in passage.body
        assert len(f"{passage.body} {passage.held_out}".split()) >= books.MIN_PASSAGE_WORDS
    with pytest.raises(DataError, match="no chapters"):
        books.passages_of("just text")


def test_questions_follow_the_rules() -> None:
    rng = np.random.default_rng(0)
    whole = books.plain(SENTENCE.format("one")).split()
    assert whole[:3] == ["the", "quick", "brown"]
    lengths = []
    for _ in range(200):
        left = books.cloze(SENTENCE.format("one"), rng).split()
        places = iter(whole)
        assert all(word in places for word in left) and len(left) >= books.MIN_QUESTION_WORDS
        lengths.append(len(left))
    assert abs(np.mean(lengths) - 6.1) < 0.4 and max(lengths) > 7  # of 12, at least 4
    assert len(books.cloze("Only three words", rng).split()) == 3
    passages = books.passages_of(BOOK)
    fit, evaluated = books.split(len(passages), 4)
    assert sorted([*fit, *evaluated]) == list(range(18)) and len(evaluated) == 4
    asked = books.questions(passages, evaluated, rng)
    assert {q.passage for q in asked} == set(evaluated.tolist())
    assert {q.kind for q in asked} == {"cloze", "held_out"}


def test_spans_share_words_with_the_question() -> None:
    rng = np.random.default_rng(0)
    body = " ".join([*["aa", *"bcdefghij"] * 3, "fox", "dog", "hen", "owl"])
    found = recipe.spans("dog hen aa", body, 4000, {"aa"}, rng)
    chance = np.exp([2, 4, 4]) / (26 + np.exp([2, 4, 4]).sum())  # 29 starts that are not "aa"
    for word, wanted in zip(("j", "fox", "dog"), chance, strict=True):
        share = np.mean([span.split()[0] == word and "owl" in span for span in found])
        assert share == pytest.approx(wanted, abs=0.03)
    assert {len(span.split()) for span in found} == set(range(3, recipe.SPAN + 1))
    assert all(span in body for span in found)
    assert not any(span.startswith("aa") for span in recipe.spans("", body, 200, {"aa"}, rng))
    assert recipe.spans("fox", "too short", 2, set(), rng) == ["too short"] * 2


def test_pairs_leave_the_evaluated_questions_out(tmp_path: Path) -> None:
    passages = [Passage(f"Title {w}", SENTENCE.format(w), "") for w in WORDS[:3]]
    tokenizer = Tokenizer(recipe.make_tokenizer(passages, 320))
    seal = recipe.Seal(passages=tmp_path / "p.jsonl", clozes=3, spans=2, titles=1, made_up=0)
    pairs = recipe.pairs(passages, np.array([0, 2]), tokenizer, seal)
    known = tokenizer.vocabulary()
    sources = {"question": 0, "span": 0}
    for i in range(len(pairs)):
        ids, cut = pairs.document(i).tolist(), int(pairs.prompts[i])
        kind = "span" if known[PASSAGE] in ids[:cut] else "question"
        sources[kind] += 1
        text = tokenizer.decode(ids[cut:])
        if ids[cut - 1] == known[TITLE]:
            assert ids[-1] == known[TITLE_END] and text.strip() in {p.title for p in passages}
        else:
            assert ids[cut - 1] == known[BODY]
        if kind == "question":
            assert "two" not in text
    assert sources == {"question": 2 * (3 * 2 + 1), "span": 3 * 3}
    more = recipe.pairs(passages, np.array([0, 2]), tokenizer, replace(seal, made_up=4))
    assert len(more) == len(pairs) + 4 * 3


def test_made_up_sentences_follow_from_their_question() -> None:
    """Random words of the passages; most of a span is in the question, in its order."""
    passages = [Passage("A", SENTENCE.format(word)) for word in WORDS]
    known = {*recipe.plain(SENTENCE).split(), *WORDS}
    shares = []
    for question, span in recipe.made_up(passages, 200, np.random.default_rng(0)):
        assert {*question.split(), *span.split()} <= known
        shares.append(np.mean([word in question.split() for word in span.split()]))
    assert np.mean(shares) > 0.85
    assert len(set(recipe.made_up(passages, 20, np.random.default_rng(0)))) == 20


def test_a_run_from_file_to_search(tmp_path: Path) -> None:
    file = tmp_path / "p.jsonl"
    write_passages(file, books.passages_of(BOOK))
    size = Size(hidden=32, layers=1, heads=2, kv_heads=1, inner=48)
    options = {"passages": file, "evaluated": 2, "vocabulary": 320, "size": size}
    folder = tmp_path / "run"
    (line,) = recipe.Seal(minutes=None, max_steps=3, **options).train(folder)
    assert line.startswith("3 steps, loss")
    generator, index = recipe.load(folder)
    assert len(index) == 18 and generator.context == recipe.CONTEXT
    with pytest.raises(ConfigError, match="holds an earlier run"):
        recipe.Seal(max_steps=4, **options).train(folder)
    (line,) = recipe.Seal(minutes=None, max_steps=4, **options).train(folder, resume=True)
    assert line.startswith("4 steps")
    with pytest.raises(ConfigError, match="started with vocabulary 320"):
        recipe.Seal(**options | {"vocabulary": 321}).train(folder, resume=True)
    with pytest.raises(ConfigError, match="leave none to train on"):
        recipe.Seal(passages=file, evaluated=18).train(tmp_path / "other")
    with pytest.raises(ConfigError, match="evaluated must be at least 1, got 0"):
        recipe.Seal(passages=file, evaluated=0)
