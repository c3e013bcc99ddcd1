"""SpecDec++: the head, when drafting stops, the law with any head, and what the recipe learns."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from fakes import FakeRunner, FakeTarget, exact_law, run_all, sequence, table_law
from forerun import registry
from forerun.controllers.acceptance_head import AcceptanceHead, Head, read_head, runner_of
from forerun.core.dice import EnumeratedDice, SeededDice
from forerun.core.forward_batch import ForwardBatch
from forerun.core.records import Plan
from forerun.core.sampling import Sampling
from forerun.drafters.draft_model import DraftModel
from forerun.engine.engine import Engine
from forerun.engine.safe_drafter import SafeDrafter
from forerun.errors import ConfigError, ModelError
from forerun.training.export import save
from forerun.training.recipes import acceptance_head as recipe
from forerun.utils.stats import auc
from harness import PROMPT

WIDTH = 4


class HiddenRunner(FakeRunner):
    """A fake draft whose hidden rows are a table by token."""

    keeps_hidden = False

    def hidden_at(self, seq, path) -> torch.Tensor:
        assert self.keeps_hidden and path
        return torch.from_numpy(np.random.default_rng(path[-1]).normal(size=WIDTH))


def constant(chance: float) -> Head:
    big = np.log(chance / (1 - chance)) if 0 < chance < 1 else 80.0 * (2 * chance - 1)
    none = np.zeros((0, WIDTH, WIDTH)), np.zeros((0, WIDTH))
    return Head(*none, np.zeros((2, WIDTH)), np.array([0.0, big]))


def random_head(seed: int = 0) -> Head:
    rng = np.random.default_rng(seed)
    return Head(
        rng.normal(size=(2, WIDTH, WIDTH)),
        rng.normal(size=(2, WIDTH)),
        rng.normal(size=(2, WIDTH)),
        np.zeros(2),
    )


def engine(controller: AcceptanceHead, listeners=()) -> Engine:
    drafter = SafeDrafter(DraftModel(model=HiddenRunner(table_law(2))))  # type: ignore[arg-type]
    verifier = registry.make("verifier", "recursive")
    return Engine(
        FakeTarget(table_law(1)), drafter, verifier, controller, listeners=listeners, max_seqs=2
    )


HEADS = {"random": random_head(), "never": constant(0.0), "always": constant(1.0)}


@pytest.mark.parametrize("temperature", [0.6, 1.0])
@pytest.mark.parametrize("name", HEADS)
def test_no_head_changes_the_law(name: str, temperature: float) -> None:
    sampling, found = Sampling(temperature=temperature), dict[tuple[int, ...], float]()

    def program(dice: EnumeratedDice) -> tuple[int, ...]:
        controller = AcceptanceHead(head=HEADS[name], threshold=0.5, least=1, most=3)
        return run_all(engine(controller), [sequence(PROMPT, 3, dice, sampling)])[0]

    for text, weight in EnumeratedDice().outcomes(program):
        found[text] = found.get(text, 0.0) + weight
    law = exact_law(table_law(1), PROMPT, 3, sampling)
    assert max(abs(found.get(text, 0.0) - p) for text, p in law.items()) <= 1e-12


def lengths(head: Head, **options) -> list[int]:
    found: list[int] = []
    controller = AcceptanceHead(head=head, most=6, **options)
    run = engine(controller, [lambda step: found.extend(map(len, step.trees))])
    run_all(run, [sequence(PROMPT, 60, SeededDice(i)) for i in range(2)])
    return found[: len(found) // 2]  # the last drafts are cut by the end of the text


def test_bounds_hold_for_sure_heads():
    assert set(lengths(constant(1.0))) == {6}
    assert set(lengths(constant(0.0))) == {2}
    assert set(lengths(constant(0.0), least=4)) == {4}
    assert set(lengths(constant(0.0), least=1)) == {2}  # the newest token is not scored
    assert set(lengths(constant(0.5), threshold=1.0)) == {6}


def test_scores_multiply():
    """Chances of .8: below .64 after two scored tokens, which is with the third drafted."""
    assert set(lengths(constant(0.8), threshold=0.1)) == {2}
    assert set(lengths(constant(0.8), threshold=0.3)) == {3}
    assert set(lengths(constant(0.8), threshold=0.5)) == {5}
    assert len(set(lengths(random_head(), threshold=0.5, least=1))) > 1


def test_head_is_the_trained_module_and_survives_a_file(tmp_path):
    torch.manual_seed(1)
    for layers, shared in ((3, False), (3, True), (0, False)):
        module = recipe.HeadModule(WIDTH, layers, shared)
        torch.nn.init.normal_(module.out)
        save(module.tensors(), tmp_path, file="head.safetensors")
        head = read_head(str(tmp_path / "head.safetensors"))
        assert head.layers == layers and len(head.weights) == (1 if shared else layers)
        for row in torch.randn(5, WIDTH):
            expected = float(module(row)[1].exp().detach())
            assert head.probability(row.numpy()) == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize("options", [{"threshold": 1.5}, {"least": 0}, {"least": 9, "most": 3}])
def test_bad_options_are_refused(options):
    with pytest.raises(ConfigError, match="acceptance_head needs|must be at least"):
        AcceptanceHead(head=constant(1.0), **options)


def test_a_missing_head_says_how_to_train_one(tmp_path):
    (tmp_path / "bad.safetensors").write_bytes(b"no head")
    for name in (tmp_path, tmp_path / "bad.safetensors"):
        with pytest.raises(ModelError, match=r"cannot read an acceptance head from .* train one"):
            AcceptanceHead(head=str(name))


def test_other_drafters_are_refused():
    controller = AcceptanceHead(head=constant(1.0))
    tree = DraftModel(model=HiddenRunner(table_law(2)), grower="gumbel")  # type: ignore[arg-type]
    for drafter in (registry.make("drafter", "stand"), SafeDrafter(tree)):
        with pytest.raises(ConfigError, match="needs a draft model that drafts chains"):
            controller.bind(FakeTarget(table_law(1)), drafter)
    chain = DraftModel(model=HiddenRunner(table_law(2)))  # type: ignore[arg-type]
    assert runner_of(SafeDrafter(chain)) is chain.runner


def test_hidden_rows_are_those_of_a_forward_pass():
    """`hidden_at` after `rows_at`, step by step, against all tokens in one pass."""
    from forerun.assets import embedded
    from forerun.core.tree import EMPTY
    from forerun.models.load import load_target

    runner = load_target(embedded("draft"), dtype="fp32")
    runner.keeps_hidden = True
    seq, path = sequence([5, 6, 7, 8], 9, SeededDice(0)), [9, 30, 31]
    for i in range(len(path) + 1):
        runner.rows_at([(seq, tuple(path[:i]))])
    for i in range(1, len(path) + 1):
        other = sequence([*seq.tokens, *path[:i]], 9, SeededDice(0))
        (rows,) = runner.forward(ForwardBatch([other], [EMPTY], frozenset({"hidden"})))
        runner.release(other)
        found = runner.hidden_at(seq, tuple(path[:i]))
        torch.testing.assert_close(found, rows.hidden[0], atol=1e-5, rtol=1e-5)


def test_width_must_fit():
    from forerun.assets import embedded

    drafter = DraftModel(model=embedded("draft"))
    with pytest.raises(ConfigError, match=r"needs hidden size 4, the draft model has 128"):
        AcceptanceHead(head=constant(1.0)).bind(FakeTarget(table_law(1)), drafter)


def test_the_embedded_draft_has_its_head():
    from forerun.assets import embedded

    controller = registry.make("controller", "acceptance_head")
    controller.bind(FakeTarget(table_law(1)), DraftModel(model=embedded("draft")))
    chances = [controller.head.probability(row) for row in np.eye(128, dtype=np.float32)]
    assert controller.head.width == 128 and 0 < min(chances) < max(chances) < 1


def test_auc_by_hand():
    assert auc(np.array([0.1, 0.4, 0.35, 0.8]), np.array([0, 0, 1, 1])) == 0.75
    assert auc(np.zeros(4), np.array([0, 1, 1, 0.5])) == 0.5
    assert auc(np.array([0.0, 1.0]), np.array([0.25, 0.75])) == 0.75


def test_the_recipe_runs_whole(tmp_path):
    options = {"problems": 4, "max_tokens": 24, "micro_tokens": 512, "layers": 1, "batch": 4}
    trained = recipe.AcceptanceHead(max_steps=2, **options)
    (line,) = trained.train(tmp_path)
    assert line.startswith("head: 2 steps") and 0 <= trained.auc <= 1
    assert AcceptanceHead(head=str(tmp_path)).head.width == 128


@pytest.mark.slow
def test_a_resumed_run_learns_the_same_head(tmp_path):
    """Labels are drawn at every step; a resumed run draws the same ones."""
    options = {"problems": 4, "max_tokens": 24, "micro_tokens": 256, "layers": 1, "batch": 4}

    def stop(title: str, share: float, note: str) -> None:
        if title == "training" and share >= 0.5:
            raise KeyboardInterrupt

    whole, first, rest = (recipe.AcceptanceHead(max_steps=4, **options) for _ in range(3))
    whole.train(tmp_path / "whole")
    with pytest.raises(KeyboardInterrupt):
        first.train(tmp_path / "run", watch=stop)
    with pytest.raises(ConfigError, match="continue it with --resume"):
        rest.train(tmp_path / "run")
    rest.train(tmp_path / "run", resume=True)
    for name, p in whole.parameters().items():
        torch.testing.assert_close(rest.parameters()[name], p, rtol=0, atol=1e-6)


def test_the_command_trains_one(tmp_path, capsys, monkeypatch):
    from forerun.cli.main import main

    monkeypatch.setenv("OMP_NUM_THREADS", "1")  # which the command sets, too
    monkeypatch.setenv("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "8192")
    call = ["train", "acceptance_head", f"--out={tmp_path}", "--problems=2", "--minutes=0.01"]
    assert main(call) == 0
    assert f"on a tenth of the texts -> {tmp_path}" in capsys.readouterr().out.replace("\n", "")
    steps = torch.load(tmp_path / "head.pt", weights_only=True)["progress"]["step"]
    assert steps >= 1 and AcceptanceHead(head=str(tmp_path)).head.width == 128
    assert main([*call, "--resume"]) == 0  # the budget is spent, so nothing is left to do
    after = torch.load(tmp_path / "head.pt", weights_only=True)["progress"]["step"]
    assert after == steps


def test_bad_options_of_the_recipe_are_refused():
    for options in ({"problems": 1}, {"mix": 1.0}, {"weight": 0.0}, {"layers": -1}):
        with pytest.raises(ConfigError, match="acceptance_head needs|must be at least"):
            recipe.AcceptanceHead(**options)


def test_a_plan_without_the_controller_is_untouched():
    assert not Plan().stop(None, 0)  # type: ignore[arg-type]
