"""Best of n by majority vote: plain decoding and STAND in one run.

python examples/02_best_of_n.py [n]

Samples are generated one after another. Each drafts from all earlier samples, so tau (tokens per
pass) grows. In one batch (batch=16) there is little to draft from; passes of this small model are
then so cheap that the default controller drafts nothing.
"""

import argparse
from collections import Counter

import forerun
from forerun.tasks.reasoning import ReasoningTask, read_answer

parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
parser.add_argument("n", type=int, nargs="?", default=16, help="samples of each drafter")
try:
    sampling = forerun.Sampling(
        n=parser.parse_args().n, temperature=0.6, max_new_tokens=400, seed=1
    )
except forerun.ForerunError as error:
    parser.error(str(error))
problem = ReasoningTask("heldout").example(7)
model = forerun.load()
model.generate(problem.prompt, max_new_tokens=8, drafter="stand")  # warm-up: loads kernels

for drafter in ("none", "stand"):
    (result,) = model.generate(
        problem.prompt, sampling, drafter=drafter, controller="fixed", batch=1
    )
    votes = Counter(read_answer(sample.text) for sample in result.samples)
    taus = [f"{sample.stats.tau:.1f}" for sample in result.samples]
    print(f"{drafter:6} {result.stats.tokens_per_second:6.0f} tokens/s")
    print(f"       tau by trajectory: {' '.join(taus)}")
    print(f"       votes {votes.most_common(3)}, right answer {problem.answer}")
