"""`forerun generate`: what goes in and what comes out."""

from __future__ import annotations

import io
import json
import shlex
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from command import CAT, Call, interrupted, records

from forerun.cli import _call_line, loading, prompts
from forerun.utils.text import counted


def test_json_has_one_object_per_sample(generate: Call) -> None:
    status, out, err = generate(*CAT, "-n", 3, "--seed", 4, "--json", "--logprobs", 2)
    found = records(out)
    assert (status, err) == (0, "")
    assert sorted(r["index"] for r in found) == [0, 1, 2]
    for r in found:
        assert r["seed"] == 4 and r["finish"] in ("stop", "length")
        assert len(r["tokens"]) == len(r["logprobs"]) == r["stats"]["generated"] <= 8
        assert all(str(t) in top for t, top in zip(r["tokens"], r["logprobs"], strict=True))


def test_text_has_samples_on_stdout_and_statistics_on_stderr(generate: Call) -> None:
    status, out, err = generate(*CAT, "-n", 2, "--seed", 1)
    assert status == 0
    assert out.count("--- prompt 0, sample") == 2
    assert "tau" in err and "target pass" in err and "2 samples" in err


def test_a_model_too_small_to_gain_names_the_command_that_shows_a_gain(
    generate: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    said = "is too small to gain from drafts"
    lines = generate(*CAT, "--seed", 1)[2].splitlines()
    (line,) = [line for line in lines if said in line]
    assert line.endswith("to see a gain, run: forerun demo")
    for words in (("--drafter", "none"), ("--json",)):
        assert said not in generate(*CAT, "--seed", 1, *words)[2]
    monkeypatch.setattr(loading, "SMALL_BYTES", 1)
    assert said not in generate(*CAT, "--seed", 1)[2]


def test_printed_call_makes_the_same_samples_again(generate: Call, call: Call) -> None:
    _, out, err = generate(*CAT, "-n", 2, "--temperature", 0.7, "--stop", "it's")
    line = err.splitlines()[0]
    assert line.startswith("# forerun generate ")
    assert call(*shlex.split(line[2:])[1:])[1] == out


def test_one_line_of_the_printed_call_holds_any_prompt() -> None:
    quoted = _call_line._quoted("it's\n\\n two lines")
    assert quoted == "$'it\\'s\\n\\\\n two lines'"


def test_drafter_and_sampling_options_reach_the_engine(generate: Call) -> None:
    words = (*CAT, "--json", "--temperature", 0, "--seed", 1, "--batch", 1)
    plain = records(generate(*words, "--drafter", "none")[1])[0]
    stand = records(generate(*words, "-n", 2, "--nodes", 4, "--depth", 2)[1])[1]
    assert plain["tokens"] == stand["tokens"]
    assert plain["stats"]["drafted"] == 0 < stand["stats"]["accepted"]
    assert len(stand["stats"]["per_position"]) <= 2
    banned = records(generate(*words, "--ban", plain["tokens"][0])[1])[0]
    assert plain["tokens"][0] not in banned["tokens"]
    biased = records(generate(*words, "--logit-bias", "7=100")[1])[0]
    assert set(biased["tokens"]) == {7}
    stopped = records(generate(*words, "--stop-token-id", plain["tokens"][2])[1])[0]
    assert (stopped["tokens"], stopped["finish"]) == (plain["tokens"][:3], "stop")


def test_prompts_from_everywhere(
    generate: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = tmp_path / "two lines.txt"
    text.write_text("the cat\nsat on\n")
    lines = tmp_path / "many.jsonl"
    lines.write_text(
        '{"prompt": "the dog", "id": "q7"}\n\n'
        '{"prompt": [5, 6, 7], "n": 2, "temperature": 0, "logit_bias": {"9": 100}}\n'
    )
    found = records(generate("--prompt-file", text, "--json")[1])
    assert [r["prompt"] for r in found] == ["the cat\nsat on"]
    found = records(generate(*CAT, "--prompt-file", lines, "--json", "--batch", 1)[1])
    assert [(r["prompt_index"], r["prompt"]) for r in found] == [
        (0, "the cat sat on"),
        (1, "the dog"),
        (2, [5, 6, 7]),
        (2, [5, 6, 7]),
    ]
    assert found[1]["id"] == "q7" and set(found[2]["tokens"]) == {9}
    monkeypatch.setattr(sys, "stdin", io.StringIO("from a pipe\n"))
    assert records(generate("--json")[1])[0]["prompt"] == "from a pipe"


def test_standard_input_is_a_text_or_json_lines(
    generate: Call, pipe: Callable[[str], None], tmp_path: Path
) -> None:
    def asked(*words: Any) -> list[Any]:
        found = records(generate("--json", "--max-new-tokens", 1, *words)[1])
        return [(r["prompt"], r.get("id")) for r in found]

    lines = '\n{"prompt": "the dog", "id": "q7", "n": 2}\n{"prompt": [5, 6]}\n'
    file = tmp_path / "prompts.jsonl"
    file.write_text(lines)
    many = asked("-f", file)
    assert many == [("the dog", "q7"), ("the dog", "q7"), ([5, 6], None)]
    for words in ([], ["--prompt", "-"], ["--prompt-file", "-"]):
        pipe(lines)
        assert asked(*words) == many
        pipe("from a\npipe\n")
        assert asked(*words) == [("from a\npipe", None)]
    pipe("piped")
    assert asked("-p", "first", "-p", "-", "-p", "last") == [
        ("first", None),
        ("piped", None),
        ("last", None),
    ]
    for text in ('{"prompt": broken', '{"name": "Ada"}', '[{"prompt": "a"}]'):
        pipe(text)
        assert asked() == [(text, None)], "that is a text"
    pipe('{"prompt": "a", "n": 2, "n": 3}\n{"prompt": "b"}\n')
    code, _, err = generate("--json")
    assert code == 2 and "standard input line 1" in err and "duplicate key 'n'" in err


def test_logprobs_are_shown_to_people_too(generate: Call) -> None:
    words = (*CAT, "--seed", 4, "--logprobs", 2)
    found = records(generate(*words, "--json")[1])[0]
    _, out, _ = generate(*words)
    lines = out[len(found["text"]) + 1 :].splitlines()
    assert out.startswith(found["text"]) and len(lines) == 1 + len(found["tokens"])
    for line, token, top in zip(lines[1:], found["tokens"], found["logprobs"], strict=True):
        values = [top.pop(str(token)), *top.values()]
        shown = [word for word in line.split() if word.lstrip("-").replace(".", "").isdigit()]
        assert shown[:1] == [f"{values[0]:.2f}"] and shown[-1] == f"{values[-1]:.2f}"
    assert generate(*CAT, "--seed", 4)[1] == found["text"] + "\n"


def test_counts_agree_with_their_nouns(generate: Call) -> None:
    assert counted(1, "token") == "1 token" and counted(0, "pass", "passes") == "0 passes"
    _, out, err = generate(*CAT, "-n", 2, "--max-new-tokens", 1, "--drafter", "none")
    assert "sample 0: 1 token," in out and "2 samples, 2 tokens in" in err
    assert "(1 pass)" in generate(*CAT, "--max-new-tokens", 1, "--drafter", "none")[2]


def test_lines_end_at_line_feeds_only_and_a_byte_order_mark_is_no_text(
    generate: Call, tmp_path: Path
) -> None:
    prompts = ["the\u2028cat", "the\x85dog", "sat\u2029on"]
    lines = [json.dumps({"prompt": p}, ensure_ascii=False) for p in prompts]
    file = tmp_path / "many.jsonl"
    file.write_bytes(b"\xef\xbb\xbf" + "\r\n".join(lines).encode())
    found = records(generate("--prompt-file", file, "--json", "--max-new-tokens", 1)[1])
    assert [r["prompt"] for r in found] == prompts
    plain = tmp_path / "one.txt"
    plain.write_bytes(b"\xef\xbb\xbfthe cat\r\n")
    found = records(generate("--prompt-file", plain, "--json", "--max-new-tokens", 1)[1])
    assert found[0]["prompt"] == "the cat"


def test_what_out_writes_can_be_asked_again(generate: Call, tmp_path: Path) -> None:
    out = tmp_path / "samples.jsonl"
    words = ("-p", "the\u2028cat", *CAT, "--seed", 3, "--json", "--logprobs", 1)
    first = records(generate(*words, "--out", out)[1])
    again = records(generate("--prompt-file", out, "--seed", 3, "--json")[1])
    assert [(r["prompt"], r["tokens"]) for r in again] == [
        (r["prompt"], r["tokens"]) for r in first
    ]


def test_every_prompt_has_its_own_randomness_whatever_its_settings(
    generate: Call, tmp_path: Path
) -> None:
    def samples(temperatures: list[float], *words: Any) -> list[dict[str, Any]]:
        file = tmp_path / "prompts.jsonl"
        lines = [json.dumps({"prompt": "the cat", "temperature": t}) for t in temperatures]
        file.write_text("\n".join(lines))
        return records(generate("-f", file, "--seed", 3, "--json", *words)[1])

    mixed, equal = samples([1, 1.0001, 1]), samples([1, 1, 1])
    assert len({tuple(r["tokens"]) for r in mixed}) == 3
    assert [mixed[i]["tokens"] for i in (0, 2)] == [equal[i]["tokens"] for i in (0, 2)]
    assert [r["seed"] for r in mixed] == [3, 3, 3]
    wide = samples([1, 1.0001, 1], "--batch", 3)
    assert sorted(r["prompt_index"] for r in wide) == [0, 1, 2]


def test_embedded_models_are_shown_problems_in_their_form(tiny: Path) -> None:
    from forerun import assets

    shown = "Problem: 2 + 2?\nSolution:\n"
    for name in ("reasoner", assets.embedded("reasoner"), assets.embedded("draft")):
        assert prompts.as_shown(name, " 2 + 2? ") == shown
    assert prompts.as_shown("reasoner", shown) == shown
    assert prompts.as_shown("reasoner", "Problem: 2 + 2? ") == shown, "what lacks is added"
    assert prompts.as_shown("reasoner", "Problem:") == "Problem:"
    assert prompts.as_shown("reasoner", [5, 6]) == [5, 6]
    assert prompts.as_shown(str(tiny), "2 + 2?") == "2 + 2?"


def test_results_file_holds_every_sample(generate: Call, tmp_path: Path) -> None:
    out = tmp_path / "samples.jsonl"
    status, printed, _ = generate(*CAT, "-n", 2, "--batch", 2, "--json", "--out", out)
    assert status == 0 and records(out.read_text()) == records(printed)


def test_interrupt_keeps_finished_samples(tiny: Path, tmp_path: Path) -> None:
    out = tmp_path / "samples.jsonl"
    printed = interrupted("generate", "-m", tiny, *CAT, "-n", 3000, "--json", "--out", out)
    found = records(printed)
    assert found and records(out.read_text()) == found


@pytest.mark.parametrize("error", [KeyboardInterrupt(), MemoryError()], ids=repr)
@pytest.mark.parametrize("command", ["generate", "demo"])
def test_a_run_without_a_result_leaves_no_file(
    call: Call,
    tiny: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    command: str,
    error: BaseException,
) -> None:
    def fail(*_: Any, **__: Any) -> Any:
        raise error

    from forerun.api import Model

    words = [command, "-m", tiny, *(CAT if command == "generate" else ())]
    before = tmp_path / "before.jsonl"
    before.touch()
    for place, name in ((loading, "load"), (Model, "run")):
        with monkeypatch.context() as patched:
            patched.setattr(place, name, fail)
            status, _, _ = call(*words, "--out", tmp_path / "new.jsonl")
            assert status == (130 if isinstance(error, KeyboardInterrupt) else 2)
            assert not (tmp_path / "new.jsonl").exists()
            call(*words, "--out", before)
            assert before.exists(), "it was there"
