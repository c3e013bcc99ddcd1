"""Stream text while it is generated. An accepted draft arrives in one piece.

python examples/04_stream.py
"""

import forerun
from forerun.tasks.reasoning import ReasoningTask

problem = ReasoningTask("heldout").example(1)
model = forerun.load()

print(problem.prompt, end="", flush=True)
for event in model.stream(problem.prompt, temperature=0.6, max_new_tokens=300, seed=2):
    print(event.text, end="", flush=True)
    if event.sample:
        print(f"\n[{event.sample.finish}, tau {event.sample.stats.tau:.2f}]")
