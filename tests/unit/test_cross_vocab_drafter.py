"""A draft model with another tokenizer on real files: texts, cache, tenants, errors."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from tiny import make_tiny
from two_vocabularies import TARGET, HiddenLetters, crossed

import forerun
from fakes import FakeRunner, FakeTarget, sequence, table_law
from forerun import registry
from forerun.core.dice import SeededDice
from forerun.core.records import Plan
from forerun.core.sampling import Sampling
from forerun.drafters.draft_model import DraftModel
from forerun.drafters.fuse import merge
from forerun.errors import ConfigError, UnknownName
from forerun.verifiers.speculative import Speculative

PROMPT = "the cat sat on the mat — naïve 日本"
METHODS = "omni", "tli", "slem"
FIXED = "fixed:nodes=4,depth=4"


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A target and a draft with fewer merges and padding behind its vocabulary."""
    place = tmp_path_factory.mktemp("pair")
    return make_tiny(place / "target", vocab=320), make_tiny(place / "draft", vocab=262, seed=1)


@pytest.fixture(scope="module")
def model(folders: tuple[Path, Path]) -> forerun.Model:
    return forerun.load(str(folders[0]), dtype="fp32")


@pytest.mark.parametrize("method", METHODS)
def test_greedy_texts_are_those_of_plain_decoding(model, folders, method: str) -> None:
    """Prompts of several lengths in one batch; some tokens end within a character."""
    prompts = [PROMPT, "the dog", PROMPT * 2]
    sampling = Sampling(temperature=0, max_new_tokens=24)
    spec = f"cross_vocab:model={folders[1]},method={method}"
    plain = model.generate(prompts, sampling, drafter="none")
    found = model.generate(prompts, sampling, drafter=spec, controller=FIXED)
    assert [one.samples[0].tokens for one in found] == [one.samples[0].tokens for one in plain]
    assert sum(one.stats.drafted for one in found) > 0


@pytest.mark.parametrize("method", METHODS)
def test_seeds_and_constraints(model, folders, method: str) -> None:
    spec = f"cross_vocab:model={folders[1]},method={method}"
    how = {"drafter": spec, "controller": FIXED, "max_new_tokens": 16, "seed": 3}
    first, second = (model.generate([PROMPT], **how)[0].samples[0].tokens for _ in range(2))
    assert first == second
    banned = tuple(range(40, 200))
    (found,) = model.generate([PROMPT], banned_tokens=banned, repetition_penalty=1.3, **how)
    assert set(found.samples[0].tokens).isdisjoint(banned)


def test_the_draft_reads_only_what_is_new(model, folders) -> None:
    """The KV cache of the draft follows the text, also where drafts were rejected."""
    drafter = model.drafter(f"cross_vocab:model={folders[1]}")
    before = drafter.runner.num_rows
    sampling = Sampling(temperature=0, max_new_tokens=40)
    model.generate([PROMPT * 2], sampling, drafter=drafter, controller=FIXED)
    whole = sum(len(PROMPT.encode()) * 2 + i for i in range(40))
    assert drafter.runner.num_rows - before < whole / 4


def test_a_short_context_of_the_draft_ends_drafts(folders, tmp_path: Path) -> None:
    """The target goes on alone where the draft's context is full."""
    target = forerun.load(str(folders[0]), dtype="fp32")
    short = make_tiny(tmp_path / "short", vocab=262, context=48)
    sampling = Sampling(temperature=0, max_new_tokens=60)
    texts = [
        target.generate([PROMPT], sampling, drafter=drafter, controller=FIXED)[0].text
        for drafter in ("none", f"cross_vocab:model={short}")
    ]
    assert texts[0] == texts[1]


def test_ngrams_of_a_tenant_stay_with_it() -> None:
    drafter = crossed(table_law(2, 2))
    drafter.bind(FakeTarget(table_law(1, 3), 3))
    ours, theirs = (sequence((1, 2), 4, SeededDice(0)) for _ in range(2))
    ours.tenant = "a"
    drafter.start(ours)
    theirs.tokens[:], theirs.tenant = [1, 0], "b"
    plan = Plan(2, 2)
    drafter.propose([ours, theirs], [plan, plan], [ours.dice, theirs.dice])
    sizes = {name: len(trie.runs) for name, trie in drafter.translation._tries.items()}
    assert sizes == {"a": 1, "b": 0}
    drafter.forget(("tenant", "a"))
    assert "a" not in drafter.translation._tries


def test_the_law_of_a_step_does_not_change_while_it_is_verified() -> None:
    """Tokens seen meanwhile become n-grams with the next draft."""
    drafter = crossed(table_law(2, 2))
    drafter.bind(FakeTarget(table_law(1, 3), 3))
    seq = sequence((1, 0), 6, SeededDice(0))
    (tree,) = drafter.propose([seq], [Plan(1, 1)], [seq.dice])
    drafter._learn(seq, [2])
    law = tree.lazy[0]
    assert law.prob(2) == 0.0 and law.prob(0) + law.prob(1) == pytest.approx(1.0)
    (tree,) = drafter.propose([seq], [Plan(1, 1)], [seq.dice])
    assert tree.lazy[0].prob(2) > 0.0
    assert sum(tree.lazy[0].prob(token) for token in range(len(TARGET))) == pytest.approx(1.0)


def test_lazy_drafts_in_a_batch_on_a_device() -> None:
    """The device rule leaves them to the host rule; other trees of the batch stay there."""
    from forerun.controllers.fixed import Fixed
    from forerun.engine.engine import Engine

    texts = []
    for tensors in (False, True):
        drafter = crossed(table_law(2, 2))
        target = FakeTarget(table_law(1, 3), 3)
        engine = Engine(
            target, drafter, Speculative(tensors=tensors), Fixed(nodes=2, depth=2), max_seqs=2
        )
        seqs = [sequence((1, 2), 12, SeededDice(i), index=i) for i in range(2)]
        for seq in seqs:
            engine.submit(seq)
        engine.run()
        texts.append([seq.generated for seq in seqs])
    assert texts[0] == texts[1]


def test_lazy_drafts_are_not_merged() -> None:
    drafter = crossed(table_law(2, 2))
    with pytest.raises(ConfigError, match="cannot be merged; use it alone"):
        registry.make(
            "drafter", "fuse", parts=(drafter, DraftModel(model=FakeRunner(table_law(1))))
        )
    with pytest.raises(
        ConfigError,
        match="'k_seq' does not accept .* use verifier speculative, match or recursive$",
    ):
        from forerun.engine.engine import check_pair

        check_pair(drafter, registry.make("verifier", "k_seq"))
    drafter.bind(FakeTarget(table_law(1, 3), 3))
    seq = sequence((1, 2), 6, SeededDice(0))
    (tree,) = drafter.propose([seq], [Plan(2, 2)], [seq.dice])
    assert len(merge([tree, tree])) == 0 and merge([tree]).tokens.tolist() == tree.tokens.tolist()
    kept = tree.part(np.arange(len(tree)) < 1)
    assert kept.lazy == tree.lazy[:1]


def test_wrong_options_are_named(folders) -> None:
    with pytest.raises(UnknownName, match="omni"):
        registry.make("drafter", f"cross_vocab:model={folders[1]},method=omny")
    with pytest.raises(ConfigError, match="method omni drafts chains"):
        registry.make("drafter", f"cross_vocab:model={folders[1]},grower=gumbel")
    with pytest.raises(ConfigError, match="needs model"):
        registry.make("drafter", "cross_vocab")


def test_another_vocabulary_gets_the_hint(model, folders) -> None:
    """The error of draft_model names sizes, hashes and the first ids that differ."""
    with pytest.raises(ConfigError) as caught:
        model.generate([PROMPT], drafter=f"draft_model:model={folders[1]}")
    said = str(caught.value)
    assert "262 and 320 tokens" in said and "hashes" in said and "'cross_vocab'" in said


@pytest.mark.parametrize("is_equal", [False, True])
def test_examples_for_a_head_are_the_drafted_tokens_that_were_reached(is_equal: bool) -> None:
    """Labels are min(1, p / Q); 1 if the draft is the target. The newest token is left out."""
    from forerun.controllers.fixed import Fixed
    from forerun.engine.engine import Engine
    from forerun.training.recipes._drafted_tokens import DraftedTokens

    p, q = table_law(1, 2), table_law(2, 2)
    names = ("a", "b"), ("b", "a")  # one-to-one, with other ids
    law = (lambda text: p([1 - t for t in text])[::-1]) if is_equal else q
    drafter = crossed(law, *names, runner=HiddenLetters)
    collect, expected = DraftedTokens(drafter), list[float]()

    def recount(step) -> None:
        (seq,), (tree,), (verdict,) = step.seqs, step.trees, step.verdicts
        text = seq.tokens[: step.start(0)]
        for node in range(min(len(verdict.nodes) + 1, len(tree) - 1)):
            before, token = [*text, *tree.path(node)[:-1]], int(tree.tokens[node])
            theirs = law([1 - t for t in before])[1 - token]
            expected.append(min(1.0, p(before)[token] / theirs))

    target, rule = FakeTarget(p, 2), Speculative()
    engine = Engine(target, drafter, rule, Fixed(nodes=3, depth=3), listeners=[recount, collect])
    engine.submit(sequence((1, 0), 40, SeededDice(0)))
    engine.run()
    assert collect.labels == pytest.approx(expected) and len(expected) > 15
    assert len(collect.hidden) == len(expected)
    if is_equal:
        assert min(collect.labels) == pytest.approx(1.0)
    else:
        assert min(collect.labels) < 0.9
