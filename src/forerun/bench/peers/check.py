"""Checks installed peers on a model: sampling distribution and greedy texts.

    python -m forerun.bench.peers.check [--model reasoner] [--folder .peers] [NAME ...]

For every method of every peer: p-values of first tokens and whole texts under the model's own
distribution, the greedy text against the model's argmax, and tokens per second (not a benchmark).
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence as Many
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from forerun.bench.contestants import PeerError, Setup, SkippedPeer
from forerun.bench.peers import make, methods
from forerun.bench.peers.install import DEFAULT_FOLDER
from forerun.bench.peers.law import (
    LawCheck,
    check_law,
    check_texts,
    first_difference,
    first_law,
    widest,
)
from forerun.core.sampling import Sampling
from forerun.models.paths import located
from forerun.tasks.base import Example

if TYPE_CHECKING:
    from forerun.api import Model
    from forerun.bench.peers.peer import PeerContestant

# Both truncations and a temperature, to test their order.
TRUNCATED = Sampling(temperature=0.7, top_k=40, top_p=0.9)
MAX_GREEDY_GAP = 0.5  # logits; rounding of bf16 between kernels
TOP_P_SHIFTS = 0.0, -0.02, 0.02  # allowed for the same rounding


@dataclass(frozen=True)
class Greedy:
    """A greedy text compared with the model's argmax."""

    same: int  # tokens before the first difference
    total: int
    gap: float  # argmax logit minus that of the first different token

    @property
    def passed(self) -> bool:
        return self.same == self.total or self.gap <= MAX_GREEDY_GAP

    def __str__(self) -> str:
        if self.same == self.total:
            return f"identical ({self.total})"
        return f"differs at {self.same} of {self.total}, gap {self.gap:.3f}"


@dataclass(frozen=True)
class Report:
    """Results of one method of a peer."""

    name: str
    reason: str = ""  # why it was skipped or failed
    first: LawCheck | None = None  # first tokens at T = 1
    truncated: LawCheck | None = None  # first tokens under TRUNCATED
    texts: LawCheck | None = None  # all tokens of sampled texts at T = 1
    greedy: Greedy | None = None
    tokens_per_second: float = 0.0

    def __str__(self) -> str:
        if self.reason:
            return f"{self.name:22} {self.reason}"
        p = [f"{found.p_value:8.3g}" if found else f"{'-':>8}" for found in self.laws]
        return f"{self.name:22} {self.tokens_per_second:8.1f} {' '.join(p)}  {self.greedy}"

    @property
    def laws(self) -> tuple[LawCheck | None, ...]:
        return self.first, self.truncated, self.texts


def check_peer(
    peer: PeerContestant, model: Model, prompts: Many[Many[int]], *, n: int = 200, seed: int = 0
) -> Report:
    """Starts a peer, checks it on prompts of token ids, closes it."""
    plain = Sampling(temperature=1.0, max_new_tokens=64, n=4, seed=seed)
    try:
        peer.start()
        peer.warm_up(example(prompts[0]), plain)
        start = widest(model, prompts, plain)
        first = check_law(peer, first_law(model, start, plain), start, plain, n, seed)
        truncated = max(
            (_truncated(peer, model, start, by, n, seed) for by in TOP_P_SHIFTS), key=_p_value
        )
        return replace(
            Report(
                peer.name, first=first, truncated=truncated, greedy=_greedy(peer, model, prompts[0])
            ),
            **_sampled(peer, model, prompts, plain),
        )
    except (SkippedPeer, PeerError) as reason:
        return Report(peer.name, str(reason))
    finally:
        peer.close()


def _truncated(
    peer: PeerContestant, model: Model, start: Many[int], by: float, n: int, seed: int
) -> LawCheck:
    """First tokens under TRUNCATED against the distribution with a shifted top_p."""
    law = first_law(model, start, replace(TRUNCATED, top_p=TRUNCATED.top_p + by))
    return check_law(peer, law, start, TRUNCATED, n, seed)


def _p_value(check: LawCheck) -> float:
    return check.p_value


def example(prompt: Many[int]) -> Example:
    """An example with a tokenised prompt."""
    return Example("", list(prompt), "")  # type: ignore[arg-type]


def _sampled(
    peer: PeerContestant, model: Model, prompts: Many[Many[int]], sampling: Sampling
) -> dict:
    """Speed, and the test of all texts of the first prompt."""
    tokens = seconds = 0.0
    texts = None
    for prompt in prompts:
        outcome = peer.run(example(prompt), sampling)
        tokens += sum(sample.tokens for sample in outcome.samples)
        seconds += outcome.seconds
        texts = texts or check_texts(model, prompt, peer.tokens, sampling)
    return {"texts": texts, "tokens_per_second": tokens / seconds}


def _greedy(peer: PeerContestant, model: Model, prompt: Many[int]) -> Greedy:
    peer.run(example(prompt), Sampling(temperature=0.0, max_new_tokens=64, seed=0))
    same, gap = first_difference(model, prompt, peer.tokens[0])
    return Greedy(same, len(peer.tokens[0]), gap)


def main() -> None:
    """The command line."""
    import torch

    import forerun
    from forerun.tasks.reasoning import ReasoningTask

    parser = argparse.ArgumentParser(prog="forerun.bench.peers.check", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("names", nargs="*", metavar="NAME", help="such as vllm:ngram; default: all")
    parser.add_argument("--model", default="reasoner")
    parser.add_argument("--folder", type=Path, default=DEFAULT_FOLDER)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--samples", type=int, default=200, help="number of first tokens")
    given = parser.parse_args()
    model = forerun.load(given.model)
    task = ReasoningTask()
    prompts = [model.tokenizer.encode(task.example(i).prompt) for i in range(2)]
    setup = Setup(Path(located(given.model)), "auto", given.threads, None, given.folder)
    print(
        f"{'method':22} {'tokens/s':>8} {'p first':>8} {'p trunc':>8} {'p texts':>8}  greedy text"
    )
    for name in given.names or methods():
        peer = make(name, setup)
        print(check_peer(peer, model, prompts, n=given.samples), flush=True)  # type: ignore[arg-type]


if __name__ == "__main__":
    main()
