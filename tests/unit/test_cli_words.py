"""What people read: remarks that stay short, mistakes in words, what Ctrl-C left."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from forerun.cli import loading
from forerun.cli.main import main

Call = Callable[..., tuple[int, str, str]]
CAT = ("-p", "the cat sat on")


@pytest.fixture
def call(capsys: pytest.CaptureFixture[str], tiny_folder: Path) -> Call:
    """A command on the tiny model; gives status, standard output, standard error."""

    def run(command: str, *words: Any) -> tuple[int, str, str]:
        model = () if "-m" in words else ("-m", tiny_folder)
        status = main([str(word) for word in (command, *model, *words)])
        return status, *capsys.readouterr()

    return run


def test_a_long_prompt_is_shortened_where_people_look_and_whole_where_it_is_kept(
    call: Call, tmp_path: Path
) -> None:
    prompt, out = "the cat " * 40, tmp_path / "samples.jsonl"
    words = ("-p", prompt, "--max-new-tokens", 1, "--seed", 1)
    _, _, err = call("generate", *words, "--out", out)
    said = err.splitlines()[0]
    assert said.startswith("# forerun generate") and "(120 more characters)" in said
    assert prompt[:200] in said and prompt[:201] not in said
    assert prompt in json.loads(out.read_text())["call"]


@pytest.mark.parametrize("command", ["generate", "search"])
def test_blank_prompts_are_empty_ones(call: Call, tmp_path: Path, command: str) -> None:
    assert "--prompt is empty" in call(command, "-p", " \t ")[2]
    text, lines = tmp_path / "blank.txt", tmp_path / "blank.jsonl"
    text.write_text(" \n\n  \n")
    lines.write_text('{"prompt": "fine"}\n{"prompt": " \\n"}\n')
    assert "blank.txt is empty or blank: it holds no prompt" in call(command, "-f", text)[2]
    status, out, err = call(command, "-f", lines)
    assert (status, out) == (2, "") and "line 2 has an empty prompt" in err


def test_a_huge_number_of_samples_comes_piece_by_piece(
    call: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from forerun.cli.generate_output import Output

    whole = Output.sample

    def sample(self: Output, *given: Any) -> None:
        whole(self, *given)
        if self.num_done == 3:
            raise KeyboardInterrupt

    monkeypatch.setattr(Output, "sample", sample)
    out = tmp_path / "samples.jsonl"
    words = (*CAT, "-n", 99_999_999, "--max-new-tokens", 2, "--out", out)
    status, _, err = call("generate", *words)
    assert status == 130 and len(out.read_text().splitlines()) == 3
    assert "99999999 samples, 16 at a time; Ctrl-C ends them and keeps what is finished" in err
    assert err.splitlines()[-1] == f"interrupted: 3 of 99999999 samples finished, kept in {out}"


def test_a_search_over_more_than_it_can_hold_is_refused(call: Call) -> None:
    status, _, err = call("search", *CAT, "-n", 99_999_999)
    assert (
        status == 2
        and "n must be a whole number from 1 to 65536, got 99999999: a search keeps all" in err
    )


def stop(*_: Any, **__: Any) -> Any:
    raise KeyboardInterrupt


@pytest.mark.parametrize(
    ("command", "said"),
    [
        ("generate", "before the first of 3 samples was finished; nothing is kept"),
        ("search", "0 of 1 prompt finished"),
    ],
)
@pytest.mark.parametrize("place", ["load", "warm_up"])
def test_ctrl_c_before_the_first_result_is_no_error(
    call: Call, monkeypatch: pytest.MonkeyPatch, command: str, said: str, place: str
) -> None:
    monkeypatch.setattr(loading, place, stop)
    status, out, err = call(command, *CAT, "-n", 3)
    assert (status, out) == (130, "")
    assert err.splitlines()[1:] == [f"interrupted: {said}".replace("d: before", "d before")]


def test_search_keeps_the_prompts_that_were_finished(
    call: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from forerun.search.best_of import BestOfN

    whole, out = BestOfN.run, tmp_path / "found.jsonl"

    def run(search: Any, model: Any, prompt: Any, **how: Any) -> Any:
        return stop() if how["prompt_index"] else whole(search, model, prompt, **how)

    monkeypatch.setattr(BestOfN, "run", run)
    words = (*CAT, "-p", "the dog", "-n", 2, "--select", "likelihood", "--max-new-tokens", 2)
    status, _, err = call("search", *words, "--out", out)
    assert status == 130 and len(out.read_text().splitlines()) == 1
    assert err.splitlines()[-1] == f"interrupted: 1 of 2 prompts finished, kept in {out}"


def test_ctrl_c_elsewhere_is_no_error_either(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from forerun import catalog

    monkeypatch.setattr(catalog, "rows", stop)
    assert main(["methods"]) == 130
    assert capsys.readouterr().err == "interrupted; what was printed or written by then stays\n"


def test_a_broken_config_is_not_blamed_on_the_tokenizer(
    call: Call, tiny_folder: Path, tmp_path: Path
) -> None:
    for name, text in (("config.json", "{broken"), ("config.json", "[]")):
        folder = tmp_path / f"model{len(text)}"
        shutil.copytree(tiny_folder, folder)
        (folder / name).write_text(text)
        status, _, err = call("generate", *CAT, "-m", folder)
        assert status == 2 and f"{folder / 'config.json'} cannot be used" in err
    folder = Path(shutil.copytree(tiny_folder, tmp_path / "tokenizer"))
    (folder / "tokenizer.json").write_text("{broken")
    assert f"the tokenizer in {folder} cannot be used" in call("generate", *CAT, "-m", folder)[2]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--logprobs", -1], "logprobs must be an integer in 0..1000, or left out, got -1"),
        (["--seed", -3], "seed must be an integer >= 0, or left out, got -3"),
        (["--ban", 5, "--ban", -1], "banned_tokens must be token ids, got 5, -1"),
        (["--logit-bias", "5=inf"], "logit_bias must be token id -> bias within 1e30, got 5=inf"),
        (["--ban", 5, "--logit-bias", "5=2"], "tokens 5 are banned"),
        (["--dtype", "xyz"], "known: auto, bf16, fp16, fp32"),
    ],
    ids=str,
)
def test_mistakes_are_told_in_words(call: Call, words: list[Any], said: str) -> None:
    status, out, err = call("generate", *CAT, *words)
    assert (status, out) == (2, "") and said in err
