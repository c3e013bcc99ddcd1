"""Drafters learn from a step while the device computes the next pass."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import forerun
from forerun import registry
from forerun.api import Model
from forerun.assets import embedded
from forerun.constraints.json_schema import JsonSchema
from forerun.controllers.fixed import Fixed
from forerun.core.dice import SeededDice
from forerun.core.records import Rows, Sequence, Step
from forerun.core.sampling import Sampling
from forerun.engine.cost import step as cost
from forerun.engine.engine import Engine
from forerun.engine.safe_drafter import SafeDrafter
from forerun.models.load import load_target
from forerun.runner.model_runner import ModelRunner

DRAFT = embedded("draft")


class Device(ModelRunner):
    """A runner with rows that are valid only after `collect`, like those of a GPU."""

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
    """Texts of four sequences of one group, two at a time; and the drafter."""
    guarded = SafeDrafter(registry.make("drafter", drafter))
    own: Any = guarded.drafter
    observe = own.observe
    own.observe = lambda step: log.append("learn") or observe(step)
    read = own.read
    own.read = lambda seqs: log.append("read") or read(seqs)
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
    found = load_target(DRAFT, dtype="fp32", device="cpu", context=200)
    assert isinstance(found, ModelRunner)
    return found


def test_stand_learns_late_what_it_learns_at_once(reasoner: ModelRunner) -> None:
    plain, _ = run(reasoner, "none", [])
    at_once, early = run(reasoner, "stand", [])
    texts, late = run(Device(reasoner, []), "stand", [])
    assert texts == at_once == plain
    seq = Sequence([5, 6, 7], 3, Sampling(temperature=0.0), SeededDice(9), 1, group=1)
    keys = [np.sort(one.memory(seq).rows().keys) for one in (early, late)]
    assert len(keys[0]) and np.array_equal(*keys)


LATE = {
    "aded": "aded",
    "auto": f"auto:model={DRAFT}",
    "cascade": "cascade:parts=suffix+stand",
    "draft_model": f"draft_model:model={DRAFT}",
    "fuse": "fuse:parts=suffix+stand",
    "online": f"online:model={DRAFT}",
    "prompt_lookup": "prompt_lookup",
    "rasd": "rasd:drafter=stand,retrievers=prompt_lookup",
    "router": "router",
    "sam": "sam",
    "stand": "stand",
    "suffix": "suffix",
}
AT_ONCE = {"lookahead", "token_recycling"}  # they read rows on the device
LEARNS_TOKENS = {"cross_vocab"}  # at once, and reads no rows
# infini and rest copy from an index on disk, forced from the request's constraint
NOTHING_TO_LEARN = {"none", "infini", "rest", "forced"}


def test_every_drafter_is_covered() -> None:
    known = LATE.keys() | AT_ONCE | LEARNS_TOKENS | NOTHING_TO_LEARN
    assert set(registry.names("drafter")) == known


@pytest.mark.parametrize("name", LATE)
def test_only_drafts_wait_between_two_passes(name: str, reasoner: ModelRunner) -> None:
    """Learning and reading happen while the device computes, except at the end of a text."""
    log: list[str] = []
    texts, _ = run(Device(reasoner, log), LATE[name], log)
    assert texts == run(reasoner, "none", [])[0]
    passes = [part.split() for part in " ".join(log).split("launch")]
    (before, *inside), between = passes, set()
    assert not before and inside[0][:2] == ["read", "collect"], "a prompt is read in its pass"
    for part in inside[1:-1]:
        at = part.index("collect")
        assert part[:at] in (["learn", "read"], ["read"])
        between |= {tuple(part[at + 1 :])}
    assert between == {(), ("learn",)}
    ends = sum("learn" in part[part.index("collect") :] for part in inside)
    assert ends <= 4, "a pending step is learned early only where one of the four texts ends"


@pytest.mark.parametrize("drafter", sorted(AT_ONCE))
def test_a_drafter_that_reads_rows_observes_before_the_next_pass(
    drafter: str, reasoner: ModelRunner
) -> None:
    log: list[str] = []
    texts, _ = run(Device(reasoner, log), drafter, log)
    assert texts == run(reasoner, "none", [])[0]
    assert "launch learn" not in " ".join(log) and "collect learn" in " ".join(log)


def test_forced_drafts_read_no_rows(reasoner: ModelRunner) -> None:
    """They come from the grammar, so that they do not wait for the device."""
    model = forerun.load(DRAFT, dtype="fp32", device="cpu", context=200)
    schema = {
        "type": "object",
        "properties": {"colour": {"enum": ["red", "dark green"]}},
        "required": ["colour"],
        "additionalProperties": False,
    }
    own = {"constraint": JsonSchema(schema, whitespace=False), "temperature": 0.0}
    [plain] = model.generate(["A colour: "], drafter="none", **own)
    log: list[str] = []
    late = Model(Device(reasoner, log), model.tokenizer)
    [drafted] = late.generate(["A colour: "], drafter="forced", controller="fixed", **own)
    assert drafted.samples[0].valid and drafted.text == plain.text
    assert drafted.stats.accepted > 3 and drafted.stats.passes < plain.stats.passes
    assert log.count("launch") == log.count("collect") == drafted.stats.passes


def test_a_measured_round_is_learned_within_it(reasoner: ModelRunner) -> None:
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
