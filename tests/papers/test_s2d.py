"""S2D (arXiv 2407.01955): a sorted draft, with first layers that draft alone.

The paper's claims, in small: depths that learn together accept far more than depths cut out of a
model that was trained as a whole, and the whole loses little; a larger target is served by a deeper
sub-model. Texts of Markov chains, and random llama checkpoints for loading.
"""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch
from markov import alpha, batches, markov, run, small_draft
from tiny import make_tiny

import forerun
from fakes import FakeTarget, sequence
from forerun.core.cost import Cost
from forerun.core.dice import SeededDice
from forerun.core.modelled_speedup import best_gamma
from forerun.core.sampling import Sampling
from forerun.drafters._sub_model import RatedExit, fastest, rated_exits
from forerun.drafters.draft_model import DraftModel
from forerun.errors import ConfigError, ModelError
from forerun.models.draft_link import load_draft
from forerun.models.load import load_target
from forerun.models.sub_models import FILE, Exits, sub_runner, write_exits
from forerun.training.drafts.sorted import SortedModel, cut
from forerun.training.language_model import LanguageModel
from forerun.training.recipes.sorted import Sorted

pytestmark = pytest.mark.paper
EXITS, DEPTHS, STEPS = (1, 2, 3), (1, 2, 4), 100


@cache
def rates(is_sorted: bool) -> dict[int, float]:
    """Acceptance of every depth of a draft that was trained sorted, or as a whole."""
    target, model = markov(1), small_draft(layers=4)
    data = batches(target.texts(256, seed=2))
    run(SortedModel(model, data, DEPTHS if is_sorted else DEPTHS[-1:]), STEPS)
    held_out, found = target.texts(16, seed=3), {}
    for depth in DEPTHS:
        with cut(model, depth) as part:
            found[depth] = alpha(part, target, held_out)
    return found


def test_depths_that_learn_together_are_drafts() -> None:
    together, whole = rates(True), rates(False)
    assert together[1] - whole[1] > 0.15 and together[2] - whole[2] > 0.08


def test_the_whole_model_loses_little() -> None:
    assert rates(True)[4] > rates(False)[4] - 0.02


def test_one_exit_is_plain_training() -> None:
    model, data = small_draft(layers=3), batches(markov(1).texts(32, seed=2))
    (micro,) = next(data.steps())
    plain, sorted_ = LanguageModel(model, data), SortedModel(model, data, (3,))
    torch.testing.assert_close(sorted_.loss(micro), plain.loss(micro))


def test_the_loss_is_the_mean_of_all_exits() -> None:
    model, data = small_draft(layers=3), batches(markov(1).texts(32, seed=2))
    (micro,) = next(data.steps())
    each = []
    for depth in EXITS:
        with cut(model, depth) as part:
            each.append(float(LanguageModel(part, data).loss(micro).detach()))
    found = float(SortedModel(model, data, EXITS).loss(micro).detach())
    assert found == pytest.approx(float(np.mean(each)), abs=1e-6)
    assert np.ptp(each) > 1e-3


def test_deep_layers_change_nothing_below() -> None:
    model, data = small_draft(layers=3), batches(markov(1).texts(32, seed=2))
    (micro,) = next(data.steps())
    before = float(SortedModel(model, data, (1,)).loss(micro).detach())
    torch.nn.init.normal_(model.model.layers[2].mlp.down_proj.weight)
    assert float(SortedModel(model, data, (1,)).loss(micro).detach()) == before


# The choice of a sub-model


def mixed(share: float, seed: int = 0):
    """A law between a random one and a uniform one."""
    rows = np.random.default_rng(seed).dirichlet(np.full(3, 0.3), 3)
    return lambda tokens: share * rows[tokens[-1]] + (1 - share) / 3


def model(law, milliseconds: float) -> FakeTarget:
    found = FakeTarget(law)
    found.cost = Cost((1, 65), (milliseconds / 1e3, 2 * milliseconds / 1e3))
    return found


TEXT = [0, 1, 2, 2, 1, 0, 1, 1, 0, 2]


def rated(target_ms: float) -> list[RatedExit]:
    """Three depths of rising acceptance and cost, for a target of a given cost."""
    shares = {1: (0.5, 1.0), 2: (0.8, 4.0), 3: (0.95, 8.0)}
    parts = {depth: model(mixed(share), ms) for depth, (share, ms) in shares.items()}
    return rated_exits(parts, TEXT, model(mixed(1.0), target_ms))


def test_a_larger_target_has_a_deeper_draft() -> None:
    chosen = [fastest(rated(ms)).layers for ms in (12, 100, 10_000)]
    assert chosen[0] == 1 and chosen[-1] == 3 and chosen == sorted(chosen)


@pytest.mark.parametrize("target_ms", [12, 100, 10_000])
def test_the_choice_is_never_slower_than_a_fixed_depth(target_ms: float) -> None:
    found = rated(target_ms)
    gains = [best_gamma(one.alpha, one.c)[1] for one in found]
    assert fastest(found).speedup == max(gains)
    assert [one.c for one in found] == pytest.approx([1 / target_ms, 4 / target_ms, 8 / target_ms])
    assert max(gains) > 1.1 * min(gains)


def test_acceptance_is_that_of_the_target() -> None:
    """At equal cost each target has the sub-model that knows it."""
    parts = {1: model(mixed(1.0, seed=1), 1), 2: model(mixed(1.0, seed=2), 1)}
    for depth in parts:
        found = rated_exits(parts, TEXT, model(mixed(1.0, seed=depth), 50))
        assert fastest(found).layers == depth
        assert found[depth - 1].alpha == pytest.approx(1.0)


# Checkpoints


@pytest.fixture(scope="module")
def targets(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Two targets with one tokenizer."""
    folder = tmp_path_factory.mktemp("targets")
    return [make_tiny(folder / f"t{seed}", seed=seed) for seed in (3, 4)]


@pytest.fixture(scope="module")
def trained(targets: list[Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sorted")
    (folder / "text.txt").write_text("the cat sat on the mat and the dog on the log. " * 150)
    recipe = Sorted(
        corpus=folder / "text.txt",
        model=str(targets[0]),
        targets=(str(targets[1]),),
        exits=EXITS,
        hidden=32,
        micro_tokens=512,
        max_steps=4,
        minutes=None,
    )
    lines = recipe.train(folder / "out")
    assert len(lines) == 3 and "layers are chosen" in lines[1]
    return folder / "out"


def test_one_checkpoint_serves_all_targets(targets: list[Path], trained: Path) -> None:
    from transformers import AutoModelForCausalLM

    assert AutoModelForCausalLM.from_pretrained(trained).config.num_hidden_layers == 3
    facts = json.loads((trained / "draft.json").read_text())
    assert [[one["layers"] for one in each] for each in facts.values()] == [[1, 2, 3]] * 2
    sampling = Sampling(temperature=0, max_new_tokens=8)
    for target in targets:
        served = forerun.load(str(target), dtype="fp32")
        plain = served.generate(["the cat"], sampling, drafter="none")[0]
        for layers in ("auto", 1, 2, 3):
            drafter = f"draft_model:model={trained},layers={layers}"
            found = served.generate(["the cat"], sampling, drafter=drafter)[0]
            assert found.samples[0].tokens == plain.samples[0].tokens
            assert found.stats.drafted > 0


@pytest.mark.parametrize("depth", EXITS)
def test_a_sub_model_is_the_cut_checkpoint(trained: Path, tmp_path: Path, depth: int) -> None:
    from transformers import AutoModelForCausalLM

    with cut(AutoModelForCausalLM.from_pretrained(trained), depth) as whole:
        whole.config.num_hidden_layers = depth
        whole.save_pretrained(tmp_path / "cut")
    alone = load_target(tmp_path / "cut", dtype="fp32", max_seqs=2)
    part = sub_runner(load_draft(str(trained), "fp32", "cpu", 2, None), depth)
    seq = sequence([5, 200, 31, 287], 4, SeededDice(0))
    rows = [torch.as_tensor(one.rows_at([(seq, ()), (seq, (7, 9))])) for one in (alone, part)]
    assert torch.equal(*rows)


def test_bad_layers_are_refused(trained: Path, targets: list[Path]) -> None:
    with pytest.raises(ConfigError, match="layers must be from 1 to 3, got 4"):
        DraftModel(model=str(trained), layers=4)
    with pytest.raises(ConfigError, match="layers must be auto or a whole number, got 'two'"):
        DraftModel(model=str(trained), layers="two")
    assert load_draft(str(targets[0]), "auto", "cpu", 1, None).exits is None


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{", "cannot be used"),
        ('{"exits": [2, 1], "text": [1, 2]}', r"has the exits \[2, 1\]"),
        ('{"exits": [1], "text": [1]}', "has no text"),
    ],
)
def test_a_bad_file_is_named(trained: Path, tmp_path: Path, text: str, said: str) -> None:
    import shutil

    copy = shutil.copytree(trained, tmp_path / "draft")
    (copy / FILE).write_text(text)
    with pytest.raises(ModelError, match=said):
        load_draft(str(copy), "auto", "cpu", 1, None)
    write_exits(copy, Exits((1, 2), (5, 6)))
    assert load_draft(str(copy), "auto", "cpu", 1, None).exits == Exits((1, 2), (5, 6))


def test_bad_exits_and_foreign_targets_are_refused(targets: list[Path], tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="exits must be depths in ascending order"):
        Sorted(corpus=tmp_path, exits=(4, 2))
    text = tmp_path / "text.txt"
    text.write_text("the cat sat. " * 100)
    given = {"corpus": text, "model": str(targets[0]), "max_steps": 1}
    with pytest.raises(ConfigError, match="different vocabularies"):
        Sorted(**given, targets=("reasoner",)).train(tmp_path / "out")
    with pytest.raises(ConfigError, match="has 2 layers that can be taken, and the last exit is 3"):
        Sorted(**given, exits=(3,), init=str(targets[0])).train(tmp_path / "out2")
