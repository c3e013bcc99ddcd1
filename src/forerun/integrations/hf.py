"""Speculative decoding inside `generate` of transformers, for any causal LM in memory.

    model.generate(**inputs, custom_generate=forerun.integrations.hf.generate)

The output distribution is that of `generate` with the same settings. Temperature, top-k, top-p and
min-p run in forerun. All other logits processors run in transformers' code, for each position with
the tokens of its tree path. Random numbers follow torch's seed, but the samples differ from those
of plain `generate` with that seed.
"""

from __future__ import annotations

import itertools
from collections.abc import Hashable
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from forerun import registry
from forerun.core.dice import SeededDice
from forerun.core.mixins import forget
from forerun.core.records import Sequence, Step
from forerun.core.roles import Drafter, Shaper, Verifier
from forerun.core.sampling import Sampling
from forerun.core.scopes import kept_key
from forerun.engine.engine import Engine
from forerun.engine.safe_drafter import SafeDrafter
from forerun.engine.stopping import Stops
from forerun.errors import ConfigError
from forerun.models.hf import HFTarget
from forerun.utils.locks import FairLock

WARPERS = {  # transformers' class -> (its attribute, our parameter), in the order of both chains
    "TemperatureLogitsWarper": ("temperature", "temperature"),
    "TopKLogitsWarper": ("top_k", "top_k"),
    "TopPLogitsWarper": ("top_p", "top_p"),
    "MinPLogitsWarper": ("min_p", "min_p"),
}
MIN_MAX_SEQS = 256  # sequences of all threads together; memory is allocated on use
OWN_STOPS = {"MaxLengthCriteria", "EosTokenCriteria"}  # implemented by Stops
_run_numbers = itertools.count()


def generate(
    model: Any,
    input_ids: Tensor,
    logits_processor: Any,
    stopping_criteria: Any,
    generation_config: Any,
    drafter: str | Drafter = registry.DEFAULT_DRAFTER,
    verifier: str | Verifier = registry.DEFAULT_VERIFIER,
    controller: str = registry.DEFAULT_CONTROLLER,
    stream_to: Any = None,
    **model_kwargs: Any,
) -> Any:
    """The decoding loop for `GenerationMixin.generate`; returns what generate returns.

    input_ids [B, L], left-padded by attention_mask. drafter, verifier, controller: names with
    options, or a Drafter, a Verifier. stream_to: a streamer, as generate does not pass its own
    `streamer` to a custom loop. Raises ConfigError for unsupported settings.
    """
    _check(model, generation_config)
    sampling, kept = split_processors(logits_processor, generation_config.do_sample)
    run = next(_run_numbers)
    ends = generation_config.eos_token_id
    ends = [] if ends is None else torch.as_tensor(ends).flatten().tolist()
    recorder = OutputRecorder(logits_processor, generation_config)
    with lock_of(model):  # the controller measures forward passes
        target = target_of(model, len(input_ids))
        engine = Engine(
            target,
            SafeDrafter(_drafter(model, drafter)),
            registry.make("verifier", verifier) if isinstance(verifier, str) else verifier,
            registry.make("controller", controller),
            stops=Criteria(ends, stopping_criteria, input_ids),
            shapers=(Processors(kept, input_ids),) if kept else (),
            listeners=[
                recorder,
                *([] if stream_to is None else [TokenStreamer(stream_to, input_ids)]),
            ],
            max_seqs=len(input_ids),
        )
    seed = int(torch.randint(2**31, ()).item())
    tenant = f"\0{run}" if isinstance(drafter, str) else ""  # new for each run: reproducible
    room = generation_config.max_length - input_ids.shape[1]
    seqs = [
        Sequence(
            row,
            len(row),
            replace(sampling, max_new_tokens=max(1, room)),
            SeededDice(seed, i),
            limit=max(1, min(room, target.context - len(row))),
            group=(run, tuple(row)),
            index=i,
            tenant=tenant,
        )
        for i, row in enumerate(prompts(input_ids, model_kwargs.get("attention_mask")))
    ]
    try:
        for seq in seqs:
            engine.submit(seq)
        engine.run()
    finally:
        _clean_up(engine, seqs)
    if stream_to is not None:
        stream_to.end()
    return recorder.outputs(input_ids, seqs, _pad(generation_config, ends))


def target_of(model: Any, num_seqs: int) -> HFTarget:
    """The model as a Target for at least `num_seqs` sequences, cached with the model."""
    cache = _cache_of(model)
    if "target" not in cache or cache["target"].max_seqs < num_seqs:
        cache["target"] = HFTarget(model, max_seqs=max(MIN_MAX_SEQS, num_seqs))
        cache["target"].lock = lock_of(model)
    return cache["target"]


def lock_of(model: Any) -> FairLock:
    """The lock shared by all targets of a model."""
    return _cache_of(model).setdefault("lock", FairLock())


def _cache_of(model: Any) -> dict[str, Any]:
    """Objects that live as long as the model: its Target, its lock, drafters by name."""
    return model.__dict__.setdefault("_forerun", {})


def prompts(input_ids: Tensor, mask: Tensor | None) -> list[list[int]]:
    """The rows of token ids without padding."""
    if mask is None:
        return input_ids.tolist()
    if (mask.diff(dim=1) < 0).any():
        raise ConfigError("prompts must be padded on the left; set tokenizer.padding_side='left'")
    pairs = zip(input_ids, mask.bool(), strict=True)
    return [row[kept].tolist() for row, kept in pairs]


def split_processors(processors: Any, do_sample: bool) -> tuple[Sampling, list[Any]]:
    """Sampling parameters from the warpers at the end of the list, and the processors before."""
    names = [type(p).__name__ for p in processors]
    order, first = list(WARPERS), len(names)
    while first and names[first - 1] in WARPERS:
        place = order.index(names[first - 1])
        if first < len(names) and place >= order.index(names[first]):
            break
        first -= 1
    default: dict[str, Any] = {} if do_sample else {"temperature": 0.0}
    given = dict(default)
    for processor, name in zip(list(processors)[first:], names[first:], strict=True):
        theirs, ours = WARPERS[name]
        if getattr(processor, "min_tokens_to_keep", 1) > 1:
            return Sampling(**default), list(processors)
        given[ours] = type(getattr(Sampling(), ours))(getattr(processor, theirs))
    return Sampling(**given), list(processors)[:first]


class Processors(Shaper):
    """Logits processors of transformers; the state is the batch row, then its new tokens.

    As in generate, they receive padded prompts and the whole batch, as some use the row index.
    """

    def __init__(self, processors: list[Any], prompts: Tensor) -> None:
        self.processors, self.prompts = processors, prompts

    def start(self, seq: Sequence) -> tuple[int, ...]:
        return (seq.index,)

    def advance(self, state: tuple[int, ...], token: int) -> tuple[int, ...]:
        return (*state, token)

    def logits(self, state: tuple[int, ...], logits: np.ndarray) -> np.ndarray:
        row, *tokens = state
        return apply_processors(self.processors, self.prompts, row, tokens, logits)


def apply_processors(
    processors: list[Any], prompts: Tensor, row: int, tokens: list[int], logits: np.ndarray
) -> np.ndarray:
    """Processed scores [V] of one batch row after its prompt and `tokens`."""
    made = torch.tensor(tokens, dtype=prompts.dtype, device=prompts.device)
    ids = torch.cat([prompts[row], made]).expand(len(prompts), -1)
    wide = torch.from_numpy(logits.astype(np.float32)).to(prompts.device)
    scores = wide.repeat(len(prompts), 1)
    for processor in processors:
        scores = processor(ids, scores)
    return scores[row].cpu().numpy()


class Criteria(Stops):
    """Stopping criteria of transformers, checked after every token."""

    def __init__(self, ends: list[int], criteria: Any, prompts: Tensor) -> None:
        super().__init__(ends)
        self.criteria = [c for c in criteria or () if type(c).__name__ not in OWN_STOPS]
        self.prompts = prompts

    def cut(self, seq: Sequence, tokens: list[int]) -> list[int]:
        for count in range(1, len(tokens) + 1) if self.criteria else ():
            made = torch.tensor(seq.generated + tokens[:count], device=self.prompts.device)
            ids = torch.cat([self.prompts[seq.index], made])[None]
            if any(bool(torch.as_tensor(c(ids, None)).all()) for c in self.criteria):
                kept = super().cut(seq, tokens[:count])
                seq.finish = seq.finish or "stop"
                return kept
        return super().cut(seq, tokens)


class TokenStreamer:
    """Listener: passes the prompt and the new tokens of one sequence to a streamer."""

    def __init__(self, streamer: Any, prompts: Tensor) -> None:
        if not all(callable(getattr(streamer, name, None)) for name in ("put", "end")):
            raise ConfigError(
                f"stream_to must be a streamer with put and end, got {streamer!r}; use e.g. "
                "transformers' TextStreamer(tokenizer)"
            )
        if len(prompts) > 1:
            raise ConfigError(f"a streamer needs batch size 1, got {len(prompts)}")
        self.streamer = streamer
        streamer.put(prompts.cpu())

    def __call__(self, step: Step) -> None:
        for token in step.emitted[0]:
            self.streamer.put(torch.tensor([token]))


class OutputRecorder:
    """Listener: builds the return value of generate, with scores and logits if requested."""

    def __init__(self, processors: Any, config: Any) -> None:
        self.processors, self.config = list(processors), config
        wants = config.return_dict_in_generate
        self.wants_scores, self.wants_logits = (
            bool(wants and flag) for flag in (config.output_scores, config.output_logits)
        )

    def __call__(self, step: Step) -> None:
        if not (self.wants_scores or self.wants_logits):
            return
        for i, seq in enumerate(step.seqs):
            rows = seq.scratch.setdefault(self, [])
            rows += [step.laws[i].rows.row(node) for node in step.visited(i)]

    def outputs(self, input_ids: Tensor, seqs: list[Sequence], pad: int) -> Any:
        """Ids [B, L + new], padded on the right, or an output object of transformers."""
        most = max(seq.num_generated for seq in seqs)
        made = torch.full((len(seqs), most), pad, dtype=input_ids.dtype)
        for row, seq in zip(made, seqs, strict=True):
            row[: seq.num_generated] = torch.tensor(seq.tokens[seq.num_prompt :])
        ids = torch.cat([input_ids, made.to(input_ids.device)], dim=1)
        if not self.config.return_dict_in_generate:
            return ids
        from transformers.generation.utils import GenerateDecoderOnlyOutput

        parts: dict[str, Any] = {
            "sequences": ids,
            "scores": self._stacked(input_ids, seqs, True) if self.wants_scores else None,
            "logits": self._stacked(input_ids, seqs, False) if self.wants_logits else None,
        }
        return GenerateDecoderOnlyOutput(**parts)

    def _stacked(
        self, prompts: Tensor, seqs: list[Sequence], is_shaped: bool
    ) -> tuple[Tensor, ...]:
        """The scores [B, V] of every new position; finished sequences repeat their last row."""
        made = []
        processors = self.processors if is_shaped else []
        for at in range(max(seq.num_generated for seq in seqs)):
            rows = []
            for seq in seqs:
                place = min(at, seq.num_generated - 1)
                before, row = seq.generated[:place], seq.scratch[self][place]
                rows.append(apply_processors(processors, prompts, seq.index, before, row))
            made.append(torch.from_numpy(np.stack(rows)))
        return tuple(made)


def _drafter(model: Any, spec: str | Drafter) -> Drafter:
    """A drafter by name, cached with the model."""
    if isinstance(spec, Drafter):
        return spec
    known: dict[str, Drafter] = _cache_of(model).setdefault("drafters", {})
    if spec not in known:
        known[spec] = registry.make("drafter", spec)
    return known[spec]


def _clean_up(engine: Engine, seqs: list[Sequence]) -> None:
    """Ends the sequences and makes the drafter forget their groups and tenants."""
    groups: set[Hashable] = {seq.group for seq in seqs}
    tenants: set[Hashable] = {kept_key("tenant", seq.tenant) for seq in seqs if seq.tenant}
    with engine.target.lock:
        for seq in seqs:
            engine.cancel(seq)
        engine.retire()
        for key in groups | tenants:
            forget(engine.drafter, key)


def _pad(config: Any, ends: tuple[int, ...] | list[int]) -> int:
    pad = config.pad_token_id
    return int(pad) if pad is not None else (ends[0] if ends else 0)


def _check(model: Any, config: Any) -> None:
    """Raises ConfigError for unsupported settings."""
    if (config.num_beams or 1) > 1:
        raise ConfigError(f"num_beams must be 1, got {config.num_beams}; use plain generate")
    if getattr(model.config, "is_encoder_decoder", False):
        raise ConfigError(f"{type(model).__name__} is an encoder-decoder; use a decoder-only model")
    for name in ("output_attentions", "output_hidden_states"):
        if getattr(config, name, False) and config.return_dict_in_generate:
            raise ConfigError(f"{name} is not supported; remove it or use plain generate")
