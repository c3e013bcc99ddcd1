"""`forerun train --resume` continues with the options of the run, and takes no other folder."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from draft_runs import OPTIONS

from forerun.cli.main import main
from forerun.registry import get
from forerun.training.plans import RECIPE_KEY, options_of_run


def train(out: Path, *words: str) -> int:
    return main(["train", "draft", "--out", str(out), *words])


@pytest.fixture(scope="module")
def run(target: Path, prompts: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run of a draft with options of its own."""
    out = tmp_path_factory.mktemp("trained") / "draft"
    options = {name: value for name, value in OPTIONS.items() if value is not None}
    words = [f"--{name.replace('_', '-')}={value}" for name, value in options.items()]
    assert train(out, "--model", str(target), "--prompts", str(prompts), *words) == 0
    return out


def test_options_that_are_not_given_are_those_of_the_run(run: Path) -> None:
    before = json.loads((run / "plan.json").read_text())
    assert train(run, "--resume", "--max-steps", "12") == 0
    after = json.loads((run / "plan.json").read_text())
    assert after["settings"] == before["settings"] and after["budgets"]["max_steps"] == 12
    steps = json.loads((run / "draft.json").read_text())["training"]
    assert sum(phase["step"] for phase in steps.values()) == 12


def test_an_option_with_another_value_is_named(run: Path, capsys) -> None:
    assert train(run, "--resume", "--share", "0.07") == 2
    assert f"was started with share {OPTIONS['share']}, but this" in capsys.readouterr().err
    assert train(run, "--resume", "--max-tokens", "256") == 2  # its default
    assert "was started with max_tokens" in capsys.readouterr().err


def test_the_folder_of_another_recipe_is_named(run: Path, capsys, tmp_path: Path) -> None:
    traffic = tmp_path / "traffic.jsonl"
    traffic.write_text('{"prompt": "a b"}\n' * 3)
    words = ["--out", str(run), "--replay", str(traffic), "--resume"]
    assert main(["train", "online", *words]) == 2
    assert "was started with train draft, but this run has train online" in capsys.readouterr().err
    assert options_of_run(run, get("recipe", "online")) == {}


@pytest.mark.parametrize("words", [[], ["--resume"]])
def test_a_folder_with_other_files_is_left_alone(words: list[str], capsys, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    assert train(tmp_path, *words) == 2
    assert "has files, but none of a training run; choose a new" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["config.json"]


def test_options_come_back_as_they_were(tmp_path: Path) -> None:
    """Paths as paths, lists as tuples; no option that was unset, and no hash."""
    settings = {RECIPE_KEY: "draft", "prompts": "p.jsonl", "corpus": None, "share": 0.2}
    plan = {"settings": settings | {"prompts_hash": "ab"}, "budgets": {"minutes": 3.0}}
    (tmp_path / "plan.json").write_text(json.dumps(plan))
    found = options_of_run(tmp_path, get("recipe", "draft"))
    assert found == {"prompts": Path("p.jsonl"), "share": 0.2, "minutes": 3.0}
    judge = {"settings": {RECIPE_KEY: "judge_head", "sources": [0, 2]}}
    (tmp_path / "plan.json").write_text(json.dumps(judge))
    assert options_of_run(tmp_path, get("recipe", "judge_head")) == {"sources": (0, 2)}


def test_required_options_are_those_of_the_run_too(target: Path, capsys, tmp_path: Path) -> None:
    """`train sorted` needs --corpus; a resumed run has it from its plan."""
    out, corpus = tmp_path / "sorted", tmp_path / "texts.txt"
    corpus.write_text("Ann has 12 pens. Ben has 3 more. " * 400)
    words = ["train", "sorted", "--out", str(out)]
    small = ["--hidden", "32", "--exits", "1", "--exits", "2", "--max-steps", "2"]
    assert main([*words, "--corpus", str(corpus), "--model", str(target), *small]) == 0
    assert main([*words, "--resume", "--max-steps", "4"]) == 0
    plan = json.loads((out / "plan.json").read_text())
    assert plan["settings"]["corpus"] == str(corpus) and plan["budgets"]["max_steps"] == 4
    assert main([*words]) == 2
    assert "Missing option '--corpus'" in capsys.readouterr().err
    assert main(["train", "sorted", "--out", str(tmp_path / "none"), "--resume"]) == 2
    assert "has no run of sorted to take --corpus from" in capsys.readouterr().err
