"""Every lossless method keeps the target's processed law exactly: enumerated, error <= 1e-12."""

from __future__ import annotations

import numpy as np
import pytest
from made_drafts import DRAFTERS, TREE, grown, made
from two_vocabularies import crossed

from fakes import DeadEnd, FakeRunner, NoRepeats, table_law
from forerun import catalog, registry
from forerun.constraints._penalties import Adjust
from forerun.core.records import Plan
from forerun.core.sampling import Sampling
from forerun.core.tree_template import grid
from harness import DRAFT, PROMPT, TARGET, Given, Request, check

REQUESTS: dict[str, Request] = {
    "free": (Sampling(), tuple),
    "no repeats": (Sampling(), lambda: (NoRepeats(),)),
    "dead end below a draft": (Sampling(), lambda: (DeadEnd(),)),
    "top-k 2": (Sampling(top_k=2), tuple),
    "temperature .5": (Sampling(temperature=0.5), tuple),
    "top-p .7": (Sampling(top_p=0.7), tuple),
    "min-p .4": (Sampling(min_p=0.4), tuple),
    "greedy": (Sampling(temperature=0), tuple),
    "penalties": (
        Sampling(repetition_penalty=1.7, presence_penalty=0.4, frequency_penalty=0.3),
        lambda: (Adjust(),),
    ),
    "bias and ban": (Sampling(logit_bias={0: 1.0}, banned_tokens=(2,)), lambda: (Adjust(),)),
    "penalty and constraint": (
        Sampling(temperature=0.7, frequency_penalty=0.5),
        lambda: (Adjust(), NoRepeats()),
    ),
}
QUICK = {"no repeats", "dead end below a draft", "top-k 2", "greedy"}  # few outcomes


HEAVY = {  # many outcomes; only QUICK requests without `-m slow`
    "i.i.d. 2",
    "chain, ragged batch",
    "chain, ends where q says little",
    "dynamic",
    "dynamic, above a chance",
    "dynamic, ragged batch",
    "sam and another",
    "fuse sam + chain",
    "fuse two draws",
    "stand, two trajectories",
    "stand, wide, two groups, ragged batch",
}


def marks(name: str, request: str, heavy: set[str] = HEAVY) -> list:
    return [pytest.mark.slow] if name in heavy and request not in QUICK else []


def matrix() -> list:
    """Every drafter with every request; most of the heavy rows only where slow tests run."""
    return [
        pytest.param(name, request, marks=marks(name, request))
        for name in DRAFTERS
        for request in REQUESTS
    ]


@pytest.mark.parametrize(("name", "request_"), matrix())
def test_recursive_is_exact(name: str, request_: str) -> None:
    check(DRAFTERS[name], REQUESTS[request_], "recursive")


OTHER_VERIFIERS = (
    "chain",
    "gumbel, misses",
    "top 2x2",
    "stand",
    "token recycling",
    "lookahead",
    "suffix",
    "sam",
    "rest",
    "rasd on drawn trees",
    "rasd on i.i.d. draws",
    "fuse two draws",
)


@pytest.mark.parametrize("verifier", ["match", "speculative"])
@pytest.mark.parametrize(
    ("name", "request_"),
    [
        pytest.param(name, request, marks=marks(name, request))
        for name in OTHER_VERIFIERS
        for request in ("free", "no repeats", "temperature .5")
    ],
)
def test_other_verifiers_are_exact(name: str, verifier: str, request_: str) -> None:
    lengths = (2,) if verifier == "match" and name != "stand" else (3,)
    check(DRAFTERS[name], REQUESTS[request_], verifier, lengths)


@pytest.mark.parametrize(
    "name",
    [
        "chain",
        "gumbel 2x1",
        "top 2x2",
        "prompt lookup",
        "stand",
        "token recycling",
        "lookahead",
        "suffix",
        "sam",
        "rest",
        "rasd on best tokens",
    ],
)
@pytest.mark.parametrize("shapers", [tuple, lambda: (NoRepeats(),)])
def test_greedy_verifier_is_exact(name: str, shapers) -> None:
    check(DRAFTERS[name], (Sampling(temperature=0), shapers), "greedy")


# rules that judge several nodes together, each with the drafts that it is made for
JOINT = {
    "block": (
        "chain",
        "chain, stops after doubt",
        "chain, ragged batch",
        "chain of 3",
        "chain of 3, misses",
        "chain of 2, ragged batch",
        "chain of 2, one ends first",
        "fuse chosen + chain",
        "prompt lookup",
    ),
    "match": (
        "chain",
        "chain of 2, one ends first",
        "i.i.d. 1x2",
        "i.i.d. 2, ragged batch",
        "gumbel 2x1, one ends first",
        "top 2x2, ragged batch",
    ),
    "speculative": (
        "chain of 2, ragged batch",
        "chain of 2, one ends first",
        "i.i.d. 1x2",
        "gumbel 2x1, one ends first",
        "top 2x2, ragged batch",
    ),
    "k_seq": (
        "chain",
        "chain of 3, misses",
        "i.i.d. 2",
        "i.i.d. 1x2",
        "i.i.d. 2, misses",
        "i.i.d. 2, ragged batch",
        "i.i.d. 2, one goes on",
        "i.i.d. 1x2, ragged batch",
    ),
    "transport": (
        "greedy mix 2x1",
        "greedy mix on a template",
        "greedy mix 3, misses",
        "greedy mix, ragged batch",
        "gumbel 2x1",
        "gumbel 2x1, one ends first",
        "i.i.d. 2, ragged batch",
        "stochastic beam 2, last level cut",
        "top 2x2",
        "stand on a template",
        "fuse chosen + chain",
        "fuse drawn + chosen",
        "fuse greedy mix + chosen",
        "fuse two draws",
    ),
}
LONGER = {
    "chain of 3": (grown("chain"), Plan(3, 3), (4,)),
    "chain of 2, ragged batch": (grown("chain"), Plan(2, 2), (2, 3)),
    "chain of 2, one ends first": (grown("chain"), Plan(2, 2), (1, 3)),
    "i.i.d. 1x2, ragged batch": (grown("iid", width=(1, 2)), Plan(3, 2), (2, 3)),
    "i.i.d. 2, one goes on": (grown("iid", width=2), Plan(2, 1), (1, 3)),
    "gumbel 2x1, one ends first": (grown("gumbel", template=grid(2, 1)), TREE, (1, 3)),
    "top 2x2, ragged batch": (grown("template", template=grid(2, 2)), Plan(6, 2), (2, 3)),
}
SLOW_JOINT = {
    "i.i.d. 2",
    "i.i.d. 2, one goes on",
    "i.i.d. 1x2",
    "gumbel 2x1, one ends first",
    "i.i.d. 1x2, ragged batch",
    "chain of 3",
    "chain of 2, ragged batch",
    "chain, ragged batch",
    "i.i.d. 2, ragged batch",
    "fuse two draws",
}


def joint_matrix() -> list:
    return [
        pytest.param(verifier, name, request, marks=marks(name, request, SLOW_JOINT))
        for verifier, names in JOINT.items()
        for name in names
        for request in REQUESTS
    ]


@pytest.mark.parametrize(("verifier", "name", "request_"), joint_matrix())
def test_joint_rules_are_exact(verifier: str, name: str, request_: str) -> None:
    check((DRAFTERS | LONGER)[name], REQUESTS[request_], verifier)


ROWS = [row for row in catalog.rows() if row.lossless and row.state != catalog.MISSING]
SHAPES = {"chain": Plan(2, 2), "tree": Plan(4, 2)}  # the fourth place of the template branches


def catalog_matrix() -> list:
    """Trees of i.i.d. drafts have most outcomes."""
    return [
        pytest.param(
            row,
            request,
            shape,
            id=f"{row.name}-{request}-{shape}",
            marks=marks(row.name, request, {"spectr"} if shape == "tree" else set()),
        )
        for row in ROWS
        for request in ("free", "no repeats", "top-k 2", "temperature .5")
        for shape in SHAPES
    ]


@pytest.mark.parametrize(("row", "request_", "shape"), catalog_matrix())
def test_every_lossless_row_of_the_catalog_is_exact(row, request_: str, shape: str) -> None:
    """Each row with its own parts; a row that is not built whole runs with `recursive`."""
    parts = {"drafter": "none", **row.parts, **row.tiny}
    grower = {} if shape == "tree" else {"grower": "chain"}
    if row.name == "draft_model" and shape == "tree":
        grower = {"grower": "gumbel"}
    known = registry.options(registry.resolve("drafter", parts["drafter"])[0])
    verifier = parts.get("verifier", "speculative")
    is_online = parts["drafter"].startswith("online")  # takes a function: it has several copies
    lengths = (3,) if is_online or "draft_model" in parts["drafter"] else (4,)
    given = {"model": (lambda: FakeRunner(DRAFT)) if is_online else FakeRunner(DRAFT), **grower}
    make = made(parts["drafter"], **{name: given[name] for name in given.keys() & known})
    plan = SHAPES[shape]
    if parts["drafter"].startswith("cross_vocab"):  # drafts chains; see test_cross_vocab.py
        make, plan, lengths = (lambda: crossed(table_law(2, 2))), Plan(2, 2), (2,)
    rule = verifier if row.state == catalog.WORKS else "recursive"
    check((make, plan, lengths), REQUESTS[request_], rule)


@pytest.mark.parametrize("name", [n for n in DRAFTERS if n != "none"])
def test_something_is_drafted_and_accepted(name: str) -> None:
    """The equalities above must not hold for lack of drafts."""
    from fakes import FakeTarget, run_all, sequence
    from forerun.core.dice import SeededDice
    from forerun.engine.engine import Engine
    from forerun.engine.stats import Recorder

    make, plan, _ = DRAFTERS[name]
    recorder = Recorder()
    engine = Engine(
        FakeTarget(TARGET),
        make(),
        registry.make("verifier", "recursive"),
        Given(plan),
        listeners=[recorder],
    )
    seqs = [sequence(PROMPT, 40, SeededDice(7, i)) for i in range(2)]
    run_all(engine, seqs)
    assert all(recorder.of(seq).accepted > 0 for seq in seqs)
    assert np.isclose(recorder.of(seqs[0]).tau, 40 / recorder.of(seqs[0]).passes)
