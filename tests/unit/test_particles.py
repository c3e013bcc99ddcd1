"""Particles: resampling, unbiased weights by enumeration, critics, ends, shared cells, commands."""

from __future__ import annotations

import json
import math
import re
from collections import Counter, defaultdict
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from three_tokens import END, three_tokens
from tiny import make_tiny

import forerun
from fakes import FakeTarget, table_law
from forerun.api import Model
from forerun.cli.main import main
from forerun.constraints.choice import Choice
from forerun.constraints.python import Predicate
from forerun.constraints.regex import Regex
from forerun.core.dice import EnumeratedDice
from forerun.core.sampling import Sampling
from forerun.errors import ConfigError, UnknownName
from forerun.search._population import Population
from forerun.search._resampling import RESAMPLING
from forerun.search.particles import Particles, Posterior, particles
from forerun.verifiers.weighted import Weighted

PROMPT = [0, 1]
TEXTS = ("a", "ab", "bb")
RULE = Weighted(rule="recursive", method="recursive")


def few_ways(tokens: list[int]) -> np.ndarray:
    """A law with two likely tokens in each place, so that all runs can be enumerated."""
    text = tuple(tokens[len(PROMPT) :])
    laws = {(): (0.6, 0.4, 0.0), (0,): (0.0, 0.7, 0.3), (1,): (0.5, 0.5, 0.0)}
    return np.maximum(laws.get(text, (0.2, 0.0, 0.8)), 1e-200)


LAW = table_law(1)


def model_of(law: Callable = LAW) -> Model:
    return Model(FakeTarget(law), three_tokens())


def probability(text: str, law: Callable = few_ways) -> float:
    """P(text, then the end) under the model."""
    tokens, prob = list(PROMPT), 1.0
    for token in [*("ab".index(letter) for letter in text), END]:
        prob *= law(tokens)[token]
        tokens.append(token)
    return float(prob)


@pytest.mark.parametrize("name", list(RESAMPLING))
@pytest.mark.parametrize("weights", [(0.5, 0.3, 0.2), (0.9, 0.1, 0.0, 0.0), (0.25,) * 4, (1.0,)])
def test_resampling_is_unbiased(name: str, weights: tuple[float, ...]) -> None:
    n, places = len(weights), np.zeros(len(weights))
    for found, prob in EnumeratedDice().outcomes(
        lambda dice: RESAMPLING[name](np.array(weights), dice)
    ):
        counts = np.bincount(found, minlength=n)
        assert counts.sum() == n
        places += prob * counts
        if name in ("systematic", "residual"):
            assert np.all(counts >= np.floor(n * np.array(weights)))
        if name == "systematic":
            assert np.all(counts <= np.ceil(n * np.array(weights)))
        if name == "stratified":
            assert np.all(np.abs(counts - n * np.array(weights)) < 2)
    assert np.allclose(places, n * np.array(weights), atol=1e-12)


def outcomes(
    search: Particles,
    constraint: object,
    length: int = 3,
    law: Callable = few_ways,
    more: dict | None = None,
) -> list[tuple[Posterior, float]]:
    """Every outcome of a run of particles."""
    dice = EnumeratedDice()
    options = {"constraint": constraint, "max_new_tokens": length, "verifier": RULE}
    options |= {"controller": "fixed", "dice": lambda *_: dice} | (more or {})
    with search.session(model_of(law), PROMPT, **options) as session:
        return list(dice.outcomes(lambda _: search.posterior(session)))


def shares(found: list[tuple[Posterior, float]]) -> dict[str, float]:
    """E[mean weight of the particles with a text]."""
    total: dict[str, float] = defaultdict(float)
    for posterior, prob in found:
        for sample in posterior.samples:
            weight = math.exp(sample.constraint.logw)
            total[sample.text] += prob * weight / len(posterior.samples)
    return total


def check(found: list[tuple[Posterior, float]], critic: Callable[[str], float] = len) -> None:
    """E[mean weight] of each text is P(text) times the critic's value; the evidence is the sum."""
    worth = (lambda text: 1.0) if critic is len else critic
    total = shares(found)
    for text in TEXTS:
        assert total[text] == pytest.approx(probability(text) * worth(text), abs=1e-12)
    evidence = sum(prob * math.exp(posterior.log_evidence) for posterior, prob in found)
    exact = sum(probability(text) * worth(text) for text in TEXTS)
    assert evidence == pytest.approx(exact, abs=1e-12)


SETTINGS = [("stratified", 0.0), ("stratified", 0.95), *((name, 1.0) for name in RESAMPLING)]


@pytest.mark.parametrize(("resampling", "ess"), SETTINGS)
def test_weights_are_unbiased_by_enumeration(resampling: str, ess: float) -> None:
    found = outcomes(Particles(n=2, ess=ess, resampling=resampling), Choice(TEXTS))
    check(found)
    assert any(posterior.num_resamplings for posterior, _ in found) == (ess > 0)


WORTH = {"": 1.0, "a": 0.5, "b": 2.0, "ab": 3.0, "bb": 0.25}


@pytest.mark.parametrize("ess", [0.0, 1.0])
def test_a_critic_weighs_whole_texts(ess: float) -> None:
    """Its values on the way only guide the resampling."""
    found = outcomes(Particles(n=2, ess=ess, critic=WORTH.get), Choice(TEXTS))  # type: ignore[arg-type]
    check(found, WORTH.__getitem__)


def test_a_critic_of_0_drops_a_particle() -> None:
    critic = {"a": 1.0, "ab": 1.0, "b": 0.0, "bb": 1.0}.__getitem__
    found = outcomes(Particles(n=2, ess=0.5, critic=critic), Choice(TEXTS))
    total = shares(found)
    assert total["ab"] == pytest.approx(probability("ab"), abs=1e-12)
    assert total["a"] == pytest.approx(probability("a"), abs=1e-12)
    assert total["bb"] == 0.0 and total["b"] == 0.0
    assert any(0.0 in posterior.weights for posterior, _ in found)


def test_wrong_populations_are_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forgetting to divide the critic's value out, and weights of 1 after resampling."""
    search = Particles(n=2, ess=0.0, critic=WORTH.get)  # type: ignore[arg-type]
    with monkeypatch.context() as patch:

        def kept(self: Population, seq: object, value: float) -> None:
            seq.logw += math.log(value)  # type: ignore[attr-defined]

        patch.setattr(Population, "_twist", kept)
        with pytest.raises(AssertionError):
            check(outcomes(search, Choice(TEXTS)), WORTH.__getitem__)
    search = Particles(n=2, ess=1.0)
    with monkeypatch.context() as patch:
        resample = Population._resample

        def normalised(self: Population) -> None:
            before = self.num_resamplings
            resample(self)
            if self.num_resamplings > before:
                for seq in self.seqs:
                    seq.logw = -math.log(2)

        patch.setattr(Population, "_resample", normalised)
        with pytest.raises(AssertionError):
            check(outcomes(search, Choice(TEXTS)))


@pytest.mark.parametrize("n", [1, 5])
@pytest.mark.parametrize("ess", [0.0, 0.5, 1.0])
def test_the_mean_weight_is_unbiased(n: int, ess: float) -> None:
    """Within three standard errors over seeded runs, longer texts, any number of particles."""
    constraint, num_runs = Regex("a?b{1,3}a?"), 300
    search = Particles(n=n, ess=ess)
    with search.session(
        model_of(), PROMPT, constraint=constraint, max_new_tokens=6, seed=7
    ) as session:
        found = [math.exp(search.posterior(session, k).log_evidence) for k in range(num_runs)]
    words = [a + "b" * k + c for a in ("", "a") for k in (1, 2, 3) for c in ("", "a")]
    assert all(re.fullmatch("a?b{1,3}a?", word) for word in words)
    exact = sum(probability(word, LAW) for word in words)
    error = np.std(found) / math.sqrt(num_runs)
    assert abs(np.mean(found) - exact) < 3 * error and error < 0.1 * exact


def test_the_length_limit_takes_the_end_with_its_weight() -> None:
    """Texts of up to two tokens: of "a", "ab", "bb" only "a" ends in time."""
    found = outcomes(Particles(n=1), Choice(TEXTS), length=2)
    total = shares(found)
    assert total["a"] == pytest.approx(probability("a"), abs=1e-12)
    evidence = sum(prob * math.exp(posterior.log_evidence) for posterior, prob in found)
    assert evidence == pytest.approx(probability("a"), abs=1e-12)
    for posterior, _ in found:
        for sample in posterior.samples:
            assert sample.tokens[-1] == END and len(sample.tokens) <= 2
            assert sample.valid or sample.constraint.logw == -math.inf


@pytest.mark.parametrize(
    ("stops", "constraint", "length", "exact"),
    [
        # the stop string is cut off: "b" gives "", "ab" gives "a"; the end comes after "a" too
        ({"stop": "b"}, Regex("a?b?"), 2, {"": 0.4, "a": 0.6 * 0.7 + 0.6 * 0.3}),
        ({"stop": "b"}, Regex("a?b?"), 1, {"": 0.4}),
        # "b" gives "", which is not allowed
        ({"stop": "b"}, Regex("b|ab?|bb"), 2, {"a": 0.6}),
        # a stop token belongs to the text
        ({"stop_token_ids": (1,)}, Choice(("a", "ab", "b")), 2, {"a": 0.18, "ab": 0.42, "b": 0.4}),
        ({"stop_token_ids": (1,)}, Choice(("a", "ab", "bb")), 2, {"a": 0.18, "ab": 0.42}),
        ({"stop_token_ids": (1,)}, Choice(("a", "b")), 1, {"b": 0.4}),
        ({"stop": "b", "stop_token_ids": (0,)}, Regex("a|b"), 1, {"a": 0.6}),
    ],
)
def test_stop_strings_and_stop_tokens_end_particles(
    stops: dict, constraint: object, length: int, exact: dict[str, float]
) -> None:
    """As in plain decoding, also at the last place: P(text that ends by itself, and is allowed)."""
    found = outcomes(Particles(n=2, ess=0.5), constraint, length=length, more=stops)
    total = shares(found)
    assert {text: total[text] for text in total if total[text]} == pytest.approx(exact, abs=1e-12)
    evidence = sum(prob * math.exp(posterior.log_evidence) for posterior, prob in found)
    assert evidence == pytest.approx(sum(exact.values()), abs=1e-12)


def test_nothing_allowed_gives_no_evidence() -> None:
    found = particles(model_of(), PROMPT, constraint=Predicate(lambda text: False), seed=1)
    assert found.log_evidence == -math.inf and not any(found.weights)
    assert found.sample.valid is False and found.law() == {}
    assert "no particle" in found.remarks(1.0)[0]
    json.dumps(found.to_dict(), allow_nan=False)


def test_the_drawn_text_follows_the_weights() -> None:
    search = Particles(n=3)
    with search.session(
        model_of(), PROMPT, constraint=Choice(TEXTS), max_new_tokens=4, seed=3
    ) as session:
        found = [search.posterior(session, k) for k in range(400)]
    drawn = Counter(posterior.text for posterior in found)
    for text in TEXTS:
        mean = np.mean([posterior.law().get(text, 0.0) for posterior in found])
        assert abs(drawn[text] / 400 - mean) < 3 * math.sqrt(mean * (1 - mean) / 400) + 1e-9


def test_equal_seeds_give_equal_texts() -> None:
    def run(seed: int) -> dict:
        record = particles(model_of(), PROMPT, constraint=Regex("(a|b){2,5}"), seed=seed).to_dict()
        record.pop("stats")
        return record

    assert run(5) == run(5) and run(5)["particles"] != run(6)["particles"]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Model:
    return forerun.load(make_tiny(tmp_path_factory.mktemp("tiny")), max_seqs=8)


def test_copies_share_the_computed_text(tiny: Model) -> None:
    """With a resampling at every step no row is computed twice: the prompt once, and at most one
    row for each token of each particle."""
    before = tiny.target.num_rows  # type: ignore[attr-defined]
    prompt = tiny.tokenizer.encode("the cat sat on the mat and the dog sat on the log")
    found = particles(
        tiny, prompt, n=6, ess=1.0, constraint=Regex("[a-z ]{20,40}"), max_new_tokens=30, seed=2
    )
    rows = tiny.target.num_rows - before  # type: ignore[attr-defined]
    assert found.num_resamplings >= 5 and found.num_abandoned > 0
    steps = max(len(sample.tokens) for sample in found.samples)
    assert rows <= len(prompt) + 6 * (steps - 1)
    assert all(re.fullmatch("[a-z ]{20,40}", s.text) for s in found.samples if s.valid)
    assert tiny.target.num_held == 0


def test_texts_of_copies_are_those_that_their_tokens_say(tiny: Model) -> None:
    """A copy's shaper state, text and cells are those of its original."""
    found = particles(
        tiny, "one two", n=8, ess=1.0, constraint=Regex("([a-z]+ ){2,6}"), max_new_tokens=24, seed=4
    )
    assert found.num_resamplings > 0
    for sample in found.samples:
        assert sample.text == tiny.tokenizer.decode([t for t in sample.tokens if t != 0])
        logprobs = sample.logprobs
        assert logprobs is None
    again = particles(
        tiny,
        "one two",
        n=8,
        ess=1.0,
        constraint=Regex("([a-z]+ ){2,6}"),
        max_new_tokens=24,
        seed=4,
        logprobs=0,
    )
    assert [s.tokens for s in again.samples] == [s.tokens for s in found.samples]
    assert all(len(s.logprobs or ()) == len(s.tokens) for s in again.samples)


def test_generate_draws_each_sample_from_particles() -> None:
    model = model_of()
    requests = [
        Sampling(constraint=Choice(TEXTS), constraint_sampling="smc", max_new_tokens=4, n=2),
        Sampling(constraint=Choice(TEXTS), max_new_tokens=4, n=3),
        Sampling(constraint=Choice(TEXTS), constraint_sampling="awrs", max_new_tokens=4),
    ]
    found = model.generate([PROMPT] * 3, requests)
    assert [len(result.samples) for result in found] == [2, 3, 1]
    for result in found:
        for i, sample in enumerate(result.samples):
            assert sample.index == i and sample.valid and sample.text in TEXTS
    assert all(sample.constraint.logw < 0 for sample in found[0].samples)
    assert all(sample.constraint.logw == 0 for sample in found[1].samples)
    assert found[0].stats.generated > 5  # of all particles
    seeded = [
        [s.text for s in model.generate([PROMPT], requests[0], seed=9)[0].samples] for _ in "ab"
    ]
    assert seeded[0] == seeded[1]


def test_a_run_of_particles_can_be_left_and_streamed() -> None:
    model = model_of()
    sampling = Sampling(
        constraint=Choice(TEXTS), constraint_sampling="smc", max_new_tokens=4, n=3, seed=1
    )
    events = list(model.stream([PROMPT], sampling))
    assert [event.sample.text for event in events if event.sample] == [e.text for e in events]
    stepped = [sample for step in model.run([PROMPT], sampling).steps() for sample in step]
    assert [sample.text for sample in stepped] == [event.text for event in events]
    for _ in model.run([PROMPT], sampling).events():
        break
    assert model.target.num_held == 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"constraint": Regex("a"), "temperature": 0}, "temperature above 0"),
        ({"constraint": Regex("a"), "top_p": 0.9}, "without top_k"),
        ({}, "need a constraint"),
        ({"constraint": Regex("a"), "batch": 2}, "batch=2 is below"),
        ({"constraint": Regex("a"), "n": 0}, "number of particles"),
        ({"constraint": Regex("a"), "ess": 2}, "ess"),
        ({"constraint": Regex("a"), "critic": "no_such:thing"}, "cannot be imported"),
        ({"constraint": Regex("a"), "critic": 3}, "callable"),
    ],
)
def test_wrong_options_are_refused(options: dict, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        particles(model_of(), PROMPT, **options)


def test_an_unknown_resampling_shows_the_nearest() -> None:
    with pytest.raises(UnknownName, match="stratified"):
        Particles(resampling="stratifed")


def test_more_particles_than_the_cache_holds_are_refused(tiny: Model) -> None:
    with pytest.raises(ConfigError, match="max_seqs=9"):
        particles(tiny, "one", n=9, constraint=Regex("[a-z]{3}"))


def test_a_critic_that_fails_is_noted_once() -> None:
    def critic(text: str) -> float:
        raise ValueError(text[:0] + "no")

    found = particles(model_of(), PROMPT, constraint=Choice(TEXTS), critic=critic, seed=1)
    assert found.notes == ["the critic raised ValueError: no"] and not any(found.weights)
    found = particles(
        model_of(), PROMPT, constraint=Choice(TEXTS), critic=lambda t: -1.0, drafter="stand", seed=1
    )
    assert len(found.notes) == 2 and "drafter stand is not used" in found.notes[0]


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "found.jsonl"
    words = ["search", "particles", "-p", "Ann has 12", "--particles", "4", "--ess", "0.7"]
    words += ["--resampling", "systematic", "--constraint", "regex:pattern=[0-9]{2}"]
    words += ["--max-new-tokens", "4", "--seed", "3", "--out", str(out)]
    assert main(words) == 0
    shown = capsys.readouterr()
    record = json.loads(out.read_text())
    assert shown.out.strip() == record["text"] and re.fullmatch("[0-9]{2}", record["text"])
    assert len(record["particles"]) == 4 and record["valid"]
    assert "log probability of allowed texts" in shown.err


def test_texts_that_are_not_allowed_have_weight_0() -> None:
    """Cut by the length or by a stop string, alone and among particles."""
    model, options = model_of(), {"constraint": Choice(("aab", "bbb")), "seed": 1}
    cut = model.generate([PROMPT], constraint_sampling="awrs", max_new_tokens=2, n=4, **options)[
        0
    ].samples
    assert {(s.finish, s.valid, s.constraint.logw) for s in cut} == {("length", False, -math.inf)}
    whole = model.generate([PROMPT], constraint_sampling="awrs", max_new_tokens=4, n=4, **options)[
        0
    ].samples
    assert all(s.valid and -math.inf < s.constraint.logw < 0 for s in whole)
    found = particles(model, PROMPT, stop=("aa",), max_new_tokens=4, n=8, **options)
    assert {s.text for s in found.samples} == {"", "bbb"}
    assert all((s.text == "bbb") == (s.constraint.logw > -math.inf) for s in found.samples)
