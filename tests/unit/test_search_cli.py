"""`forerun search` and `forerun fit-tree`: what a user gets, and what bad input gets."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tiny import make_tiny

from forerun.cli import fit_tree
from forerun.cli.main import main
from forerun.core.tree_template import DEFAULT, Template
from forerun.growers import _fit_template as fitting
from forerun.state import array_file


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny(tmp_path_factory.mktemp("cli") / "tiny")


@pytest.fixture
def search(capsys: pytest.CaptureFixture[str], tiny: Path) -> Any:
    """`forerun search` on the tiny model; status, standard output, standard error."""

    def run(*words: Any) -> tuple[int, str, str]:
        given = ["search", "-m", tiny, "-p", "the cat", "--max-new-tokens", 12, "--seed", 3, *words]
        status = main([str(word) for word in given])
        return status, *capsys.readouterr()

    return run


def test_best_of_as_json(search: Any) -> None:
    status, out, _ = search("-n", 4, "--answer", r"\w", "--json", "--select", "majority")
    (record,) = [json.loads(line) for line in out.splitlines()]
    assert status == 0 and record["method"] == "best_of" and record["num_asked"] == 4
    assert [sample["index"] for sample in record["samples"]] == [0, 1, 2, 3]
    assert record["text"] == record["samples"][record["chosen"]]["text"]
    assert record["stats"]["generated"] == sum(len(s["tokens"]) for s in record["samples"])


@pytest.mark.parametrize("method", ["beam", "step-beam", "dvts"])
def test_step_searches_as_json(search: Any, method: str) -> None:
    status, out, _ = search(
        "--method", method, "-n", 4, "--width", 2, "--scorer", "likelihood", "--step-end", " ",
        "--step-tokens", 5, "--json",
    )  # fmt: skip
    record = json.loads(out)
    assert status == 0 and record["method"] == ("dvts" if method == "dvts" else "step_beam")
    numbers = [branch["number"] for branch in record["tree"]]
    assert numbers == list(range(len(numbers))) and record["tree"][0]["parent"] is None
    assert record["chosen"] in numbers
    assert 0 < record["abandoned_tokens"] < record["stats"]["generated"]
    assert record["stats"]["failures"] == 0


def test_tokens_of_abandoned_branches_are_told(search: Any) -> None:
    words = ("--method", "dvts", "-n", 4, "--width", 2, "--scorer", "likelihood")
    status, _, err = search(*words, "--step-end", " ", "--step-tokens", 5)
    (line,) = [line for line in err.splitlines() if "tokens/s" in line]
    assert status == 0 and line.endswith("of them in texts that were abandoned")
    assert "abandoned" not in search("-n", 2, "--select", "likelihood")[2]


def test_text_for_people(search: Any) -> None:
    status, out, err = search("-n", 2, "--scorer", "builtins:len", "--select", "score")
    assert status == 2 and "failed on all 2 samples" in err  # len takes one argument
    status, out, err = search("-n", 2, "--select", "likelihood")
    assert status == 0 and out.strip()
    assert "answer" in err and "tau" in err and err.startswith("# forerun search")


@pytest.mark.parametrize(
    "words", [(), ("--method", "dvts", "--width", 2, "--scorer", "likelihood", "--step-end", " ")]
)
def test_what_is_learned_is_kept_for_the_next_search(
    search: Any, tmp_path: Path, words: tuple
) -> None:
    file = tmp_path / "a.mem"
    words = (*words, "-n", 4, "--drafter", "stand:scope=tenant", "--controller", "fixed")
    words = (*words, "--memory", file, "--tenant", "ann")
    first = search(*words)
    (before,) = [line for line in first[2].splitlines() if line.startswith("memory: ")]
    again = search(*words)
    (after,) = [line for line in again[2].splitlines() if line.startswith("memory: ")]
    assert first[0] == again[0] == 0 and str(file) in before
    origin = array_file.read_origin(file)
    assert origin.tenant == "ann" and before != after, "it has learned more"
    status, _, err = search("-n", 2, "--select", "likelihood", "--memory", tmp_path)
    assert status == 2 and str(tmp_path) in err


def test_out_keeps_a_line_per_prompt(search: Any, tmp_path: Path) -> None:
    file = tmp_path / "found.jsonl"
    status, _, _ = search("-p", "one two", "-n", 2, "--out", file, "--select", "likelihood")
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    assert status == 0 and [line["prompt"] for line in lines] == ["the cat", "one two"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--method", "bem"], "did you mean 'step_beam'|unknown search method"),
        (["--method", "dvts"], "dvts needs a scorer, one of arithmetic"),
        (["--method", "dvts", "--scorer", "arithmetic", "--early-stop"], "--early-stop belongs"),
        (["--step-tokens", "4"], "--step-tokens belongs to dvts, step_beam, not to best_of"),
        (["--scorer", "aritmetic"], "did you mean 'arithmetic'"),
        (["--scorer", "nowhere:score"], "MODULE:FUNCTION"),
        (["--scorer", "reward:nowhere/at/all"], "no model folder"),
        (["--answer", "("], "not a regular expression"),
        (["--select", "best"], "unknown selection"),
        (["--method", "dvts", "--scorer", "likelihood", "-n", "5"], "multiple of width"),
    ],
    ids=str,
)
def test_bad_input_is_one_line(search: Any, words: list[str], said: str) -> None:
    import re

    status, out, err = search(*words)
    lines = [line for line in err.splitlines() if not line.startswith(("#", "compil"))]
    assert status == 2 and out == "" and len(lines) == 1
    assert re.search(said, lines[0]), lines[0]


def test_a_reward_model_scores(search: Any, tmp_path: Path) -> None:
    import torch
    from transformers import AutoTokenizer, LlamaConfig, LlamaForSequenceClassification

    from forerun.search._scorers import Attempt, RewardModel

    folder = make_tiny(tmp_path / "reward")
    torch.manual_seed(2)
    config = LlamaConfig(
        vocab_size=288, hidden_size=32, intermediate_size=64, num_hidden_layers=2,
        num_attention_heads=4, num_labels=1, pad_token_id=0,
    )  # fmt: skip
    reward = LlamaForSequenceClassification(config).eval()
    reward.save_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    attempts = [Attempt("the cat ", text) for text in ("sat", "on the mat and", "x" * 9, "", "on")]
    found = RewardModel(str(folder), batch=2).score(attempts)
    for attempt, score in zip(attempts, found, strict=True):  # alone, without padding
        ids = torch.tensor([tokenizer.encode(attempt.prompt + attempt.text)])
        with torch.inference_mode():
            assert score == pytest.approx(float(reward(input_ids=ids).logits), abs=1e-5)
    status, out, _ = search("-n", 3, "--scorer", f"reward:{folder}", "--json")
    record = json.loads(out)
    scores = [sample["score"] for sample in record["samples"]]
    assert status == 0 and scores[record["chosen"]] == max(scores)


def test_a_classifier_with_several_outputs_is_refused(tmp_path: Path) -> None:
    from transformers import LlamaConfig, LlamaForSequenceClassification

    from forerun.errors import ModelError
    from forerun.search._scorers import RewardModel

    folder = make_tiny(tmp_path / "classes")
    config = LlamaConfig(
        vocab_size=288, hidden_size=32, intermediate_size=64, num_hidden_layers=1,
        num_attention_heads=4, num_labels=3,
    )  # fmt: skip
    LlamaForSequenceClassification(config).save_pretrained(folder)
    with pytest.raises(ModelError, match="3 outputs, expected 1"):
        RewardModel(folder)


def test_a_language_model_is_no_reward_model(tmp_path: Path) -> None:
    """Its checkpoint has no head for a score, which transformers would make up."""
    from forerun.errors import ModelError
    from forerun.search._scorers import RewardModel

    with pytest.raises(ModelError, match=r"the checkpoint lacks .*score\.weight"):
        RewardModel(make_tiny(tmp_path / "tiny"))


@pytest.fixture
def fit(capsys: pytest.CaptureFixture[str]) -> Any:
    """`forerun fit-tree`; status, standard output, standard error."""

    def run(*words: Any) -> tuple[int, str, str]:
        status = main(["fit-tree", *(str(word) for word in words)])
        return status, *capsys.readouterr()

    return run


def prompts(folder: Path, count: int) -> Path:
    words = ["one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten"]
    file = folder / f"prompts{count}.jsonl"
    file.write_text(
        "".join(json.dumps({"prompt": " ".join(words[i % 10 :])}) + "\n" for i in range(count))
    )
    return file


def test_fit_tree_writes_what_is_picked_up(fit: Any, tmp_path: Path) -> None:
    folder = make_tiny(tmp_path / "own")
    short = ["--max-new-tokens", 16, "-n", 2, "--sizes", "4+8", "--json"]
    status, out, err = fit("-m", folder, "--prompts", prompts(tmp_path, 6), *short)
    record = json.loads(out)
    assert status == 0 and "6 prompts: 5 to fit on, 1 to measure on" in err
    path = folder / fitting.FILE_NAME
    assert record["file"] == str(path) and set(record["tau"]) == {"4", "8"}
    found, facts = Template.load(path), json.loads(path.read_text())
    assert sorted(found.places) == sorted(DEFAULT.places)
    assert facts["passes"] == record["passes"] >= max(facts["tries"]) > 10
    assert facts["hits"][0] == max(facts["hits"]) and facts["fitted_on"]["trajectories"] == 2
    assert facts["model"] == "own"  # no folders of this machine

    import forerun

    assert forerun.load(folder).drafter("stand:tree=template").template == found


def test_fit_tree_measures_on_prompts_that_it_was_not_fitted_on(
    fit: Any, tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    used: dict[str, set[str]] = {}
    for name in ("_count", "_gains"):
        real = getattr(fit_tree, name)

        def noted(model: Any, texts: list[str], *rest: Any, name=name, real=real) -> Any:
            used[name] = set(texts)
            return real(model, texts, *rest)

        monkeypatch.setattr(fit_tree, name, noted)
    out = ["--out", tmp_path / "t.json", "--samples", 4, "--held-out", 2, "-n", 1]
    status, _, _ = fit("-m", tiny, "--prompts", prompts(tmp_path, 6), *out, "--max-new-tokens", 8)
    assert status == 0
    assert len(used["_count"]) == 4 and len(used["_gains"]) == 2
    assert not used["_count"] & used["_gains"]


def test_fit_tree_refuses_what_it_cannot_split(fit: Any, tiny: Path, tmp_path: Path) -> None:
    one = tmp_path / "one.jsonl"
    one.write_text('{"prompt": "the cat"}\n' * 5)
    for words, said in (
        (["-m", tiny], "needs --prompts FILE"),
        (["-m", tiny, "--prompts", one], "1 different prompt"),
        (["-m", tiny, "--prompts", prompts(tmp_path, 4), "--sizes", "a"], "--sizes must be"),
        (["--sizes", "8+626"], "in 1..625, as a template has 625 places, got '8+626'"),
    ):
        status, out, err = fit(*words)
        assert status == 2 and said in err and out == ""


def test_fit_tree_makes_no_folders_for_what_it_refuses(
    fit: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("forerun.load", None)
    file, out = prompts(tmp_path, 4), Path("a", "b", "t.json")
    given = ["--prompts", file, "--out", out, "-m"]
    for words, said in (
        ([*given, "./nowhere"], "there is no model folder ./nowhere"),
        ([*given, tmp_path], "there is no config.json"),
        (["--out", file / "b" / "t.json"], f"there is no folder {file}"),
    ):
        status, _, err = fit(*words)
        assert status == 2 and said in err
    assert list(tmp_path.iterdir()) == [file]


def test_fit_tree_replaces_templates_and_nothing_else(fit: Any, tmp_path: Path) -> None:
    mine = prompts(tmp_path, 4)
    text = mine.read_text()
    status, _, err = fit("--prompts", mine, "--out", mine)
    assert status == 2 and "exists and is not a template" in err and mine.read_text() == text


def test_a_folder_that_is_called_like_the_embedded_model_is_not_its_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`forerun train reasoner` makes such a folder; the template of the embedded one is cached."""
    from forerun.cli.fit_tree import _default_path

    (tmp_path / "reasoner").mkdir()
    (tmp_path / "mine").mkdir()
    monkeypatch.chdir(tmp_path)
    assert _default_path("mine") == Path("mine/forerun-template.json")
    assert tmp_path not in _default_path("reasoner").resolve().parents
