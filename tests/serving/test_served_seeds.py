"""A seed means the same text whatever others taught, by every method; nothing stays of it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from traces_left import held

import forerun
from forerun.core.sampling import Sampling
from forerun.serving.admission import Group
from forerun.serving.batch import Batch
from forerun.serving.jobs import Job
from served import thread

METHODS = {name: name for name in ("aded", "cascade", "suffix", "token_recycling")} | {
    "parts": "auto:parts=stand:scope=tenant+suffix"
}


@pytest.fixture(scope="module")
def batch(tiny_chat: Path) -> Iterator[Batch]:
    with thread(
        forerun.load(tiny_chat, max_seqs=8), controller="fixed:nodes=8", methods=METHODS
    ) as served:
        yield served.server.service.worker._batch  # its thread sleeps: nothing is sent


def begun(batch: Batch, method: str, seed: int, is_seeded: bool, prompts: int = 2) -> list[Any]:
    """Sequences of a request on their way."""
    sampling = Sampling(max_new_tokens=60, n=2, temperature=0.8, ignore_eos=True)
    given = [[5, 6, 7, 5, 6, 7 + i] for i in range(prompts)]
    job = Job(given, sampling, seed, method, "", is_seeded=is_seeded)
    for i in range(prompts):
        batch.begin(Group(job, i))
    return [seq for seq, choice in batch._choices.items() if choice.job is job]


def run(batch: Batch) -> None:
    while not batch.is_idle:
        batch.step()
    batch.events()


def remains(batch: Batch, method: str) -> tuple[dict[str, int], dict[str, int]]:
    drafter = batch.dispatcher.by_name[method].drafter
    return held(drafter), drafter.memory_report()


@pytest.mark.parametrize("method", ["auto", "stand", *METHODS])
def test_what_others_taught_shows_in_no_seeded_text(batch: Batch, method: str) -> None:
    first = begun(batch, method, 3, True)
    run(batch)
    for seed in (4, 5):
        begun(batch, method, seed, False)
        run(batch)
    before = remains(batch, method)
    again = begun(batch, method, 3, True)
    run(batch)
    assert [seq.tokens for seq in again] == [seq.tokens for seq in first]
    assert remains(batch, method) == before


@pytest.mark.parametrize("method", ["auto", "stand", *METHODS])
def test_a_seeded_text_is_the_same_in_company(batch: Batch, method: str) -> None:
    """The prompts of one request may be admitted apart: they teach each other nothing either."""
    first = begun(batch, method, 3, True)
    run(batch)
    others = begun(batch, method, 4, False, prompts=1)
    for _ in range(3):
        batch.step()
    again = begun(batch, method, 3, True)
    run(batch)
    assert len(others) == 2
    assert [seq.tokens for seq in again] == [seq.tokens for seq in first]


@pytest.mark.parametrize("method", ["auto", "stand", *METHODS])
def test_nothing_stays_of_a_seeded_request_that_was_cancelled(batch: Batch, method: str) -> None:
    begun(batch, method, 4, False)
    run(batch)
    before = remains(batch, method)
    seqs = begun(batch, method, 3, True)
    for _ in range(8):
        batch.step()
    batch.drop(batch._choices[seqs[0]].job)
    batch.step()
    del seqs
    assert batch.is_idle
    assert remains(batch, method) == before
