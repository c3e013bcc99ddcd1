"""Int8 weights compared with bf16 in one interleaved run: time of a pass, and change of output.

    python benchmarks/int8.py --params 300M --threads 2
    python benchmarks/int8.py --law --problems 40

Without --law: random llama checkpoints; medians over rounds of passes over 1, 9 and 17 rows, and of
their linear layers alone. With --law: the embedded reasoner; KL(bf16 || int8) in nats per token on
its own solutions, and accuracy.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from pathlib import Path

import numpy as np
import scripts
import torch
from decode import SIZES, binary_tree, checkpoint

import forerun
from forerun.api import Model
from forerun.assets import embedded
from forerun.bench.kernel_profile import seconds_alone
from forerun.core.dice import SeededDice
from forerun.core.forward_batch import ForwardBatch
from forerun.core.records import Sequence
from forerun.core.roles import Target
from forerun.core.sampling import Sampling, softmax
from forerun.core.tree import EMPTY, chain
from forerun.models.load import load_target
from forerun.tasks.reasoning import ReasoningTask, read_answer

WEIGHTS = ("auto", "int8", "int8:128")
ROWS = (1, 9, 17)


Times = dict[tuple[str, str, int], list[float]]  # by what, weights and rows: of every round


def passes(size: str, threads: int, rounds: int, given: Path | None) -> None:
    """Prints median milliseconds of a pass and of its linears, and how much faster than bf16."""
    torch.set_num_threads(threads)
    with tempfile.TemporaryDirectory() as own:
        folder = given or Path(own)
        if not (folder / "config.json").exists():
            checkpoint(size, torch.bfloat16, folder)
        targets = {name: load_target(folder, weights=name) for name in WEIGHTS}
    seqs = {name: Sequence(list(range(3, 259)), 256, Sampling(), SeededDice(0), limit=99)
            for name in WEIGHTS}  # fmt: skip
    times: Times = {}
    for _ in range(rounds):
        for name, target in targets.items():
            for rows in ROWS:
                tree = binary_tree(rows - 1, target.vocab_size) if rows > 1 else EMPTY
                start = time.perf_counter()
                for _ in range(5):
                    target.forward(ForwardBatch([seqs[name]], [tree]))
                pass_ = (time.perf_counter() - start) / 5
                times.setdefault(("pass", name, rows), []).append(pass_)
                alone = sum(seconds_alone(target.model, rows).values())
                times.setdefault(("linears", name, rows), []).append(alone)
    for rows in ROWS:
        for what in ("pass", "linears"):
            base = statistics.median(times[what, "auto", rows])
            found = [(name, statistics.median(times[what, name, rows])) for name in WEIGHTS]
            shown = "  ".join(f"{name} {1e3 * t:.2f} ms ({base / t:.2f}x)" for name, t in found)
            print(f"{size}, {rows} rows, {what}: {shown}")


def logits(target: Target, tokens: list[int]) -> np.ndarray:
    """Rows [n, V] after every token but the last."""
    seq = Sequence(tokens[:1], 1, Sampling(), SeededDice(0), limit=9999)
    (rows,) = target.forward(ForwardBatch([seq], [chain(tokens[1:-1])]))
    target.release(seq)
    return rows.logits.float().numpy()


def accuracy(model: Model, problems: int, samples: int) -> float:
    """Share of right samples on held-out problems."""
    task, right = ReasoningTask("heldout"), 0
    sampling = Sampling(temperature=0.6, n=samples, max_new_tokens=512, seed=0)
    for i in range(problems):
        example = task.example(i)
        (result,) = model.generate([example.prompt], sampling, batch=samples)
        right += sum(read_answer(sample.text) == example.answer for sample in result.samples)
    return right / (problems * samples)


def law(problems: int, samples: int) -> None:
    """Prints KL and accuracy of the embedded reasoner."""
    models = {name: forerun.load("reasoner", weights=name) for name in WEIGHTS}
    task, tokenizer = ReasoningTask("heldout"), models["auto"].tokenizer
    texts = [task.example(i).prompt + task.example(i).reference for i in range(problems)]
    print(f"{embedded('reasoner')}, {problems} held-out problems, {samples} samples of each")
    for name in WEIGHTS:
        found = []
        for text in texts:
            ids = tokenizer.encode(text)
            pairs = zip(logits(models["auto"].target, ids), logits(models[name].target, ids),
                        strict=True)  # fmt: skip
            for a, b in pairs:
                p, q = softmax(a), softmax(b)
                found.append(float(np.sum(p * (np.log(p + 1e-30) - np.log(q + 1e-30)))))
        right = accuracy(models[name], problems, samples)
        print(f"{name}: KL {np.mean(found):.5f} nats per token, accuracy {100 * right:.1f} %")


def main() -> None:
    parser = scripts.parser(__doc__)
    parser.add_argument("--params", choices=SIZES, default="300M")
    parser.add_argument(
        "--checkpoint", type=Path, help="folder for the checkpoint; default: temporary"
    )
    parser.add_argument("--threads", type=scripts.count, default=torch.get_num_threads())
    parser.add_argument("--rounds", type=scripts.count, default=9)
    parser.add_argument("--law", action="store_true")
    parser.add_argument("--problems", type=scripts.count, default=40)
    parser.add_argument("--samples", type=scripts.count, default=8)
    options = parser.parse_args()
    if options.law:
        law(options.problems, options.samples)
    else:
        passes(options.params, options.threads, options.rounds, options.checkpoint)


if __name__ == "__main__":
    scripts.run(main)
