"""Acceptance of a draft model on held-out answers of its target, from the logits of both.

alpha_tv is sum min(p, q) per position: the probability that a drafted token is accepted.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from forerun.training.data.documents import Batches, Documents
from forerun.training.language_model import has_linear_head

Rows = dict[str, list[Tensor]]  # domain -> hidden rows [N, d] of each batch


@torch.no_grad()
def held_out_acceptance(
    draft: Any,
    target: Any,
    documents: Documents,
    only: np.ndarray,
    domains: Mapping[int, str] | None = None,
    budget: int = 4096,
    kept: Rows | None = None,
) -> dict[str, float]:
    """Mean alpha_tv at temperature 1 over the answers in `only`, with the same per domain.

    "greedy" is the share of positions where both models prefer the same token, the acceptance at
    temperature 0. domains: domain of a prompt by its number, "all" for those without one. budget:
    padded tokens of a batch. kept: hidden rows of the target, filled by the first call; the next
    ones, with the same answers and budget, read them.
    """
    kept = {} if kept is None else kept
    groups = {"all": only}  # disjoint
    if domains and documents.numbers is not None:
        labels = np.array([domains[int(n)] for n in documents.numbers[only]])
        groups = {kind: only[labels == kind] for kind in dict.fromkeys(domains.values())}
    sums = {
        kind: _sums(draft, target, documents, part, budget, kept.setdefault(kind, []))
        for kind, part in groups.items()
    }
    total = np.sum(list(sums.values()), axis=0)
    found = {"all": float(total[0] / total[2]), "greedy": float(total[1] / total[2])}
    return found | {k: float(s[0] / s[2]) for k, s in sums.items() if k != "all" and s[2]}


def _sums(
    draft: Any,
    target: Any,
    documents: Documents,
    only: np.ndarray,
    budget: int,
    kept: list[Tensor],
) -> np.ndarray:
    """Sums of acceptance and of equal argmax over positions, and their number."""
    total = np.zeros(3)
    if not len(only):
        return total
    batches = Batches(documents, budget, accumulate=1, prompt_weight=0.0, only=only)
    for i, group in enumerate(batches.groups(0)):
        micro = batches.micro(group)
        tokens, is_used = micro.tokens[:, :-1], micro.weights[:, 1:] > 0
        rows = kept[i] if i < len(kept) else _rows(target, tokens, is_used)
        if i == len(kept) and has_linear_head(target):  # logits would take too much memory
            kept.append(rows)
        p, q = _logits(target, rows), _logits(draft, _rows(draft, tokens, is_used))
        overlap = torch.minimum(torch.softmax(p, -1), torch.softmax(q, -1)).sum(-1)
        same = (p.argmax(-1) == q.argmax(-1)).float()
        total += [float(overlap.sum()), float(same.sum()), float(len(p))]
    return total


def _rows(model: Any, tokens: Tensor, is_used: Tensor) -> Tensor:
    """Hidden rows [N, d] at the used positions of tokens [rows, width].

    The layers run in bfloat16, as exported drafts do. Models without a linear head run in their own
    dtype, and give logits [N, V].
    """
    tokens, is_used = tokens.to(model.device), is_used.to(model.device)
    if not has_linear_head(model):
        return model(input_ids=tokens, use_cache=False).logits[is_used]
    with torch.autocast(model.device.type, dtype=torch.bfloat16):
        return model.model(input_ids=tokens, use_cache=False).last_hidden_state[is_used]


def _logits(model: Any, rows: Tensor) -> Tensor:
    """Logits [N, V] of rows.

    The head runs in float32: bfloat16 rounds a logit of 20 to a multiple of 1/8.
    """
    return (model.lm_head(rows.float()) if has_linear_head(model) else rows.float()).cpu()
