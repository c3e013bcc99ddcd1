"""The command line: what a user gets, and what bad input gets."""

from __future__ import annotations

import importlib
import io
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tiny import make_tiny

from forerun import catalog, compiled
from forerun.bench import machine
from forerun.cli import main as cli
from forerun.cli import options, prompts
from forerun.cli.main import main
from forerun.cli.output import Results, counted
from forerun.errors import CapacityError

Call = Callable[..., tuple[int, str, str]]
HEAVY = ("torch", "numba", "transformers", "numpy")
CAT = ("--prompt", "the cat sat on")


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny(tmp_path_factory.mktemp("cli") / "tiny")


@pytest.fixture(scope="session")
def other(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny(tmp_path_factory.mktemp("cli") / "other", vocab=300)


@pytest.fixture
def call(capsys: pytest.CaptureFixture[str]) -> Call:
    """Runs a command line in this process; gives status, standard output, standard error."""

    def run(*words: Any) -> tuple[int, str, str]:
        status = main([str(word) for word in words])
        out, err = capsys.readouterr()
        return status, out, err

    return run


@pytest.fixture
def generate(call: Call, tiny: Path) -> Call:
    """`forerun generate` on the tiny model, few tokens."""
    return lambda *words: call("generate", "-m", tiny, "--max-new-tokens", 8, *words)


@pytest.fixture
def refuses(call: Call) -> Callable[..., str]:
    """Runs a command line that must end in one line of error and status 2; gives that line."""

    def run(*words: Any) -> str:
        status, out, err = call(*words)
        lines = [line for line in err.splitlines() if not line.startswith("#")]
        assert status == 2 and len(lines) == 1 and lines[0].startswith("error: "), err
        assert out == ""
        return lines[0]

    return run


def records(text: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in text.split("\n") if line]


def python(code: str) -> str:
    """What a fresh interpreter prints."""
    paths = os.pathsep.join(sys.path)
    environment = os.environ | {"PYTHONPATH": paths}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True
    )
    return done.stdout


@pytest.mark.parametrize("words", [["--help"], ["methods"], []])
def test_help_and_methods_import_nothing_heavy(words: list[str]) -> None:
    printed = python(
        "import sys; from forerun.cli.main import main; status = main(sys.argv[1:] or "
        f"{words!r}); print(status, [m for m in {HEAVY!r} if m in sys.modules])"
    )
    assert printed.splitlines()[-1] == "0 []"


def test_help_lists_every_command(call: Call) -> None:
    status, out, _ = call("--help")
    assert status == 0
    assert all(name in out and text[:30] in out for name, text in cli.COMMANDS.items())


@pytest.mark.parametrize("name", cli.COMMANDS)
def test_every_command_has_help(call: Call, name: str) -> None:
    status, out, _ = call(name, "--help")
    assert status == 0 and f"forerun {name}" in out


def test_version(call: Call) -> None:
    assert call("--version")[:2] == (0, "forerun 0.1.0\n")


# generate


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


def test_printed_call_makes_the_same_samples_again(generate: Call, call: Call) -> None:
    _, out, err = generate(*CAT, "-n", 2, "--temperature", 0.7, "--stop", "it's")
    line = err.splitlines()[0]
    assert line.startswith("# forerun generate ")
    assert call(*shlex.split(line[2:])[1:])[1] == out


def test_one_line_of_the_printed_call_holds_any_prompt() -> None:
    quoted = options._quoted("it's\n\\n two lines")
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


@pytest.fixture
def pipe(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Puts a text on standard input."""

    def put(text: str) -> None:
        stream = io.TextIOWrapper(io.BytesIO(text.encode()), encoding="utf-8")
        monkeypatch.setattr(sys, "stdin", stream)

    return put


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
    assert prompts.as_shown("reasoner", [5, 6]) == [5, 6]
    assert prompts.as_shown(str(tiny), "2 + 2?") == "2 + 2?"


def test_kernels_are_ready_only_if_compiled_from_this_source(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    code = "from numba import njit\n\n@njit(cache=True)\ndef twice(x):\n    return 2 * x\n"
    file = tmp_path / "kernels_of_a_test.py"
    file.write_text(code)
    monkeypatch.setenv("NUMBA_CACHE_DIR", "")
    monkeypatch.syspath_prepend(str(tmp_path))
    module = importlib.import_module("kernels_of_a_test")
    (tmp_path / "__pycache__" / "other.nbi").touch()  # somebody else's
    assert not compiled.is_ready(module.twice)
    assert module.twice(2) == 4 and compiled.is_ready(module.twice)
    (index,) = compiled.indices(module.twice)
    fresh = importlib.reload(module).twice
    assert not fresh.signatures and compiled.is_ready(fresh)
    os.utime(file, (index.stat().st_mtime + 9,) * 2)
    assert not compiled.is_ready(fresh)


def test_parts_in_use_are_warmed_up() -> None:
    class Spy:
        warmed = 0

        def drafter(self, spec: str) -> Any:
            assert spec == "fuse"
            return self

        def warm_up(self) -> None:
            self.warmed += 1

    spy = Spy()
    options.warm_up(spy, drafter="fuse", verifier="recursive")
    assert spy.warmed == 1


def test_results_file_holds_every_sample(generate: Call, tmp_path: Path) -> None:
    out = tmp_path / "samples.jsonl"
    status, printed, _ = generate(*CAT, "-n", 2, "--batch", 2, "--json", "--out", out)
    assert status == 0 and records(out.read_text()) == records(printed)


def test_interrupt_keeps_finished_samples(tiny: Path, tmp_path: Path) -> None:
    out = tmp_path / "samples.jsonl"
    words = ["generate", "-m", tiny, *CAT, "-n", 3000, "--json", "--out", out]
    process = subprocess.Popen(
        [sys.executable, "-m", "forerun.cli.main", *map(str, words)],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    first = process.stdout.readline()
    process.send_signal(signal.SIGINT)
    rest, err = process.communicate(timeout=120)
    assert process.returncode == 130 and "interrupted" in err and "Traceback" not in err
    found = records(first + rest)
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

    from forerun.engine.api import Model

    words = [command, "-m", tiny, *(CAT if command == "generate" else ())]
    before = tmp_path / "before.jsonl"
    before.touch()
    for place, name in ((options, "load"), (Model, "run")):
        with monkeypatch.context() as patched:
            patched.setattr(place, name, fail)
            status, _, _ = call(*words, "--out", tmp_path / "new.jsonl")
            assert status == (130 if isinstance(error, KeyboardInterrupt) else 2)
            assert not (tmp_path / "new.jsonl").exists()
            call(*words, "--out", before)
            assert before.exists(), "it was there"


# bad input


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["generate", "--drafer", "stand"], "--drafter"),
        (["genrate"], "'generate'"),
        (["generate", *CAT, "-d", "stnd"], "'stand'"),
        (["generate", *CAT, "-d", "stand:contxt=3"], "'context'"),
        (["generate", *CAT, "-d", "kangaroo"], "'kangaroo' is not built yet"),
        (["generate", *CAT, "-d", "rsd"], "grower=gumbel --verifier recursive"),
        (["generate", *CAT, "--verifier", "transfer"], "verifiers that work: "),
        (["generate", "-p", ""], "--prompt is empty"),
        (["generate", "-p", "-", "-f", "-"], "can be read once"),
        (["verify", "--law-prompts", "-1"], "--law-prompts must be at least 0"),
        (["generate", *CAT, "-d", "stand:context"], "context=VALUE"),
        (["generate", *CAT, "-d", "stand:entries=many"], "takes a whole number"),
        (["generate", *CAT, "-d", "draft_model"], "needs model"),
        (["generate", *CAT, "--verifier", "recursiv"], "'recursive'"),
        (["generate", *CAT, "--controller", "fixd"], "'fixed'"),
        (["generate", *CAT, "--controller", "additive", "--nodes", "3"], "'fixed'"),
        (["generate", *CAT, "--nodes", "-1"], "nodes"),
        (["generate", *CAT, "--controller", "additive:least=9,most=3"], "least <= depth"),
        (["generate", *CAT, "-d", "draft_model:model=X,grower=gumbl"], "'gumbel'"),
        (["generate", *CAT, "-d", "fuse:parts=stand+promt_lookup"], "'prompt_lookup'"),
        (["generate", *CAT, "-d", "fuse:parts=stand+draft_model"], "needs model"),
        (["generate", "-p", "a\udcffb"], "--prompt is not UTF-8"),
        (["generate", *CAT, "--stop", "\udcff"], "--stop is not UTF-8"),
        (["generate", *CAT, "--temperature", "-0.5"], "temperature"),
        (["generate", *CAT, "--top-p", "0"], "top_p"),
        (["generate", *CAT, "-n", "0"], "n must be"),
        (["generate", *CAT, "-n", "two"], "integer"),
        (["generate", *CAT, "--min-new-tokens", "9", "--max-new-tokens", "8"], "min_new_tokens"),
        (["generate", *CAT, "--logit-bias", "5"], "ID=BIAS"),
        (["generate", *CAT, "--batch", "0"], "batch"),
        (["generate", *CAT, "--prompt-file", "no/such.txt"], "no/such.txt"),
        (["generate", *CAT, "-m", "./no-such-folder"], "no-such-folder"),
        (["methods", "stnad"], "'stand'"),
        (["verify", "--prompts", "0"], "--prompts"),
        (["verify", "--temperature", "0"], "temperature"),
        (["demo", "--problems", "0"], "--problems"),
        (["demo", "--drafter", "none"], "plain decoding"),
        (["train", "reasner"], "'reasoner'"),
    ],
    ids=lambda value: " ".join(value)[:60] if isinstance(value, list) else "",
)
def test_refused_before_a_model_is_loaded(
    refuses: Callable[..., str], words: list[str], said: str
) -> None:
    assert said in refuses(*words)


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("not json", "line 2 is not JSON"),
        ('"a text"', 'line 2 needs an object with "prompt"'),
        ('{"prompt": [1, "a"]}', 'line 2 needs an object with "prompt"'),
        ('{"prompt": ""}', "line 2 has an empty prompt"),
        ('{"prompt": []}', "line 2 has an empty prompt"),
        ('{"prompt": "a", "temprature": 1}', "'temperature'"),
        ('{"prompt": "\\ud800"}', "line 2 is not UTF-8"),
        ('{"prompt": "a", "top_p": 0}', "line 2: top_p"),
        ('{"prompt": "a", "logit_bias": {"x": 1}}', "line 2: logit_bias"),
    ],
)
def test_bad_prompt_lines_are_named(
    refuses: Callable[..., str], tiny: Path, tmp_path: Path, line: str, said: str
) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"prompt": "fine"}\n' + line + "\n")
    assert said in refuses("generate", "-m", tiny, "-f", file)


def test_bad_prompt_files(refuses: Callable[..., str], tiny: Path, tmp_path: Path) -> None:
    (tmp_path / "empty.jsonl").touch()
    (tmp_path / "empty.txt").write_text("\n")
    (tmp_path / "latin.txt").write_bytes(b"caf\xe9")
    for name in ("empty.jsonl", "empty.txt"):
        said = refuses("generate", "-m", tiny, "-f", tmp_path / name)
        assert f"{name} is empty or blank: it holds no prompt; write" in said
    assert "UTF-8" in refuses("generate", "-m", tiny, "-f", tmp_path / "latin.txt")


@pytest.mark.parametrize("text", ["", "\n", "\r\n"])
def test_empty_standard_input_says_where_a_prompt_may_stand(
    refuses: Callable[..., str], pipe: Callable[[str], None], text: str
) -> None:
    pipe(text)
    said = refuses("generate")
    assert "standard input is empty" in said and "--prompt TEXT or --prompt-file FILE" in said
    pipe(text)
    assert refuses("generate", *CAT, "-p", "-") == said


def test_bad_lines_on_standard_input_are_named(
    refuses: Callable[..., str], pipe: Callable[[str], None]
) -> None:
    pipe('{"prompt": "fine"}\n{"prompt": "a", "temprature": 1}\n')
    assert "standard input line 2: 'temprature'" in refuses("generate")


def test_bytes_that_are_no_text_on_standard_input(
    refuses: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"\xff"), encoding="utf-8"))
    assert "standard input is not UTF-8" in refuses("generate")


@pytest.mark.parametrize(
    ("error", "status", "said"),
    [
        (RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory"), 2, "--batch"),
        (RuntimeError("CUDA out of memory. Tried to allocate 2 GiB"), 2, "out of memory"),
        (MemoryError(), 2, "out of memory"),
        (KeyError("slot"), 70, "internal error, KeyError: 'slot'"),
        (RuntimeError("shapes\ndiffer"), 70, "--debug"),
        (KeyboardInterrupt(), 130, "interrupted"),
    ],
    ids=str,
)
def test_every_failure_is_one_line_and_a_status(
    call: Call, monkeypatch: pytest.MonkeyPatch, error: BaseException, status: int, said: str
) -> None:
    def fail(*_: Any) -> Any:
        raise error

    monkeypatch.setattr(options, "load", lambda *_, **__: fail())
    got, out, err = call("generate", *CAT, "--json")
    lines = err.strip().splitlines()
    assert (got, out, len(lines)) == (status, "", 1) and said in lines[0]


@pytest.mark.parametrize("words", [["methods"], ["methods", "--json"], ["--help"]], ids=" ".join)
def test_a_reader_that_leaves_is_no_error(words: list[str]) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run(
        [sys.executable, "-m", "forerun.cli.main", *words],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
        stdout=writer,
        stderr=subprocess.PIPE,
        text=True,
    )
    os.close(writer)
    assert (done.returncode, done.stderr) == (141, "")


def test_prompts_that_cannot_be_served(refuses: Callable[..., str], tiny: Path) -> None:
    assert "empty" in refuses("generate", "-m", tiny, "-p", "")
    assert "context" in refuses("generate", "-m", tiny, "-p", "cat " * 200)


def test_token_ids_beyond_the_vocabulary(refuses: Callable[..., str], tiny: Path) -> None:
    for flag in (["--ban", 9999], ["--logit-bias", "300=2"], ["--stop-token-id", 288]):
        assert "end at 287" in refuses("generate", "-m", tiny, *CAT, *flag)


def test_draft_with_another_vocabulary(
    refuses: Callable[..., str], tiny: Path, other: Path
) -> None:
    spec = f"draft_model:model={other}"
    assert "vocabulary" in refuses("generate", "-m", tiny, *CAT, "-d", spec)


def test_broken_model_folders(refuses: Callable[..., str], tiny: Path, tmp_path: Path) -> None:
    def broken(name: str) -> Path:
        return Path(shutil.copytree(tiny, tmp_path / name))

    corrupt = broken("corrupt")
    weights = corrupt / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])
    assert "model.safetensors" in refuses("generate", "-m", corrupt, *CAT)
    silent = broken("silent")
    for file in silent.glob("tokenizer*"):
        file.unlink()
    assert "tokenizer" in refuses("generate", "-m", silent, *CAT)
    strange = broken("strange")
    config = json.loads((strange / "config.json").read_text())
    config |= {"model_type": "warbler", "architectures": ["WarblerForCausalLM"]}
    (strange / "config.json").write_text(json.dumps(config))
    assert "warbler" in refuses("generate", "-m", strange, *CAT)
    empty = tmp_path / "empty"
    empty.mkdir()
    assert str(empty) in refuses("generate", "-m", empty, *CAT)


def test_results_are_never_overwritten(
    refuses: Callable[..., str], tiny: Path, tmp_path: Path
) -> None:
    out = tmp_path / "samples.jsonl"
    out.write_text("precious\n")
    assert "exists" in refuses("generate", "-m", tiny, *CAT, "--out", out)
    assert out.read_text() == "precious\n"
    assert "cannot write" in refuses("generate", "-m", tiny, *CAT, "--out", tmp_path / "a" / "b")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_full_disk_is_named_and_the_sample_is_shown(generate: Call) -> None:
    status, out, err = generate(*CAT, "--json", "--out", "/dev/full")
    assert status == 2 and len(records(out)) == 1
    assert err.splitlines()[-1].startswith("error: cannot write /dev/full: No space left")


def test_a_line_that_does_not_fit_leaves_the_lines_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    results = Results(tmp_path / "samples.jsonl")
    results.write({"a": 1})
    whole = os.write
    rooms = iter([3])

    def short(file: int, data: bytes) -> int:
        room = next(rooms, None)
        if room is None:
            raise OSError(28, "No space left on device")
        return whole(file, data[:room])

    monkeypatch.setattr(os, "write", short)
    with pytest.raises(CapacityError, match="the 1 result written before is kept"):
        results.write({"b": 2})
    monkeypatch.undo()
    results.close()
    assert (tmp_path / "samples.jsonl").read_text() == '{"a": 1}\n'


def test_debug_shows_the_traceback(tiny: Path) -> None:
    with pytest.raises(ValueError, match="top_p"):
        main(["generate", "-m", str(tiny), *CAT, "--top-p", "0", "--debug"])


# the other commands


def test_methods_table_lists_all(call: Call) -> None:
    status, out, _ = call("methods")
    assert status == 0
    assert all(f"{row.name} " in out and row.title in out for row in catalog.rows())
    assert "41 systems" in out


def test_methods_as_json(call: Call) -> None:
    found = json.loads(call("methods", "--json")[1])
    assert [row["name"] for row in found] == [row.name for row in catalog.rows()]
    assert {row["state"] for row in found} <= {"works", "partial", "missing"}


def test_methods_explains_one(call: Call) -> None:
    _, out, _ = call("methods", "stand")
    for said in ("2506.04708", "context = 4", "scope = group", "docs/methods/stand.md", "works"):
        assert said in out
    assert "(missing)" in call("methods", "kangaroo")[1]
    assert "gumbel (grower)" in call("methods", "gumbel")[1]
    found = json.loads(call("methods", "draft-model", "--json")[1])
    assert found["parts"]["drafter"]["options"]["model"] == "required"


def test_verify_passes_and_reports(call: Call, tiny: Path) -> None:
    words = ("verify", "-m", tiny, "--prompts", 2, "--max-new-tokens", 12)
    words += ("--law-prompts", 1, "--samples", 200)
    status, out, _ = call(*words)
    assert status == 0 and "4 of 4 identical" in out and "verify passed" in out
    status, out, _ = call(*words, "--json", "--drafter", "none")
    found = json.loads(out)
    assert status == 0 and found["passed"] and found["law"]["is_vacuous"]
    assert found["dtype"] == "float32" and found["law"]["num_samples"] == 200


def test_verify_says_what_it_could_have_found(call: Call, tiny: Path) -> None:
    words = ("verify", "-m", tiny, "--prompts", 1, "--max-new-tokens", 4, "--law-prompts", 1)
    law = json.loads(call(*words, "--samples", 200, "--json")[1])["law"]
    assert law["power"] == 0.8 and 0.1 < law["detectable"] < 0.5
    assert law["detectable"] == max(test["detectable"] for test in law["tests"])
    assert 20_000 < law["samples_for_one_percent"] < 500_000
    _, out, _ = call(*words, "--samples", 200)
    last = out.splitlines()[-1]
    assert last.startswith("verify passed; at these counts the law test finds a mistake that moves")
    assert f"{law['detectable']:.1%} of a position's probability with 80% certainty" in last
    _, out, _ = call(*words, "--samples", 5)
    assert "too few samples to find anything" in out.splitlines()[-1]
    _, out, _ = call(*words[:-1], 0)
    assert out.splitlines()[-1] == "verify passed"


@pytest.mark.parametrize("at", [1, 2, 5])
def test_interrupted_verify_prints_what_was_finished(
    call: Call, tiny: Path, monkeypatch: pytest.MonkeyPatch, at: int
) -> None:
    """Ctrl-C at the n-th result: within the greedy texts, or before the second law prompt."""
    from forerun import sampled_law, verifying

    results = iter(range(1, 10))

    def stops(real: Callable[..., Any]) -> Callable[..., Any]:
        def run(*given: Any, **options: Any) -> Any:
            for result in real(*given, **options):
                if next(results) == at:
                    raise KeyboardInterrupt
                yield result

        return run

    monkeypatch.setattr(verifying, "check_greedy", stops(verifying.check_greedy))
    monkeypatch.setattr(sampled_law, "prompt_laws", stops(sampled_law.prompt_laws))
    words = ("verify", "-m", tiny, "--prompts", 2, "--max-new-tokens", 4, "--samples", 100)
    status, out, err = call(*words, "--law-prompts", 2)
    assert status == 130 and "Traceback" not in err
    done = f"{min(at - 1, 4)} of 4 greedy texts and {max(at - 5, 0)} of 2 law prompts finished"
    assert f"interrupted: {done}" in err
    assert out.count(": 4 tokens, identical") == min(at - 1, 4)
    assert "verify interrupted, and nothing wrong in what was finished" in out
    results = iter(range(1, 10))
    found = json.loads(call(*words, "--law-prompts", 2, "--json")[1])
    assert found["interrupted"] and found["passed"] is None


def test_verify_fails_with_status_1(
    call: Call, tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from forerun.verifiers import greedy
    from forerun.verifiers.greedy import Greedy

    def second_best(tree: Any, laws: Any) -> Any:
        from forerun.records import Verdict

        return Verdict([], int(laws.logits(-1).argsort()[-2]))

    monkeypatch.setattr(greedy, "follow_argmax", second_best)
    assert Greedy.lossless
    words = ("verify", "-m", tiny, "--verifier", "greedy", "--prompts", 1, "--law-prompts", 0)
    status, out, _ = call(*words)
    assert status == 1 and "violation at position 0" in out and "gap" in out


def test_demo_counts_both_arms(call: Call, tmp_path: Path) -> None:
    folder = make_tiny(tmp_path / "long", context=1024)
    out = tmp_path / "demo.jsonl"
    words = ("demo", "-m", folder, "--problems", 2, "-n", 3, "--max-new-tokens", 12)
    status, text, _ = call(*words)
    assert status == 0 and "speed-up" in text and "majority@3" in text and "3-4" in text
    status, text, _ = call(*words, "--json", "--out", out)
    found = json.loads(text)
    assert found["problems"] == 2 and found["speed_up"] > 0
    assert found["arms"]["none"]["stats"]["tau"] == 1.0
    arms = [r["arm"] for r in records(out.read_text())]
    assert sorted(arms[:2]) == sorted(arms[2:]) == ["none", "stand"]


def test_a_full_disk_keeps_what_the_demo_measured(
    call: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, out = make_tiny(tmp_path / "long", context=1024), tmp_path / "demo.jsonl"
    whole, counts = Results.write, iter(range(10))

    def write(self: Results, record: dict[str, Any]) -> None:
        if next(counts) < 3:
            return whole(self, record)
        monkeypatch.setattr(os, "write", no_space)
        return whole(self, record)

    def no_space(file: int, data: bytes) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Results, "write", write)
    words = ("demo", "-m", folder, "--problems", 3, "-n", 2, "--max-new-tokens", 8, "--out", out)
    status, text, err = call(*words)
    last = err.splitlines()[-1]
    assert status == 2 and last.startswith(f"error: cannot write {out}: No space left on device")
    assert "the 3 results written before are kept" in last
    assert len(records(out.read_text())) == 3
    assert "best of 2 on 2 held-out problems" in text and "speed-up" in text


def test_doctor_reports(call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "read_bandwidth", lambda threads, tries=8: 1e-9)
    status, out, err = call("doctor", "--json")
    found = json.loads(out)
    assert status == 0 and found["number types"]["fp32"].startswith("works")
    assert {"versions", "processor", "gpu", "kernels", "embedded model"} <= found.keys()
    assert {"weights, 1 row", "weights, 8 rows", "weights, 16 rows"} <= found["speed"].keys()
    assert "how fast memory" in err  # nobody wonders what takes so long

    def refuse(threads: int) -> float:
        raise CapacityError("no room")

    monkeypatch.setattr(machine, "read_bandwidth", refuse)
    _, out, _ = call("doctor")
    assert "torch" in out and "not measured: no room" in out and "advice" in out
