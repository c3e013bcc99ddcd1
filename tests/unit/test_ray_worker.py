"""Batch generation over Ray, as far as it needs no cluster: pieces, workers, words."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import pytest
from command import Call
from ray_jobs import DRAWN, SAMPLING, asked, local, tokens, worker

from forerun import registry
from forerun.cli.generate_ray import progress_line
from forerun.core.roles import name_of
from forerun.engine.stats import Stats
from forerun.errors import CapacityError, DataError
from forerun.integrations.ray_batch import pieces, share
from forerun.integrations.ray_worker import Request, ShadowedDrafter


def test_shares_of_nodes() -> None:
    assert share([8], 3) == 2 and share([4, 4], 3) == 2 and share([3, 3], 3) == 1
    assert share([2], 4) == 0.5 and share([3], 4) == 0.5 and share([], 2) == 0
    for held, actors in (([8], 3), ([3, 5], 4), ([2], 7), ([1, 1, 1], 5)):
        size = share(held, actors)
        assert sum(int(have / size) for have in held) >= actors


def test_pieces_keep_the_order_and_leave_none_out() -> None:
    for batch, actors in ((1, 2), (4, 2), (64, 2), (64, 4)):
        cut = pieces(asked(), batch=batch, actors=actors)
        assert [one for piece in cut for one in piece] == asked()
        assert len(cut) >= actors
    assert all(len(piece) == 1 for piece in pieces(asked(), batch=1, actors=1))
    assert pieces([], batch=4, actors=2) == []


@pytest.mark.parametrize("drafter", ["none", "prompt_lookup", DRAWN])
def test_pieces_in_any_order_are_the_samples_of_one_run(tiny_folder: Path, drafter: str) -> None:
    made, whole = worker(tiny_folder, drafter=drafter), asked()
    found = [made.work(piece) for piece in (whole[3:], whole[:1], whole[1:3])]
    assert tokens([one for part in found for one in part]) == local(tiny_folder, drafter=drafter)


@pytest.mark.parametrize("drafter", [registry.DEFAULT_DRAFTER, "stand:scope=tenant", "suffix"])
def test_pieces_of_an_actor_teach_each_other_nothing(tiny_folder: Path, drafter: str) -> None:
    made, whole = worker(tiny_folder, drafter=drafter), asked(replace(SAMPLING, max_new_tokens=40))
    first = made.work(whole[3:])
    made.work(whole[:3])
    assert tokens(made.work(whole[3:])) == tokens(first)


def test_a_stopped_worker_returns_whole_prompts_only(tiny_folder: Path) -> None:
    made = worker(tiny_folder)
    made.stop()
    assert made.work(asked()) == []


def test_a_bad_prompt_is_refused_under_its_own_number(tiny_folder: Path) -> None:
    whole = [*asked(), Request(5, "the cat " * 200, SAMPLING), Request(6, [9999], SAMPLING)]
    made = worker(tiny_folder)
    with pytest.raises(CapacityError, match=r"^prompt 5 has \d+ tokens, but the context"):
        made.check(whole[2:])
    with pytest.raises(DataError, match="^prompt 6 has token "):
        made.check(whole[6:])


@pytest.mark.parametrize("drafter", ["stand", "token_recycling", "suffix"])
def test_a_memory_from_a_file_counts_once_after_merging(tiny_folder: Path, drafter: str) -> None:
    first = worker(tiny_folder, drafter=drafter)
    first.keep(None)
    assert getattr(first.snapshot(), "counts", {"tokens": 0})["tokens"] == 0
    first.work(asked()[:2])
    before = first.snapshot()
    actors = [worker(tiny_folder, drafter=drafter) for _ in range(2)]
    for actor, piece in zip(actors, (asked()[2:4], asked()[4:]), strict=True):
        actor.keep(before)
        actor.work(piece)
    learned = [actor.snapshot().counts["tokens"] for actor in actors]
    own = before.counts["tokens"]
    assert own > 0 and learned[0] > learned[1] > 0
    merged = actors[0].main.merge([before, *(actor.snapshot() for actor in actors)])
    whole = actors[0].main.snapshot().counts["tokens"]  # what the first one drafts from
    if drafter == "token_recycling":  # tokens with known successors: a union
        assert max(own, *learned) <= merged.counts["tokens"] <= own + sum(learned)
        assert learned[0] <= whole
    else:
        assert merged.counts["tokens"] == own + sum(learned)
        assert whole == own + learned[0]


def test_both_drafters_are_shown_the_same_steps() -> None:
    parts = [registry.make("drafter", "stand") for _ in range(2)]
    both, shown = ShadowedDrafter(*parts), []
    assert both.can_observe_late and name_of(both) == "stand"
    for part in parts:
        part.observe = shown.append
    both.observe("step")
    assert shown == ["step"] * 2


def test_progress_goes_by_the_pace_of_this_run() -> None:
    stats = Stats(generated=300, passes=100)
    line = progress_line(60, 100, 50, 100.0, stats)
    assert line == "60 of 100 prompts, 3 tokens/s, tau 3.00, about 6:40 left"
    assert progress_line(50, 100, 50, 1.0, Stats()) == "50 of 100 prompts"
    assert progress_line(9, 1009, 0, 36.0, stats).endswith("about 1:06:40 left")


def test_without_ray_the_extra_is_named(call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    status, _, err = call("generate", "-p", "x", "--engine", "ray")
    assert status == 2 and "pip install '.[ray]'" in err


def test_bad_options_are_refused(call: Call) -> None:
    for words, said in (
        (("--engine", "rayy"), "did you mean 'ray'"),
        (("--actors", 2), "--actors belongs to --engine ray"),
    ):
        status, _, err = call("generate", "-p", "x", *words)
        assert status == 2 and said in err
    pytest.importorskip("ray", reason="ray is not installed")
    status, _, err = call("generate", "-p", "x", "--engine", "ray", "--actors", 0)
    assert status == 2 and "--actors must be at least 1" in err
