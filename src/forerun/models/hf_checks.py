"""Checks of a transformers model at load: tree passes and far positions against plain passes."""

from __future__ import annotations

from enum import Enum
from typing import TYPE_CHECKING

import numpy as np
import torch

from forerun.core.dice import SeededDice
from forerun.core.forward_batch import ForwardBatch
from forerun.core.records import Sequence
from forerun.core.sampling import Sampling
from forerun.core.tree import Tree, TreeBuilder
from forerun.errors import ModelError

if TYPE_CHECKING:
    from forerun.models.hf import HFTarget

MAX_ROUNDING_ERROR = 1e-4  # relative


class FarPosition(Enum):
    """What a position beyond the declared ones does."""

    WORKS = "it is computed, and rows before it stay the same"
    MISSING = "it cannot be computed"
    CHANGES_ROWS = "it changes the rows before it"


@torch.no_grad()
def effect_of_far_position(target: HFTarget, declared: int) -> FarPosition:
    """The effect of one position beyond the declared number of positions.

    Not computed on an accelerator, where a missing position breaks the device for the process.
    """
    if target.device.type != "cpu":
        return FarPosition.WORKS
    tokens = np.random.default_rng(1).integers(0, target.vocab_size, 4).tolist()
    places = torch.tensor([[0, 1, 2, declared + 8]], device=target.device)
    near = target.logits_of(tokens[:3], position_ids=places[:, :3])
    try:
        far = target.logits_of(tokens, position_ids=places)[:3]
    except (IndexError, RuntimeError):
        return FarPosition.MISSING
    error = float((far.float() - near.float()).abs().max())
    is_same = error <= (0.1 if is_half(target) else 1e-3) * float(near.abs().max())
    return FarPosition.WORKS if is_same else FarPosition.CHANGES_ROWS


@torch.no_grad()
def check_tree_passes(target: HFTarget) -> None:
    """Compares two tree passes, the second after a branch was accepted, with plain passes.

    Raises ModelError if they differ.
    """
    tokens = np.random.default_rng(0).integers(0, target.vocab_size, 16).tolist()
    tree = probe_tree(tokens[8:])
    seq = Sequence(tokens[:8], 8, Sampling(), SeededDice(0), limit=8)
    gap_share = 0.3 if is_half(target) else 0.0
    for _ in range(2):
        rows = target.forward(ForwardBatch([seq], [tree]))[0]
        # a pass without a tree mask: its error is the scale of a wrong result
        unmasked = target.logits_of(seq.tokens + tree.tokens.tolist())
        for node in range(-1, len(tree)):
            plain = target.logits_of(seq.tokens + tree.path(node))[-1].float()
            error = float((rows.logits[node + 1].float() - plain).abs().max())
            gap = float((unmasked[len(seq.tokens) + node].float() - plain).abs().max())
            bound = max(MAX_ROUNDING_ERROR * float(plain.abs().max()), gap_share * gap)
            if not error <= bound:
                raise ModelError(f"rows differ by {error:.2g} from plain passes")
        seq.tokens += [*tree.path(4), tokens[0]]


def is_half(target: HFTarget) -> bool:
    """Whether a model computes in less than 32 bits."""
    return torch.finfo(target.model.dtype).bits < 32


def probe_tree(tokens: list[int]) -> Tree:
    """Two branches with siblings, 7 nodes; node 4 is on the second branch."""
    builder = TreeBuilder()
    for token, parent in zip(tokens[:7], (-1, -1, 0, 0, 1, 2, 4), strict=True):
        builder.add(token, parent)
    return builder.build()
