"""Online learning of a draft: one optimizer step per few finished requests.

Liu et al., "Online Speculative Decoding", 2024. Each class of requests has its own buffer, weights,
optimizer and version. An update is one optimizer step over the buffered requests; what is recorded
of a request, and its loss, are those of an `Objective`: the positions where the target corrected
the draft, or OmniDraft's hybrid loss for a draft with another tokenizer. Weights that do worse than
their moving average on held-out requests are replaced by that average.
"""

from __future__ import annotations

import copy
import math
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.func import functional_call

from forerun.core.records import Step
from forerun.errors import ConfigError, DataError

from .corrections import ClassOf, Episode, ErrorBuffer, RequestStats
from .objectives import FromCorrections, Objective

WARMUP = 10  # updates until the full learning rate: the first steps of AdamW are noisy
State = dict[str, Tensor]


@dataclass(frozen=True, kw_only=True)
class OnlineOptions:
    """Settings of online learning. Raises ConfigError for a value out of range."""

    interval: int = 8  # finished requests of a class per update
    loss: str = "auto"  # fkl, rkl or mix; auto: fkl, or hybrid with another tokenizer
    ngram_weight: float = 0.2  # lambda of the hybrid loss
    ngram_by_target: bool = False  # p(t) in place of lambda
    rate: float = 1e-4  # learning rate of AdamW
    clip: float = 1.0  # largest norm of the gradient
    top_k: int = 64  # target probabilities stored per row; 0: all
    buffer_tokens: int = 65536  # of the texts in a buffer
    max_length: int = 512  # rows beyond it are not recorded
    hold_every: int = 8  # every n-th request is held out; 0: none, and no fall-back
    held: int = 4  # held-out requests that are kept
    decay: float = 0.9  # of the moving average of weights, per update
    tolerance: float = 0.02  # acceptance below that of the average that triggers the fall-back
    compat: bool = False  # train on the rows that the published code uses
    records_undrafted: bool = False  # train also on the rows of steps without a draft

    def __post_init__(self) -> None:
        FromCorrections(self.loss)  # raises for an unknown one
        smallest = {"interval": 1, "buffer_tokens": 1, "max_length": 2, "held": 1}
        for name in ("top_k", "hold_every", "tolerance", "ngram_weight"):
            smallest[name] = 0
        for name, least in smallest.items():
            if not getattr(self, name) >= least:
                raise ConfigError(f"{name} must be at least {least}, got {getattr(self, name)}")
        for name in ("rate", "clip"):
            if not 0 < getattr(self, name) < math.inf:
                raise ConfigError(f"{name} must be above 0, got {getattr(self, name)}")
        if not 0 <= self.decay < 1:
            raise ConfigError(f"decay must be from 0 to below 1, got {self.decay}")


class Learner:
    """The draft of one class in training. model: a transformers model in float32, its own copy."""

    def __init__(
        self, model: Any, options: OnlineOptions, objective: Objective[Any] | None = None
    ) -> None:
        self.model, self.options = model.eval().requires_grad_(True), options
        self.objective = objective or FromCorrections(options.loss)
        self.parameters = dict(model.named_parameters())
        self.average = self.copied()
        self.held: deque[Episode] = deque(maxlen=options.held)
        self.version = self.num_updates = self.num_fallbacks = self.num_rows = 0
        self.loss = float("nan")  # of the last update
        self.optimizer = self._optimizer()

    def update(self, episodes: list[Episode]) -> bool:
        """One update; False if there is no row to learn from."""
        before = self.version
        for _ in self.slices(episodes):
            pass
        return self.version > before

    def slices(self, episodes: list[Episode]) -> Iterator[None]:
        """One update in parts of bounded time: each part computes one request.

        Raises DataError, with unchanged weights, if the loss is not finite.
        """
        total = sum(episode.size for episode in episodes)
        if not total:
            return
        self.optimizer.zero_grad()
        loss = 0.0
        for episode in episodes:
            part = self.loss_of(episode) * (episode.size / total)
            part.backward()
            loss += float(part.detach())
            yield
        norm = torch.nn.utils.clip_grad_norm_(self.parameters.values(), self.options.clip)
        if not (math.isfinite(loss) and math.isfinite(float(norm))):
            self.optimizer.zero_grad()
            raise DataError(
                f"loss became {loss} at update {self.version + 1}; try a lower learning rate"
            )
        for group in self.optimizer.param_groups:
            group["lr"] = self.options.rate * min(1.0, (self.version + 1) / WARMUP)
        self.optimizer.step()
        self.loss, self.num_rows = loss, self.num_rows + total
        yield
        yield from self._check()
        decay = self.options.decay
        for name, parameter in self.parameters.items():
            self.average[name].lerp_(parameter.detach(), 1 - decay)
        self.version, self.num_updates = self.version + 1, self.num_updates + 1

    def loss_of(self, episode: Episode) -> Tensor:
        """Mean loss of the positions of an episode."""
        return self.objective.loss(self._logits(episode), episode)

    @torch.no_grad()
    def acceptance(self, episode: Episode, weights: State | None = None) -> float:
        """Mean acceptance rate of the positions of an episode, at temperature 1."""
        return float(self.objective.acceptance(self._logits(episode, weights), episode))

    def copied(self) -> State:
        """A copy of the trained weights."""
        return {name: p.detach().clone() for name, p in self.parameters.items()}

    def state(self) -> State:
        """A copy of all tensors, named as in the Hugging Face checkpoint."""
        return {name: tensor.detach().clone() for name, tensor in self.model.state_dict().items()}

    @torch.no_grad()
    def _load(self, weights: State) -> None:
        for name, parameter in self.parameters.items():
            parameter.copy_(weights[name])

    def reset(self, weights: State) -> None:
        """Replaces the weights and their average; the optimizer starts again."""
        self._load(weights)
        self.average = self.copied()
        self.optimizer = self._optimizer()

    def _check(self) -> Iterator[None]:
        """Replaces the new weights by their average if that is better on held-out requests."""
        new = old = 0.0
        held = [episode for episode in self.held if episode.size]
        total = sum(episode.size for episode in held)
        for episode in held:
            share = episode.size / total
            new += share * self.acceptance(episode)
            yield
            old += share * self.acceptance(episode, self.average)
            yield
        if not new >= old - self.options.tolerance:  # worse, or not a number
            self._load(self.average)  # the optimizer keeps its moments
            self.num_fallbacks += 1

    def _logits(self, episode: Episode, weights: State | None = None) -> Tensor:
        """Logits [m, V] of the draft at the rows of an episode."""
        tokens = torch.from_numpy(episode.tokens.astype(np.int64))[None]
        how = {"use_cache": False, "logits_to_keep": torch.from_numpy(episode.rows)}
        if weights is None:
            return self.model(input_ids=tokens, **how).logits[0].float()
        found = functional_call(self.model, weights, (), {"input_ids": tokens, **how})
        return found.logits[0].float()

    def _optimizer(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(
            self.parameters.values(), lr=self.options.rate, betas=(0.9, 0.98), weight_decay=0.0
        )


class OnlineLearner:
    """Error buffers and learners of all classes, filled by the listener `observe`.

    model: the draft's initial weights. on_request: called with class, version and statistics of
    every finished request. objective: what is learned; by default corrections, with options.loss.
    """

    def __init__(
        self,
        model: Any,
        options: OnlineOptions,
        class_of: ClassOf,
        on_request: Callable[[str, RequestStats], None] = lambda kind, stats: None,
        objective: Objective[Any] | None = None,
    ) -> None:
        self.options, self.on_request = options, on_request
        self.objective = objective or FromCorrections(options.loss)
        self._model = model
        self.first: State = {n: p.detach().clone() for n, p in model.named_parameters()}
        self.learners: dict[str, Learner] = {}
        self.buffers: dict[str, ErrorBuffer] = {}
        self.held: deque[tuple[str, Episode]] = deque(maxlen=64)  # not yet taken by `slices`
        self.num_recorded = 0  # finished requests with a recorded row
        self.listen = self.objective.listener(
            class_of,
            self._end,
            vocab_size=model.config.vocab_size,
            top_k=options.top_k,
            max_length=min(options.max_length, model.config.max_position_embeddings),
            hold_every=options.hold_every,
            compat=options.compat,
            records_undrafted=options.records_undrafted,
        )

    def warm_up(self) -> None:
        """Computes a gradient for each class once; changes no weight."""
        for learner in self.learners.values():
            learner.loss_of(self.objective.smallest()).backward()
            learner.optimizer.zero_grad()

    def observe(self, step: Step, record: bool = True) -> None:
        """Records a step; record=False: only ends requests that finished.

        Called by the engine's thread.
        """
        self.listen(step, record)

    def due(self) -> str | None:
        """A class with enough requests for an update, the one that waits longest; None: none."""
        waiting = {kind: b.num_requests for kind, b in list(self.buffers.items())}
        kind = max(waiting, key=lambda kind: waiting[kind], default=None)
        return kind if kind is not None and waiting[kind] >= self.options.interval else None

    def slices(self, kind: str) -> Iterator[None]:
        """The update of a class, in parts of bounded time."""
        while self.held:
            of, episode = self.held.popleft()
            self.learner(of).held.append(episode)
        yield from self.learner(kind).slices(self.buffers[kind].take())

    def update(self, kind: str) -> bool:
        """The whole update of a class; False if it had nothing to learn from."""
        before = self.version(kind)
        for _ in self.slices(kind):
            pass
        return self.version(kind) > before

    def buffer(self, kind: str) -> ErrorBuffer:
        """The error buffer of a class."""
        return self.buffers.setdefault(kind, ErrorBuffer(self.options.buffer_tokens))

    def learner(self, kind: str) -> Learner:
        """The learner of a class; it starts with the initial weights."""
        if kind not in self.learners:
            self.learners[kind] = Learner(copy.deepcopy(self._model), self.options, self.objective)
        return self.learners[kind]

    def version(self, kind: str) -> int:
        """Number of updates of a class."""
        return self.learners[kind].version if kind in self.learners else 0

    def reset(self) -> None:
        """Back to the initial weights of all classes, as a new version; buffers are emptied."""
        for buffer in list(self.buffers.values()):
            buffer.take()
        self.held.clear()
        for learner in self.learners.values():
            learner.reset(self.first)
            learner.version += 1

    def _end(self, kind: str, episode: Episode | None, is_held: bool, stats: RequestStats) -> None:
        buffer = self.buffer(kind)
        self.num_recorded += episode is not None
        if is_held and episode is not None:
            self.held.append((kind, episode))
        buffer.add(None if is_held else episode)
        self.on_request(kind, stats)


def draft_module(name: str) -> Any:
    """A draft as a transformers model in float32. Raises ConfigError if it cannot be trained."""
    from transformers import AutoModelForCausalLM

    from forerun.models.families import HEAD_SIZE
    from forerun.models.hf_load import load_whole
    from forerun.models.paths import check_config, located, model_folder

    folder = model_folder(located(name))
    if check_config(folder).get(HEAD_SIZE) is not None:
        raise ConfigError(
            f"draft {name!r} has a reduced head, which cannot be trained; use the draft before its "
            "head was reduced"
        )
    return load_whole(AutoModelForCausalLM, folder, dtype=torch.float32).eval()
