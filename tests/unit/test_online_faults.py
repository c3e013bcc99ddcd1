"""Online drafts: threads, copies of sorted drafts, files of a replay, weights that overflow."""

from __future__ import annotations

import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from test_no_room import room
from tiny import make_tiny

import forerun
from fakes import sequence
from forerun.core.dice import SeededDice
from forerun.drafters import _sub_model
from forerun.drafters.online import ONE_CLASS, Online
from forerun.errors import CapacityError, ConfigError
from forerun.models.sub_models import Exits, write_exits
from forerun.serving.learning import TimeShare
from forerun.training.online.corrections import Episode, ErrorBuffer
from forerun.training.online.learner import Learner, OnlineOptions, draft_module
from forerun.training.online.replay import Request, fitting
from forerun.training.recipes.online import RESULTS, folder_names, write_rows


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A random target, and as its draft another one."""
    folder = tmp_path_factory.mktemp("online")
    return make_tiny(folder / "target", seed=1), make_tiny(folder / "draft", seed=2)


def episode(num_tokens: int) -> Episode:
    row = np.log(np.full((1, 2), 0.4, np.float32))
    tokens, ids = np.arange(num_tokens, dtype=np.int32), np.array([[3, 5]], np.int32)
    return Episode(tokens, np.array([num_tokens - 1]), ids, row, np.log(row[:, 0] * 0 + 0.2))


def test_the_size_of_a_buffer_can_be_read_while_requests_end() -> None:
    """Metrics read it in another thread than the engine's."""
    buffer, errors, is_done = ErrorBuffer(200), list[Exception](), threading.Event()

    def read() -> None:
        try:
            while not is_done.is_set():
                assert 0 <= buffer.num_tokens <= 208
        except Exception as error:
            errors.append(error)

    reader, one = threading.Thread(target=read), episode(4)
    reader.start()
    for n in range(20_000):
        buffer.add(one)
        if n % 100 == 99:
            buffer.take()
    is_done.set()
    reader.join()
    assert not errors


def test_time_of_two_threads_is_counted_whole() -> None:
    time, num = TimeShare(1.0, 0.0), 20_000

    def spend() -> None:
        for _ in range(num):
            time.spend(1.0, 0.0)

    threads = [threading.Thread(target=spend) for _ in range(2)]
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(before)
    assert time.debt(0.0) == 2 * num


def test_a_copy_is_in_use_until_its_request_has_released_its_cells(
    pair: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else new weights could be written while the request still uses the model."""
    model = forerun.load(str(pair[0]), max_seqs=1)
    drafter = Online(model=str(pair[1]), tokenizer=model.tokenizer, target=model.target)
    drafter.bind(model.target)
    seq, used = sequence((5, 9), 4, SeededDice(0)), list[int]()
    finish = drafter.first.drafter.finish

    def watched(seq: Any) -> None:
        used.append(drafter.first.num_used)
        finish(seq)

    monkeypatch.setattr(drafter.first.drafter, "finish", watched)
    drafter.start(seq)
    drafter.finish(seq)
    assert used == [1] and drafter.first.num_used == 0


def test_all_copies_of_a_sorted_draft_draft_with_all_layers(
    pair: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is trained is the whole model, so version 0 and later ones draft with it."""
    monkeypatch.setattr(_sub_model, "fastest", lambda found: found[0])
    write_exits(pair[1], Exits((1, 2), tuple(range(5, 40))))
    try:
        model = forerun.load(str(pair[0]), max_seqs=1)
        drafter = Online(model=str(pair[1]), tokenizer=model.tokenizer, target=model.target)
        drafter.bind(model.target)
        assert drafter.publish(ONE_CLASS, draft_module(str(pair[1])).state_dict(), 1)
        depths = [copy.drafter.runner.num_layers for copy in drafter._all()]
    finally:
        (pair[1] / "forerun-sorted.json").unlink()
    assert depths == [2, 2]


def test_weights_without_a_finite_acceptance_fall_back_to_the_average(
    pair: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    learner = Learner(draft_module(str(pair[1])), OnlineOptions(rate=1.0))
    before = learner.copied()
    learner.held.append(episode(6))
    monkeypatch.setattr(learner, "acceptance", lambda one, old=None: 0.5 if old else float("nan"))
    assert learner.update([episode(6)])
    assert learner.num_fallbacks == 1
    assert all(torch.equal(before[n], p) for n, p in learner.copied().items())


def test_every_class_has_a_folder_of_its_own_in_the_output() -> None:
    names = folder_names(["a/b", "a_b", "..", "Code", "online.pt", "plan.json"])
    assert list(names) == ["a/b", "a_b", "..", "Code", "online.pt", "plan.json"]
    assert len({name.casefold() for name in names.values()}) == len(names)
    assert names["Code"] == "Code"
    assert not {"..", ".", "online.pt", "plan.json", RESULTS} & set(names.values())
    assert all("/" not in name for name in names.values())


def test_a_full_disk_at_the_results_is_named(tmp_path: Path) -> None:
    path = tmp_path / RESULTS
    write_rows(path, [{"alpha": 0.5}])
    before = path.read_bytes()
    with room(10), pytest.raises(CapacityError, match=RESULTS):
        write_rows(path, [{"alpha": 0.5}] * 9)
    assert path.read_bytes() == before and list(tmp_path.iterdir()) == [path]


def test_requests_that_do_not_fit_the_context_are_left_out(
    pair: tuple[Path, Path], caplog: pytest.LogCaptureFixture
) -> None:
    """Not an error in the middle of the traffic, at which every resumed run stops again."""
    model = forerun.load(str(pair[0]))
    long, short = Request("one two " * 400, ONE_CLASS), Request("one two", ONE_CLASS)
    assert fitting([short, long, short], model) == [short, short]
    assert "1 of 3 requests are left out" in caplog.text
    with pytest.raises(ConfigError, match="no prompt fits the context"):
        fitting([long], model)
