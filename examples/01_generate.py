"""Generate one sample with the embedded reasoner and print its statistics.

python examples/01_generate.py
"""

import forerun
from forerun.tasks.reasoning import ReasoningTask

problem = ReasoningTask("heldout").example(0)
model = forerun.load()  # or forerun.load("path/to/a/model"), or a hub id

(result,) = model.generate(problem.prompt, temperature=0.6, max_new_tokens=300, seed=1)

print(problem.prompt + result.text)
stats = result.stats
print(f"\nright answer: {problem.answer}")
print(f"{stats.generated} tokens in {stats.passes} passes: tau {stats.tau:.2f}")
