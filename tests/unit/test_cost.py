"""What passes and steps cost: measured, remembered, checked."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import forerun
from fakes import FakeTarget, sequence, table_law
from forerun import registry
from forerun.core.cost import Cost
from forerun.core.dice import SeededDice
from forerun.core.records import Sequence, Step
from forerun.core.sampling import Sampling
from forerun.core.tree import Tree
from forerun.engine import stats
from forerun.engine.cost import cache, measurement
from forerun.engine.cost import forward as passes
from forerun.engine.cost import step as cost
from forerun.engine.cost.forward import pass_seconds
from forerun.engine.cost.step import cost_of
from forerun.engine.engine import Engine
from forerun.errors import CapacityError
from forerun.models.load import load_target

GREEDY = Sampling(temperature=0)
FLAT = Cost((1, 9, 65), (1.0, 1.0, 8.0))


def test_a_cost_is_read_between_and_beyond_its_points() -> None:
    assert FLAT.at(5) == 1.0 and FLAT.at(37) == 4.5
    assert FLAT.at(73) == pytest.approx(9.0)
    assert FLAT.at(np.array([1, 65])).tolist() == [1.0, 8.0]


class Timed(FakeTarget):
    """On its clock a pass takes a second, and one more for every sequence and every tree in it.

    Beside it a sequence takes two seconds, and a tree five.
    """

    cost, clock = None, 0.0

    def forward(self, batch):
        self.clock += 1 + len(batch.seqs) + sum(len(tree) > 0 for tree in batch.trees)
        return super().forward(batch)

    def commit(self, seqs, trees, verdicts):
        self.clock += 2 * len(seqs) + 5 * sum(len(tree) > 0 for tree in trees)
        super().commit(seqs, trees, verdicts)

    def show(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """It is the only clock that is read, and its seconds are not long ones."""
        for module in (passes, measurement, cost, stats):
            monkeypatch.setattr(module, "perf_counter", lambda: self.clock)
        monkeypatch.setattr(cost, "START_SECONDS", (0.0, math.inf))
        monkeypatch.setattr(cost, "MAX_PASS_SECONDS", math.inf)


def checked(target: Timed) -> Cost:
    """The cost after the first texts, whose steps take days on its clock."""
    cost_of(target)
    for _ in range(100):
        if target.between_steps is None:
            return cost.cost_for(target, None)
        target.clock += 1e6
        target.between_steps()
    raise AssertionError("it is never done")


class Model(Timed):
    """Its passes take `seconds` and a sixteenth more per row, beside which nothing takes time."""

    def __init__(self, seconds: float, shape: str = "a model on a clock") -> None:
        super().__init__(lambda tokens: np.array([0.9, 0.05, 0.05]))
        self.seconds, self.shape = seconds, f"{shape} {seconds}" if shape else ""
        self.num_passes = 0
        self.is_full = False

    def forward(self, batch):
        if self.is_full:
            raise CapacityError("no room")
        rows = sum(1 + len(tree) for tree in batch.trees)
        self.clock += self.seconds * (1 + rows / 16)
        self.num_passes += 1
        return FakeTarget.forward(self, batch)

    def commit(self, seqs, trees, verdicts):
        FakeTarget.commit(self, seqs, trees, verdicts)


def text_of(target: FakeTarget, name: str, sampling: Sampling) -> tuple[list[int], int]:
    """A text of 64 tokens with a drafter under `budget`, and the number of drafted nodes."""
    nodes: list[int] = []
    engine = Engine(
        target,
        registry.make("drafter", name),
        registry.make("verifier", registry.DEFAULT_VERIFIER),
        registry.make("controller", "budget"),
        listeners=[lambda step: nodes.append(step.num_nodes)],
    )
    seq = sequence((0, 1), 64, SeededDice(0), sampling)
    engine.submit(seq)
    engine.run()
    return seq.generated, sum(nodes)


class Recording(Timed):
    """The first pass over so many rows takes a hundred seconds longer."""

    is_slow_at_first = True

    def __init__(self, *law):
        super().__init__(*law)
        self.seen = set()

    def forward(self, batch):
        self.clock += 100 * (len(batch.trees[0]) not in self.seen)
        self.seen.add(len(batch.trees[0]))
        return super().forward(batch)


class Shaped(FakeTarget):
    """A target whose passes can be timed."""

    shape, cost = "a fake of three tokens", None


def test_seconds_that_are_looked_up_are_those_of_their_own_curve() -> None:
    curve, other = Cost((1, 4), (1.0, 2.5)), Cost((1, 4), (1.0, 4.0))
    for one in (curve, other, replace(curve, per_draft=2.0)):
        assert [one.pass_time(n) for n in range(1, 9)] == one.at(np.arange(1, 9)).tolist()


def test_a_measured_curve_rises_and_is_remembered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FORERUN_CACHE", str(tmp_path))
    monkeypatch.setattr(cost, "START_SECONDS", (0.0, 20.0))
    first = cost_of(Shaped(table_law(1)))
    assert first.rows[0] == 1 and list(first.seconds) == sorted(first.seconds)
    assert first.seconds[0] > 0
    file = next((tmp_path / "costs").iterdir())
    assert cost_of(Shaped(table_law(1))) == first  # read, not measured again
    file.write_text("{")
    assert cost_of(Shaped(table_law(1))).rows == first.rows


def test_a_curve_of_a_busy_machine_is_measured_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FORERUN_CACHE", str(tmp_path))

    class Busy(Timed):
        shape, slowness = "a fake on a clock", 1.0

        def forward(self, batch):
            self.clock += self.slowness - 1
            return super().forward(batch)

    def found(slowness: float) -> Cost:
        target = Busy(table_law(1))
        target.slowness = slowness
        target.show(monkeypatch)
        return checked(target)

    assert found(8.0).at(1) == 9
    assert found(1.0).at(1) == 2 and found(1.0).at(5) == 3, "it was kept too long"
    assert found(8.0).at(1) == 2, "a busy minute does not undo it"


def test_a_pass_is_as_fast_as_a_larger_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """A busy moment beside the smallest ones does not make drafts seem free."""

    class Hit(Timed):
        def forward(self, batch):
            self.clock += 10 * (sum(map(len, batch.trees)) < 3)
            return super().forward(batch)

    target = Hit(table_law(1))
    target.show(monkeypatch)
    assert list(cost_of(target).seconds) == [3.0] * len(passes.MEASURED_ROWS)


@pytest.mark.parametrize("seconds", [0.0001, 0.004, 0.03, 0.1, 0.3])
def test_a_start_measures_for_at_most_two_seconds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seconds: float
) -> None:
    """Of a target and its draft model together."""
    monkeypatch.setenv("FORERUN_CACHE", str(tmp_path))
    limits = cost.START_SECONDS, cost.DRAFT_MODEL_SECONDS
    whole, draft = Model(seconds), Model(seconds / 3)
    for target, some in zip((whole, draft), limits, strict=True):
        target.show(monkeypatch)
        cost_of(target, some)
    assert 0 < whole.clock + draft.clock <= 2


def test_a_model_too_slow_to_measure_makes_two_passes_ahead(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One over the text before the root, and one over the root."""
    monkeypatch.setenv("FORERUN_CACHE", str(tmp_path))
    target = Model(30.0)
    target.show(monkeypatch)
    monkeypatch.setattr(cost, "START_SECONDS", (0.3, 1.5))
    cost_of(target)
    assert target.num_passes == 2


@pytest.mark.parametrize("seconds", [0.01, 0.3, 3.0])
def test_the_first_texts_complete_the_measurement(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seconds: float
) -> None:
    """The texts are those of plain decoding, and later starts measure nothing ahead of theirs."""
    monkeypatch.setenv("FORERUN_CACHE", str(tmp_path))
    start = 0.0, 4 * seconds  # too short for all passes

    def begun() -> Model:
        target = Model(seconds)
        target.show(monkeypatch)
        monkeypatch.setattr(cost, "START_SECONDS", start)
        return target

    target, texts = begun(), []
    while not texts or target.between_steps:
        texts.append(text_of(target, "stand", GREEDY)[0])
        assert len(texts) < 100
    plain = text_of(FakeTarget(Model(seconds).law), "none", GREEDY)[0]
    assert all(text == plain for text in texts)
    found = target.refined_cost
    assert found is not None and found.rows == tuple(sorted(passes.MEASURED_ROWS))
    later = begun()
    assert cost_of(later) == found and not later.num_passes
    while later.between_steps:
        assert text_of(later, "stand", GREEDY)[0] == plain
    assert later.refined_cost == found, "it was right, as the check has found"


def test_a_measurement_waits_for_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORERUN_CACHE", str(tmp_path))
    target = Model(0.01)
    target.show(monkeypatch)
    monkeypatch.setattr(cost, "START_SECONDS", (0.0, 0.04))
    before = cost_of(target).rows
    target.is_full = True
    for _ in range(20):
        target.clock += 1e3
        assert target.between_steps is not None
        target.between_steps()
    assert cost_of(target).rows == before and target.between_steps
    target.is_full = False
    while target.between_steps:
        target.clock += 1e3
        target.between_steps()
    assert target.refined_cost is not None and set(before) < set(target.refined_cost.rows)


def test_plans_follow_refined_costs_where_no_seed_is_given() -> None:
    """The same call with a seed gives the same texts in one process."""
    target = FakeTarget(lambda tokens: np.array([0.998, 0.001, 0.001]))
    target.cost = Cost((1, 65), (1.0, 1.5))
    seeded, unseeded = Sampling(seed=7), Sampling()
    before = [text_of(target, "stand", one)[1] for one in (seeded, unseeded)]
    target.refined_cost = Cost((1, 65), (1.0, 1000.0))  # by now drafts are known to be useless
    after = [text_of(target, "stand", one)[1] for one in (seeded, unseeded)]
    assert after[0] == before[0] > 0 and after[1] < before[1]


def test_a_target_too_slow_for_two_passes_gets_a_curve_that_drafts_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    target = Timed(table_law(1))
    target.show(monkeypatch)
    monkeypatch.setattr(cost, "START_SECONDS", (0.0, 1.0))
    assert cost_of(target) == Cost((1, 2), (2.0, 4.0))


def test_a_curve_of_one_gpu_does_not_serve_another(monkeypatch: pytest.MonkeyPatch) -> None:
    def key(shape: str, gpu: str) -> str:
        target = Shaped(table_law(1))
        target.shape = shape
        monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: gpu)
        return cache.key_of(target)

    assert key("a model on cuda:0", "H200") != key("a model on cuda:0", "A10")
    assert key("a model on cpu", "H200") == key("a model on cpu", "A10")


def test_a_curve_is_of_its_number_type_and_threads(
    tiny_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    half, brain = (load_target(tiny_folder, dtype=dtype) for dtype in ("fp16", "bf16"))
    assert half.model.nbytes == brain.model.nbytes, "so nothing else tells them apart"
    keys = {cache.key_of(half), cache.key_of(brain)}
    threads = torch.get_num_threads()
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads + 1)
    keys |= {cache.key_of(half), cache.key_of(brain)}
    assert len(keys) == 4


def test_the_first_pass_of_a_shape_is_not_counted_where_it_is_slow(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It is compiled, or recorded, then."""
    target = Recording(table_law(1))
    target.show(monkeypatch)
    kinds = [(1, 3), (1, 5)]
    assert pass_seconds(target, kinds, 1, (0.0, 999.0)) == [3.0, 3.0]
    target.is_slow_at_first, target.seen = False, set()
    assert pass_seconds(target, kinds, 1, (0.0, 999.0)) == [103.0, 103.0]


def test_a_folder_that_cannot_be_written_costs_a_measurement(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("FORERUN_CACHE", str(tmp_path / "file"))
    monkeypatch.setattr(cost, "START_SECONDS", (0.0, 20.0))
    assert cost_of(Shaped(table_law(1))).rows


def test_measuring_leaves_no_sequence_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cost, "START_SECONDS", (0.0, 20.0))

    class Target(FakeTarget):
        cost = None

        def forward(self, batch):
            held.update(batch.seqs)
            return super().forward(batch)

        def release(self, seq) -> None:
            held.remove(seq)

    held = set()
    cost_of(Target(table_law(1)))
    assert not held


@pytest.mark.parametrize("vocab", [3, 4, 9, 50000])
def test_texts_of_the_measurement_differ(vocab: int) -> None:
    """Equal ones would share their rows."""
    target = FakeTarget(table_law(1))
    target.vocab_size = vocab
    texts = [passes.dummy_tokens(target, 16, i) for i in range(128)]
    assert len(set(map(tuple, texts))) == 128
    assert all(len(text) == 16 and 0 < min(text) <= max(text) < vocab for text in texts)


def test_all_texts_of_a_measurement_are_few_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a model of billions on two cores the pass over 400 tokens takes a quarter of a minute."""
    monkeypatch.setattr(cost, "START_SECONDS", (0.0, 20.0))
    new = Counter[Sequence]()

    class Target(FakeTarget):
        cost = None

        def forward(self, batch):
            new.update({seq: len(seq.tokens) for seq in batch.seqs if seq not in new})
            return super().forward(batch)

        def release(self, seq) -> None:
            nums[-1].append(new.pop(seq))
            if not new:
                nums.append([])

    nums = [list[int]()]
    cost_of(Target(table_law(1)))
    assert [len(num) for num in nums] == [1, cost.MEASURED_SEQS, cost.MEASURED_SEQS, 0]
    assert max(map(sum, nums)) <= 48


def test_trees_of_the_measurement_have_the_wanted_size() -> None:
    for nodes in (0, 1, 6, 64):
        tree: Tree = passes.dummy_tree(nodes, 3)
        assert len(tree) == nodes
        assert tree.tokens.max(initial=0) < 3


def test_what_sequences_and_drafts_take_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    target = Timed(table_law(1))
    target.show(monkeypatch)
    found = cost_of(target)
    assert found.at(1) == 2 and found.at(5) == 3
    assert found.per_step == 0, "all that comes beside a pass is of its sequences"
    assert found.per_seq == pytest.approx(2 + 6 / 7), "seven others, less the tree of the curve"
    assert found.per_draft == 5 * cost.COLD_FACTOR, "its tree in the pass is on the curve"
    assert found.fixed_draft == 0, "the first tree is no dearer than the others"
    assert found.per_empty_draft == found.fixed_empty == 0, (
        "a look adds no row, and its clock stands still"
    )


def test_neighbours_that_slow_passes_down_make_no_draft_dear(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Passes take turns of ten at two speeds, and differ by far more than what is measured."""

    class Shaken(Timed):
        count = 0

        def forward(self, batch):
            self.count += 1
            self.clock += 1000 * (self.count // 10 % 2)
            return super().forward(batch)

    target = Shaken(table_law(1))
    target.show(monkeypatch)
    monkeypatch.setattr(cost, "START_SECONDS", (0.0, 1e6))
    found = cost_of(target)
    assert (found.per_step, found.per_draft, found.fixed_draft) == (0, 5 * cost.COLD_FACTOR, 0)
    assert found.per_empty_draft == found.fixed_empty == 0


def test_a_target_with_room_for_one_is_measured_with_one(monkeypatch: pytest.MonkeyPatch) -> None:
    class Narrow(FakeTarget):
        cost = None

        def check_room(self, seqs: int, tokens: int) -> None:
            if seqs > 1:
                raise CapacityError("one at a time")

        def forward(self, batch):
            assert len(batch.seqs) == 1
            return super().forward(batch)

    monkeypatch.setattr(cost, "START_SECONDS", (0.0, 20.0))
    found = cost_of(Narrow(table_law(1)))
    assert found.per_seq == found.per_draft == 0 and found.per_step > 0


def test_what_rounds_took_is_taken_apart() -> None:
    warm = Cost(
        (1, 65), (1.0, 65.0), 0.5, 0.25, 0.125, 2.0, per_empty_draft=0.0625, fixed_empty=1.0
    )
    beside = {kind: warm.overhead(*kind) for kind in cost._kinds(8)}
    cold = [cost.COLD_FACTOR * part for part in (warm.per_draft, warm.fixed_draft)]
    looks = {"per_empty_draft": warm.per_empty_draft, "fixed_empty": warm.fixed_empty}
    found = cost._fitted(Cost(warm.rows, warm.seconds), beside, 0.875, 8)
    assert found == Cost(warm.rows, warm.seconds, 0.5, 0.25 + 0.125, *cold, **looks)


def test_rounds_draft_look_and_learn_as_real_ones_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cost, "START_SECONDS", (0.0, 20.0))
    steps, publish = [], cost.Engine._publish

    def heard(engine: cost.Engine, step: Step) -> None:
        steps.append(step)
        publish(engine, step)

    monkeypatch.setattr(cost.Engine, "_publish", heard)
    cost._rounds(FakeTarget(table_law(1, vocab=8)), 4, cost._kinds(4), 2, (0.0, 20.0))
    kinds = {
        (
            len(step.seqs),
            sum(len(tree) == cost.DRAFT_NODES for tree in step.trees),
            sum(p.nodes > 0 and not t for p, t in zip(step.plans, step.trees, strict=True)),
        )
        for step in steps[2:]  # prefill, and what teaches the drafter at first
    }
    assert kinds == set(cost._kinds(4))


def test_rounds_of_a_busy_machine_are_measured_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The passes are as fast as they were: only what comes beside them was slow."""
    monkeypatch.setenv("FORERUN_CACHE", str(tmp_path))

    class Busy(Timed):
        shape, beside = "another fake on a clock", 0.0

        def commit(self, seqs, trees, verdicts):
            self.clock += self.beside
            super().commit(seqs, trees, verdicts)

    def found(beside: float) -> Cost:
        target = Busy(table_law(1))
        target.beside = beside
        target.show(monkeypatch)
        return checked(target)

    assert found(8.0).per_step == 8
    assert found(0.0).per_step == 0, "it was kept too long"
    assert found(8.0).per_step == 0, "a busy minute does not undo it"


def test_a_real_model_is_measured_where_its_cost_is_not_fixed(
    measured_cost: None, tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cost, "START_SECONDS", (0.0, 60.0))
    target = load_target(tiny_folder, dtype="fp32")
    assert target.cost is None
    found = cost_of(target)
    assert found.at(1) > 0 and found.per_step > 0
    assert len([*(tmp_path / "cache" / "costs").iterdir()]) == 3, "passes twice, and rounds"
    assert target.num_held == 0


def test_measuring_keeps_the_prompts_in_the_cache(
    measured_cost: None, tiny_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cost, "START_SECONDS", (0.0, 0.01))
    model = forerun.load(tiny_folder, dtype="fp32", max_seqs=cost.MEASURED_SEQS)
    prompt = list(range(3, 40))
    model.generate([prompt], max_new_tokens=2)
    assert (between := model.target.between_steps) is not None
    monkeypatch.setattr(cost, "BETWEEN_SHARE", 1e9)
    before = model.target.num_rows
    for _ in range(10):
        between()
    assert model.target.num_rows == before, "it was measured in this cache"
    model.generate([prompt], max_new_tokens=1, drafter="none")
    assert model.target.num_rows - before < len(prompt)


def test_elsewhere_in_these_tests_a_model_has_a_fixed_cost(tiny_folder: Path) -> None:
    assert cost_of(load_target(tiny_folder, dtype="fp32")) == Cost((1, 65), (0.01, 0.02))


@pytest.mark.parametrize(("is_cuda", "seconds"), [(False, 2.0), (True, 5.0)])
def test_a_pass_on_a_gpu_goes_on_while_it_is_verified(is_cuda: bool, seconds: float) -> None:
    rows = SimpleNamespace(logits=SimpleNamespace(is_cuda=is_cuda))
    times = {"draft": 1.0, "forward": 2.0, "verify": 3.0}
    step = Step([], [], [], [SimpleNamespace(rows=rows)], [], [], times)
    assert cost._pass_time(step) == seconds
