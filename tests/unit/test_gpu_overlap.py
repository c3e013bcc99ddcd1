"""What a step teaches is learned while a device computes the next pass."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from forerun import registry
from forerun.controllers.fixed import Fixed
from forerun.core.dice import SeededDice
from forerun.core.records import Rows, Sequence, Step
from forerun.core.sampling import Sampling
from forerun.engine.cost import step as cost
from forerun.engine.engine import Engine
from forerun.engine.safe_drafter import SafeDrafter
from forerun.models.load import load_target
from forerun.runner.model_runner import ModelRunner


class Device(ModelRunner):
    """A runner whose rows are there when they are collected, as those of a GPU are."""

    def __init__(self, inner: ModelRunner, log: list[str]) -> None:
        super().__init__(inner.model, max_seqs=8, context=200)
        self.is_async, self.log = True, log
        self.pending: list[tuple[np.ndarray, np.ndarray]] = []

    def launch(self, *given: Any) -> list[Rows]:
        self.log.append("launch")
        found = super().launch(*given)
        arrays = [rows.logits.numpy() for rows in found]
        self.pending = [(values, values.copy()) for values in arrays]
        for values in arrays:
            values[:] = np.nan  # not there yet
        return found

    def collect(self) -> None:
        if not self._is_launched and self.log[-1:] != ["collect"]:
            self.log.append("collect")
        for values, true in self.pending:
            values[:] = true
        self.pending.clear()


def run(target: ModelRunner, drafter: str, log: list[str]) -> tuple[list[list[int]], Any]:
    """Texts of four sequences, two after two, of one group; and what drafted."""
    guarded = SafeDrafter(registry.make("drafter", drafter))
    own: Any = guarded.drafter
    observe = own.observe
    own.observe = lambda step: log.append("learn") or observe(step)
    engine = Engine(
        target, guarded, registry.make("verifier", "speculative"), Fixed(nodes=6, depth=4),
        max_seqs=2,
    )  # fmt: skip
    for part in (engine.target, engine.verifier):
        part.warm_up()
    seqs = []
    for i in range(4):
        sampling = Sampling(temperature=0.0)
        seqs.append(Sequence([5, 6, 7], 3, sampling, SeededDice(i), 20 + 5 * i, group=1, index=i))
        engine.submit(seqs[-1])
    engine.run()
    return [seq.tokens for seq in seqs], own


@pytest.fixture
def reasoner() -> ModelRunner:
    found = load_target(registry_path(), dtype="fp32", device="cpu", context=200)
    assert isinstance(found, ModelRunner)
    return found


def registry_path() -> str:
    from forerun.assets import embedded

    return embedded("draft")


def test_stand_learns_between_launch_and_collect(reasoner: ModelRunner) -> None:
    """All that it would have learned; texts are those of plain decoding."""
    log: list[str] = []
    plain, _ = run(reasoner, "none", [])
    at_once, early = run(reasoner, "stand", [])
    texts, late = run(Device(reasoner, log), "stand", log)
    assert texts == at_once == plain

    inside = " ".join(log).split("collect")
    assert inside[0].split() == ["launch"]  # nothing is known yet
    between = [part.split() for part in inside[1:-1]]
    assert between.count(["launch", "learn"]) > len(between) / 2, log
    ended = [part for part in between if part[:1] == ["learn"]]  # a text ended: all is learned
    assert len(ended) == 3 and log[-1] == "learn"
    seq = Sequence([5, 6, 7], 3, Sampling(temperature=0.0), SeededDice(9), 1, group=1)
    keys = [np.sort(one.memory(seq).rows().keys) for one in (early, late)]
    assert len(keys[0]) and np.array_equal(*keys)


@pytest.mark.parametrize("drafter", ["token_recycling", "lookahead"])
def test_a_drafter_that_reads_rows_observes_before_the_next_pass(
    drafter: str, reasoner: ModelRunner
) -> None:
    log: list[str] = []
    texts, _ = run(Device(reasoner, log), drafter, log)
    assert texts == run(reasoner, "none", [])[0]
    assert "launch learn" not in " ".join(log) and "collect learn" in " ".join(log)


@pytest.mark.parametrize("drafter", ["auto:model=none", "fuse:parts=suffix+stand", "router"])
def test_composites_observe_late_if_all_parts_can(drafter: str, reasoner: ModelRunner) -> None:
    log: list[str] = []
    texts, _ = run(Device(reasoner, log), drafter, log)
    assert texts == run(reasoner, "none", [])[0]
    assert "launch learn collect" in " ".join(log)


def test_what_a_measured_round_teaches_is_learned_in_it(reasoner: ModelRunner) -> None:
    """Rounds shorten their texts, so a pending step would be learned from another text."""
    log: list[str] = []
    device, kinds = Device(reasoner, log), cost._kinds(4)
    starts: list[bool] = []

    class Watched(SafeDrafter):
        def _show(self, step: Step) -> None:
            starts.append(all(step.start(i) < len(seq.tokens) for i, seq in enumerate(step.seqs)))
            super()._show(step)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(cost, "SafeDrafter", Watched)
        seconds = cost._rounds(device, 4, kinds, 2, (0.0, 20.0))
    assert starts and all(starts) and all(second > 0 for second in seconds)
