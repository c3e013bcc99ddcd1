"""Examples for an acceptance head, from decoding with a draft of another tokenizer.

A target token t of a draft is an example if verification reached it: the draft's hidden row after
t's last draft token, and the acceptance probability min(1, p(t) / Q(t)). The newest token of a
draft has no hidden row yet and is left out, as in the controller.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from forerun.api import Model
from forerun.controllers.fixed import Fixed
from forerun.core.records import Step
from forerun.core.sampling import Sampling
from forerun.drafters.cross_vocab import CrossVocab
from forerun.errors import DataError
from forerun.training.data.documents import Micro
from forerun.training.online.corrections import overlap
from forerun.training.progress import Watch, counted
from forerun.utils.files import write_atomically

DRAFT_TOKENS = 8  # of a draft


class DraftedTokens:
    """Listener: collects the examples of the drafts that `drafter` made."""

    def __init__(self, drafter: CrossVocab) -> None:
        self.drafter = drafter
        drafter.runner.keeps_hidden = True
        self.hidden = list[np.ndarray]()
        self.labels = list[float]()

    def __call__(self, step: Step) -> None:
        for i, (seq, tree) in enumerate(zip(step.seqs, step.trees, strict=True)):
            reached = min(len(step.verdicts[i].nodes) + 1, len(tree) - 1)
            for node in range(reached):
                row = self.drafter.hidden_at(seq, tuple(tree.path(node)))
                self.hidden.append(row.float().cpu().numpy())
                p = step.laws[i][int(tree.parents[node])]
                self.labels.append(overlap(p, tree, node))


@dataclass(frozen=True, eq=False)
class Examples:
    """Hidden rows [n, d] and acceptance probabilities [n]; batches of the examples `ids`."""

    hidden: Tensor
    labels: Tensor
    ids: np.ndarray  # int64 [m]
    per_step: int
    seed: int = 0

    def __call__(self, micro: Micro) -> tuple[Tensor, Tensor, Tensor]:
        """Hidden rows [1, k, d], labels [1, k] and a mask of trained positions [1, k]."""
        return self.hidden[micro.tokens], self.labels[micro.tokens], micro.weights > 0

    def steps(self, start: int = 0) -> Iterator[list[Micro]]:
        """Batches from step `start` on, without end; each pass has an order of its own."""
        per_pass = -(-len(self.ids) // self.per_step)
        while True:
            order = np.random.default_rng([self.seed, start // per_pass]).permutation(self.ids)
            at = start % per_pass * self.per_step
            ids = torch.from_numpy(order[at : at + self.per_step])[None]
            yield [Micro(ids, torch.full(ids.shape, 1 / ids.numel()), ids.numel())]
            start += 1

    def split(self) -> tuple[Examples, Examples]:
        """The last tenth, and the rest."""
        at = len(self.ids) - max(1, len(self.ids) // 10)
        return replace(self, ids=self.ids[at:]), replace(self, ids=self.ids[:at])


def drafted_examples(
    model: Model,
    draft: str,
    prompts: list[str],
    path: Path,
    sampling: Sampling,
    *,
    batch: int,
    per_step: int,
    seed: int,
    watch: Watch,
) -> Examples:
    """Decodes the prompts with the draft, or reads what an earlier run collected."""
    if not path.exists():
        drafter = CrossVocab(model=draft, tokenizer=model.tokenizer, target=model.target)
        collect, show = DraftedTokens(drafter), counted(watch, "drafts", "texts")
        plan = Fixed(nodes=DRAFT_TOKENS, depth=DRAFT_TOKENS)
        run = model.run(
            prompts,
            sampling,
            drafter=drafter,
            controller=plan,
            batch=batch,
            seed=seed,
            on_step=collect,
        )
        for done, _ in enumerate(run, 1):
            show(done, len(prompts))
        if len(collect.labels) < 2:
            raise DataError(
                "the draft proposed no tokens that could be scored; use more problems, or a draft "
                "with more tokens in common with the target"
            )
        _write(path, np.stack(collect.hidden), np.array(collect.labels, np.float32))
    with np.load(path) as found:
        hidden, labels = torch.from_numpy(found["hidden"]), torch.from_numpy(found["labels"])
    return Examples(hidden, labels, np.arange(len(labels)), per_step, seed)


def _write(path: Path, hidden: np.ndarray, labels: np.ndarray) -> None:
    def write(part: Path) -> None:
        with part.open("wb") as file:
            np.savez(file, hidden=hidden, labels=labels)

    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, write)
