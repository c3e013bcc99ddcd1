"""Finished prompts of a long run: kept whole, taken up again, put in order, never mixed up."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from forerun.core.sampling import Sampling
from forerun.errors import ConfigError, DataError
from forerun.integrations.ray_results import PartialResults, partial_of, seed_of
from forerun.integrations.ray_worker import Request

SAMPLING = Sampling(temperature=0.8, max_new_tokens=10, n=2, seed=5, ignore_eos=True)


def asked(sampling: Sampling = SAMPLING) -> list[Request]:
    return [Request(i, f"prompt {i}", sampling) for i in range(5)]


def record(index: int, k: int = 0) -> dict[str, Any]:
    return {"prompt_index": index, "index": k, "text": f"text {index} é"}


def test_results_are_written_in_order_and_the_partial_file_goes(tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    with PartialResults(out, 5, {"model": "tiny"}, asked()) as partial:
        for index in (3, 0, 4, 1, 2):
            partial.add(index, [record(index), record(index, 1)])
        assert not out.exists()
        partial.finish()
    lines = [json.loads(line) for line in out.read_text().splitlines()]
    assert lines == [record(i, k) for i in range(5) for k in (0, 1)]
    assert [path.name for path in tmp_path.iterdir()] == ["out.jsonl"]


def test_a_partial_file_is_taken_up_and_its_torn_line_dropped(tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    with PartialResults(out, 5, {}, asked()) as partial:
        partial.add(3, [record(3)])
        partial.add(1, [record(1)])
    path = partial_of(out)
    path.write_bytes(path.read_bytes()[:-4])
    assert seed_of(out) == 5
    with PartialResults(out, 5, {}, asked()) as partial:
        assert set(partial.held) == {3} and partial.samples(3) == [record(3)]
        partial.add(1, [record(1)])
    with PartialResults(out, 5, {}, asked()) as partial:
        assert set(partial.held) == {1, 3}


def test_a_partial_file_of_another_run_is_refused(tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    with PartialResults(out, 5, {"drafter": "stand"}, asked()) as partial:
        partial.add(0, [record(0)])
        with pytest.raises(DataError, match="another run is writing"):
            PartialResults(out, 5, {"drafter": "stand"}, asked())
    with pytest.raises(ConfigError, match="made with drafter 'stand', this run has 'none'"):
        PartialResults(out, 5, {"drafter": "none"}, asked())
    with pytest.raises(ConfigError, match="made with seed 5, this run has 6"):
        PartialResults(out, 6, {"drafter": "stand"}, asked())
    with pytest.raises(ConfigError, match="other prompts or sampling"):
        PartialResults(out, 5, {"drafter": "stand"}, asked(replace(SAMPLING, top_k=3)))
    partial_of(out).write_text("my notes\n")
    with pytest.raises(DataError, match="not a file of partial results"):
        PartialResults(out, 5, {"drafter": "stand"}, asked())
    assert partial_of(out).read_text() == "my notes\n"


def test_existing_results_and_empty_runs_leave_files_alone(tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    with PartialResults(out, 5, {}, asked()):
        pass
    assert list(tmp_path.iterdir()) == []
    out.write_text("{}\n")
    with pytest.raises(DataError, match="exists and is not empty"):
        PartialResults(out, 5, {}, asked())
    assert [path.name for path in tmp_path.iterdir()] == ["out.jsonl"]


def test_without_file_locks_the_command_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "fcntl", None)
    with pytest.raises(ConfigError, match="does not have; run it on Linux"):
        PartialResults(tmp_path / "out.jsonl", 5, {}, asked())
