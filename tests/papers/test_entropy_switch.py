"""Entropy Adaptive Decoding (arXiv 2502.06833): entropy knows where the large model is needed.

The embedded pair, greedy, on held-out problems of levels 1 and 2. The paper keeps 96.7 % and 92.9 %
of the large model's score with 43 % and 25 % of its tokens, without a control; ours is switching as
often and as long at random. When written, 120 problems at 1 bit: small .242, large .767, entropy
.683 (89 %) with 56.6 % of the tokens on the large model, random .342 and .467 with 55 and 56 %
(two runs). Over 5647 tokens, the area under the curve of "the models disagree here" is .910 by the
entropy of that token and .530 by the mean over the five before it.

Before that, in seconds: who gives which token, the law, and every count of the cost, against the
method in plain Python; and the rates of the random control.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from collections.abc import Sequence as Many

import numpy as np
import pytest
import torch

import forerun
from fakes import FakeTarget, TableSource, exact_law, run_all, sequence, table_law
from forerun import registry
from forerun.api import Model
from forerun.bench.switching import RandomSwitch, Score, SwitchCounts, gap, score, traces
from forerun.controllers.fixed import Fixed
from forerun.core.dice import EnumeratedDice, SeededDice
from forerun.core.forward_batch import ForwardBatch
from forerun.core.sampling import Sampling, softmax
from forerun.core.tree import chain
from forerun.drafters.base import Grown
from forerun.engine.engine import Engine
from forerun.targets.entropy_switch import LARGE, SMALL, EntropySwitch, Mode, Usage
from forerun.tasks.reasoning import ReasoningTask
from forerun.utils.stats import auc

pytestmark = pytest.mark.paper


# The method in plain Python

Options = dict[str, float]
ONE: Options = {"threshold": 1.0, "window": 1, "hold": 0}
PAPER: Options = {"threshold": 0.5, "window": 5, "hold": 10}  # the sheet's window and hold
KEPT: Options = {"threshold": 0.7, "window": 5, "hold": 2}  # values from before a switch count
CLEARED: Options = {"threshold": 0.7, "window": 3, "hold": 2, "clears": True}


def entropy(p: np.ndarray) -> float:
    """In bits."""
    return -sum(x * np.log2(x) for x in p.tolist() if x > 0)


def turns(
    bits: Callable[[int, int], float], count: int, *, threshold, window, hold, clears=False
) -> list[tuple[int, int, int]]:
    """(asked, gives the token, asked next) of `count` tokens; bits(model, n): entropy at n."""
    active, since, values, found = SMALL, hold, list[float](), []
    for n in range(count):
        asked = active
        values.append(bits(active, n))
        last = values[-int(window) :]
        wanted = int(sum(last) / len(last) > threshold)
        done = since + (active == LARGE)  # tokens since the switch; the large model gives this one
        if wanted != active and done >= hold:
            active, since, values = wanted, -(wanted == SMALL), [] if clears else values
        since += 1
        found.append((asked, max(asked, active), active))
    return found


def counted(found: Many[tuple[int, int, int]], prompt: int) -> Usage:
    """What they cost: tokens, switches, and what is computed again; prompts left out."""
    usage, have = Usage(), [prompt, prompt]
    for n, (asked, gives, after) in enumerate(found):
        for which in {asked, gives}:  # a pass reads what the model lacks, and the last token
            usage.catch_up[which] += max(prompt + n - 1 - have[which], 0)
            have[which] = prompt + n
        usage.catch_up[asked] += asked != gives  # the small model's pass gave no token
        usage.tokens[gives] += 1
        usage.switches += asked != after
    return usage


# The law, enumerated

START, TABLES = (0, 1), (table_law(4), table_law(5))


class Table(FakeTarget):
    """A target that can be asked for paths."""

    def rows_at(self, requests) -> torch.Tensor:
        laws = [self.law([*seq.tokens, *path]) for seq, path in requests]
        return torch.from_numpy(np.log(np.stack(laws)))


@pytest.mark.parametrize("options", [ONE, {**PAPER, "window": 2, "hold": 2}, CLEARED])
@pytest.mark.parametrize(("temperature", "depth"), [(0.5, 0), (1.0, 0), (0.5, 2)])
def test_every_text_has_its_probability(options: Options, temperature: float, depth: int) -> None:
    """Entropies are of raw logits at every temperature; drafting changes nothing."""
    sampling, found = Sampling(temperature=temperature), defaultdict[tuple[int, ...], float](float)
    options, length = {**options, "threshold": 1.1}, 3 if depth else 4

    def program(dice: EnumeratedDice) -> tuple[int, ...]:
        small, large = map(Table, TABLES)
        target = EntropySwitch(large, small=small, **options)
        drafter = Grown(TableSource(table_law(2)), registry.make("grower", "chain"))
        rule = registry.make("verifier", "recursive")
        run = Engine(target, drafter, rule, Fixed(nodes=depth, depth=max(depth, 1)))
        return run_all(run, [sequence(START, length, dice, sampling)])[0]

    def law(tokens: Many[int]) -> np.ndarray:
        count = len(tokens) - len(START) + 1
        bits = [[entropy(t(tokens[: len(START) + n])) for n in range(count)] for t in TABLES]
        return TABLES[turns(lambda which, n: bits[which][n], count, **options)[-1][1]](tokens)

    for text, weight in EnumeratedDice().outcomes(program):
        found[text] += weight
    expected = exact_law(law, START, length, sampling)
    assert max(abs(found[text] - p) for text, p in expected.items()) < 1e-12
    for table in TABLES:  # neither model alone
        alone = exact_law(table, START, length, sampling)
        assert max(abs(expected[text] - p) for text, p in alone.items()) > 1e-4


# The embedded pair

PROBLEMS, THRESHOLD = 120, 1.0
SIZES = 0.47, 4.33  # millions of parameters


@pytest.fixture(scope="module")
def pair():
    target = f"entropy_switch:small=draft,threshold={THRESHOLD}"
    return forerun.load(target=target, max_seqs=64)


@pytest.fixture(scope="module")
def exact_pair():
    """In float32, so that one pass over a text has the argmax of passes token by token."""
    return forerun.load(target="entropy_switch:small=draft,threshold=1", dtype="fp32", max_seqs=4)


@pytest.mark.parametrize("options", [ONE, PAPER, KEPT, CLEARED])
def test_turns_and_costs_are_those_of_the_method(exact_pair, options: Options) -> None:
    """Every token is its giver's argmax after a prefill by that model alone; counts are exact."""
    pair, (small, large) = exact_pair, exact_pair.target.models
    switch = EntropySwitch(large, small=small, **options)
    task = ReasoningTask("heldout", (1, 2), seed=642_000)
    counts, switches = [0, 0], 0
    for i in range(4):
        prompt, switch.usage = task.example(i).prompt, Usage()
        model = Model(switch, pair.tokenizer)
        (result,) = model.generate([prompt], temperature=0, drafter="none", max_new_tokens=80)
        ids, tokens = pair.tokenizer.encode(prompt), result.samples[0].tokens
        rows = []
        for runner in (small, large):
            seq = sequence(ids, len(tokens) + 1, SeededDice(0))
            rows.append(runner.forward(ForwardBatch([seq], [chain(tokens)]))[0].logits)
            runner.release(seq)
        logits = [row.numpy()[:-1, : switch.vocab_size] for row in rows]
        bits = [[entropy(softmax(row)) for row in each] for each in logits]
        found = turns(lambda which, n, bits=bits: bits[which][n], len(tokens), **options)
        given = [int(logits[gives][n].argmax()) for n, (_, gives, _) in enumerate(found)]
        assert given == tokens
        usage = counted(found, len(ids))
        assert switch.usage == usage
        counts, switches = np.add(counts, usage.tokens).tolist(), switches + usage.switches
    print(f"tokens {counts}, switches {switches}")
    assert min(counts) > 20 and switches > 8


def test_the_paper_saves_parameters_at_its_shares() -> None:
    """3B and 11B with 43 % of the tokens on the large model: 41.5 %; 1.5B and 14B, 25 %: 67 %."""
    for small, large, share, saved in ((3, 11, 43, 0.415), (1.5, 14, 25, 0.67)):
        usage = Usage(tokens=[100 - share, share], catch_up=[20, 10])
        assert usage.share == share / 100
        assert 1 - usage.cost(small, large) == pytest.approx(saved, abs=6e-4)
        more = usage.cost(small, large, catch_up=True) - usage.cost(small, large)
        assert more == pytest.approx((20 * small + 10 * large) / large / 100)


def test_the_control_switches_at_the_given_rates_whatever_the_entropy(pair) -> None:
    like = SwitchCounts(possible=[1000, 500], switched=[200, 300])
    control, mode = RandomSwitch(*pair.target.models, like, seed=1), Mode()
    asked, switched = np.zeros((2, 2)), np.zeros((2, 2))  # [model, entropy high]
    for n in range(8000):
        after = control.after(mode, 9.0 * (n % 2))
        asked[mode.active, n % 2] += 1
        switched[mode.active, n % 2] += after.active != mode.active
        mode = after
    np.testing.assert_allclose(switched / asked, [[0.2, 0.2], [0.6, 0.6]], atol=0.06)


@pytest.mark.parametrize("options", [ONE, KEPT])
def test_a_score_counts_what_could_and_did_switch(pair, options: Options) -> None:
    """Tokens within the hold could not."""
    small, large = pair.target.models
    switch = EntropySwitch(large, small=small, **options)
    task = ReasoningTask("heldout", (1, 2), seed=643_000)
    examples, found = [task.example(i) for i in range(4)], SwitchCounts()
    own = score(switch, pair.tokenizer, task, examples, max_new_tokens=60)
    logged = EntropySwitch(large, small=small, **options)
    plain = logged.after

    def after(mode: Mode, bits: float) -> Mode:
        new = plain(mode, bits)
        done = options["hold"] if mode.held is None else mode.held + (mode.active == LARGE)
        found.possible[mode.active] += done >= options["hold"]
        found.switched[mode.active] += new.active != mode.active
        return new

    logged.after = after  # type: ignore[method-assign]
    score(logged, pair.tokenizer, task, examples, max_new_tokens=60)
    assert own.switches == found and min(found.switched) > 4


@pytest.fixture(scope="module")
def scores(pair) -> dict[str, Score]:
    task = ReasoningTask("heldout", (1, 2), seed=640_000)
    examples, models = [task.example(i) for i in range(PROBLEMS)], pair.target.models
    switches = {
        "small": EntropySwitch(models[LARGE], small=models[SMALL], threshold=np.inf),
        "large": EntropySwitch(models[LARGE], small=models[SMALL], threshold=-1.0),
        "entropy": EntropySwitch(models[LARGE], small=models[SMALL], threshold=THRESHOLD),
    }
    found = {name: score(s, pair.tokenizer, task, examples) for name, s in switches.items()}
    control = RandomSwitch(*models, found["entropy"].switches, seed=1)
    found["random"] = score(control, pair.tokenizer, task, examples)
    for name, s in found.items():
        print(f"{name}: {s.accuracy:.3f}, f {s.usage.share:.3f}, cost {s.usage.cost(*SIZES):.3f}")
    return found


@pytest.mark.slow
def test_it_beats_switching_at_random_at_equal_cost(scores) -> None:
    entropy, random = scores["entropy"], scores["random"]
    assert random.usage.cost(*SIZES) == pytest.approx(entropy.usage.cost(*SIZES), abs=0.07)
    difference, error = gap(entropy, random)
    assert difference > 3 * error


@pytest.mark.slow
def test_quality_lies_above_the_line_between_the_models(scores) -> None:
    small, large, entropy = (scores[name] for name in ("small", "large", "entropy"))
    assert (small.usage.share, large.usage.share) == (0.0, 1.0)
    line = small.accuracy + entropy.usage.share * (large.accuracy - small.accuracy)
    assert entropy.accuracy > line + 0.1
    assert entropy.accuracy >= 0.8 * large.accuracy
    assert entropy.usage.cost(*SIZES) < 0.75


@pytest.mark.slow
def test_what_entropy_knows_is_about_its_own_token(pair) -> None:
    """Why a switch acts on the token that called for it: the tokens before tell next to nothing."""
    task = ReasoningTask("heldout", seed=641_000)
    found = traces(pair.target.models, pair.tokenizer, [task.example(i) for i in range(40)])
    other = np.concatenate([differs for _, differs in found]).astype(float)
    own = np.concatenate([bits for bits, _ in found])
    before = [
        bits[max(0, k - 5) : k].mean() if k else 0.0 for bits, _ in found for k in range(len(bits))
    ]
    areas = auc(own, other), auc(np.array(before), other)
    print(
        f"{len(other)} tokens, area of the token {areas[0]:.3f}, of five before it {areas[1]:.3f}"
    )
    assert areas[0] > 0.85 and areas[1] < 0.6


@pytest.mark.slow
def test_each_model_was_asked(scores) -> None:
    tokens = scores["entropy"].usage.tokens
    assert min(tokens[SMALL], tokens[LARGE]) > 0.2 * sum(tokens)
