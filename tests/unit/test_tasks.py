"""Tasks by name, generated tasks (the same every time, answers that score), files, templates."""

from __future__ import annotations

import json

import pytest

from forerun.errors import ConfigError, DataError, UnknownName
from forerun.tasks import get_task, is_file, task_names
from forerun.tasks._prose import REPORT, STORY, Scene, similarity
from forerun.tasks.base import Example, Task, plain_text, prepare
from forerun.tasks.code import body_of, same

GENERATED = (
    "code",
    "conversation",
    "copying",
    "needles:lengths=800+2000",
    "story",
    "summarising",
)
TEMPLATE = (
    "<bos>{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


def test_tasks_are_files_and_helpers_are_not():
    names = {name.partition(":")[0] for name in GENERATED}
    from_files = {"file", "gsm8k", "humaneval", "long_documents", "mbpp", "mt_bench", "spec_bench"}
    assert names | from_files | {"json_extraction", "reasoning"} == set(task_names())


@pytest.mark.parametrize("name", [*GENERATED, "reasoning"])
def test_every_task_is_a_task(name):
    assert isinstance(get_task(name), Task)


def test_files_are_told_from_tasks_that_make_their_own(tmp_path):
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"prompt": "a"}\n')
    assert is_file(get_task(f"file:{path}"))
    assert not any(is_file(get_task(name)) for name in (*GENERATED, "reasoning"))


def test_reasoning_is_measured_on_held_out_problems():
    task = get_task("reasoning:levels=2+5,seed=3")
    assert (task.split, task.levels, task.seed) == ("heldout", (2, 5), 3)
    assert task.read("Answer: 07") == "7" and task.example(1).label == "5"
    assert get_task("reasoning:split=train").split == "train"


@pytest.mark.parametrize(
    ("text", "error", "hint"),
    [
        ("reasonning", UnknownName, "did you mean 'reasoning'"),
        ("base", UnknownName, "unknown task"),
        ("needles:length=5", UnknownName, "did you mean 'lengths'"),
        ("needles:lengths=1k", ConfigError, "whole numbers joined by"),
        ("needles:lengths=10", ConfigError, "at least 600"),
        ("needles:lengths=600,others=9", ConfigError, "do not fit"),
        ("story:seed=x", ConfigError, "a whole number"),
        ("story:characters=0", ConfigError, "at least 200"),
        ("copying:sections=0", ConfigError, "at least 1"),
        ("summarising:paragraphs=99", ConfigError, "2 to"),
        ("conversation:lines=1", ConfigError, "2 to"),
        ("code:functions=0", ConfigError, "1 to"),
        ("code:size=0", ConfigError, "size must be at least 1"),
        ("file", ConfigError, "write file:PATH"),
        ("spec_bench", ConfigError, "write spec_bench:PATH"),
        ("file:no/such.txt", DataError, "check the path"),
    ],
)
def test_mistakes_are_named(text, error, hint):
    with pytest.raises(error, match=hint):
        get_task(text)


@pytest.mark.parametrize("name", GENERATED)
def test_generated_examples_are_the_same_every_time(name):
    one, two, other = (
        get_task(name),
        get_task(name),
        get_task(f"{name}{',' if ':' in name else ':'}seed=1"),
    )
    examples = [one.example(i) for i in range(30)]
    assert examples == [two.example(i) for i in range(30)]
    assert len({e.prompt for e in examples}) == 30 == len({e.id for e in examples})
    assert {e.prompt for e in examples}.isdisjoint(other.example(i).prompt for i in range(30))
    with pytest.raises(IndexError):
        one.example(len(one))


@pytest.mark.parametrize("name", GENERATED)
def test_prompts_are_ascii_and_end_where_the_model_goes_on(name):
    task = get_task(name)
    for i in range(40):
        e = task.example(i)
        assert e.prompt.isascii() and e.turns and all(e.turns) and not e.after
        assert e.turns[-1].isascii() and len(e.turns) % 2 == 1


@pytest.mark.parametrize("name", sorted(set(GENERATED) - {"story"}))
def test_references_score_and_others_do_not(name):
    task = get_task(name)
    for i in range(60):
        e = task.example(i)
        assert task.score(e, e.reference) == 1.0
        assert task.score(e, "") == 0.0
        assert task.score(e, task.example(i + 2).reference) < 0.95
        assert task.score(e, e.reference[: len(e.reference) // 2]) < 1.0


def test_a_story_has_no_score():
    task = get_task("story:characters=400")
    e = task.example(0)
    assert task.score(e, "and then") is None and task.read("4") is None
    assert 200 < len(e.prompt) <= 400 and e.prompt in e.turns[0]


def test_copies_change_only_the_name():
    task = get_task("copying")
    plain, renamed = task.example(0), task.example(1)
    assert plain.category == "verbatim" and plain.answer in plain.prompt
    assert renamed.category == "rename" and renamed.answer not in renamed.prompt
    words = renamed.prompt.split("Only write ")[1].split()
    new, old = words[0], words[-1].strip(".")
    assert renamed.answer.replace(new, old) in renamed.prompt
    assert task.score(renamed, renamed.answer + " More text that nobody asked for.") == 1.0


def test_summaries_list_what_stands_in_the_text():
    task = get_task("summarising:paragraphs=4")
    for i in range(10):
        e = task.example(i)
        wanted = e.answer.split("\n")
        assert len(wanted) == 4 and all(sentence in e.prompt for sentence in wanted)
        assert task.score(e, "\n\n".join(wanted[:2])) == 0.5


def test_needles_lie_at_all_depths_of_texts_of_the_length():
    task = get_task("needles:lengths=1000+5000,others=1")
    depths = []
    for i in range(60):
        e = task.example(i)
        assert e.label == f"{e.level} characters" and e.level == (1000, 5000)[i % 2]
        assert e.level - 150 < len(e.turns[0]) <= e.level
        assert e.prompt.count(e.answer) == 1 and e.prompt.count("secret number of") == 3
        depths.append(e.prompt.index(e.answer) / len(e.prompt))
    assert min(depths) < 0.2 and max(depths) > 0.75
    assert task.score(e, f"It is {e.answer}.") == 1.0
    assert task.score(e, f"12345, or {e.answer}") == 0.0
    assert task.score(e, e.answer + "1") == 0.0 == task.score(e, f"1,{e.answer}")


def test_conversations_recall_and_edit():
    task = get_task("conversation:exchanges=2")
    recall, edit = task.example(0), task.example(1)
    assert len(recall.turns) == len(edit.turns) == 5
    assert recall.answer in recall.turns[0]
    assert task.score(recall, f"You have {recall.answer}.") == 1.0
    assert task.score(recall, f"At 9:00 it was 5, then {recall.answer}.") == 0.0
    before = edit.turns[3].split("\n")
    changed = [new for new, old in zip(edit.answer.split("\n"), before, strict=True) if new != old]
    assert len(changed) == 1 and 0.5 < task.score(edit, edit.turns[3]) < 1.0


def test_code_is_python_and_compared_as_syntax():
    task = get_task("code:functions=15")
    for i in range(30):
        e = task.example(i)
        whole = e.prompt + e.answer if e.category == "complete" else e.answer
        compile(whole, "module", "exec")
    complete, edit = task.example(0), task.example(1)
    fenced = f"Here it is:\n```python\n{complete.answer}```\nI hope it helps."
    assert task.score(complete, fenced) == 1.0
    assert task.score(complete, complete.answer + "\n\ndef other():\n    pass\n") == 1.0
    assert task.score(edit, edit.answer.replace("    ", "  ")) == 1.0
    assert task.score(edit, edit.turns[0].split("```python\n")[1]) == 0.0
    assert task.score(edit, "no code (") == 0.0
    assert same("def f():\n  'doc'\n  return '\\d'\n", "def f():\n    return '\\d'\n")
    assert body_of("def f(x):\n    return x\nf(1)\n") == "    return x\n"


def test_lines_in_other_blocks_are_not_right():
    task = get_task("code")
    e = Example("", "def f(x):\n", "    if x:\n        y()\n    z()\n", category="complete")
    assert task.score(e, "    if x:\n        y()\n        z()\n") < 0.9
    assert 0.0 < task.score(e, "    if x:\n        y()\n") < 0.9


def test_prose_keeps_its_cast_and_varies():
    import random

    for templates in (REPORT, STORY):
        scene = Scene(random.Random(0), templates)
        text = scene.text(3000)
        assert 2800 < len(text) <= 3000 and text.isascii()
        assert sum(text.count(name) for name in scene.cast) > 8
        sentences = [scene.sentence() for _ in range(200)]
        assert len(set(sentences)) > 170


def test_similarity_forgives_what_follows_but_not_what_lacks():
    assert similarity("a b c d e f", "a b c") == 1.0
    assert similarity("a b", "a b c d") == pytest.approx(2 * 2 / 6)
    assert similarity("", "a") == 0.0


class Chat:
    """A tokenizer of characters with a chat template; encoding adds the first token `<bos>`."""

    def __init__(self, template=TEMPLATE, bos="<bos>"):
        self.chat_template, self.bos_token, self.inner = template, bos, self
        self.has_chat_template = bool(template)

    def apply_chat_template(self, messages, tokenize, add_generation_prompt):
        from jinja2 import Template

        return Template(self.chat_template).render(
            messages=messages, add_generation_prompt=add_generation_prompt
        )

    def encode(self, text, special=True):
        ids = [0] if special and self.bos_token else []
        if self.bos_token and text.startswith(self.bos_token):
            ids, text = [*ids, 0], text[len(self.bos_token) :]
        return ids + [ord(c) for c in text]

    def chat(self, messages):
        return self.encode(self.apply_chat_template(messages, False, True), special=False)


@pytest.mark.parametrize("bos", ["<bos>", ""])
def test_templates_show_turns_with_one_first_token(bos):
    tokenizer = Chat(TEMPLATE if bos else TEMPLATE.removeprefix("<bos>"), bos)
    example = Example("x", "plain", "", turns=("Hi", "", "Why?"), after=(4,))
    shown = prepare(example, tokenizer, ["  Because. "])
    assert shown.prompt == "<user>Hi<assistant>Because.<user>Why?<assistant>"
    assert shown.turns == ("Hi", "Because.", "Why?")
    assert tokenizer.encode(shown.prompt).count(0) == len(bos and "1")


def test_without_template_or_turns_prompts_are_plain():
    example = Example("x", "plain", "", turns=("Hi", "", "Why?"), after=(4,))
    shown = prepare(example, Chat(""), ["Well."])
    assert shown.prompt == "User: Hi\n\nAssistant: Well.\n\nUser: Why?\n\nAssistant:"
    assert prepare(Example("x", "plain", ""), Chat()).prompt == "plain"
    assert prepare(Example("x", "own", "", turns=("Do it",)), Chat("")).prompt == "own"
    assert plain_text(("Do it",)) == "Do it\n"


def test_a_text_file_is_one_prompt(tmp_path):
    path = tmp_path / "my prompt.txt"
    path.write_bytes("\ufeffGr\u00fc\u00dfe\r\nan alle\r\n".encode())
    task = get_task(f"file:{path}")
    assert len(task) == 1 and task.example(0).prompt == "Gr\u00fc\u00dfe\nan alle"
    assert task.score(task.example(0), "x") is None and isinstance(task, Task)
    with pytest.raises(IndexError):
        task.example(1)


def test_json_lines_hold_prompts_or_turns(tmp_path):
    path = tmp_path / "a,b=c:d.jsonl"
    lines = [
        {"prompt": "2+2=", "answer": "4", "category": "sums", "id": "q1"},
        {"turns": ["Hi", "Hello", "Bye"]},
    ]
    path.write_text("\n\n".join(map(json.dumps, lines)))
    task = get_task(f"file:{path}")
    first, second = task.example(0), task.example(1)
    assert (first.id, first.prompt, first.label, first.turns) == ("q1", "2+2=", "sums", ())
    assert task.score(first, "is 4") == 1.0 and task.score(first, "is 5") == 0.0
    assert second.turns == ("Hi", "Hello", "Bye") and second.prompt.endswith("Assistant:")


@pytest.mark.parametrize(
    ("line", "hint"),
    [
        ("{", "line 2 is not JSON"),
        ("[1]", "line 2: expected an object"),
        ('{"prompt": ""}', "line 2: prompt must be a text"),
        ('{"prompt": 5}', "line 2: prompt must be a text"),
        ('{"prompt": "\\ud800"}', "line 2: prompt is not UTF-8 text"),
        ('{"prompt": "a", "id": "\\ud800"}', "line 2: id is not UTF-8 text"),
        ('{"prompt": "a", "category": "\\ud800"}', "line 2: category is not UTF-8 text"),
        ('{"turns": []}', "line 2: turns must be a list"),
        ('{"turns": ["a", "b"]}', "line 2: turns must end with the user's"),
        ('{"id": "x"}', "line 2 needs either"),
        ('{"prompt": "a", "turns": ["a"]}', "line 2 needs either"),
        ('{"promt": "a"}', "line 2: 'promt'; did you mean 'prompt'"),
    ],
)
def test_bad_lines_are_named(tmp_path, line, hint):
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"prompt": "fine"}\n' + line + "\n")
    with pytest.raises((DataError, UnknownName), match=hint):
        get_task(f"file:{path}")


@pytest.mark.parametrize(("name", "data"), [("a.txt", b" \n"), ("a.jsonl", b"\n"), ("b", b"\xff")])
def test_empty_or_binary_files_are_refused(tmp_path, name, data):
    (tmp_path / name).write_bytes(data)
    with pytest.raises(DataError, match="is empty|not UTF-8"):
        get_task(f"file:{tmp_path / name}")


def test_the_line_that_is_not_utf8_is_named(tmp_path):
    path = tmp_path / "a.jsonl"
    mark = b"\xef\xbb\xbf"  # taken off, so that what follows is counted without it
    path.write_bytes(mark + b'{"prompt": "a"}\r\n\n{"prompt": "b"}\n\xff\n')
    with pytest.raises(DataError, match="a.jsonl line 4 is not UTF-8 text: invalid start byte"):
        get_task(f"file:{path}")


def test_a_file_without_its_kind_is_told_both(tmp_path):
    file = tmp_path / "q.jsonl"
    with pytest.raises(UnknownName, match="unknown task"):
        get_task(str(file))
    file.write_text('{"prompt": "a"}\n')
    with pytest.raises(ConfigError, match="q.jsonl is a file; write file:.* or spec_bench:"):
        get_task(str(file))
