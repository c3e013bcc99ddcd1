"""(a) Passes of every shape class against torch in fp32, verdicts on the device, whole texts.

The reference is torch in fp32 on the same weights and keys. Two numbers are compared with it: the
error of our pass, and that of torch's pass in the model's number type. Ours may be 1.5 times
torch's plus ALLOWED.
"""

from __future__ import annotations

import traceback
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from forerun.core.dice import SeededDice
from forerun.core.forward_batch import ForwardBatch
from forerun.core.records import Sequence
from forerun.core.sampling import Sampling, to_probs
from forerun.core.tree import EMPTY, SWOR, Proposal, Tree, TreeBuilder
from forerun.models.transformer import DecoderConfig
from forerun.runner.gpu.graphs import GraphDecoder
from forerun.runner.model_runner import ModelRunner

from . import texts
from .models import config, fill, on_graphs, on_torch, random_decoder, text, tree, wait, widened
from .report import OutOfTime, Report
from .setting import Setting

ALLOWED = {torch.float32: 2e-4, torch.bfloat16: 2e-3, torch.float16: 5e-4}  # of a row's norm
TIMES = 1.5  # of torch's own error


class Shape(NamedTuple):
    """A pass: tokens of each sequence before it, and nodes of each tree."""

    name: str
    lengths: tuple[int, ...]
    nodes: tuple[int, ...]


@dataclass(frozen=True)
class Family:
    """A kind of model, in one number type."""

    name: str
    config: DecoderConfig
    dtype: torch.dtype


def run(report: Report, setting: Setting) -> None:
    """Every family through every shape, then the verdicts, then whole texts."""
    families, shapes = cases(setting)
    failed = 0
    for family in families:
        report.check()
        try:
            failed += not compare(report, family, shapes, setting)
        except OutOfTime:
            raise
        except Exception as fault:  # a family that cannot run is a row; the others still run
            traceback.print_exc()
            report.add(f"passes, {family.name}", f"{type(fault).__name__}: {fault}"[:200], most=0)
            failed += 1
    report.add("families that differ from torch", failed, most=0)
    report.check()
    verdicts(report, setting)
    sampling_laws(report, setting)
    texts.run(report, setting)


def cases(setting: Setting) -> tuple[list[Family], list[Shape]]:
    """What is compared: small on a CPU, where an interpreter runs the kernels."""
    half, whole = torch.bfloat16, torch.float32
    if setting.is_smoke:
        small = config(32, 1, 2, 1, 16, 48, 96)
        shapes = [
            Shape("1 row", (20,), (0,)),
            Shape("tree of 5", (20,), (5,)),
            Shape("batch of 3 with a tree", (20, 5, 33), (0, 4, 0)),
            Shape("1 row, 150 cells", (150,), (0,)),
        ]
        # no bf16: Triton's interpreter computes it in NumPy, which has none
        narrow = Family("llama, fp16", small, torch.float16)
        return [narrow, Family("llama, fp32", small, whole)], shapes
    deep = config(2048, 2, 32, 8, 64, 8192, 4096)
    wide = config(4096, 2, 32, 8, 128, 14336, 4096)
    families = [
        Family("llama, heads of 64, bf16", deep, half),
        Family("llama, heads of 128, bf16", wide, half),
        Family("llama, fp16", deep, torch.float16),
        Family("llama, fp32", deep, whole),
        Family("qwen2 (biases), bf16", replace(deep, qkv_bias=True), half),
        Family("mistral (window 512), bf16", replace(deep, windows=(512, 512)), half),
        Family("qwen3 (norms of heads), bf16", replace(deep, qk_norm="head"), half),
        Family(
            "gemma2 (soft caps), bf16",
            replace(
                deep,
                norms="both",
                act="gelu_tanh",
                attn_softcap=50.0,
                logit_softcap=30.0,
                windows=(None, 512),
            ),
            half,
        ),
    ]
    shapes = [
        Shape("1 row", (300,), (0,)),
        *(Shape(f"tree of {n}", (300,), (n,)) for n in (1, 3, 7, 15, 31, 63, 127)),
        *(Shape(f"batch of {n}", (300,) * n, (0,) * n) for n in (2, 16)),
        Shape("batch of 16 with trees of 7", tuple(range(40, 680, 40)), (7,) * 16),
        Shape("ragged batch", (300, 5, 33, 1500), (0, 20, 3, 60)),
        Shape("1 row, 8192 cells", (8192,), (0,)),
        Shape("tree of 63, 8192 cells", (8192,), (63,)),
        Shape("batch of 4, 8192 cells", (8192, 8000, 100, 8192), (0, 7, 7, 0)),
    ]
    return families, shapes


def compare(report: Report, family: Family, shapes: list[Shape], setting: Setting) -> bool:
    """Writes the largest errors of a family; whether all shapes agree."""
    model = random_decoder(family.config, family.dtype, setting.device)
    room = {"context": max(map(max, (s.lengths for s in shapes))) + 512}
    ours, plain = on_graphs(model, **room), on_torch(model, **room)
    exact = on_torch(widened(model), **room)
    worst, bad = (0.0, 0.0, ""), []
    for shape in shapes:
        report.check()
        error, usual = errors(ours, plain, exact, shape)
        assert isinstance(ours.decode, GraphDecoder)
        most = TIMES * usual + ALLOWED[family.dtype]
        if not (ours.decode.is_trusted and error <= most):
            bad.append(shape.name)
        worst = max(worst, (error, usual, shape.name))
        if not ours.decode.is_trusted:
            break
    num = sum(len(one.shapes) for one in ours.decode._graphs.values())
    note = f"torch's own {worst[1]:.1e}, at {worst[2]}; {num} shapes recorded"
    note += f"; DIFFERS: {', '.join(bad)}" if bad else ""
    report.add(
        f"passes, {family.name}: largest error",
        worst[0],
        "of a row's norm",
        most=TIMES * worst[1] + ALLOWED[family.dtype],
        note=note,
    )
    return not bad


def errors(
    ours: ModelRunner, plain: ModelRunner, exact: ModelRunner, shape: Shape
) -> tuple[float, float]:
    """The largest error of a row's logits and hidden state: ours, and torch's in its number type.

    Ours is taken from the third pass: of a new shape the first result is torch's.
    """
    vocab = ours.vocab_size
    seqs = [text(length, vocab, i) for i, length in enumerate(shape.lengths)]
    trees = [tree(nodes, vocab) if nodes else EMPTY for nodes in shape.nodes]
    for runner in (ours, plain, exact):
        for i, seq in enumerate(seqs):
            fill(runner, seq, i)
    got = [rows_of(ours, seqs, trees) for _ in range(3)][-1]
    usual, want = rows_of(plain, seqs, trees), rows_of(exact, seqs, trees)
    for runner in (ours, plain, exact):
        wait(runner.model.device)
        for seq in seqs:
            runner.release(seq)
    pairs = list(zip(got, usual, want, strict=True))
    return max(off(a, c) for a, _, c in pairs), max(off(b, c) for _, b, c in pairs)


def rows_of(runner: ModelRunner, seqs: list[Sequence], trees: list[Tree]) -> list[Tensor]:
    """Logits and hidden rows of every sequence, fp32 on the host."""
    found = runner.forward(ForwardBatch(seqs, trees, frozenset({"hidden"})))
    parts = [part for rows in found for part in (rows.logits, rows.hidden)]
    return [part.float().cpu() for part in parts if part is not None]


def off(a: Tensor, b: Tensor) -> float:
    """The largest distance of two rows, over the norm of the second."""
    found = (a - b).norm(dim=-1) / b.norm(dim=-1)
    return float(found.nan_to_num(nan=float("inf")).max())


def verdicts(report: Report, setting: Setting) -> None:
    """Trees judged on the device against the plain rule on the host, with the same uniforms."""
    from forerun.verifiers import _gpu as tensor_walk
    from forerun.verifiers.recursive import Recursive

    vocab, num = (200, 8) if setting.is_smoke else (128_256, 64)
    rng, differ, accepted = np.random.default_rng(0), 0, 0
    for start in range(0, num, 8):
        report.check()
        trees = [drawn_tree(rng, vocab) for _ in range(8)]
        laws = [some_laws(built, vocab, setting.device, start + i) for i, built in enumerate(trees)]
        found = tensor_walk.verdicts(laws, trees, [SeededDice(start + i) for i in range(8)])
        for i, (built, p, one) in enumerate(zip(trees, laws, found, strict=True)):
            rows = dict(enumerate(p.cpu().numpy(), start=-1))
            plain = Recursive().verify(built, Given(rows), SeededDice(start + i))  # type: ignore[arg-type]
            differ += plain != one
            accepted += len(one.nodes)
    note = f"{num} trees, {accepted} tokens accepted, vocabulary {vocab}"
    report.add("verdicts that differ from the host's", differ, "trees", most=0, note=note)


SAMPLINGS = (
    Sampling(temperature=0.6, top_k=20, top_p=0.95),
    Sampling(temperature=0.8, top_p=0.9),
    Sampling(temperature=1.0, min_p=0.05),
)


def sampling_laws(report: Report, setting: Setting) -> None:
    """Truncated distributions computed on the device against those of the host, row by row."""
    from forerun.verifiers._gpu_law import probabilities

    vocab, rows = (200, 4) if setting.is_smoke else (128_256, 16)
    chance = torch.Generator().manual_seed(0)
    logits = 3 * torch.randn(rows, vocab, generator=chance)
    worst = 0.0
    for chosen in SAMPLINGS:
        found = probabilities(logits.to(setting.device), chosen).cpu().numpy()
        for row, given in zip(found, logits.numpy(), strict=True):
            worst = max(worst, float(np.abs(row - to_probs(given, chosen)).sum()) / 2)
    note = f"{rows} rows with {vocab} tokens; top-k, top-p, min-p"
    report.add("sampling laws on the device: largest total variation", worst, most=1e-4, note=note)


class Given(dict):  # type: ignore[type-arg]
    """Laws by node, as a verifier asks for them."""


def drawn_tree(rng: np.random.Generator, vocab: int, levels: int = 4) -> Tree:
    """Two children a node for some levels, drawn without replacement from a known q."""
    builder, parents = TreeBuilder(), [-1]
    for _ in range(levels):
        below = []
        for parent in parents[:4]:
            ids = np.sort(rng.choice(vocab, 10, replace=False)).astype(np.int32)
            q = Proposal(ids, rng.dirichlet(np.ones(10)))
            for token in rng.choice(ids, 2, replace=False, p=q.probs):
                below.append(len(builder))
                builder.add(int(token), parent, SWOR, q)
        parents = below
    return builder.build()


def some_laws(built: Tree, vocab: int, device: torch.device, seed: int) -> Tensor:
    """Laws [n + 1, V] that often agree with the q of their children."""
    chance = torch.Generator().manual_seed(seed)
    logits = torch.randn(len(built) + 1, vocab, generator=chance)
    for node in range(len(built)):
        logits[int(built.parents[node]) + 1, int(built.tokens[node])] += 8.0
    return logits.to(device).softmax(-1)
