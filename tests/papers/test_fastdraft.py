"""FastDraft (arXiv 2411.11055): pre-training, continued training with code, target's own answers.

The paper's claims, in small: code in continued training brings acceptance on code and keeps that on
text; answers of the target bring more than other texts of the same size; acceptance, not
perplexity, chooses the checkpoint; the best depth at equal size lies inside the range. Markov
chains stand for text and code; the corpora follow laws near those of the target.
"""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest
import torch
from markov import LENGTH, VOCAB, Markov, alpha, batches, markov, small_draft, train

from fakes import FakeRunner, FakeTarget, run_all, sequence, table_law
from forerun import registry
from forerun.core.dice import SeededDice
from forerun.core.modelled_speedup import tau_of_ratio
from forerun.core.records import Plan
from forerun.drafters.draft_model import DraftModel
from forerun.engine.engine import Engine
from forerun.training.data.documents import Documents
from forerun.training.data.mixture import Mixture
from forerun.training.drafts.acceptance import held_out_acceptance
from forerun.training.drafts.distillation import Best, Distilled
from forerun.training.drafts.phases import CODE_SHARE
from forerun.training.drafts.shapes import fastest, rated, shape
from forerun.training.losses import cross_entropy
from harness import Given

pytestmark = pytest.mark.paper
TEXT, CODE = range(VOCAB // 2), range(VOCAB // 2, VOCAB)


@cache
def stages() -> dict[str, dict[str, float]]:
    """Acceptance on text and code after each phase, and after other texts in the last one."""
    text, code = markov(1, tokens=TEXT), markov(2, tokens=CODE)
    half = torch.tensor([[token in TEXT] for token in range(VOCAB)])
    target = Markov(torch.where(half, text.table, code.table))
    noise = 1.2 * torch.randn(VOCAB, VOCAB, generator=torch.Generator().manual_seed(5))
    corpora = {
        "text": within(Markov(text.table + noise), 3, TEXT),
        "code": within(Markov(code.table + noise), 4, CODE),
    }
    held_out = {"text": within(target, 6, TEXT, 24), "code": within(target, 7, CODE, 24)}
    answers = within(target, 8, TEXT)
    model, found = small_draft(hidden=48), {}

    def measure(name: str) -> None:
        found[name] = {kind: alpha(model, target, held_out[kind]) for kind in held_out}

    train(model, batches(corpora["text"]), 60)
    measure("pretrain")
    sources = {name: batches(documents) for name, documents in corpora.items()}
    mixed = Mixture(sources, {"code": CODE_SHARE, "text": 1 - CODE_SHARE})
    train(model, mixed, 60, rate=0.5)
    measure("continue")
    state = {name: p.clone() for name, p in model.state_dict().items()}
    for name, documents in (("align", answers), ("corpus", within_again(text, noise))):
        model.load_state_dict(state)
        train(model, batches(documents), 60, rate=0.3)
        measure(name)
    return found


def within(chain: Markov, seed: int, tokens: range, num: int = 256) -> Documents:
    """Texts of a chain that begin in a range of tokens."""
    texts = chain.texts(4 * num, seed)
    kept = [texts.document(i).tolist() for i in range(4 * num)]
    return Documents.of((ids, 1) for ids in [t for t in kept if t[0] in tokens][:num])


def within_again(text: Markov, noise: torch.Tensor) -> Documents:
    """As many new texts of the corpus as there are answers."""
    return within(Markov(text.table + noise), 9, TEXT)


def test_code_in_continued_training_lifts_code_and_keeps_text() -> None:
    before, after = stages()["pretrain"], stages()["continue"]
    assert after["code"] > before["code"] + 0.15
    assert after["text"] > before["text"] - 0.02


def test_answers_of_the_target_lift_acceptance_more_than_other_texts() -> None:
    before, after, other = (stages()[name]["text"] for name in ("continue", "align", "corpus"))
    assert after > before + 0.03
    assert after > other + 0.03


class Fixed(torch.nn.Module):
    """A model with the same distribution after every token."""

    device = torch.device("cpu")

    def __init__(self, probs: list[float]) -> None:
        super().__init__()
        self.row = torch.nn.Parameter(torch.tensor(probs).log())

    def forward(self, input_ids, use_cache=False):
        found = type("Output", (), {})()
        found.logits = self.row.expand(*input_ids.shape, -1)
        return found


def test_acceptance_chooses_the_checkpoint_and_perplexity_does_not(tmp_path) -> None:
    target = Fixed([0.5, 0.25, 0.25])
    wide, sharp = Fixed([0.2, 0.4, 0.4]), Fixed([0.5, 0.49, 0.01])
    tokens = torch.tensor([0, 0, 1, 2])
    lost = [float(cross_entropy(m.row.detach().expand(4, -1), tokens)) for m in (wide, sharp)]
    assert lost[0] < lost[1]
    documents, best = Documents.of([([0, 0, 1, 2], 1)]), Best(tmp_path)
    for step, model in enumerate((sharp, wide)):
        rates = held_out_acceptance(model, target, documents, np.array([0]))
        best.offer(model, "align", step, rates)
    assert best.found["step"] == 0 and best.found["all"] == pytest.approx(0.76)


def test_the_choice_of_a_shape_weighs_acceptance_against_cost() -> None:
    """Of made figures: acceptance levels off with depth, and the cost of a step rises."""
    measured = {1: (0.03, 0.45), 2: (0.05, 0.62), 4: (0.09, 0.70), 8: (0.17, 0.72)}
    found = [
        rated(shape(64, layers), VOCAB, c=c, alpha=rate) for layers, (c, rate) in measured.items()
    ]
    assert fastest(found).size.layers in (2, 4)
    free = [rated(shape(64, n), VOCAB, c=0.0, alpha=rate) for n, (_, rate) in measured.items()]
    assert fastest(free).size.layers == 8


@pytest.mark.parametrize("gamma", [1, 3, 5])
def test_tau_counts_the_token_of_the_target(gamma: int) -> None:
    """tau = 1 + gamma r over steps with a draft that is not cut off."""
    drafted = accepted = emitted = steps = 0

    def count(step) -> None:
        nonlocal drafted, accepted, emitted, steps
        if len(step.trees[0]) == gamma:
            steps, drafted = steps + 1, drafted + gamma
            emitted += len(step.emitted[0])
            accepted += len(step.verdicts[0].nodes)

    engine = Engine(
        FakeTarget(table_law(1)),
        DraftModel(model=FakeRunner(table_law(2))),  # type: ignore[arg-type]
        registry.make("verifier", "speculative"),
        Given(Plan(gamma, gamma)),
        listeners=[count],
    )
    run_all(engine, [sequence((0, 1), 300, SeededDice(0))])
    assert emitted / steps == pytest.approx(tau_of_ratio(accepted / drafted, gamma))
    assert 0 < accepted < drafted


def test_prompts_are_not_learned() -> None:
    model, target = small_draft(), markov(1)
    texts = target.texts(4, seed=0)
    rows = [texts.document(i).tolist() for i in range(4)]

    def gradient(documents: Documents) -> torch.Tensor:
        data = batches(documents)
        (micro,) = next(data.steps())
        model.zero_grad()
        Distilled(model, data, None).loss(micro).backward()
        return model.model.norm.weight.grad.clone()

    learned = Documents.of([(rows[0], 1), (rows[1], 30)])
    more = Documents.of([(rows[0], 1), (rows[1], 30), (rows[2], LENGTH), (rows[3], LENGTH)])
    assert torch.allclose(gradient(learned), gradient(more), atol=1e-7)
    assert not torch.allclose(gradient(learned), gradient(texts), atol=1e-5)
