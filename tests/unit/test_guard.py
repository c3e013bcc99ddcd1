"""What users are told of a drafter of their own that fails."""

from __future__ import annotations

import logging
import re
from collections.abc import Sequence as Many
from typing import Any

import pytest

from fakes import FakeTarget, sequence, table_law
from forerun import registry
from forerun.core.dice import SeededDice
from forerun.core.records import Plan, Sequence
from forerun.core.roles import Drafter, Target, name_of
from forerun.core.tree import EMPTY, Tree, chain
from forerun.engine.safe_drafter import SafeDrafter
from forerun.errors import ConfigError


class Mine(Drafter):
    """Returns what it is told to."""

    labels = frozenset({"point"})

    def __init__(self, found: Any) -> None:
        self.found = found

    def bind(self, target: Target) -> None:
        if isinstance(self.found, Exception):
            raise self.found

    def propose(self, seqs: Many[Sequence], plans: Many[Plan], dice: object) -> list[Tree]:
        return self.found


def test_a_drafter_that_cannot_be_bound_is_named() -> None:
    with pytest.raises(ConfigError, match="test_guard failed to bind .KeyError: 'x'") as caught:
        SafeDrafter(Mine(KeyError("x"))).bind(FakeTarget(table_law(1)))
    assert isinstance(caught.value.__cause__, KeyError)
    told = ConfigError("no such corpus")
    with pytest.raises(ConfigError) as caught:
        SafeDrafter(Mine(told)).bind(FakeTarget(table_law(1)))
    assert caught.value is told


@pytest.mark.parametrize(
    ("found", "said"),
    [
        ([[1, 2]], r"expected a Tree for each sequence, got \[1, 2\]"),
        ([], r"a list of 1 trees, got \[\]"),
        (None, "a list of 1 trees, got None"),
    ],
)
def test_what_is_no_tree_costs_the_draft_and_is_shown(
    found: Any, said: str, caplog: pytest.LogCaptureFixture
) -> None:
    guarded, seq = SafeDrafter(Mine(found)), sequence([1], 8, SeededDice(1))
    with caplog.at_level(logging.WARNING, logger="forerun"):
        assert guarded.propose([seq], [Plan(4)], [seq.dice]) == [EMPTY]
    assert re.match(f"drafter test_guard failed .TypeError: .*{said}", caplog.messages[0])
    assert guarded.failures(seq) == 1


def test_ids_outside_the_vocabulary_cost_the_draft(caplog: pytest.LogCaptureFixture) -> None:
    target, seq = FakeTarget(table_law(1)), sequence([1], 8, SeededDice(1))
    for ids in ([1, target.vocab_size], [-1]):
        guarded = SafeDrafter(Mine([chain(ids)]))
        guarded.bind(target)
        with caplog.at_level(logging.WARNING, logger="forerun"):
            assert guarded.propose([seq], [Plan(4)], [seq.dice]) == [EMPTY]
        assert f"it drafts ids {ids}; they end at {target.vocab_size - 1}" in caplog.messages[-1]
    good = SafeDrafter(Mine([chain([0, target.vocab_size - 1])]))
    good.bind(target)
    assert len(good.propose([seq], [Plan(4)], [seq.dice])[0]) == 2


@pytest.mark.parametrize("plan", [Plan(2), Plan(8, depth=2)])
def test_more_than_was_planned_costs_the_draft(
    plan: Plan, caplog: pytest.LogCaptureFixture
) -> None:
    """The plan keeps drafts within the context: a longer one would end the run."""
    guarded, seq = SafeDrafter(Mine([chain([0, 1, 0])])), sequence([1], 8, SeededDice(1))
    guarded.bind(FakeTarget(table_law(1)))
    with caplog.at_level(logging.WARNING, logger="forerun"):
        assert guarded.propose([seq], [plan], [seq.dice]) == [EMPTY]
    said = f"3 nodes on 3 levels; its plan has nodes={plan.nodes}, depth={plan.depth}"
    assert said in caplog.messages[0]
    assert len(guarded.propose([seq], [Plan(3, depth=3)], [seq.dice])[0]) == 3


def test_one_that_cannot_draft_is_refused() -> None:
    class Misspelt(Drafter):
        labels = frozenset({"point"})

        def proposes(self, seqs: Many[Sequence], plans: Many[Plan]) -> list[Tree]:
            return []

    with pytest.raises(ConfigError, match="test_guard has no `propose`"):
        SafeDrafter(Misspelt())
    Misspelt.labels = frozenset()
    assert SafeDrafter(Misspelt()).propose([], [], []) == []


@pytest.mark.parametrize("name", ["fuse", "cascade", "router"])
def test_parts_from_elsewhere_are_looked_at_too(name: str) -> None:
    """One of theirs within one of ours would end the run as well."""
    target, seq = FakeTarget(table_law(1)), sequence([1], 8, SeededDice(1))
    for found in (chain([target.vocab_size]), chain([-3]), chain([0, 1, 0])):
        bad = Mine([found])
        guarded = SafeDrafter(registry.make("drafter", name, parts=(bad, "prompt_lookup")))
        guarded.bind(target)
        for _ in range(4):
            (tree,) = guarded.propose([seq], [Plan(2)], [seq.dice])
            assert len(tree) <= 2 and all(0 <= t < target.vocab_size for t in tree.tokens)

    class Mute(Drafter):
        labels = frozenset({"point"})

    with pytest.raises(ConfigError, match="has no `propose`"):
        SafeDrafter(registry.make("drafter", name, parts=(Mute(), "prompt_lookup")))


def test_labels_that_are_no_set_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Mine, "labels", "point")
    with pytest.raises(ConfigError, match="test_guard: labels must be a set, .* got 'point'"):
        SafeDrafter(Mine(None))


def test_a_drafter_of_a_script_has_the_name_of_its_class(monkeypatch: pytest.MonkeyPatch) -> None:
    assert name_of(Mine(None)) == "test_guard"
    monkeypatch.setattr(Mine, "__module__", "__main__")
    assert name_of(Mine(None)) == "Mine"


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("propose_one", "draft, in a subclass of forerun.drafters.base.PerSequence"),
        ("warm_up", "bind, which compiles too"),
        ("hear", "observe"),
        ("hope", "acceptance_prior, of forerun.core.mixins.Priced"),
        ("let_go", "release, of forerun.core.mixins.Persistent"),
        ("merged", "merge, of forerun.core.mixins.Persistent"),
        ("alias", "name"),
    ],
)
def test_a_drafter_of_an_older_release_gets_the_new_name(old: str, new: str) -> None:
    kind = type("Old", (Mine,), {old: lambda self, *given: None})
    with pytest.raises(ConfigError, match=f"drafter test_guard: {old} was renamed; write {new}"):
        SafeDrafter(kind(None))


def test_a_propose_without_dice_is_refused() -> None:
    class Old(Mine):
        def propose(self, seqs: Many[Sequence], plans: Many[Plan]) -> list[Tree]:  # type: ignore[override]
            return []

    with pytest.raises(ConfigError, match=r"propose must take \(seqs, plans, dice\), has \(seqs"):
        SafeDrafter(Old(None))
