"""Time of forerun's decoder on random llama checkpoints, compared with transformers.

    python benchmarks/decode.py --params 100M --dtype bf16 --threads 2

Prints the linear layers alone (as loaded, and as plain torch layers), one step of one row,
transformers' generate per token, and tree passes. Every round times every contestant once, so that
a disturbance of the machine hits all of them; medians over rounds. With FORERUN_NATIVE=off in the
environment the decoder runs on torch.
"""

from __future__ import annotations

import json
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import scripts
import torch
import torch.nn.functional as F
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from forerun.core.dice import SeededDice
from forerun.core.forward_batch import ForwardBatch
from forerun.core.records import Sequence
from forerun.core.sampling import Sampling
from forerun.core.tree import EMPTY, Tree, TreeBuilder
from forerun.models.load import DTYPES, load_target
from forerun.runner.model_runner import ModelRunner
from forerun.runner.native import kernels

SIZES = {  # hidden, layers, heads, key-value heads, inner width, vocabulary
    "5M": (256, 8, 8, 4, 688, 1024),
    "30M": (512, 8, 8, 4, 1376, 4096),
    "100M": (768, 12, 12, 4, 2048, 16384),
    "300M": (1024, 24, 16, 8, 2816, 16384),
    "1B": (2048, 18, 32, 8, 7168, 16384),
}
NODES = (1, 4, 8, 16, 32, 64)


def checkpoint(size: str, dtype: torch.dtype, folder: Path) -> int:
    """Saves a random llama of a size; returns its number of parameters."""
    hidden, depth, heads, kv_heads, inner, vocab = SIZES[size]
    config = LlamaConfig(
        vocab_size=vocab,
        hidden_size=hidden,
        num_hidden_layers=depth,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        intermediate_size=inner,
        max_position_embeddings=65536,
        eos_token_id=None,
        pad_token_id=0,
    )
    torch.manual_seed(0)
    model = LlamaForCausalLM(config).to(dtype)
    model.save_pretrained(folder)
    return sum(p.numel() for p in model.parameters())


def binary_tree(num_nodes: int, vocab: int) -> Tree:
    """A tree with up to two children per node."""
    builder = TreeBuilder()
    for node in range(num_nodes):
        builder.add((7 * node + 3) % vocab, (node - 2) // 2 if node > 1 else -1)
    return builder.build()


def timed(work: Callable[[], object], repeats: int) -> float:
    """Seconds of one call, the mean over repeats."""
    start = time.perf_counter()
    for _ in range(repeats):
        work()
    return (time.perf_counter() - start) / repeats


class Contest:
    """What is compared; each method is one unit of work."""

    def __init__(self, folder: Path, dtype: str, context: int) -> None:
        self.runner = load_target(folder, dtype=dtype)
        assert isinstance(self.runner, ModelRunner)
        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=DTYPES[dtype]).eval()
        vocab = self.runner.vocab_size
        self.tokens = np.random.default_rng(0).integers(3, vocab, context).tolist()
        self.seq = Sequence(list(self.tokens), context, Sampling(), SeededDice(0), limit=4096)
        linears, kind = self.runner.model.linears(), DTYPES[dtype]
        self.products = [linear.packed.product if linear.packed else linear for linear in linears]
        self.inputs = [torch.randn(1, linear.shape[1]).to(kind) for linear in linears]
        self.plain = [torch.randn(linear.shape).to(kind) for linear in linears]
        self.trees = {n: binary_tree(n, vocab) for n in NODES}

    @torch.inference_mode()
    def linears(self) -> None:
        for product, x in zip(self.products, self.inputs, strict=True):
            product(x)

    @torch.inference_mode()
    def torch_linears(self) -> None:
        for weight, x in zip(self.plain, self.inputs, strict=True):
            F.linear(x, weight)

    def step(self) -> None:
        """One token: a pass over one row, and the greedy choice."""
        if self.seq.num_generated >= 64:
            del self.seq.tokens[len(self.tokens) :]
        rows = self.runner.forward(ForwardBatch([self.seq], [EMPTY]))[0]
        self.seq.tokens.append(int(rows.logits[0].argmax()))

    def tree(self, num_nodes: int) -> None:
        self.runner.forward(ForwardBatch([self.seq], [self.trees[num_nodes]]))

    def generate(self, num_tokens: int) -> None:
        ids = torch.tensor([self.tokens])
        self.model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=num_tokens,
            do_sample=False,
        )

    def generate_per_token(self, num_tokens: int = 16) -> float:
        """Seconds per token of generate, prefill taken off."""
        first = timed(lambda: self.generate(1), 1)
        return (timed(lambda: self.generate(1 + num_tokens), 1) - first) / num_tokens

    def round(self, repeats: int) -> dict[str, float]:
        """One time of everything, in seconds."""
        times = {
            "linears": timed(self.linears, repeats),
            "torch linears": timed(self.torch_linears, repeats),
            "step": timed(self.step, repeats),
            "transformers": self.generate_per_token(),
        }
        for n in NODES:
            times[f"tree {n}"] = timed(lambda n=n: self.tree(n), max(1, repeats // 2))
        return times


def main() -> None:
    parser = scripts.parser(__doc__)
    parser.add_argument("--params", choices=SIZES, default="30M")
    parser.add_argument("--dtype", choices=DTYPES, default="bf16")
    parser.add_argument("--threads", type=scripts.count, default=torch.get_num_threads())
    parser.add_argument(
        "--context", type=scripts.count, default=256, help="tokens before the timed ones"
    )
    parser.add_argument("--rounds", type=scripts.count, default=15)
    parser.add_argument(
        "--repeats", type=scripts.count, default=10, help="calls per round and contestant"
    )
    parser.add_argument("--json", type=Path, help="file for the medians")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    with tempfile.TemporaryDirectory() as folder:
        count = checkpoint(options.params, DTYPES[options.dtype], Path(folder))
        contest = Contest(Path(folder), options.dtype, options.context)
    contest.round(1)  # warm-up
    rounds = [contest.round(options.repeats) for _ in range(options.rounds)]
    medians = {name: statistics.median(r[name] for r in rounds) for name in rounds[0]}
    print(
        f"llama {count / 1e6:.0f}M, {options.dtype}, kernels: {kernels().why}, "
        f"{options.threads} threads, {options.context} tokens before; "
        f"medians of {options.rounds} rounds"
    )
    for name, seconds in medians.items():
        ratio = statistics.median(r[name] / r["step"] for r in rounds)
        print(f"{name:>14}  {seconds * 1e3:8.3f} ms  {ratio:5.2f} of a step")
    for base in ("linears", "torch linears"):
        ratio = statistics.median(r["step"] / r[base] for r in rounds)
        print(f"step over {base}: {ratio:.2f}")
    ratio = statistics.median(r["transformers"] / r["step"] for r in rounds)
    print(f"transformers over step: {ratio:.2f}")
    if options.json:
        head = {"params": count, **{k: v for k, v in vars(options).items() if k != "json"}}
        options.json.write_text(json.dumps({**head, "seconds": medians}, indent=1))


if __name__ == "__main__":
    scripts.run(main)
