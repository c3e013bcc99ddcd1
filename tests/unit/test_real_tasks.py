"""Tasks with published prompts: formats, wording, answers that score, and clear errors."""

from __future__ import annotations

import gzip
import json
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from forerun.bench.results import SampleRecord
from forerun.bench.scoring import majority_score, scored, text_to_score
from forerun.errors import ConfigError, DataError, UnknownName
from forerun.tasks import get_task, is_file
from forerun.tasks._python_answer import completed, longest_python, program
from forerun.tasks.base import Task
from forerun.tasks.gsm8k import canonical
from forerun.tasks.json_extraction import json_object

GSM8K = {"question": "Ann has 3 bags of 400 nuts. How many?", "answer": "3*400=1200\n#### 1,200"}
HUMANEVAL = {
    "task_id": "HumanEval/0",
    "prompt": "from typing import List\n\n\ndef total(xs: List[int]) -> int:\n"
    '    """ Sum of xs.\n    >>> total([1, 2])\n    3\n    """\n',
    "entry_point": "total",
    "canonical_solution": "    return sum(xs)\n",
    "test": "def check(candidate):\n    assert candidate([1, 2]) == 3\n",
}
MBPP = {
    "text": "Write a function to double a number.",
    "code": "def double(x):\r\n    return 2 * x",
    "task_id": 11,
    "test_setup_code": "",
    "test_list": ["assert double(2) == 4", "assert double(-1) == -2"],
    "challenge_test_list": [],
}
MT_BENCH = {"question_id": 81, "category": "writing", "turns": ["Write.", "Again."]}
LINES: dict[str, dict[str, Any]] = {
    "gsm8k": GSM8K, "humaneval": HUMANEVAL, "mbpp": MBPP, "mt_bench": MT_BENCH
}  # fmt: skip
KEEPERS = ("old", "young", "tall", "thin", "glad", "sad", "pale", "grey", "calm", "loud", "proud")
BOOK = "\n\n".join(
    f"The {word} keeper of the light walked slowly down to the harbour, and he counted {n} boats."
    for n, word in enumerate(KEEPERS, 100)
)


@pytest.fixture
def write(tmp_path: Path) -> Any:
    """Writes objects as JSON lines, compressed where the name ends in .gz."""

    def lines(name: str, *values: Any) -> Path:
        data = "".join(json.dumps(value) + "\n" for value in values).encode()
        path = tmp_path / name
        path.write_bytes(gzip.compress(data) if name.endswith(".gz") else data)
        return path

    return lines


@pytest.mark.parametrize("name", LINES)
@pytest.mark.parametrize("end", ["jsonl", "jsonl.gz"])
def test_a_file_makes_a_task(name: str, end: str, write: Any) -> None:
    task = get_task(f"{name}:{write(f'data.{end}', LINES[name])}")
    assert isinstance(task, Task) and is_file(task) and len(task) in (1, 2)
    example = task.example(0)
    assert example.turns and example.source and example.prompt != example.turns[0]
    assert example.source in example.turns[0]
    with pytest.raises(IndexError):
        task.example(2)


CUT = gzip.compress(b"x" * 999, mtime=0)[:-9]


@pytest.mark.parametrize("name", [*LINES, "long_documents", "file", "spec_bench"])
@pytest.mark.parametrize(
    ("data", "hint"), [(b"", "is empty|no excerpt"), (CUT, "not a whole gzip")]
)
def test_empty_and_cut_files_are_named(name: str, data: bytes, hint: str, tmp_path: Path) -> None:
    path = tmp_path / "data.gz"
    path.write_bytes(data)
    with pytest.raises(DataError, match=f"data.gz {hint}|{hint}"):
        get_task(f"{name}:{path}")


@pytest.mark.parametrize(
    ("name", "change", "hint"),
    [
        ("gsm8k", {"question": None}, "line 2: question must be a text"),
        ("gsm8k", {"question": ...}, "line 2: field 'question' is missing; there: answer"),
        ("gsm8k", {"answer": "it is 5"}, "line 2: answer must end in '#### NUMBER'"),
        ("gsm8k", {"answer": "#### NaN"}, "line 2: answer must end in '#### NUMBER'"),
        ("humaneval", {"test": ...}, "line 2: field 'test' is missing"),
        ("humaneval", {"entry_point": "sums"}, "line 2: prompt does not define entry_point 'sums'"),
        ("humaneval", {"test": "pass"}, r"line 2: test must be Python that defines check"),
        ("humaneval", {"test": "def check("}, "line 2: test must be Python that defines check"),
        ("humaneval", {}, "line 2: task_id 'HumanEval/0' occurs twice"),
        ("mbpp", {"task_id": "11"}, "line 2: task_id must be a whole number"),
        ("mbpp", {"task_id": True}, "line 2: task_id must be a whole number"),
        ("mbpp", {"test_list": []}, "line 2: test_list must be a list of texts"),
        ("mbpp", {"test_list": ["assert ("]}, "line 2: test_list is not Python"),
        ("mbpp", {"test_setup_code": 5}, "line 2: test_setup_code must be a text"),
        ("mbpp", {}, "line 2: task_id 'mbpp-11' occurs twice"),
        ("mt_bench", {}, "line 2: question_id 81 occurs twice"),
        (
            "mt_bench",
            {"question_id": 82, "turns": ["One."]},
            "question 82 must have 2 turns, has 1",
        ),
        ("mt_bench", {"question_id": 82, "category": "rag"}, "'rag', which MT-Bench lacks"),
    ],
)
def test_bad_lines_are_named(name: str, change: dict, hint: str, write: Any) -> None:
    first, second = LINES[name], LINES[name] | change
    line = {key: value for key, value in second.items() if value is not ...}
    with pytest.raises(DataError, match=hint):
        get_task(f"{name}:{write('data.jsonl', first, line)}")


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("It is 5. The answer is 1,200.", "1200"),
        ("The answer is 7.\n\nThe answer is **$1200.00**", "1200"),
        ("#### 1200\nSo she has 3.", "1200"),
        (r"Thus \boxed{1200}, of 3.", "1200"),
        (r"The answer is \text{1200}.", "1200"),
        ("3 bags of 400 are 1200 nuts", "1200"),
        ("Answer: 1200", "1200"),
        (" 1200\n\nQuestion: Bob has 5?\nAnswer: 5", "1200"),
        ("The answer is -0.50", "-0.5"),
        ("none", None),
    ],
)
def test_the_final_number_of_an_answer(text: str, number: str | None, write: Any) -> None:
    task = get_task(f"gsm8k:{write('data.jsonl', GSM8K)}")
    assert task.read(text) == number
    assert task.score(task.example(0), text) == float(number == "1200")


def test_a_number_of_a_cut_answer_counts_only_if_marked(write: Any) -> None:
    """A question's numbers, repeated at the beginning of the answer, are no answer."""
    task = get_task(f"gsm8k:{write('data.jsonl', GSM8K)}")
    cases = {
        "We sell 1200 candles. First,": 0.0,
        "To answer 1200 of them,": 0.0,
        "The answer is 1200": 0.0,  # of 12,005
        "The answer is 1200.": 0.0,  # of 1200.5
        "The answer is 1200. To check": 1.0,
        "Answer: 1,200\nQuestion: What": 1.0,
    }
    for text, right in cases.items():
        sample = SampleRecord(tokens=8, finish="length", text=text)
        assert scored(task, task.example(0), sample).score == right
        assert scored(task, task.example(0), replace(sample, finish="stop")).score == 1.0
    cut = [text_to_score(task, SampleRecord(8, finish="length", text=text)) for text in cases]
    assert majority_score(task, task.example(0), cut[:4]) == 0.0
    assert majority_score(task, task.example(0), cut) == 1.0


def test_numbers_have_one_form() -> None:
    forms = ("1,000", "1000.0", "$1000", "1000")
    assert {canonical(form) for form in forms} == {"1000"}
    assert canonical("0.0") == "0" == canonical("-0") and canonical("1e9") is None


GOOD = "def total(xs):\n    return sum(xs)"
slow = partial(pytest.param, marks=pytest.mark.slow)  # each is a run of the sandbox


@pytest.mark.parametrize(
    ("text", "score"),
    [
        (f"```python\n{GOOD}\n```", 1.0),
        (f"Here it is:\n\n```py\n{GOOD}\n```\nIt adds.\n```python\nprint(total(1))\n```", 1.0),
        # the limit of tokens cut the block
        slow(f"```\nimport math\n```\n\n```python\n{GOOD}", 1.0),
        ("1. So:\n   ```python\n   def total(xs):\n       return sum(xs)\n   ```", 1.0),
        slow(f"```python\nfrom __future__ import annotations\n{GOOD}\n```", 1.0),
        (f"Sure.\n{GOOD}\n\nThis adds the numbers.", 1.0),
        slow("```python\ndef total(xs: List[int]) -> int:\n    return sum(xs)\n```", 1.0),
        ("    return sum(xs)\n\n\ndef other():\n    pass", 1.0),  # a base model goes on
        slow("```python\n    return sum(xs)\n```", 1.0),
        slow("```python\nreturn sum(xs)\n```", 1.0),
        ("    return sum(xs) + 1", 0.0),
        slow("def total(xs):\n    return", 0.0),
        ("", 0.0),
        slow("I cannot do that.", 0.0),
    ],
)
def test_humaneval_runs_what_the_answer_defines(text: str, score: float, write: Any) -> None:
    task = get_task(f"humaneval:{write('data.jsonl', HUMANEVAL)}")
    assert task.score(task.example(0), text) == score


@pytest.mark.parametrize(
    ("text", "score"),
    [
        ("```python\ndef double(x):\n    return x + x\n```\nDone.", 1.0),
        ("def double(x): return x * 2\n\nassert double(", 1.0),
        slow("TWO = 2\ndef double(x): return x * TWO\n", 1.0),
        ("```python\ndef double(x):\n    return x + x\n\nassert double(2) == 5\n```", 1.0),
        slow("```python\ndef double(x):\n    return x + x\n\nx = double(1 / 0)\n```", 1.0),
        ("```python\nimport sys\ndef double(x): sys.exit(0)\n```", 0.0),
        ("```python\ndef twice(x):\n    return 2 * x\n```", 0.0),
        slow("```python\ndef double(x):\n    return abs(2 * x)\n```", 0.0),
        slow("```python\nimport sys\nsys.exit(0)\n```", 0.0),
    ],
)
def test_mbpp_runs_what_the_answer_defines(text: str, score: float, write: Any) -> None:
    task = get_task(f"mbpp:{write('data.jsonl', MBPP)}")
    example = task.example(0)
    assert "assert double(2) == 4" in example.turns[0] and example.prompt.startswith('"""\n')
    assert task.score(example, text) == score


def test_mbpp_has_the_published_splits(write: Any) -> None:
    path = write("data.jsonl", *(MBPP | {"task_id": n} for n in (10, 11, 510, 511, 601)))
    assert [len(get_task(f"mbpp:{path}:{s}")) for s in ("prompt", "test", "train")] == [1, 2, 1]
    assert len(get_task(f"mbpp:{path}")) == 2
    with pytest.raises(UnknownName, match="did you mean 'test'"):
        get_task(f"mbpp:{path}:tests")
    with pytest.raises(DataError, match="no problem of the split 'train'"):
        get_task(f"mbpp:{write('other.jsonl', MBPP)}:train")


def test_programs_are_cut_where_they_are_no_longer_python() -> None:
    assert longest_python("x = 1\ny = (\n") == "x = 1\n"
    assert longest_python("no code") == "" and longest_python("") == ""
    assert program("no code", ["f"]) == ""
    nested = "def f(x):\n    return g(x)\n\ndef g(x):\n    return x\n"
    assert completed("def f(x):\n", "f", nested) == nested
    assert program(f"{nested}\nprint(f(1))\n\ndef h(): pass\n", ["f"]) == nested
    helper = "def g(x):\n    return x\n\n\ndef f(x):\n    '''f'''\n"
    assert completed(helper, "f", "def f(x):\n    return g(x)\n").startswith("def g(x)")


@pytest.mark.parametrize("name", ["humaneval", "mbpp"])
def test_reference_solutions_pass(name: str, data_dir: Path) -> None:
    file = {"humaneval": "HumanEval.jsonl.gz", "mbpp": "mbpp.jsonl.gz"}[name]
    task = get_task(f"{name}:{data_dir / 'prompts' / file}")
    assert len(task) == {"humaneval": 164, "mbpp": 500}[name]
    for i in range(0, len(task), len(task) // 4):
        example = task.example(i)
        assert task.score(example, example.reference) == 1.0, example.id


@pytest.mark.slow
@pytest.mark.parametrize("name", ["humaneval", "mbpp"])
def test_all_reference_solutions_pass_and_empty_answers_do_not(name: str, data_dir: Path) -> None:
    file = {"humaneval": "HumanEval.jsonl.gz", "mbpp": "mbpp.jsonl.gz"}[name]
    task = get_task(f"{name}:{data_dir / 'prompts' / file}")
    examples = [task.example(i) for i in range(len(task))]
    assert [e.id for e in examples if task.score(e, e.reference) != 1.0] == []
    assert not any(task.score(e, "    pass\n") for e in examples[::10])


def test_the_real_files_are_read(data_dir: Path) -> None:
    prompts = data_dir / "prompts"
    gsm8k = get_task(f"gsm8k:{prompts / 'gsm8k_test.jsonl.gz'}")
    assert len(gsm8k) == 1319
    for i in range(0, 1319, 50):
        example = gsm8k.example(i)
        assert gsm8k.score(example, example.reference) == 1.0
        assert gsm8k.score(example, f"The answer is {example.answer}1.") == 0.0
    mt_bench = get_task(f"mt_bench:{prompts / 'mt_bench_question.jsonl'}")
    assert len(mt_bench) == 160 and mt_bench.example(1).after == (0,)
    assert len(get_task(f"mt_bench:{prompts / 'mt_bench_question.jsonl'}:coding")) == 20
    for name, count in (("sherlock", 60), ("don_quixote_pg996", 200)):
        book = get_task(f"long_documents:{data_dir / 'corpora' / name}.txt.gz")
        whole = "".join(book.example(i).source for i in range(len(book)))
        assert len(book) > count and "Gutenberg" not in whole and "CHAPTER" not in whole


def test_json_is_found_in_an_answer_and_scored_by_field() -> None:
    task = get_task("json_extraction:seed=1")
    for i in range(40):
        example = task.example(i)
        wanted = json.loads(example.answer)
        assert all(str(v) in example.source for v in wanted.values() if isinstance(v, int | str)
                   and not isinstance(v, bool))  # fmt: skip
        assert task.score(example, f"Here:\n```json\n{example.answer}\n```") == 1.0
        assert task.read(example.answer) == task.read(f"{{{example.answer[1:]} and more")
        first = next(iter(wanted))
        part = task.score(example, json.dumps(wanted | {first: "other"}))
        assert part == pytest.approx(1 - 1 / len(wanted))
        assert task.score(example, json.dumps({k: wanted[k] for k in wanted if k != first})) == part
        assert task.score(example, example.answer[:-1]) == 0.0 == task.score(example, "")
        assert task.score(example, task.example(i + 1).answer) < 0.5


def test_values_agree_up_to_case_order_and_article() -> None:
    task = get_task("json_extraction")
    by_kind = {task.example(i).category: task.example(i) for i in range(4)}
    flat = by_kind["flat"]
    wanted = json.loads(flat.answer)
    loose = {
        "city": wanted["city"].upper(),
        "extras": [extra.removeprefix("a ") for extra in reversed(wanted["extras"])],
        "rooms": float(wanted["rooms"]),
    }
    assert task.score(flat, json.dumps(wanted | loose)) == 1.0
    wrong = {"rooms": str(wanted["rooms"]), "pets_allowed": int(wanted["pets_allowed"])}
    assert task.score(flat, json.dumps(wanted | wrong)) == pytest.approx(1 - 2 / len(wanted))
    assert json_object('{"a": 1, "a": 2}') is None and json_object("[1]") is None
    assert json_object("[" * 100_000) is None and json_object('{"a":' * 100_000) is None


def test_long_documents_ask_what_can_be_checked(tmp_path: Path) -> None:
    path = tmp_path / "book.txt"
    head = "*** START OF THIS PROJECT GUTENBERG EBOOK X ***\n\nCHAPTER I\n\n"
    tail = "\n\n*** END OF THIS PROJECT GUTENBERG EBOOK X ***\n\nLicence text that is long."
    path.write_text("Title page.\n\n" + head + "\n\n".join([BOOK] * 5) + tail)
    task = get_task(f"long_documents:{path}:1000")
    found = [task.example(i) for i in range(len(task))]
    assert {e.category for e in found} == {"find", "copy", "summarise"} and len(found) >= 4
    assert all(len(e.source) <= 1000 and "CHAPTER" not in e.source for e in found)
    assert not any("Title page" in e.source or "Licence" in e.source for e in found)
    for e in found:
        if e.category == "find":
            assert e.answer in e.turns[0] and e.answer not in e.source
            number = f"{int(e.answer):,}"
            assert task.score(e, f"It was sold for {number} crowns.") == 1.0
            assert task.score(e, f"1 or {e.answer}") == 0.0 == task.score(e, "none")
        elif e.category == "copy":
            assert e.answer in e.source and task.score(e, e.answer) == 1.0
            assert 0.0 < task.score(e, " ".join(e.answer.split()[:8])) < 1.0
        else:
            assert task.score(e, "A keeper walks.") is None
    assert task.read("5") is None


@pytest.mark.parametrize(
    ("part", "error", "hint"),
    [
        (":x1", ConfigError, "takes a whole number of characters, got 'x1'"),
        (":10", ConfigError, "at least 1000 characters, got 10"),
        (":900000", DataError, "no excerpt of 900000 characters"),
    ],
)
def test_excerpts_that_cannot_be_are_named(
    part: str, error: type[Exception], hint: str, tmp_path: Path
) -> None:
    path = tmp_path / "book.txt"
    path.write_text(BOOK)
    with pytest.raises(error, match=hint):
        get_task(f"long_documents:{path}{part}")


def test_compressed_prompts_of_ones_own(write: Any) -> None:
    task = get_task(f"file:{write('own.jsonl.gz', {'prompt': 'a'}, {'prompt': 'b'})}")
    assert len(task) == 2 and task.example(1).prompt == "b"
