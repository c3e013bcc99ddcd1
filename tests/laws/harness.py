"""Losslessness as an equality: every outcome of a whole generation, with its probability."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from collections.abc import Sequence as Many

import numpy as np

from fakes import VOCAB, FakeTarget, exact_law, run_all, sequence, table_law
from forerun import registry
from forerun.controllers.fixed import Fixed
from forerun.core.dice import Dice, EnumeratedDice
from forerun.core.records import Plan
from forerun.core.roles import Controller, Drafter, Shaper, Target, Verifier
from forerun.core.sampling import Sampling
from forerun.engine.engine import Engine

PROMPT = (0, 1)
TARGET, DRAFT, EXACT = table_law(1), table_law(2), 1e-12
# drafter, plan, lengths of the sequences that share the drafter and the batch
Draft = tuple[Callable[[], Drafter], Plan, Many[int]]
Request = tuple[Sampling, Callable[[], Many[Shaper]]]


class Given(Controller):
    """Always the given plan, cut to what is left of the sequence."""

    def __init__(self, plan: Plan) -> None:
        self.given = plan

    def plan(self, seq):
        return Plan(self.given.nodes, min(self.given.depth, seq.num_left - 1), self.given.stop)


def check(draft: Draft, request: Request, verifier: str, lengths: Many[int] = ()) -> None:
    """The law that `request` makes of TARGET is kept, in texts of the draft's lengths or others."""
    make, plan, own = draft
    sampling, shapers = request
    error = distance(
        TARGET,
        make,
        registry.make("verifier", verifier),
        plan=plan,
        sampling=sampling,
        shapers=shapers,
        lengths=lengths or own,
    )
    assert error <= EXACT, error


def check_shaped(draft: Draft, request: Request, verifier: str) -> None:
    """The same; a single text is short under `match`, whose outcomes are many."""
    is_short = verifier == "match" and len(draft[2]) == 1
    check(draft, request, verifier, (2,) if is_short else ())


def distance(
    target_law: Callable[[Many[int]], np.ndarray],
    make_drafter: Callable[[], Drafter],
    verifier: Verifier,
    *,
    plan: Plan | Controller | None = None,
    sampling: Sampling | None = None,
    shapers: Callable[[], Many[Shaper]] = tuple,
    lengths: Many[int] = (3,),
    max_seqs: int = 2,
    target: Target | None = None,
    vocab: int = VOCAB,
    prompt: Many[int] = PROMPT,
) -> float:
    """Largest |P(text) - its exact value| over all texts of sequences of the given lengths.

    target: one whose law `target_law` is; without it a fake one.

    Sequences share the drafter and the batch; unequal lengths make the batch ragged. Independence
    of the sequences is part of the law.
    """
    sampling = sampling or Sampling()

    def program(dice: Dice) -> tuple[tuple[int, ...], ...]:
        controller = Given(plan) if isinstance(plan, Plan) else plan or Fixed(nodes=2, depth=2)
        engine = Engine(
            target or FakeTarget(target_law),
            make_drafter(),
            verifier,
            controller,
            shapers=shapers(),
            max_seqs=max_seqs,
        )
        seqs = [sequence(prompt, n, dice, sampling, index=i) for i, n in enumerate(lengths)]
        return run_all(engine, seqs)

    found: dict[tuple[tuple[int, ...], ...], float] = defaultdict(float)
    for texts, probability in EnumeratedDice().outcomes(program):
        found[texts] += probability
    laws = [exact_law(target_law, prompt, n, sampling, shapers(), vocab) for n in lengths]
    return max(abs(found.get(texts, 0.0) - p) for texts, p in _joint(laws).items())


def _joint(laws: list[dict[tuple[int, ...], float]]) -> dict[tuple[tuple[int, ...], ...], float]:
    joint: dict[tuple[tuple[int, ...], ...], float] = {(): 1.0}
    for law in laws:
        joint = {(*texts, t): p * pt for texts, p in joint.items() for t, pt in law.items()}
    return joint
