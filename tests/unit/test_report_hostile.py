"""Reports of what is no run, of text that would break a page, and on a full disk."""

from __future__ import annotations

import errno
import json
import os
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from report_page import SVG, Page
from sample_run import manifest, records, write_run

from forerun.bench.report import write_report
from forerun.errors import CapacityError, DataError

EVIL = "<script>alert(1)</script>\"'&|`*_[x](http://example.org)\n\x1b[31mred\x07 \ue000 $title"


def test_text_of_records_is_escaped(tmp_path: Path) -> None:
    made = [r for r in records() if r.method in ("plain", "stand", "openvino")]
    made = [
        replace(r, category=EVIL, task=EVIL if r.task == "code" else r.task, memory={EVIL: 5})
        for r in made
    ]
    tasks = manifest().tasks
    folder = write_run(
        tmp_path / "run",
        [replace(r, error=EVIL) if r.error else r for r in made],
        tasks={"reasoning": tasks["reasoning"], EVIL: tasks["code"]},
        model=manifest().model | {"name": EVIL},
        machine={EVIL: EVIL, "cpu": EVIL},
        command=EVIL,
        created=EVIL,
    )
    for path in (folder / "run.json", folder / "records.jsonl"):
        words = path.read_text(encoding="utf-8")
        path.write_text(words.replace("\ue000", "\\ud800"), encoding="utf-8")  # half a character
    html, markdown, *_ = write_report(folder)
    page, text = Page(html.read_text(encoding="utf-8")), markdown.read_text(encoding="utf-8")
    assert page.open_tags == [] and sum(tag == "script" for tag, _ in page.tags) == 1
    assert not any("alert(1)" in words for tag, words in page.texts if tag == "script")
    kept = EVIL.replace("\x1b[31m", "").replace("\x07", "").replace("\ue000", "?")
    assert sum(kept in words for _, words in page.texts) > 5
    assert page.table("method", "what")["openvino"]["reason or last lines"][0] == kept
    assert not re.search(r"(?<!\\)[<`]|\x1b|[^\\]\]\(http", text)
    for svg in page.svgs():
        assert not list(svg.iter(f"{SVG}script"))


Change = Callable[[Path], object]


def edit(**changes: object) -> Change:
    def change(folder: Path) -> None:
        path = folder / "run.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | changes))

    return change


def edit_record(**changes: object) -> Change:
    def change(folder: Path) -> None:
        path = folder / "records.jsonl"
        first, *rest = path.read_text().splitlines(keepends=True)
        path.write_text(json.dumps(json.loads(first) | changes) + "\n" + "".join(rest))

    return change


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda folder: (folder / "run.json").unlink(), "is not a run folder"),
        (lambda folder: (folder / "records.jsonl").unlink(), "has no records yet"),
        (lambda folder: (folder / "records.jsonl").write_text(""), "has no records yet"),
        (edit(version=2), "expected version 1, got 2"),
        (edit_record(new_field=1), "unknown field 'new_field'"),
        (edit_record(seconds="long"), 'takes a number, got "long"; delete the line'),
    ],
)
def test_what_is_no_run_is_refused_in_one_line(tmp_path: Path, change: Change, says: str) -> None:
    folder = write_run(tmp_path / "run")
    change(folder)
    with pytest.raises(DataError) as caught:
        write_report(folder)
    assert says in str(caught.value) and "\n" not in str(caught.value)
    assert not (folder / "report.html").exists()


def test_a_missing_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="is not a run folder"):
        write_report(tmp_path / "nothing")


def test_a_full_disk_leaves_the_old_report(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = write_run(tmp_path / "run")
    write_report(run)
    before = (run / "report.html").read_bytes()

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(CapacityError, match="No space left on device"):
        write_report(run)
    assert (run / "report.html").read_bytes() == before
    assert not list(run.glob(".*"))
