"""Run folders: written whole, read back equal, resumed, refused with the reason."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from forerun.bench import results, run_writer
from forerun.bench.report import write_report
from forerun.bench.results import Manifest, Record, SampleRecord, read_run
from forerun.bench.run_writer import RunWriter
from forerun.errors import CapacityError, DataError

RESULTS = Path(__file__).parents[2] / "docs" / "results"
SAMPLE = SampleRecord(
    tokens=7,
    passes=3,
    drafted=9,
    accepted=4,
    examined=5,
    per_position=[3, 1],
    seconds={"draft": 0.1, "forward": 0.5},
    finish="stop",
    score=1.0,
    text="Answer: 4\n",
)
RECORD = Record(
    task="reasoning",
    index=2,
    id="heldout-0-2",
    category="3",
    method="stand",
    round=0,
    order=5,
    num_prompt_tokens=40,
    seconds=1.5,
    generated=7,
    samples=[SAMPLE],
    prefill_seconds=0.2,
    score=1.0,
    majority=1.0,
    memory={"weights": 100},
    limits={"read_gb_s": 30.5},
)
PEER_RECORD = replace(
    RECORD, method="peer", samples=[SampleRecord(7)], prefill_seconds=None, limits=None
)


def plan(**changes: Any) -> Manifest:
    """A manifest."""
    made = Manifest(
        created="2026-11-20T12:00:00+00:00",
        forerun="0.1.0",
        git="abc",
        command="forerun bench run",
        model={"path": "/here", "name": "m", "hash": "h", "weights_hash": "w"},
        dtype="bfloat16",
        threads=2,
        seed=0,
        sampling={"n": 1},
        methods=["plain", "stand", "peer"],
        tasks={"reasoning": {"examples": 4, "hash": "p"}},
        machine={"cpu": "a cpu", "kernels": "torch", "device": "cpu"},
    )
    return replace(made, **changes)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A run folder with two records."""
    with RunWriter(tmp_path / "run", plan()) as writer:
        writer.append(RECORD, PEER_RECORD)
    return tmp_path / "run"


def test_what_is_written_is_read_back(folder: Path) -> None:
    manifest, records = read_run(folder)
    assert manifest == plan() and records == [RECORD, PEER_RECORD]
    lines = (folder / "records.jsonl").read_text().splitlines()
    assert json.loads(lines[0]) == asdict(RECORD)


def test_a_torn_last_line_is_dropped(folder: Path) -> None:
    path = folder / "records.jsonl"
    whole = path.read_bytes()
    path.write_bytes(whole + whole[:50])
    assert read_run(folder)[1] == [RECORD, PEER_RECORD]
    with RunWriter(folder, plan()) as writer:
        assert writer.done == [RECORD, PEER_RECORD]
        assert path.read_bytes() == whole
        writer.append(replace(RECORD, index=3))
    assert [record.index for record in read_run(folder)[1]] == [2, 2, 3]


def test_what_is_dropped_may_be_measured_again(folder: Path) -> None:
    again = replace(RECORD, seconds=9.0)
    with RunWriter(folder, plan()) as writer:
        writer.drop([RECORD])
        assert writer.done == [PEER_RECORD] == read_run(folder)[1]
        with pytest.raises(DataError, match="another process is writing"):
            RunWriter(folder, plan())
        writer.append(again)
        assert writer.done == [PEER_RECORD, again]
    assert read_run(folder)[1] == [PEER_RECORD, again]


def test_a_full_disk_drops_nothing(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(file: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with RunWriter(folder, plan()) as writer:
        monkeypatch.setattr(run_writer.os, "fsync", full)
        with pytest.raises(CapacityError, match="it is unchanged"):
            writer.drop([RECORD])
        monkeypatch.undo()
        writer.append(replace(RECORD, index=3))
    assert [record.index for record in read_run(folder)[1]] == [2, 2, 3]
    assert not (folder / "records.jsonl.new").exists()


def test_going_on_is_noted_with_the_first_record(folder: Path) -> None:
    again = plan(created="later", git="def")
    with RunWriter(folder, again) as writer:
        assert read_run(folder)[0] == plan()
        writer.append(replace(RECORD, index=3))
    note = {"created": "later", "git": "def", "command": "forerun bench run"}
    assert read_run(folder)[0] == plan(resumed=[note])


def test_a_run_gets_more_rounds_but_not_fewer(folder: Path) -> None:
    with RunWriter(folder, plan(rounds=2)) as writer:
        assert writer.done == [RECORD, PEER_RECORD] and writer.manifest.rounds == 2
        writer.append(replace(RECORD, round=1))
    assert read_run(folder)[0].rounds == 2
    with pytest.raises(DataError, match="rounds: 2 against 1.*rounds can be added"):
        RunWriter(folder, plan())


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"threads": 1}, "threads: 2 against 1"),
        (
            {"target": "entropy_switch:small=draft"},
            "target: '' against 'entropy_switch:small=draft",
        ),
        ({"constraint": ["choice:options=a"]}, "constraint: [] against ['choice:options=a']"),
        (
            {"machine": {"cpu": "a cpu", "kernels": "torch", "device": "cuda:0"}},
            "machine.device: 'cpu' against 'cuda:0'",
        ),
        ({"sampling": {"n": 8}}, "sampling.n: 1 against 8"),
        ({"methods": ["plain"]}, "methods: ['plain', 'stand', 'peer'] against ['plain']"),
        (
            {"tasks": {"reasoning": {"examples": 4, "hash": "q"}}},
            "another plan, other prompts of task 'reasoning'",
        ),
        ({"model": {"name": "m", "hash": "other"}}, "model.hash: 'h' against 'other'"),
        (
            {"model": {"name": "m", "hash": "h", "weights_hash": "other"}},
            "model.weights_hash: 'w' against 'other'",
        ),
        (
            {"model": {"name": "big", "hash": "H", "weight_bytes": 9}, "dtype": "float32"},
            "model: 'm' against 'big'",
        ),
        (
            {"model": {"name": "m", "hash": "h", "weight_bytes": 9}, "dtype": "float32"},
            "dtype: 'bfloat16' against 'float32'",
        ),
        ({"tasks": {"code": {}}}, "tasks: ['reasoning'] against ['code']"),
        ({"texts": True}, "texts: False against True; give --out another folder"),
        ({"optimum": True}, "optimum: False against True"),
        ({"target": "entropy_switch"}, "target: '' against 'entropy_switch'"),
        ({"constraint": ["regex:pattern=a"]}, "constraint: [] against ['regex:pattern=a']"),
        ({"machine": {"cpu": "another", "kernels": "torch"}}, "machine.cpu: 'a cpu'"),
        ({"machine": {"cpu": "a cpu", "device": "cuda:0"}}, "machine.device: 'cpu'"),
    ],
)
def test_another_plan_is_refused(folder: Path, changes: dict[str, Any], said: str) -> None:
    known = {"texts": False, "optimum": False}
    run_writer.write_manifest(folder, plan(**known))
    with pytest.raises(DataError, match="give --out another folder") as caught:
        RunWriter(folder, plan(**known | changes))
    assert said in str(caught.value)
    with pytest.raises(DataError, match="give --out another folder"):
        run_writer.check_plan(folder, changes)  # what is known before a model is loaded


def test_what_an_older_run_does_not_tell_is_no_other_plan(folder: Path) -> None:
    with RunWriter(folder, plan(texts=True, optimum=False)) as writer:
        assert writer.done == [RECORD, PEER_RECORD] and writer.manifest.texts is None


def test_a_folder_is_looked_at_before_anything_slow(folder: Path, tmp_path: Path) -> None:
    run_writer.check_plan(tmp_path / "new", {"threads": 9})
    run_writer.check_plan(folder, {"threads": 2, "rounds": 3, "sampling": {"n": 1}})
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    with pytest.raises(DataError, match="rounds: 1 against 0.*rounds can be added"):
        run_writer.check_plan(folder, {"rounds": 0})
    with RunWriter(folder, plan()), pytest.raises(DataError, match="another process is writing"):
        run_writer.check_plan(folder, {})
    assert before == {path.name: path.read_bytes() for path in folder.iterdir()}
    (folder / "records.jsonl").write_text("{nonsense\n")
    with pytest.raises(DataError, match="line 1 is not a JSON object"):
        run_writer.check_plan(folder, {})
    (folder / "run.json").write_text("{")
    with pytest.raises(DataError, match="run.json cannot be read"):
        run_writer.check_plan(folder, {})
    (folder / "run.json").unlink()
    with pytest.raises(DataError, match="but no run.json; use another --out"):
        run_writer.check_plan(folder, {})


def test_blank_lines_say_nothing_and_are_counted(folder: Path) -> None:
    path = folder / "records.jsonl"
    first, second = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"\n" + first + b"  \n\n" + second + b"\n")
    assert read_run(folder)[1] == [RECORD, PEER_RECORD]
    path.write_bytes(first + b"\n" + b"nonsense\n")
    with pytest.raises(DataError, match="line 3 is not a JSON object"):
        read_run(folder)
    path.write_bytes(b"[" * 200_000 + b"\n")
    with pytest.raises(DataError, match="line 1 is not a JSON object"):
        read_run(folder)


@pytest.mark.parametrize("before", [None, 22])
def test_a_file_may_have_got_lines_that_take_no_part(folder: Path, before: int | None) -> None:
    """As in runs that began before it was told how many a file has."""
    told = {"examples": 4, "hash": "p"} | ({"in_file": before} if before else {})
    run_writer.write_manifest(folder, plan(tasks={"reasoning": told}))
    now = plan(tasks={"reasoning": told | {"in_file": 23}})
    with RunWriter(folder, now) as writer:
        assert writer.done == [RECORD, PEER_RECORD]
    with pytest.raises(DataError, match="tasks.reasoning.examples: 4 against 5"):
        RunWriter(folder, plan(tasks={"reasoning": told | {"examples": 5}}))


def test_a_model_may_have_moved(folder: Path) -> None:
    moved = {"path": "/there", "name": "n", "hash": "h"}  # a run without a hash of the weights
    for model in (moved, moved | {"weights_hash": "w"}):
        with RunWriter(folder, plan(model=model)) as writer:
            assert len(writer.done) == 2


def spoil(change: Callable[[dict[str, Any]], Any]) -> bytes:
    """A line of a record after a change."""
    value = json.loads(json.dumps(asdict(RECORD)))
    changed = change(value)
    return json.dumps(value if changed is None else changed).encode() + b"\n"


@pytest.mark.parametrize(
    ("line", "said"),
    [
        (b"{nonsense\n", "line 2 is not a JSON object"),
        (b'{"task": "reas\n', "delete the line; the same `forerun bench run` measures"),
        (b"[1]\n", "line 2: expected an object, got [1]"),
        (spoil(lambda v: v.pop("seconds") and None), "line 2: field 'seconds' is missing"),
        (
            spoil(lambda v: v.update(seconds="1")),
            "line 2: field 'seconds' takes a number, got \"1\"",
        ),
        (
            spoil(lambda v: v.update(generated=True)),
            "line 2: field 'generated' takes a whole number, got true",
        ),
        (spoil(lambda v: v.update(samples={})), "field 'samples' takes a list of objects, got {}"),
        (spoil(lambda v: v.update(score="1" * 200)), 'takes a number or null, got "111'),
        (spoil(lambda v: v.update(speed=1)), "line 2: unknown field 'speed'"),
        (
            spoil(lambda v: v["samples"][0].pop("tokens") and None),
            "line 2, sample 0: field 'tokens'",
        ),
        (
            spoil(lambda v: v["samples"][0].update(per_position=["1"])),
            "takes a list of whole numbers",
        ),
        (
            spoil(lambda v: v.update(memory={"weights": "big"})),
            'line 2: field \'memory\' takes an object of whole numbers, got {"weights": "big"}',
        ),
        (spoil(lambda v: None), "line 2: same prompt, method and round as line 1"),
    ],
)
def test_bad_lines_are_named(folder: Path, line: bytes, said: str) -> None:
    path = folder / "records.jsonl"
    path.write_bytes(path.read_bytes().splitlines(keepends=True)[0] + line)
    with pytest.raises(DataError) as caught:
        read_run(folder)
    assert said in str(caught.value) and len(str(caught.value)) < 400


@pytest.mark.parametrize(
    "path", sorted(RESULTS.glob("*/records.jsonl")), ids=lambda p: p.parent.name
)
def test_stored_records_are_read(path: Path) -> None:
    assert read_run(path.parent)[1]


def test_a_wrong_field_of_the_manifest_is_told_in_words(folder: Path) -> None:
    path = folder / "run.json"
    path.write_text(path.read_text().replace('"threads": 2', '"threads": "two"'))
    with pytest.raises(DataError) as caught:
        read_run(folder)
    said = f"{path}: field 'threads' takes a whole number, got \"two\"; {results.MANIFEST_FIX}"
    assert str(caught.value) == said


def test_biases_by_token_are_a_sampling(folder: Path) -> None:
    run_writer.write_manifest(folder, plan(sampling={"n": 1, "logit_bias": {"5": -1.5}}))
    assert results.sampling_of(read_run(folder)[0]).logit_bias == {5: -1.5}


def test_a_file_of_a_run_folder_means_the_folder(folder: Path) -> None:
    assert read_run(folder / "run.json") == read_run(folder / "records.jsonl") == read_run(folder)
    assert read_run(str(folder)) == read_run(folder)
    assert write_report(str(folder)) == write_report(folder)


def test_not_a_run_folder(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="is not a run folder"):
        read_run(tmp_path)
    (tmp_path / "run.json").write_text("{")
    with pytest.raises(DataError, match="cannot be read: .*; restore the file, or run again"):
        read_run(tmp_path)
    (tmp_path / "run.json").write_text('{"version": 9}')
    with pytest.raises(DataError, match="expected version 1, got 9; restore the file"):
        read_run(tmp_path)


def test_records_without_a_manifest_are_not_overwritten(folder: Path) -> None:
    (folder / "run.json").unlink()
    with pytest.raises(DataError, match="use another --out"):
        RunWriter(folder, plan())


def test_a_full_disk_keeps_what_is_there(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.write

    def full(file: int, data: bytes) -> int:
        if len(data) < 40:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return real(file, data[:-20])

    whole = (folder / "records.jsonl").read_bytes()
    with RunWriter(folder, plan()) as writer:
        monkeypatch.setattr(run_writer.os, "write", full)
        with pytest.raises(CapacityError, match="the 2 records written before are kept"):
            writer.append(replace(RECORD, index=3))
        monkeypatch.setattr(run_writer.os, "write", real)
        assert (folder / "records.jsonl").read_bytes() == whole
        writer.append(replace(RECORD, index=3))
    assert len(read_run(folder)[1]) == 3
