"""A loop that keeps vLLM's protocol, so that proposers can be tested without it.

It has what the runner of vLLM 0.32 has where we touch it, and judges drafts by its rule; what it
checks are our sides of the protocol.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from forerun.core.sampling import softmax
from forerun.integrations import vllm, vllm_taps

V, CONTEXT, PROMPT = 6, 64, [0, 1, 2]
TABLE = np.random.default_rng(1).normal(0.0, 1.5, (V, V)).astype(np.float32)  # logits by last token
NAMES = {
    "stand": vllm.StandProposer,
    "recycling": vllm.TokenRecyclingProposer,
    "suffix": vllm.SuffixProposer,
}


class Loop:
    """As much of vLLM's runner and scheduler as proposers meet; one step per call of `step`."""

    def __init__(self, proposer: vllm.Proposer, seed: int = 0, chaos: bool = True) -> None:
        self.drafter, self.rng, self.chaos = proposer, np.random.default_rng(seed), chaos
        self.requests: dict[str, Any] = {}
        self.drafts: dict[str, list[int]] = {}
        self.input_batch = SimpleNamespace(req_ids=[])
        self.drafted = self.accepted = self.steps = 0

    def add(self, name: str, params: Any) -> None:
        self.requests[name] = SimpleNamespace(
            num_prompt_tokens=len(PROMPT), sampling_params=params, tokens=list(PROMPT)
        )

    def step(self) -> None:
        """Some requests advance, their drafts cut anywhere; now and then drafts are zeros."""
        names = list(self.requests)
        if self.chaos:  # rows move, and some requests wait
            self.rng.shuffle(names)
            names = names[: max(1, len(names) - int(self.rng.integers(2)))]
        self.input_batch.req_ids = names
        drafts = [self.drafts.pop(name, []) for name in names]
        if self.chaos:
            drafts = [d[: int(self.rng.integers(len(d) + 1))] for d in drafts]
        texts = [self.requests[name].tokens for name in names]
        pairs = zip(texts, drafts, strict=True)
        rows = [TABLE[token] for text, draft in pairs for token in [text[-1], *draft]]
        metadata = None
        if any(drafts):
            flat = torch.tensor([token for draft in drafts for token in draft])
            metadata = SimpleNamespace(num_draft_tokens=[*map(len, drafts)], draft_token_ids=flat)
        sampled = self._sample(torch.from_numpy(np.stack(rows)), metadata)
        self._count(drafts, sampled)
        for text, new in zip(texts, sampled, strict=True):
            text += new
        if self.chaos and self.rng.random() < 0.1:  # as where a draft might not fit
            self.drafts |= {name: [0, 0] for name in names}
            return
        lengths = np.array([len(text) for text in texts], np.int32)
        tokens = np.zeros((len(texts), CONTEXT + 8), np.int32)
        for row, text in enumerate(texts):
            tokens[row, : len(text)] = text
        proposed = self.drafter.propose(sampled, lengths, tokens, slot_mappings=None)
        self.drafts |= dict(zip(names, proposed, strict=True))

    def _sample(self, logits: torch.Tensor, spec_decode_metadata: Any) -> list[list[int]]:
        """vLLM's rule; writes into its argument as vLLM does."""
        counts = [0] * len(self.input_batch.req_ids)
        drafts, q = np.empty(0, int), None
        if spec_decode_metadata is not None:
            counts = spec_decode_metadata.num_draft_tokens
            drafts = spec_decode_metadata.draft_token_ids.numpy()
            q = self._get_spec_decode_draft_probs(spec_decode_metadata)
        sampled, row, at = [], 0, 0
        for name, count in zip(self.input_batch.req_ids, counts, strict=True):
            t = self.requests[name].sampling_params.temperature
            sampled.append([])
            for i in range(count + 1):
                z = logits[row + i].numpy()
                p = softmax(z / t) if t else np.eye(V)[z.argmax()]
                if i == count:
                    sampled[-1].append(int(self.rng.choice(V, p=p / p.sum())))
                    break
                x = drafts[at + i]
                of = np.eye(V)[x] if q is None else q[at + i].double().numpy()
                assert abs(of.sum() - 1) < 1e-5
                if self.rng.random() * of[x] < p[x]:
                    sampled[-1].append(int(x))
                    continue
                rest = np.maximum(p - of, 0.0)
                sampled[-1].append(int(self.rng.choice(V, p=rest / rest.sum())))
                break
            row, at = row + count + 1, at + count
        if spec_decode_metadata is None:
            logits.zero_()
        return sampled

    def _get_spec_decode_draft_probs(self, spec_decode_metadata: Any) -> torch.Tensor | None:
        return None

    def _count(self, drafts: list[list[int]], sampled: list[list[int]]) -> None:
        self.steps += len(drafts)
        self.drafted += sum(map(len, drafts))
        self.accepted += sum(len(new) - 1 for new in sampled)


vllm_taps.wrap(Loop)


def params(temperature: float = 1.0, **options: Any) -> Any:
    """vLLM's sampling parameters, as far as they are read."""
    plain = {"top_k": -1, "top_p": 1.0, "min_p": 0.0, "seed": None, "structured_outputs": None}
    return SimpleNamespace(temperature=temperature, **plain | options)


def warm(loop: Loop, steps: int = 8, **options: Any) -> None:
    """Steps of two requests, so that something is known."""
    for i in range(2):
        loop.add(str(i), params(**options))
    for _ in range(steps):
        loop.step()


@pytest.fixture(autouse=True)
def seeded() -> None:
    """Requests without a seed take theirs from torch."""
    torch.manual_seed(0)


@pytest.fixture
def make(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Builds a proposer in one of its forms, without vLLM."""
    monkeypatch.setattr(vllm, "check_release", lambda: None)
    monkeypatch.setattr(vllm, "mend", lambda: False)

    def built(name: str, *, full: bool = True, k: int = 3, options: str = "") -> vllm.Proposer:
        monkeypatch.setattr(vllm, "open_taps", lambda world_size: full)
        model = SimpleNamespace(get_vocab_size=lambda: V, max_model_len=CONTEXT)
        config = SimpleNamespace(
            model_config=model,
            speculative_config=SimpleNamespace(num_speculative_tokens=k),
            parallel_config=SimpleNamespace(world_size=1),
            additional_config={"forerun": options} if options else {},
        )
        return NAMES[name](config)

    return built
