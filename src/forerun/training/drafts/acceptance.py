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


@torch.no_grad()
def held_out_acceptance(
    draft: Any,
    target: Any,
    documents: Documents,
    only: np.ndarray,
    domains: Mapping[int, str] | None = None,
    budget: int = 4096,
) -> dict[str, float]:
    """Mean alpha_tv at temperature 1 over the answers in `only`, with the same per domain.

    "greedy" is the share of positions where both models prefer the same token, the acceptance at
    temperature 0. domains: domain of a prompt by its number, "all" for those without one. budget:
    padded tokens of a batch.
    """
    groups = {"all": only}  # disjoint
    if domains and documents.numbers is not None:
        labels = np.array([domains[int(n)] for n in documents.numbers[only]])
        groups = {kind: only[labels == kind] for kind in dict.fromkeys(domains.values())}
    sums = {kind: _sums(draft, target, documents, part, budget) for kind, part in groups.items()}
    total = np.sum(list(sums.values()), axis=0)
    found = {"all": float(total[0] / total[2]), "greedy": float(total[1] / total[2])}
    return found | {k: float(s[0] / s[2]) for k, s in sums.items() if k != "all" and s[2]}


def _sums(
    draft: Any, target: Any, documents: Documents, only: np.ndarray, budget: int
) -> np.ndarray:
    """Sums of acceptance and of equal argmax over positions, and their number."""
    total = np.zeros(3)
    if not len(only):
        return total
    batches = Batches(documents, budget, accumulate=1, prompt_weight=0.0, only=only)
    for group in batches.groups(0):
        micro = batches.micro(group)
        weights = micro.weights[:, 1:]
        q, p = (_logits(model, micro.tokens[:, :-1], weights > 0) for model in (draft, target))
        overlap = torch.minimum(torch.softmax(p, -1), torch.softmax(q, -1)).sum(-1)
        same = (p.argmax(-1) == q.argmax(-1)).float()
        total += [float(overlap.sum()), float(same.sum()), float(len(p))]
    return total


def _logits(model: Any, tokens: Tensor, is_used: Tensor) -> Tensor:
    """Logits [N, V] at the used positions of tokens [rows, width].

    With a linear head the layers run in bfloat16, as exported drafts do, and the head in float32:
    bfloat16 rounds a logit of 20 to a multiple of 1/8. Other models run in their own dtype.
    """
    tokens, is_used = tokens.to(model.device), is_used.to(model.device)
    if not has_linear_head(model):
        return model(input_ids=tokens, use_cache=False).logits[is_used].float().cpu()
    with torch.autocast(model.device.type, dtype=torch.bfloat16):
        hidden = model.model(input_ids=tokens, use_cache=False).last_hidden_state[is_used]
    return model.lm_head(hidden.float()).cpu()
