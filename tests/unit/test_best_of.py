"""Best of n: the samples are plain ones, and who is chosen follows from them."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
from tiny import make_tiny

import forerun
from forerun.api import Model
from forerun.errors import ConfigError, UnknownName
from forerun.runner import kv_cache as cache_module
from forerun.search._answers import count_votes, is_decided, last_answer, pattern
from forerun.search.best_of import NoSampleLeft, best_of

FEW = {"max_new_tokens": 12, "temperature": 0.8, "seed": 3}
PROMPT = "the cat sat on"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    folder: Path = make_tiny(tmp_path_factory.mktemp("best_of") / "tiny")
    return forerun.load(folder, dtype="fp32", max_seqs=16)


def first_word(text: str) -> str | None:
    return text.split()[0] if text.split() else None


@pytest.mark.parametrize("batch", [1, 3, 8])
def test_the_samples_are_those_of_generate(model: Model, batch: int) -> None:
    (plain,) = model.generate(PROMPT, n=6, batch=batch, **FEW)
    found = best_of(model, PROMPT, n=6, batch=batch, parse=first_word, **FEW)
    assert [s.tokens for s in found.samples] == [s.tokens for s in plain.samples]
    assert found.stats.generated == plain.stats.generated


@pytest.mark.parametrize("select", ["majority", "likelihood"])
def test_log_probabilities_are_those_of_generate(model: Model, select: str) -> None:
    (plain,) = model.generate(PROMPT, n=2, batch=1, logprobs=2, **FEW)
    found = best_of(model, PROMPT, n=2, logprobs=2, select=select, parse=first_word, **FEW)
    for own, other in zip(found.samples, plain.samples, strict=True):
        assert own.logprobs and other.logprobs and len(own.logprobs) == len(own.tokens)
        for top, expected in zip(own.logprobs, other.logprobs, strict=True):
            assert len(top) >= 2 and top == pytest.approx(expected, abs=1e-4)


def test_the_prompt_is_computed_once(model: Model) -> None:
    prompt = "one two three four five six seven eight nine ten and then ten nine eight"
    length = len(model.tokenizer.encode(prompt))
    before = model.target.num_rows
    found = best_of(model, prompt, n=8, batch=4, drafter="none", parse=first_word, **FEW)
    rows = model.target.num_rows - before
    assert rows <= length + found.stats.passes + 8


def test_the_first_ones_run_alone_where_asked(model: Model) -> None:
    widths = []
    best_of(
        model, PROMPT, n=6, batch=4, alone=2, parse=first_word,
        on_step=lambda step: widths.append(len(step.seqs)), ignore_eos=True, **FEW,
    )  # fmt: skip
    first = widths.index(4)
    assert set(widths[:first]) == {1} and max(widths) == 4


def test_majority_and_its_first_sample(model: Model) -> None:
    found = best_of(model, PROMPT, n=9, parse=lambda text: str(len(text) % 2), **FEW)
    answers = [str(len(sample.text) % 2) for sample in found.samples]
    assert found.answers == answers
    assert found.answer == max(set(answers), key=answers.count)
    assert found.chosen is found.samples[answers.index(found.answer)]
    assert sum(found.votes.values()) == 9


def test_likelihood_is_the_targets_own(model: Model) -> None:
    sums = best_of(model, PROMPT, n=6, select="likelihood", **FEW)
    means = best_of(model, PROMPT, n=6, select="mean_likelihood", **FEW)
    (plain,) = model.generate(PROMPT, n=6, logprobs=0, batch=1, **FEW)
    for sample, total, mean in zip(plain.samples, sums.scores, means.scores, strict=True):
        own = [top[t] for top, t in zip(sample.logprobs, sample.tokens, strict=True)]
        assert total == pytest.approx(math.fsum(own))
        assert mean == pytest.approx(math.fsum(own) / len(own))
    assert sums.scores[sums.chosen.index] == max(sums.scores)
    assert means.scores[means.chosen.index] == max(means.scores)


def test_score_and_weighted_votes(model: Model) -> None:
    longest = best_of(model, PROMPT, n=6, scorer=lambda prompt, text: len(text), **FEW)
    assert len(longest.text) == max(len(s.text) for s in longest.samples)
    found = best_of(
        model, PROMPT, n=6, select="weighted", parse=first_word,
        scorer=lambda prompt, text: len(text), **FEW,
    )  # fmt: skip
    sums: dict[str, float] = {}
    for sample in found.samples:
        if word := first_word(sample.text):
            sums[word] = sums.get(word, 0) + len(sample.text)
    assert found.votes == pytest.approx(sums)
    assert found.answer == max(sums, key=sums.__getitem__)


def test_negative_scores_cannot_weigh_votes(model: Model) -> None:
    """They would elect the answer with the fewest samples."""
    found = best_of(
        model, PROMPT, n=6, select="weighted", parse=first_word,
        scorer=lambda prompt, text: -float(len(text)), **FEW,
    )  # fmt: skip
    shortest = min(found.samples, key=lambda sample: len(sample.text))
    assert len(found.chosen.text) == len(shortest.text)
    assert any("weighted votes need scores of at least 0" in note for note in found.notes)
    assert min(found.votes.values()) >= 1


def test_a_parser_that_raises_leaves_the_samples(model: Model) -> None:
    with pytest.raises(ZeroDivisionError) as caught:
        best_of(model, PROMPT, n=3, parse=lambda text: str(1 / 0), **FEW)
    assert len(caught.value.samples) == 3


def test_a_parser_of_something_else_is_told(model: Model) -> None:
    with pytest.raises(ConfigError, match=r"parse must return a text, or None .*got \[1\]"):
        best_of(model, PROMPT, n=2, parse=lambda text: [1], **FEW)  # type: ignore[arg-type]


def test_early_stop_keeps_the_winner_of_all(model: Model) -> None:
    def parse(text: str) -> str:
        return "long" if len(text) > 2 else "short"

    full = best_of(model, PROMPT, n=12, batch=3, parse=parse, **FEW)
    early = best_of(model, PROMPT, n=12, batch=3, parse=parse, early_stop=True, **FEW)
    assert early.answer == full.answer
    assert len(early.samples) < early.num_asked == 12
    assert any("early stop" in note for note in early.notes)
    kept = sum(len(sample.tokens) for sample in early.samples)
    assert early.num_abandoned == early.stats.generated - kept > 0 == full.num_abandoned


def test_a_failing_scorer_loses_that_sample_only(model: Model) -> None:
    plain = best_of(model, PROMPT, n=6, parse=first_word, **FEW)
    lengths = [len(sample.text) for sample in plain.samples]

    def scorer(prompt: str, text: str) -> float:
        if len(text) == max(lengths):
            raise RuntimeError("no")
        return math.nan if len(text) == min(lengths) else len(text)

    found = best_of(model, PROMPT, n=6, scorer=scorer, **FEW)
    lost = [i for i, score in enumerate(found.scores) if score is None]
    assert lost == [i for i, n in enumerate(lengths) if n in (max(lengths), min(lengths))]
    assert found.chosen.index not in lost
    assert sum("dropped" in note for note in found.notes) == len(lost)


def test_all_samples_lost_is_an_error_that_carries_them(model: Model) -> None:
    with pytest.raises(NoSampleLeft, match="failed on all 3 samples.*nan") as caught:
        best_of(model, PROMPT, n=3, scorer=lambda prompt, text: math.nan, **FEW)
    assert len(caught.value.samples) == 3


def test_fewer_at_a_time_where_memory_is_short(
    model: Model, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Cells for three sequences only: all samples come, the same ones, and a note says so."""
    small = forerun.load(make_tiny(tmp_path / "small"), dtype="fp32", max_seqs=16)
    options = FEW | {"drafter": "stand:scope=request", "controller": "fixed:nodes=4"}
    wanted = best_of(model, PROMPT, n=8, batch=1, parse=first_word, **options)
    cells = small.target.cache
    layers, _, _, *cell = cells.data.shape
    room = 3 * 256 * layers * math.prod(cell) * 4
    monkeypatch.setattr(cache_module, "available_bytes", lambda device: room)
    found = best_of(small, PROMPT, n=8, batch=8, parse=first_word, **options)
    assert [s.tokens for s in found.samples] == [s.tokens for s in wanted.samples]
    assert any("at most" in note and "memory" in note for note in found.notes)


def test_more_than_the_model_was_loaded_for_is_said(model: Model) -> None:
    found = best_of(model, PROMPT, n=2, batch=99, parse=first_word, **FEW)
    assert "at most 16 sequences run at once, not 99: max_seqs is 16" in found.notes


def test_what_ends_it_early_carries_the_samples(model: Model) -> None:
    count = 0

    def stop(step: object) -> None:
        nonlocal count
        count += 1
        if count > 20:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt) as caught:
        best_of(model, PROMPT, n=50, on_step=stop, drafter="none", **FEW)
    assert 1 <= len(caught.value.samples) < 50


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"n": 0}, "n must be a whole number from 1 to 65536, got 0"),
        ({"n": 10**9}, "from 1 to 65536"),
        ({"n": 2.5}, "got 2.5"),
        ({"alone": 17}, "alone in 0..n"),
        ({"select": "majorty"}, "did you mean 'majority'"),
        ({"select": "score"}, "needs scorer"),
        ({"select": "majority", "scorer": len}, "uses no scorer"),
        ({"early_stop": True, "select": "likelihood"}, "only a vote"),
        ({"scorer": 3}, "must be a callable"),
        ({"temprature": 1}, "did you mean 'temperature'"),
    ],
    ids=str,
)
def test_bad_options(model: Model, options: dict, said: str) -> None:
    with pytest.raises((ConfigError, UnknownName), match=said):
        best_of(model, PROMPT, **options)


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("Answer: 12", "12"),
        ("Answer: 3\nAnswer: 012\n", "12"),
        ("so \\boxed{\\frac{1}{2}} holds", "\\frac{1}{2}"),
        ("\\boxed{7", None),
        ("#### 1,200", "1200"),
        ("#### 12,345,678.0", "12345678"),
        ("Answer: 1,2", "1,2"),  # a list
        ("\\boxed{3,5}", "3,5"),
        ("**Answer:** 1200.0", "1200"),
        ("Answer: $2.50", "2.5"),
        ("Answer: yes.", "yes"),
        ("the answer", None),
        ("Answer: 48\nAnswer:", "48"),  # cut off
        ("Answer: 48\nAnswering machines are nice", "48"),
        ("**Answer:**", None),
        ("**Answer**: 48", "48"),
        ("Answer: **48**", "48"),
        ("Answer 48", "48"),
        ("Answers vary.", None),
        ("#### ", None),
    ],
)
def test_last_answer(text: str, answer: str | None) -> None:
    assert last_answer(text) == answer


def test_patterns_take_the_last_match() -> None:
    assert pattern(r"= (\d+)")("a = 3, b = 04") == "4"
    assert pattern(r"\d+")("no") is None
    with pytest.raises(ConfigError, match="not a regular expression"):
        pattern("(")


def test_a_vote_is_decided_when_nothing_can_change_it() -> None:
    assert is_decided(["a", "a", None], 1)
    assert not is_decided(["a", "a", "b"], 1)  # a tie would still need the order
    assert not is_decided([None], 0)
    assert list(count_votes(["b", "a", "a", None], [2, 1, 1.5, 9])) == ["a", "b"]
