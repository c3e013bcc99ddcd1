"""Exits per token keep the target's law, and their q is that of the sub-model that drew."""

from __future__ import annotations

from collections.abc import Sequence as Many

import numpy as np
import pytest
from small_llama import DEPTHS, save_llama

from fakes import VOCAB, FakeTarget, sequence, table_law
from forerun import registry
from forerun.controllers.acceptance_head import runner_of
from forerun.core.dice import Dice, SeededDice
from forerun.core.growing import Growth
from forerun.core.records import Plan, Sequence
from forerun.core.sampling import Sampling, softmax
from forerun.core.tree import IID, TreeBuilder
from forerun.drafters._token_exits import ExitSource
from forerun.drafters.draft_model import DraftModel
from forerun.errors import ConfigError
from forerun.growers.chain import Chain
from forerun.models.load import load_target
from forerun.models.sub_models import Exits, sub_runner
from harness import EXACT, PROMPT, TARGET, distance

TEXT = (0, 1, 2, 2, 0, 1, 1, 0, 2, 1)
MIXED = 0.62  # a confidence at which all exits are taken, see `test_all_exits_are_taken`
REQUESTS = {
    "free": Sampling(),
    "top-k 2": Sampling(top_k=2),
    "hot": Sampling(temperature=2.0),
    "greedy": Sampling(temperature=0),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory):
    return save_llama(tmp_path_factory.mktemp("draft"))


def sorted_draft(folder):
    runner = load_target(folder, dtype="fp32", max_seqs=4, is_draft=True)
    runner.exits = Exits(DEPTHS, TEXT)
    return runner


@pytest.fixture(scope="module")
def runner(folder):
    return sorted_draft(folder)


def expected(folder, tokens: Many[int], confidence: float) -> tuple[int, np.ndarray]:
    """The exit of a text and its logits; every sub-model reads the text from the start."""
    for depth in DEPTHS:
        seq = sequence(tokens, 1, SeededDice(0))
        logits = sub_runner(sorted_draft(folder), depth).rows_at([(seq, ())])[0].numpy()
        if softmax(logits).max() > confidence:
            break
    return depth, logits


def test_all_exits_are_taken(folder) -> None:
    texts = [TEXT[:n] for n in range(1, len(TEXT) + 1)]
    assert {expected(folder, text, MIXED)[0] for text in texts} == set(DEPTHS)


@pytest.mark.parametrize("request_", REQUESTS)
@pytest.mark.parametrize(
    ("grower", "verifier"), [("chain", "speculative"), ("gumbel", "recursive")]
)
@pytest.mark.parametrize("confidence", [0.0, MIXED, 1.0])
def test_the_law_is_kept(
    runner, confidence: float, grower: str, verifier: str, request_: str
) -> None:
    drafter = DraftModel(model=runner, confidence=confidence, grower=grower)
    rule, plan = registry.make("verifier", verifier), Plan(nodes=2, depth=2)
    sampling = REQUESTS[request_]
    assert distance(TARGET, lambda: drafter, rule, plan=plan, sampling=sampling) <= EXACT
    assert drafter.source.counts.sum() > 0


class Published(Chain):
    """Planted, as published: the likeliest token of the exit, labelled as drawn from it."""

    def grow(self, plan: Plan, dice: Dice) -> Growth:
        tree, node = TreeBuilder(), -1
        while len(tree) < plan.depth:
            (q,) = yield [tuple(tree.path(node))]
            node = tree.add(int(q.ids[q.probs.argmax()]), node, IID, q)
        return tree.build()


def test_the_likeliest_token_with_its_softmax_is_not_exact(runner) -> None:
    drafter = DraftModel(model=runner, confidence=MIXED)
    drafter.grower = Published()
    rule = registry.make("verifier", "speculative")
    assert distance(TARGET, lambda: drafter, rule, plan=Plan(nodes=2, depth=2)) > 0.01


@pytest.mark.parametrize(("confidence", "depth"), [(0.0, 1), (1.0, 3)])
def test_the_ends_are_fixed_depths(runner, confidence: float, depth: int) -> None:
    seq = sequence(PROMPT, 3, SeededDice(0))
    paths = [(seq, ()), (seq, (2,)), (seq, (2, 0))]
    found = DraftModel(model=runner, confidence=confidence).source.next(paths)
    wanted = DraftModel(model=runner, layers=depth).source.next(paths)
    for q, p in zip(found, wanted, strict=True):
        assert np.array_equal(q.probs, p.probs)


def test_late_reading_equals_reading_all(folder) -> None:
    """Random paths, growth and rollbacks of two texts: logits as if read from the start."""
    rng = np.random.default_rng(0)
    source = ExitSource.of(sorted_draft(folder), "auto", MIXED, is_tree=False)
    seqs = [sequence(PROMPT, 20, SeededDice(0)), sequence((2, 2, 1), 20, SeededDice(0))]
    for _ in range(12):
        for seq in seqs:  # what was accepted differs from what was drafted
            keep = int(rng.integers(1, len(seq.tokens) + 1))
            seq.tokens = seq.tokens[:keep] + rng.integers(0, VOCAB, 2).tolist()
            seq.tokens = seq.tokens[-12:] if len(seq.tokens) > 24 else seq.tokens
        path: tuple[int, ...] = ()
        for _ in range(3):
            asked: list[tuple[Sequence, tuple[int, ...]]] = [(seq, path) for seq in seqs]
            for (seq, _), row in zip(asked, source.logits(asked), strict=True):
                _, logits = expected(folder, (*seq.tokens, *path), MIXED)
                assert row == pytest.approx(logits, abs=1e-4)
            path = (*path, int(rng.integers(VOCAB)))
    assert (source.counts > 0).all()


def test_the_exit_does_not_depend_on_the_request(folder) -> None:
    counts = []
    for sampling in REQUESTS.values():
        source = ExitSource.of(sorted_draft(folder), "auto", MIXED, is_tree=False)
        source.next([(sequence(TEXT[:n], 4, SeededDice(0), sampling), ()) for n in range(1, 4)])
        counts.append(source.counts.tolist())
    assert all(one == counts[0] for one in counts)


def test_a_draft_is_priced_by_the_passes_of_each_sub_model(folder) -> None:
    drafter = DraftModel(model=sorted_draft(folder), confidence=MIXED)
    drafter.bind(FakeTarget(table_law(1)))
    exits = [expected(folder, TEXT[: n + 1], MIXED)[0] for n in range(len(TEXT))]
    wanted = [sum(depth >= d for depth in exits) / len(exits) for d in DEPTHS]
    assert list(drafter.passes.values()) == pytest.approx(wanted)
    alone = [drafter._seconds(runner, 4, 1) for runner in drafter.passes]
    assert drafter.draft_seconds(4) == pytest.approx(np.dot(wanted, alone))


def test_fewer_exits(runner) -> None:
    source = DraftModel(model=runner, layers=2, confidence=1.0).source
    assert isinstance(source, ExitSource) and len(source.counts) == 2
    seq = sequence(PROMPT, 3, SeededDice(0))
    (q,), (p,) = (s.next([(seq, ())]) for s in (source, DraftModel(model=runner, layers=2).source))
    assert np.array_equal(q.probs, p.probs)


def test_a_head_on_the_rows_of_one_depth_is_refused(runner) -> None:
    assert runner_of(DraftModel(model=runner, layers=2)).num_layers == 2
    with pytest.raises(ConfigError, match="without confidence"):
        runner_of(DraftModel(model=runner, confidence=0.5))


def test_bad_confidence_is_refused(folder) -> None:
    with pytest.raises(ConfigError, match=r"confidence must be from 0 to 1, got 1\.5"):
        DraftModel(model=sorted_draft(folder), confidence=1.5)
    with pytest.raises(ConfigError, match="one of the exits 1, 2, 3 .* got 4"):
        DraftModel(model=sorted_draft(folder), confidence=0.5, layers=4)
    plain = load_target(folder, dtype="fp32", max_seqs=1)
    with pytest.raises(ConfigError, match="confidence needs a sorted draft"):
        DraftModel(model=plain, confidence=0.5)
