"""Building an index on disk: parts, interruptions, builders in each other's way, full disks."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from index_files import BYTES, IDS, corpus_file, data, numbers_file

from forerun.errors import CapacityError, ConfigError, DataError
from forerun.ngrams.index.build import build as building
from forerun.ngrams.index.build.build import Options, build
from forerun.ngrams.index.build.check import check
from forerun.ngrams.index.build.documents import Reading
from forerun.ngrams.index.query.engine import Index
from forerun.utils.files import write_whole


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    return corpus_file(tmp_path)


@pytest.fixture
def numbers(tmp_path: Path) -> Path:
    return numbers_file(tmp_path)


# parts


@pytest.mark.parametrize(
    ("width", "shards"),
    [
        (2, 3),
        pytest.param(1, 1, marks=pytest.mark.slow),
        pytest.param(4, 3, marks=pytest.mark.slow),
    ],
)
def test_parts_give_the_same_files_as_a_whole(
    numbers: Path, tmp_path: Path, width: int, shards: int
) -> None:
    def options(part: int) -> Options:
        return Options(
            tokenizer="ids",
            reading=Reading("tokens", is_ids=True),
            width=width,
            shards=shards,
            part=part,
            overlap=500,
        )

    build(tmp_path / "whole", [numbers], options(0))
    manifest = build(tmp_path / "parts", [numbers], options(90))
    assert data(tmp_path / "whole") == data(tmp_path / "parts")
    assert min(manifest.build["parts"]) > 3
    assert check(tmp_path / "parts", deep=True) == []


def test_parts_follow_from_memory() -> None:
    from forerun.ngrams.index.build.sort import plan_parts
    from forerun.ngrams.index.build.suffix_array import part_bytes

    state = plan_parts([100_000_000, 1000], 2, 256 << 20, 2)
    longest = max(np.diff(state.borders[0]))
    assert (longest + state.overlap) * part_bytes(2) * 2 <= 256 << 20
    assert state.borders[0][-1] == 100_000_000 and state.borders[1] == [0, 1000]


# interruptions


class Cut(Exception):
    """The build ends here."""


def cut_at(stage: str, after: int) -> Callable[[str, int, int], None]:
    calls = []

    def report(name: str, done: int, total: int) -> None:
        if name == stage:
            calls.append(name)
            if len(calls) > after:
                raise Cut

    return report


@pytest.mark.parametrize(("stage", "after"), [("tokenise", 1), ("sort", 2), ("merge", 1)])
def test_a_build_that_was_cut_short_is_no_index_and_goes_on(
    numbers: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stage: str, after: int
) -> None:
    from forerun.ngrams.index.build import tokenize

    monkeypatch.setattr(tokenize, "BATCH_DOCUMENTS", 4)
    monkeypatch.setattr(tokenize, "SAVE_SECONDS", 0.0)
    options = Options(
        tokenizer="ids",
        reading=Reading("tokens", is_ids=True),
        shards=2,
        part=100,
        overlap=500,
        threads=1,
    )
    build(tmp_path / "whole", [numbers], options)
    with pytest.raises(Cut):
        build(tmp_path / "ix", [numbers], options, report=cut_at(stage, after))
    with pytest.raises(DataError, match="interrupted.*forerun index build"):
        Index.open(tmp_path / "ix")
    state = json.loads((tmp_path / "ix/building/state.json").read_text())
    assert state["tokenise"]["records"] == (4 if stage == "tokenise" else 30)
    seen = []
    manifest = build(tmp_path / "ix", [numbers], options, report=lambda *row: seen.append(row[0]))
    assert data(tmp_path / "ix") == data(tmp_path / "whole")
    assert manifest.build["resumed"] == 1 and not (tmp_path / "ix/building").exists()
    if stage != "tokenise":
        assert "tokenise" not in seen


def test_a_killed_process_leaves_a_build_that_goes_on(numbers: Path, tmp_path: Path) -> None:
    code = f"""
import os, sys
from forerun.ngrams.index.build.build import Options, build
from forerun.ngrams.index.build.documents import Reading
options = Options(tokenizer="ids", reading=Reading("tokens", is_ids=True), part=100, overlap=500)
build({str(tmp_path / "ix")!r}, [{str(numbers)!r}], options,
      report=lambda stage, done, total: os._exit(9) if stage == "merge" else None)
"""
    done = subprocess.run([sys.executable, "-c", code], env=environment(), capture_output=True)
    assert done.returncode == 9, done.stderr
    with pytest.raises(DataError, match="interrupted"):
        Index.open(tmp_path / "ix")
    options = Options(
        tokenizer="ids", reading=Reading("tokens", is_ids=True), part=100, overlap=500
    )
    build(tmp_path / "ix", [numbers], options)
    build(tmp_path / "whole", [numbers], IDS)
    assert data(tmp_path / "ix") == data(tmp_path / "whole")


def environment() -> dict[str, str]:
    return os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}


def test_a_build_without_its_manifest_is_finished_later(
    numbers: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(file: Path, *given: Any) -> None:
        if file.name == "manifest.json":
            raise CapacityError("disk full")
        write_whole(file, *given)

    monkeypatch.setattr(building, "write_whole", refuse)
    with pytest.raises(CapacityError):
        build(tmp_path / "ix", [numbers], IDS)
    monkeypatch.undo()
    seen = []
    build(tmp_path / "ix", [numbers], IDS, report=lambda *row: seen.append(row))
    assert not seen and Index.open(tmp_path / "ix").tokens == 30 * 41


def test_another_build_in_the_same_folder_is_refused(numbers: Path, tmp_path: Path) -> None:
    with pytest.raises(Cut):
        build(tmp_path / "ix", [numbers], IDS, report=cut_at("sort", 0))
    other = Options(tokenizer="ids", reading=IDS.reading, shards=2, workers=1)
    with pytest.raises(ConfigError, match=r"other shards; .*--restart"):
        build(tmp_path / "ix", [numbers], other)
    numbers.write_text(numbers.read_text() + '{"tokens": [1]}\n')
    with pytest.raises(ConfigError, match="other sources"):
        build(tmp_path / "ix", [numbers], IDS)
    assert build(tmp_path / "ix", [numbers], other, restart=True).documents == 31


def test_the_earlier_index_stays_until_the_new_one_is_whole(
    numbers: Path, corpus: Path, tmp_path: Path
) -> None:
    build(tmp_path / "ix", [corpus], BYTES)
    before = data(tmp_path / "ix")
    with pytest.raises(ConfigError, match="--overwrite"):
        build(tmp_path / "ix", [numbers], IDS)
    with pytest.raises(Cut):
        build(tmp_path / "ix", [numbers], IDS, overwrite=True, report=cut_at("sort", 0))
    with pytest.raises(DataError):
        build(tmp_path / "ix", [tmp_path / "no such"], IDS, overwrite=True)
    assert data(tmp_path / "ix") == before and check(tmp_path / "ix") == []
    open_before = Index.open(tmp_path / "ix")
    build(tmp_path / "ix", [numbers], IDS, overwrite=True)
    assert Index.open(tmp_path / "ix").tokens == 30 * 41
    assert open_before.count(list(b"to be")) == 4  # what is open stays readable
    assert len(list((tmp_path / "ix").glob("data-*"))) == 1


def test_two_builders_in_one_folder(numbers: Path, corpus: Path, tmp_path: Path) -> None:
    """The first one is another process, which holds still; when it is killed, the way is free."""
    build(tmp_path / "ix", [corpus], BYTES)
    code = f"""
import time
from forerun.ngrams.index.build.build import Options, build
from forerun.ngrams.index.build.documents import Reading
options = Options(tokenizer="ids", reading=Reading("tokens", is_ids=True), workers=1)

def report(stage, done, total):
    print(stage, flush=True)
    time.sleep(600)

build({str(tmp_path / "ix")!r}, [{str(numbers)!r}], options, overwrite=True, report=report)
"""
    words = [sys.executable, "-c", code]
    with subprocess.Popen(words, env=environment(), stdout=subprocess.PIPE, text=True) as first:
        assert first.stdout is not None and first.stdout.readline() == "tokenise\n"
        with pytest.raises(ConfigError, match=rf"another build is running .*process {first.pid}\b"):
            build(tmp_path / "ix", [numbers], IDS, overwrite=True)
        assert Index.open(tmp_path / "ix").count(list(b"to be")) == 4
        first.kill()
    build(tmp_path / "ix", [numbers], IDS, overwrite=True)
    assert Index.open(tmp_path / "ix").tokens == 30 * 41


@pytest.mark.parametrize("most", [600, 4000])
def test_a_full_disk_is_an_error_that_can_be_mended(
    numbers: Path, corpus: Path, tmp_path: Path, most: int
) -> None:
    """A limit of the size of files stands for a full disk: in the tokens, and in the result."""
    build(tmp_path / "ix", [corpus], BYTES)
    code = f"""
import resource, sys
from forerun.errors import CapacityError
from forerun.ngrams.index.build import sort
from forerun.ngrams.index.build.build import Options, build
from forerun.ngrams.index.build.documents import Reading
sort.warm_up(4)  # compiled files must still be written
resource.setrlimit(resource.RLIMIT_FSIZE, ({most}, {most}))
options = Options(tokenizer="ids", reading=Reading("tokens", is_ids=True), width=4, workers=1)
try:
    build({str(tmp_path / "ix")!r}, [{str(numbers)!r}], options, overwrite=True)
except CapacityError as error:
    print(error)
"""
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment(), capture_output=True, text=True
    )
    assert "cannot write" in done.stdout and "earlier index" in done.stdout, done.stderr
    assert Index.open(tmp_path / "ix").count(list(b"to be")) == 4
    options = Options(tokenizer="ids", reading=IDS.reading, width=4, workers=1)
    build(tmp_path / "ix", [numbers], options, overwrite=True)
    assert Index.open(tmp_path / "ix").tokens == 30 * 41
