"""A draft model with another tokenizer: OmniDraft, and TLI and SLEM to compare.

Ramakrishnan et al., "OmniDraft: A Cross-vocabulary, Online Adaptive Drafter for On-device
Speculative Decoding", 2025; Timor et al., "Accelerating LLM Inference with Lossless Speculative
Decoding Algorithms for Heterogeneous Vocabularies", 2025. The methods differ in how the draft's
tokens become the target's:

    omni   one-to-one by bytes, and n-grams of draft tokens for the target tokens that texts showed;
           drawn from the exact law Q of a translated token (`_ngram_law.py`), LAZY nodes
    tli    the tokens that both vocabularies have, with the draft's law restricted to them
    slem   the draft's most probable text, encoded again with the target's tokenizer, POINT nodes

Exact: Q is the law that is drawn from; the others are ordinary drafts. Needs tokenizers with fixed
bytes per token.
"""

from __future__ import annotations

from collections.abc import Generator
from collections.abc import Sequence as Many
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import numpy as np

from forerun import registry
from forerun.core.dice import Dice
from forerun.core.growing import Path, Source
from forerun.core.records import Plan, Sequence, Step, never_stop
from forerun.core.roles import Target
from forerun.core.tree import EMPTY, Proposal, Tree, TreeBuilder, chain
from forerun.drafters._draft_runner import ModelDrafter, on_host, probs_of
from forerun.drafters._ngram_law import MAX_NGRAM, TokenLaw
from forerun.drafters._translation import Translation
from forerun.drafters.base import grow, in_lockstep
from forerun.errors import ConfigError, UnknownName
from forerun.models.draft_link import ForeignDraft, load_foreign_draft
from forerun.registry import GrowerName, ModelName

if TYPE_CHECKING:
    from torch import Tensor

    from forerun.models.retokenize import TextView
    from forerun.models.tokenizer import Tokenizer

LABELS = {"omni": frozenset({"lazy"}), "slem": frozenset({"point"})}
METHODS = "omni", "tli", "slem"
Growth = Generator[list[Path], list[np.ndarray], Tree]  # wants paths, is sent distributions [V_d]


class CrossVocab(ModelDrafter):
    """model: a folder, a hub id, or a loaded runner with its tokenizer.

    method: omni (n-grams), tli (the tokens of both vocabularies) or slem (the draft's text).
    grower: of method tli. The n-grams of omni are kept for all later texts of a tenant.
    """

    def __init__(
        self,
        *,
        model: ModelName | ForeignDraft,
        method: str = "omni",
        grower: GrowerName = "chain",
        dtype: str = "auto",
        device: str = "auto",
        max_seqs: int = 256,
        tokenizer: Tokenizer | None = None,
        target: Target | None = None,
    ) -> None:
        if method not in METHODS:
            raise UnknownName.of("method of cross_vocab", method, METHODS)
        if method != "tli" and grower != "chain":
            raise ConfigError(f"method {method} drafts chains; use grower=chain, or method=tli")
        if isinstance(model, str):
            model = load_foreign_draft(model, dtype, device, max_seqs, target)
        super().__init__(model.runner)
        self.method, self.grower = method, registry.make("grower", grower)
        self.labels = LABELS.get(method, self.grower.labels)
        self.is_tree = method == "tli" and grower != "chain"
        self.gives_hidden = method != "slem"  # whether `hidden_at` knows the drafted tokens
        self._tokenizers = tokenizer, model.tokenizer
        self._views: WeakKeyDictionary[Sequence, tuple[Sequence, TextView]] = WeakKeyDictionary()
        self._translation: Translation | None = None

    @property
    def translation(self) -> Translation:
        """The vocabularies and n-grams; copies of one draft model may share it."""
        assert self._translation is not None, "bind comes first"
        return self._translation

    @translation.setter
    def translation(self, shared: Translation) -> None:
        self._translation = shared

    def bind(self, target: Target) -> None:
        ours, theirs = self._tokenizers
        if ours is None:
            raise ConfigError(
                "cross_vocab needs the target's tokenizer; use it by name, or pass tokenizer"
            )
        if self._translation is None or self._translation.size != target.vocab_size:
            sizes = target.vocab_size, self.runner.vocab_size
            self.translation = Translation(ours, theirs, *sizes)
        self.begin_costs()

    def start(self, seq: Sequence) -> None:
        self._learn(seq, seq.tokens)

    def observe(self, step: Step) -> None:
        for seq, tokens in zip(step.seqs, step.emitted, strict=True):
            self._learn(seq, tokens)
        self.measure_costs()

    def propose(self, seqs: Many[Sequence], plans: Many[Plan], dice: Many[Dice]) -> list[Tree]:
        self.note_read(seqs)
        self.translation.add_seen()  # here, so that Q is fixed until the step ends
        views = [self.draft_view(seq) for seq in seqs]
        capped = [self._capped(*pair) for pair in zip(views, plans, strict=True)]
        if self.method == "tli":
            source = SharedTokens(self)
            return grow(seqs, capped, dice, source, self.grower)
        draft = self.draft_ngrams if self.method == "omni" else self.draft_text
        growths = {
            i: draft(seq, plan, own)
            for i, (seq, plan, own) in enumerate(zip(seqs, capped, dice, strict=True))
            if not plan.is_empty
        }
        found = in_lockstep(growths, lambda asked: self.rows([(seqs[i], p) for i, p in asked]))
        return [found.get(i, EMPTY) for i in range(len(seqs))]

    def draft_ngrams(self, seq: Sequence, plan: Plan, dice: Dice) -> Growth:
        """A chain of target tokens drawn from Q, and its paths of draft tokens."""
        tree, node, path, reach = TreeBuilder(), -1, (), 1.0
        trie = self.translation.trie(seq.tenant)
        while len(tree) < min(plan.nodes, plan.depth):
            law = TokenLaw(trie, partial(self._row, seq, path))
            draws = law.draw(dice)
            (row,) = yield [path + next(draws)]
            if law.sees(row).is_empty or (reach := reach * law.highest) < plan.min_acceptance:
                break
            try:
                while True:
                    (row,) = yield [path + draws.send(row)]
            except StopIteration as end:
                token, run = end.value
            node, path = tree.add_lazy(token, node, law), path + run
            if token in seq.end_ids or _stops(plan, law, token):
                break
        return tree.build()

    def draft_text(self, seq: Sequence, plan: Plan, dice: Dice) -> Growth:
        """The draft's most probable text, as a chain of target tokens."""
        path: Path = ()
        reach, limit = 1.0, min(plan.nodes, plan.depth)
        while len(path) < limit:
            (row,) = yield [path]
            reach *= float(row.max())
            if reach < plan.min_acceptance:
                break
            path = (*path, int(row.argmax()))
        return chain(self._as_target(seq, path)[:limit])

    def rows(self, asked: list[tuple[Sequence, Path]]) -> Many[np.ndarray]:
        """The draft's distributions [V_d] after the texts and these draft tokens."""
        return list(probs_of([seq for seq, _ in asked], self.logits(asked)))

    def logits(self, asked: list[tuple[Sequence, Path]]) -> np.ndarray:
        """The draft's logits [n, V_d]; -inf for tokens that a reduced head lacks."""
        found = self.runner.rows_at([(self._views[seq][0], path) for seq, path in asked])
        head = getattr(self.runner, "head_map", None)
        return on_host(found if head is None else head.widened(found))

    def as_draft(self, path: Path) -> Path:
        """The draft tokens of a path of target tokens.

        A constraint may have forced tokens that the draft lacks.
        """
        runs = (self.translation.run_of(token) for token in path)
        return tuple(draft for run in runs for draft in run)

    def hidden_at(self, seq: Sequence, path: Path) -> Tensor:
        """The draft's hidden row [d] after the last draft token of a path of target tokens."""
        return self.runner.hidden_at(self._views[seq][0], self.as_draft(path))

    def draft_view(self, seq: Sequence) -> Sequence:
        """The sequence with its text in the draft's tokens; one object as long as it exists."""
        if seq not in self._views:
            self._views[seq] = replace(seq, tokens=[]), self.translation.view()
        view, text = self._views[seq]
        view.tokens = text.follow(seq.tokens)
        return view

    def catch_up_seconds(self, seq: Sequence) -> float:
        return self.catch_up(seq, self.runner.num_unread(self.draft_view(seq)))

    def acceptance_prior(self, num: int = 1) -> tuple[float, float]:
        """Typical acceptance of models of different families."""
        return 0.5, 0.7

    def finish(self, seq: Sequence) -> None:
        if seq in self._views:
            self.runner.release(self._views.pop(seq)[0])

    def forget(self, group: Any) -> None:
        super().forget(group)
        is_tenant = isinstance(group, tuple) and group[:1] == ("tenant",)
        if is_tenant and self._translation is not None:
            self.translation.forget(group[1])

    def memory_report(self) -> dict[str, int]:
        nbytes = 0 if self._translation is None else self._translation.nbytes
        return super().memory_report() | {"n-grams": nbytes}

    def _capped(self, view: Sequence, plan: Plan) -> Plan:
        """The plan within the draft's context; nothing without a text that it can read."""
        longest = MAX_NGRAM if self.method == "omni" else 1
        room = (self.runner.context - len(view.tokens)) // longest
        return plan.within(room if view.tokens else 0)

    def _learn(self, seq: Sequence, tokens: Many[int]) -> None:
        if self.method == "omni":
            self.translation.see(seq.tenant, tokens)

    def _row(self, seq: Sequence, path: Path, run: Path) -> np.ndarray:
        return self.rows([(seq, path + run)])[0]

    def _as_target(self, seq: Sequence, path: Path) -> list[int]:
        """Draft tokens as the target's tokenizer writes them after the last word of the text."""
        tail, to_draft = self._views[seq][1].tail(), self.translation.to_draft
        to_target = self.translation.to_target
        pieces = [to_draft.piece(token) for token in tail]
        if all(piece is not None for piece in pieces):
            text = b"".join(piece or b"" for piece in pieces)
            own = [to_target.piece(token) for token in path]
            whole = to_target.encode(text + b"".join(piece or b"" for piece in own))
            if None not in own and whole[: len(tail)] == tail:
                return whole[len(tail) :]
        return to_target(path)


class SharedTokens(Source):
    """q of method tli: the draft's law restricted to the tokens that both models have."""

    def __init__(self, drafter: CrossVocab) -> None:
        self._drafter, self._map = drafter, drafter.translation.map
        self._ids = self._map.forward[self._map.shared].astype(np.int32)

    def next(self, requests: Many[tuple[Sequence, Path]]) -> list[Proposal | None]:
        drafter = self._drafter
        asked = [(seq, drafter.as_draft(path)) for seq, path in requests]
        logits = drafter.logits(asked)[:, self._map.shared]
        found: list[Proposal | None] = [None] * len(requests)
        for i in np.flatnonzero(logits.max(axis=1) > -np.inf).tolist():
            (row,) = probs_of([requests[i][0]], logits[i : i + 1], is_tree=drafter.is_tree)
            kept = np.flatnonzero(row)
            found[i] = Proposal(self._ids[kept], row[kept])
        return found


def _stops(plan: Plan, law: TokenLaw, token: int) -> bool:
    """`Plan.stop` for a token of Q."""
    if plan.stop is never_stop:
        return False
    return plan.stop(Proposal(np.array([token], np.int32), np.array([law.prob(token)])), token)
