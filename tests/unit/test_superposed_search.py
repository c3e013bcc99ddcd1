"""Superposed Decoding: worked examples, mixed passes against plain ones, refusals, command."""

from __future__ import annotations

import itertools
import json
import math
import os
from pathlib import Path
from threading import Thread

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import forerun
from forerun.cli.main import main
from forerun.core.dice import SeededDice
from forerun.core.forward_batch import ForwardBatch
from forerun.core.records import Sequence
from forerun.core.sampling import Sampling
from forerun.core.tree import EMPTY
from forerun.errors import CapacityError, ConfigError, DataError
from forerun.ngrams.index.counts.trie import NgramModel
from forerun.runner.attention import TorchDecoder
from forerun.runner.soft_embeddings import MixedStream
from forerun.search._superposition import extend, likeliest, mixed_scores, superposition
from forerun.search.superposed import (
    Draft,
    Settings,
    Superposed,
    drafts_of,
    rescored,
    superposed,
)

PROMPT = "Anna has 3 apples and buys 4 more."


@pytest.fixture(scope="module")
def model() -> forerun.Model:
    return forerun.load()


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("superposed") / "corpus.txt"
    file.write_text(
        "Anna has 3 apples and buys 4 more. How many does she have? She has 7 apples.\n" * 9
        + "Ben has 2 pears and gives 1 away. How many are left? There is 1 pear left.\n" * 9
    )
    return file


@pytest.fixture(scope="module")
def ngrams(model: forerun.Model, text: Path) -> NgramModel:
    return NgramModel.of_files([text], model.tokenizer, order=6)


def one_draft() -> Settings:
    """k = 1 without n-grams, which users are refused."""
    how = Settings(ngram_weight=0.0)
    object.__setattr__(how, "k", 1)
    return how


def plain_logits(model: forerun.Model, tokens: list[int]) -> np.ndarray:
    seq = Sequence(tokens, len(tokens), Sampling(), SeededDice(0), limit=1)
    row = model.target.forward(ForwardBatch([seq], [EMPTY]))[0].row(-1)
    model.target.release(seq)
    return row


# ------------------------------------------------------------------- pieces of the algorithm


def test_weights_of_the_hand_example() -> None:
    logs = [math.log(x) for x in (0.6, 0.3, 0.1)]
    drafts = [Draft((1, last), score) for last, score in zip((7, 9, 7), logs, strict=True)]
    tokens, weights = superposition(drafts)
    assert tokens == [7, 9] and weights == pytest.approx([0.7, 0.3])


@given(scores=st.lists(st.floats(-400, 0), min_size=1, max_size=6))
def test_weights_are_a_convex_combination(scores: list[float]) -> None:
    _, weights = superposition([Draft((i % 3,), s) for i, s in enumerate(scores)])
    assert sum(weights) == pytest.approx(1) and min(weights) >= 0


@given(
    table=st.lists(st.lists(st.floats(-9, 0), min_size=4, max_size=4), min_size=1, max_size=4),
    most=st.integers(1, 8),
)
def test_the_best_extensions_equal_brute_force(table: list[list[float]], most: int) -> None:
    ids = np.array([5, 3, 8, 2])
    drafts = [Draft((i,), -float(i)) for i in range(len(table))]
    found = extend(drafts, ids, np.array(table), most)
    brute = sorted(
        (
            (
                drafts[i].score + table[i][j]
                for i, j in itertools.product(range(len(table)), range(4))
            )
        ),
        reverse=True,
    )
    assert [d.score for d in found] == pytest.approx(brute[:most])
    assert len({d.tokens for d in found}) == len(found)


def test_candidates_are_renormalised_at_the_temperature() -> None:
    ids, logp = likeliest(np.array([1.0, 3.0, 2.0, 3.0]), 0.5, 3)
    assert ids.tolist() == [1, 3, 2]
    weights = np.exp(np.array([6.0, 6.0, 4.0]))
    assert np.exp(logp) == pytest.approx(weights / weights.sum())


def test_scores_mix_logarithms_or_pay_the_penalty() -> None:
    how, logp = Settings(), np.log([0.5, 0.3, 0.2])
    mixed = mixed_scores(logp, np.array([0.1, 0.0, 0.4]), how)
    assert mixed[0] == pytest.approx(0.46 * math.log(0.5) + 0.54 * math.log(0.1))
    assert mixed[1] == -math.inf
    assert mixed_scores(logp, np.zeros(3), how) == pytest.approx(0.46 * logp - 200)
    assert mixed_scores(logp, None, how) is logp


def test_shares_add_what_each_context_says() -> None:
    counts = NgramModel.count([np.array([1, 2, 3, 1, 2, 4, 2, 3])], vocab_size=6, order=3)
    found = counts.shares([9, 1, 2], np.array([3, 4, 5]), (0.25, 0.5))
    assert found == pytest.approx([0.25 * 2 / 3 + 0.5 / 2, 0.25 / 3 + 0.5 / 2, 0])
    assert counts.shares([5], np.array([3]), (0.25,)).tolist() == [0.0]  # not seen


@settings(deadline=None, max_examples=30)
@given(data=st.data())
def test_shares_equal_the_rows(data: st.DataObject) -> None:
    text = data.draw(st.lists(st.integers(0, 3), min_size=4, max_size=30))
    counts = NgramModel.count([np.array(text)], vocab_size=4, order=4)
    last = data.draw(st.lists(st.integers(0, 3), max_size=5))
    weights, wanted = (0.2, 0.3, 0.4), np.zeros(4)
    for length, weight in enumerate(weights, start=1):
        row = counts.row(last[len(last) - length :]) if length <= len(last) else None
        if row is not None:
            wanted[row.ids] += weight * row.counts / row.total
    assert counts.shares(last, np.arange(4), weights) == pytest.approx(wanted)


# ------------------------------------------------------------------- bad input


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"temperature": math.nan}, "temperature"),
        ({"temperature": 0.0}, "temperature"),
        ({"weights": (0.1, -0.1)}, "weight"),
        ({"weights": (0.1, math.nan)}, "weight"),
        ({"weights": ()}, "weight"),
        ({"weights": (0.0, 0.0)}, "weights"),
        ({"ngram_weight": math.nan}, "ngram_weight"),
        ({"penalty": math.inf}, "penalty"),
        ({"penalty": -1.0}, "penalty"),
        ({"k": 2.5}, "k, "),
        ({"candidates": 3.5}, "candidates"),
        ({"candidates": -1}, "candidates"),
        ({"candidates": 2}, "candidates=2"),
    ],
)
def test_settings_out_of_range_are_named(options: dict[str, object], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        Settings(**options)


def test_prompts_and_drafts_are_token_ids(model: forerun.Model) -> None:
    size = model.target.vocab_size
    for prompt in ([5, -1], [5, size], [5.5], ["Anna", "has"], [[5]], []):
        with pytest.raises(DataError):
            superposed(model, prompt, ngram_weight=0.0)
        with pytest.raises(DataError):
            rescored(model, prompt, [Draft((1,))])
    for tokens in ((1, size), (-3,), (1.5,)):
        with pytest.raises(DataError):
            rescored(model, PROMPT, [Draft(tokens)])
    for num in (0, -1, 2.5, math.nan):
        with pytest.raises(ConfigError, match="max_new_tokens"):
            superposed(model, PROMPT, ngram_weight=0.0, max_new_tokens=num)


def test_counts_of_another_vocabulary_are_refused(model: forerun.Model) -> None:
    size = model.tokenizer.vocab_size
    text = [np.array([1, 2, 3, 1, 2])]
    for counts in (
        NgramModel.count(text, vocab_size=6),
        NgramModel.count(text, vocab_size=size, tokenizer="of another model"),
    ):
        with pytest.raises(ConfigError, match="another vocabulary"):
            superposed(model, PROMPT, ngrams=counts)
    for ngrams in ("a text", ["a", "b"], 3):
        with pytest.raises(ConfigError, match="ngrams"):
            superposed(model, PROMPT, ngrams=ngrams)


def test_there_are_always_k_drafts(model: forerun.Model) -> None:
    """Also where the n-grams know a single successor, or none."""
    text = model.tokenizer.encode(PROMPT)
    counts = NgramModel.count([np.array(text)], vocab_size=model.tokenizer.vocab_size, order=6)
    for length in range(1, len(text)):
        for num in (1, 2, 4):
            found = superposed(model, text[:length], ngrams=counts, k=3, max_new_tokens=num)
            assert len({d.tokens for d in found.drafts}) == 3
            assert all(math.isfinite(d.score) for d in found.drafts)
            assert "3 drafts from" in found.remarks(1.0)[1]


def test_a_seen_successor_comes_before_the_likelier_others() -> None:
    """One of three candidates is in the n-grams: it is first, the others follow by likelihood."""
    how = Settings(k=3, penalty=200.0)
    logp, shares = np.log([0.6, 0.3, 0.1]), np.array([0.0, 0.0, 0.2])
    scores = mixed_scores(logp, shares, how)
    penalised = (1 - how.ngram_weight) * logp - how.penalty
    ids = np.array([7, 8, 9])
    found = extend([Draft(())], ids, scores[None], 6, how.k, penalised)
    assert [d.tokens for d in found] == [(9,), (7,), (8,)]
    assert found[1].score == pytest.approx(0.46 * math.log(0.6) - 200)
    assert len(extend([Draft(())], ids, scores[None], 6)) == 1


def test_a_model_that_allows_fewer_tokens_is_said() -> None:
    found = Superposed("x", [Draft((1,), 0.0, "a")], 2, 3)
    assert "1 draft of 3: the model allows no other tokens" in found.remarks(1.0)[1]


# ------------------------------------------------------------------- mixed embeddings


def test_one_token_of_weight_1_is_a_plain_step(model: forerun.Model) -> None:
    tokens = model.tokenizer.encode(PROMPT)
    stream = MixedStream(model.target)
    assert np.array_equal(stream.prompt(tokens[:-2]), plain_logits(model, tokens[:-2]))
    stream.step([tokens[-2]], [1.0])
    assert np.array_equal(stream.step([tokens[-1]], [1.0]), plain_logits(model, tokens))
    assert np.array_equal(
        MixedStream(model.target).prompt(tokens), plain_logits(model, tokens)
    )  # the cells of the stream are its own


def test_weights_of_one_token_add_up(model: forerun.Model) -> None:
    stream = MixedStream(model.target)
    mixes = stream.mix([7, 9, 7], [0.6, 0.3, 0.1]), stream.mix([7, 9], [0.7, 0.3])
    assert torch.allclose(*mixes, rtol=0.01, atol=1e-4)  # bf16 has 8 bits


def test_native_and_torch_passes_agree_on_mixes(model: forerun.Model) -> None:
    tokens, found = model.tokenizer.encode(PROMPT), []
    for decoder in (model.target.decode, TorchDecoder(model.target.model)):
        stream = MixedStream(model.target)
        before, model.target.decode = model.target.decode, decoder
        try:
            stream.prompt(tokens)
            found.append(stream.step([7, 9], [0.7, 0.3]))
        finally:
            model.target.decode = before
    scale = np.abs(found[1]).max()
    assert np.abs(found[0] - found[1]).max() < 0.05 * scale  # bf16 rounds both


def test_a_long_prompt_goes_in_chunks(model: forerun.Model, monkeypatch) -> None:
    tokens = model.tokenizer.encode(PROMPT * 3)
    whole = MixedStream(model.target).prompt(tokens)
    monkeypatch.setattr("forerun.runner.soft_embeddings.CHUNK", 7)
    stream = MixedStream(model.target)
    assert np.argmax(stream.prompt(tokens)) == np.argmax(whole)
    assert stream.num_passes == -(-len(tokens) // 7)


# ------------------------------------------------------------------- whole drafts


def test_one_draft_without_ngrams_is_greedy(model: forerun.Model) -> None:
    tokens = model.tokenizer.encode(PROMPT)
    (draft,) = drafts_of(MixedStream(model.target), tokens, None, one_draft(), 12)
    plain = model.generate(PROMPT, temperature=0, max_new_tokens=12, drafter="none")[0]
    assert list(draft.tokens) == plain.samples[0].tokens


def test_k_drafts_differ_and_cost_one_pass_each_token(
    model: forerun.Model, ngrams: NgramModel
) -> None:
    for k in (2, 3, 5):
        found = superposed(model, PROMPT, ngrams=ngrams, k=k, max_new_tokens=8)
        assert found.num_passes == 8  # the prompt's, and one before each later token
        assert len({d.tokens for d in found.drafts}) == k
        scores = [d.mean_score for d in found.drafts]
        assert scores == sorted(scores, reverse=True)
        assert all(len(d.tokens) == 8 or d.finish == "stop" for d in found.drafts)
    again = superposed(model, PROMPT, ngrams=ngrams, k=5, max_new_tokens=8)
    assert again.drafts == found.drafts  # nothing is random


def test_drafts_that_end_compete_and_stay(model: forerun.Model) -> None:
    tokens = model.tokenizer.encode(PROMPT)
    plain = model.generate(PROMPT, temperature=0, max_new_tokens=3, drafter="none")[0]
    end = plain.samples[0].tokens[2]
    stream, how = MixedStream(model.target), Settings(ngram_weight=0.0)
    found = drafts_of(stream, tokens, None, how, 6, (end,))
    assert any(d.finish == "stop" and d.tokens[-1] == end for d in found)
    assert all(end not in d.tokens[:-1] for d in found)
    assert all(d.finish == "stop" or len(d.tokens) == 6 for d in found)


def test_plain_scores_are_those_of_the_plain_model(
    model: forerun.Model, ngrams: NgramModel
) -> None:
    found = superposed(model, PROMPT, ngrams=ngrams, max_new_tokens=4)
    tokens = model.tokenizer.encode(PROMPT)
    for draft, logprobs in zip(found.drafts, rescored(model, PROMPT, found.drafts), strict=True):
        for i, (token, logp) in enumerate(zip(draft.tokens, logprobs, strict=True)):
            z = plain_logits(model, tokens + list(draft.tokens[:i])).astype(np.float64)
            assert logp == pytest.approx(float(z[token] - np.log(np.exp(z).sum())), abs=1e-4)


# ------------------------------------------------------------------- refusals and the command


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"k": 1}, "must be at least 2, got 1.*generate --temperature 0"),
        ({"ngram_weight": 1.2}, r"must be in \[0, 1\], got 1.2"),
        ({"temperature": 0.0}, "temperature .*must be a finite number above 0"),
        ({}, "needs n-gram counts, got none; give ngrams="),
        (
            {"ngram_weight": 0.0, "max_new_tokens": 0},
            "max_new_tokens must be a whole number of at least 1",
        ),
    ],
)
def test_bad_options_are_refused(model: forerun.Model, options: dict, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        superposed(model, PROMPT, **options)


def test_bad_input_is_refused(model: forerun.Model) -> None:
    with pytest.raises(DataError, match="prompt is empty"):
        superposed(model, "", ngram_weight=0.0)
    with pytest.raises(ConfigError, match="counts of order 1"):
        superposed(model, PROMPT, ngrams=NgramModel.count([np.array([1])], vocab_size=2, order=1))
    with pytest.raises(CapacityError, match="but the context is .*shorten the prompt"):
        superposed(model, [5] * model.target.context, ngram_weight=0.0)
    with pytest.raises(ConfigError, match="forerun's own decoder"):
        MixedStream(object())  # type: ignore[arg-type]


def test_the_command(text: Path, capsys: pytest.CaptureFixture[str]) -> None:
    call = ["search", "--method", "superposed", "-p", PROMPT, "--max-new-tokens", "6"]
    assert main([*call, "--ngrams", str(text), "--json"]) == 0
    record = json.loads(capsys.readouterr().out)
    assert record["method"] == "superposed" and record["lossless"] is False
    assert len(record["drafts"]) == 3 and record["passes"] == 6
    assert record["text"] == record["drafts"][0]["text"]
    assert all(d["logprob"] < 0 and len(d["tokens"]) == 6 for d in record["drafts"])
    assert main([*call, "--ngrams", str(text), "-n", "2"]) == 0
    assert len(capsys.readouterr().out.strip().splitlines()) == 2


@pytest.mark.parametrize(("lines", "is_tiny"), [(54, True), (55, False)])  # 7 tokens a line
def test_a_tiny_corpus_is_warned_of(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, lines: int, is_tiny: bool
) -> None:
    file = tmp_path / "corpus.txt"
    file.write_text("Anna has 3 apples.\n" * lines)
    call = ["search", "--method", "superposed", "-p", PROMPT, "--max-new-tokens", "3"]
    assert main([*call, "--ngrams", str(file)]) == 0
    assert ("lacks most of the 768 ids" in caplog.text) == is_tiny


def test_the_corpus_may_be_a_pipe_or_at_home(
    text: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("HOME", str(text.parent))
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    call = ["search", "--method", "superposed", "-p", PROMPT, "--max-new-tokens", "6", "--json"]
    Thread(target=pipe.write_bytes, args=[text.read_bytes()], daemon=True).start()
    found = []
    for corpus in (str(text), f"~/{text.name}", str(pipe)):
        assert main([*call, "--ngrams", corpus]) == 0
        found.append(json.loads(capsys.readouterr().out)["drafts"])
    assert found[0] == found[1] == found[2]


def test_the_command_refuses(text: Path, capsys: pytest.CaptureFixture[str]) -> None:
    call = ["search", "-p", PROMPT]
    mine = [*call, "--method", "superposed"]
    for words, said in (
        (mine, "superposed needs n-gram counts: give --ngrams FILE"),
        ([*mine, "--ngrams", str(text), "-n", "-3"], "superposed drafts (-n), must be at least 2"),
        (
            [*mine, "--ngrams", str(text), "--seed", "3"],
            "not to superposed",
        ),
        ([*mine, "--ngrams", str(text), "--ngram-weight", "2"], "must be in [0, 1], got 2.0"),
        ([*mine, "--ngrams", "no/such.txt"], "ngrams: there is no file no/such.txt"),
        ([*mine, "--ngrams", str(text.parent)], "is a folder; give the files in it"),
        ([*mine, "--ngrams", str(text), "--scorer", "arithmetic"], "--scorer"),
        ([*call, "--ngrams", str(text)], "--ngrams belongs to superposed, not to best_of"),
    ):
        assert main(words) != 0
        assert said in " ".join(capsys.readouterr().err.split())
