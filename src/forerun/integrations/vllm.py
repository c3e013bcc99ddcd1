"""STAND, Token Recycling and suffix drafters in vLLM, as proposers of its `custom_class`.

    LLM(model, speculative_config={
        "method": "custom_class",
        "model": "forerun.integrations.vllm.StandProposer",
        "num_speculative_tokens": 5,
    })

vLLM verifies chains with its own rejection sampler. If forerun is installed in the same
environment, the hooks of `vllm_taps` pass target logits to us and q to vLLM. STAND then learns
distributions and draws its chains. Otherwise only tokens are known, and drafts are deterministic.

Law: kept in both cases. A chain's token is a first draw without replacement, so its distribution is
q, and the length of a chain never depends on a later token. vLLM truncates drafts at a token that a
grammar forbids, which depends on that token, so requests with a grammar get deterministic drafts.
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

TAIL_TOKENS = 32  # last tokens that identify a request without vLLM's request ids
MIN_TEMPERATURE = 1e-5  # vLLM's: a lower temperature is 0


class VllmTarget(Target):
    """The model that vLLM runs; drafters only read its sizes."""

    def __init__(self, vocab_size: int, context: int) -> None:
        self.vocab_size, self.context = vocab_size, context

    def forward(self, batch: ForwardBatch) -> list[Rows]:
        raise ConfigError(
            "this drafter needs forward passes of its own, but vLLM runs the model; use stand, "
            "token_recycling or suffix"
        )

    commit = forward  # type: ignore[assignment]


@dataclass(eq=False)
class Request:
    """One request: its sequence, and its chain that is not verified yet."""

    seq: Sequence
    drafted: Tree = EMPTY


class StepLogits(NamedTuple):
    """One step of vLLM: logits [rows, V], and each request's first row and draft."""

    logits: torch.Tensor
    starts: list[int]
    trees: list[Tree]


class Proposer(Tap):
    """A forerun drafter behind vLLM's interface for proposers; subclasses name the drafter.

    Options are text: LLM(..., additional_config={"forerun": "scope=tenant,entries=16"}).
    """

    name: str

    def __init__(self, vllm_config: Any) -> None:
        check_release()
        mend()
        config = vllm_config.model_config
        self.num_tokens = int(vllm_config.speculative_config.num_speculative_tokens)
        self.has_logits = open_taps(vllm_config.parallel_config.world_size)
        self.target = VllmTarget(config.get_vocab_size(), config.max_model_len)
        self.options = (vllm_config.additional_config or {}).get("forerun", "")
        self._requests: dict[Hashable, list[Request]] = {}
        self._runner: Any = None
        self._step_logits: StepLogits | None = None
        self.restart()

    def restart(self) -> None:
        """Forgets everything learned; call it while no request runs."""
        made = self.make(self.options)
        made.bind(self.target)
        self.drafter = SafeDrafter(made)
        self._requests.clear()

    def make(self, options: str) -> Any:
        """The drafter with a user's options. Raises ConfigError for a fixed option."""
        fixed = self.fixed_options()
        spec = f"{self.name}:{options}"
        if any(name.startswith("constraint") for name in registry.parse(spec)[1]):
            raise ConfigError(
                f"additional_config['forerun']={options!r} has a constraint, which vLLM cannot "
                "apply; use SamplingParams(structured_outputs=...), or forerun serve"
            )
        if refused := sorted(fixed.keys() & registry.parse(spec)[1].keys()):
            raise ConfigError(
                f"option {refused[0]} of {self.name} must be {fixed[refused[0]]!r} in vLLM, which "
                "verifies chains; remove it from additional_config['forerun']"
            )
        return registry.make("drafter", spec, **fixed)

    def fixed_options(self) -> dict[str, Any]:
        """Options that limit drafts to chains of at most `num_tokens`."""
        return {"template": grid(*[1] * self.num_tokens)}

    def load_model(self, *_: Any, **__: Any) -> None:
        """Called by vLLM; there are no weights to load."""

    def propose(
        self,
        sampled_token_ids: list[list[int]],
        num_tokens_no_spec: np.ndarray,
        token_ids_cpu: np.ndarray,
        slot_mappings: Any = None,
    ) -> list[list[int]]:
        """Drafts for every row of the batch; [] for rows that are still in prefill.

        sampled_token_ids: this step's tokens. num_tokens_no_spec int32 [rows]: lengths with them.
        token_ids_cpu int32 [rows, longest]: all tokens.
        """
        step_logits, self._step_logits = self._step_logits, None
        rows = [row for row, new in enumerate(sampled_token_ids) if new]
        requests = self._update(rows, sampled_token_ids, num_tokens_no_spec, token_ids_cpu)
        emitted = [sampled_token_ids[row] for row in rows]
        if rows:
            self.drafter.observe(self._step(step_logits, rows, requests, emitted))
        seqs = [request.seq for request in requests]
        plans = [self._plan(seq) for seq in seqs]
        trees = self.drafter.propose(seqs, plans, [seq.dice for seq in seqs])
        drafts: list[list[int]] = [[] for _ in sampled_token_ids]
        for row, request, tree in zip(rows, requests, trees, strict=True):
            assert not len(tree) or tree.parents[-1] == len(tree) - 2, "vLLM verifies chains"
            assert self.has_logits or (tree.rows < 0).all(), "q cannot be passed to vLLM"
            request.drafted, drafts[row] = tree, tree.tokens.tolist()
        return drafts

    def receive_logits(self, runner: Any, logits: torch.Tensor, metadata: Any) -> None:
        self._runner = runner
        names = runner.input_batch.req_ids
        counts, tokens = [0] * len(names), []
        if metadata is not None:
            counts, tokens = metadata.num_draft_tokens, metadata.draft_token_ids.tolist()
        elif logits.dtype == torch.float32:
            logits = logits.clone()  # vLLM's sampler writes into it
        starts, trees, row, at = [], [], 0, 0
        for name, count in zip(names, counts, strict=True):
            drafted = EMPTY
            for request in self._requests.get(name, ()):
                drafted, request.drafted = request.drafted, EMPTY
            starts.append(row)
            trees.append(truncated(drafted, tokens[at : at + count]))
            row, at = row + count + 1, at + count
        self._step_logits = StepLogits(logits, starts, trees)

    def draft_probs(self) -> torch.Tensor | None:
        assert self._step_logits is not None, "vLLM reads q while it samples"
        logits, _, trees = self._step_logits
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

    def _update(
        self, rows: list[int], new: list[list[int]], lengths: np.ndarray, tokens: np.ndarray
    ) -> list[Request]:
        """The requests of rows, extended by their new tokens; finished requests are dropped."""
        before, self._requests, requests = self._requests, {}, []
        for row in rows:
            length = int(lengths[row])
            start = length - len(new[row])
            known = before.get(self._key(row, tokens[row, :start]))
            request = known.pop() if known else self._new_request(row, tokens[row, :start])
            if len(request.seq.tokens) == start:
                request.seq.tokens += new[row]
            else:
                request.seq.tokens = tokens[row, :length].tolist()
            self._requests.setdefault(self._key(row, tokens[row, :length]), []).append(request)
            requests.append(request)
        for key, others in before.items():
            if others and self._runner is not None and key in self._runner.requests:
                self._requests[key] = others  # not scheduled in this step
            else:
                for request in others:
                    self.drafter.finish(request.seq)
        return requests

    def _key(self, row: int, tokens: np.ndarray) -> Hashable:
        """The identity of a request: its id, or its length and last tokens."""
        if self._runner is not None:
            return self._runner.input_batch.req_ids[row]
        return len(tokens), tokens[-TAIL_TOKENS:].tobytes()

    def _new_request(self, row: int, tokens: np.ndarray) -> Request:
        """A new request; requests with equal prompts form a group."""
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
        return Request(seq)

    def _plan(self, seq: Sequence) -> Plan:
        room = self.target.context - len(seq.tokens) - 1
        return Plan(self.num_tokens, self.num_tokens).within(room)

    def _step(
        self,
        step_logits: StepLogits | None,
        rows: list[int],
        requests: list[Request],
        emitted: list[list[int]],
    ) -> Step:
        """The record of this step that drafters learn from."""
        trees, laws = [], []
        for row, request, new in zip(rows, requests, emitted, strict=True):
            if step_logits is None:
                tree = chain(new[:-1])  # accepted drafts; rejected ones are not known
                logits = one_hot_logits(new, self.target.vocab_size)
            else:
                tree, start = step_logits.trees[row], step_logits.starts[row]
                logits = step_logits.logits[start : start + len(tree) + 1]
            trees.append(tree)
            laws.append(TargetProbs(Rows(logits), request.seq, tree, ()))
        verdicts = [Verdict(list(range(len(new) - 1)), new[-1]) for new in emitted]
        seqs, plans = [request.seq for request in requests], [Plan()] * len(requests)
        return Step(seqs, plans, trees, laws, verdicts, emitted)


class StandProposer(Proposer):
    """STAND: drafts from the model's distributions after the same n-gram; sampled if q is used."""

    name = "stand"

    def fixed_options(self) -> dict[str, Any]:
        return super().fixed_options() | {"tree": "template"}


class TokenRecyclingProposer(Proposer):
    """Token Recycling: drafts the most likely successors of each token when it was last seen."""

    name = "token_recycling"


class SuffixProposer(Proposer):
    """SuffixDecoding: drafts the most frequent continuation of the longest matching suffix."""

    name = "suffix"

    def fixed_options(self) -> dict[str, Any]:
        return {"branches": False}


def truncated(tree: Tree, tokens: list[int]) -> Tree:
    """The prefix of our chain that vLLM verified; a chain of chosen nodes if it is not ours."""
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
    """q of a chain, sparse: number of entries per node [n], then all ids and all q values.

    A chosen node has one entry, its token.
    """
    if (tree.rows < 0).all():
        return np.ones(len(tree), np.int64), tree.tokens, np.ones(len(tree))
    laws = [(tree.q(node), tree.tokens[node : node + 1]) for node in range(len(tree))]
    sizes = [1 if q is None else len(q.ids) for q, _ in laws]
    ids = np.concatenate([token if q is None else q.ids for q, token in laws])
    return np.array(sizes), ids, np.concatenate([[1.0] if q is None else q.probs for q, _ in laws])


def one_hot_logits(tokens: Many[int], vocab: int) -> torch.Tensor:
    """Logits [len(tokens), vocab] of unit masses at the tokens."""
    logits = torch.full((len(tokens), vocab), -torch.inf)
    logits[torch.arange(len(tokens)), torch.tensor(tokens)] = 0.0
    return logits


def sampling_of(params: Any) -> Sampling:
    """vLLM's sampling parameters as ours; greedy with a grammar, so that drafts are not drawn."""
    if params is None or params.structured_outputs is not None:
        return Sampling(temperature=0.0)
    if params.temperature < MIN_TEMPERATURE:
        return Sampling(temperature=0.0)
    return Sampling(
        temperature=params.temperature,
        top_k=max(0, params.top_k),
        top_p=params.top_p,
        min_p=params.min_p,
    )
