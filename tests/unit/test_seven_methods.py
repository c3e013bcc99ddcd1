"""A drafter with the seven methods alone, no mixin, works wherever drafters are used."""

from __future__ import annotations

from collections.abc import Sequence as Many

import pytest
from says import FIRST, GREEDY, LAW, Says, truth, wrong

from fakes import FakeTarget, run_all, sequence
from forerun import registry
from forerun.controllers.budget import Budget
from forerun.controllers.fixed import Fixed
from forerun.core.cost import Cost
from forerun.core.dice import Dice, SeededDice
from forerun.core.mixins import DEFAULT_COSTS, Persistent, Priced, Shared
from forerun.core.records import Plan, Sequence, Step
from forerun.core.roles import Controller, Drafter, Target
from forerun.core.tree import Tree, chain
from forerun.engine.engine import Engine
from forerun.engine.safe_drafter import SafeDrafter
from forerun.engine.stats import Recorder, Stats
from forerun.errors import ConfigError
from forerun.state.array_file import Origin
from forerun.state.drafter_files import MemoryFile
from forerun.verifiers.recursive import Recursive

OWN = "test_seven_methods"


class Seven(Drafter):
    """Drafts what greedy decoding says; counts the calls of its methods."""

    labels = frozenset({"point"})

    def __init__(self) -> None:
        self.calls: dict[str, int] = {}

    def _count(self, name: str) -> None:
        self.calls[name] = self.calls.get(name, 0) + 1

    def bind(self, target: Target) -> None:
        self._count("bind")

    def start(self, seq: Sequence) -> None:
        self._count("start")

    def propose(self, seqs: Many[Sequence], plans: Many[Plan], dice: Many[Dice]) -> list[Tree]:
        self._count("propose")
        pairs = zip(seqs, plans, strict=True)
        return [chain(truth(seq.tokens, min(plan.nodes, plan.depth))) for seq, plan in pairs]

    def observe(self, step: Step) -> None:
        self._count("observe")

    def finish(self, seq: Sequence) -> None:
        self._count("finish")

    def memory_report(self) -> dict[str, int]:
        return {"seven": 7}


def run(drafter: Drafter, controller: Controller, seqs: int = 2) -> list[Stats]:
    """Statistics of greedy sequences, whose texts are checked."""
    target, recorder = FakeTarget(LAW), Recorder()
    target.cost = Cost((1, 65), (1.0, 2.0))
    safe = SafeDrafter(drafter)
    engine = Engine(target, safe, Recursive(), controller, listeners=[recorder], max_seqs=2)
    made = [sequence((0, 1), 200, SeededDice(i), GREEDY, index=i) for i in range(seqs)]
    run_all(engine, made)
    assert [seq.generated for seq in made] == [truth([0, 1], 200)] * seqs
    assert not any(safe.failures(seq) for seq in made)
    safe.forget("one prompt")
    return [recorder.of(seq) for seq in made]


@pytest.mark.parametrize("make", [Budget, lambda: Fixed(nodes=4)])
def test_it_drafts_under_every_controller(make) -> None:
    drafter = Seven()
    assert not isinstance(drafter, Shared | Persistent | Priced)
    stats = run(drafter, make())
    assert all(one.accepted > 100 and set(one.accepted_by) == {OWN} for one in stats)
    assert drafter.calls["bind"] == 1
    assert drafter.calls["start"] == drafter.calls["finish"] == 2
    assert drafter.calls["observe"] >= drafter.calls["propose"] > 10


@pytest.mark.parametrize("name", ["fuse", "cascade", "router", "auto"])
@pytest.mark.parametrize("make", [Budget, lambda: Fixed(nodes=4)])
def test_it_drafts_as_a_part(name: str, make) -> None:
    drafter = Seven()
    whole = registry.make("drafter", name, parts=(drafter, Says(wrong)))
    stats = run(whole, make())
    assert all(one.accepted_by[OWN] > 100 and not one.accepted_by[FIRST] for one in stats)
    assert drafter.calls["start"] == drafter.calls["finish"] == 2
    assert whole.memory_report() == {"part 0: seven": 7}


def test_it_costs_what_the_defaults_say() -> None:
    safe, seq = SafeDrafter(Seven()), sequence((0, 1), 9, SeededDice(0))
    assert safe.active_drafter(seq) is safe and safe.check_room(3, 100) == 0
    assert safe.draft_seconds(8) == safe.catch_up_seconds(seq) == 0.0
    assert safe.acceptance_prior() == DEFAULT_COSTS.acceptance_prior()


def test_it_cannot_be_saved(tmp_path) -> None:
    with pytest.raises(ConfigError, match=f"drafter '{OWN}' has no state to save"):
        MemoryFile(tmp_path / "some.mem", Seven(), Origin("t" * 64, ()))
