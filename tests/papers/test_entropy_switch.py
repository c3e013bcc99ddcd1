"""Entropy Adaptive Decoding (arXiv 2502.06833): entropy knows where the large model is needed.

The embedded pair, greedy, on held-out problems of levels 1 and 2. The paper keeps 96.7 % and 92.9 %
of the large model's score with 43 % and 25 % of its tokens, without a control; ours is switching as
often and as long at random. When written, 120 problems at 1 bit: small .242, large .767, entropy
.683 (89 %) with 56.6 % of the tokens on the large model, random .342 and .467 with 55 and 56 %
(two runs). Over 5647 tokens, the area under the curve of "the models disagree here" is .910 by the
entropy of that token and .530 by the mean over the five before it.
"""

from __future__ import annotations

import numpy as np
import pytest

import forerun
from forerun.bench.switching import RandomSwitch, Score, gap, score, traces
from forerun.targets.entropy_switch import LARGE, SMALL, EntropySwitch
from forerun.tasks.reasoning import ReasoningTask
from forerun.utils.stats import auc

pytestmark = [pytest.mark.paper, pytest.mark.slow]

PROBLEMS, THRESHOLD = 120, 1.0
SIZES = 0.47, 4.33  # millions of parameters


@pytest.fixture(scope="module")
def pair():
    target = f"entropy_switch:small=draft,threshold={THRESHOLD}"
    return forerun.load(target=target, max_seqs=64)


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


def test_it_beats_switching_at_random_at_equal_cost(scores) -> None:
    entropy, random = scores["entropy"], scores["random"]
    assert random.usage.cost(*SIZES) == pytest.approx(entropy.usage.cost(*SIZES), abs=0.07)
    difference, error = gap(entropy, random)
    assert difference > 3 * error


def test_quality_lies_above_the_line_between_the_models(scores) -> None:
    small, large, entropy = (scores[name] for name in ("small", "large", "entropy"))
    assert (small.usage.share, large.usage.share) == (0.0, 1.0)
    line = small.accuracy + entropy.usage.share * (large.accuracy - small.accuracy)
    assert entropy.accuracy > line + 0.1
    assert entropy.accuracy >= 0.8 * large.accuracy
    assert entropy.usage.cost(*SIZES) < 0.75


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


def test_each_model_was_asked(scores) -> None:
    tokens = scores["entropy"].usage.tokens
    assert min(tokens[SMALL], tokens[LARGE]) > 0.2 * sum(tokens)
