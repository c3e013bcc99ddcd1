"""`forerun bench` as users call it, on a tiny model; a killed run goes on where it stopped."""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from command import Call
from sample_run import write_run

import forerun
from forerun.bench import cpu_load, hardware_limits, memory_pressure
from forerun.bench.local_runner import LocalMethod, LocalRun
from forerun.bench.planning import RunRequest, choose
from forerun.bench.results import read_run
from forerun.cli import loading
from forerun.tasks import get_task

SMALL = ("-n", 2, "--max-new-tokens", 6, "--threads", 1)


@pytest.fixture
def bench(call: Call, unmeasured: None, bench_words: list[Any], tmp_path: Path) -> Call:
    """`forerun bench run` on two prompts, into `run` in the test's folder."""
    return lambda *more: call("bench", "run", "--out", tmp_path / "run", *bench_words, *more)


@pytest.fixture
def run(finished_run: Path, tmp_path: Path) -> Path:
    """A copy of a finished run of plain and stand, where `bench` finds it."""
    return shutil.copytree(finished_run, tmp_path / "run")


def environment() -> dict[str, str]:
    """The environment of a fresh interpreter that finds the package."""
    source = str(Path(forerun.__file__).parents[1])
    return os.environ | {"PYTHONPATH": source, "OMP_NUM_THREADS": "1"}


def test_memory_of_a_draft_model_is_recorded(
    bench: Call, bench_model: Path, tmp_path: Path
) -> None:
    status, _, err = bench("--examples", 1, "--methods", f"plain,draft_model:model={bench_model}")
    assert status == 0, err
    _, records = read_run(tmp_path / "run")
    held = next(record.memory for record in records if record.method != "plain")
    assert [size > 0 for what, size in held.items() if "draft" in what and "weights" in what]


def test_a_run_is_written_summed_up_and_done_once(bench: Call, tmp_path: Path) -> None:
    status, out, err = bench("--methods", "plain,stand,prompt_lookup,stand:nodes=4,batch=2")
    assert status == 0, err
    for name in ("plain", "stand", "prompt_lookup", "stand:nodes=4,batch=2"):
        assert name in out
    assert "8/8 " in err and "0 s left" in err and "tokens/s" in err
    manifest, records = read_run(tmp_path / "run")
    assert manifest.limits == {"read_gb_s": 12.5, "gflop_s": 100.0}
    assert list(manifest.cost_curve) == ["1", "4"]
    assert manifest.command.startswith("forerun bench run --out=") and "-n 2" in manifest.command
    assert manifest.threads == 1 and manifest.dtype == "float32"
    assert manifest.model["parameters"] > 0 and manifest.model["pass_bytes"] > 0
    assert [record.method for record in records][:4] == manifest.methods
    assert [record.method for record in records][4:] == manifest.methods[::-1]
    assert all(record.error is None and len(record.samples) == 2 for record in records)
    lines = (tmp_path / "run" / "records.jsonl").read_bytes()
    status, again, err = bench("--methods", "plain,stand,prompt_lookup,stand:nodes=4,batch=2")
    assert status == 0 and again == out and "starting" not in err
    assert (tmp_path / "run" / "records.jsonl").read_bytes() == lines
    assert read_run(tmp_path / "run")[0] == manifest


def test_methods_that_take_turns_say_what_they_say_alone(
    bench: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    began: list[list[int]] = []
    advance = LocalRun.advance

    def noted(running: LocalRun, most: int) -> bool:
        began.append([one.tokens for one in running_now])
        return advance(running, most)

    def begun(*given: Any) -> LocalRun:
        running_now.append(begin(*given))
        return running_now[-1]

    running_now: list[LocalRun] = []
    begin = LocalMethod.begin
    monkeypatch.setattr(LocalMethod, "begin", begun)
    methods = ("--methods", "plain,stand:nodes=4,prompt_lookup", "--texts")
    assert bench(*methods)[0] == 0
    alone = {record.key: record for record in read_run(tmp_path / "run")[1]}
    (tmp_path / "run").rename(tmp_path / "alone")
    running_now.clear()
    monkeypatch.setattr(LocalRun, "advance", noted)
    status, _, err = bench(*methods, "--turns", 2)
    assert status == 0, err
    manifest, records = read_run(tmp_path / "run")
    assert manifest.turns == 2 and len(records) == len(alone) == 6
    assert sorted(record.order for record in records) == list(range(6))
    for record in records:
        said = [(s.text, s.tokens, s.passes, s.accepted) for s in record.samples]
        assert said == [(s.text, s.tokens, s.passes, s.accepted) for s in alone[record.key].samples]
        assert record.is_shared and record.prefill_seconds and record.seconds > 0
        assert not alone[record.key].is_shared
    mixed = [now for now in began if len(now) == 3 and min(now) > 0 and max(now) < 12]
    assert mixed, "they decode at the same time"
    assert "another plan, turns: 2 against 0" in bench(*methods)[2]
    assert "--turns must be from 0" in bench(*methods, "--turns", -1)[2]


def test_who_fails_while_taking_turns_is_recorded_and_the_others_go_on(
    bench: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    advance = LocalRun.advance

    def failing(running: LocalRun, most: int) -> bool:
        if most == 2 and running._own.name == "stand" and running.tokens:  # not its warm-up
            raise RuntimeError("no memory left")
        return advance(running, most)

    monkeypatch.setattr(LocalRun, "advance", failing)
    status, _, err = bench("--methods", "plain,stand,prompt_lookup", "--turns", 2)
    assert status == 0, err
    records = read_run(tmp_path / "run")[1]
    failed = {record.method for record in records if record.error}
    assert failed == {"stand"} and len(records) == 6
    assert all("no memory left" in record.error for record in records if record.error)
    assert all(record.generated == 12 for record in records if not record.error)
    assert "2 of 6 failed; --retry measures them again" in err
    monkeypatch.setattr(LocalRun, "advance", advance)
    again = ("--methods", "plain,stand,prompt_lookup", "--turns", 2)
    assert "2 of 6 failed" in bench(*again)[2], "not unless that is asked for"
    status, _, err = bench(*again, "--retry")
    assert status == 0 and "failed" not in err
    mended = read_run(tmp_path / "run")[1]
    assert len(mended) == 6 and not any(record.error for record in mended)
    assert all(record.is_shared for record in mended), "who took turns is measured anew together"


def test_who_took_turns_with_a_lost_line_is_measured_anew(bench: Call, tmp_path: Path) -> None:
    methods = ("--methods", "plain,stand,prompt_lookup", "--turns", 2)
    assert bench(*methods)[0] == 0
    path = tmp_path / "run" / "records.jsonl"
    lines = path.read_bytes().splitlines(keepends=True)
    assert len(lines) == 6
    path.write_bytes(b"".join(lines[:-1]) + lines[-1][:50])  # torn, as by a crash
    assert bench(*methods)[0] == 0
    anew = path.read_bytes().splitlines(keepends=True)
    assert len(anew) == 6 and anew[:3] == lines[:3] and not set(anew[3:]) & set(lines[3:])
    assert all(record.in_turns == 3 for record in read_run(tmp_path / "run")[1])


def test_a_run_in_which_all_failed_ends_with_status_1(
    bench: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    advance = LocalRun.advance

    def failing(running: LocalRun, most: int | None) -> bool:
        if running.tokens:
            raise RuntimeError("no memory left")
        return advance(running, most)

    monkeypatch.setattr(LocalRun, "advance", failing)
    status, _, err = bench("--methods", "plain,stand", "--turns", 2)
    assert status == 1 and "4 of 4 failed" in err


def test_json_summary(bench: Call, run: Path) -> None:
    status, out, _ = bench("--json", "--methods", "plain,stand")
    found = json.loads(out)
    (task,) = found["tasks"].values()
    assert status == 0 and list(task) == ["plain", "stand"]
    assert task["plain"]["speed_up"]["ratio"] == 1.0 and task["plain"]["tau"] == 1.0
    assert task["stand"]["prompts"] == 2 and task["stand"]["speed_up"]["prompts"] == 2
    assert task["stand"]["measured"] == 2 and found["rounds"] == 1 and found["disturbed"] == 0
    assert task["stand"]["failed"] == 0 and found["cost_curve"].keys() == {"1", "4"}


@pytest.fixture
def many(tmp_path: Path) -> Path:
    """More prompts than a run takes of a task that makes its own."""
    path = tmp_path / "many.jsonl"
    lines = [{"prompt": f"the cat {i}", "answer": "not this"} for i in range(22)]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def test_a_file_is_measured_whole_and_a_generated_task_is_not(many: Path) -> None:
    tokenizer = SimpleNamespace(has_chat_template=False, encode=str.split)
    model: Any = SimpleNamespace(target=SimpleNamespace(context=10_000), tokenizer=tokenizer)
    for name, count in ((f"file:{many}", 22), ("story", 20)):
        found = choose(name, get_task(name), RunRequest(["plain"], [name]), model)
        assert len(found.examples) == count and found.to_dict().keys() == {"examples", "hash"}


def test_prompts_of_a_file_that_take_no_part_are_told(
    call: Call, unmeasured: None, bench_model: Path, many: Path, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    words = [
        "bench",
        "run",
        "--model",
        bench_model,
        "--tasks",
        f"file:{many}",
        "--methods",
        "plain",
    ]
    words += ["-n", 1, "--max-new-tokens", 2, "--threads", 1, "--examples", 3, "--out", run]
    status, out, err = call(*words)
    said = f"file:{many}: 3 of 22 prompts measured; 19 beyond --examples."
    assert status == 0 and said in out and said in err
    assert said in json.loads(call(*words, "--json")[1])["notes"]
    assert call("bench", "report", run)[0] == 0
    text = (run / "report.md").read_text()
    assert "3 of 22 prompts measured" in text and "\n3 of 22 prompts, 1 sample" in text


def test_more_rounds_go_on_in_the_same_folder(bench: Call, run: Path) -> None:
    first = (run / "records.jsonl").read_bytes()
    status, out, err = bench("--rounds", 2)
    assert status == 0 and "8/8 " in err and "2 rounds" in out, err
    cells = out.split("plain")[1].split("│")
    assert cells[1].strip() == "2"  # prompts, not measurements
    assert (run / "records.jsonl").read_bytes().startswith(first)
    records = read_run(run)[1]
    assert [record.round for record in records] == [0] * 4 + [1] * 4
    assert sorted(record.order for record in records) == list(range(8))
    assert "rounds can be added" in bench("--rounds", 1)[2]


def test_a_busy_machine_is_told_and_its_times_do_not_count(
    bench: Call, call: Call, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    speeds = iter([30.0, *[30.0] * 4, 4.0, *[30.0] * 7])  # before the run, then beside each record
    monkeypatch.setattr(hardware_limits, "read_bandwidth", lambda threads, **options: next(speeds))
    monkeypatch.setattr(memory_pressure, "pressure_between", lambda *_: {})  # other rules see none
    monkeypatch.setattr(cpu_load.CoreLossMeter, "lost", lambda meter: None)
    status, out, err = bench("--examples", 6)
    assert status == 0, err
    told = "Of 12 times, 2 were disturbed and left out of the speeds"
    assert "The machine was busy" in out and told in " ".join(out.split())
    path = tmp_path / "run" / "records.jsonl"
    records = [json.loads(line) for line in path.read_text().splitlines()]
    for record in records:  # whatever these say, the headline must not rest on them
        if record["order"] in (3, 4):
            record["seconds"] *= 1e6
    lines = "".join(json.dumps(record) + "\n" for record in records)
    path.write_text(lines)
    assert call("bench", "report", tmp_path / "run")[0] == 0
    text = (tmp_path / "run" / "report.md").read_text()
    assert told in text and not any("0000x" in line for line in text.splitlines())


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (("--seed", 3), "seed: 0 against 3; give --out another folder"),
        (("--texts",), "texts: False against True; give --out another folder"),
        (("--optimum",), "optimum: False against True"),
        (("--constraint", "choice:options=a+b"), "constraint: [] against ['choice:options=a+b']"),
    ],
)
def test_another_plan_in_the_folder_is_refused_before_anything_is_loaded(
    bench: Call, run: Path, monkeypatch: pytest.MonkeyPatch, changes: tuple[Any, ...], words: str
) -> None:
    monkeypatch.setattr(loading, "load", lambda *_, **__: pytest.fail("loaded"))
    status, out, err = bench(*changes)
    assert status == 2 and not out
    assert f"another plan, {words}" in err


def test_a_peer_that_is_not_there_is_named_and_the_run_goes_on(bench: Call, tmp_path: Path) -> None:
    words = ("--methods", "plain", "--peers", "vllm", "--peers-dir", tmp_path / "no")
    status, _, err = bench(*words)
    assert status == 2 and not (tmp_path / "run").exists()
    assert f"--peers-dir {tmp_path / 'no'} is not a folder; give" in err
    (tmp_path / "no").mkdir()
    status, out, err = bench(*words)
    assert status == 0, err
    rows = [line for line in out.splitlines() if "vllm" in line]
    assert len(rows) == 1 and rows[0].startswith("Left out: vllm (no environment in "), rows
    assert "outside pass: share of time" in " ".join(out.split())
    why = f"no environment in {tmp_path / 'no'}; run `make peers`"
    assert f"vllm is left out: {why}" in err and f"Left out: vllm ({why})." in out
    manifest, records = read_run(tmp_path / "run")
    assert manifest.peers["vllm"] == why
    assert {record.method for record in records} == {"plain"}


def test_an_interrupted_run_says_so(
    bench: Call, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from forerun.bench.local_runner import LocalMethod

    real, count = LocalMethod.begin, []

    def begin(self: LocalMethod, *words: Any) -> Any:
        count.append(1)
        if len(count) == 3:
            raise KeyboardInterrupt
        return real(self, *words)

    monkeypatch.setattr(LocalMethod, "begin", begin)
    status, out, err = bench()
    assert status == 130 and "interrupted: 2 records kept; the same command resumes the run" in err
    assert "plain" in out and len(read_run(tmp_path / "run")[1]) == 2


@pytest.fixture
def unloaded(monkeypatch: pytest.MonkeyPatch) -> None:
    """No model is loaded: Ctrl-C comes where one would be."""

    def load(*words: Any, **more: Any) -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr(loading, "load", load)


def refused(bench: Call, out: Path) -> str:
    """The one line that refuses a run folder."""
    status, printed, err = bench("--out", out)
    assert (status, printed, err.count("\n")) == (2, "", 1) and err.startswith("error: "), err
    return err


def test_a_folder_that_cannot_be_made_is_refused_before_a_model_is_loaded(
    bench: Call, unloaded: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "file"
    file.write_text("mine")
    for out in (file / "run", file / "deep" / "run"):
        said = f"cannot create the run folder {out}: Not a directory; use another --out"
        assert said in refused(bench, out)
    assert file.read_text() == "mine"
    link = tmp_path / "link"
    link.symlink_to(tmp_path / "gone" / "run")
    assert f"cannot create the run folder {link}: File exists" in refused(bench, link)
    make = Path.mkdir

    def denied(self: Path, *words: Any, **more: Any) -> None:
        if self.name == "run":
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(self))
        make(self, *words, **more)

    monkeypatch.setattr(Path, "mkdir", denied)
    assert "run: Permission denied; use another --out" in refused(bench, tmp_path / "run")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "link"]


def test_a_folder_of_other_things_is_refused(bench: Call, unloaded: None, tmp_path: Path) -> None:
    home = tmp_path / "home"
    home.mkdir()
    for name in ("letter.txt", "a picture"):
        (home / name).write_text("mine")
    said = f"{home} is not a run folder and contains 'a picture' and 1 more; use a new or empty"
    assert said in refused(bench, home)
    assert sorted(path.name for path in home.iterdir()) == ["a picture", "letter.txt"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--methods", "plain,stnd"), "unknown method 'stnd'; did you mean 'stand'"),
        (("--methods", "plain,plain"), "named twice"),
        (("--methods", "draft_model"), "needs model"),
        (("--methods", ""), "no method is named, got ''; give one or more"),
        (("--tasks", ""), "no task is named, got ''; give one or more"),
        (("--peers", ","), "no peer is named, got ','; give one or more"),
        (("--peers", "transformrs"), "did you mean 'transformers'"),
        (("--peers", "nope"), "unknown peer 'nope'; known: llama_cpp, openvino, transformers"),
        (("--tasks", "reasonig"), "unknown task 'reasonig'; did you mean 'reasoning'"),
        (("--examples", 0), "--examples must be from 1 to 65536, got 0"),
        (("--examples", 10**9), "--examples must be from 1 to 65536, got 1000000000"),
        (("--threads", 0), "--threads must be from 1"),
        (("-n", 10**9), "-n must be at most 65536, got 1000000000"),
        (("--temperature", -1), "temperature must be"),
        (
            ("--peers", "vllm", "--seed", 1 << 63),
            "peers take seed up to 4611686018427387904, got 9",
        ),
        (("--model", "no/such/folder/here"), "there is no model folder"),
    ],
)
def test_bad_input_is_one_line(call: Call, tmp_path: Path, words: Any, said: str) -> None:
    status, out, err = call("bench", "run", "--out", tmp_path / "run", *words)
    errors = [line for line in err.splitlines() if not line.startswith("#")]
    assert (status, out, len(errors)) == (2, "", 1), err
    assert said in errors[0]
    assert not (tmp_path / "run").exists()


def test_compare_says_what_became_slower(call: Call, finished_run: Path, tmp_path: Path) -> None:
    before, after = finished_run, tmp_path / "slow"
    after.mkdir()
    (after / "run.json").write_bytes((before / "run.json").read_bytes())
    records = [json.loads(line) for line in (before / "records.jsonl").read_text().splitlines()]
    for record in records:
        record["seconds"] *= 2.0 if record["method"] == "stand" else 1.0
    (after / "records.jsonl").write_text("".join(json.dumps(r) + "\n" for r in records))
    status, out, _ = call("bench", "compare", before, before)
    assert status == 0 and "no ratio is below 0.950" in out
    assert call("bench", "compare", before / "run.json", before)[:2] == (status, out)
    status, out, _ = call("bench", "compare", before, after)
    assert status == 1 and "slower" in out and "0.500" in out
    status, out, _ = call("bench", "compare", before, after, "--relative", "--json")
    assert status == 1 and [c["method"] for c in json.loads(out)["changes"]] == ["stand"]
    assert call("bench", "compare", before, after, "--max-slowdown", 0.6)[0] == 0
    assert call("bench", "compare", before, after, "--methods", "plain")[0] == 0
    assert call("bench", "compare", before, after, "--methods", "plain,stand")[0] == 1
    (after / "records.jsonl").write_text("".join(json.dumps(r) + "\n" for r in records[:3]))
    status, _, err = call("bench", "compare", before, before, "--methods", "")
    assert status == 2 and "no method is named, got ''; give one or more" in err
    status, out, _ = call("bench", "compare", before, after, "--max-slowdown", 0.6)
    lacking = "the second run is incomplete: 3 of 4 planned measurements exist"
    assert status == 1 and f"worse: {lacking}" in out and "no ratio is below" in out
    status, out, _ = call("bench", "compare", before, after, "--max-slowdown", 0.6, "--json")
    found = json.loads(out)
    assert status == 1 and (found["worse"], found["slower"]) == (True, False)
    assert found["losses"][0].startswith(lacking)
    status, _, err = call("bench", "compare", before, tmp_path)
    assert status == 2 and "is not a run folder" in err


def test_profile_prints_a_breakdown(
    call: Call, unmeasured: None, bench_model: Path, bench_prompts: Path
) -> None:
    words = ("--model", bench_model, "--task", f"file:{bench_prompts}", "--rounds", 1, *SMALL)
    status, out, err = call("bench", "profile", *words)
    assert status == 0, err
    for part in ("draft", "forward: ", "verify", "Python rest"):
        assert part in out
    text = " ".join(out.split())
    assert re.search("step without timers, [0-9.]+% outside the target's pass .quote this sh", text)
    assert re.search("in the lines above, [0-9.]+% outside the pass; the timers' ", text)
    status, out, _ = call("bench", "profile", *words, "--drafter", "plain", "--json")
    assert status == 0 and json.loads(out)["lines"]
    status, _, err = call("bench", "profile", *words, "--rounds", 10**9)
    assert status == 2 and "--rounds must be from 1 to 65536" in err
    status, _, err = call("bench", "profile", "--drafter", "")
    assert status == 2 and "no method is named, got ''" in err
    status, _, err = call("bench", "profile", "--drafter", "stand:nods=3")
    assert status == 2 and "did you mean 'nodes'" in err


def test_tasks_are_listed(call: Call) -> None:
    status, out, _ = call("bench", "tasks")
    assert status == 0 and "reasoning" in out and "word problems" in out
    assert "reasoning" in json.loads(call("bench", "tasks", "--json")[1])


def test_report_and_inflate_hand_over(
    call: Call, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    status, _, err = call("bench", "report", tmp_path)
    assert status == 2 and "is not a run folder" in err
    run = write_run(tmp_path / "run")
    status, out, err = call("bench", "report", run / "run.json")
    assert status == 0 and out.startswith(str(run / "report.html")), err
    status, _, err = call("bench", "inflate", "reasoner", tmp_path / "big", "--size", "0.4B")
    assert status == 2 and "0.4B" in err


def test_help_does_not_import_torch() -> None:
    code = (
        "import sys\nfrom forerun.cli.main import main\n"
        "for words in (['--help'], ['bench', '--help'], ['bench', 'run', '--help']):\n"
        "    main(words)\n"
        "assert not {'torch', 'numba', 'transformers', 'numpy'} & set(sys.modules), 'heavy'\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, env=environment())


def test_a_killed_run_goes_on_where_it_stopped(
    call: Call, unmeasured: None, bench_model: Path, bench_prompts: Path, tmp_path: Path
) -> None:
    """A real process is killed in the middle; at most the prompt that ran is lost."""
    words = ["bench", "run", "--out", tmp_path / "run", "--model", bench_model, "--tasks"]
    words += [
        f"file:{bench_prompts}",
        "--examples",
        6,
        "-n",
        2,
        "--max-new-tokens",
        100,
        "--threads",
        1,
    ]
    command = [sys.executable, "-m", "forerun.cli.main", *map(str, words)]
    records = tmp_path / "run" / "records.jsonl"
    quiet = subprocess.DEVNULL
    with subprocess.Popen(command, env=environment(), stdout=quiet, stderr=quiet) as process:
        deadline = time.monotonic() + 300
        while not records.exists() or records.read_bytes().count(b"\n") < 2:
            assert process.poll() is None and time.monotonic() < deadline
            time.sleep(0.01)
        process.send_signal(signal.SIGKILL)
    assert process.returncode == -signal.SIGKILL
    before = records.read_bytes()
    whole = before[: before.rfind(b"\n") + 1]
    assert 2 <= whole.count(b"\n") < 12, "it was killed too late to show anything"
    records.write_bytes(whole + whole[:77])  # as a kill within a write leaves it
    status, _, err = call(*words)
    assert status == 0, err
    assert records.read_bytes().startswith(whole)
    manifest, found = read_run(tmp_path / "run")
    assert len({record.key for record in found}) == len(found) == 12
    assert sorted(record.order for record in found) == list(range(12))
    assert len(manifest.resumed) == 1


def test_answers_in_spec_bench_format(
    call: Call, unmeasured: None, bench_model: Path, tmp_path: Path
) -> None:
    questions = tmp_path / "question.jsonl"
    asked = [("writing", ["the cat sat", "and then"]), ("translation", ["on the mat"])]
    lines = [{"question_id": i, "category": c, "turns": t} for i, (c, t) in enumerate(asked)]
    questions.write_text("".join(json.dumps(line) + "\n" for line in lines))
    run, small = tmp_path / "run", ("-n", 1, "--max-new-tokens", 6, "--threads", 1)
    words = ["--model", bench_model, "--tasks", f"spec_bench:{questions}", "--out", run, *small]
    assert call("bench", "run", *words, "--methods", "plain,stand", "--texts")[0] == 0
    files = {method: tmp_path / f"{method}.jsonl" for method in ("plain", "stand")}
    for method, path in files.items():
        status, out, err = call("bench", "answers", run, "--method", method, "--out", path)
        assert status == 0 and "2 answers" in out, err
    first = json.loads(files["stand"].read_text().splitlines()[0])
    assert first["question_id"] == 0 and len(first["choices"][0]["wall_time"]) == 2
    status, out, err = call(
        "bench", "spec", files["stand"], files["plain"], "--model", bench_model, "--json"
    )
    found = {row["group"]: row for row in json.loads(out)}
    assert status == 0 and found["mt_bench"]["num_questions"] == 1, err
    assert found["overall"]["num_questions"] == 2 and found["overall"]["speed_up"] > 0
    status, _, err = call("bench", "answers", run, "--method", "stan", "--out", tmp_path / "x")
    assert status == 2 and "stand" in err
    status, _, err = call("bench", "answers", run, "--method", "stand", "--round", 1, "--out", run)
    assert status == 2 and "exists; use another --out" in err
    there = ("--round", 1, "--out", tmp_path / "y")
    status, _, err = call("bench", "answers", run, "--method", "stand", *there)
    assert status == 2 and "--round must be from 0 to 0" in err
    with questions.open("a") as file:
        file.write(json.dumps({"question_id": 7, "category": "qa", "turns": ["who"]}) + "\n")
    status, out, err = call("bench", "answers", run, "--method", "stand", "--out", tmp_path / "z")
    said = "1 of 3 questions left out for missing turns: 7 (turn 1 was not measured)"
    assert (status, err) == (0, said + "\n") and "2 answers of stand" in out
    questions.rename(tmp_path / "elsewhere.jsonl")
    status, _, err = call("bench", "answers", run, "--method", "stand", "--out", tmp_path / "w")
    assert status == 2 and "paths are relative to the folder where" in err
