"""Shapes of draft models, and the choice among them by measured cost and acceptance.

A large draft learns few tokens in the time that there is. So first the number of parameters is
reduced as long as acceptance does not fall. The time of a draft step grows with its layers more
than with its width, and acceptance falls in a model that is too flat. So then several depths of
about equal parameters are measured (Zafrir et al., FastDraft, 2024).
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import forerun
from forerun.core.modelled_speedup import best_gamma
from forerun.engine.cost.forward import one_row_seconds
from forerun.errors import ConfigError
from forerun.training.drafts.measure import write_json
from forerun.training.export import save
from forerun.training.language_model import Size
from forerun.training.progress import Watch, counted

DEPTHS = (1, 2, 4, 8)
WIDTH_STEP = 32  # of candidates; a head has 32 dimensions below width 256, 64 above
MAX_WIDTH = 8192
INNER = 2.75  # width of the MLP over the width of the model
SHRINK = 4  # a number of parameters over the next one that is tried


@dataclass(frozen=True)
class Candidate:
    """A shape with what was measured of it."""

    size: Size
    parameters: int
    c: float  # time of a step over that of a target step
    alpha: float  # acceptance after the probe
    gamma: int  # best draft length
    speedup: float  # modelled, at that length


def shape(hidden: int, layers: int) -> Size:
    """A Llama shape of this width and depth."""
    heads = max(1, hidden // (32 if hidden < 256 else 64))
    inner = max(32, round(INNER * hidden / 32) * 32)
    return Size(hidden=hidden, layers=layers, heads=heads, kv_heads=heads, inner=inner)


def num_parameters(size: Size, vocab: int) -> int:
    """Parameters of a Llama with tied embeddings."""
    d, head = size.hidden, size.hidden // size.heads
    attention = 2 * d * d + 2 * d * size.kv_heads * head
    layer = attention + 3 * d * size.inner + 2 * d
    return vocab * d + size.layers * layer + d


def candidates(vocab: int, max_parameters: int, depths: tuple[int, ...] = DEPTHS) -> list[Size]:
    """For each depth the widest shape with at most `max_parameters`; deep ones may be missing."""
    found = [size for layers in depths if (size := widest(vocab, max_parameters, layers))]
    if not found:
        least = num_parameters(shape(WIDTH_STEP, min(depths)), vocab)
        raise ConfigError(
            f"a draft of at most {max_parameters:,} parameters has no room for {vocab} tokens of "
            f"width {WIDTH_STEP} ({least:,} parameters); use a larger share"
        )
    return found


def widest(vocab: int, max_parameters: int, layers: int) -> Size | None:
    """The widest shape of this depth with at most `max_parameters`; None: there is none."""
    fitting = [
        size
        for hidden in range(WIDTH_STEP, MAX_WIDTH + 1, WIDTH_STEP)
        if hidden < 256 or hidden % 64 == 0
        if num_parameters(size := shape(hidden, layers), vocab) <= max_parameters
    ]
    return fitting[-1] if fitting else None


def step_seconds(model: Any, tokenizer: Any) -> float:
    """Seconds of one decoding step of a transformers model in forerun's runner."""
    with tempfile.TemporaryDirectory() as folder:
        save(model, Path(folder) / "model", tokenizer=tokenizer)
        loaded = forerun.load(str(Path(folder) / "model"), max_seqs=1)
        return one_row_seconds(loaded.target)


def rated(size: Size, vocab: int, c: float, alpha: float) -> Candidate:
    """A candidate with its modelled speed-up."""
    gamma, gain = best_gamma(alpha, c)
    return Candidate(size, num_parameters(size, vocab), c, alpha, gamma, gain)


def fastest(found: list[Candidate]) -> Candidate:
    """The candidate with the highest modelled speed-up: neither the cheapest nor the best."""
    return max(found, key=lambda one: one.speedup)


def choose(
    path: Path,
    vocab: int,
    max_parameters: int,
    depths: tuple[int, ...],
    rate: Callable[[Size], Candidate],
    watch: Watch,
) -> Candidate:
    """The shape to train: first its number of parameters, then its depth.

    A quarter of the parameters is taken as long as the acceptance after a probe does not fall, at
    the least depth; then all depths are measured with about that number. Each shape is measured
    once and kept in a file, for resumed runs. Raises ConfigError if no shape fits.
    """
    rows = json.loads(path.read_text()) if path.exists() else []
    kept = [Candidate(**row | {"size": Size(**row["size"])}) for row in rows]
    found = {one.size: one for one in kept}
    layers = candidates(vocab, max_parameters, depths)[0].layers
    budgets = [max_parameters]
    while widest(vocab, budgets[-1] // SHRINK, layers):
        budgets.append(budgets[-1] // SHRINK)
    show, num = counted(watch, "shapes", "shapes"), len(budgets) + len(depths) - 1

    def measured(size: Size) -> Candidate:
        show(len(found), num)
        if size not in found:
            found[size] = rate(size)
            write_json(path, [asdict(one) for one in found.values()])
        return found[size]

    def alpha(budget: int) -> float:
        return measured(candidates(vocab, budget, (layers,))[0]).alpha

    budget = budgets[0]
    for smaller in budgets[1:]:
        if alpha(budget) > alpha(smaller):
            break
        budget = smaller
    chosen = fastest([measured(size) for size in candidates(vocab, budget, depths)])
    show(num, num)
    return chosen
