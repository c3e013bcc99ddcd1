"""Suites: what a suite file may hold, which examples it picks, and a run of one."""

from __future__ import annotations

import json
from collections import Counter
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
from command import Call
from sample_run import manifest, write_run

from forerun.bench.results import Record, SampleRecord, read_run
from forerun.bench.scoring import pass_at_k, pass_at_ks
from forerun.bench.suite import find_suite, read_suite, run_of, suite_names
from forerun.bench.suite_examples import HALVES, half_of, picked, problem_text, questions
from forerun.errors import ConfigError, DataError, UnknownName
from forerun.tasks import get_task
from forerun.tasks.file import FileTask

MODES = "[modes.greedy]\ntemperature = 0.0\n[modes.many]\ntemperature = 0.6\nsamples = 4\n"
TASK = (
    '[[tasks]]\ntask = "json_extraction"\nexamples = { greedy = 4, many = 2 }\nmax_new_tokens = 9\n'
)
SECONDS_PER_TOKEN, METHODS, HOUR = 0.012, 6, 3600  # docs/tasks.md states this arithmetic

PAGE = Path(__file__).parents[2] / "docs" / "tasks.md"


@pytest.fixture
def suite_file(tmp_path: Path) -> Any:
    def write(text: str) -> Path:
        path = tmp_path / "own.toml"
        path.write_text(text)
        return path

    return write


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    path = tmp_path / "prompts.jsonl"
    lines = [
        {"prompt": f"the cat sat on {i} mats and", "category": "abc"[i % 3], "answer": "cat"}
        for i in range(60)
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def test_a_suite_is_read(suite_file: Any) -> None:
    suite = read_suite(suite_file(f"seed = 3\n{MODES}{TASK}"))
    assert (suite.name, suite.seed, list(suite.modes)) == ("own", 3, ["greedy", "many"])
    many = suite.modes["many"].sampling(7)
    assert (many.temperature, many.n, many.max_new_tokens) == (0.6, 4, 7)
    assert suite.tasks[0].label == "json_extraction" and suite.tasks[0].examples["many"] == 2


@pytest.mark.parametrize(
    ("text", "error", "hint"),
    [
        ("", DataError, "own.toml is empty; a suite has"),
        ("# nothing\n", DataError, "own.toml is empty; a suite has"),
        ("seed = ", DataError, "own.toml is not TOML: Invalid value"),
        ("seed = 1", DataError, "field 'modes' is missing"),
        (MODES, DataError, "field 'tasks' is missing"),
        (f"tasks = []\n{MODES}", DataError, "has no tasks"),
        ("modes = {}\n" + TASK, DataError, "has no modes"),
        ("tasks = [5]\n" + MODES, DataError, "task 1: expected an object, got 5"),
        ("speed = 1\n" + MODES + TASK, UnknownName, "'speed'; did you mean 'seed'"),
        (MODES + TASK + "example = 1", UnknownName, r"task 1 \(json_extraction\): 'example'; did"),
        (
            MODES.replace("samples", "sample") + TASK,
            UnknownName,
            "'sample'; did you mean 'samples'",
        ),
        (
            MODES + TASK.replace("9", '"9"'),
            DataError,
            "field 'max_new_tokens' takes a whole number",
        ),
        (MODES + TASK.replace("9", "0"), DataError, "max_new_tokens must be at least 1"),
        (MODES + TASK.replace("many = 2", "many = 0"), DataError, "must be at least 1, got 0"),
        (MODES + TASK.replace("many = 2", "may = 2"), UnknownName, "'may'; did you mean 'many'"),
        (MODES + TASK.replace("greedy = 4, many = 2", ""), DataError, "examples names no mode"),
        (MODES + TASK + TASK, DataError, "task 2 .*: duplicate name"),
        (MODES.replace("0.6", "-1.0") + TASK, DataError, "mode 'many': temperature must be"),
        (MODES.replace("samples = 4", "batch = 0") + TASK, DataError, "batch must be at least 1"),
    ],
)
def test_what_is_wrong_in_a_suite_is_named(
    text: str, error: type[Exception], hint: str, suite_file: Any
) -> None:
    with pytest.raises(error, match=hint):
        read_suite(suite_file(text))


def test_suites_that_are_not_there_are_named(tmp_path: Path) -> None:
    assert "real" in suite_names()
    with pytest.raises(UnknownName, match="did you mean 'real'"):
        find_suite("reel")
    with pytest.raises(DataError, match="cannot read the suite .*no.toml"):
        find_suite(str(tmp_path / "no.toml"))
    (tmp_path / "bytes.toml").write_bytes(b"\xff")
    with pytest.raises(DataError, match="is not TOML: .*; save it as UTF-8 text"):
        find_suite(str(tmp_path / "bytes.toml"))


def test_a_run_takes_one_mode_and_knows_its_files(tmp_path: Path, suite_file: Any) -> None:
    extra = (
        '[[tasks]]\ntask = "gsm8k"\nfile = "a.gz"\nexamples = { many = 1 }\nmax_new_tokens = 5\n'
    )
    suite = read_suite(suite_file(MODES + TASK + extra))
    greedy = run_of(suite)
    assert (greedy.mode, greedy.half, [t.label for t in greedy.tasks]) == (
        "greedy", "held_out", ["json_extraction"],
    )  # fmt: skip
    assert greedy.to_dict() == {"name": "own", "mode": "greedy", "half": "held_out", "seed": 0}
    with pytest.raises(DataError, match=r"lacks 1 file of suite 'own': a.gz \(gsm8k\)"):
        run_of(suite, mode="many")
    assert len(run_of(suite, mode="many", only=["json_extraction"]).tasks) == 1
    (tmp_path / "a.gz").touch()
    many = run_of(suite, mode="many", limits={"max_new_tokens": 7})
    assert many.max_new_tokens == 7 and [many.longest(t) for t in many.tasks] == [7, 5]
    assert many.of("gsm8k").text(many.folder) == f"gsm8k:{tmp_path / 'a.gz'}"
    for given, hint in (
        ({"mode": "meny"}, "'meny'; did you mean 'many'"),
        ({"half": "heldout"}, "'heldout'; did you mean 'held_out'"),
        ({"only": ["gsm8k"]}, "task of suite 'own' in mode 'greedy': 'gsm8k'"),
    ):
        with pytest.raises(UnknownName, match=hint):
            run_of(suite, **given)
    with pytest.raises(ConfigError, match="with --data-dir"):
        run_of(find_suite("real"))


def test_ours_run_together_in_a_mode_with_a_batch(suite_file: Any) -> None:
    modes = MODES + "[modes.batched]\ntemperature = 0.6\nsamples = 4\nbatch = 4\n"
    suite = read_suite(suite_file(modes + TASK.replace("many = 2", "batched = 2")))
    names = ["plain", "stand", "stand:nodes=4", "stand:batch=2", "vllm"]
    assert run_of(suite).methods(names) == names
    assert run_of(suite, mode="batched").methods(names) == [
        "plain", "plain:batch=4", "stand:batch=4", "stand:nodes=4,batch=4", "stand:batch=2", "vllm",
    ]  # fmt: skip


@pytest.mark.parametrize("name", ["json_extraction", "file"])
def test_halves_have_nothing_in_common(name: str, prompts: Path) -> None:
    task = get_task(f"file:{prompts}" if name == "file" else name)
    for key in "abc":
        here, there = (picked(task, 1000, half, key) for half in HALVES)
        assert set(here).isdisjoint(there)
        assert sorted(here + there) == [i for turns in questions(task) for i in turns]
        assert min(len(here), len(there)) > 0.35 * (len(here) + len(there))
    here, there = picked(task, 10, HALVES[0], "a"), picked(task, 10, HALVES[1], "b")
    assert set(here).isdisjoint(there), "also with other seeds"


def test_a_file_for_the_training_of_a_draft_is_a_task_too(tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"prompt": "a", "domain": "code"}\n{"prompt": "b", "answer": "c"}\n')
    task = FileTask(path)
    assert [(e.prompt, e.category) for e in task.examples] == [("a", "code"), ("b", "")]


def test_a_seed_picks_as_many_of_each_category(prompts: Path) -> None:
    task = get_task(f"file:{prompts}")
    few, more, other = (
        picked(task, count, "tuning", key) for count, key in ((6, "a"), (9, "a"), (6, "b"))
    )
    assert few == picked(task, 6, "tuning", "a") == sorted(few) and few != other
    assert set(few) < set(more), "a larger number only adds"
    assert set(Counter(task.example(i).category for i in more).values()) == {3}


def test_later_turns_come_with_their_question(tmp_path: Path) -> None:
    path = tmp_path / "question.jsonl"
    kinds = {"math": ["And?"], "rag": []}
    lines = [
        {"question_id": f"{kind}{i}", "category": kind, "turns": [f"{kind} {i}?", *more]}
        for i in range(20)
        for kind, more in kinds.items()
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    task = get_task(f"spec_bench:{path}")
    indices = picked(task, 8, "held_out", "a")
    found = [task.example(i) for i in indices]
    assert Counter(e.category for e in found) == {"math": 8, "rag": 4}
    assert all(set(e.after) <= set(indices) for e in found)


def test_a_problem_is_in_the_same_half_of_every_file(data_dir: Path) -> None:
    """Spec-Bench holds questions of GSM8K and MT-Bench: tuning on one must not see the other."""
    prompts = data_dir / "prompts"
    spec = get_task(f"spec_bench:{prompts / 'spec_bench_question.jsonl'}")
    gsm8k = get_task(f"gsm8k:{prompts / 'gsm8k_test.jsonl.gz'}")
    mt_bench = get_task(f"mt_bench:{prompts / 'mt_bench_question.jsonl'}")
    half_by_text = {}
    for task in (gsm8k, mt_bench):
        for turns in questions(task):
            example = task.example(turns[0])
            half_by_text[" ".join(example.source.split())] = half_of(example)
    shared = [
        spec.example(turns[0])
        for turns in questions(spec)
        if spec.example(turns[0]).category == "math_reasoning" or len(turns) == 2
    ]
    assert len(shared) == 160
    for example in shared:
        assert half_of(example) == half_by_text[" ".join(example.source.split())]


def test_the_real_suite_ends_within_an_hour(data_dir: Path) -> None:
    """Counted as docs/tasks.md does: every answer as long as it may be, every method as slow as
    plain decoding of SmolLM2-135M on two cores."""
    suite = find_suite("real")
    tasks = {task.label: get_task(task.text(data_dir)) for task in suite.tasks}
    for mode, law in suite.modes.items():
        for half in HALVES:
            run = run_of(suite, mode=mode, half=half, data_dir=data_dir)
            tokens = 0
            for task in run.tasks:
                indices = run.indices(task.label, tasks[task.label])
                assert len(indices) >= task.examples[mode], "the file has as many"
                tokens += len(indices) * law.samples * task.max_new_tokens
            assert tokens * SECONDS_PER_TOKEN * METHODS < HOUR, (mode, half, tokens)
            assert f"{tokens:,}" in PAGE.read_text(), "docs/tasks.md says so"
    assert {task.label for task in suite.tasks} == {
        "gsm8k", "humaneval", "mbpp", "mt_bench", "spec_bench", "json_extraction", "long_documents",
    }  # fmt: skip


def test_the_real_suite_has_no_problem_twice(data_dir: Path) -> None:
    """A method that learns across prompts would find its own answer, though files overlap."""
    suite = find_suite("real")
    for half in HALVES:
        seen: Counter[str] = Counter()
        run = run_of(suite, half=half, data_dir=data_dir)
        for task in run.tasks:
            source = get_task(task.text(data_dir))
            found = [source.example(i) for i in run.indices(task.label, source)]
            seen.update(problem_text(example) for example in found if not example.after)
        assert seen.most_common(1)[0][1] == 1, half


@pytest.mark.parametrize(("n", "right"), [(1, 0), (1, 1), (5, 0), (5, 2), (5, 5), (8, 3)])
def test_pass_at_k_is_the_share_of_choices_that_hold_a_right_one(n: int, right: int) -> None:
    scores = [True] * right + [False] * (n - right)
    for k in range(1, n + 1):
        chosen = list(combinations(scores, k))
        assert pass_at_k(n, right, k) == pytest.approx(sum(map(any, chosen)) / len(chosen))
    for k in (0, n + 1):
        with pytest.raises(ValueError, match=f"k must be 1 to {n}"):
            pass_at_k(n, right, k)


def scored(index: int, *scores: float | None, round: int = 0, error: str | None = None) -> Record:
    samples = [SampleRecord(tokens=3, score=score) for score in scores]
    return Record(
        *("t", index, str(index), "c", "plain", round, 0, 5, 1.0, 3 * len(scores), samples),
        error=error,
    )


def test_pass_at_k_of_records() -> None:
    plan = manifest(tasks={"t": {"task": "gsm8k:a"}, "u": {"task": "json_extraction"}, "v": {}})

    def passes(records: list[Record], task: str = "t") -> dict[int, float]:
        return pass_at_ks(plan, task, records)

    found = passes([scored(0, 1.0, 0.0, 0.0, 0.0), scored(1, 1.0, 1.0, 0.0, 0.0)])
    assert list(found) == [1, 2, 4]
    assert found[1] == pytest.approx(3 / 8) and found[4] == 1.0
    assert found[2] == pytest.approx((1 / 2 + 5 / 6) / 2)
    rounds = passes([scored(0, 1.0, 0.0), scored(0, 0.0, round=1)])
    assert list(rounds) == [1, 2, 3] and rounds[1] == pytest.approx(1 / 3)
    assert passes([scored(0, 1.0), scored(1, 0.0)]) == {} == passes([])
    assert passes([scored(0, 0.5, 1.0)]) == {} == passes([scored(0, None, None)])
    assert passes([scored(0, 0.0, 1.0), scored(1, error="broke")])[1] == 0.5
    for partial in "uv":
        assert passes([scored(0, 0.0, 1.0)], partial) == {}, "also if no score is between"


def test_reports_show_pass_at_k_and_the_suite(report: Any) -> None:
    suite = {"name": "real", "mode": "sampled", "half": "tuning", "seed": 0}
    page, text = report(suite=suite)
    assert "suite real (sampled, tuning)" in text
    assert "reasoning: pass@k" in text and "code: pass@k" not in text
    assert "| pass@1 |" in text.replace("  ", " ") or "pass@8" in text


@pytest.fixture
def bench(call: Call, unmeasured: None, bench_model: Path, tmp_path: Path, prompts: Path) -> Call:
    """`forerun bench run --suite` on a tiny model."""
    suite = tmp_path / "own.toml"
    suite.write_text(
        MODES + '[[tasks]]\ntask = "file"\nfile = "prompts.jsonl"\nname = "cats"\n'
        "examples = { greedy = 3, many = 2 }\nmax_new_tokens = 6\n"
        '[[tasks]]\ntask = "story:characters=400"\nname = "story"\n'
        "examples = { greedy = 2 }\nmax_new_tokens = 4\n"
    )
    words = ["--suite", suite, "--model", bench_model, "--threads", 1, "--methods", "plain,stand"]
    return lambda *more: call("bench", "run", *words, *more)


def test_a_suite_is_run_and_goes_on(bench: Call, tmp_path: Path) -> None:
    out = tmp_path / "run"
    status, _, err = bench("--out", out)
    assert status == 0, err
    plan, records = read_run(out)
    assert plan.suite == {"name": "own", "mode": "greedy", "half": "held_out", "seed": 0}
    assert list(plan.tasks) == ["cats", "story"] and plan.sampling["temperature"] == 0.0
    assert plan.tasks["cats"]["max_new_tokens"] == 6 and plan.tasks["story"]["max_new_tokens"] == 4
    assert Counter((r.task, r.method) for r in records) == {
        ("cats", "plain"): 3, ("cats", "stand"): 3, ("story", "plain"): 2, ("story", "stand"): 2,
    }  # fmt: skip
    most = {"cats": 6, "story": 4}
    assert all(s.tokens <= most[r.task] for r in records for s in r.samples)
    assert max(s.tokens for r in records if r.task == "story" for s in r.samples) == 4
    lines = (out / "records.jsonl").read_text().splitlines(keepends=True)
    (out / "records.jsonl").write_text("".join(lines[:-1]))
    assert bench("--out", out)[0] == 0 and len(read_run(out)[1]) == 10
    assert "suite.half: 'held_out' against 'tuning'" in bench("--out", out, "--half", "tuning")[2]
    assert "suite.mode: 'greedy' against 'many'" in bench("--out", out, "--mode", "many")[2]


def test_sampling_options_change_the_mode_and_say_so(bench: Call, tmp_path: Path) -> None:
    small = "--tasks", "cats", "--examples", 1, "--max-new-tokens", 2, "--methods", "plain"
    _, _, err = bench("--out", tmp_path / "same", "--temperature", 0.0, *small)
    assert "is changed" not in err
    _, _, err = bench("--out", tmp_path / "other", "--temperature", 0.7, *small)
    assert "options replace settings of mode 'greedy': temperature 0.7" in err
    assert read_run(tmp_path / "other")[0].sampling["temperature"] == 0.7


def test_the_halves_of_a_run_share_no_prompt(bench: Call, tmp_path: Path) -> None:
    ids = []
    for half in HALVES:
        only = "--half", half, "--tasks", "cats", "--mode", "many", "--max-new-tokens", 3
        status, _, err = bench("--out", tmp_path / half, *only)
        assert status == 0, err
        plan, records = read_run(tmp_path / half)
        assert (plan.sampling["n"], plan.tasks["cats"]["max_new_tokens"]) == (4, 3)
        ids.append({r.id for r in records})
    assert len(ids[0]) == len(ids[1]) == 2 and ids[0].isdisjoint(ids[1])


def test_options_that_need_a_suite_say_so(call: Call, refuses: Any, tmp_path: Path) -> None:
    for words in (("--mode", "greedy"), ("--half", "tuning"), ("--data-dir", tmp_path)):
        said = refuses("bench", "run", "--out", tmp_path / "run", *words)
        assert f"{words[0]} needs a suite" in said
    run = ("bench", "run", "--out", tmp_path / "run", "--suite")
    (tmp_path / "empty.toml").touch()
    assert "empty.toml is empty" in refuses(*run, tmp_path / "empty.toml")
    assert "--data-dir" in refuses(*run, "real")
    assert "lacks 5 files" in refuses(*run, "real", "--data-dir", tmp_path, "--mode", "sampled")


def test_answers_of_spec_bench_are_written_from_a_suite(call: Call, tmp_path: Path) -> None:
    path = tmp_path / "question.jsonl"
    lines = [{"question_id": i, "category": "qa", "turns": [f"Why {i}?"]} for i in (7, 8)]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    told = {
        "examples": 1,
        "hash": "x",
        "size": 2,
        "max_new_tokens": 9,
        "task": f"spec_bench:{path}",
    }
    one = SampleRecord(tokens=3, passes=3, text="Because.")
    record = Record("spec", 1, "8.1", "qa", "plain", 0, 0, 5, 1.0, 3, [one])
    changes = {"methods": ["plain"], "tasks": {"spec": told}, "sampling": {"n": 1}, "peers": {}}
    folder = write_run(tmp_path / "run", [record], **changes)
    out = tmp_path / "plain.jsonl"
    status, _, err = call("bench", "answers", folder, "--method", "plain", "--out", out)
    assert status == 0, err
    assert json.loads(out.read_text())["question_id"] == 8 and "1 of 2 questions left out" in err
