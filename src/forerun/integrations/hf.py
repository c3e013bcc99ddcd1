"""Drafts inside `generate` of transformers, for any causal LM that is already in memory.

    model.generate(**inputs, custom_generate=forerun.integrations.hf.generate)

The law is that of `generate` with the same settings: temperature, top-k, top-p and min-p are ours,
whatever else stands in the list of processors is applied by transformers' own code, position by
position, with the history of each tree path. Randomness comes from torch's seed; texts are not
those that plain `generate` draws from that seed, their law is.
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
from forerun.utils.locks import Turns

WARPERS = {  # transformers' class -> (its attribute, our parameter), in the order of both chains
    "TemperatureLogitsWarper": ("temperature", "temperature"),
    "TopKLogitsWarper": ("top_k", "top_k"),
    "TopPLogitsWarper": ("top_p", "top_p"),
    "MinPLogitsWarper": ("min_p", "min_p"),
}
ROOM = 256  # sequences of all threads together; memory is taken as they come
_numbers = itertools.count()
OWN_STOPS = {"MaxLengthCriteria", "EosTokenCriteria"}  # what Stops does itself


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
    """What `GenerationMixin.generate` calls as its decoding loop; returns what generate returns.

    input_ids [B, L], left-padded by attention_mask. drafter, verifier, controller: names with
    options, or a Drafter, a Verifier. stream_to: a streamer; generate does not hand its own
    `streamer` to a custom loop. Raises ConfigError for what a tree pass cannot give.
    """
    _check(model, generation_config)
    sampling, kept = split_processors(logits_processor, generation_config.do_sample)
    run = next(_numbers)
    ends = generation_config.eos_token_id
    ends = [] if ends is None else torch.as_tensor(ends).flatten().tolist()
    steps = Recorded(logits_processor, generation_config)
    with turns_of(model):  # controllers measure passes
        target = target_of(model, len(input_ids))
        engine = Engine(
            target,
            SafeDrafter(_drafter(model, drafter)),
            registry.make("verifier", verifier) if isinstance(verifier, str) else verifier,
            registry.make("controller", controller),
            stops=Criteria(ends, stopping_criteria, input_ids),
            shapers=(Processors(kept, input_ids),) if kept else (),
            listeners=[steps, *([] if stream_to is None else [Streamed(stream_to, input_ids)])],
            max_seqs=len(input_ids),
        )
    seed = int(torch.randint(2**31, ()).item())
    tenant = f"\0{run}" if isinstance(drafter, str) else ""  # torch's seed promises the same again
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
        _leave(engine, seqs)
    if stream_to is not None:
        stream_to.end()
    return steps.outputs(input_ids, seqs, _pad(generation_config, ends))


def target_of(model: Any, num_seqs: int) -> HFTarget:
    """The model as a Target with room for `num_seqs` sequences; made once per model."""
    kept = _kept(model)
    if "target" not in kept or kept["target"].max_seqs < num_seqs:
        kept["target"] = HFTarget(model, max_seqs=max(ROOM, num_seqs))
        kept["target"].turns = turns_of(model)
    return kept["target"]


def turns_of(model: Any) -> Turns:
    """Of all targets of a model."""
    return _kept(model).setdefault("turns", Turns())


def _kept(model: Any) -> dict[str, Any]:
    """What is kept with a model and goes with it: its Target, and drafters by name."""
    return model.__dict__.setdefault("_forerun", {})


def prompts(input_ids: Tensor, mask: Tensor | None) -> list[list[int]]:
    """Rows of token ids without their padding."""
    if mask is None:
        return input_ids.tolist()
    if (mask.diff(dim=1) < 0).any():
        raise ConfigError("prompts must be padded on the left; set tokenizer.padding_side='left'")
    pairs = zip(input_ids, mask.bool(), strict=True)
    return [row[kept].tolist() for row, kept in pairs]


def split_processors(processors: Any, do_sample: bool) -> tuple[Sampling, list[Any]]:
    """Our sampling parameters for the warpers that end the list, and the processors before them."""
    names = [type(p).__name__ for p in processors]
    order, first = list(WARPERS), len(names)
    while first and names[first - 1] in WARPERS:
        place = order.index(names[first - 1])
        if first < len(names) and place >= order.index(names[first]):
            break
        first -= 1
    law: dict[str, Any] = {} if do_sample else {"temperature": 0.0}
    given = dict(law)
    for processor, name in zip(list(processors)[first:], names[first:], strict=True):
        theirs, ours = WARPERS[name]
        if getattr(processor, "min_tokens_to_keep", 1) > 1:
            return Sampling(**law), list(processors)
        given[ours] = type(getattr(Sampling(), ours))(getattr(processor, theirs))
    return Sampling(**given), list(processors)[:first]


class Processors(Shaper):
    """Processors of transformers at one position; the state is the row, then its new tokens.

    As in generate, padding belongs to the text that they see, and some look at the row's number.
    """

    def __init__(self, processors: list[Any], prompts: Tensor) -> None:
        self.processors, self.prompts = processors, prompts

    def start(self, seq: Sequence) -> tuple[int, ...]:
        return (seq.index,)

    def advance(self, state: tuple[int, ...], token: int) -> tuple[int, ...]:
        return (*state, token)

    def logits(self, state: tuple[int, ...], logits: np.ndarray) -> np.ndarray:
        row, *tokens = state
        return shaped(self.processors, self.prompts, row, tokens, logits)


def shaped(
    processors: list[Any], prompts: Tensor, row: int, tokens: list[int], logits: np.ndarray
) -> np.ndarray:
    """Scores [V] after a list of processors, behind `tokens` new ones of a row of the batch."""
    made = torch.tensor(tokens, dtype=prompts.dtype, device=prompts.device)
    ids = torch.cat([prompts[row], made]).expand(len(prompts), -1)
    wide = torch.from_numpy(logits.astype(np.float32)).to(prompts.device)
    scores = wide.repeat(len(prompts), 1)
    for processor in processors:
        scores = processor(ids, scores)
    return scores[row].cpu().numpy()


class Criteria(Stops):
    """Stopping criteria of transformers, asked after every token."""

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


class Streamed:
    """Listener: hands the prompt and the tokens of the one sequence to a streamer."""

    def __init__(self, streamer: Any, prompts: Tensor) -> None:
        if not all(callable(getattr(streamer, name, None)) for name in ("put", "end")):
            raise ConfigError(
                f"stream_to must be a streamer, with put and end, got {streamer!r}; e.g. "
                "transformers' TextStreamer(tokenizer)"
            )
        if len(prompts) > 1:
            raise ConfigError(f"a streamer takes one text, got a batch of {len(prompts)}")
        self.streamer = streamer
        streamer.put(prompts.cpu())

    def __call__(self, step: Step) -> None:
        for token in step.emitted[0]:
            self.streamer.put(torch.tensor([token]))


class Recorded:
    """Listener: what generate returns beside the ids, if it was asked to."""

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
        """Ids [B, L + most], padded on the right, or an output object of transformers."""
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
        """For every new position the scores [B, V]; the last row again where a text has ended."""
        made = []
        processors = self.processors if is_shaped else []
        for at in range(max(seq.num_generated for seq in seqs)):
            rows = []
            for seq in seqs:
                place = min(at, seq.num_generated - 1)
                before, row = seq.generated[:place], seq.scratch[self][place]
                rows.append(shaped(processors, prompts, seq.index, before, row))
            made.append(torch.from_numpy(np.stack(rows)))
        return tuple(made)


def _drafter(model: Any, spec: str | Drafter) -> Drafter:
    """The same drafter for the same model and text."""
    if isinstance(spec, Drafter):
        return spec
    known: dict[str, Drafter] = _kept(model).setdefault("drafters", {})
    if spec not in known:
        known[spec] = registry.make("drafter", spec)
    return known[spec]


def _leave(engine: Engine, seqs: list[Sequence]) -> None:
    groups: set[Hashable] = {seq.group for seq in seqs}
    alone: set[Hashable] = {kept_key("tenant", seq.tenant) for seq in seqs if seq.tenant}
    with engine.target.turns:
        for seq in seqs:
            engine.cancel(seq)
        engine.retire()
        for group in groups | alone:
            forget(engine.drafter, group)


def _pad(config: Any, ends: tuple[int, ...] | list[int]) -> int:
    pad = config.pad_token_id
    return int(pad) if pad is not None else (ends[0] if ends else 0)


def _check(model: Any, config: Any) -> None:
    """Raises ConfigError for settings that a loop over trees does not serve."""
    if (config.num_beams or 1) > 1:
        raise ConfigError(f"num_beams must be 1, got {config.num_beams}; drafts need sampling")
    if getattr(model.config, "is_encoder_decoder", False):
        raise ConfigError(f"{type(model).__name__} is an encoder-decoder; use a decoder-only model")
    for name in ("output_attentions", "output_hidden_states"):
        if getattr(config, name, False) and config.return_dict_in_generate:
            raise ConfigError(f"{name} is not served; leave it out or use plain generate")
