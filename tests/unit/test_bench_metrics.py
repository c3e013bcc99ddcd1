"""Metrics on numbers that were worked out by hand."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
import scipy.stats

from forerun.bench import metrics
from forerun.bench.disturbance import undisturbed
from forerun.bench.metrics import Totals, by_trajectory, paired_speed_up, speed_up, totals
from forerun.bench.results import Record, SampleRecord
from forerun.bench.roofline import decode_passes
from forerun.engine.stats import Stats

A = SampleRecord(
    10, 4, 12, 6, 8, [3, 2, 1], {"draft": 0.1, "forward": 0.7, "verify": 0.1, "other": 0.1}
)
B = SampleRecord(5, 2, 4, 3, 3, [2, 1], {"draft": 0.2, "forward": 0.3, "verify": 0.0, "other": 0.1})
SILENT = SampleRecord(8)


def record(method: str, index: int = 0, **changes: object) -> Record:
    """15 tokens in 2 seconds, of which a half computed the prompt."""
    made = Record(
        "code", index, f"c{index}", "1", method, 0, 0, 9, 2.0, 15, [A, B], prefill_seconds=0.5
    )
    return replace(made, **changes)


def test_totals_by_hand() -> None:
    found = totals([A, B])
    counts = found.generated, found.passes, found.drafted, found.accepted, found.examined
    assert counts == (15, 6, 16, 9, 11)
    assert found.accepted_at == Counter({1: 5, 2: 3, 3: 1})
    assert found.tau == 15 / 6
    assert found.acceptance_rate == 9 / 16
    assert found.examined_rate == 9 / 11
    assert found.per_position == [5 / 6, 3 / 6, 1 / 6]
    assert found.predicted_tau == 1 + 9 / 6 == found.tau


def test_a_text_that_ends_within_its_last_pass_lowers_tau_below_the_prediction() -> None:
    found = totals([replace(A, tokens=9)])
    assert found.tau == 9 / 4 and found.predicted_tau == 10 / 4


def test_definitions_agree_with_those_of_the_engine() -> None:
    engine = Stats(4, 12, 6, 8, 10, Counter({1: 3, 2: 2, 3: 1}))
    found = totals([A])
    assert (found.tau, found.acceptance_rate) == (engine.tau, engine.acceptance_rate)
    assert (found.examined_rate, found.per_position) == (engine.examined_rate, engine.per_position)


def test_what_a_contestant_does_not_tell_is_unknown() -> None:
    found = totals([A, SILENT])
    assert found.generated == 18
    assert (found.passes, found.tau, found.acceptance_rate) == (None, None, None)
    assert found.per_position == [] and found.predicted_tau is None
    nothing = totals([])
    assert nothing == Totals() and nothing.tau is None


def test_plain_decoding_drafts_nothing() -> None:
    found = totals([SampleRecord(5, 5, 0, 0, 0)])
    assert (found.tau, found.acceptance_rate, found.predicted_tau) == (1.0, None, 1.0)


def test_trajectories_are_grouped() -> None:
    samples = [SampleRecord(i, 1, 0, 0, 0) for i in range(1, 19)]
    groups = by_trajectory([record("stand", samples=samples), record("stand", error="x")])
    sizes = {name: (found.passes, found.generated) for name, found in groups.items()}
    assert sizes == {
        "1": (1, 1),
        "2": (1, 2),
        "3-4": (2, 7),
        "5-8": (4, 26),
        "9-16": (8, 100),
        "17-32": (2, 35),
    }
    assert metrics.group_of(65) == "65+"


def test_time_is_split_and_what_nobody_claims_is_outside() -> None:
    split = metrics.time_split([record("stand"), record("stand", 1, samples=[SILENT])])
    expected = {"draft": 0.3, "forward": 1.0, "verify": 0.1, "other": 0.2, "outside": 0.4}
    assert split == pytest.approx(expected)
    assert metrics.time_split([record("stand", samples=[SILENT])]) == {}


def test_tokens_per_second() -> None:
    found = [record("stand"), record("stand", 1, seconds=3.0), record("stand", 2, error="broke")]
    assert metrics.tokens_per_second(found) == 30 / 5
    assert metrics.tokens_per_second(found, prefill=False) == 30 / 4
    found.append(record("stand", 3, prefill_seconds=None))
    assert metrics.tokens_per_second(found, prefill=False) is None
    assert metrics.tokens_per_second([]) is None


def test_answers_of_one_token_have_no_speed_without_prefill() -> None:
    """Nothing but the pass over the prompt: what is left of the seconds is no decoding."""
    one = SampleRecord(1, 1, 0, 0, 0)
    mine = [record(m, i, generated=1, samples=[one]) for m in ("plain", "stand") for i in range(2)]
    assert metrics.tokens_per_second(mine, prefill=False) is None
    assert metrics.tokens_per_second(mine) == 0.5
    assert speed_up(mine, "stand", prefill=False) is None
    both = [*mine[:2], record("plain", 2)]
    assert metrics.tokens_per_second(both, prefill=False) == 17 / (6 - 3 * 0.5)
    two = [record(m, 2) for m in ("plain", "stand")]
    found = speed_up([*mine, *two], "stand", prefill=False)
    assert found and [*found.by_prompt] == [("code", 2)]


def test_speed_up_is_the_geometric_mean_per_prompt() -> None:
    plain = [record("plain", i, seconds=4.0, prefill_seconds=1.0) for i in range(3)]
    fast = [record("stand", 0, seconds=2.0), record("stand", 1, seconds=0.5, prefill_seconds=0.2)]
    found = speed_up([*plain, *fast, record("stand", 2, error="broke")], "stand")
    assert found is not None
    assert found.by_prompt == {("code", 0): 2.0, ("code", 1): 8.0}
    assert found.ratio == pytest.approx(4.0) and found.prompts == 2
    bare = speed_up([*plain, *fast], "stand", prefill=False)
    assert bare is not None and bare.ratio == pytest.approx(math.sqrt(3.0 / 1.5 * 3.0 / 0.3))
    assert speed_up(plain, "stand") is None


def test_rounds_are_pooled_before_the_ratio_and_must_be_of_both() -> None:
    plain = [record("plain", round=r, seconds=s) for r, s in enumerate((1.0, 3.0, 100.0))]
    fast = [record("stand", round=r, seconds=s) for r, s in enumerate((1.0, 1.0))]
    found = paired_speed_up(fast, plain)
    assert found is not None and found.by_prompt == {("code", 0): 2.0}
    assert found.interval is None


def test_intervals_of_a_constant_of_one_value_and_of_many() -> None:
    for count in (2, 9, 10, 50):
        assert metrics.interval([2.0] * count) == pytest.approx((2.0, 2.0))
    assert metrics.interval([1.0]) is None and metrics.interval([]) is None
    logs = np.arange(100) / 50
    low, high = metrics.interval([*np.exp(logs)]) or (0.0, 0.0)
    error = 1.96 * logs.std(ddof=1) / 10
    assert np.log([low, high]) == pytest.approx(
        [logs.mean() - error, logs.mean() + error], abs=0.01
    )


def test_intervals_of_few_values_are_those_of_student() -> None:
    rng = np.random.default_rng(3)
    for count in range(2, metrics.MIN_BOOTSTRAP_VALUES):
        logs = rng.normal(0.1, 0.2, count)
        t = scipy.stats.t.interval(0.95, count - 1, logs.mean(), scipy.stats.sem(logs))
        assert np.log(metrics.interval([*np.exp(logs)]) or ()) == pytest.approx(t, rel=1e-4)


@pytest.mark.parametrize("count", [2, 3, 5, 9, 10, 20])
def test_intervals_hold_the_truth_as_often_as_they_say(count: int) -> None:
    """A bootstrap would hold it in 48 % of the cases with two values, in 79 with four."""
    rng = np.random.default_rng(count)
    ends = [metrics.interval([*np.exp(rng.normal(0.0, 0.1, count))]) or () for _ in range(400)]
    held = np.mean([low <= 1 <= high for low, high in ends])
    assert (0.92 if count < metrics.MIN_BOOTSTRAP_VALUES else 0.88) < held < 0.98


def test_scores_and_memory() -> None:
    found = [record("stand", score=0.5), record("stand", 1, score=1.0), record("stand", 2)]
    assert metrics.mean_score(found) == 0.75
    assert metrics.mean_score(found, "majority") is None
    held = [
        record("stand", memory={"cells": 3, "weights": 5}),
        record("stand", memory={"cells": 4}),
    ]
    assert metrics.peak_memory(held) == {"cells": 4, "weights": 5}


def test_quiet_is_what_the_rest_of_the_run_was() -> None:
    """Reading counts for its two neighbours, cores for the record; always busy is none left out."""

    def kept(**measured: list[float]) -> list[int]:
        columns = [
            dict(zip(measured, row, strict=True)) for row in zip(*measured.values(), strict=True)
        ]
        made = [
            Record("t", i, "", "", "m", 0, i, 5, 1.0, 9, limits=c) for i, c in enumerate(columns)
        ]
        return [record.index for record in undisturbed(made)]

    assert kept(read_gb_s=[30.0, 29, 12, 30, 31]) == [0, 3, 4]
    assert kept(read_gb_s=[30.0] * 5, taken=[0.0, 0.02, 0.5, 0.05, 0.12]) == [0, 1, 3]
    assert kept(taken=[0.5, 0.52, 0.48, 0.5, 0.9]) == [0, 1, 2, 3]
    unknown = [replace(record("m", i), limits={"read_gb_s": 30.0}) for i in range(3)]
    told = [replace(record("m", i), limits={"taken": 0.5}) for i in range(3, 6)]
    assert undisturbed([*unknown, *told]) == [*unknown, *told], "what is unknown is no quiet"
    assert kept(read_gb_s=[]) == []
    short = [replace(record("m", i), limits={"read_gb_s": 30.0}) for i in range(20)]
    long = replace(record("m", 20), limits={"read_gb_s": 30.0, "taken": 0.8})
    assert undisturbed([*short, long]) == short, "one that tells is not the measure of itself"

    many = [Record("a", i, "", "", "m", 0, i, 5, 1.0, 9, limits={"taken": 0.0}) for i in range(4)]
    few = [replace(r, task="b", limits={"taken": 0.5}) for r in many]
    assert undisturbed([*many, *few]) == [*many, *few], "no task loses all that it has"
    spoiled = [*many[1:], replace(many[0], limits={"taken": 0.5})]
    assert undisturbed([*spoiled, *few]) == [*spoiled[:3], *few]

    assert kept(read_gb_s=[30.0, 12, 12, 12, 30, 31]) == [0, 1, 2, 3, 4, 5], "its usual speed"
    turns = [2.0, 2, 2, 2, 1]
    assert kept(read_gb_s=[30.0, 12, 30, 30, 12], in_turns=turns) == [0, 1, 2, 3], "both were slow"


def test_answers_that_the_limit_cut() -> None:
    ends = [("length", 0.0), ("length", 0.5), ("length", 1.0), ("stop", 0.0), ("length", None)]
    samples = [replace(A, finish=finish, score=score) for finish, score in ends]
    found = [record("stand", samples=samples), record("stand", 1, samples=samples, error="x")]
    assert metrics.truncated(found) == (2, 4)
    assert metrics.truncated([]) == (0, 0)


def test_passes_over_prompts_are_taken_off_seconds_and_counts() -> None:
    found = decode_passes([record("plain"), record("plain", 1), record("plain", 2, error="broke")])
    assert found and found.passes == 12 - 2
    assert found.mean_pass == pytest.approx((2 * 1.0 - 2 * 0.5) / 10)
    assert found.mean_step == pytest.approx((2 * 2.0 - 2 * 0.5) / 10)
    assert decode_passes([record("plain", prefill_seconds=None)]) is None
    assert decode_passes([record("plain", prefill_seconds=1.0)]) is None, "all that it took"
    assert decode_passes([]) is None


@pytest.mark.parametrize("tokens", [1, 2, 3, 50])
def test_a_short_answer_has_the_pass_of_a_long_one(tokens: int) -> None:
    """A prompt takes 100 ms, every pass after it 10."""
    times = {"draft": 0.0, "forward": 0.1 + 0.01 * (tokens - 1), "verify": 0.0, "other": 0.0}
    samples = [replace(A, tokens=tokens, passes=tokens, seconds=times)]
    found = decode_passes(record("plain", i, samples=samples, prefill_seconds=0.1) for i in (0, 1))
    assert (found and found.mean_pass) == (pytest.approx(0.01) if tokens > 1 else None)
