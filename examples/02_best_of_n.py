"""Best of n by majority vote: STAND beside plain decoding, in one run.

python examples/02_best_of_n.py [n]

The samples are made one after another, so that each drafts from all that were said before it: tau,
the tokens per pass, grows with them. All at once (batch=16) they have little to draft from, and
passes of so small a model are cheap enough then that the default controller drafts nothing.
"""

import sys
from collections import Counter

import forerun
from forerun.tasks.reasoning import ReasoningTask, read_answer

try:
    n = int(sys.argv[1]) if len(sys.argv) > 1 else 16
    law = forerun.Sampling(n=n, temperature=0.6, max_new_tokens=400, seed=1)
except ValueError as error:  # a ConfigError is one
    sys.exit(f"error: {error}; give a number of samples")
problem = ReasoningTask("heldout").example(7)
model = forerun.load()
model.generate(problem.prompt, max_new_tokens=8, drafter="stand")  # loads kernels, times passes

for drafter in ("none", "stand"):
    (result,) = model.generate(problem.prompt, law, drafter=drafter, controller="fixed", batch=1)
    votes = Counter(read_answer(sample.text) for sample in result.samples)
    taus = [f"{sample.stats.tau:.1f}" for sample in result.samples]
    print(f"{drafter:6} {result.stats.tokens_per_second:6.0f} tokens/s")
    print(f"       tau by trajectory: {' '.join(taus)}")
    print(f"       votes {votes.most_common(3)}, right answer {problem.answer}")
