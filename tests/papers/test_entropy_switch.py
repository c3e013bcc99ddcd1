"""Entropy Adaptive Decoding (arXiv 2502.06833): its curve lies above that of random switching.

On texts of the large model (the embedded pair, greedy, 6 problems), switched as the entropies say:
the share of tokens at which the active model's best token is the large model's, against the share f
of tokens that the large model gives. Random switching at the same f lies on the straight line
between the two models on average. The paper has accuracies, in free generation: see the benchmark.
"""

from __future__ import annotations

import numpy as np
import pytest

from forerun.adaptive.entropy_switch import LARGE, EntropySwitch, Mode, entropy_bits, load
from forerun.bench.tasks.reasoning import ReasoningTask
from forerun.dice import SeededDice
from forerun.records import Sequence
from forerun.sampling import Sampling, argmax
from forerun.tree import chain

pytestmark = pytest.mark.paper


def test_the_curve_lies_above_the_line() -> None:
    model, task = load(threshold=1.0, max_seqs=6), ReasoningTask("heldout", seed=620_000)
    switch: EntropySwitch = model.target  # type: ignore[assignment]
    traces = []
    for i in range(6):
        prompt = model.tokenizer.encode(task.example(i).prompt)
        seq = Sequence(prompt, len(prompt), Sampling(), SeededDice(0), limit=200)
        plain = type(model)(switch.models[LARGE], model.tokenizer)
        greedy = Sampling(temperature=0, max_new_tokens=120)
        text = plain.generate([prompt], greedy, drafter="none")[0].samples[0].tokens
        rows = [m.forward([seq], [chain(text[:-1])], frozenset())[0] for m in switch.models]
        both = [[r.row(n) for n in range(-1, len(text) - 1)] for r in rows]
        bits = [[entropy_bits(row) for row in own] for own in both]
        right = [argmax(a) == argmax(b) for a, b in zip(*both, strict=True)]
        traces.append((bits, right))
    alone = np.mean([r for _, right in traces for r in right])
    for threshold in (0.2, 0.4, 0.8):
        control, large, good = EntropySwitch(*switch.models, threshold=threshold, hold=3), [], []
        for bits, right in traces:
            mode = Mode()
            for t, same in enumerate(right):
                large.append(mode.active == LARGE)
                good.append(mode.active == LARGE or same)
                mode = control.after(mode, bits[mode.active][t])
        f, found = np.mean(large), np.mean(good)
        line = alone + f * (1 - alone)
        print(f"threshold {threshold}: f {f:.3f}, agreement {found:.3f}, random {line:.3f}")
        assert 0 < f < 1 and found > line
