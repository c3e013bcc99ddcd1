"""forerun drafters as candidate generators of transformers' assisted generation.

    with candidates(model, "stand"):
        model.generate(**inputs, prompt_lookup_num_tokens=8, do_sample=True)

Only chains and batch size 1, for code built on assisted generation; `integrations.hf.generate` also
does trees and batches. A chain follows the first child of every node. The first draw without
replacement has distribution q, so transformers' rejection rule is exact. A chosen token has a unit
mass as q, so the rule accepts it with its target probability.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from transformers.generation.candidate_generator import CandidateGenerator

from forerun import registry
from forerun.core.dice import SeededDice
from forerun.core.logits import TargetProbs
from forerun.core.records import Plan, Rows, Sequence, Step, Verdict
from forerun.core.roles import Drafter
from forerun.core.sampling import Sampling
from forerun.core.tree import Tree, TreeBuilder
from forerun.engine.safe_drafter import SafeDrafter
from forerun.errors import ConfigError
from forerun.integrations.hf import lock_of, target_of


class Candidates(CandidateGenerator):
    """Candidates of a drafter for one sequence; learns from the scores of assisted generation."""

    def __init__(
        self, model: Any, drafter: str | Drafter, *, num_tokens: int, greedy: bool
    ) -> None:
        if num_tokens < 1:
            raise ConfigError(f"num_tokens must be at least 1, got {num_tokens}")
        made = drafter if isinstance(drafter, Drafter) else registry.make("drafter", drafter)
        made.bind(target_of(model, 1))
        self.drafter, self.plan = SafeDrafter(made), Plan(num_tokens, num_tokens)
        self.vocab_size = model.config.get_text_config().vocab_size
        self.sampling = Sampling(temperature=0.0 if greedy else 1.0)
        self.seq: Sequence | None = None
        self.tree: Tree | None = None

    def get_candidates(self, input_ids: Tensor, **_: Any) -> Any:
        """input_ids [1, L] followed by candidates, and log q [1, n, V] if there are any."""
        seq = self._synced(input_ids)
        (tree,) = self.drafter.propose([seq], [self.plan], [seq.dice])
        self.tree = tree = first_path(tree)
        if not len(tree):
            return input_ids, None
        made = torch.from_numpy(tree.tokens).to(input_ids)[None]
        laws = torch.stack(
            [torch.from_numpy(tree.proposal(n, self.vocab_size)) for n in range(len(tree))]
        )
        return torch.cat([input_ids, made], 1), laws.log().float().to(input_ids.device)[None]

    def update_candidate_strategy(
        self, input_ids: Tensor, scores: Tensor, num_matches: int
    ) -> None:
        """Reports the verdict to the drafter: processed scores [1, n + 1, V]."""
        seq, tree = self.seq, self.tree
        if seq is None or tree is None:
            return
        tokens = input_ids[0].tolist()
        emitted = tokens[len(seq.tokens) :]
        accepted = min(int(num_matches), len(tree), max(len(emitted) - 1, 0))
        rows = Rows(scores[0, : len(tree) + 1])
        laws = TargetProbs(rows, seq, tree, ())
        seq.tokens += emitted
        verdict = Verdict(list(range(accepted)), emitted[-1] if emitted else 0)
        step = Step([seq], [self.plan], [tree], [laws], [verdict], [emitted[: accepted + 1]])
        if len(rows.logits) == len(tree) + 1:
            self.drafter.observe(step)

    def close(self) -> None:
        """Ends the sequence."""
        if self.seq is not None:
            self.drafter.finish(self.seq)

    def _synced(self, input_ids: Tensor) -> Sequence:
        if len(input_ids) != 1:
            raise ConfigError(f"assisted generation needs batch size 1, got {len(input_ids)}")
        tokens = input_ids[0].tolist()
        if self.seq is None:
            seed = int(torch.randint(2**31, ()).item())
            self.seq = Sequence(tokens, len(tokens), self.sampling, SeededDice(seed), limit=1 << 30)
        elif self.seq.tokens != tokens:
            self.seq.tokens = tokens
        return self.seq


def first_path(tree: Tree) -> Tree:
    """The chain of first children from the root down."""
    chain, node, end = TreeBuilder(), -1, -1
    while children := tree.children(node):
        node = children[0]
        end = chain.add(int(tree.tokens[node]), end, int(tree.laws[node]), tree.q(node))
    return chain.build()


@contextmanager
def candidates(
    model: Any, drafter: str | Drafter = registry.TREE_DRAFTER, *, num_tokens: int = 8
) -> Iterator[None]:
    """In this block, assisted generation of `model` uses a forerun drafter.

    Other threads wait in `candidates` or `hf.generate` of this model until the block ends.
    """
    made: list[Candidates] = []
    if not isinstance(drafter, Drafter):
        registry.check_spec("drafter", drafter)

    def generator(*_: Any, generation_config: Any, **__: Any) -> Candidates:
        greedy = not generation_config.do_sample
        made.append(Candidates(model, drafter, num_tokens=num_tokens, greedy=greedy))
        return made[-1]

    with lock_of(model):
        outer = vars(model).get("_get_candidate_generator")  # of an enclosing block
        model._get_candidate_generator = generator
        try:
            yield
        finally:
            if outer is None:
                del model._get_candidate_generator
            else:
                model._get_candidate_generator = outer
            for one in made:
                one.close()
