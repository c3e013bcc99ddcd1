"""The fixed definitions, on runs made by hand."""

from __future__ import annotations

import json
from time import perf_counter

import numpy as np
import pytest

from fakes import FakeTarget, run_all, sequence
from forerun.bench.metrics import totals
from forerun.bench.results import SampleRecord
from forerun.controllers.fixed import Fixed
from forerun.core.dice import SeededDice
from forerun.core.records import Plan, Step, Verdict
from forerun.core.sampling import Sampling
from forerun.core.tree import EMPTY, Tree, TreeBuilder, chain
from forerun.drafters.base import PerSequence
from forerun.drafters.none import Plain
from forerun.engine.engine import Engine
from forerun.engine.stats import Recorder, Stats
from forerun.engine.stopping import Stops
from forerun.verifiers.greedy import Greedy


def step(seq, tree: Tree, nodes: list[int], emitted: int, **times: float) -> Step:
    """One step of one sequence; `emitted` counts the tokens that were kept."""
    verdict = Verdict(nodes, 0)
    kept = verdict.tokens(tree)[:emitted]
    return Step([seq], [Plan()], [tree], [None], [verdict], [kept], times)  # type: ignore[list-item]


def fork() -> Tree:
    """Root -> 1 -> 2, and root -> 3."""
    builder = TreeBuilder()
    builder.add(2, builder.add(1))
    builder.add(3)
    return builder.build()


def recorded(*steps: Step) -> Stats:
    recorder = Recorder()
    for one in steps:
        recorder(one)
    return recorder.of(steps[0].seqs[0])


@pytest.fixture
def seq():
    return sequence([0], 100, SeededDice(0))


def test_a_hand_made_run(seq):
    """Prefill, a chain kept whole, a chain broken off after two, a fork refused at the root."""
    stats = recorded(
        step(seq, EMPTY, [], 1),
        step(seq, chain([1, 2, 3]), [0, 1, 2], 4),
        step(seq, chain([1, 2, 3, 4]), [0, 1], 3),
        step(seq, fork(), [], 1),
    )
    assert (stats.passes, stats.drafted, stats.accepted, stats.generated) == (4, 10, 5, 9)
    assert stats.examined == 5 + 2  # two walks ended in a rejection
    assert stats.tau == 9 / 4
    assert stats.acceptance_rate == 5 / 10
    assert stats.examined_rate == 5 / 7
    assert stats.per_position == [2 / 4, 2 / 4, 1 / 4]


def test_plain_decoding_has_tau_one(seq):
    stats = recorded(*(step(seq, EMPTY, [], 1) for _ in range(3)))
    assert (stats.tau, stats.acceptance_rate, stats.per_position) == (1.0, 0.0, [])


def test_tokens_cut_off_behind_the_end_are_not_counted(seq):
    stats = recorded(step(seq, chain([1, 2, 3]), [0, 1, 2], 2))
    assert (stats.drafted, stats.accepted, stats.generated) == (3, 2, 2)
    assert stats.per_position == [1, 1]


def test_a_rejection_behind_the_end_is_not_examined(seq):
    stats = recorded(step(seq, chain([1, 2, 3]), [0, 1], 1))
    assert stats.accepted == 1
    assert stats.examined == 1


def test_no_pass_no_rates():
    stats = Stats()
    assert (stats.tau, stats.acceptance_rate, stats.examined_rate) == (0, 0, 0)
    assert (stats.tokens_per_second, stats.per_position) == (0, [])


def test_a_batch_shares_the_time_of_its_pass():
    seqs = [sequence([0], 9, SeededDice(k)) for k in range(2)]
    recorder, verdict = Recorder(), Verdict([], 0)
    recorder(
        Step(
            seqs,
            [Plan()] * 2,
            [EMPTY] * 2,
            [None] * 2,  # type: ignore[list-item]
            [verdict] * 2,
            [[0], [0]],
            {"draft": 1.0, "forward": 2.0},
        )
    )
    for seq in seqs:
        assert recorder.of(seq).seconds["draft"] == 0.5
        assert recorder.of(seq).seconds["forward"] == 1.0


def test_statistics_add_up(seq):
    first = recorded(step(seq, chain([1, 2]), [0, 1], 3, draft=1.0, forward=2.0))
    second = recorded(step(seq, chain([1, 2]), [0], 2, draft=0.5, forward=1.5))
    total = Stats().add(first).add(second)
    assert (total.passes, total.generated, total.accepted) == (2, 5, 3)
    assert total.per_position == [1.0, 0.5]
    assert total.seconds["draft"] == 1.5
    assert total.tokens_per_second == pytest.approx(5 / sum(total.seconds.values()))


def test_what_has_no_drafts_has_no_drafters(seq):
    assert Stats().to_dict()["by_drafter"] == {} and Stats().to_dict()["failures"] == 0


def test_to_dict_is_plain_json(seq):
    stats = recorded(step(seq, chain([1, 2, 3]), [0], 2, draft=0.25))
    again = json.loads(json.dumps(stats.to_dict()))
    assert again["tau"] == 2.0
    assert again["per_position"] == [1.0]
    assert again["seconds"]["draft"] == 0.25


class Guess(PerSequence):
    """Drafts the same chain at every step."""

    def draft(self, seq, plan, dice):
        return chain([1, 2, 0, 0][: min(plan.nodes, plan.depth)])


def cycle(tokens) -> np.ndarray:
    """0 -> 1 -> 2 -> 0, nearly certain."""
    return np.where(np.arange(3) == (tokens[-1] + 1) % 3, 0.98, 0.01)


@pytest.mark.parametrize(("drafter", "tau"), [(Plain(), 1.0), (Guess(), 3.0)])
def test_the_engine_counts_what_it_did(drafter, tau):
    """From 0 the greedy text is 1 2 0 1 2 0 ...; the draft 1 2 0 0 is right for three of four."""
    recorder = Recorder()
    engine = Engine(
        FakeTarget(cycle),
        drafter,
        Greedy(),
        Fixed(nodes=4, depth=2),
        stops=Stops(),
        listeners=[recorder],
    )
    seq = sequence([0], 6, SeededDice(0), Sampling(temperature=0))
    assert run_all(engine, [seq]) == ((1, 2, 0, 1, 2, 0),)
    stats = recorder.of(seq)
    assert stats.generated == 6
    assert stats.tau == tau
    assert set(stats.seconds) == {"draft", "forward", "verify", "other"}


def test_a_stop_string_cuts_what_its_own_step_made() -> None:
    recorder, seq = Recorder(), sequence((0, 1), 99, SeededDice(0))
    for _ in range(3):
        seq.tokens += [1, 2]
        recorder(step(seq, fork(), [0], 2))
    seq.tokens += [1, 2]
    seq.finish, seq.end = "stop", len(seq.tokens) - 3  # it began before this step
    recorder(step(seq, fork(), [0], 2))
    assert recorder.of(seq).generated == 5 == len(seq.generated)


def test_a_finished_sequence_leaves_though_a_listener_failed() -> None:
    seq = sequence((0, 1), 3, SeededDice(0), Sampling(temperature=0))

    def fail(step: Step) -> None:
        if seq.finish:
            raise ValueError("no")

    target = FakeTarget(lambda tokens: np.full(5, 0.2), 5)
    engine = Engine(target, Plain(), Greedy(), Fixed(), stops=Stops(), listeners=[fail])
    engine.submit(seq)
    with pytest.raises(ValueError, match="no"):
        while True:
            engine.step()
    assert engine.step() == [seq] and seq.num_generated == 3


def test_a_pass_is_shared_by_its_batch() -> None:
    one, two, three = (sequence([1], 9, SeededDice(k)) for k in range(3))
    recorder = Recorder()
    for seqs in ([one, two], [one, two], [two, three]):
        verdicts = [Verdict([], 7) for _ in seqs]
        emitted = [[7] for _ in seqs]
        empty = [EMPTY] * len(seqs)
        times = {"forward": 2.0}
        recorder(Step(seqs, [Plan(0)] * 2, empty, [], verdicts, emitted, times))
    found = [recorder.of(seq) for seq in (one, two, three)]
    assert [stats.generated for stats in found] == [2, 3, 1]
    assert [stats.seconds["forward"] for stats in found] == [2.0, 3.0, 1.0]


def test_times_of_a_step_are_its_parts_and_other_work() -> None:
    """Parts follow each other: together they are no more than the step took."""
    seq = sequence((0, 1), 20, SeededDice(0), Sampling(temperature=0))
    recorder, found = Recorder(), list[Step]()
    engine = Engine(
        FakeTarget(cycle), Guess(), Greedy(), Fixed(), listeners=[recorder, found.append]
    )
    start = perf_counter()
    run_all(engine, [seq])
    total = perf_counter() - start
    assert all(one.times.keys() == {"draft", "forward", "verify"} for one in found)
    assert all(min(one.times.values()) > 0 and one.clock > start for one in found)
    stats = recorder.of(seq)
    assert stats.seconds.keys() == {"draft", "forward", "verify", "other"}
    assert 0 < sum(stats.seconds.values()) <= total


@pytest.mark.parametrize("stop", [(), ("b",), ("abcabc",), ("bca", "zz")])
def test_tau_counts_what_passes_gave_also_where_a_stop_string_cuts_it(stop) -> None:
    recorder = Recorder()
    engine = Engine(
        FakeTarget(cycle),
        Plain(),
        Greedy(),
        Fixed(),
        stops=Stops(stream=Letters),
        listeners=[recorder],
    )
    law = Sampling(temperature=0, stop=stop, max_new_tokens=12)
    seq = sequence([0], 12, SeededDice(0), law)
    run_all(engine, [seq])
    stats = recorder.of(seq)
    assert stats.tau == 1.0 and stats.generated + stats.cut == stats.passes
    assert bool(stats.cut) == bool(stop) and stats.to_dict()["cut"] == stats.cut
    assert (Stats().add(stats).add(stats)).tau == 1.0
    record = SampleRecord(stats.generated, passes=stats.passes, cut=stats.cut)
    assert totals([record, record]).tau == 1.0


class Letters:
    """Tokens 0, 1, 2 as the letters a, b, c."""

    specials: dict[int, str] = {}

    def begin(self, context) -> None:
        pass

    def push(self, token: int) -> str:
        return "abc"[token]

    def extend(self, tokens) -> str:
        return "".join(map(self.push, tokens))
