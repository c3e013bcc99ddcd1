"""Profiles: exclusive times, calibration, parts put back as they were."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tiny import make_tiny

import forerun
from forerun.bench import cpu_load, timers
from forerun.bench.local_runner import Parts
from forerun.bench.profile import profile
from forerun.bench.step_breakdown import (
    COUNTING,
    MAX_SHARE,
    NATIVE,
    PYTHON,
    REST,
    TimedRuns,
    UntimedRuns,
    breakdown,
)
from forerun.bench.timers import Clock, Patches
from forerun.core import logits
from forerun.core.sampling import Sampling
from forerun.engine import stats
from forerun.models import layers
from forerun.models.layers import GatedMLP, Linear, RMSNorm
from forerun.runner.attention import Pass
from forerun.runner.native import kernels

pytestmark = pytest.mark.usefixtures("short_collections")

PROMPT = "the cat sat on the mat and"
BARE = UntimedRuns(seconds=8.0, forward=6.0)


class Time:
    """A clock that goes on when it is told to."""

    def __init__(self) -> None:
        self.now = 0.0

    def perf_counter(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


@pytest.fixture
def fake_time(monkeypatch: pytest.MonkeyPatch) -> Time:
    fake = Time()
    monkeypatch.setattr(timers, "time", fake)
    return fake


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny(tmp_path_factory.mktemp("profile") / "tiny")


@pytest.fixture
def model(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Runs in torch, part by part."""
    monkeypatch.setattr(layers, "can_pack", lambda weight: False)
    return forerun.load(tiny, dtype="fp32")


def test_seconds_belong_to_the_innermost_timer(fake_time: Time) -> None:
    clock = Clock()
    inner = clock.wrap("inner", lambda: fake_time.sleep(2.0))

    def work() -> None:
        fake_time.sleep(1.0)
        inner()
        fake_time.sleep(0.5)
        inner()

    clock.wrap("outer", work)()
    assert clock.seconds == {"inner": 4.0, "outer": 1.5}
    assert clock.calls == {"inner": 2, "outer": 1} and clock.inner_calls == {"outer": 2}
    cost = 0.5, 0.25  # per call: to its own name, and to the one around it
    assert clock.corrected(cost) == {"inner": 3.0, "outer": 0.5}
    assert clock.overhead(cost) == 3 * 0.5 + 2 * 0.25


def test_patches_are_undone_where_attributes_were_and_were_not() -> None:
    class Thing:
        __slots__ = ()

        def __call__(self) -> str:
            return "called"

    class Owner:
        def work(self) -> str:
            return "worked"

    thing, other, owner, clock = Thing(), Thing(), Owner(), Clock()
    original = Thing.__call__
    with pytest.raises(KeyError), Patches() as patch:
        patch.calls(Thing, {id(thing): "thing"}, clock)
        patch(owner, "work", "work", clock)
        assert (thing(), other(), owner.work()) == ("called", "called", "worked")
        raise KeyError
    assert Thing.__call__ is original and vars(owner) == {}
    assert clock.calls == {"thing": 1, "work": 1}


@pytest.mark.parametrize("drafter", ["none", "stand", "prompt_lookup"])
def test_a_budget_covers_the_step_and_leaves_no_trace(model: Any, drafter: str) -> None:
    classes = Linear, GatedMLP, RMSNorm, Pass, logits.TargetProbs
    before = [dict(vars(cls)) for cls in classes]
    sampling = Sampling(n=2, temperature=0.7, max_new_tokens=12, seed=0, ignore_eos=True)
    found = profile(model, PROMPT, sampling, Parts(drafter), rounds=2)
    assert [dict(vars(cls)) for cls in classes] == before
    assert not {"forward", "commit"} & vars(model.target).keys()
    assert "propose" not in vars(model.drafter(drafter))
    lines = {line.name: line for line in found.lines}
    assert COUNTING not in lines
    for name in ("draft", "verify", "commit", "logits copy and shaping", PYTHON, REST):
        assert name in lines
    calls = {
        name.removeprefix("forward: "): line.calls
        for name, line in lines.items()
        if name.startswith("forward: ")
    }
    per_pass = {"qkv": 2, "out": 2, "mlp": 2, "attention": 2, "norms": 5, "head": 1}
    assert {name: calls[name] for name in per_pass} == pytest.approx(per_pass)
    assert sum(line.share for line in found.lines) == pytest.approx(1.0)
    total = sum(line.microseconds for line in found.lines)
    assert total == pytest.approx(found.step_microseconds)
    assert found.tokens == 2 * 2 * 12 and 0 < found.timer_share < 1
    assert found.bare_microseconds > 0
    outside = 1 - sum(line.share for line in found.lines if line.name.startswith("forward"))
    assert found.outside_lines == pytest.approx(outside)
    assert found.bare_outside is not None and 0 < found.bare_outside < 1
    assert [name for name, line in lines.items() if line.calls is None] == [PYTHON]


@pytest.mark.skipif(not kernels(), reason="no native kernels here")
def test_native_kernels_are_divided_by_kind(tmp_path: Path) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    folder = make_tiny(tmp_path / "tiny")
    # large enough to be timed
    sizes = {"hidden_size": 512, "intermediate_size": 1024, "num_attention_heads": 8}
    config = LlamaConfig.from_pretrained(folder, num_key_value_heads=4, head_dim=64, **sizes)
    LlamaForCausalLM(config).save_pretrained(folder)
    loaded = forerun.load(folder, dtype="fp32")
    library = kernels().library
    before = library.forerun_pass  # type: ignore[union-attr]
    sampling = Sampling(n=2, temperature=0.7, max_new_tokens=12, seed=0, ignore_eos=True)
    found = profile(loaded, PROMPT, sampling, Parts("stand"), rounds=1)
    assert library.forerun_pass is before  # type: ignore[union-attr]
    kinds = {line.name.removeprefix("forward: ") for line in found.lines if "forward" in line.name}
    told = "took longer than" not in found.notes[0]  # else nothing is known of these
    assert kinds - {"attention, norms, waiting"} == {"qkv", "out", "mlp", "head", "rest"}
    assert ("attention, norms, waiting" in kinds) == told
    assert "measured alone" in found.notes[0]
    assert sum(line.share for line in found.lines) == pytest.approx(1.0)


def test_kernels_are_divided_by_hand() -> None:
    clock = Clock()
    clock.seconds |= {NATIVE: 6.0, REST: 1.0, PYTHON: 1.0}
    run, alone = TimedRuns(steps=2, tokens=2), {"qkv": 1.0, "mlp": 1.5}
    found = breakdown(clock, (0.0, 0.0), run, BARE, alone)
    lines = {line.name: line.microseconds for line in found.lines}
    assert lines == pytest.approx(
        {
            "forward: mlp": 1.5e6,
            "forward: qkv": 1e6,
            "forward: attention, norms, waiting": 0.5e6,
            REST: 0.5e6,
            PYTHON: 0.5e6,
        }
    )
    slow = {"qkv": 2.0, "mlp": 4.0}  # more than the kernels took in all: scaled down
    found = breakdown(clock, (0.0, 0.0), run, BARE, slow)
    lines = {line.name: line.microseconds for line in found.lines}
    assert (lines["forward: qkv"], lines["forward: mlp"]) == pytest.approx((1e6, 2e6))
    assert "forward: attention, norms, waiting" not in lines
    assert "took longer" in found.notes[0]


@pytest.mark.parametrize("drafter", ["none", "stand"])
def test_with_and_without_timers_the_texts_are_the_same(model: Any, drafter: str) -> None:
    run, steps = model.run, []

    def watched(prompts: Any, sampling: Sampling, **options: Any) -> Any:
        steps.append([])
        given = options.pop("on_step")

        def hear(step: Any) -> None:
            steps[-1].append([list(tokens) for tokens in step.emitted])
            if given is not None:
                given(step)

        return run(prompts, sampling, **options, on_step=hear)

    model.run = watched
    sampling = Sampling(n=2, temperature=0.7, max_new_tokens=12, seed=0)
    profile(model, PROMPT, sampling, Parts(drafter), rounds=2)
    _, bare, timed, other_bare, other_timed = steps
    assert bare == timed and other_bare == other_timed and bare != other_bare


def test_what_takes_much_outside_the_pass_is_flagged() -> None:
    clock = Clock()
    clock.seconds |= {REST: 6.0, "draft": 0.9, "verify": 2.0, PYTHON: 1.1}
    run, bare = TimedRuns(steps=10, tokens=30), UntimedRuns(seconds=9.0, forward=6.3)
    found = breakdown(clock, (0.0, 0.0), run, bare)
    flagged = {line.name for line in found.lines if line.is_flagged}
    assert MAX_SHARE == 0.10 and flagged == {"verify", PYTHON}
    assert [line.name for line in found.lines] == ["draft", REST, "verify", PYTHON]
    assert found.step_microseconds == pytest.approx(1e6)
    assert found.outside_lines == pytest.approx(0.4)
    assert found.bare_microseconds == pytest.approx(9e5)
    assert found.bare_outside == pytest.approx(0.3)
    assert found.outside_share == found.to_dict()["outside_share"] == found.bare_outside
    assert found.notes == ()
    away = breakdown(clock, (0.0, 0.0), TimedRuns(asynchronous=1, steps=10, tokens=30), bare)
    assert away.bare_outside is None and away.outside_share == away.outside_lines


def test_the_share_without_timers_is_that_of_all_but_the_pass(
    model: Any, monkeypatch: pytest.MonkeyPatch, fake_time: Time
) -> None:
    monkeypatch.setattr(stats, "perf_counter", fake_time.perf_counter)
    for where, seconds in ("forward", 1.0), ("commit", 3.0):
        monkeypatch.setattr(model.target, where, slowly(model.target, where, seconds, fake_time))
    sampling = Sampling(temperature=0.0, max_new_tokens=12, ignore_eos=True)
    found = profile(model, PROMPT, sampling, Parts("none"), rounds=2)
    assert found.bare_outside == pytest.approx(0.75) and found.steps == 24
    assert found.bare_microseconds == pytest.approx(4e6)
    assert found.outside_lines == pytest.approx(0.75)


def slowly(owner: Any, name: str, seconds: float, clock: Time) -> Any:
    work = getattr(owner, name)

    def slow(*args: Any) -> Any:
        clock.sleep(seconds)
        return work(*args)

    return slow


def test_steps_that_took_much_longer_with_timers_are_remarked() -> None:
    clock = Clock()
    clock.seconds |= {REST: 6.0, PYTHON: 1.0}

    def said(seconds: float) -> tuple[str, ...]:
        bare = UntimedRuns(seconds=10 * seconds)
        return breakdown(clock, (0.0, 0.0), TimedRuns(steps=10, tokens=30), bare).notes

    assert said(0.7) == said(0.65) == ()
    (more,), (less,) = said(0.5), said(1.0)
    assert more.startswith("steps with timers took 40% more time than those without")
    assert less.startswith("steps with timers took 30% less time")


def test_a_machine_that_was_not_quiet_is_remarked(
    model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    sampling, parts = Sampling(temperature=0.0, max_new_tokens=8), Parts("none")
    for lost, said in ((None, []), (0.05, []), (0.4, ["40%"])):
        monkeypatch.setattr(cpu_load.CoreLossMeter, "lost", lambda self, lost=lost: lost)
        notes = profile(model, PROMPT, sampling, parts, rounds=1).notes
        found = [note for note in notes if note.startswith("busy machine: ")]
        assert [note.split()[2] for note in found] == said


def test_models_that_transformers_runs_have_one_line_for_the_pass(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    from forerun.api import Model
    from forerun.models.hf import HFTarget
    from forerun.models.tokenizer import Tokenizer

    folder = make_tiny(tmp_path / "tiny")
    inner = AutoModelForCausalLM.from_pretrained(folder)
    loaded = Model(HFTarget(inner, max_seqs=1), Tokenizer.load(folder), "tiny")
    sampling = Sampling(max_new_tokens=6, seed=0, ignore_eos=True)
    found = profile(loaded, PROMPT, sampling, Parts("none"), rounds=1)
    assert [line.name for line in found.lines if line.name.startswith("forward")] == [REST]
