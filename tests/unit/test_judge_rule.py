"""Judge decoding: its two ends, what the head adds, where it reads, and its recipe."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fakes import VOCAB, FakeRunner, FakeTarget, NoRepeats, run_all, sequence, table_law
from forerun import registry
from forerun.controllers.fixed import Fixed
from forerun.core.dice import EnumeratedDice, SeededDice
from forerun.core.forward_batch import ForwardBatch
from forerun.core.logits import TargetProbs
from forerun.core.records import Rows
from forerun.core.roles import Verifier
from forerun.core.sampling import Sampling
from forerun.core.tree import IID, Proposal, Tree, TreeBuilder, chain
from forerun.drafters.draft_model import DraftModel
from forerun.engine.engine import Engine
from forerun.errors import ConfigError, ModelError
from forerun.serving.methods import make_verifier
from forerun.training.recipes import _judge_labels as labels_of
from forerun.training.recipes import judge_head as recipe
from forerun.verifiers.judge import HEAD_FILE, Head, Judge, logit, read_head
from forerun.verifiers.recursive import Recursive

WIDTH = 5
HEAD = Head(np.array([1.0, -0.5, 0.3, 0.8, -1.2], np.float32), 0.1)


class HiddenTarget(FakeTarget):
    """A fake target whose hidden row is a table by the last token."""

    def forward(self, batch):
        found = super().forward(batch)
        for rows, seq, tree in zip(found, batch.seqs, batch.trees, strict=True):
            rows.hidden = rows_of([seq.tokens[-1], *tree.tokens.tolist()])
        return found


def rows_of(tokens: list[int]) -> torch.Tensor:
    rows = [np.random.default_rng([9, token]).normal(size=WIDTH) for token in tokens]
    return torch.from_numpy(np.stack(rows)).float()


def laws_of(tree: Tree, seed: int, sampling: Sampling | None = None) -> TargetProbs:
    seq = sequence([0, 1], 9, SeededDice(0), sampling)
    (rows,) = HiddenTarget(table_law(seed)).forward(
        ForwardBatch([seq], [tree], frozenset({"hidden"}))
    )
    return TargetProbs(rows, seq, tree, ())


def drawn(seed: int, depth: int = 5) -> Tree:
    """A chain of tokens drawn from a uniform q."""
    q, builder, node = Proposal.of(np.full(VOCAB, 1 / VOCAB)), TreeBuilder(), -1
    for token in np.random.default_rng(seed).integers(0, VOCAB, depth):
        node = builder.add(int(token), node, IID, q)
    return builder.build()


def text(verifier: Verifier, seed: int, temperature: float = 1.0, shapers=()) -> tuple[int, ...]:
    engine = Engine(
        HiddenTarget(table_law(1)),
        DraftModel(model=FakeRunner(table_law(2))),  # type: ignore[arg-type]
        verifier,
        Fixed(nodes=4, depth=4),
        shapers=shapers,
    )
    seq = sequence([0, 1], 40, SeededDice(seed), Sampling(temperature=temperature))
    return run_all(engine, [seq])[0]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_with_delta_one_it_is_the_exact_rule(temperature):
    for seed in range(5):
        exact = text(Recursive(), seed, temperature)
        assert text(Judge(head=HEAD, delta=1.0), seed, temperature) == exact


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_with_delta_zero_everything_is_kept_and_a_bonus_comes_from_p(temperature):
    tree, sampling = drawn(3), Sampling(temperature=temperature)
    laws = laws_of(tree, 1, sampling)
    verdict = Judge(head=HEAD, delta=0.0).verify(tree, laws, SeededDice(0))
    assert verdict.nodes == list(range(len(tree))) and laws[len(tree) - 1][verdict.token] > 0


@given(st.integers(0, 500), st.floats(0.05, 0.95), st.sampled_from([0.0, 0.7, 1.0]))
@settings(max_examples=60, deadline=None)
def test_nothing_that_the_exact_rule_keeps_is_lost(seed, delta, temperature):
    """The same draft and the same coins: position by position."""
    tree = drawn(seed)
    laws = laws_of(tree, seed % 7, Sampling(temperature=temperature))
    exact = Recursive().verify(tree, laws, SeededDice(seed)).nodes
    kept = Judge(head=HEAD, delta=delta).verify(tree, laws, SeededDice(seed)).nodes
    assert kept[: len(exact)] == exact


def test_the_law_of_one_draft_by_hand():
    """q(y) [y is correct], else the exact rule: q min(1, p/q) + lost mass of wrong drafts x r."""
    p, q = table_law(1)([0, 1]), np.array([0.6, 0.3, 0.1])
    correct = HEAD.scores(rows_of([0, 1, 2]).numpy()) > logit(0.5)
    assert 0 < correct.sum() < VOCAB
    found = np.zeros(VOCAB)

    def program(dice):
        builder, proposal = TreeBuilder(), Proposal.of(q)
        builder.add(dice.choice(q), -1, IID, proposal)
        tree = builder.build()
        return Judge(head=HEAD, delta=0.5).verify(tree, laws_of(tree, 1), dice).tokens(tree)[0]

    for token, weight in EnumeratedDice().outcomes(program):
        found[token] += weight
    kept = np.where(correct, q, np.minimum(p, q))
    residual = np.maximum(p - q, 0)
    np.testing.assert_allclose(found, kept + (1 - kept.sum()) * residual / residual.sum(), 1e-9)


def test_a_node_is_judged_by_the_row_at_it_not_by_the_one_that_predicts_it():
    """The sign is planted at token 2 of the draft: shifted by one, another node would be kept."""
    tree = chain([0, 1, 2])
    hidden = torch.zeros(4, WIDTH)
    hidden[:, 0] = -1.0
    hidden[1:3, 0] = 1.0  # the rows of nodes 0 and 1
    seq = sequence([0, 1], 9, SeededDice(0), Sampling(temperature=0))
    logits = torch.tensor([[0.0, 0.0, 1.0]]).repeat(4, 1)  # the target would say 2
    logits[2:, 2] = -1.0
    laws = TargetProbs(Rows(logits, hidden), seq, tree, ())
    head = Head(np.array([5.0, 0, 0, 0, 0], np.float32), 0.0)
    assert Judge(head=head).verify(tree, laws, SeededDice(0)).nodes == [0, 1]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_constraints_hold_whatever_the_head_says(temperature):
    for seed in range(3):
        tokens = (1, *text(Judge(head=HEAD, delta=0.0), seed, temperature, (NoRepeats(),)))
        assert all(a != b for a, b in zip(tokens, tokens[1:], strict=False))


def test_a_draft_that_top_k_cuts_off_may_be_kept():
    tree = drawn(3)
    laws = laws_of(tree, 1, Sampling(top_k=1))
    verdict = Judge(head=HEAD, delta=0.0).verify(tree, laws, SeededDice(0))
    assert len(verdict.nodes) == len(tree)


def test_siblings_are_asked_in_turn():
    builder = TreeBuilder()
    for token in (0, 1, 2):
        builder.add(token)
    tree = builder.build()
    laws = laws_of(tree, 1, Sampling(temperature=0))
    best = int(np.argmax(laws.logits(-1)))
    assert Judge(head=HEAD, delta=0.0).verify(tree, laws, SeededDice(0)).nodes == [best]
    others = [n for n in range(3) if n != best]
    del builder.tokens[best], builder.parents[best], builder._laws[best], builder._rows[best]
    smaller = builder.build()
    laws = laws_of(smaller, 1, Sampling(temperature=0))
    verdict = Judge(head=HEAD, delta=0.0).verify(smaller, laws, SeededDice(0))
    assert [smaller.tokens[n] for n in verdict.nodes] == [others[0]]


def test_the_shipped_head_fits_the_reasoner_and_survives_a_file(tmp_path):
    head = read_head("reasoner")
    assert head.width == 256 and 0 < head.delta < 1
    assert Judge().delta == head.delta and Judge(delta=0.3).delta == 0.3
    HEAD.save(tmp_path / HEAD_FILE)
    again = read_head(str(tmp_path))
    np.testing.assert_array_equal(again.weight, HEAD.weight)
    assert (again.bias, again.delta) == (pytest.approx(HEAD.bias), HEAD.delta)


def test_bad_heads_and_options_are_refused(tmp_path):
    with pytest.raises(ConfigError, match="judge needs 0 <= delta <= 1"):
        Judge(head=HEAD, delta=1.5)
    (tmp_path / "bad.safetensors").write_bytes(b"no head")
    for name in (tmp_path, tmp_path / "bad.safetensors"):
        with pytest.raises(ModelError, match=r"cannot read a judge head in .* train one"):
            Judge(head=str(name))
    from forerun.assets import embedded
    from forerun.models.load import load_target

    with pytest.raises(ConfigError, match="has hidden size 5, but the target has 128"):
        Judge(head=HEAD).bind(load_target(embedded("draft")))
    tree = chain([0])
    seq = sequence([0, 1], 9, SeededDice(0))
    (rows,) = FakeTarget(table_law(1)).forward(ForwardBatch([seq], [tree]))
    with pytest.raises(ConfigError, match="this target returned none"):
        Judge(head=HEAD).verify(tree, TargetProbs(rows, seq, tree, ()), SeededDice(0))


def test_a_server_refuses_it_unless_told():
    with pytest.raises(ConfigError, match="'judge' is lossy"):
        make_verifier("judge", allow_lossy=False)
    assert not make_verifier("judge:delta=0.9", allow_lossy=True).lossless


def test_the_fit_separates_what_can_be_separated():
    """A planted direction: AUC 1; what was planted one token away: near a half."""
    rng = np.random.default_rng(0)
    rows, labels = rng.normal(size=(600, WIDTH)).astype(np.float32), rng.random(600) < 0.8
    rows[:, 2] += np.where(labels, 4, -4)
    tokens = recipe.Tokens(rows, labels, np.arange(600), np.full(600, recipe.SWAP))
    found = recipe.best(tokens, recipe.JudgeHead())
    assert found.auc == 1.0 and found.kept_correct == 1.0 and found.kept_mistakes <= 0.1
    assert found.correct + found.mistakes == 600
    shifted = recipe.Tokens(np.roll(rows, 1, 0), labels, tokens.problems, tokens.sources)
    assert abs(recipe.best(shifted, recipe.JudgeHead()).auc - 0.5) < 0.25


def test_both_classes_weigh_the_same():
    """Without features the bias is that of equal masses, however rare one class is."""
    labels = np.arange(200) % 10 != 0
    tokens = recipe.Tokens(np.zeros((200, 2), np.float32), labels, np.arange(200), np.zeros(200))
    assert recipe.fit(tokens, 1.0).bias == pytest.approx(0.0, abs=1e-6)


def test_swaps_stand_beside_the_tokens_that_they_replace():
    tree = labels_of.with_swaps([5, 6, 7], {0: 9, 2: 8})
    assert [tree.path(n) for n in (3, 4)] == [[9], [5, 6, 8]]


def test_delta_keeps_the_share_of_mistakes_that_was_asked_for():
    rng = np.random.default_rng(1)
    rows, labels = rng.normal(size=(2000, WIDTH)).astype(np.float32), rng.random(2000) < 0.5
    rows[:, 0] += labels
    tokens = recipe.Tokens(rows, labels, np.arange(2000), np.zeros(2000))
    for recall in (0.8, 0.95):
        found = recipe.best(tokens, recipe.JudgeHead(recall=recall))
        assert found.kept_mistakes == pytest.approx(1 - recall, abs=0.03)


def test_what_is_reported_was_neither_fitted_nor_chosen_on(monkeypatch):
    """Every problem is scored by a head whose fit, penalty and delta come from others."""
    rng, seen, made = np.random.default_rng(2), [], recipe.made
    rows, labels = rng.normal(size=(240, 40)).astype(np.float32), rng.random(240) < 0.7
    tokens = recipe.Tokens(rows, labels, np.arange(240) // 2, np.full(240, recipe.SWAP))

    def watched(part, plan):
        seen.append(set(part.problems.tolist()))
        return made(part, plan)

    monkeypatch.setattr(recipe, "made", watched)
    found = recipe.best(tokens, recipe.JudgeHead(folds=3, recall=0.9))
    *folds, whole = seen
    assert whole == set(range(120)) and len(folds) == 3
    assert all(sum(problem not in fold for fold in folds) == 1 for problem in whole)
    assert abs(found.auc - 0.5) < 0.12 and found.kept_mistakes < 0.2  # rows say nothing


def test_folds_are_by_problem():
    problems = np.array([7, 7, 3, 900, 3, 12])
    tokens = recipe.Tokens(np.zeros((6, 1)), np.ones(6, bool), problems, np.zeros(6))
    masks = list(recipe.held_out(tokens, 3))
    assert sum(masks).tolist() == [1] * 6
    assert all(len(set(problems[m]) & set(problems[~m])) == 0 and m.any() for m in masks)


def test_the_recipe_runs_whole(tmp_path):
    options = {"problems": 40, "swaps": 6, "batch": 40, "max_tokens": 200}
    judge = recipe.JudgeHead(folds=2, **options)
    (line,) = judge.train(tmp_path)
    found = judge.found
    assert f"area under the curve {found.auc:.3f}" in line
    tokens = judge.labelled(tmp_path)  # read from the file now
    assert tokens.rows.shape == (len(tokens.labels), 256)
    slips = tokens.where(tokens.sources == labels_of.SLIP)
    assert (slips.labels.sum(), (~slips.labels).sum()) == (40, 40)
    assert tokens.where(tokens.sources == labels_of.REPLY).labels.all()
    assert Judge(head=str(tmp_path)).head.width == 256 and 0 <= found.auc <= 1
    again = recipe.JudgeHead(folds=2, recall=0.9, **options)  # the same labels
    again.train(tmp_path)
    assert again.found.head.delta < found.head.delta
    with pytest.raises(ConfigError, match="started with swaps 6, but this run has swaps 5"):
        recipe.JudgeHead(folds=2, **options | {"swaps": 5}).train(tmp_path)


def test_rows_of_the_recipe_are_those_of_decoding():
    """The hidden row at a swap is that of a text that ends in the swapped token."""
    import forerun
    from forerun.core.tree import EMPTY

    target = forerun.load("reasoner", dtype="fp32").target
    prompt, tokens = [5, 6, 7, 8], [9, 30, 31, 40]
    seq = sequence(prompt, 20, SeededDice(0))
    tree = labels_of.with_swaps(tokens, {2: 50})
    (rows,) = target.forward(ForwardBatch([seq], [tree], labels_of.HIDDEN))
    other = sequence([*prompt, 9, 30, 50], 20, SeededDice(0))
    (plain,) = target.forward(ForwardBatch([other], [EMPTY], labels_of.HIDDEN))
    assert rows.hidden is not None and plain.hidden is not None
    torch.testing.assert_close(rows.hidden[5], plain.hidden[0], atol=1e-4, rtol=1e-4)


def test_bad_options_of_the_recipe_are_refused():
    for options in ({"problems": 3}, {"recall": 0.0}, {"swaps": 0}):
        with pytest.raises(ConfigError, match="judge_head needs|must be at least"):
            recipe.JudgeHead(**options)


def test_the_registry_finds_it():
    assert registry.get("verifier", "judge") is Judge


@pytest.mark.parametrize(("correct", "distance"), [({2}, 0.3), ({0, 1}, 0.0), ({0, 2}, 0.3)])
def test_the_distance_is_what_correct_tokens_have_too_much(correct, distance):
    """The instance of docs/laws.md: p = (.5, .3, .2), q = (.2, .3, .5)."""
    p, q, found = np.array([0.5, 0.3, 0.2]), np.array([0.2, 0.3, 0.5]), np.zeros(3)
    head = Head(np.array([8.0 if t in correct else -8.0 for t in range(3)], np.float32), 0.0)
    seq = sequence([0, 1], 9, SeededDice(0))

    def program(dice: EnumeratedDice) -> int:
        builder, proposal = TreeBuilder(), Proposal.of(q)
        token = dice.choice(q)
        builder.add(token, -1, IID, proposal)
        tree, hidden = builder.build(), torch.eye(3)[[0, token]]
        rows = Rows(torch.from_numpy(np.log(np.stack([p, p]))), hidden)
        return Judge(head=head).verify(tree, TargetProbs(rows, seq, tree, ()), dice).tokens(tree)[0]

    for token, weight in EnumeratedDice().outcomes(program):
        found[token] += weight
    assert np.abs(found - p).sum() / 2 == pytest.approx(distance, abs=1e-12)
