"""Search on one held-out problem: best of n, beam search over steps, DVTS.

python examples/06_search.py [n]
"""

import argparse
import sys

import forerun
from forerun.search import arithmetic
from forerun.search.best_of import best_of
from forerun.search.dvts import dvts
from forerun.search.step_beam import step_beam
from forerun.tasks.reasoning import ReasoningTask

parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
parser.add_argument("n", type=int, nargs="?", default=16, help="samples of each search")
n = parser.parse_args().n
problem = ReasoningTask("heldout").example(3)
model = forerun.load()
common = {"n": n, "temperature": 0.6, "max_new_tokens": 400, "seed": 1}
steps = {"scorer": arithmetic, "step_end": (".", "\n"), "width": 2}  # the scorer has no answer key

searches = {
    "best of n, majority": lambda: best_of(model, problem.prompt, batch=4, **common),
    "beam search over steps": lambda: step_beam(model, problem.prompt, **steps, **common),
    "DVTS": lambda: dvts(model, problem.prompt, **steps, **common),
}
for name, search in searches.items():
    try:
        found = search()
    except forerun.ForerunError as error:
        sys.exit(f"error: {name}: {error}")
    print(f"{name}: answer {found.answer}, right answer {problem.answer}")
    print(f"    votes {found.votes}")
    print(f"    {found.stats.generated} tokens, tau {found.stats.tau:.2f}")
    for note in found.notes:
        print(f"    {note}")

print("\nbranches of the last search that were kept, step by step:")
branch, stem = found.chosen, []
while branch.parent:
    stem.append(branch)
    branch = branch.parent
for branch in reversed(stem):
    print(f"    {branch.score:.2f} {branch.step.strip()}")
