"""`forerun generate --memory` and `forerun memory`: files live, merge, shrink, and refuse."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from command import Call, interrupted, records

import forerun
from forerun.cli.memory import memory_saved
from forerun.core.cost import Cost
from forerun.core.roles import Target
from forerun.engine.stats import Stats
from forerun.models.tokenizer import Tokenizer
from forerun.ngrams.tables.suffix.response_store import CONTEXT_TOKENS
from forerun.state import drafter_files
from forerun.tasks.reasoning import ReasoningTask

CAT = ("--prompt", "the cat sat on")
PROGRAM = (sys.executable, "-m", "forerun.cli.main")
KEEPERS = (  # whoever can save what it learns, alone or as a part of another
    "stand",
    "auto",
    "fuse",
    "stand:scope=tenant",
    "suffix:scope=tenant",
    "sam:scope=tenant",
    "token_recycling:scope=tenant",
    "aded",
)


@pytest.fixture
def generate(call: Call, tiny_folder: Path) -> Call:
    return lambda *words: call("generate", "-m", tiny_folder, "--max-new-tokens", 8, *CAT, *words)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "a.mem"


def tokens(path: Path) -> int:
    return drafter_files.read(path).snapshot.counts["tokens"]


def test_a_memory_lives_from_run_to_run(generate: Call, path: Path) -> None:
    status, _, err = generate("-n", 2, "--seed", 1, "--ignore-eos", "--memory", path)
    assert status == 0 and tokens(path) == 16
    assert f"memory: {drafter_files.read(path).snapshot.counts['contexts']} contexts" in err
    status, _, err = generate("-n", 2, "--seed", 2, "--ignore-eos", "--memory", path, "--json")
    assert (status, tokens(path)) == (0, 32)
    assert all(line.startswith("compil") for line in err.splitlines())


@pytest.mark.parametrize(
    ("drafter", "by", "is_told"),
    [
        ("auto", {"draft_model": 3}, True),
        ("auto", {"draft_model": 3, "stand": 0}, True),
        ("auto", {"draft_model": 3, "stand": 1}, False),
        ("auto", {}, False),
        ("stand:scope=tenant", {"stand": 3}, False),
    ],
)
def test_a_memory_that_nothing_was_drafted_from_is_told(
    path: Path,
    tiny_folder: Path,
    capsys: pytest.CaptureFixture[str],
    drafter: str,
    by: dict[str, int],
    is_told: bool,
) -> None:
    """`auto` reads it only while STAND is the fastest of its parts."""
    model = forerun.load(str(tiny_folder))
    for is_there in (False, True):
        with memory_saved(
            model, path, drafter, "", is_quiet=False, stats=Stats(drafted_by=Counter(by))
        ):
            model.generate(["the cat"], max_new_tokens=4, drafter=drafter)
        told = "--drafter stand always uses it" in capsys.readouterr().err
        assert told == (is_told and is_there)


@pytest.mark.parametrize("drafter", KEEPERS)
def test_a_memory_learns_every_token_where_drafts_do_not_pay(
    generate: Call, path: Path, drafter: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Target, "cost", Cost((1, 2), (1e-5, 1.0)))
    words = ("-n", 4, "--max-new-tokens", 40, "--ignore-eos", "--seed", 1, "-d", drafter)
    status, out, err = generate(*words, "--memory", path, "--json")
    samples = records(out)
    passes = sum(sample["stats"]["passes"] for sample in samples)
    assert status == 0 and passes > 140, "hardly anything is drafted"
    followed = {token for sample in samples for token in sample["tokens"][:-1]}
    counts_ids = drafter.startswith("token_recycling")  # of which the successors are known
    assert tokens(path) >= (len(followed) if counts_ids else 4 * 40), err


@pytest.mark.slow
def test_a_memory_learns_all_that_the_reasoner_says(tmp_path: Path, path: Path) -> None:
    """Its passes are so fast that drafts hardly pay: a process of its own, with measured costs."""
    prompt = ReasoningTask("heldout").example(3).prompt
    done = subprocess.run(
        [*PROGRAM, "generate", "-p", prompt, "-n", "16", "--memory", str(path), "--json"],
        env=os.environ
        | {"PYTHONPATH": os.pathsep.join(sys.path), "FORERUN_CACHE": str(tmp_path / "cache")},
        capture_output=True,
        text=True,
        check=True,
    )
    said = sum(record["stats"]["generated"] for record in records(done.stdout))
    assert tokens(path) == said > 300


def test_the_printed_call_names_the_memory(generate: Call, path: Path) -> None:
    assert f"--memory={path}" in generate("--memory", path)[2].splitlines()[0]


def test_a_run_that_fails_saves_what_it_has_learned(
    generate: Call, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from forerun.cli.output import Results

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Results, "write", full)
    status, _, err = generate("--seed", 1, "--ignore-eos", "--memory", path)
    assert status == 2 and "No space left" in err and tokens(path) == 8


@pytest.mark.slow
def test_interrupted_runs_save(tiny_folder: Path, path: Path) -> None:
    words = ("-m", tiny_folder, *CAT, "-n", 500, "--json", "--memory", path, "--nodes", 8)
    printed = interrupted("generate", *words)
    finished = [json.loads(line) for line in printed.splitlines()]
    assert tokens(path) >= sum(record["stats"]["generated"] for record in finished) > 0
    assert [file.name for file in path.parent.iterdir()] == [path.name]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--drafter", "none"), "drafter 'none' has no state to save"),
        (("--drafter", "stand:scope=request"), "use stand:scope=tenant"),
        (("--drafter", "stand:entries=5"), "with entries=5, got one with entries=10"),
        (("--tenant", "b"), "belongs to tenant 'a', not to tenant 'b'"),
        (
            ("--drafter", "auto:scope=request"),
            "cannot be saved for tenant 'a'; use auto:scope=tenant",
        ),
    ],
)
def test_generate_refuses(generate: Call, path: Path, words: Any, said: str) -> None:
    assert generate("--memory", path, "--tenant", "a")[0] == 0
    before = path.read_bytes()
    status, out, err = generate("--memory", path, "--tenant", "a", *words)
    assert (status, out) == (2, "") and said in err
    assert path.read_bytes() == before


def test_generate_refuses_a_place_that_cannot_be_written_before_it_generates(
    generate: Call, path: Path
) -> None:
    long = path.with_name("a" * 255)  # no room for the name of the file that is written first
    for is_there in (False, True):
        if is_there:
            assert generate("--memory", path)[0] == 0
            path.rename(long)
        status, out, err = generate("--memory", long)
        assert (status, out) == (2, "") and "File name too long; use another path" in err


def test_info(call: Call, generate: Call, path: Path, tiny_folder: Path) -> None:
    generate("-n", 4, "--seed", 1, "--memory", path, "--tenant", "acme")
    status, out, _ = call("memory", "info", path)
    assert status == 0
    for said in ("stand", "context=4+3+2+1", "tenant    acme", tiny_folder.name, "bytes"):
        assert said in out
    status, out, _ = call("memory", "info", path, path, "--json")
    found = [json.loads(line) for line in out.splitlines()]
    assert status == 0 and found[0] == found[1]
    assert found[0]["origin"]["tenant"] == "acme" and found[0]["counts"]["tokens"] == tokens(path)
    assert str(path.parent) not in json.dumps(found[0]["origin"])


def test_info_says_that_tokens_of_prompts_count(
    call: Call, generate: Call, path: Path, tiny_folder: Path
) -> None:
    assert generate("-n", 2, "--ignore-eos", "--memory", path, "-d", "suffix")[0] == 0
    length = len(Tokenizer.load(tiny_folder).encode(CAT[1]))  # shorter than what is kept of one
    said = f"2 texts with up to {CONTEXT_TOKENS} tokens of each prompt"
    said += f", learned from {2 * (length + 8)} tok"
    assert said in call("memory", "info", path)[1]


def test_info_goes_on_behind_a_bad_file(call: Call, generate: Call, path: Path) -> None:
    generate("--memory", path)
    path.with_name("bad.mem").write_text("mine")
    bad = (path.with_name("bad.mem"), path.with_name("absent.mem"))
    status, out, err = call("memory", "info", bad[0], path, bad[1], "--json")
    assert status == 2 and [json.loads(line)["path"] for line in out.splitlines()] == [str(path)]
    lines = err.splitlines()
    assert len(lines) == 2 and all(line.startswith("error: ") for line in lines)
    assert "not written by forerun" in lines[0] and "absent.mem" in lines[1]


def test_info_shows_what_would_be_drafted(
    call: Call, generate: Call, path: Path, tiny_folder: Path
) -> None:
    _, out, _ = generate("--temperature", 0, "--ignore-eos", "--memory", path, "--json")
    tokenizer, ids = Tokenizer.load(tiny_folder), json.loads(out)["tokens"]
    at = next(i for i in range(7) if tokenizer.encode(tokenizer.decode(ids[i : i + 1])) == [ids[i]])
    words = ("memory", "info", path, "-m", tiny_folder, "--nodes", 12, "--json")
    found = json.loads(call(*words, "--after", tokenizer.decode(ids[at : at + 1]))[1])
    assert any(
        draft.startswith(tokenizer.decode(ids[at + 1 : at + 2])) for draft in found["drafts"]
    )
    assert json.loads(call(*words, "--after", "qqqq")[1])["drafts"] == []


def test_a_shared_memory_is_not_saved_for_one_tenant(
    call: Call, generate: Call, path: Path, tmp_path: Path
) -> None:
    own = ("--memory", tmp_path / "a-bob.mem", "--tenant", "bob")
    assert generate("--memory", path)[0] == 0
    before = path.read_bytes()
    status, out, err = generate("--memory", path, "--tenant", "bob")
    assert (status, out) == (
        2,
        "",
    ) and "is shared by all tenants; saving it for tenant 'bob'" in err
    assert path.read_bytes() == before
    told = shlex.split(err.split("`forerun ")[1].split("`")[0])
    assert told == ["memory", "merge", str(path), *own[2:], "--out", str(own[1])]
    assert call(*told)[0] == 0 and generate(*own)[0] == 0  # a copy that is bob's
    _, _, err = generate("--memory", own[1])
    assert "belongs to tenant 'bob', not to all tenants" in err
    told = shlex.split(err.split("`forerun ")[1].split("`")[0])
    assert call(*told)[0] == 0 and generate("--memory", told[-1])[0] == 0  # and a common one again


def test_merge_and_cap(call: Call, generate: Call, path: Path, tmp_path: Path) -> None:
    other, out = tmp_path / "b.mem", tmp_path / "c.mem"
    generate("--seed", 1, "--ignore-eos", "--memory", path)
    generate("--seed", 2, "--ignore-eos", "--memory", other, "--tenant", "b")
    status, printed, _ = call("memory", "merge", path, other, "--out", out)
    assert status == 0 and "learned from 16 tokens" in printed and tokens(out) == 16
    assert drafter_files.read(out).origin.tenant == "b"
    assert call("memory", "merge", out, "--out", out, "--tenant", "")[0] == 0
    assert drafter_files.read(out).origin.tenant == "" and tokens(path) == 8
    status, printed, _ = call("memory", "cap", out, "--mb", 0.003, "--json")
    assert status == 0 and json.loads(printed)["bytes"] <= 3145
    assert drafter_files.read(out).snapshot.nbytes <= 3145
    assert generate("--memory", out)[0] == 0
    whole = path.read_bytes()
    assert call("memory", "cap", path, "--mb", 0.003, "--out", tmp_path / "d.mem")[0] == 0
    assert path.read_bytes() == whole


@pytest.mark.parametrize("drafter", KEEPERS[:-1])  # aded's can be cut to nothing
def test_a_cap_that_is_too_small_names_one_that_is_not(
    call: Call, generate: Call, path: Path, drafter: str
) -> None:
    assert generate("--memory", path, "-d", drafter, "--nodes", 8)[0] == 0
    before = path.read_bytes()
    status, out, err = call("memory", "cap", path, "--mb", 1e-6)
    assert (status, out) == (2, "") and path.read_bytes() == before
    assert "got 1; allow more" in err and (said := re.search(r"at least (\d+) bytes", err))
    assert call("memory", "cap", path, "--mb", int(said[1]) / 2**20)[0] == 0
    assert drafter_files.read(path).snapshot.nbytes == int(said[1])


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("info", "absent"), "there is no file absent"),
        (("info", "{notes}"), "not written by forerun"),
        (("merge", "{a}", "--out", "{notes}"), "is not one of the inputs"),
        (("merge", "{a}", "{notes}", "--out", "{new}"), "not written by forerun"),
        (("cap", "{a}", "--mb", "0"), "--mb must be above 0 and at most 1073741824, got 0"),
        (("cap", "{a}", "--mb", "0.001"), "a cap of at least 1920 bytes (0.0018 MiB)"),
        (("merge", "{a}", "--mb", "0.001", "--out", "{new}"), "at least 1920 bytes"),
        (("cap", "{a}", "{a}", "--mb", "1", "--out", "{new}"), "--out needs one input"),
        (("cap", "{a}", "--mb", "1", "--out", "{notes}"), "and a new file"),
    ],
)
def test_refusals(call: Call, generate: Call, tmp_path: Path, words: Any, said: str) -> None:
    names = {name: tmp_path / name for name in ("a", "notes", "new")}
    generate("--memory", names["a"])
    names["notes"].write_text("mine")
    before = names["a"].read_bytes()
    status, out, err = call("memory", *(word.format(**names) for word in words))
    assert (status, out) == (2, "") and said in err and err.count("\n") == 1
    assert names["notes"].read_text() == "mine" and not names["new"].exists()
    assert names["a"].read_bytes() == before
