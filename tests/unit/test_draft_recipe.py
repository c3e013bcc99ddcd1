"""The recipe draft from prompts to a checkpoint: phases, losses, resuming, bad input."""

from __future__ import annotations

import json
import shutil
from itertools import count
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from draft_runs import PAIRS
from safetensors.torch import load_file
from tiny import make_tiny

import forerun
from forerun.assets import embedded
from forerun.cli.main import main
from forerun.core.sampling import Sampling
from forerun.errors import ConfigError, DataError, ModelError
from forerun.models import paths
from forerun.models.paths import located, spelled
from forerun.training import loop
from forerun.training.drafts import data, phases
from forerun.training.drafts.card import data_hash
from forerun.training.drafts.data import read_prompts, reference_answers, running_text
from forerun.training.drafts.distillation import DIVERGENCES, Best, Distilled, divergence
from forerun.training.drafts.measure import frozen
from forerun.training.losses import TopK
from forerun.training.plans import read_budgets
from forerun.training.recipes import draft
from forerun.training.recipes.draft import Draft
from forerun.training.records import read_records

PROMPTS = [
    {"prompt": f"the {a} {b}", "domain": "even" if i % 2 else "odd", "answer": f"on the {b}"}
    for i, (a, b) in enumerate(PAIRS)
] * 2


@pytest.fixture(scope="module")
def prompts(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("prompts") / "prompts.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in PROMPTS[:24]))
    return path


def recipe(target: Path, prompts: Path, **options) -> Draft:
    given = {"max_tokens": 12, "share": 0.9, "layers": 1, "probe_steps": 2, "max_steps": 8}
    given |= {"minutes": None, "micro_tokens": 256, "gamma": 3, "threads": 1}
    return Draft(model=str(target), prompts=prompts, **given | options)


@pytest.fixture(scope="module")
def trained(target, prompts, tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("runs") / "draft"
    recipe(target, prompts, top_k=8, loss="fkl").train(out)
    return out


def test_probabilities_that_no_loss_reads_are_refused(target, prompts):
    for options in ({"loss": "ce"}, {"loss": "fkl", "data": "on_policy"}):
        with pytest.raises(ConfigError, match="top_k 8 stores .* does not read them; leave it out"):
            recipe(target, prompts, top_k=8, **options)


def test_the_draft_is_a_checkpoint_that_drafts_for_its_target(target, trained):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    module = AutoModelForCausalLM.from_pretrained(trained)
    assert module.config.vocab_size == 288 and module.config.eos_token_id == 0
    assert len(AutoTokenizer.from_pretrained(trained)) == 288
    model = forerun.load(str(target), dtype="fp32")
    sampling = Sampling(temperature=0, max_new_tokens=16)
    plain = model.generate(["the cat"], sampling, drafter="none")[0]
    drafted = model.generate(["the cat"], sampling, drafter=f"draft_model:model={trained}")[0]
    assert drafted.samples[0].tokens == plain.samples[0].tokens
    assert drafted.stats.drafted > 0


def test_the_card_names_data_target_acceptance_and_cost(trained):
    card, facts = (
        (trained / "README.md").read_text(),
        json.loads((trained / "draft.json").read_text()),
    )
    plan = json.loads((trained / "data" / "plan.json").read_text())["settings"]
    assert plan["target_hash"] in card and plan["tokenizer_hash"] in card
    assert [one["temperature"] for one in plan["grid"]] == [0.0, 0.6, 0.8, 1.0]
    assert "| after | all | greedy | odd | even |" in card
    assert set(facts["stages"]) == {"pretrain", "align"}
    assert facts["best"]["all"] >= max(stage["all"] for stage in facts["stages"].values()) - 1e-9
    training = facts["training"]
    assert [one["step"] for one in training.values()] == [4, 4] and "8 steps" in card
    assert all(one["tokens"] > 0 and one["seconds"] > 0 for one in training.values())
    assert data_hash(read_records(trained / "data")) in card
    assert facts["c"] > 0 and facts["tau"] >= 1 and facts["gamma"] == 3


def test_the_exported_weights_are_the_best_ones(trained):
    kept = load_file(
        trained / "state" / json.loads((trained / "state/best.json").read_text())["file"]
    )
    exported = load_file(trained / "model.safetensors")
    for name, tensor in exported.items():
        assert torch.equal(tensor, kept[name].bfloat16())


ALL_DATA = [
    {},
    {"recipe": "direct_alignment"},
    {"recipe": "distillspec"},
    {"recipe": "distillspec", "data": "on_policy", "loss": "tvd"},
    {"recipe": "distillspec", "data": "fixed", "loss": "rkl"},
]
QUICK = {}, {"recipe": "distillspec"}


@pytest.mark.parametrize(
    "options",
    [pytest.param(one, marks=() if one in QUICK else pytest.mark.slow) for one in ALL_DATA],
    ids=lambda options: "-".join(options.values()) or "fastdraft",
)
def test_a_killed_run_continues_bit_for_bit(target, prompts, tmp_path, options):
    def weights(out: Path) -> dict:
        return torch.load(out / "state" / "align.pt", weights_only=True)["parameters"]

    recipe(target, prompts, **options).train(tmp_path / "whole")

    def kill(title: str, share: float, note: str) -> None:
        if title == "align" and share >= 0.5:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        recipe(target, prompts, **options).train(tmp_path / "killed", watch=kill)
    recipe(target, prompts, **options).train(tmp_path / "killed", resume=True)
    whole, resumed = weights(tmp_path / "whole"), weights(tmp_path / "killed")
    assert all(torch.equal(whole[name], resumed[name]) for name in whole)
    assert torch.equal(
        load_file(tmp_path / "whole" / "model.safetensors")["model.norm.weight"],
        load_file(tmp_path / "killed" / "model.safetensors")["model.norm.weight"],
    )


def test_text_and_code_are_phases_of_their_own(target, prompts, tmp_path):
    (tmp_path / "text").mkdir()
    (tmp_path / "text" / "a.txt").write_text("the cat sat on the mat. " * 60)
    (tmp_path / "code.txt").write_text("one = two + three\n" * 60)
    made = recipe(target, prompts, corpus=tmp_path / "text", code=tmp_path / "code.txt")
    made.train(tmp_path / "out")
    facts = json.loads((tmp_path / "out" / "draft.json").read_text())
    assert list(facts["stages"]) == ["pretrain", "continue", "align"]
    steps = {}
    for name in facts["stages"]:
        state = torch.load(tmp_path / "out" / "state" / f"{name}.pt", weights_only=True)
        steps[name] = state["progress"]["step"]
    assert steps == {"pretrain": 4, "continue": 1, "align": 3}


def test_a_target_that_changed_is_refused_on_resume(target, prompts, tmp_path):
    import shutil

    copy = shutil.copytree(target, tmp_path / "target")

    def kill(title: str, share: float, note: str) -> None:
        if title == "pretrain":
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        recipe(copy, prompts).train(tmp_path / "out", watch=kill)
    make_tiny(copy, seed=4)
    with pytest.raises(ConfigError, match="target_hash"):
        recipe(copy, prompts).train(tmp_path / "out", resume=True)


def test_the_report_says_whether_the_draft_pays(target, prompts, trained, tmp_path, monkeypatch):
    one, out = recipe(target, prompts, top_k=8, loss="fkl"), tmp_path / "out"
    shutil.copytree(trained, out)
    one.open(out)
    one.material.read()
    pays = f"use it with --drafter draft_model:model={out}"
    for tau, gain, said in ((1.0, 0.77, "does not speed up decoding yet"), (3.0, 2.31, pays)):
        found = {"tau": tau, "tau_greedy": tau, "gamma": 3, "c": 0.1}
        monkeypatch.setattr(draft, "measured", lambda *_, found=found, **__: found)
        lines = one.report(out, json.loads((out / "draft.json").read_text()))
        assert said in lines[-1] and f"modelled speed-up {gain}" in lines[0]


def test_a_folder_called_like_an_embedded_model_is_said_once(
    trained, tmp_path, monkeypatch, caplog
):
    shutil.copytree(trained, tmp_path / "draft")
    monkeypatch.chdir(tmp_path)
    paths._warn_of_folder.cache_clear()
    for _ in range(2):
        assert located("draft") == embedded("draft")
    assert located(spelled("draft")) == "./draft" and spelled("other") == "other"
    (said,) = caplog.messages
    assert said == "draft is the model that ships with forerun; for the folder draft write ./draft"


def test_a_gguf_file_cannot_be_a_target(prompts, tmp_path):
    path = tmp_path / "x.gguf"
    path.write_bytes(b"GGUF")
    with pytest.raises(ModelError, match="training needs the checkpoint in safetensors"):
        frozen(str(path))


def test_only_a_part_of_many_held_out_answers_is_read(target, prompts, trained, monkeypatch):
    one = recipe(target, prompts)
    one.open(trained)
    one.material.read()
    everything = one.material.held
    assert set(one.material.numbers[everything] % 10) == {0} and len(everything) > 4
    lengths = one.material.records.lengths()[everything]
    most = int(np.sort(lengths)[-3:].sum())
    monkeypatch.setattr(data, "MAX_HELD_TOKENS", most)
    one.material.read()
    held = one.material.held
    assert set(held) < set(everything) and len(held) >= 3
    assert one.material.records.lengths()[held].sum() <= most
    assert held.tolist() != everything[: len(held)].tolist()  # files may be sorted
    assert not set(one.material.trained) & set(everything)


@pytest.mark.parametrize(
    ("given", "used"),
    [
        ([], {"minutes": 600.0, "rate": 0.3, "threads": 1}),
        (["--minutes", 60], {"minutes": 60.0, "rate": 0.3, "threads": 1}),  # the default, given
        (["--rate", 2, "--threads", 2], {"minutes": 600.0, "rate": 2.0, "threads": 2}),
    ],
)
def test_a_resumed_run_keeps_what_is_not_given(
    target, prompts, tmp_path, monkeypatch, call, given, used
):
    monkeypatch.setattr(data.DraftData, "generate", stop)
    words = ["train", "draft", "--model", target, "--prompts", prompts, "--out", tmp_path]
    words += ["--share", 0.9]
    first = ["--minutes", 600, "--rate", 0.3, "--threads", 1]
    for more in (first, ["--resume", *given]):
        assert call(*words, *more)[0] == 130
    assert {name: read_budgets(tmp_path)[name] for name in used} == used


def stop(*_: object) -> None:
    raise KeyboardInterrupt


@pytest.mark.parametrize(
    ("where", "said"),
    [
        ((Draft, "open"), "stopped before the run began; start again with: forerun train draft"),
        ((data.DraftData, "generate"), "stopped and saved; continue with: forerun train draft"),
    ],
)
def test_ctrl_c_says_how_to_go_on(target, prompts, tmp_path, monkeypatch, call, where, said):
    monkeypatch.setattr(*where, stop)
    words = ["train", "draft", "--share", 0.9, "--model", target, "--prompts", prompts]
    status, out, _ = call(*words, "--out", tmp_path)
    assert status == 130 and said in out
    assert ("--resume" in out) == (tmp_path / "plan.json").exists()


@pytest.mark.parametrize(
    ("seconds", "budget", "evaluations"),
    [
        (0.0, {"max_steps": None, "minutes": 1.0}, [8, 8]),
        (1e6, {"max_steps": None, "minutes": 1.0}, [2, 2]),
        (1e6, {"max_steps": 16, "minutes": 60.0}, [8, 8]),
    ],
)
def test_slow_evaluations_are_fewer(
    target, prompts, tmp_path, monkeypatch, seconds, budget, evaluations
):
    """The first and last of a phase stay; with max_steps all, so that a seed gives one draft."""
    evaluating, training = count(0.0, seconds), count(0.0, 1.0)
    monkeypatch.setattr(phases, "perf_counter", lambda: next(evaluating))
    clock = SimpleNamespace(monotonic=lambda: next(training))
    monkeypatch.setattr(loop, "time", clock)  # a step takes two seconds
    looks: list[str] = []
    recipe(target, prompts, **budget).train(
        tmp_path, watch=lambda title, share, note: looks.append(title + note)
    )
    found = [looks.count(f"{name}evaluating") for name in ("pretrain", "align")]
    assert found == evaluations


def test_losses_read_the_target_or_its_stored_rows(target, trained):
    """Stored rows of all tokens give the loss of the live target."""
    from forerun.training.data.documents import Batches

    module, teacher = frozen(str(target)), frozen(str(target))
    documents = read_records(trained / "data")
    (micro,) = next(Batches(documents, 400, accumulate=1, prompt_weight=0.0).steps())
    stored = Distilled(module, None, divergence("fkl"), teacher)
    assert isinstance(stored.teacher(micro), TopK)
    same = float(stored.loss(micro).detach())
    assert same == pytest.approx(0.0, abs=2e-3)  # the target itself, rounded to float16


def test_all_losses_have_names():
    assert divergence("ce") is None
    for name in DIVERGENCES.keys() - {"ce"}:
        assert divergence(name) is not None
    with pytest.raises(ConfigError, match="loss 'kl' is unknown; use one of ce, soft_ce"):
        divergence("kl")


def test_only_better_weights_are_kept(tmp_path):
    model, best = torch.nn.Linear(2, 2), Best(tmp_path)
    first = model.weight.detach().clone()
    assert best.offer(model, "pretrain", 1, {"all": 0.5})
    torch.nn.init.ones_(model.weight)
    assert not best.offer(model, "pretrain", 2, {"all": 0.5})
    best.restore(model)
    assert torch.equal(model.weight, first)
    assert best.offer(model, "align", 1, {"all": 0.6})
    assert [path.name for path in tmp_path.glob("*.safetensors")] == ["best-align-1.safetensors"]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"recipe": "eagle"}, "recipe must be one of fastdraft, direct_alignment, distillspec"),
        ({"loss": "kl"}, "loss 'kl' is unknown"),
        ({"data": "human"}, "data must be one of target, fixed, on_policy, mixed"),
        ({"share": 1.0}, "share must be above 0 and below 1"),
        ({"num_prompts": 3}, "num_prompts must be at least 10"),
    ],
)
def test_bad_options_are_refused(options, said):
    with pytest.raises(ConfigError, match=said):
        Draft(**options)


def test_bad_prompts_are_named(target, tmp_path):
    model, path = forerun.load(str(target)), tmp_path / "p.jsonl"
    with pytest.raises(ConfigError, match="give a JSON-lines file with --prompts"):
        read_prompts(None, 20, model)
    with pytest.raises(DataError, match="cannot be read"):
        read_prompts(path, 20, model)
    path.write_text('{"prompt": "a"}\n' * 3)
    with pytest.raises(ConfigError, match="has 3 prompts; a draft needs at least 10"):
        read_prompts(path, 20, model)
    for line, what in (
        ("prompt", "is not JSON"),
        ("[1]", "is not an object"),
        ('{"text": "a"}', "has no prompt"),
        ('{"prompt": 1}', "has the prompt 1, which is not text"),
    ):
        path.write_text(f'{{"prompt": "a"}}\n{line}\n')
        with pytest.raises(DataError, match=f"p.jsonl:2 {what}"):
            read_prompts(path, 20, model)
    path.write_text('{"prompt": "a"}\n' * 30)
    assert len(read_prompts(path, 20, model)) == 20
    with pytest.raises(ConfigError, match='"fixed" needs an "answer" for each prompt'):
        reference_answers(model, read_prompts(path, 20, model), 8)
    empty = tmp_path / "empty.txt"
    empty.write_text("")
    with pytest.raises(DataError, match="has no text"):
        running_text(model.tokenizer, empty, 32, 1000)


def test_the_command_shows_the_options(capsys):
    assert main(["train", "draft", "--help"]) == 0
    said = capsys.readouterr().out
    assert "--recipe" in said and "--prompts" in said and "--resume" in said
