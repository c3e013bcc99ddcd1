"""Spec-Bench: question files, turns, answer files, and the published accounting restated."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from forerun.bench.results import Record, SampleRecord
from forerun.bench.spec_bench import (
    GROUPS,
    accept_lengths,
    answers,
    read_answers,
    speed,
    table,
    unanswered,
    unshared,
    write_answers,
)
from forerun.errors import CapacityError, ConfigError, DataError, UnknownName
from forerun.tasks import get_task
from forerun.tasks.base import prepare
from forerun.tasks.spec_bench import read_questions

STORED = Path(__file__).parents[1] / "data"
QUESTIONS = [
    {"question_id": 81, "category": "writing", "turns": ["Write a line.", "Again, shorter."]},
    {"question_id": 82, "category": "math", "turns": ["1+1?", "And 2+2?"], "reference": ["2", "4"]},
    {
        "question_id": 161,
        "category": "translation",
        "turns": ["Say hello."],
        "reference": ["Hallo"],
    },
]


def encode(text: str) -> list[int]:
    """Word ids with a first token, as a Llama tokenizer gives."""
    return [1, *(len(word) for word in text.split())]


def write_lines(path: Path, lines: list) -> Path:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


@pytest.fixture
def questions(tmp_path):
    return write_lines(tmp_path / "question.jsonl", QUESTIONS)


def test_the_real_questions(data_dir):
    path = data_dir / "prompts" / "spec_bench_question.jsonl"
    found = read_questions(path)
    assert len(found) == 480 and [q.id for q in found] == list(range(81, 561))
    groups = [q.group for q in found]
    assert {g: groups.count(g) for g in GROUPS[:-1]} == dict.fromkeys(GROUPS[:-1], 80)
    assert len(get_task(f"spec_bench:{path}")) == 560
    assert len(get_task(f"spec_bench:{path}:mt_bench")) == 160
    assert {e.category for e in map(get_task(f"spec_bench:{path}:rag").example, range(80))} == {
        "rag"
    }


def test_turns_are_examples_and_later_ones_wait_for_answers(questions):
    task = get_task(f"spec_bench:{questions}")
    found = [task.example(i) for i in range(len(task))]
    assert [e.id for e in found] == ["81.1", "81.2", "82.1", "82.2", "161.1"]
    assert [e.after for e in found] == [(), (0,), (), (2,), ()]
    assert [e.label for e in found] == ["writing", "writing", "math", "math", "translation"]
    assert found[3].reference == "4" and found[0].reference == ""
    assert found[3].turns == ("1+1?", "", "And 2+2?")
    assert task.score(found[0], "x") is None and task.read("x") is None
    with pytest.raises(IndexError):
        task.example(5)


def test_the_second_turn_sees_the_first_answer(questions, tiny_folder):
    import forerun

    model = forerun.load(str(tiny_folder))
    task = get_task(f"spec_bench:{questions}:writing")
    first = prepare(task.example(0), model.tokenizer)
    answer = model.generate([first.prompt], max_new_tokens=8, seed=0)[0].text
    second = prepare(task.example(1), model.tokenizer, [answer])
    assert second.turns == (QUESTIONS[0]["turns"][0], answer.strip(), QUESTIONS[0]["turns"][1])
    assert answer.strip() and answer.strip() in second.prompt
    assert second.prompt.endswith(QUESTIONS[0]["turns"][1] + "\n\nAssistant:")


def test_categories_filter_and_mistakes_are_named(questions):
    assert len(get_task(f"spec_bench:{questions}:mt_bench")) == 4
    assert len(get_task(f"spec_bench:{questions}:translation")) == 1
    with pytest.raises(UnknownName, match="did you mean 'translation'"):
        get_task(f"spec_bench:{questions}:translations")


def test_colons_in_paths_are_no_categories(tmp_path):
    path = write_lines(tmp_path / "a:math", QUESTIONS)
    assert len(get_task(f"spec_bench:{path}")) == 5


def test_categories_may_hold_what_paths_do(tmp_path):
    line = {"question_id": 1, "turns": ["the cat"]}
    named = [line | {"category": "C/C++"}, line | {"category": "é x", "question_id": 2}]
    path = write_lines(tmp_path / "q.jsonl", named)
    assert len(get_task(f"spec_bench:{path}:C/C++")) == 1
    with pytest.raises(DataError, match="cannot read .*nothing.jsonl: No such file"):
        get_task(f"spec_bench:{tmp_path}/nothing.jsonl")
    (tmp_path / "no").mkdir()
    with pytest.raises(DataError, match="cannot read .*no:thing/q.jsonl: No such file"):
        get_task(f"spec_bench:{tmp_path}/no:thing/q.jsonl")


@pytest.mark.parametrize(
    ("line", "hint"),
    [
        ('{"question_id": 1', "line 2 is not JSON: .*; write an object per line"),
        ('"x"', "line 2: expected an object"),
        ('{"category": "qa", "turns": ["a"]}', "line 2: question_id"),
        ('{"question_id": true, "category": "qa", "turns": ["a"]}', "line 2: question_id"),
        ('{"question_id": 1, "turns": ["a"]}', "line 2: category"),
        ('{"question_id": 1, "category": "qa"}', "line 2: turns must be a list"),
        ('{"question_id": 1, "category": "qa", "turns": "a"}', "line 2: turns must be a list"),
        ('{"question_id": 1, "category": "qa", "turns": ["a", 5]}', "line 2: turns must be a text"),
        ('{"question_id": 81, "category": "qa", "turns": ["a"]}', "line 2: question_id 81 occurs"),
    ],
)
def test_bad_questions_are_named(tmp_path, line, hint):
    path = tmp_path / "question.jsonl"
    path.write_text(json.dumps(QUESTIONS[0]) + "\n" + line + "\n")
    with pytest.raises(DataError, match=hint):
        read_questions(path)


# Answers.


def record(name, text, *, tokens=6, passes=3, per_position=(2, 1), seconds=0.5, **more) -> Record:
    sample = SampleRecord(tokens, passes, per_position=list(per_position), text=text)
    samples = more.pop("samples", [sample])
    return Record("t", 0, name, "", "stand", 0, 0, 5, seconds, tokens, samples, **more)


def test_answers_have_the_published_form(questions, tmp_path):
    records = [
        record("81.1", " One line.\n"),
        record("81.2", "Line.", tokens=5, seconds=0.25),
        record("82.1", "2"),
        record("161.1", "Hallo", passes=None, per_position=()),
    ]
    lines = answers(read_questions(questions), records, "tiny-stand", 7.5)
    assert [line["question_id"] for line in lines] == [81, 161]  # 82 is not whole
    first = lines[0]
    assert list(first) == [
        "question_id",
        "category",
        "answer_id",
        "model_id",
        "choices",
        "tstamp",
    ]
    assert (first["category"], first["model_id"], first["tstamp"]) == ("writing", "tiny-stand", 7.5)
    assert first["choices"] == [
        {
            "index": 0,
            "turns": ["One line.", "Line."],
            "decoding_steps": [3, 3],
            "new_tokens": [6, 5],
            "wall_time": [0.5, 0.25],
            "accept_lengths": [3, 2, 1, 2, 2, 1],
        }
    ]
    assert lines[1]["choices"][0]["decoding_steps"] == [None]
    assert len({line["answer_id"] for line in lines}) == 2
    path = tmp_path / "deep" / "answers.jsonl"
    write_answers(path, lines)
    assert read_answers(path) == lines and list(path.parent.iterdir()) == [path]


def test_failed_turns_leave_the_question_out(questions):
    records = [record("81.1", "a"), record("81.2", "", samples=[], error="it broke")]
    assert answers(read_questions(questions), records, "m") == []


def test_questions_that_are_left_out_are_named_with_the_turn(questions):
    records = [record("81.1", "a"), record("81.2", "", samples=[], error="it broke")]
    records += [record("82.2", "4"), record("161.1", "Hallo")]
    asked = read_questions(questions)
    assert unanswered(asked, records) == ["81 (turn 2 failed)", "82 (turn 1 was not measured)"]
    assert [line["question_id"] for line in answers(asked, records, "m")] == [161]


@pytest.mark.parametrize(
    ("records", "error", "hint"),
    [
        ([record("81.1", "a"), record("81.1", "b")], ConfigError, "one answer each"),
        ([record("81.1", "a", samples=[SampleRecord(1)] * 2)], ConfigError, "with -n 1"),
        ([record("81.1", None)], DataError, "with --texts"),
    ],
)
def test_records_that_are_no_answers_are_refused(questions, records, error, hint):
    with pytest.raises(error, match=hint):
        answers(read_questions(questions), records, "m")


def test_accept_lengths_are_those_of_the_counts():
    steps = [4, 1, 1, 3, 2]  # tokens of each pass: accepted drafts and one more
    at_least = [sum(step > depth for step in steps) for depth in (1, 2, 3)]
    whole = SampleRecord(sum(steps), len(steps), per_position=at_least)
    assert accept_lengths(whole) == sorted(steps, reverse=True)
    cut = SampleRecord(sum(steps) - 1, len(steps), per_position=at_least)
    assert sum(accept_lengths(cut)) == cut.tokens and len(accept_lengths(cut)) == len(steps)
    assert accept_lengths(SampleRecord(3, 3)) == [1, 1, 1]
    assert accept_lengths(SampleRecord(3)) == []


def test_a_file_that_cannot_be_written_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(CapacityError, match="cannot write"):
        write_answers(tmp_path / "file" / "x.jsonl", [])


# Accounting.

FIGURES = "mean_accepted", "tokens_per_second", "baseline_tokens_per_second", "speed_up"


def published(method: list[dict], baseline: list[dict], group: str) -> tuple:
    """The published accounting, stated step by step without our code.

    Speed of a question: counted ids over wall time, both added over its turns. Of the baseline:
    ids of the stored texts as the tokenizer gives them, less one per turn, over wall time. Then
    means over questions, and their ratio. Accepted length: mean over the steps of all questions.
    """
    chat = "writing, roleplay, reasoning, math, coding, extraction, stem, humanities"

    def counts(line):
        if group == "overall":
            return True
        name = line["category"]
        return name in chat.split(", ") if group == "mt_bench" else name == group

    rates, lengths = [], []
    for line in filter(counts, method):
        choice = line["choices"][0]
        rates.append(sum(choice["new_tokens"]) / sum(choice["wall_time"]))
        lengths += choice["accept_lengths"]
    plain = []
    for line in filter(counts, baseline):
        choice = line["choices"][0]
        tokens = 0
        for text in choice["turns"]:
            tokens += len(encode(text)) - 1
        plain.append(tokens / sum(choice["wall_time"]))
    rate, base = sum(rates) / len(rates), sum(plain) / len(plain)
    return len(rates), sum(lengths) / len(lengths), rate, base, rate / base


def test_accounting_equals_the_published_one_on_stored_answers():
    method = read_answers(STORED / "spec_bench_method.jsonl")
    baseline = read_answers(STORED / "spec_bench_baseline.jsonl")
    rows = table(method, baseline, encode)
    assert [row.group for row in rows] == ["mt_bench", "translation", "qa", "overall"]
    for row in rows:
        num, *figures = published(method, baseline, row.group)
        assert row.num_questions == num
        found = [
            row.mean_accepted,
            row.tokens_per_second,
            row.baseline_tokens_per_second,
            row.speed_up,
        ]
        assert found == pytest.approx(figures, rel=1e-12)
    overall = rows[-1]
    ratios = [  # what it is not: the mean of ratios, or counted ids of the baseline
        sum(a["choices"][0]["new_tokens"])
        / sum(a["choices"][0]["wall_time"])
        / (sum(b["choices"][0]["new_tokens"]) / sum(b["choices"][0]["wall_time"]))
        for a, b in zip(method, baseline, strict=True)
    ]
    assert abs(overall.speed_up - sum(ratios) / len(ratios)) > 0.01


def test_groups_without_answers_and_files_without_lengths():
    method = read_answers(STORED / "spec_bench_method.jsonl")
    assert speed(method, method, encode, "rag") is None
    for line in method:
        del line["choices"][0]["accept_lengths"]
    assert speed(method, method, encode, "qa").mean_accepted is None


def stored() -> tuple[list[dict], list[dict]]:
    """The stored answers of a method and of plain decoding."""
    names = "method", "baseline"
    return tuple(read_answers(STORED / f"spec_bench_{name}.jsonl") for name in names)


def test_unequal_questions_are_compared_where_both_answer():
    method, baseline = stored()
    whole = table(method, baseline, encode)
    assert table(method[::-1], baseline, encode) == [
        replace(row, **{f: pytest.approx(getattr(row, f)) for f in FIGURES}) for row in whole
    ]
    found = table(method[1:], baseline[:-1], encode)
    assert found == table(method[1:-1], baseline[1:-1], encode) != whole
    for row in found:
        num, *figures = published(method[1:-1], baseline[1:-1], row.group)
        assert row.num_questions == num
        assert [getattr(row, name) for name in FIGURES] == pytest.approx(figures, rel=1e-12)
    assert unshared(method[1:], baseline[:-1]) == [method[-1]["question_id"]]
    assert unshared(baseline[:-1], method[1:]) == [method[0]["question_id"]]
    assert unshared(method, baseline) == []
    assert table(method[:3], baseline[3:], encode) == []


def test_a_question_of_another_category_is_another():
    method, baseline = stored()
    other = [{**method[0], "category": "rag"}, *method[1:]]
    assert unshared(other, baseline) == [method[0]["question_id"]]
    assert table(other, baseline, encode) == table(method[1:], baseline[1:], encode)


def test_the_command_says_what_it_leaves_out(call, refuses, tiny, tmp_path):
    method, baseline = stored()
    paths = [tmp_path / "method.jsonl", tmp_path / "plain.jsonl"]

    def spec(run, here, there):
        for path, lines in zip(paths, (here, there), strict=True):
            write_lines(path, lines)
        return run("bench", "spec", *paths, "--model", tiny, "--json")

    status, out, err = spec(call, method, baseline)
    assert (status, err) == (0, "")
    assert json.loads(out)[-1]["num_questions"] == len(method) == 7
    status, out, err = spec(call, method[6:], baseline)
    assert status == 0 and [row["num_questions"] for row in json.loads(out)] == [1, 1]
    said = "6 questions not in the other file: 81, 92, 121 and 3 more"
    assert err == f"{paths[1]}: {said}\n"
    status, out, err = spec(call, method[:2], baseline[1:])
    assert status == 0 and err.splitlines() == [
        f"{paths[0]}: 1 question not in the other file: 81",
        f"{paths[1]}: 5 questions not in the other file: 121, 161, 162 and 2 more",
    ]
    said = spec(refuses, method[:3], baseline[3:])
    assert f"{paths[0]} and {paths[1]} share no question" in said
    assert "81, 92, 121 against 161, 162, 321 and 1 more" in said


def test_the_table_says_what_a_file_is_against_itself(call, tiny, tmp_path):
    _, baseline = stored()
    path = write_lines(tmp_path / "plain.jsonl", baseline)
    status, out, err = call("bench", "spec", path, path, "--model", tiny)
    assert (status, err) == (0, "")
    (overall,) = (line for line in out.splitlines() if "overall" in line)
    speed_up = overall.split("│")[-2].strip()
    assert speed_up != "1.00x" and f"against itself is {speed_up} as fast." in " ".join(out.split())


def choice(**changes: object) -> dict:
    """An answer of two turns, changed."""
    whole = {"turns": ["a", "b"], "new_tokens": [1, 1], "wall_time": [1.0, 1.0]}
    return {"choices": [whole | changes]}


@pytest.mark.parametrize(
    ("change", "hint"),
    [
        ({"choices": []}, "line 1: expected choices"),
        ({"category": None}, "line 1: category"),
        ({"choices": [{"turns": ["a"], "new_tokens": [1]}]}, "line 1: wall_time must be a list"),
        ({"question_id": None}, "line 1: question_id must be a number or a text, got None"),
        ({"question_id": [1]}, "line 1: question_id must be"),
        (
            {"choices": [{"turns": ["a"], "new_tokens": [1.5], "wall_time": [1]}]},
            "line 1: new_tokens must be a list of whole numbers",
        ),
        (
            {"choices": [{"turns": ["a"], "new_tokens": [1], "wall_time": [0]}]},
            "line 1: wall_time must be above 0",
        ),
        (choice(new_tokens=[5]), "line 1: new_tokens needs one number for each of 2"),
        (choice(wall_time=[1.0] * 3), "line 1: wall_time needs one number for each of 2"),
        (choice(decoding_steps=[4]), "line 1: decoding_steps needs one number for each"),
        (
            choice(decoding_steps=[4, "5"]),
            "line 1: decoding_steps must be a list of whole numbers or null, got",
        ),
    ],
)
def test_bad_answers_are_named(tmp_path, change, hint):
    line = read_answers(STORED / "spec_bench_method.jsonl")[0] | change
    path = write_lines(tmp_path / "a.jsonl", [line])
    with pytest.raises(DataError, match=hint):
        read_answers(path)


def test_a_question_that_is_answered_twice_is_named(tmp_path):
    lines = read_answers(STORED / "spec_bench_method.jsonl")
    path = write_lines(tmp_path / "a.jsonl", [*lines, lines[1]])
    with pytest.raises(DataError, match="line 8: question_id 92 occurs twice"):
        read_answers(path)
