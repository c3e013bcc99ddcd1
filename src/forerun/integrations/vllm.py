"""STAND, Token Recycling and suffix drafts inside vLLM, as proposers of its `custom_class`.

    LLM(model, speculative_config={
        "method": "custom_class",
        "model": "forerun.integrations.vllm.StandProposer",
        "num_speculative_tokens": 5,
    })

vLLM drafts chains and judges them by its own rejection sampler. Where forerun is installed in its
environment, the entry point of `vllm_taps` gives us target logits and takes q: STAND learns laws
and its chains are drawn (the full form). Otherwise tokens are all that is known, and drafts are
deterministic (the plain form).

Law: kept by both. A chain's token is a first draw without replacement, hence of law q; the number
of tokens never depends on one that is drafted behind it. vLLM cuts drafts off where a grammar
refuses a token, which depends on that token: requests with a grammar get deterministic drafts.
"""

from __future__ import annotations

from collections.abc import Hashable
from collections.abc import Sequence as Many
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any, NamedTuple

import numpy as np
import torch

from forerun import registry
from forerun.core.dice import SeededDice
from forerun.core.forward_batch import ForwardBatch
from forerun.core.logits import TargetProbs
from forerun.core.records import Plan, Rows, Sequence, Step, Verdict
from forerun.core.roles import Target
from forerun.core.sampling import Sampling
from forerun.core.tree import EMPTY, Tree, chain
from forerun.core.tree_template import grid
from forerun.engine.safe_drafter import SafeDrafter
from forerun.errors import ConfigError
from forerun.integrations.vllm_mend import mend
from forerun.integrations.vllm_taps import Tap, check_release, open_taps

TAIL = 32  # last tokens by which the plain form knows a text again
GREEDY = 1e-5  # vLLM's: a lower temperature is 0


class Served(Target):
    """The model that vLLM runs; drafters only ask for its size."""

    def __init__(self, vocab_size: int, context: int) -> None:
        self.vocab_size, self.context = vocab_size, context

    def forward(self, batch: ForwardBatch) -> list[Rows]:
        raise ConfigError("vLLM runs the model's passes; this drafter cannot ask for its own")

    commit = forward  # type: ignore[assignment]


@dataclass(eq=False)
class Text:
    """One request: its sequence, and the chain that waits to be judged."""

    seq: Sequence
    drafted: Tree = EMPTY


class Seen(NamedTuple):
    """What one step of vLLM showed: logits [rows, V], and per request its first row and drafts."""

    logits: torch.Tensor
    starts: list[int]
    trees: list[Tree]


class Proposer(Tap):
    """A drafter of ours behind vLLM's interface for proposers; subclasses say which.

    Options come as text: LLM(..., additional_config={"forerun": "scope=tenant,entries=16"}).
    """

    name: str

    def __init__(self, vllm_config: Any) -> None:
        check_release()
        mend()
        config = vllm_config.model_config
        self.num_tokens = int(vllm_config.speculative_config.num_speculative_tokens)
        self.is_full = open_taps(vllm_config.parallel_config.world_size)
        self.target = Served(config.get_vocab_size(), config.max_model_len)
        self.options = (vllm_config.additional_config or {}).get("forerun", "")
        self._texts: dict[Hashable, list[Text]] = {}
        self._runner: Any = None
        self._seen: Seen | None = None
        self.restart()

    def restart(self) -> None:
        """Forgets all that was learned; call it while no request runs."""
        made = self.make(self.options)
        made.bind(self.target)
        self.drafter = SafeDrafter(made)
        self._texts.clear()

    def make(self, options: str) -> Any:
        """The drafter with a user's options. Raises ConfigError for those that chains fix."""
        fixed = self.fixed()
        spec = f"{self.name}:{options}"
        if refused := sorted(fixed.keys() & registry.parse(spec)[1].keys()):
            raise ConfigError(
                f"vLLM judges chains, so option {refused[0]} of {self.name} is "
                f"{fixed[refused[0]]!r} there; leave it out of additional_config['forerun']"
            )
        return registry.make("drafter", spec, **fixed)

    def fixed(self) -> dict[str, Any]:
        """Options that make the drafter draft chains of at most `num_tokens`."""
        return {"template": grid(*[1] * self.num_tokens)}

    def load_model(self, *_: Any, **__: Any) -> None:
        """vLLM's call; there are no weights."""

    def propose(
        self,
        sampled_token_ids: list[list[int]],
        num_tokens_no_spec: np.ndarray,
        token_ids_cpu: np.ndarray,
        slot_mappings: Any = None,
    ) -> list[list[int]]:
        """Drafts for every row of the batch; [] for rows that are still in their prompt.

        sampled_token_ids: this step's tokens. num_tokens_no_spec int32 [rows]: lengths with them.
        token_ids_cpu int32 [rows, longest]: the texts.
        """
        seen, self._seen = self._seen, None
        rows = [row for row, new in enumerate(sampled_token_ids) if new]
        texts = self._follow(rows, sampled_token_ids, num_tokens_no_spec, token_ids_cpu)
        news = [sampled_token_ids[row] for row in rows]
        if rows:
            self.drafter.observe(self._step(seen, rows, texts, news))
        seqs = [text.seq for text in texts]
        plans = [self._plan(seq) for seq in seqs]
        trees = self.drafter.propose(seqs, plans, [seq.dice for seq in seqs])
        drafts: list[list[int]] = [[] for _ in sampled_token_ids]
        for row, text, tree in zip(rows, texts, trees, strict=True):
            assert not len(tree) or tree.parents[-1] == len(tree) - 2, "vLLM judges chains"
            assert self.is_full or (tree.rows < 0).all(), "q cannot be told"
            text.drafted, drafts[row] = tree, tree.tokens.tolist()
        return drafts

    def see(self, runner: Any, logits: torch.Tensor, metadata: Any) -> None:
        self._runner = runner
        names = runner.input_batch.req_ids
        counts, tokens = [0] * len(names), []
        if metadata is not None:
            counts, tokens = metadata.num_draft_tokens, metadata.draft_token_ids.tolist()
        elif logits.dtype == torch.float32:
            logits = logits.clone()  # vLLM's sampler is about to write into it
        starts, trees, row, at = [], [], 0, 0
        for name, count in zip(names, counts, strict=True):
            drafted = EMPTY
            for text in self._texts.get(name, ()):
                drafted, text.drafted = text.drafted, EMPTY
            starts.append(row)
            trees.append(drafted_as(drafted, tokens[at : at + count]))
            row, at = row + count + 1, at + count
        self._seen = Seen(logits, starts, trees)

    def draft_probs(self) -> torch.Tensor | None:
        assert self._seen is not None, "q is asked for while logits are sampled"
        logits, _, trees = self._seen
        if not any((tree.rows >= 0).any() for tree in trees):
            return None
        found = [entries(tree) for tree in trees]
        sizes = np.concatenate([counts for counts, _, _ in found])
        rows = torch.from_numpy(np.repeat(np.arange(len(sizes)), sizes))
        ids = torch.from_numpy(np.concatenate([ids for _, ids, _ in found]).astype(np.int64))
        values = torch.from_numpy(np.concatenate([q for _, _, q in found]).astype(np.float32))
        probs = torch.zeros(len(sizes), logits.shape[1], device=logits.device)
        probs[rows.to(probs.device), ids.to(probs.device)] = values.to(probs.device)
        return probs

    def _follow(
        self, rows: list[int], new: list[list[int]], lengths: np.ndarray, tokens: np.ndarray
    ) -> list[Text]:
        """The texts of rows, extended by their new tokens; those that have ended are left."""
        before, self._texts, texts = self._texts, {}, []
        for row in rows:
            length = int(lengths[row])
            start = length - len(new[row])
            known = before.get(self._key(row, tokens[row, :start]))
            text = known.pop() if known else self._begun(row, tokens[row, :start])
            if len(text.seq.tokens) == start:
                text.seq.tokens += new[row]
            else:
                text.seq.tokens = tokens[row, :length].tolist()
            self._texts.setdefault(self._key(row, tokens[row, :length]), []).append(text)
            texts.append(text)
        for key, others in before.items():
            if others and self._runner is not None and key in self._runner.requests:
                self._texts[key] = others  # waits for its turn
            else:
                for text in others:
                    self.drafter.finish(text.seq)
        return texts

    def _key(self, row: int, tokens: np.ndarray) -> Hashable:
        """By what a text is known again: its request, or its length and last tokens."""
        if self._runner is not None:
            return self._runner.input_batch.req_ids[row]
        return len(tokens), tokens[-TAIL:].tobytes()

    def _begun(self, row: int, tokens: np.ndarray) -> Text:
        """A new text; those with equal prompts form a group."""
        sampling, num_prompt, seed = Sampling(temperature=0.0), len(tokens), None
        if self._runner is not None:
            request = self._runner.requests[self._runner.input_batch.req_ids[row]]
            sampling = sampling_of(request.sampling_params)
            seed = getattr(request.sampling_params, "seed", None)
            num_prompt = min(request.num_prompt_tokens, len(tokens))
        seed = torch.randint(2**31, ()).item() if seed is None else abs(seed)
        group = blake2b(tokens[:num_prompt].tobytes(), digest_size=16).digest()
        seq = Sequence(
            tokens.tolist(), num_prompt, sampling, SeededDice(int(seed)), limit=1 << 30, group=group
        )
        return Text(seq)

    def _plan(self, seq: Sequence) -> Plan:
        room = self.target.context - len(seq.tokens) - 1
        return Plan(self.num_tokens, self.num_tokens).within(room)

    def _step(
        self, seen: Seen | None, rows: list[int], texts: list[Text], news: list[list[int]]
    ) -> Step:
        """What happened to these texts, in the form that drafters learn from."""
        trees, laws = [], []
        for row, text, new in zip(rows, texts, news, strict=True):
            if seen is None:
                tree = chain(new[:-1])  # what was accepted; the rest is not known
                logits = certain(new, self.target.vocab_size)
            else:
                tree, start = seen.trees[row], seen.starts[row]
                logits = seen.logits[start : start + len(tree) + 1]
            trees.append(tree)
            laws.append(TargetProbs(Rows(logits), text.seq, tree, ()))
        verdicts = [Verdict(list(range(len(new) - 1)), new[-1]) for new in news]
        return Step([t.seq for t in texts], [Plan()] * len(texts), trees, laws, verdicts, news)


class StandProposer(Proposer):
    """STAND: what the model's laws were after the same tokens; drawn where q can be told."""

    name = "stand"

    def fixed(self) -> dict[str, Any]:
        return super().fixed() | {"tree": "template"}


class TokenRecyclingProposer(Proposer):
    """Token Recycling: the best successor of each token when the model last looked at it."""

    name = "token_recycling"


class SuffixProposer(Proposer):
    """SuffixDecoding: what most often followed the same words, in this text or earlier ones."""

    name = "suffix"

    def fixed(self) -> dict[str, Any]:
        return {"branches": False}


def drafted_as(tree: Tree, tokens: list[int]) -> Tree:
    """The beginning of our chain that vLLM has kept; drafts of its own making are chosen nodes."""
    count = len(tokens)
    if tree.tokens[:count].tolist() != tokens:
        return chain(tokens)
    return Tree(
        tokens=tree.tokens[:count],
        parents=tree.parents[:count],
        laws=tree.laws[:count],
        rows=tree.rows[:count],
        starts=tree.starts,
        q_ids=tree.q_ids,
        q_probs=tree.q_probs,
    )


def entries(tree: Tree) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """What a chain's nodes were drawn from: entries of each node [n], then their ids and q.

    A chosen node has one entry, its own token.
    """
    if (tree.rows < 0).all():
        return np.ones(len(tree), np.int64), tree.tokens, np.ones(len(tree))
    laws = [(tree.q(node), tree.tokens[node : node + 1]) for node in range(len(tree))]
    sizes = [1 if q is None else len(q.ids) for q, _ in laws]
    ids = np.concatenate([token if q is None else q.ids for q, token in laws])
    return np.array(sizes), ids, np.concatenate([[1.0] if q is None else q.probs for q, _ in laws])


def certain(tokens: Many[int], vocab: int) -> torch.Tensor:
    """Logits [len(tokens), vocab] of unit masses: all that a token alone says of its law."""
    logits = torch.full((len(tokens), vocab), -torch.inf)
    logits[torch.arange(len(tokens)), torch.tensor(tokens)] = 0.0
    return logits


def sampling_of(params: Any) -> Sampling:
    """vLLM's sampling parameters as ours; greedy, so that nothing is drawn, beside a grammar."""
    if params is None or params.temperature < GREEDY or params.structured_outputs is not None:
        return Sampling(temperature=0.0)
    return Sampling(
        temperature=params.temperature,
        top_k=max(0, params.top_k),
        top_p=params.top_p,
        min_p=params.min_p,
    )
