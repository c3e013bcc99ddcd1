"""Comparing two runs: what is refused, what counts as slower."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from typing import Any

import pytest

from forerun.bench.compare import Run, compare
from forerun.bench.results import Manifest, Record, SampleRecord
from forerun.errors import ConfigError, DataError, UnknownName

PLAN = Manifest(
    "now", "0.1.0", "abc", "", {"hash": "h", "weights_hash": "w", "name": "m"}, "bfloat16", 2, 0,
    {"temperature": 0.6, "n": 4}, ["plain", "stand"], {"code": {"examples": 3, "hash": "p"}},
    machine={"cpu": "one"}, limits={"read_gb_s": 30.0},
)  # fmt: skip


def run(seconds: dict[str, list[float]], **changes: Any) -> Run:
    """A run in which prompt i took a method so many seconds for 10 tokens."""
    records = [
        Record("code", i, str(i), "1", method, 0, 0, 5, spent, 10, [SampleRecord(10)])
        for method, row in seconds.items()
        for i, spent in enumerate(row)
    ]
    return replace(PLAN, methods=list(seconds), **changes), records


BEFORE = run({"plain": [1.0, 1.0, 1.0], "stand": [0.5, 0.5, 0.5]})


def test_the_same_is_not_slower() -> None:
    found = compare(BEFORE, BEFORE)
    assert [(c.method, c.ratio, c.prompts, c.is_slower) for c in found.changes] == [
        ("plain", pytest.approx(1.0), 3, False),
        ("stand", pytest.approx(1.0), 3, False),
    ]
    assert not found.is_slower and found.remarks == ["read limit: 30.0 -> 30.0 GB/s"]


@pytest.mark.parametrize(("loss", "is_slower"), [(0.04, False), (0.06, True)])
def test_the_threshold_decides(loss: float, is_slower: bool) -> None:
    after = run({"plain": [1.0, 1.0, 1.0], "stand": [0.5 / (1 - loss)] * 3})
    found = compare(BEFORE, after)
    assert found.is_slower == is_slower
    assert found.changes[1].ratio == pytest.approx(1 - loss)
    assert not compare(BEFORE, after, max_slowdown=0.07).is_slower


def test_ratios_are_per_prompt_with_an_interval() -> None:
    after = run({"plain": [1.0, 1.0, 1.0], "stand": [0.25, 0.5, 1.0]})
    change = compare(BEFORE, after).changes[1]
    assert change.ratio == pytest.approx(1.0)
    assert change.interval is not None and change.interval[0] < 1 < change.interval[1]


def test_a_ratio_whose_interval_holds_one_shows_no_difference() -> None:
    after = run({"plain": [1.0, 1.0, 1.0], "stand": [0.49, 0.49, 0.75]})
    change = (found := compare(BEFORE, after)).changes[1]
    assert change.ratio < 0.95 and change.interval is not None and change.interval[1] > 1
    assert change.verdict == "no difference shown" and not found.is_slower
    surely = compare(BEFORE, run({"plain": [1.0, 1.0, 1.0], "stand": [0.6, 0.6, 0.62]}))
    assert surely.changes[1].verdict == "slower" and surely.is_slower


def test_one_prompt_has_no_interval_and_shows_nothing() -> None:
    before = run({"plain": [1.0], "stand": [0.5]})
    found = compare(before, run({"plain": [0.9], "stand": [0.6]}))
    assert [c.verdict for c in found.changes] == ["no difference shown"] * 2
    assert not found.is_slower


def test_times_that_a_busy_machine_spoiled_do_not_count() -> None:
    before = run({"plain": [1.0] * 5, "stand": [0.5] * 5})
    manifest, records = run({"plain": [1.0] * 4 + [9.0], "stand": [0.5] * 4 + [9.0]})

    def remarked(slow: range) -> list[str]:
        speeds = [4.0 if r.index in slow else 30.0 for r in records]
        after = [replace(r, limits={"read_gb_s": s}) for r, s in zip(records, speeds, strict=True)]
        found = compare(before, (manifest, after))
        is_same = [change.ratio == pytest.approx(1.0) for change in found.changes]
        assert is_same == [slow == range(4, 5)] * 2
        return found.remarks[1:]

    assert remarked(range(4, 5)) == ["4 disturbed times not counted"]
    assert remarked(range(1, 5)) == [], "less than half would be left"


def test_relative_sees_through_a_busy_machine() -> None:
    after = run({"plain": [2.0, 2.0, 2.0], "stand": [1.0, 1.0, 1.0]})
    assert "plain decoding is slower, too" in compare(BEFORE, after).remarks[-1]
    assert compare(BEFORE, after).is_slower
    found = compare(BEFORE, after, relative=True)
    assert [c.method for c in found.changes] == ["stand"] and not found.is_slower


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"tasks": {"code": {"examples": 4, "hash": "q"}}}, "different prompts in task 'code'"),
        ({"tasks": {"code": {"examples": 3, "hash": "q"}}}, "in task 'code' (3 and 3)"),
        ({"constraint": ["choice:options=a|b"]}, "constraint: [] and"),
        ({"target": "entropy_switch"}, "target: '' and"),
        ({"tasks": {"story": {"examples": 3, "hash": "s"}}}, "share no task: code and story"),
        (
            {"tasks": {**PLAN.tasks, "story": {"hash": "s"}}},
            "different prompts in task 'story' (0 and 0)",
        ),
        ({"model": {"hash": "x", "name": "other"}}, "different models: 'm' and 'other'"),
        ({"model": {**PLAN.model, "weights_hash": "x"}}, "different models"),
        ({"dtype": "float32"}, "dtype: 'bfloat16' and 'float32'"),
        ({"threads": 1}, "threads: 2 and 1"),
        ({"sampling": {"temperature": 1.0, "n": 4}}, "temperature: 0.6 and 1.0"),
    ],
)
def test_runs_that_did_something_else_are_refused(changes: dict[str, Any], said: str) -> None:
    after = run({"plain": [1.0], "stand": [1.0]}, **changes)
    with pytest.raises(DataError) as caught:
        compare(BEFORE, after)
    assert said in str(caught.value)


def test_the_same_prompts_of_a_file_that_moved_are_compared() -> None:
    def moved(found: Run, *names: str) -> Run:
        tasks = {name: {"examples": 3, "hash": "p" + name[-1]} for name in names}
        records = [replace(r, task=name) for name in names for r in found[1]]
        return replace(found[0], tasks=tasks), records

    before = moved(BEFORE, "file:a1", "file:a2")
    assert compare(before, moved(BEFORE, "file:b2", "file:b1")).changes[0].prompts == 6
    found = compare(before, moved(BEFORE, "file:a2", "file:b1"))
    assert found.changes[0].prompts == 6
    assert found.remarks[0] == "file:b1 of the second run has the prompts of file:a1"
    said = r"different prompts in task 'file:a2' \(3 and 0\)"
    with pytest.raises(DataError, match=said):
        compare(before, moved(BEFORE, "file:b1", "file:b3"))
    twice = moved(BEFORE, "file:a1", "file:c1"), moved(BEFORE, "file:b1", "file:d1")
    assert compare(*twice).changes[0].prompts == 6


def test_what_may_explain_a_change_is_said() -> None:
    more = {"machine": {"cpu": "two"}, "limits": {"read_gb_s": 15.0}}
    found = compare(BEFORE, run({"plain": [1.0]}, git="def", turns=12, **more))
    assert found.remarks == [
        "git: abc -> def",
        "turns: 0 -> 12",
        "cpu: one -> two",
        "read limit: 30.0 -> 15.0 GB/s",
    ]
    assert [change.method for change in found.changes] == ["plain"]


def test_a_method_without_common_prompts_is_remarked() -> None:
    manifest, records = run({"plain": [1.0], "stand": [1.0]})
    failed = [replace(r, error="broke") if r.method == "stand" else r for r in records]
    found = compare((manifest, failed), BEFORE)
    assert "stand: no prompt has an undisturbed time in both runs" in found.remarks
    with pytest.raises(DataError, match="the first run has no records"):
        compare((manifest, []), BEFORE)
    nothing = compare(BEFORE, (BEFORE[0], []))
    assert nothing.losses == [
        "the second run is incomplete: 0 of 6 planned measurements exist; missing: plain 3, stand 3"
    ]
    with pytest.raises(DataError, match="share no method"):
        compare(run({"vllm": [1.0]}), BEFORE)
    with pytest.raises(ConfigError, match="--max-slowdown"):
        compare(BEFORE, BEFORE, max_slowdown=1.5)


def test_a_method_of_one_run_only_is_named() -> None:
    more = run({"plain": [1.0] * 3, "stand": [0.5] * 3, "suffix": [0.5] * 3, "auto": [0.5] * 3})
    found = compare(BEFORE, more)
    assert "only in the second run, not compared: suffix, auto" in found.remarks
    assert found.losses == [] and not found.is_worse
    assert not [line for line in compare(more, more).remarks if "not compared" in line]
    lost = compare(more, BEFORE)
    gone = ["suffix is not in the second run", "auto is not in the second run"]
    assert lost.losses == gone and lost.is_worse and not lost.is_slower
    assert lost.to_dict()["losses"] == gone and lost.to_dict()["worse"] is True


def test_a_method_that_was_dropped_on_purpose_is_no_loss() -> None:
    more = run({"plain": [1.0] * 3, "stand": [0.5] * 3, "suffix": [0.5] * 3})
    assert compare(more, BEFORE).losses == ["suffix is not in the second run"]
    found = compare(more, BEFORE, only=["plain", "stand"])
    assert [change.method for change in found.changes] == ["plain", "stand"]
    assert found.losses == [] == [line for line in found.remarks if "suffix" in line]
    assert not [line for line in compare(BEFORE, more, only=["stand"]).remarks if "only in" in line]
    part = more[0], more[1][:7]
    assert compare(more, part, only=["plain", "stand"]).losses == []
    gone = compare(more, BEFORE, only=["stand", "suffix"])
    assert gone.losses == ["suffix is not in the second run"]
    with pytest.raises(UnknownName, match="unknown method of the first run 'stnad'; did you mean"):
        compare(more, BEFORE, only=["stnad"])


def test_one_method_is_compared_relative_to_plain_decoding() -> None:
    after = run({"plain": [2.0, 2.0, 2.0], "stand": [1.0, 1.0, 1.0]})
    found = compare(BEFORE, after, relative=True, only=["stand"])
    assert [(c.method, c.ratio) for c in found.changes] == [("stand", pytest.approx(1.0))]
    with pytest.raises(DataError, match="share no method other than plain"):
        compare(BEFORE, after, relative=True, only=["plain"])
    with pytest.raises(DataError, match="share no method: stand and ; run both"):
        compare(BEFORE, run({"plain": [1.0]}), only=["stand"])


def failing(found: Run, method: str, *prompts: int) -> Run:
    """The same run, a method having failed on some prompts."""
    manifest, records = found
    broke = {"error": "Traceback\nno memory left", "samples": [], "generated": 0}
    hit = [r.method == method and r.index in prompts for r in records]
    return manifest, [replace(r, **broke) if h else r for r, h in zip(records, hit, strict=True)]


def test_a_method_that_fails_where_it_did_not_is_a_loss() -> None:
    half, whole = failing(BEFORE, "stand", 1), failing(BEFORE, "stand", 0, 1, 2)
    said = "stand newly fails on {} of 3 measurements: no memory left"
    assert compare(BEFORE, half).losses == [said.format(1)]
    assert compare(BEFORE, whole).losses == [said.format(3)]
    assert compare(half, whole).losses == [said.format(2)]
    for same in (half, whole):
        assert compare(same, same).losses == [] == compare(same, BEFORE).losses
    alone = run({"stand": [0.5] * 3})
    nothing = compare(alone, failing(alone, "stand", 0, 1, 2))
    assert nothing.changes == [] and nothing.losses == [said.format(3)]


def test_a_failure_where_the_first_run_has_no_record_is_remarked() -> None:
    """It may have failed there, too."""
    part = BEFORE[0], [r for r in BEFORE[1] if r.method == "plain" or r.index != 1]
    found = compare(part, failing(BEFORE, "stand", 1))
    said = "stand fails on 1 measurement missing in the first run: no memory left"
    assert found.losses == [] and said in found.remarks
    both = compare(part, failing(BEFORE, "stand", 0, 1))
    assert both.losses == ["stand newly fails on 1 of 3 measurements: no memory left"]
    assert said in both.remarks and said not in compare(BEFORE, failing(BEFORE, "stand", 1)).remarks


def test_comparing_needs_no_torch() -> None:
    code = (
        "import sys, forerun.bench.compare, forerun.bench.report_summary, forerun.cli.bench_show\n"
        "print([m for m in ('torch', 'transformers', 'numba') if m in sys.modules])"
    )
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    words = [sys.executable, "-c", code]
    done = subprocess.run(words, capture_output=True, text=True, env=environment)
    assert done.stdout == "[]\n", done.stderr


def test_an_incomplete_second_run_is_a_loss() -> None:
    part = BEFORE[0], BEFORE[1][:4]
    lacking = "run is incomplete: 4 of 6 planned measurements exist; missing: stand 2"
    found = compare(BEFORE, part)
    assert found.losses == [f"the second {lacking}"] and found.is_worse
    back = compare(part, BEFORE)
    assert f"the first {lacking}" in back.remarks and not back.is_worse


def test_a_peer_that_was_left_out_of_the_second_run_is_a_loss() -> None:
    before = run({"plain": [1.0] * 3, "vllm": [0.5] * 3}, peers={"vllm": {"vllm": "1"}})
    gone = replace(before[0], peers={"vllm": "no environment\nKilled"})
    after = gone, [r for r in before[1] if r.method == "plain"]
    assert compare(before, after).losses == ["vllm was left out of the second run: Killed"]
    assert compare(after, after).losses == []


@pytest.mark.parametrize("which", ["first", "second"])
def test_relative_needs_plain_decoding_in_both_runs(which: str) -> None:
    without = run({"stand": [0.5] * 3})
    runs = (without, BEFORE) if which == "first" else (BEFORE, without)
    with pytest.raises(DataError, match=f"the {which} run has no records of plain decoding"):
        compare(*runs, relative=True)
    assert [change.method for change in compare(*runs).changes] == ["stand"]
