"""Time of a pass by tree, instruction set and context, compared with the read limit.

    python benchmarks/tree_pass.py --params 300M --contexts 256 8192 --nodes 12 16 32

One interleaved run on a random llama checkpoint. Every round reads memory, then times a pass of one
row and of trees on every instruction set. A long context is not computed: its cells are filled with
random numbers. The limit of a pass is the time of reading its weights and its keys and values once.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from pathlib import Path

import numpy as np
import scripts
import torch
from decode import SIZES, binary_tree, checkpoint

from forerun.bench.hardware_limits import read_bandwidth
from forerun.core.dice import SeededDice
from forerun.core.forward_batch import ForwardBatch
from forerun.core.records import Sequence
from forerun.core.sampling import Sampling
from forerun.core.tree import EMPTY
from forerun.models.load import load_target
from forerun.runner.model_runner import ModelRunner
from forerun.runner.native import LEVELS, Kernels, kernels
from forerun.runner.native.decoder import NativeDecoder


def sequence(runner: ModelRunner, context: int) -> Sequence:
    """A sequence with random KV cells for all tokens but the last."""
    tokens = np.random.default_rng(0).integers(3, runner.vocab_size, context).tolist()
    seq = Sequence(tokens, context, Sampling(), SeededDice(0), limit=context + 99)
    slot = runner.cache.sync(seq)
    runner.cache.reserve(slot, context + 256)
    cells = runner.cache.data[:, slot.index, :context]
    cells[:, :256].normal_()  # and again from there on: random numbers take long
    for i in range(256, context, 256):
        part = cells[:, i : i + 256]
        part.copy_(cells[:, : part.shape[1]])
    slot.tokens += tokens[:-1]
    return seq


def kv_bytes(runner: ModelRunner, context: int) -> int:
    """Bytes of the keys and values of so many tokens."""
    layers, _, _, *cell = runner.cache.data.shape
    return layers * context * int(np.prod(cell)) * runner.cache.data.itemsize


def timed(runner: ModelRunner, seq: Sequence, nodes: int, repeats: int) -> float:
    """Seconds of a pass over the last token and a tree of so many nodes."""
    tree = binary_tree(nodes, runner.vocab_size) if nodes else EMPTY
    start = time.perf_counter()
    for _ in range(repeats):
        runner.forward(ForwardBatch([seq], [tree]))
    return (time.perf_counter() - start) / repeats


def rounds(
    runner: ModelRunner, seqs: dict[int, Sequence], options: argparse.Namespace
) -> tuple[list[float], dict[tuple[str, int, int], list[float]]]:
    """GB/s of reading memory, and seconds by (instruction set, context, nodes), of every round."""
    decode, found = runner.decode, kernels()
    assert isinstance(decode, NativeDecoder)
    limits: list[float] = []
    times: dict[tuple[str, int, int], list[float]] = {}
    for turn in range(options.rounds + 1):
        limit = read_bandwidth(options.threads, tries=1)
        for context, seq in seqs.items():
            for level in options.levels:
                decode._kernels = Kernels(found.library, LEVELS.index(level), level)
                for nodes in (0, *options.nodes):
                    seconds = timed(runner, seq, nodes, options.repeats)
                    if turn:  # the first round warms up
                        times.setdefault((level, context, nodes), []).append(seconds)
        limits += [limit] if turn else []
    return limits, times


def main() -> None:
    parser = scripts.parser(__doc__)
    parser.add_argument("--params", choices=SIZES, default="300M")
    parser.add_argument(
        "--checkpoint", type=Path, help="folder for the checkpoint; default: temporary"
    )
    parser.add_argument("--weights", default="auto")
    parser.add_argument("--threads", type=scripts.count, default=torch.get_num_threads())
    parser.add_argument("--contexts", type=scripts.count, nargs="+", default=[256])
    parser.add_argument(
        "--nodes", type=scripts.number, nargs="*", default=[1, 4, 8, 12, 16, 24, 32, 64]
    )
    parser.add_argument("--levels", nargs="+", choices=LEVELS[3:], default=None)
    parser.add_argument("--rounds", type=scripts.count, default=9)
    parser.add_argument(
        "--repeats", type=scripts.count, default=3, help="passes per round and contestant"
    )
    options = parser.parse_args()
    options.levels = options.levels or list(LEVELS[3 : kernels().level + 1])
    if not options.levels:
        parser.error(f"the weights of {kernels().why} are in another order; nothing to compare")
    torch.set_num_threads(options.threads)
    with tempfile.TemporaryDirectory() as own:
        folder = options.checkpoint or Path(own)
        if not (folder / "config.json").exists():
            checkpoint(options.params, torch.bfloat16, folder)
        runner = load_target(folder, weights=options.weights, context=max(options.contexts) + 512)
    assert isinstance(runner, ModelRunner)
    seqs = {context: sequence(runner, context) for context in options.contexts}
    with torch.inference_mode():
        limits, times = rounds(runner, seqs, options)
    weights = sum(linear.nbytes for linear in runner.model.linears())
    limit = statistics.median(limits)
    print(f"{options.params}, {weights / 1e6:.0f} MB of weights, {options.threads} threads, "
          f"reads {limit:.1f} GB/s (best {max(limits):.1f})")  # fmt: skip
    for (level, context, nodes), found in times.items():
        median, size = statistics.median(found), weights + kv_bytes(runner, context)
        one = times[level, context, 0]
        ratio = statistics.median(a / b for a, b in zip(found, one, strict=True))
        share = size / 1e9 / limit / median
        print(f"{level:>10} context {context:5} nodes {nodes:3}: {1e3 * median:7.2f} ms, "
              f"{ratio:5.2f} of one row, limit {share:4.0%} of it")  # fmt: skip


if __name__ == "__main__":
    scripts.run(main)
