"""Run folders: written whole, read back equal, resumed, refused with the reason."""

from __future__ import annotations

import errno
import json
import math
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
SILENT = replace(
    RECORD, method="peer", samples=[SampleRecord(7)], prefill_seconds=None, limits=None
)


def plan(**changes: Any) -> Manifest:
    """A manifest."""
    made = Manifest(
        created="2026-11-20T12:00:00+00:00",
        forerun="0.1.0",
        git="abc",
        command="forerun bench run",
        model={"path": "/here", "name": "m", "hash": "h"},
        dtype="bfloat16",
        threads=2,
        seed=0,
        sampling={"n": 1},
        methods=["plain", "stand", "peer"],
        tasks={"reasoning": {"examples": 4, "hash": "p"}},
        machine={"cpu": "a cpu", "kernels": "torch"},
    )
    return replace(made, **changes)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A run folder with two records."""
    with RunWriter(tmp_path / "run", plan()) as writer:
        writer.append(RECORD, SILENT)
    return tmp_path / "run"


def test_what_is_written_is_read_back(folder: Path) -> None:
    manifest, records = read_run(folder)
    assert manifest == plan() and records == [RECORD, SILENT]
    lines = (folder / "records.jsonl").read_text().splitlines()
    assert json.loads(lines[0]) == asdict(RECORD)


def test_a_torn_last_line_is_dropped(folder: Path) -> None:
    path = folder / "records.jsonl"
    whole = path.read_bytes()
    path.write_bytes(whole + whole[:50])
    assert read_run(folder)[1] == [RECORD, SILENT]
    with RunWriter(folder, plan()) as writer:
        assert writer.done == [RECORD, SILENT]
        assert path.read_bytes() == whole
        writer.append(replace(RECORD, index=3))
    assert [record.index for record in read_run(folder)[1]] == [2, 2, 3]


def test_what_is_dropped_may_be_measured_again(folder: Path) -> None:
    again = replace(RECORD, seconds=9.0)
    with RunWriter(folder, plan()) as writer:
        writer.drop([RECORD])
        assert writer.done == [SILENT] == read_run(folder)[1]
        with pytest.raises(DataError, match="another process is writing"):
            RunWriter(folder, plan())
        writer.append(again)
        assert writer.done == [SILENT, again]
    assert read_run(folder)[1] == [SILENT, again]


def test_a_full_disk_drops_nothing(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(file: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with RunWriter(folder, plan()) as writer:
        monkeypatch.setattr(run_writer.os, "fsync", full)
        with pytest.raises(CapacityError, match="it is as it was"):
            writer.drop([RECORD])
        monkeypatch.undo()
        writer.append(replace(RECORD, index=3))
    assert [record.index for record in read_run(folder)[1]] == [2, 2, 3]
    assert not (folder / "records.jsonl.new").exists()


@pytest.mark.parametrize("error", [OSError(errno.ENOSPC, "full"), KeyboardInterrupt()])
def test_of_several_records_all_are_written_or_none(
    folder: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    write, before = os.write, (folder / "records.jsonl").read_bytes()
    calls: list[int] = []

    def short(file: int, data: bytes) -> int:
        if calls:
            raise error
        calls.append(1)
        return write(file, data[: data.index(b"\n") + 1])  # a whole line

    with RunWriter(folder, plan()) as writer:
        writer._resumed = None
        monkeypatch.setattr(run_writer.os, "write", short)
        with pytest.raises((CapacityError, KeyboardInterrupt)):
            writer.append(replace(RECORD, index=3), replace(RECORD, index=4))
        monkeypatch.undo()
    assert calls and (folder / "records.jsonl").read_bytes() == before


def test_going_on_is_noted_with_the_first_record(folder: Path) -> None:
    again = plan(created="later", git="def")
    with RunWriter(folder, again) as writer:
        assert read_run(folder)[0] == plan()
        writer.append(replace(RECORD, index=3))
    note = {"created": "later", "git": "def", "command": "forerun bench run"}
    assert read_run(folder)[0] == plan(resumed=[note])


def test_a_run_gets_more_rounds_but_not_fewer(folder: Path) -> None:
    with RunWriter(folder, plan(rounds=2)) as writer:
        assert writer.done == [RECORD, SILENT] and writer.manifest.rounds == 2
        writer.append(replace(RECORD, round=1))
    assert read_run(folder)[0].rounds == 2
    with pytest.raises(DataError, match="rounds: 2 against 1.*more rounds, not fewer"):
        RunWriter(folder, plan())


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"threads": 1}, "threads: 2 against 1"),
        ({"sampling": {"n": 8}}, "sampling.n: 1 against 8"),
        ({"methods": ["plain"]}, "methods: ['plain', 'stand', 'peer'] against ['plain']"),
        (
            {"tasks": {"reasoning": {"examples": 4, "hash": "q"}}},
            "prompts of task 'reasoning', though",
        ),
        ({"model": {"name": "m", "hash": "other"}}, "model.hash: 'h' against 'other'"),
        (
            {"model": {"name": "big", "hash": "H", "weight_bytes": 9}, "dtype": "float32"},
            "model: 'm' against 'big'",
        ),
        (
            {"model": {"name": "m", "hash": "h", "weight_bytes": 9}, "dtype": "float32"},
            "dtype: 'bfloat16' against 'float32'",
        ),
        ({"tasks": {"code": {}}}, "tasks: ['reasoning'] against ['code']"),
        ({"texts": True}, "texts: False against True; give --out another folder (--texts is of"),
        ({"optimum": True}, "optimum: False against True"),
        ({"machine": {"cpu": "another", "kernels": "torch"}}, "machine.cpu: 'a cpu'"),
    ],
)
def test_another_plan_is_refused(folder: Path, changes: dict[str, Any], said: str) -> None:
    told = {"texts": False, "optimum": False}
    run_writer.write_manifest(folder, plan(**told))
    with pytest.raises(DataError, match="give --out another folder") as caught:
        RunWriter(folder, plan(**told | changes))
    assert said in str(caught.value)
    with pytest.raises(DataError, match="give --out another folder"):
        run_writer.check_plan(folder, changes)  # what is known before a model is loaded


def test_what_an_older_run_does_not_tell_is_no_other_plan(folder: Path) -> None:
    with RunWriter(folder, plan(texts=True, optimum=False)) as writer:
        assert writer.done == [RECORD, SILENT] and writer.manifest.texts is None


def test_a_folder_is_looked_at_before_anything_slow(folder: Path, tmp_path: Path) -> None:
    run_writer.check_plan(tmp_path / "new", {"threads": 9})
    run_writer.check_plan(folder, {"threads": 2, "rounds": 3, "sampling": {"n": 1}})
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    with pytest.raises(DataError, match="rounds: 1 against 0.*more rounds, not fewer"):
        run_writer.check_plan(folder, {"rounds": 0})
    with RunWriter(folder, plan()), pytest.raises(DataError, match="another process is writing"):
        run_writer.check_plan(folder, {})
    assert before == {path.name: path.read_bytes() for path in folder.iterdir()}
    (folder / "records.jsonl").write_text("{nonsense\n")
    with pytest.raises(DataError, match="line 1: expected one JSON object per line"):
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
    assert read_run(folder)[1] == [RECORD, SILENT]
    path.write_bytes(first + b"\n" + b"nonsense\n")
    with pytest.raises(DataError, match="line 3: expected one JSON object"):
        read_run(folder)
    path.write_bytes(b"[" * 200_000 + b"\n")
    with pytest.raises(DataError, match="line 1: expected one JSON object"):
        read_run(folder)


@pytest.mark.parametrize("before", [None, 22])
def test_a_file_may_have_got_lines_that_take_no_part(folder: Path, before: int | None) -> None:
    """As in runs that began before it was told how many a file has."""
    told = {"examples": 4, "hash": "p"} | ({"in_file": before} if before else {})
    run_writer.write_manifest(folder, plan(tasks={"reasoning": told}))
    now = plan(tasks={"reasoning": told | {"in_file": 23}})
    with RunWriter(folder, now) as writer:
        assert writer.done == [RECORD, SILENT]
    with pytest.raises(DataError, match="tasks.reasoning.examples: 4 against 5"):
        RunWriter(folder, plan(tasks={"reasoning": told | {"examples": 5}}))


def test_a_model_may_have_moved(folder: Path) -> None:
    with RunWriter(folder, plan(model={"path": "/there", "name": "n", "hash": "h"})) as writer:
        assert len(writer.done) == 2


def test_two_writers_do_not_meet(folder: Path) -> None:
    with RunWriter(folder, plan()), pytest.raises(DataError, match="another process"):
        RunWriter(folder, plan())


def test_where_only_what_is_written_can_be_locked(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As over a network, where the lock is one of bytes."""
    fcntl = pytest.importorskip("fcntl")
    real = fcntl.flock

    def flock(file: int, how: int) -> None:
        if fcntl.fcntl(file, fcntl.F_GETFL) & os.O_ACCMODE == os.O_RDONLY:
            raise OSError(errno.EBADF, os.strerror(errno.EBADF))
        real(file, how)

    monkeypatch.setattr(fcntl, "flock", flock)
    run_writer.check_plan(folder, {})
    with RunWriter(folder, plan()), pytest.raises(DataError, match="another process is writing"):
        run_writer.check_plan(folder, {})


def test_a_lock_that_cannot_be_is_told_as_what_it_is(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fcntl = pytest.importorskip("fcntl")

    def flock(file: int, how: int) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", flock)
    said = r"cannot lock .*records\.jsonl: No locks available; give --out another place"
    for tries in (lambda: run_writer.check_plan(folder, {}), lambda: RunWriter(folder, plan())):
        with pytest.raises(DataError, match=said):
            tries()


def spoil(change: Callable[[dict[str, Any]], Any]) -> bytes:
    """A line of a record after a change."""
    value = json.loads(json.dumps(asdict(RECORD)))
    changed = change(value)
    return json.dumps(value if changed is None else changed).encode() + b"\n"


@pytest.mark.parametrize(
    ("line", "said"),
    [
        (b"{nonsense\n", "line 2: expected one JSON object per line"),
        (b'{"task": "reas\n', "delete this line, and the same `forerun bench run` measures"),
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
        (spoil(lambda v: None), "line 2: the same prompt, method and round as line 1"),
    ],
)
def test_bad_lines_are_named(folder: Path, line: bytes, said: str) -> None:
    path = folder / "records.jsonl"
    path.write_bytes(path.read_bytes().splitlines(keepends=True)[0] + line)
    with pytest.raises(DataError) as caught:
        read_run(folder)
    assert said in str(caught.value) and len(str(caught.value)) < 400


def in_sample(**changes: Any) -> Callable[[dict[str, Any]], Any]:
    """A change of the first sample."""
    return lambda value: value["samples"][0].update(changes)


ENDLESS = 10**400  # JSON may hold what no float does
FIELDS = ("index", "round", "order", "num_prompt_tokens", "seconds", "generated", "prefill_seconds")
COUNTED = ("tokens", "passes", "drafted", "accepted", "examined")
BESIDE = {"examined": 5, "accepted": 3, "best": 3.5, "unknown": 0}


def headroom(**changes: Any) -> Callable[[dict[str, Any]], Any]:
    """A change of what could have been accepted."""
    return lambda value: value.update(headroom=BESIDE | changes)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        *((lambda v, n=n: v.update({n: -1}), f"line 2: field '{n}' takes") for n in FIELDS),
        *((in_sample(**{n: -1}), f"line 2, sample 0: field '{n}' takes") for n in COUNTED),
        (in_sample(per_position=[5, -1]), "sample 0: field 'per_position': 1 takes finite"),
        (in_sample(seconds={"draft": -0.1}), "field 'seconds': 'draft' takes finite"),
        (in_sample(seconds={"draft": math.nan}), "numbers from 0 to 1e+15, got NaN"),
        (lambda v: v.update(seconds=math.nan), "field 'seconds' takes finite numbers"),
        (lambda v: v.update(seconds=math.inf), "from 0 to 1e+15, got Infinity"),
        (lambda v: v.update(seconds=ENDLESS), "field 'seconds' takes finite numbers"),
        (lambda v: v.update(seconds=1e-308), "'seconds' takes finite numbers from 1e-06 to 1e+09"),
        (lambda v: v.update(seconds=1e12), "'seconds' takes finite numbers from 1e-06 to 1e+09"),
        (lambda v: v.update(seconds=0.5, prefill_seconds=0), "what the parts of its samples take"),
        (lambda v: v.update(prefill_seconds=math.nan), "field 'prefill_seconds' takes"),
        (lambda v: v.update(prefill_seconds=1.5), "takes less than 'seconds', 1.5, got 1.5"),
        (lambda v: v.update(memory={"weights": -5}), "line 2: field 'memory': 'weights'"),
        (lambda v: v.update(limits={"taken": -0.1}), "field 'limits': 'taken' takes finite"),
        (lambda v: v.update(limits={"taken": math.nan}), "'taken' takes finite numbers"),
        (lambda v: v.update(limits={"read_gb_s": 0}), "'read_gb_s' takes finite numbers ab"),
        (headroom(best=-1), "field 'headroom': 'best' takes finite numbers"),
        (headroom(unknown=math.nan), "field 'headroom': 'unknown' takes finite numbers"),
        (headroom(best=6), "'best' takes at most what was examined, 5, got 6"),
        (lambda v: v.update(headroom={"best": 1}), "takes examined, accepted, best, unknown, got"),
        (lambda v: v.update(score=7), "field 'score' takes finite numbers from 0 to 1, got 7"),
        (lambda v: v.update(majority=3), "field 'majority' takes finite numbers from 0 to 1"),
        (in_sample(score=-0.5), "sample 0: field 'score' takes finite numbers from 0 to 1"),
        (lambda v: v.update(task="chess"), "'task' takes the name of a task of run.json, got"),
        (lambda v: v.update(method="st"), "'method' takes the name of a method of run.json, got"),
        (lambda v: v.update(index=4), "'index' takes numbers below that of the task's prompts"),
        (lambda v: v.update(round=1), "'round' takes numbers below the 1 'rounds' of run.json"),
        (lambda v: v.update(samples=[]), "takes 1, the n of run.json, got 0"),
        (
            lambda v: v.update(samples=2 * v["samples"], generated=14),
            "field 'samples': their number takes 1, the n of run.json, got 2",
        ),
        (in_sample(passes=0), "field 'passes' takes 1 or more, as there are tokens, got 0"),
        (in_sample(passes=10**12), "takes at most the 'max_new_tokens' of run.json, 20, got 1000"),
        (in_sample(accepted=10), "field 'accepted' takes at most 'drafted', 9, got 10"),
        (in_sample(drafted=3), "field 'accepted' takes at most 'drafted', 3, got 4"),
        (in_sample(examined=3), "field 'accepted' takes at most 'examined', 3, got 4"),
        (
            in_sample(per_position=[3]),
            "field 'per_position' takes counts that add up to 'accepted', 4, got [3]",
        ),
        (in_sample(tokens=6), "line 2: field 'generated' takes the sum of its samples, 6, got 7"),
        (lambda v: v.update(generated=8), "takes the sum of its samples, 7, got 8"),
    ],
)
def test_counts_that_no_run_has_are_refused(
    folder: Path, change: Callable[[dict[str, Any]], Any], said: str
) -> None:
    path = folder / "records.jsonl"
    path.write_bytes(path.read_bytes().splitlines(keepends=True)[1] + spoil(change))
    run_writer.write_manifest(folder, plan(sampling={"n": 1, "max_new_tokens": 20}))
    with pytest.raises(DataError) as caught:
        read_run(folder)
    assert str(caught.value).startswith(f"{path}, line 2") and said in str(caught.value)
    assert "delete this line" in str(caught.value) and len(str(caught.value)) < 400


@pytest.mark.parametrize(
    "changes",
    [
        {"samples": [SampleRecord(7, 3, 9, 4)]},  # as peers tell: depths and examined are unknown
        {"samples": [SampleRecord(7, 3, 0, 0, 0)], "prefill_seconds": 0},
        {"samples": [], "error": "it broke", "seconds": 0.0, "generated": 0},
        {"error": "it broke", "generated": 0},
        {"headroom": BESIDE, "limits": {"read_gb_s": 30, "taken": -0.0}},
    ],
)
def test_counts_that_are_not_told_pass(folder: Path, changes: dict[str, Any]) -> None:
    record = replace(RECORD, index=1, **changes)
    with RunWriter(folder, plan()) as writer:
        writer.append(record)
    assert read_run(folder)[1][-1] == record


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
    said = f"{path}: field 'threads' takes a whole number, got \"two\"; {results.MEND}"
    assert str(caught.value) == said


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        *(
            ({"model": {"name": "m", n: bad}}, f"field 'model': '{n}' takes finite numbers")
            for n in ("pass_bytes", "kv_bytes_per_token", "flops_per_row")
            for bad in ("x", None, -1)
        ),
        ({"model": {"name": None}}, "field 'model': 'name' takes texts, got null"),
        ({"threads": -1}, "field 'threads' takes whole numbers from 1 to 1e+15, got -1"),
        ({"rounds": 0}, "field 'rounds' takes whole numbers from 1"),
        ({"turns": -1}, "field 'turns' takes whole numbers from 0"),
        ({"seed": -1}, "field 'seed' takes whole numbers from 0, got -1"),
        ({"sampling": {"temperature": -1}}, "field 'sampling': temperature must be a finite"),
        ({"sampling": {"n": "x"}}, "field 'sampling': n must be an integer"),
        ({"sampling": {"heat": 1}}, "field 'sampling': unknown field 'heat'; known: banned_"),
        ({"sampling": {"top": 1}}, "field 'sampling': unknown field 'top'; did you mean"),
        ({"sampling": {"logit_bias": {"x": 1}}}, "logit_bias must map token ids to biases, got"),
        (
            {"sampling": {"logit_bias": [1]}},
            "logit_bias must be token id -> bias within 1e30, got [1]",
        ),
        (
            {"sampling": {"stop": 1.5}},
            "field 'sampling': stop must be non-empty texts in UTF-8, got 1.5",
        ),
        (
            {"sampling": {"presence_penalty": ENDLESS}},
            "presence_penalty must be a number within 1e30",
        ),
        ({"tasks": {}}, "field 'tasks': their number takes whole numbers from 1"),
        ({"tasks": {"a": {}}}, "'tasks': 'a' takes an object with 'examples' and 'hash', got {}"),
        *(
            ({"tasks": {"a": {"examples": bad, "hash": "p"}}}, "'a': 'examples' takes whole")
            for bad in ("x", 2.5, True, None, 0)
        ),
        ({"tasks": {"a": {"examples": 2, "hash": 1}}}, "'a': 'hash' takes texts, got 1"),
        (
            {"tasks": {"a": {"examples": 2, "hash": "p", "left_out": 1.5}}},
            "'a': 'left_out' takes whole numbers from 0 to 1e+15, got 1.5",
        ),
        ({"methods": ["plain", "plain"]}, "field 'methods' takes one method or more, each once"),
        ({"limits": {"read_gb_s": 0}}, "field 'limits': 'read_gb_s' takes finite numbers"),
        *(
            ({"cost_curve": {rows: 1}}, "field 'cost_curve' takes rows as names")
            for rows in ("one", "0", "01", "\u0663", "9" * 5000)
        ),
        ({"peers": {"vllm": {"restarts": 0.5}}}, "'vllm': 'restarts' takes whole numbers from 0"),
        ({"resumed": [{"again": "few"}]}, "0: 'again' takes whole numbers from 0"),
        ({"peers": {"vllm": 3}}, "field 'peers': 'vllm' takes an object of versions"),
        ({"machine": {"cache_bytes": "x"}}, "field 'machine': 'cache_bytes' takes finite"),
    ],
)
def test_a_manifest_that_no_run_has_is_refused(
    folder: Path, changes: dict[str, Any], said: str
) -> None:
    run_writer.write_manifest(folder, plan(**changes))
    with pytest.raises(DataError) as caught:
        read_run(folder)
    assert str(caught.value).startswith(f"{folder / 'run.json'}: ") and said in str(caught.value)


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
    with pytest.raises(DataError, match="cannot be read: .*; run again with another --out, or put"):
        read_run(tmp_path)
    (tmp_path / "run.json").write_text('{"version": 9}')
    with pytest.raises(DataError, match="expected version 1, got 9; run again with another --out"):
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


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    path = tmp_path / "file"  # as in a read-only file system, removing is refused as well
    path.write_text("")
    with pytest.raises(CapacityError) as caught:
        run_writer.write_manifest(path, plan())
    said = f"cannot write run.json into the folder {path}: File exists; move what"
    assert str(caught.value).startswith(said)


def test_the_manifest_is_replaced_whole(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(file: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with RunWriter(folder, plan()) as writer:
        monkeypatch.setattr(run_writer.os, "fsync", full)
        with pytest.raises(CapacityError, match=r"run\.json"):
            writer.update(plan(peers={"vllm": "missing"}))
    assert read_run(folder)[0] == plan()
    assert not list(folder.glob(".*.part"))
