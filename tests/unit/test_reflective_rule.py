"""Reflective verification: rows of the second copy, the fusion, what is kept, and its bounds."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import forerun
from fakes import FakeRunner, FakeTarget, NoRepeats, run_all, sequence, table_law
from forerun import registry
from forerun.controllers.fixed import Fixed
from forerun.core.dice import EnumeratedDice, SeededDice
from forerun.core.forward_batch import ForwardBatch
from forerun.core.logits import TargetProbs
from forerun.core.records import Rows, Step
from forerun.core.roles import Drafter, Verifier
from forerun.core.sampling import Sampling, softmax
from forerun.core.tree import EMPTY, IID, Proposal, Tree, TreeBuilder, appended, chain
from forerun.drafters.draft_model import DraftModel
from forerun.engine.engine import Engine
from forerun.errors import ConfigError
from forerun.serving.methods import make_verifier
from forerun.verifiers.recursive import Recursive
from forerun.verifiers.reflective import FusedRows, Reflective


class Letters:
    """A tokenizer of three tokens: a, b, c."""

    def encode(self, text: str, special: bool = True) -> list[int]:
        return ["abc".index(letter) for letter in text]


def made(**options) -> Reflective:
    given = {"template": "cb", "tokenizer": Letters(), "rule": "recursive"}
    return Reflective(**{**given, **options})  # type: ignore[arg-type]


def engine(verifier: Verifier, listeners=(), drafter: Drafter | None = None, **options) -> Engine:
    drafter = drafter or DraftModel(model=FakeRunner(table_law(2)))  # type: ignore[arg-type]
    target = FakeTarget(table_law(1, order=5))
    return Engine(
        target, drafter, verifier, Fixed(nodes=4, depth=4), listeners=listeners, **options
    )


def text(verifier: Verifier, seed: int, temperature: float = 1.0, **options) -> tuple[int, ...]:
    seq = sequence([0, 1], 40, SeededDice(seed), Sampling(temperature=temperature))
    return run_all(engine(verifier, **options), [seq])[0]


def branching() -> Tree:
    """Two leaves below token 0, one below token 1."""
    builder = TreeBuilder()
    top, other = builder.add(0), builder.add(1)
    builder.add(1, top)
    builder.add(2, top)
    builder.add(0, other)
    return builder.build()


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_without_weight_decisions_are_those_of_the_base_rule(temperature):
    for seed in range(4):
        exact = text(Recursive(), seed, temperature)
        assert text(made(weight=0.0), seed, temperature) == exact
    assert any(text(made(weight=0.5), s, 1.0) != text(Recursive(), s, 1.0) for s in range(4))


def test_the_probe_is_the_reflection_and_the_draft_again():
    tree = made().probe(chain([0, 2, 1]), room=99)
    assert tree.tokens.tolist() == [0, 2, 1, 2, 1, 0, 2]  # the last token's row would not be used
    assert tree.parents.tolist() == [-1, 0, 1, 2, 3, 4, 5]
    assert made().probe(EMPTY, 99) is EMPTY


def test_every_leaf_has_a_copy_of_its_own_up_to_a_bound():
    tree = branching()
    probed = made().probe(tree, 99)
    paths = [probed.path(node) for node in range(len(probed)) if node not in probed.parents]
    assert paths == [[0, 1, 2, 1, 0], [0, 2, 2, 1, 0], [1, 0, 2, 1, 1]]
    assert len(made(leaves=1).probe(tree, 99)) == len(tree) + 3


def test_no_room_in_the_context_means_no_probe():
    tree = chain([0, 2, 1])
    assert len(made().probe(tree, 7)) == 7 and made().probe(tree, 6) is tree


def laws_of(tree: Tree, rule: Reflective, law, sampling: Sampling | None = None) -> TargetProbs:
    seq = sequence([0, 1], 9, SeededDice(0), sampling)
    (rows,) = FakeTarget(law).forward(ForwardBatch([seq], [rule.probe(tree, 99)]))
    return TargetProbs(rows.split(len(tree)), seq, tree, ())


def judged(tree: Tree, rule: Reflective, law) -> TargetProbs:
    """The laws that the base rule is given."""
    seen: list[TargetProbs] = []

    class Spy(Recursive):
        def verify(self, tree, laws, dice):
            seen.append(laws)
            return super().verify(tree, laws, dice)

    rule.base = Spy()
    rule.verify(tree, laws_of(tree, rule, law), SeededDice(0))
    return seen[0]


def test_the_second_reading_is_that_of_the_text_written_out():
    """z at each node against a law of the whole text: context, draft, R, the draft so far."""
    law, draft = table_law(1, order=9), [0, 2, 1]
    laws = judged(chain(draft), made(weight=0.3), law)
    for node in range(-1, 2):
        again = [0, 1, *draft, 2, 1, *draft[: node + 1]]
        z0, zr = (np.log(law(t)) for t in ([0, 1, *draft[: node + 1]], again))
        np.testing.assert_allclose(laws.logits(node), 0.7 * z0 + 0.3 * zr, atol=1e-12)
    np.testing.assert_allclose(laws.logits(2), np.log(law([0, 1, *draft])), atol=1e-12)  # bonus


def test_readings_of_several_paths_are_averaged():
    law, tree = table_law(1, order=9), branching()
    laws = judged(tree, made(weight=1.0), law)
    readings = [np.log(law([0, 1, *path, 2, 1])) for path in ([0, 1], [0, 2], [1, 0])]
    np.testing.assert_allclose(laws.logits(-1), np.mean(readings, axis=0), atol=1e-12)
    readings = [np.log(law([0, 1, *path, 2, 1, 0])) for path in ([0, 1], [0, 2])]
    np.testing.assert_allclose(laws.logits(0), np.mean(readings, axis=0), atol=1e-12)


def test_laws_may_be_fused_instead_of_logits():
    z, zr = np.array([0.0, 1.0, -1.0]), np.array([2.0, 0.0, 0.0])
    rows = Rows(torch.from_numpy(np.stack([z, z])), None, torch.from_numpy(zr[None]))
    fused = FusedRows(rows, {-1: [0]}, 0.25, "prob")
    np.testing.assert_allclose(softmax(fused.row(-1)), 0.75 * softmax(z) + 0.25 * softmax(zr))
    np.testing.assert_allclose(
        FusedRows(rows, {-1: [0]}, 0.25, "logit").row(-1), z + 0.25 * (zr - z)
    )
    np.testing.assert_array_equal(fused.row(0), z)


def test_listeners_see_the_tree_as_drafted_and_the_laws_of_the_target():
    law = table_law(1, order=5)

    def hear(step: Step) -> None:
        for seq, tree, laws, new in zip(
            step.seqs, step.trees, step.laws, step.emitted, strict=True
        ):
            assert len(tree) <= 4 and len(laws.rows.logits) == len(tree) + 1
            before = seq.tokens[: len(seq.tokens) - len(new)]
            np.testing.assert_allclose(laws[-1], law(before), atol=1e-6)
            steps.append(len(tree))

    steps: list[int] = []
    text(made(weight=0.5), 0, listeners=[hear])
    assert max(steps) == 4


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_constraints_act_on_what_was_fused(temperature):
    for seed in range(3):
        tokens = (1, *text(made(weight=0.9), seed, temperature, shapers=(NoRepeats(),)))
        assert all(a != b for a, b in zip(tokens, tokens[1:], strict=False))


def test_bad_options_are_refused():
    for name, value in (("weight", 1.5), ("fusion", "mean"), ("leaves", 0), ("leaves", 2.5)):
        with pytest.raises(ConfigError, match=name):
            made(**{name: value})
    with pytest.raises(ConfigError, match="and a tokenizer: use"):
        engine(Reflective())
    with pytest.raises(ConfigError, match="a template of at least one token"):
        engine(made(template=""))
    assert Reflective(weight=0.0).reflection == []  # needs no template
    engine(Reflective(weight=0.0))


def test_it_says_that_it_is_lossy_and_a_server_refuses_it():
    assert not made(weight=0.1).lossless and made(weight=0.0).lossless
    assert not made(weight=0.0, rule="typical").lossless
    with pytest.raises(ConfigError, match="'reflective' is lossy"):
        make_verifier("reflective", allow_lossy=False)
    assert not make_verifier("reflective:weight=0.5", allow_lossy=True).lossless


def test_a_base_rule_that_cannot_judge_the_draft_is_refused():
    with pytest.raises(ConfigError, match="'reflective' does not accept the drafts"):
        engine(made(rule="k_seq"), drafter=registry.make("drafter", "prompt_lookup"))


def test_appended_nodes_leave_the_others_as_they_were():
    tree = branching()
    more = appended(tree, [2, 0], [4, 5])
    assert len(more) == 7 and more.path(6) == [1, 0, 2, 0]
    assert [more.path(n) for n in range(5)] == [tree.path(n) for n in range(5)]
    assert all(more.q(n) is None for n in (5, 6)) and (more.laws[5:] == 0).all()


def test_a_reading_that_copies_the_draft_lets_q_through():
    """The instance of docs/laws.md: p = (.5, .3, .2), q = (.2, .3, .5), a = .3."""
    p, q, found, kept = np.array([0.5, 0.3, 0.2]), np.array([0.2, 0.3, 0.5]), np.zeros(3), 0.0
    seq = sequence([0, 1], 9, SeededDice(0))

    def program(dice: EnumeratedDice) -> tuple[int, bool]:
        builder, proposal = TreeBuilder(), Proposal.of(q)
        token = dice.choice(q)
        builder.add(token, -1, IID, proposal)
        tree, again = builder.build(), np.full(3, 0.05)
        again[token] = 0.9
        logits = torch.from_numpy(np.log(np.stack([p, p, p, again])))  # root, draft, R of 2
        verdict = made().verify(tree, TargetProbs(Rows(logits).split(1), seq, tree, ()), dice)
        return verdict.tokens(tree)[0], bool(verdict.nodes)

    for (token, is_kept), weight in EnumeratedDice().outcomes(program):
        found[token] += weight
        kept += weight * is_kept
    np.testing.assert_allclose(found, [0.27555406, 0.3, 0.42444594], atol=1e-8)
    assert kept == pytest.approx(0.92444594) and np.abs(found - p).sum() / 2 > 0.22


# The real model.


@pytest.fixture(scope="module")
def model():
    return forerun.load("reasoner", dtype="fp32")


PROBLEM = (
    "Problem: Dan did 25 laps. Eve did 6 laps. How many laps do they have together?\nSolution:\n"
)


def test_probes_change_no_row_of_the_draft_and_equal_a_pass_over_the_text(model):
    target, rule = model.target, Reflective(tokenizer=model.tokenizer)
    prompt, draft = model.tokenizer.encode(PROBLEM), model.tokenizer.encode("Dan has 25")
    tree = chain(draft)
    seq = sequence(prompt, 50, SeededDice(0))
    (plain,) = target.forward(ForwardBatch([seq], [tree]))
    (found,) = target.forward(ForwardBatch([seq], [rule.probe(tree, 500)]))
    rows = found.split(len(tree))
    torch.testing.assert_close(rows.logits, plain.logits, atol=1e-4, rtol=1e-4)
    whole = [*draft, *rule.reflection, *draft[:-1]]
    other = sequence(prompt, 50, SeededDice(0))
    (written,) = target.forward(ForwardBatch([other], [chain(whole)]))
    expected = written.logits[1 + len(draft) :]
    torch.testing.assert_close(rows.probes, expected, atol=1e-4, rtol=1e-4)


def test_what_the_cache_holds_afterwards_is_what_plain_decoding_holds(model):
    """After a text with probes, the next row equals that of the text in one pass."""
    texts: list[list[int]] = []
    (result,) = model.generate(
        [PROBLEM],
        drafter="prompt_lookup",
        verifier="reflective",
        temperature=0,
        max_new_tokens=40,
        controller="fixed",
        on_step=lambda step: texts.append(list(step.seqs[0].tokens)),
    )
    seq = sequence(texts[-1], 5, SeededDice(0))
    (kept,) = model.target.forward(ForwardBatch([seq], [EMPTY]))
    assert model.target.cache.reused[seq] > len(texts[-1]) // 2  # it stands on those cells
    fresh = forerun.load("reasoner", dtype="fp32").target
    (plain,) = fresh.forward(ForwardBatch([sequence(texts[-1], 5, SeededDice(0))], [EMPTY]))
    torch.testing.assert_close(kept.logits, plain.logits, atol=1e-4, rtol=1e-4)
    assert result.stats.accepted > 0
