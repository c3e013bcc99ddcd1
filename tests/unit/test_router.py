"""One of several drafters at a time, chosen by what its steps have made."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from says import FIRST, GREEDY, LAW, SECOND, Says, run, truth, wrong

import forerun
from fakes import FakeRunner, FakeTarget, run_all, sequence, table_law
from forerun.controllers.fixed import Fixed
from forerun.core.cost import Cost
from forerun.core.dice import Dice, SeededDice
from forerun.core.mixins import parts_of
from forerun.core.records import Plan, Sequence, Step
from forerun.core.sampling import Sampling
from forerun.core.tree import Tree
from forerun.drafters import _draft_runner
from forerun.drafters.auto import Auto
from forerun.drafters.draft_model import DraftModel
from forerun.drafters.router import MAX_RECORDS, OPTIMISM, Router, SpeedRecord
from forerun.drafters.stand import Stand
from forerun.engine.engine import Engine
from forerun.engine.safe_drafter import SafeDrafter
from forerun.errors import ConfigError
from forerun.verifiers.recursive import Recursive


class Dear(Says):
    """Drafts at a price, in passes."""

    def __init__(self, say: Callable[[list[int], int], list[int]], price: float = 10.0) -> None:
        super().__init__(say)
        self.price = price

    def draft_seconds(self, nodes: int, num: int = 1) -> float:
        return self.price


def half(tokens: list[int], count: int) -> list[int]:
    return truth(tokens, 2) + wrong(tokens, count)[2:]


@pytest.mark.parametrize("order", [(truth, wrong), (wrong, truth)])
@pytest.mark.parametrize("seqs", [1, 3])
def test_who_pays_is_found(order, seqs: int) -> None:
    texts, stats = run(Router(parts=tuple(map(Says, order))), count=1000, seqs=seqs)
    assert texts == [truth([0, 1], 1000)] * seqs
    best, worst = (FIRST, SECOND) if order[0] is truth else (SECOND, FIRST)
    drafted = {name: sum(one.drafted_by[name] for one in stats) for name in (best, worst)}
    assert drafted[best] > 4 * drafted[worst] > 0
    assert all(one.accepted == one.accepted_by[best] > 0 for one in stats)


@pytest.mark.parametrize(("price", "pays"), [(10.0, False), (0.1, True)])
def test_what_drafting_costs_counts(price: float, pays: bool) -> None:
    """Five tokens a step, or three: one pass and a price, or a pass. No need to pay to know."""
    _, (stats,) = run(Router(parts=(Says(half), Dear(truth, price))), count=1000)
    dear, cheap = stats.accepted_by["test_router"], stats.accepted_by["says"]
    assert (dear > cheap > 0) if pays else dear == 0 < cheap


def test_a_part_that_fails_is_left_for_one_that_drafts() -> None:
    """What it is believed to make does not keep it in use."""

    class Fails(Says):
        def draft(self, seq: Sequence, plan: Plan, dice: Dice) -> Tree:
            raise MemoryError("no room for its cache")

    class Hopeful(Router):
        def beliefs(self, seq: Sequence | None) -> tuple[float, ...]:
            return 1.6, 1.0

    router = Hopeful(parts=(Fails(truth), Says(truth)))
    _, (stats,) = run(SafeDrafter(router), count=1000)
    assert stats.accepted_by["says"] > 500


def test_who_drafts_next_is_told_beforehand() -> None:
    """A controller plans for the part that will draft: at that one's price, by its own counts."""
    router = Router(parts=(Says(half), Dear(truth, 0.1)), run=1, optimism=3.0)
    told, drafted = [], []

    class Asks(Fixed):
        def plan(self, seq: Sequence) -> Plan:
            told.append(router.parts.index(router.active_drafter(seq)))
            return super().plan(seq)

        def observe(self, step: Step) -> None:
            drafted.extend(map(router.names.index, step.trees[0].sources[:1]))

    run_all(
        Engine(FakeTarget(LAW), router, Recursive(), Asks(nodes=4)),
        [sequence((0, 1), 300, SeededDice(0), GREEDY)],
    )
    assert told[: len(drafted)] == drafted and set(drafted) == {0, 1}


def test_a_text_that_a_part_would_have_to_read_first_goes_to_another() -> None:
    """Reading is spread over the steps that come; what is read once is read."""

    class Reads(Says):
        left = 0.0

        def catch_up_seconds(self, seq: Sequence) -> float:
            return self.left

    reads = Reads(truth)
    router = Router(parts=(reads, Says(half)))
    router.bind(FakeTarget(LAW))
    seq, owned = sequence((0, 1), 9, SeededDice(0), GREEDY), []
    for reads.left in (0.0, 100.0, 0.0):
        owned.append(router.active_drafter(seq))
    assert owned == [reads, router.parts[1], reads]
    assert router.catch_up_seconds(seq) == 0.0


def test_what_is_hoped_of_drafts_is_what_the_first_part_hopes() -> None:
    """A draft model too dear to be the first does not make others seem better."""

    class Sure(Dear):
        def acceptance_prior(self, num: int = 1) -> tuple[float, float]:
            return 0.9, 0.95

    hopes = []
    for price in (0.0, 10.0):
        router = Router(parts=(Sure(truth, price), Says(half)))
        router.bind(FakeTarget(LAW))
        hopes.append(SafeDrafter(router).acceptance_prior(2))
    assert hopes == [(0.9, 0.95), Says(half).acceptance_prior()]


def test_others_do_not_show_in_what_a_group_learns() -> None:
    """A sequence with a seed must draft the same in any company."""
    speeds = []
    for num in (1, 3):
        router = Router(parts=(Says(half), Says(truth)))
        target = FakeTarget(LAW)
        target.cost = Cost((1, 2, 65), (1.0, 1.5, 33.0))
        loop = Engine(target, router, Recursive(), Fixed(nodes=4), max_seqs=num)
        seqs = [sequence((0, 1), 200, SeededDice(0), GREEDY, index=i) for i in range(num)]
        for i, seq in enumerate(seqs):
            seq.group = i
        run_all(loop, seqs)
        speeds.append(router.speeds(seqs[0]))
    assert speeds[0] == speeds[1]


def test_a_part_that_has_learned_is_found_again() -> None:
    def late(tokens: list[int], count: int) -> list[int]:
        return (wrong if len(tokens) < 2000 else truth)(tokens, count)

    router = Router(parts=(Says(half), Says(late)), scope="global")
    _, (stats,) = run(router, count=12000)
    assert stats.accepted_by[SECOND] > 0.5 * stats.accepted
    speeds = router.speeds(sequence((0, 1), 5, SeededDice(0), GREEDY))
    assert speeds[SECOND] > speeds[FIRST] > 0


def test_what_was_hardly_used_of_late_is_tried_again() -> None:
    router = Router(parts=(Says(truth), Says(wrong)))
    _, (stats,) = run(router, count=10000)
    tried = stats.drafted_by[SECOND] / stats.drafted
    assert 0.005 < tried < 0.05
    _, (stats,) = run(Router(parts=(Says(truth), Says(wrong)), optimism=0.0), count=4000)
    assert SECOND not in stats.drafted_by, "of equal ones the first, and it proved good"


def test_steps_in_which_another_one_drafted_do_not_count() -> None:
    """A router may stand in a drafter that asks it and uses somebody else's tree."""
    router = Router(parts=(Says(truth), Says(truth)), scope="global")

    class Asks(Says):
        def draft(self, seq: Sequence, plan: Plan, dice) -> Tree:
            router.propose([seq], [plan], [dice])[0]
            return super().draft(seq, plan, dice)

        def observe(self, step: Step) -> None:
            router.observe(step)

    run(Asks(wrong))
    first, second = router.speeds(sequence((0, 1), 5, SeededDice(0), GREEDY)).values()
    assert first == second, "as believed"


def test_what_was_said_for_one_step_waits_while_another_is_judged() -> None:
    """Two streams over one drafter: what each hears may come late."""
    router = Router(parts=(Says(truth), Says(wrong)), scope="global")
    seqs = [sequence((0, 1), 9, SeededDice(i), GREEDY) for i in range(2)]
    asked = [router.propose([seq], [Plan(2)], [seq.dice]) for seq in seqs]
    for seq, trees in zip(reversed(seqs), reversed(asked), strict=True):
        router.observe(Step([seq], [Plan(2)], trees, [], [], [[1, 2, 0]]))
    (record,) = router._records.values()
    assert sum(record.tokens) == pytest.approx(6, rel=0.01)


def test_records_of_tenants_are_few() -> None:
    router = Router(parts=(Says(truth), Says(wrong)), scope="tenant")
    for i in range(MAX_RECORDS + 10):
        seq = sequence((0, 1), 9, SeededDice(0), GREEDY)
        seq.tenant = str(i)
        router.propose([seq], [Plan(2)], [seq.dice])
    assert len(router._records) == MAX_RECORDS


def test_to_read_is_to_leave_no_record() -> None:
    router = Router(parts=("stand", "suffix"))
    assert set(router.speeds(sequence((0, 1), 5, SeededDice(0), GREEDY))) == {"stand", "suffix"}
    assert not router._records


def test_beliefs_hold_until_steps_say_otherwise() -> None:
    """Shrinkage: what was hardly used is judged by its belief in tokens, and by what it costs."""
    record, dues = SpeedRecord((1.0, 0.5)), (2.0, 4.0)
    assert record.speeds(dues) == [0.5, 0.125]
    for _ in range(200):
        record.add(0, 4, 2.0, 3)
    assert record.speeds(dues) == pytest.approx([2.0, 0.5])
    record.add(1, 40, 4.0, 3)
    believed = record.speeds(dues)
    assert believed[0] == pytest.approx(2.0, rel=0.2) and 0.6 < believed[1] < 2
    for _ in range(2000):
        record.add(1, 40, 4.0, 3)
    assert record.speeds(dues)[1] == pytest.approx(10.0, rel=0.05)


def test_drafts_as_long_as_of_late_decide_what_a_part_would_cost() -> None:
    """A pass of a draft model for each node is dear where drafts are long."""

    class PerNode(Says):
        def draft_seconds(self, nodes: int, num: int = 1) -> float:
            return 0.2 * nodes

    router = Router(parts=(Says(half), PerNode(truth)))
    router.bind(FakeTarget(LAW))
    record, found = SpeedRecord((1.0, 1.0)), []
    for nodes in (1, 9):
        for _ in range(300):
            record.add(0, 2, 1.0, nodes)
        found.append(router._step_seconds(record)[1] - router._step_seconds(record)[0])
    assert found == pytest.approx([0.2, 1.8], rel=0.01)


def test_what_a_group_taught_ends_with_it() -> None:
    router = Router(parts=(Says(wrong), Says(truth)))
    loop = Engine(FakeTarget(LAW), router, Recursive(), Fixed(nodes=4))
    for group in ("prompt", None):
        seq = sequence((0, 1), 300, SeededDice(0), GREEDY)
        seq.group = group
        run_all(loop, [seq])
    assert set(router._records) == {("prompt", True)}
    router.forget("prompt")
    assert not router._records


def test_those_who_share_a_record_draft_together() -> None:
    """A pass of a draft model serves all of them; others may draft with another part."""
    router = Router(parts=(Says(truth), Says(wrong)), scope="group")
    seqs = [sequence((0, 1), 9, SeededDice(i), GREEDY, index=i) for i in range(4)]
    for i, seq in enumerate(seqs):
        seq.group = i // 2
    assert [router.active_drafter(seq) for seq in seqs] == [router.parts[0]] * 4
    assert not router._records, "to ask who drafts changes nothing"
    router.propose(seqs, [Plan(2)] * 4, [s.dice for s in seqs])
    record = router._record(seqs[0])
    assert record.num == 2
    record.part = 1
    trees = router.propose(seqs, [Plan(2)] * 4, [s.dice for s in seqs])
    said = [tree.tokens.tolist() for tree in trees]
    assert said == [wrong([0, 1], 2)] * 2 + [truth([0, 1], 2)] * 2
    router.finish(seqs[1])
    assert record.num == 1


@pytest.mark.parametrize("num", [1, 2])
def test_parts_draft_by_their_fast_way_however_many_draft(num: int) -> None:
    asked: list[int] = []

    class Fast(Stand):
        def propose(self, seqs, plans, dice) -> list[Tree]:
            asked.append(len(seqs))
            return super().propose(seqs, plans, dice)

    router = Router(parts=(Fast(), Fast()))
    seqs = [sequence((0, 1), 9, SeededDice(i), GREEDY, index=i) for i in range(num)]
    router.propose(seqs, [Plan(2)] * num, [s.dice for s in seqs])
    assert sum(asked) == num


def test_a_greedy_text_is_copied_first_and_a_drawn_one_is_not() -> None:
    auto = Auto()
    for temperature, best in ((0.0, "suffix"), (0.6, "stand")):
        seq = sequence((0, 1), 5, SeededDice(0), Sampling(temperature=temperature))
        speeds = auto.speeds(seq)
        assert max(speeds, key=lambda name: speeds[name]) == best


def test_bad_options_are_refused() -> None:
    parts = Says(truth), Says(wrong)
    for options in ({"run": 0}, {"optimism": -0.1}, {"optimism": float("nan")}):
        with pytest.raises(ConfigError, match="run >= 1, optimism >= 0"):
            Router(parts=parts, **options)
    with pytest.raises(ConfigError, match=r"parts=stand\+draft_model:model=draft"):
        Auto(parts=parts, model="draft")


def test_auto_tries_more_beside_a_draft_model() -> None:
    """What STAND and a suffix tree are worth is nearly known; what a draft model is hangs on it."""
    model = forerun.load("reasoner")
    made = {
        spec: model.drafter(f"auto:{spec}").optimism
        for spec in ("model=none", "model=own", "parts=stand+sam", "model=none,optimism=0.7")
    }
    assert made["model=none"] < made["model=own"] == made["parts=stand+sam"] == OPTIMISM
    assert made["model=none,optimism=0.7"] == 0.7


def test_auto_with_a_draft_model_uses_all_it_has(monkeypatch: pytest.MonkeyPatch) -> None:
    model = forerun.load("reasoner")
    drafter = model.drafter("auto:model=draft")
    names = [type(part).__name__ for part in parts_of(drafter)]
    assert names == ["Auto", "Stand", "Suffix", "DraftModel"]
    draft = next(part for part in parts_of(drafter) if isinstance(part, DraftModel))
    assert draft.draft_seconds(4, 16) < draft.draft_seconds(4), (
        "a pass of the draft serves the whole batch"
    )
    monkeypatch.setattr(_draft_runner, "COLD_FACTOR", 0.0)  # else no draft pays
    question = "Question: Tom has 3 apples and buys 4 more. How many apples has he?\nAnswer:"
    sampling = Sampling(temperature=0, max_new_tokens=60, n=2)
    fixed = {"drafter": drafter, "controller": "fixed:nodes=4", "batch": 1}
    (result,) = model.generate([question], sampling, **fixed)
    (plain,) = model.generate([question], sampling, drafter="none")
    assert [s.text for s in result.samples] == [s.text for s in plain.samples]
    assert result.stats.drafted_by["draft_model"] > 0


@pytest.mark.parametrize(("warm", "cold"), [(1e-4, 2.5e-4), (1e-3, 1.35e-3), (3e-3, 3.35e-3)])
def test_a_step_of_a_large_draft_is_hardly_slower_between_passes(
    warm: float, cold: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its weights are read from memory anyway."""
    monkeypatch.setattr(_draft_runner, "cost_of", lambda runner: Cost((1, 2), (warm, warm)))
    drafter = _draft_runner.ModelDrafter(FakeRunner(table_law(1)))  # type: ignore[arg-type]
    assert drafter.draft_seconds(3) == pytest.approx(3 * cold)


def test_a_draft_model_reads_a_prompt_once_for_all_its_samples() -> None:
    model = forerun.load("reasoner")
    (draft,) = (
        part for part in parts_of(model.drafter("auto:model=draft")) if isinstance(part, DraftModel)
    )
    seqs = [sequence(tuple(range(5, 105)), 9, SeededDice(i), index=i) for i in range(3)]
    for seq, group in zip(seqs, ("first", "first", "second"), strict=True):
        seq.group = group
    assert (
        len({draft.catch_up_seconds(seq) for seq in seqs}) == 1
        and draft.catch_up_seconds(seqs[0]) > 0
    )
    draft.propose(seqs[:1], [Plan(2)], [s.dice for s in seqs[:1]])
    assert [draft.catch_up_seconds(seq) > 0 for seq in seqs] == [False, False, True]
    draft.finish(seqs[0])
    draft.forget("first")
    assert draft.catch_up_seconds(seqs[1]) > 0
