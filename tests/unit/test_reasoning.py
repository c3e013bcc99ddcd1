"""The reasoning task: determinism, splits, checker, variety, and what its tokenizer does."""

from __future__ import annotations

import random
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forerun.errors import ConfigError
from forerun.tasks._reasoning_text import Style, _middle, _near, _places
from forerun.tasks._reasoning_words import vary
from forerun.tasks._reasoning_world import LEVELS, MIX
from forerun.tasks.base import Task
from forerun.tasks.reasoning import ReasoningTask, read_answer
from forerun.training.data.tokenizer import train_tokenizer

CHAIN = re.compile(r"[\d(][\d ()*x+/-]*(?: = [\d(][\d ()*x+/-]*)+")


@pytest.fixture(scope="module")
def task() -> ReasoningTask:
    return ReasoningTask("train", size=1000)


@pytest.fixture(scope="module")
def tokenizer(task):
    texts = (e.prompt + e.reference for e in map(task.example, range(200)))
    return train_tokenizer(texts, vocab_size=512, context=1024)


def test_is_a_task_with_a_length(task):
    assert isinstance(task, Task)
    assert len(task) == 1000
    with pytest.raises(IndexError):
        task.example(1000)


def test_same_index_same_example(task):
    again = ReasoningTask("train", size=1000)
    assert [task.example(i) for i in range(60)] == [again.example(i) for i in range(60)]
    assert ReasoningTask("train", seed=1).example(0) != task.example(0)


def test_levels_take_turns_and_grow(task):
    examples = [task.example(i) for i in range(300)]
    assert [e.level for e in examples[:13]] == [*MIX, 1]
    texts = {n: [len(e.reference) for e in examples if e.level == n] for n in LEVELS}
    lengths = [sum(found) / len(found) for found in texts.values()]
    assert lengths == sorted(lengths)
    answers = [int(e.answer) for e in examples]
    assert max(answers) > 1000 and max(answers) <= 9999 * 5 and min(answers) >= 0


def test_only_the_asked_levels():
    assert {ReasoningTask(levels=(2, 5)).example(i).level for i in range(6)} == {2, 5}


@pytest.mark.parametrize("options", [{"split": "test"}, {"levels": ()}, {"levels": (0, 1)}])
def test_bad_options_are_refused(options):
    with pytest.raises(ConfigError):
        ReasoningTask(**options)


def test_splits_share_no_problem():
    train, held_out = ReasoningTask("train"), ReasoningTask("heldout")
    prompts = {train.example(i).prompt for i in range(900)}
    assert prompts.isdisjoint(held_out.example(i).prompt for i in range(300))


def test_references_are_right_and_altered_answers_wrong(task):
    for i in range(500):
        e = task.example(i)
        assert task.score(e, e.reference) == 1.0
        assert task.score(e, e.reference + "\nAnswer: " + str(int(e.answer) + 1)) == 0.0
        assert task.score(e, e.reference[: -len(e.answer)] + e.answer + "7") == 0.0
        assert task.score(e, e.reference.rsplit("\n", 1)[0]) == 0.0


def test_written_equations_hold_but_for_marked_mistakes(task):
    wrong = marked = 0
    for i in range(400):
        text = task.example(i).reference
        chains = [chain.replace("x", "*").split(" = ") for chain in CHAIN.findall(text)]
        wrong += sum(len({eval(form) for form in chain}) > 1 for chain in chains)
        marked += len(re.findall(r"Wait|No, that|Hmm|Let me redo|I made a mistake", text))
    assert 20 < wrong <= marked


def test_last_answer_line_counts():
    assert read_answer("Answer: 12\nno\nAnswer: 034") == "34"
    assert read_answer("Answer: 12 apples") is None
    assert read_answer("so Answer: 12") is None


def test_one_problem_has_many_solutions(task):
    for i in (2, 5):
        texts = [task.solution(i, variant) for variant in range(40)]
        assert len(set(texts)) >= 39
        assert {read_answer(text) for text in texts} == {task.example(i).answer}
        assert texts[0] == task.example(i).reference


def test_independent_steps_come_in_any_order():
    task = ReasoningTask("train", levels=(6,))
    heads = {re.search(r"\d+ [*x/+-] \d+", task.solution(0, v)).group() for v in range(40)}
    assert len(heads) >= 3


def test_corrections_and_checks_occur(task):
    text = "\n".join(task.example(i).reference for i in range(300))
    assert len(re.findall(r"Wait, that is not right: ", text)) >= 3
    assert len(re.findall(r"(Check|To check|We check): ", text)) >= 20


@given(st.integers(2, 9999), st.integers(2, 99), st.sampled_from("+-*/"), st.randoms())
@settings(max_examples=200, deadline=None)
def test_middle_forms_keep_the_value(a, b, op, rng):
    a, b = (a * b, b) if op == "/" else (max(a, b), min(a, b))
    forms = _middle(op, a, b, rng, Style(True, "*", 0.5))
    assert all(eval(form) == eval(f"{a} {op} {b}") for form in forms)


@given(st.integers(1, 9999), st.randoms())
@settings(max_examples=100, deadline=None)
def test_places_add_up_and_slips_are_wrong(n, rng):
    assert sum(_places(n)) == n
    assert _near(n, rng) not in (n, 0)


def test_alternatives_nest():
    made = {vary(random.Random(i), "[a|[b|c]] {x}", x=1) for i in range(60)}
    assert made == {"a 1", "b 1", "c 1"}


@given(st.text(max_size=60))
@settings(max_examples=60, deadline=None)
def test_tokenizer_returns_any_text(tokenizer, text):
    ids = tokenizer(text)["input_ids"]
    assert tokenizer.decode(ids, clean_up_tokenization_spaces=False) == text


def test_digits_stay_single_and_the_prompt_is_a_prefix(task, tokenizer):
    pieces = [tokenizer.decode([i]) for i in range(2, len(tokenizer))]
    assert all(sum(c.isdigit() for c in piece) <= 1 for piece in pieces)
    for i in range(60):
        e = task.example(i)
        prompt = tokenizer(e.prompt)["input_ids"]
        assert tokenizer(e.prompt + e.reference)["input_ids"][: len(prompt)] == prompt
