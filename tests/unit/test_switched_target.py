"""Entropy switching: the automaton, its law with and without drafts, caches, and costs."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence as Many

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import forerun
from fakes import (
    FakeTarget,
    NoRepeats,
    TableSource,
    exact_law,
    run_all,
    sequence,
    table_law,
)
from forerun import registry
from forerun.core.dice import EnumeratedDice, SeededDice
from forerun.core.forward_batch import ForwardBatch
from forerun.core.growing import Path
from forerun.core.records import Plan
from forerun.core.sampling import Sampling
from forerun.core.tree import EMPTY
from forerun.core.tree_template import grid
from forerun.drafters.base import Grown
from forerun.engine.engine import Engine
from forerun.errors import ConfigError
from forerun.targets.entropy_switch import (
    LARGE,
    SMALL,
    EntropySwitch,
    Mode,
    Usage,
    entropy_bits,
)
from forerun.verifiers.judge import Head, Judge
from forerun.verifiers.reflective import Reflective
from harness import PROMPT, Given

LAWS = table_law(4), table_law(5)
CONTROLS = {
    "one by one": {"threshold": 1.2, "window": 1, "hold": 0},
    "rolling": {"threshold": 1.1, "window": 2, "hold": 1},
    "held": {"threshold": 0.9, "window": 2, "hold": 2},
    "cleared": {"threshold": 1.1, "window": 3, "hold": 2, "clears": True},
}


class FakeRunner(FakeTarget):
    """A target that can also be asked for paths."""

    def rows_at(self, requests: Many[tuple[object, Path]]) -> torch.Tensor:
        laws = [self.law([*seq.tokens, *path]) for seq, path in requests]
        return torch.from_numpy(np.log(np.stack(laws)))

    def memory_report(self) -> dict[str, int]:
        return {"weights": 1}


def switch(**options) -> EntropySwitch:
    small, large = (FakeRunner(law) for law in LAWS)
    return EntropySwitch(large, small=small, **options)


def plain(tokens: Many[int], *, threshold, window, hold, clears=False) -> list[tuple[int, int]]:
    """The algorithm, told once more. Who spoke and who is asked next, also for the next token."""
    active, since, values, found = SMALL, None, [], []
    for n in range(len(PROMPT), len(tokens) + 1):
        p = LAWS[active](tokens[:n])
        values.append(-sum(x * np.log2(x) for x in p if x > 0))
        wanted = LARGE if np.mean(values[-window:]) > threshold else SMALL
        if active == SMALL and wanted == LARGE and (since is None or since >= hold):
            active, since = LARGE, 0
            values = [] if clears else values
        spoke = active
        since = None if since is None else since + 1
        if active == LARGE and wanted == SMALL and since >= hold:
            active, since = SMALL, 0
            values = [] if clears else values
        found.append((spoke, active))
    return found


def law_of(options: dict):
    return lambda tokens: LAWS[plain(tokens, **options)[-1][0]](tokens)


DRAFTERS = {
    "none": (lambda: registry.make("drafter", "none"), Plan(2, 2)),
    "chain": (
        lambda: Grown(TableSource(table_law(2)), registry.make("grower", "chain")),
        Plan(2, 2),
    ),
    "gumbel": (
        lambda: Grown(
            TableSource(table_law(2)), registry.get("grower", "gumbel")(template=grid(2, 1))
        ),
        Plan(4, 2),
    ),
    "stand": (lambda: registry.make("drafter", "stand", context=1, entries=3), Plan(3, 2)),
}


@pytest.mark.parametrize("shaped", [False, True], ids=["free", "no repeats"])
@pytest.mark.parametrize("control", CONTROLS)
@pytest.mark.parametrize("name", DRAFTERS)
def test_drafts_do_not_change_its_law(name: str, control: str, shaped: bool) -> None:
    """Every text has the probability that the algorithm gives it, also where drafts cross turns."""
    make, plan = DRAFTERS[name]
    shapers = (NoRepeats(),) if shaped else ()

    def program(dice: EnumeratedDice) -> tuple[int, ...]:
        verifier = registry.make("verifier", "recursive")
        target = switch(**CONTROLS[control])
        engine = Engine(target, make(), verifier, Given(plan), shapers=shapers)
        return run_all(engine, [sequence(PROMPT, 3, dice)])[0]

    found: dict[tuple[int, ...], float] = defaultdict(float)
    for text, weight in EnumeratedDice().outcomes(program):
        found[text] += weight
    law = exact_law(law_of(CONTROLS[control]), PROMPT, 3, Sampling(), shapers)
    assert max(abs(found[text] - p) for text, p in law.items()) <= 1e-12


@pytest.mark.parametrize("control", CONTROLS)
def test_both_models_speak_in_these_tests(control: str) -> None:
    target = switch(**CONTROLS[control])
    engine = Engine(
        target,
        DRAFTERS["chain"][0](),
        registry.make("verifier", "recursive"),
        Given(Plan(3, 3)),
        max_seqs=3,
    )
    seqs = [sequence(PROMPT, 60, SeededDice(i)) for i in range(3)]
    run_all(engine, seqs)
    told = [plain(seq.tokens, **CONTROLS[control])[:-1] for seq in seqs]
    spoke = [who for found in told for who, _ in found]
    assert target.usage.tokens == [spoke.count(which) for which in (SMALL, LARGE)]
    assert min(target.usage.tokens) > 9
    asked = [[SMALL, *(active for _, active in found)] for found in told]
    turns = sum(a != b for modes in asked for a, b in zip(modes, modes[1:], strict=False))
    assert target.usage.switches == turns
    assert not target._rows and all(target.mode(seq) == Mode() for seq in seqs)  # released


def test_the_uncertain_token_is_the_large_models() -> None:
    """Up at once, down from the next token: no row of the large model goes unused."""
    target, mode, spoke = switch(threshold=1.0), Mode(), []
    for bits in (0.1, 2.0, 0.1, 0.1, 2.0, 2.0):
        after = target.after(mode, bits)
        spoke.append(max(mode.active, after.active))
        mode = after
    assert spoke == [SMALL, LARGE, LARGE, SMALL, LARGE, LARGE]


entropies = st.lists(st.floats(0, 4, width=32), min_size=1, max_size=60)


@given(entropies, st.floats(0, 4), st.integers(1, 6), st.integers(0, 12), st.booleans())
@settings(max_examples=60, deadline=None)
def test_the_automaton(values, threshold, window, hold, clears):
    target = switch(threshold=threshold, window=window, hold=hold, clears=clears)
    mode, spoke, last = Mode(), [], []
    for value in values:
        last.append(value)
        after = target.after(mode, value)
        spoke.append(max(mode.active, after.active))
        if after.active != mode.active:
            assert (np.mean(last[-window:]) > threshold) == (after.active == LARGE)
            last = [] if clears else last
        assert list(after.window) == last[-window:]
        mode = after
    at = [i for i, (a, b) in enumerate(zip(spoke, spoke[1:], strict=False)) if a != b]
    assert all(b - a >= hold for a, b in zip(at, at[1:], strict=False))


@given(entropies, st.floats(0, 4), st.floats(0, 4))
@settings(max_examples=60, deadline=None)
def test_without_hold_a_higher_threshold_means_fewer_large_tokens(values, one, other):
    """On fixed entropies; with a hold a switch too early can block a later one."""

    def count(threshold: float) -> int:
        target, mode, found = switch(threshold=threshold, hold=0), Mode(), 0
        for value in values:
            after = target.after(mode, value)
            found += max(mode.active, after.active) == LARGE
            mode = after
        return found

    assert count(max(one, other)) <= count(min(one, other))


@given(st.lists(st.floats(-30, 30), min_size=2, max_size=20))
@settings(max_examples=60, deadline=None)
def test_entropy_is_between_nothing_and_all(logits):
    found = entropy_bits(np.array(logits))
    assert 0 <= found <= np.log2(len(logits)) + 1e-9


def test_entropy_in_bits_by_hand():
    assert entropy_bits(np.log([0.5, 0.25, 0.25])) == pytest.approx(1.5)
    assert entropy_bits(np.array([0.0, -np.inf, -np.inf])) == 0.0
    assert entropy_bits(np.zeros(8, dtype=np.float32)) == pytest.approx(3.0)


@pytest.mark.parametrize(
    ("small", "large", "share", "saved"), [(3, 11, 0.43, 0.415), (1.5, 14, 0.25, 0.67)]
)
def test_costs_are_the_papers(small, large, share, saved):
    usage = Usage(tokens=[round(100 * (1 - share)), round(100 * share)])
    assert usage.share == share
    assert 1 - usage.cost(small, large) == pytest.approx(saved, abs=6e-4)
    usage.catch_up[LARGE] = 10
    assert usage.cost(small, large, catch_up=True) == pytest.approx(
        usage.cost(small, large) + 10 / 100
    )


@pytest.mark.parametrize("options", [{"window": 0}, {"hold": -1}, {"threshold": np.nan}])
def test_bad_options_are_refused(options):
    with pytest.raises(ConfigError, match=r"entropy_switch needs .* try window=1"):
        switch(**{"threshold": 1.0} | options)


class Letters:
    """A tokenizer of three tokens."""

    def encode(self, text: str, special: bool = True) -> list[int]:
        return ["abc".index(letter) for letter in text]


@pytest.mark.parametrize(
    ("verifier", "missing"),
    [
        (lambda: Judge(head=Head(np.zeros(4, np.float32), 0.0)), "hidden rows"),
        (lambda: Reflective(template="cb", tokenizer=Letters()), "probe rows"),
        (lambda: Reflective(weight=0.0), None),
    ],
)
def test_what_needs_more_than_its_logits_is_refused_when_an_engine_is_built(verifier, missing):
    """Not in the middle of a text."""
    make, plan = DRAFTERS["chain"]

    def engine() -> Engine:
        return Engine(switch(threshold=1.0), make(), verifier(), Given(plan))

    if missing is None:
        assert len(run_all(engine(), [sequence(PROMPT, 5, SeededDice(0))])[0]) == 5
        return
    with pytest.raises(ConfigError, match=f"target 'entropy_switch' gives no {missing}; use"):
        engine()


def test_other_vocabularies_are_refused(tiny_folder):
    with pytest.raises(ConfigError, match="different vocabularies"):
        forerun.load(target=f"entropy_switch:small={tiny_folder},threshold=1")


# the embedded pair, float32, greedy: the models agree on little, so texts tell who spoke


@pytest.fixture(scope="module")
def pair():
    return forerun.load(target="entropy_switch:small=draft,threshold=1", dtype="fp32", max_seqs=8)


def prompts(count: int) -> list[str]:
    from forerun.tasks.reasoning import ReasoningTask

    return [ReasoningTask("heldout", seed=610_000).example(i).prompt for i in range(count)]


def again(pair, **options) -> object:
    """The pair under other options, and nothing counted yet."""
    from forerun.api import Model

    small, large = pair.target.models
    target = EntropySwitch(large, small=small, **options)
    return Model(target, pair.tokenizer, "pair")


GREEDY = Sampling(temperature=0, max_new_tokens=60)


def texts(model, drafter: str = "none", batch: int = 1, **more) -> list[list[int]]:
    results = model.generate(prompts(3), GREEDY, drafter=drafter, batch=batch, **more)
    return [result.samples[0].tokens for result in results]


def alone(pair, which: int):
    from forerun.api import Model

    return Model(pair.target.models[which], pair.tokenizer)


def test_no_threshold_reached_is_the_small_model(pair):
    switched = again(pair, threshold=float("inf"))
    assert texts(switched) == texts(alone(pair, SMALL))
    assert switched.target.usage.share == 0.0
    assert switched.target.usage.catch_up == [0, 0]


def test_a_threshold_below_all_is_the_large_model(pair):
    switched = again(pair, threshold=-1.0, hold=4)
    assert texts(switched) == texts(alone(pair, LARGE))
    assert switched.target.usage.share == 1.0


CHOICES = {"threshold": 0.8, "window": 2, "hold": 1}


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize(
    "drafter", ["stand", "draft_model:model=draft", "draft_model:model=draft,grower=gumbel"]
)
def test_drafting_leaves_greedy_texts_alone(pair, drafter, batch):
    first, second = again(pair, **CHOICES), again(pair, **CHOICES)
    assert texts(first) == texts(second, drafter, batch, controller="fixed:nodes=6,depth=6")
    assert first.target.usage.tokens == second.target.usage.tokens
    assert first.target.usage.switches == second.target.usage.switches > 3


@pytest.mark.parametrize("drafter", ["none", "stand"])
def test_rows_are_those_of_a_fresh_prefill(pair, drafter):
    """Whatever the switches were: the active model's logits, within 1e-4."""
    seen: list[tuple[int, list[int], np.ndarray]] = []
    model = again(pair, **CHOICES)

    def hear(step) -> None:
        for i, seq in enumerate(step.seqs):
            before = len(seq.tokens) - len(step.emitted[i])
            for k, node in enumerate(step.visited(i)):
                rows = step.laws[i].rows
                seen.append((rows.writer(node), seq.tokens[: before + k], rows.row(node)))

    texts(model, drafter, on_step=hear)
    assert {which for which, *_ in seen} == {SMALL, LARGE}
    for which, tokens, row in seen[::5]:
        fresh = sequence(tokens, 1, SeededDice(0))
        runner = pair.target.models[which]
        (rows,) = runner.forward(ForwardBatch([fresh], [EMPTY]))
        runner.release(fresh)
        assert np.abs(rows.row(-1) - row).max() < 1e-4


def test_catching_up_is_counted_once(pair):
    """One at a time: what a model lacks when its turn comes is what the other has written."""
    model = again(pair, **CHOICES)
    tokens = texts(model)
    usage = model.target.usage
    assert sum(usage.tokens) == sum(map(len, tokens))
    ups = (usage.switches + len(tokens)) // 2
    assert 0 < usage.catch_up[LARGE] <= usage.tokens[SMALL]
    assert 0 < usage.catch_up[SMALL] <= usage.tokens[LARGE] + ups  # it looked in vain before each


def test_memory_and_cost_are_told(pair):
    report = pair.target.memory_report()
    assert report["large weights"] > report["small weights"] > 0
    assert pair.target.vocab_size == 768 and pair.target.context == 1024
    assert pair.target.cost is pair.target.models[LARGE].cost
