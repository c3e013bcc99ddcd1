"""Replay: the counts of a greedy run come back from its text alone; overlap by its definition."""

from __future__ import annotations

import gzip
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forerun import registry
from forerun.api import Model, load
from forerun.bench.replay.recording import Trace, load_tokenizer, read_recordings, to_traces
from forerun.bench.replay.replay import agreed, overlap, replay
from forerun.cli.main import main
from forerun.controllers.fixed import Fixed
from forerun.core.records import Plan
from forerun.core.roles import Drafter
from forerun.core.tree import TreeBuilder, chain
from forerun.drafters.prompt_lookup import PromptLookup
from forerun.errors import ConfigError, DataError

PLAN = Plan(nodes=6, depth=6)
TEXT = st.lists(st.integers(0, 3), min_size=1, max_size=40)


@pytest.fixture(scope="module")
def tiny(tiny_folder: Path) -> Model:
    return load(tiny_folder, dtype="fp32")


# accepted drafts


@pytest.mark.parametrize("spec", ["none", "prompt_lookup", "prompt_lookup:ngram=1,match=first"])
def test_a_greedy_run_is_replayed_count_by_count(tiny: Model, spec: str) -> None:
    prompts = ["the cat sat on the mat and the cat sat", "one two three one two"]
    options: dict[str, Any] = {"temperature": 0.0, "max_new_tokens": 60}
    results = tiny.generate(
        prompts, drafter=spec, controller=Fixed(nodes=6, depth=6), ignore_eos=True, **options
    )
    traces = [
        Trace(tiny.tokenizer.encode(r.prompt), [sample.tokens for sample in r.samples])
        for r in results
    ]
    found = replay(traces, registry.make("drafter", spec), PLAN, tiny.target.vocab_size)
    total = results[0].stats.add(results[1].stats)
    for name in ("passes", "drafted", "accepted", "examined", "generated", "accepted_at"):
        assert getattr(found.total, name) == getattr(total, name), name
    assert found.total.accepted > 0 or spec == "none"


def test_samples_are_counted_by_their_number() -> None:
    traces = [Trace([1, 2], [[3, 1, 2, 3], [1, 1, 1]]), Trace([1], [[2]])]
    found = replay(traces, PromptLookup(), PLAN, 9).to_dict()
    assert found["generated"] == 8 and len(found["tau_by_sample"]) == 2
    # first prompt, sample 0: 3, 1, then 2 is drafted and 3 follows; sample 1: nothing is accepted
    assert found["passes"] == 3 + 3 + 1 and found["accepted"] == 1
    assert found["tau_by_sample"] == [5 / 4, 1.0]


@settings(max_examples=60, deadline=None)
@given(TEXT, TEXT)
def test_a_replay_spells_the_text(prompt: list[int], text: list[int]) -> None:
    heard: list[int] = []

    class Listening(PromptLookup):
        def observe(self, step: Any) -> None:
            heard.extend(step.emitted[0])
            assert step.seqs[0].tokens == prompt + heard

    found = replay([Trace(prompt, [text])], Listening(), PLAN, 4).total
    assert heard == text and found.generated == len(text)
    assert found.generated == found.passes + found.accepted


def test_agreed_walks_a_tree() -> None:
    builder = TreeBuilder()
    for token, parent in ((5, -1), (6, -1), (7, 1), (8, 1), (9, 3)):
        builder.add(token, parent)
    tree = builder.build()
    assert agreed(tree, [6, 8, 9, 1], 0) == [1, 3, 4]
    assert agreed(tree, [6, 8, 9], 0) == [1, 3]  # the last token is what the pass itself gives
    assert agreed(tree, [0, 6, 7, 9], 1) == [1, 2]
    assert agreed(tree, [4, 5], 0) == [] == agreed(chain([]), [4, 5], 0)


@pytest.mark.parametrize(
    ("spec", "said"),
    [
        ("stand", "drafter 'stand' draws random drafts"),
        ("auto", "drafter 'auto' draws .* replay a deterministic one such as"),
        ("stand:choice=top", "drafter 'stand' needs the target's probabilities"),
        ("fuse", "drafter 'fuse' draws random drafts"),
    ],
)
def test_what_a_text_cannot_judge_is_refused(spec: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        replay([Trace([1], [[2, 3]])], registry.make("drafter", spec), PLAN, 9)


def test_a_drafter_that_needs_passes_is_refused() -> None:
    class Needy(Drafter):
        needs = frozenset({"hidden"})

    with pytest.raises(ConfigError, match="needs hidden of the target's passes"):
        replay([Trace([1], [[2]])], Needy(), PLAN, 9)


def test_a_draft_model_can_be_replayed(tiny: Model) -> None:
    """It reads tokens and computes; the target's own law drafts its own greedy text whole."""
    drafter = registry.get("drafter", "draft_model")(model=tiny.target, grower="template")
    prompt = tiny.tokenizer.encode("the cat")
    text = tiny.generate([prompt], temperature=0.0, max_new_tokens=21, ignore_eos=True)[0]
    found = replay([Trace(prompt, [text.samples[0].tokens])], drafter, PLAN, 288).total
    assert found.accepted > found.passes


# overlap


def brute(samples: list[list[int]], n: int) -> float:
    grams = [tuple(s[i : i + n]) for s in samples for i in range(len(s) - n + 1)]
    return 1 - len(set(grams)) / len(grams) if grams else math.nan


@settings(max_examples=80, deadline=None)
@given(st.lists(TEXT, min_size=1, max_size=4))
def test_overlap_by_its_definition(samples: list[list[int]]) -> None:
    found = overlap([Trace([0], samples)], orders=(1, 2, 3, 5))
    assert list(found) == [1, 2, 3, 5]
    for n, row in found.items():
        expected = [brute(samples[: m + 1], n) for m in range(len(samples))]
        assert row == pytest.approx(expected, nan_ok=True)


def test_overlap_is_the_mean_over_prompts_that_have_so_many_samples() -> None:
    traces = [Trace([0], [[1, 1, 1], [2, 3]]), Trace([0], [[1, 2, 3]])]
    assert overlap(traces, orders=(2,))[2] == pytest.approx([0.25, 1 / 3])


# recordings


def test_fields_are_found(tmp_path: Path) -> None:
    def read(name: str, value: str | bytes, **fields: Any) -> list[tuple[str, list[str]]]:
        path = tmp_path / name
        path.write_bytes(value if isinstance(value, bytes) else value.encode())
        return [(r.prompt, r.texts) for r in read_recordings([path], **fields)]

    line = json.dumps({"question": "q", "answer": "7", "code": ["one", "two"]})
    assert read("a.jsonl", line + "\n\n" + line) == [("q", ["one", "two"])] * 2
    whole = {"results": [{"prompt": "p", "thinking": ["hm", None], "output": ["a", "b"]}]}
    assert read("b.json.gz", gzip.compress(json.dumps(whole).encode())) == [("p", ["hm\na", "b"])]
    ours = [{"prompt": "p", "index": i, "text": t} for i, t in enumerate("xy")]
    assert read("c.jsonl", "\n".join(map(json.dumps, ours))) == [("p", ["x", "y"])]
    assert read("d.json", json.dumps(ours)) == [("p", ["x", "y"])]
    assert read("e.json", line, text_fields=["answer"]) == [("q", ["7"])]
    assert read("e.json", line, prompt_field="answer") == [("7", ["one", "two"])]
    broken = '{"data": [{"prompt": "p", "text": "x"}\n, {"prompt": "p", "text": "y"}]}'
    assert read("f.json", broken) == [("p", ["x", "y"])]
    broken = '{"meta": {"n": 1}\n, "rows": [{"prompt": "p", "text": "x"}]}'
    assert read("f.json", broken) == [("p", ["x"])]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("no json", 'write one object per line, such as {"prompt": "...", "text"'),
        ('{"prompt": "p", "text": "t"}\n{', "line 2 is not JSON"),
        ("\nno json\n{}", r"a.jsonl is not JSON: .* line 2 .*; nor is line 2 by itself: Expecting"),
        ("[1, 2]", "must contain only JSON objects"),
        ("[]", "must contain only JSON objects"),
        (
            '{"text": "t"}',
            "record 1 has no text in prompt, question, .* --prompt-field, one of: text",
        ),
        (
            '{"prompt": "p", "prompt": "q", "text": "t"}\n{}',
            "a.jsonl line 1 is not JSON: .*duplicate key 'prompt'",
        ),
        ('{"prompt": "p"}\n{"text": "p", "text": "q"}', "line 2 is .* duplicate key 'text'"),
        ('\n{"prompt": "p", "n": ' + "9" * 5000 + "}\n{}", "line 2 is .* thousands of digits"),
        ("[" * 10**5 + "\n{}", "line 1 is not JSON: its brackets are nested too deeply"),
        (
            '{"prompt": "p", "text": "t"\n{"prompt": "q", "text": "t"}',
            r"a.jsonl is not JSON: Expecting ',' delimiter: line 2 column 1 .*; nor is line 1 by "
            "itself: Expecting ',' delimiter",
        ),
        ('[\n{"prompt": "p"},\n]', r"a.jsonl is not JSON: .*: line \d column \d+ \("),
        ('{"data": [\n{"prompt": "p",\n"text": "t"', "a.jsonl is not JSON: .*: line 3 column"),
        ('[\n{"prompt": "p", "n": 1, "n": 2}\n]', "a.jsonl is not JSON: .*duplicate key"),
        (
            '{"prompt": "p", "n": 3}',
            "record 1 has no text or list .* --text-field, one of: prompt, n",
        ),
        ('{"prompt": "p", "thinking": ["a"], "output": ["a", "b"]}', "in thinking [+] output"),
    ],
)
def test_what_is_no_recording_is_named(tmp_path: Path, text: str, said: str) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text(text)
    with pytest.raises(DataError, match=said):
        read_recordings([path])


def test_unreadable_files_are_named(tmp_path: Path) -> None:
    path = tmp_path / "a.json.gz"
    with pytest.raises(DataError, match="cannot read .*; check the path"):
        read_recordings([path])
    for data in (gzip.compress(b"{}" * 99)[:-9], b"\xff\xfe"):
        path.write_bytes(data)
        with pytest.raises(DataError, match="cannot read|not UTF-8"):
            read_recordings([path])


def test_traces_are_cut_and_empty_samples_left_out(tiny: Model, tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    records = [{"prompt": "", "outputs": ["the cat sat", ""]}, {"prompt": "p", "outputs": [""]}]
    path.write_text("\n".join(map(json.dumps, records)))
    (trace,) = to_traces(read_recordings([path]), tiny.tokenizer, max_tokens=2)
    assert trace.prompt == [0]
    assert trace.samples == [tiny.tokenizer.encode("the cat sat")[:2]]


def test_tokenizers_alone(tiny_folder: Path, tmp_path: Path) -> None:
    whole = load_tokenizer(str(tiny_folder))
    packed = tmp_path / "tokenizer.json.gz"
    packed.write_bytes(gzip.compress((tiny_folder / "tokenizer.json").read_bytes()))
    for name in (tiny_folder / "tokenizer.json", packed, tmp_path):
        found = load_tokenizer(str(name))
        assert found.encode("the cat") == whole.encode("the cat")
        assert found.vocab_size == whole.vocab_size
    packed.write_bytes(b"{}")
    with pytest.raises(DataError, match=r"is not a tokenizer\.json"):
        load_tokenizer(str(packed))


# the command


@pytest.fixture
def call(capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str, str]]:
    def run(*words: Any) -> tuple[int, str, str]:
        status = main(["replay", *map(str, words)])
        return status, *capsys.readouterr()

    return run


def test_command(call: Callable[..., Any], tmp_path: Path, tiny_folder: Path) -> None:
    path = tmp_path / "a.jsonl"
    record = {"prompt": "the cat", "samples": ["sat on the mat the cat sat"] * 3}
    path.write_text(json.dumps(record))
    words = (path, "--tokenizer", tiny_folder, "-d", "none", "-d", "prompt_lookup")
    status, out, err = call(*words, "--json")
    found = json.loads(out)
    assert (status, err) == (0, "")
    assert (found["prompts"], found["samples"], found["vocabulary"]) == (1, 3, 288)
    assert found["overlap"]["2"][2] > 0.6
    assert found["drafters"]["none"]["tau"] == 1 < found["drafters"]["prompt_lookup"]["tau"]
    status, out, _ = call(*words)
    assert status == 0 and "2-gram" in out and "prompt_lookup" in out and "1 prompt, 3 samp" in out


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("-d", "stand"), "draws random drafts"),
        (("-d", "stnd"), "did you mean 'stand'"),
        (("--nodes", 0), "--nodes must be at least 1, got 0"),
        (("--text-field", "no"), "--text-field, one of: prompt, text"),
    ],
)
def test_command_refuses(call: Callable[..., Any], tmp_path: Path, words: Any, said: str) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"prompt": "p", "text": "t"}')
    status, out, err = call(path, *words)
    assert (status, out) == (2, "") and said in err and err.count("\n") == 1


# real traces


def test_real_traces_repeat_themselves_as_the_paper_says(data_dir: Path) -> None:
    """Overlap grows with trajectories and falls with n, on eight samples of MATH problems.

    Measured when written, phi-3 tokens, first sample and first eight: 2-grams .50, .88; 3-grams
    .35, .83; 4-grams .25, .79; 5-grams .19, .76. The paper's figure, on longer texts of another
    model: .86, .955; .70, .86; .55, .74; .43, .62.
    """
    file = data_dir / "traces" / "qwen_math_100x8.jsonl.gz"
    tokenizer = load_tokenizer(str(data_dir / "tokenizers" / "phi3"))
    found = overlap(to_traces(read_recordings([file])[:30], tokenizer))
    for n, row in found.items():
        print(n, [round(share, 2) for share in row])
        assert len(row) == 8 and all(a < b for a, b in zip(row, row[1:], strict=False))
    assert all(found[n][7] > found[n + 1][7] for n in (2, 3, 4))
    assert found[2][7] > 0.85 and found[5][7] > 0.7
