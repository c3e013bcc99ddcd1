"""n-gram style: worked examples of both forms, what stays untouched, refusals, the command."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import forerun
from forerun.cli.main import main
from forerun.constraints.ngram_style import NgramStyle
from forerun.core.dice import SeededDice
from forerun.core.records import Sequence
from forerun.core.sampling import Sampling, softmax
from forerun.errors import ConfigError, UnknownName
from forerun.ngrams.index.counts.trie import NgramModel
from forerun.tasks.reasoning import ReasoningTask

V, K = 6, 1e-3
TEXT = [0, 1, 2, 0, 1, 3, 0, 1, 2]  # N: 9; 0 -> 1 three times; (0, 1) -> 2 twice, 3 once
MODEL = NgramModel.count([np.array(TEXT)], vocab_size=V)
LOGITS = np.linspace(-1, 2, V)


def seq(tokens: list[int]) -> Sequence:
    return Sequence(tokens, len(tokens), Sampling(), SeededDice(0), limit=4)


def jsd(p: np.ndarray, q: np.ndarray) -> float:
    m = (p + q) / 2
    return float(sum(np.sum(x * np.log2(x / m)) for x in (p, q)) / 2)


def test_the_published_form_adds_weighted_logs() -> None:
    shaper = NgramStyle(MODEL, strength=0.5, form="paper")
    shift = dict(zip(*map(list, shaper.shift((0, 1))), strict=True))
    assert set(shift) == {0, 1, 2, 3}
    one, two = math.log((2 + K) / (9 + K * V)), math.log((2 + K) / (3 + K * V))
    assert shift[2] == pytest.approx(0.5 * (0.1 * one + 0.3 * two + 0.6 * two))
    assert shift[0] == pytest.approx(0.5 * 0.1 * math.log((3 + K) / (9 + K * V)))
    assert max(shift.values()) < 0  # it can only take away


def test_the_floored_form_adds_what_lies_above_an_unseen_token() -> None:
    shaper = NgramStyle(MODEL, strength=0.5)
    shift = dict(zip(*map(list, shaper.shift((0, 1))), strict=True))
    assert shift[2] == pytest.approx(0.5 * (0.1 + 0.3 + 0.6) * math.log((2 + K) / K))
    assert shift[3] == pytest.approx(0.5 * (0.1 + 0.3 + 0.6) * math.log((1 + K) / K))
    assert shift[0] == pytest.approx(0.5 * 0.1 * math.log((3 + K) / K))
    assert min(shift.values()) > 0


def test_the_example_of_the_sign() -> None:
    """Known to all orders, a token may lose more than one that is known as a unigram only."""
    all_orders = 0.6 * math.log(0.5) + 0.3 * math.log(0.3) + 0.1 * math.log(0.05)
    unigram_only = 0.1 * math.log(0.001)
    assert all_orders == pytest.approx(-1.08, abs=0.005)
    assert unigram_only == pytest.approx(-0.69, abs=0.005)


@pytest.mark.parametrize("form", ["paper", "floored"])
def test_unlisted_tokens_keep_their_logits_and_the_argument_its_values(form: str) -> None:
    shaper = NgramStyle(MODEL, strength=1, form=form)
    for dtype in (np.float32, np.float64):
        before = LOGITS.astype(dtype)
        given = before.copy()
        shaped = shaper.logits((0, 1), given)
        assert np.array_equal(given, before) and shaped.dtype == dtype
        assert np.array_equal(shaped[4:], before[4:])
        assert (shaped[:4] != before[:4]).all()


def test_strength_0_leaves_the_sequence_alone() -> None:
    assert NgramStyle(MODEL, strength=0).start(seq([0, 1])) is None


def test_states_are_the_last_two_tokens() -> None:
    shaper = NgramStyle(MODEL, strength=1)
    state = shaper.start(seq([3, 0, 1]))
    assert state == (0, 1)
    assert shaper.advance(state, 2) == (1, 2) and state == (0, 1)
    assert shaper.start(seq([3])) == (3,)
    assert NgramStyle(MODEL, weights=(1.0,)).start(seq([3, 1])) == ()


@settings(deadline=None)  # kernels compile
@given(a=st.integers(0, 5), b=st.integers(0, 5), form=st.sampled_from(["paper", "floored"]))
def test_the_divergence_grows_with_the_strength(a: int, b: int, form: str) -> None:
    plain, found = softmax(LOGITS), []
    for strength in (0.0, 0.1, 0.3, 0.7, 1.0):
        shaped = NgramStyle(MODEL, strength=strength, form=form).logits((a, b), LOGITS)
        found.append(jsd(plain, softmax(shaped)))
    assert found[0] == pytest.approx(0, abs=1e-15)
    assert all(x <= y + 1e-12 for x, y in zip(found, found[1:], strict=False))
    assert found[-1] <= 1


def test_only_the_most_frequent_entries_count() -> None:
    shift = NgramStyle(MODEL, strength=1, entries=1).shift((0, 1))
    assert shift.ids.tolist() == [0, 2]  # of unigrams 0 (ties with 1), else 2


def test_shifts_are_kept_for_a_bounded_number_of_contexts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("forerun.constraints.ngram_style.MAX_CACHED_CONTEXTS", 3)
    shaper = NgramStyle(MODEL)
    for a in range(V):
        shaper.shift((a, 0))
    assert len(shaper._shifts) == 3 and (V - 1, 0) in shaper._shifts


@pytest.mark.parametrize("strength", [-0.1, 1.5, math.nan])
def test_a_strength_outside_0_to_1_is_refused(strength: float) -> None:
    with pytest.raises(ConfigError, match=r"0\.1 to 0\.3.*must be in \[0, 1\], got"):
        NgramStyle(MODEL, strength=strength)


def test_other_options_are_refused() -> None:
    with pytest.raises(UnknownName, match="unknown form of n-gram style 'flored'.*'floored'"):
        NgramStyle(MODEL, form="flored")
    with pytest.raises(ConfigError, match="smoothing .*above 0"):
        NgramStyle(MODEL, smoothing=0)
    with pytest.raises(ConfigError, match="counts n-grams up to 3, but there are 4 weights"):
        NgramStyle(MODEL, weights=(0.1, 0.2, 0.3, 0.4))
    with pytest.raises(ConfigError, match="has token 3, but the ids of this model end at 2"):
        NgramStyle(MODEL).logits((0, 1), np.zeros(3))


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("style") / "style.txt"
    file.write_text("The answer is 7. The answer is 7 indeed. The answer is 7.\n" * 20)
    return file


def test_drafts_do_not_change_styled_greedy_text(text: Path) -> None:
    model = forerun.load()
    shapers = [NgramStyle(text, strength=1, tokenizer=model.tokenizer)]
    prompt = ReasoningTask("heldout").example(0).prompt
    found = {
        drafter: model.generate(
            prompt, temperature=0, max_new_tokens=40, shapers=shapers, drafter=drafter
        )[0]
        for drafter in ("none", "stand", "prompt_lookup")
    }
    plain = model.generate(prompt, temperature=0, max_new_tokens=40, drafter="none")[0]
    assert len({r.text for r in found.values()}) == 1
    assert found["none"].text != plain.text
    assert found["stand"].stats.tau > 1


def test_the_command_reaches_it(text: Path, capsys: pytest.CaptureFixture[str]) -> None:
    call = ["generate", "-p", "2 + 5 is", "-t", "0", "--max-new-tokens", "12", "--json"]
    texts = {}
    for strength in ("0", "1"):
        assert main([*call, "--style", str(text), "--style-lambda", strength]) == 0
        texts[strength] = json.loads(capsys.readouterr().out)["text"]
    assert main(call) == 0
    assert json.loads(capsys.readouterr().out)["text"] == texts["0"] != texts["1"]


def test_the_command_refuses_bad_styles(text: Path, capsys: pytest.CaptureFixture[str]) -> None:
    call = ["generate", "-p", "2 + 5 is"]
    for more, words in (
        (["--style-lambda", "0.3"], "--style-lambda needs --style FILE"),
        (["--style-form", "paper"], "--style-form needs --style FILE"),
        (["--style", str(text), "--style-lambda", "2"], "must be in [0, 1], got 2.0"),
        (["--style", str(text), "--style-form", "x"], "unknown form of n-gram style 'x'"),
        (["--style", "no/such.txt"], "there is no file no/such.txt"),
    ):
        assert main([*call, *more]) != 0
        assert words in " ".join(capsys.readouterr().err.split())
