"""Reports of a disturbed machine: dropped times, notes, ranks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
from report_page import Page
from sample_run import records

from forerun.bench import metrics
from forerun.bench.disturbance import disturbed, lost_cores, undisturbed
from forerun.bench.results import Record, SampleRecord
from forerun.cli.bench_show import figures


def test_a_restless_machine_and_few_prompts_are_pointed_out(
    report: Callable[..., tuple[Page, str]],
) -> None:
    made = [r for r in records() if r.method in ("plain", "stand")]
    made = [replace(r, limits={"read_gb_s": 10.0 if i == 8 else 30.0}) for i, r in enumerate(made)]
    made[7:9] = [replace(r, seconds=1000 * r.seconds) for r in made[7:9]]
    page, text = report(made, methods=["plain", "stand"])
    assert (
        "> **The machine was busy: memory read at 10.0 to 30.0 GB/s. Of 32 times, 2 were disturbed"
        in text
    )
    quiet = [r for i, r in enumerate(made) if i not in (7, 8)]
    found = metrics.speed_up(quiet, "stand")
    assert found and found.ratio < 4 and f"stand is {found.ratio:.2f}x (" in text
    assert float(page.table("method", "by")["stand"]["speed-up"][1] or 0) < 4
    assert "selected by these figures" not in text


def test_a_row_rests_on_the_same_prompts_throughout(
    report: Callable[..., tuple[Page, str]],
) -> None:
    """Plain decoding of one prompt was disturbed: no figure of speed rests on that prompt."""
    made = [r for r in records() if r.method in ("plain", "stand") and r.task == "code"]
    plain = next(i for i, r in enumerate(made) if r.method == "plain")
    made = [
        replace(
            r,
            seconds=r.seconds * (1000 if r.prompt_key == made[plain].prompt_key else 1),
            limits={"read_gb_s": 30.0, "taken": 1.0 if i == plain else 0.0},
        )
        for i, r in enumerate(made)
    ]
    page, _ = report(made, methods=["plain", "stand"])
    kept = [r for r in made if r.prompt_key != made[plain].prompt_key]
    for method in ("plain", "stand"):
        found = metrics.tokens_per_second([r for r in kept if r.method == method])
        for rate in (
            float(page.table("method", "by")[method]["tokens/s"][1] or 0),
            figures(made, undisturbed(made), method)["tokens_per_second"],
        ):
            assert rate == pytest.approx(found)


def test_noise_does_not_enter_counts_and_accuracies(
    report: Callable[..., tuple[Page, str]],
) -> None:
    """One prompt of stand's was disturbed: its time does not count, what it said does."""
    made = [r for r in records() if r.method in ("plain", "stand") and r.task == "reasoning"]
    bad = next(i for i, r in enumerate(made) if r.method == "stand" and r.index == 2)
    busy = [replace(r, limits={"taken": float(i == bad)}) for i, r in enumerate(made)]
    calm, noisy = figures(made, made, "stand"), figures(busy, undisturbed(busy), "stand")
    for name in ("prompts", "tau", "acceptance_rate", "examined_rate", "score", "majority"):
        assert noisy[name] == calm[name]
    assert noisy["prompts_timed"] == 9 and noisy["speed_up"] != calm["speed_up"]
    row = report(busy, methods=["plain", "stand"])[0].table("method", "by")["stand"]
    assert row["prompts"][0] == "9 of 10" and row["place"][0] == "fastest"
    assert [float(row[name][1] or 0) for name in ("tau", "A/D")] == pytest.approx(
        [calm["tau"], calm["acceptance_rate"]]
    )


def test_slow_memory_everywhere_does_not_bring_back_lost_cores(
    report: Callable[..., tuple[Page, str]],
) -> None:
    made = [r for r in records() if r.method in ("plain", "stand") and r.task == "reasoning"]
    made = [
        replace(r, limits={"read_gb_s": 30.0 if i % 3 else 10.0, "taken": 0.6 * (i in (4, 5))})
        for i, r in enumerate(made)
    ]
    assert undisturbed(made) == [r for i, r in enumerate(made) if i not in (4, 5)]
    _, text = report(made, methods=["plain", "stand"])
    slow = sum(disturbed(made)) - 2
    assert f"Of 20 times, 2 were disturbed and left out of the speeds; {slow} more were " in text


def test_a_short_record_between_two_crowded_ones_was_crowded() -> None:
    """Records of less than a second do not tell who took the cores beside them."""
    made = [r for r in records() if r.method in ("plain", "stand") and r.task == "reasoning"]
    lost = {0: 0.0, 3: 0.6, 5: 0.5, 6: 0.0, 9: 0.7}
    found = [replace(r, limits={"taken": lost[i]} if i in lost else {}) for i, r in enumerate(made)]
    crowded = [i for i, bad in enumerate(lost_cores(found)) if bad]
    assert crowded == [3, 4, 5, 9]  # not 7 and 8, nor what comes after the last that tells


def test_a_speed_and_its_prompts_are_of_the_same_records(
    report: Callable[..., tuple[Page, str]],
) -> None:
    """What plain decoding has no time of is in no speed-up: two of plain's were disturbed."""
    made = [r for r in records() if r.method in ("plain", "stand") and r.task == "reasoning"]
    bad = [i for i, r in enumerate(made) if r.method == "plain" and r.index in (2, 5)]
    bad += [i for i, r in enumerate(made) if r.method == "stand" and r.index == 7]
    busy = [replace(r, limits={"taken": float(i in bad)}) for i, r in enumerate(made)]
    found = figures(busy, undisturbed(busy), "stand")
    assert found["prompts_timed"] == found["speed_up"]["prompts"] == 7
    page, _ = report(busy, methods=["plain", "stand"])
    rows = page.table("method", "by")
    assert [rows[name]["prompts"][0] for name in ("plain", "stand")] == ["8 of 10", "7 of 10"]
    kept = [r for r in made if r.method == "stand" and r.index not in (2, 5, 7)]
    split = metrics.time_split(kept)
    assert found["time"] == split
    each = page.table("method", "draft")["stand"]["s per prompt"]
    assert float(each[1] or 0) == pytest.approx(sum(split.values()) / 7)


@pytest.mark.parametrize(("times", "places"), [(1.0, ["tied", "fastest"]), (9.0, ["fastest", ""])])
def test_who_drafted_nothing_is_no_faster_than_plain_decoding(
    report: Callable[..., tuple[Page, str]], times: float, places: list[str]
) -> None:
    """It does the same, so what makes it faster is the machine's; what looks cost is its own."""
    made = [r for r in records() if r.method in ("plain", "stand") and r.task == "reasoning"]
    idle = {"drafted": 0, "accepted": 0, "examined": 0, "per_position": []}
    mine = {
        r.key: replace(
            r, seconds=times * r.seconds, samples=[replace(s, **idle) for s in r.samples]
        )
        for r in made
        if r.method == "stand"
    }
    rows = report([mine.get(r.key, r) for r in made], methods=["plain", "stand"])[0]
    found = rows.table("method", "by")
    assert [found[name]["place"][0] for name in ("plain", "stand")] == places


def test_only_neighbours_tell_of_a_short_record() -> None:
    made = [r for r in records() if r.method in ("plain", "stand") and r.task == "reasoning"]
    lost = {0: 0.0, 4: 0.5, 10: 0.4, 15: 0.0}
    found = [replace(r, limits={"taken": lost[i]} if i in lost else {}) for i, r in enumerate(made)]
    assert [i for i, bad in enumerate(lost_cores(found)) if bad] == [4, 10]


def test_a_failure_is_none_of_the_times_that_are_left() -> None:
    """Half of stand's records failed and the others were disturbed: their times are all it has."""
    made = [r for r in records() if r.method in ("plain", "stand") and r.task == "reasoning"]
    mine = [i for i, r in enumerate(made) if r.method == "stand"]
    for i in mine[:5]:
        made[i] = replace(made[i], error="broke", samples=[])
    made = [replace(r, limits={"taken": float(i in mine[5:])}) for i, r in enumerate(made)]
    assert undisturbed(made) == made


@pytest.mark.parametrize("prompts", [1, 4])
def test_one_prompt_is_pointed_out_without_plain_decoding(
    report: Callable[..., tuple[Page, str]], prompts: int
) -> None:
    names = ("stand", "vllm")
    made = [r for r in records() if r.method in names and r.task == "reasoning"]
    _, text = report([r for r in made if r.index < prompts], methods=[*names])
    assert ("Fewer than three prompts give no interval" in text) == (prompts < 3)


@pytest.mark.parametrize(("hit", "stays"), [(2, False), (3, True)])
def test_nobody_loses_most_of_a_task(hit: int, stays: bool) -> None:
    """Three of four records of one method were disturbed, none of the other's: all stays."""
    sample = SampleRecord(10, 10, 0, 0, 0, [])
    made = [
        Record("t", i, "", "", name, 0, 2 * i + order, 5, 1.0, 10, [sample], 0.1, limits=limits)
        for i in range(4)
        for order, name in enumerate(("plain", "stand"))
        for limits in [{"read_gb_s": 30.0, "taken": float(order and i < hit)}]
    ]
    assert len(undisturbed(made)) == (8 if stays else 8 - hit)
