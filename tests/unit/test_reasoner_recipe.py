"""The reasoner's recipe: what a folder keeps, processes, evaluation, and the whole of it once."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from tiny import make_tiny

from forerun.core.sampling import Sampling
from forerun.errors import ConfigError, DataError
from forerun.tasks.reasoning import ReasoningTask
from forerun.training.data import problems
from forerun.training.evaluate import entropies, evaluate, load, measure_tau, read_solved
from forerun.training.language_model import train_together
from forerun.training.plans import NAME
from forerun.training.recipes import reasoner
from forerun.training.recipes.reasoner import Reasoner

DATA = "tokenizer.json"  # of a run that has begun


def small(**changed) -> Reasoner:
    options = {
        "threads": 1,
        "problems": 30,
        "tokenizer_problems": 30,
        "held_out": 2,
        "micro_tokens": 512,
        "max_steps": 1,
        "samples": 2,
        "sample_limit": 4,
    }
    return Reasoner(**options | changed)


@pytest.mark.parametrize(("threads", "expected"), [(1, 2), (2, 2), (3, 3), (4, 4), (5, 5)])
def test_every_process_gets_as_many_micro_batches(tmp_path, threads, expected):
    assert small(threads=threads).settled(tmp_path, resume=False).micro_batches == expected


def test_micro_batches_stay_what_they_were_and_must_fit(tmp_path):
    small(threads=4).settled(tmp_path, resume=False)
    assert small(threads=2).settled(tmp_path, resume=True).micro_batches == 4
    with pytest.raises(ConfigError, match=r"4 micro-batches .* 3 processes; use 2, or"):
        small(threads=3).settled(tmp_path, resume=True)
    assert small(threads=3, device="cuda").settled(tmp_path, resume=True).micro_batches == 4


def test_another_seed_is_refused_and_named(tmp_path):
    small(seed=3).settled(tmp_path, resume=False)
    (tmp_path / DATA).write_bytes(b"data")
    kept = (tmp_path / NAME).read_bytes()
    for resume in (True, False):
        with pytest.raises(
            ConfigError, match=r"started with seed 3, but this run has seed 4.*--out"
        ):
            small(seed=4).settled(tmp_path, resume)
    assert (tmp_path / NAME).read_bytes() == kept


@pytest.mark.parametrize(
    ("constant", "value", "name"),
    [("MIX", (1, 2), "levels"), ("VOCAB", 800, "vocabulary"), ("CONTEXT", 512, "context")],
)
def test_another_recipe_is_refused_and_named(tmp_path, monkeypatch, constant, value, name):
    small().settled(tmp_path, resume=False)
    (tmp_path / DATA).write_bytes(b"data")
    monkeypatch.setattr(reasoner, constant, value)
    with pytest.raises(ConfigError, match=f"started with {name} "):
        small().settled(tmp_path, resume=True)


def test_a_run_that_has_only_a_plan_may_get_other_settings(tmp_path):
    small(seed=3).settled(tmp_path, resume=False)
    assert small(seed=4).settled(tmp_path, resume=False).seed == 4
    assert json.loads((tmp_path / NAME).read_text())["settings"]["seed"] == 4


def test_budgets_may_change(tmp_path):
    small().settled(tmp_path, resume=False)
    changed = {"minutes": 1.0, "draft_minutes": 2.0, "problems": 40, "held_out": 5}
    small(threads=2, max_steps=7, **changed).settled(tmp_path, resume=True)
    budgets = json.loads((tmp_path / NAME).read_text())["budgets"]
    assert budgets["minutes"] == 1.0 and budgets["threads"] == 2 and budgets["max_steps"] == 7


def test_a_trained_folder_is_not_overwritten(tmp_path):
    small().settled(tmp_path, resume=False)
    (tmp_path / "draft.pt").touch()
    with pytest.raises(ConfigError, match="--resume"):
        small().settled(tmp_path, resume=False)


def test_a_folder_without_a_plan_is_judged_by_its_data(tmp_path):
    old = small()
    old.data(tmp_path).make(1)
    (tmp_path / "reasoner.pt").touch()
    with pytest.raises(ConfigError, match="holds other problems than seed 1"):
        replace(old, seed=1).settled(tmp_path, resume=True)
    assert not (tmp_path / NAME).exists()
    with pytest.raises(ConfigError, match="use 2, or --micro-batches 4"):
        replace(old, threads=4).settled(tmp_path, resume=True)
    assert old.settled(tmp_path, resume=True).micro_batches == 2
    assert (tmp_path / NAME).exists()


def test_an_unreadable_plan_is_named(tmp_path):
    (tmp_path / NAME).write_text("{")
    with pytest.raises(DataError, match=r"plan\.json is not a readable plan"):
        small().settled(tmp_path, resume=True)


def test_more_problems_make_a_short_shard_again(tmp_path, monkeypatch):
    monkeypatch.setattr(problems, "SHARD", 8)
    few = small(problems=10).data(tmp_path)
    few.make(1)
    made: list[tuple[int, int]] = []
    more = small(problems=20).data(tmp_path)
    more.make(1, lambda done, total: made.append((done, total)))
    assert made == [(1, 2), (2, 2)]  # of 8, 2 and none: the second again, and the third
    assert len(more.documents()) == 20 and len(few.documents()) >= 10
    ids, prompt = more.tokenise(9, 1)[0]
    assert more.documents().document(9).tolist() == ids and prompt < len(ids)


@pytest.mark.slow
def test_two_processes_train_as_one_does(tmp_path):
    recipes = {
        tmp_path / "alone": small(max_steps=2, micro_batches=2),
        tmp_path / "both": small(max_steps=2, threads=2),
    }
    for folder, recipe in recipes.items():
        settled = recipe.settled(folder, resume=False)
        settled.data(folder).make(1)
        assert train_together(settled, folder, "draft").step == 2
    found = [torch.load(folder / "draft.pt", weights_only=True) for folder in recipes]
    assert found[0]["progress"]["tokens"] == found[1]["progress"]["tokens"]
    for name, p in found[0]["parameters"].items():
        torch.testing.assert_close(found[1]["parameters"][name], p, atol=1e-4, rtol=1e-3)


def test_a_plan_of_an_earlier_version_is_read(tmp_path):
    """It named some options otherwise, and listed fewer."""
    small().settled(tmp_path, resume=False)
    (tmp_path / DATA).write_bytes(b"data")
    plan = json.loads((tmp_path / NAME).read_text())
    settings = {n: v for n, v in plan["settings"].items() if n != "tokenizer_problems"}
    for num, fits in ((30, True), (31, False)):
        old = {"settings": settings | {"num_tokenizer_problems": num}, "budgets": {}}
        (tmp_path / NAME).write_text(json.dumps(old))
        if fits:
            small().settled(tmp_path, resume=True)
        else:
            with pytest.raises(ConfigError, match="started with tokenizer_problems 31"):
                small().settled(tmp_path, resume=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return make_tiny(tmp_path_factory.mktemp("tiny"), context=2048)


def test_entropies_are_those_of_the_sampled_ids(folder):
    from transformers import AutoModelForCausalLM

    model = load(folder, "cpu", 1)
    sampling = Sampling(temperature=1.0, max_new_tokens=20, seed=5)
    ids = model.generate(["the cat sat"], sampling, drafter="none")[0].samples[0].tokens
    prompt = model.tokenizer.encode("the cat sat")
    with torch.no_grad():
        plain = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        logits = plain(torch.tensor([prompt + ids])).logits[0, len(prompt) - 1 : -1]
    expected = torch.distributions.Categorical(logits=logits).entropy().numpy()
    found = entropies(model, "the cat sat", sampling)
    assert len(found) == len(ids) > 1
    np.testing.assert_allclose(found, expected, rtol=1e-4)


def test_a_broken_off_evaluation_goes_on_where_it_was(folder, tmp_path):
    sampling = Sampling(temperature=0.6, n=2, max_new_tokens=6)
    whole = evaluate(folder, tmp_path / "whole.jsonl", 3, sampling, seed=1)
    lines = (tmp_path / "whole.jsonl").read_text().split("\n")
    assert len(read_solved(tmp_path / "whole.jsonl")) == 3
    torn = tmp_path / "torn.jsonl"
    torn.write_text("\n".join(lines[:2]) + "\n" + lines[2][:30])
    assert [s.problem for s in read_solved(torn)] == [0]
    done: list[tuple[int, int]] = []
    again = evaluate(
        folder, torn, 3, sampling, seed=1, on_problem=lambda *counts: done.append(counts)
    )
    assert done == [(2, 3), (3, 3)]
    assert again == whole and len(read_solved(torn)) == 3
    assert whole.num_problems == 3 and whole.num_samples == 2
    assert sum(whole.entropy_histogram.values()) == pytest.approx(100, abs=0.1)


def test_tau_counts_tokens_per_pass(folder):
    sampling = Sampling(temperature=0.6, n=4, max_new_tokens=40)
    assert measure_tau(folder, 1, sampling, drafter="none") == 1.0
    assert ReasoningTask("heldout").example(0).prompt
    assert 1.0 < measure_tau(folder, 1, sampling, drafter="stand") <= 17


def test_recipe_runs_from_data_to_cards_and_resumes(tmp_path):
    out, seen = tmp_path / "run", list[str]()

    def watch(title: str, share: float, note: str) -> None:
        if title.startswith("evaluation: "):
            seen.append(title.removeprefix("evaluation: "))

    recipe = small()
    lines = recipe.train(out, watch=watch)
    reports = recipe.reports
    assert [line.partition(":")[0] for line in lines] == ["reasoner", "draft"]
    assert seen == [
        *["reasoner"] * 2,
        *["tau of reasoner"] * 2,
        *["draft"] * 2,
        *["tau of draft"] * 2,
    ]
    assert reports["reasoner"].num_problems == 2 and reports["reasoner"].one_sample == 0.0
    for name in ("reasoner", "draft"):
        files = {f.name for f in (out / name).iterdir()}
        assert {"config.json", "model.safetensors", "tokenizer.json", "README.md"} <= files
        card = (out / name / "README.md").read_text()
        assert "2 held-out problems" in card
        assert f"2 problems | {reports[name].tau:.2f} tokens per pass |" in card
    with pytest.raises(ConfigError, match="--resume"):
        small().train(out)
    seen.clear()
    again = small()
    again.train(out, resume=True, watch=watch)
    assert again.reports == reports
    assert "reasoner" not in seen  # its results were kept
    assert json.loads((out / "evaluation.json").read_text())["draft"]["tau"] >= 1.0
