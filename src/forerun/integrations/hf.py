"""Speculative decoding inside `generate` of transformers, for any causal LM in memory.

    model.generate(**inputs, custom_generate=forerun.integrations.hf.generate)

The output distribution is that of `generate` with the same settings. The temperature runs in
forerun. All other logits processors run in transformers' code, for each visited position with the
tokens of its tree path. Random numbers follow torch's seed, but the samples differ from those of
plain `generate` with that seed.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Hashable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from forerun import registry
from forerun.constraints.base import Constraint
from forerun.core.dice import SeededDice
from forerun.core.mixins import forget
from forerun.core.records import Sequence
from forerun.core.roles import Drafter, Verifier
from forerun.core.sampling import Sampling
from forerun.core.scopes import kept_key
from forerun.engine.engine import Engine
from forerun.engine.safe_drafter import SafeDrafter
from forerun.errors import CapacityError
from forerun.integrations.hf_constraints import Given, constraint_of
from forerun.integrations.hf_inputs import (
    caller_arguments,
    check_arguments,
    check_config,
    check_inputs,
)
from forerun.integrations.hf_outputs import OutputRecorder, TokenStreamer
from forerun.integrations.hf_processors import Processors, split_processors
from forerun.integrations.hf_registry import drafter_of, lock_of, target_of
from forerun.integrations.hf_stopping import Criteria
from forerun.models.hf import HFTarget
from forerun.models.hf_rope import UNLIMITED
from forerun.models.hf_scopes import eval_mode

__all__ = ["generate", "lock_of", "target_of"]

log = logging.getLogger("forerun")
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
    rowwise: bool = False,
    constraint: Given = (),
    constraint_start: str | None = None,
    constraint_sampling: str = "mask",
    constraint_tokenizer: Any = None,
    **model_kwargs: Any,
) -> Any:
    """The decoding loop for `GenerationMixin.generate`; returns what generate returns.

    input_ids [B, L], left-padded by attention_mask. drafter, verifier, controller: names with
    options, or a Drafter, a Verifier. stream_to: a streamer, for callers other than generate.
    rowwise: your processors, prefix_allowed_tokens_fn and stopping criteria keep no state and treat
    each row by itself; without this they need batch size 1.
    constraint: of forerun, such as JsonSchema({...}) or "regex:pattern=[0-9]+", or several.
    constraint_start: it applies after this text. constraint_sampling: only "mask".
    constraint_tokenizer: default: the tokenizer of the model's folder.
    Raises ConfigError for inputs and settings that are not supported, CapacityError for a text that
    is longer than the model's stored positions.
    """
    arguments = caller_arguments()
    check_arguments(arguments)
    check_config(model, generation_config)
    check_inputs(model, input_ids, model_kwargs, arguments)
    config = generation_config
    streamers = _streamers(stream_to, arguments.get("streamer"), input_ids)
    criteria = Criteria(stopping_criteria, input_ids, is_rowwise=rowwise)
    own = constraint_of(
        model,
        model.config.get_text_config().vocab_size,
        sorted(criteria.eos_ids),
        constraint,
        start=constraint_start,
        sampling=constraint_sampling,
        tokenizer=constraint_tokenizer,
    )
    sampling, kept, warpers = split_processors(logits_processor, config.do_sample)
    processors = _processors(kept, warpers, input_ids, criteria, config, rowwise, own)
    recorder = OutputRecorder(processors, config)
    listeners = [recorder, *streamers]
    engine = _engine(
        model, len(input_ids), drafter, verifier, controller, criteria, processors, listeners
    )
    rows = prompts(input_ids, model_kwargs.get("attention_mask"))
    sampling = replace(sampling, max_new_tokens=criteria.max_new_tokens)
    seqs = _sequences(engine, rows, sampling, keeps_learned=isinstance(drafter, Drafter))
    _run_all(engine, model, seqs, criteria)
    for streamer in streamers:
        streamer.end()
    return recorder.outputs(input_ids, seqs, _pad(config, criteria))


def _processors(
    kept: list[Any],
    warpers: list[Any],
    input_ids: Tensor,
    criteria: Criteria,
    config: Any,
    is_rowwise: bool,
    constraint: Constraint | None,
) -> Processors:
    """The shaper of a call; criteria that read scores find them in it."""
    wants_scores = bool(config.return_dict_in_generate and config.output_scores)
    processors = Processors(
        kept,
        warpers,
        input_ids,
        criteria.has_ended,
        keeps_rows=wants_scores and bool(criteria.others),
        is_rowwise=is_rowwise,
        constraint=constraint,
    )
    if wants_scores:
        criteria.scores = processors.past_scores
    return processors


def _engine(
    model: Any,
    batch: int,
    drafter: str | Drafter,
    verifier: str | Verifier,
    controller: str,
    criteria: Criteria,
    processors: Processors,
    listeners: list[Any],
) -> Engine:
    """An engine on the module, with an empty KV cache."""
    with lock_of(model):  # the controller measures forward passes
        target = target_of(model, batch)
        target.cache.drop_free()  # the model may have changed since they were computed
        return Engine(
            target,
            SafeDrafter(drafter_of(model, drafter)),
            verifier if isinstance(verifier, Verifier) else registry.make("verifier", verifier),
            registry.make("controller", controller),
            stops=criteria,
            shapers=(processors,) if processors.applies else (),
            listeners=listeners,
            max_seqs=batch,
        )


def _sequences(
    engine: Engine, rows: list[list[int]], sampling: Sampling, *, keeps_learned: bool
) -> list[Sequence]:
    """A sequence for each prompt.

    keeps_learned: drafts use what the drafter learned in earlier runs. Otherwise the run has a
    tenant of its own, so that equal runs give equal drafts.
    """
    target = engine.target
    assert isinstance(target, HFTarget)
    run = next(_run_numbers)
    seed = 0 if sampling.is_greedy else int(torch.randint(2**31, ()).item())
    limits = [limit(target, len(row), sampling.max_new_tokens) for row in rows]
    return [
        Sequence(
            row,
            len(row),
            sampling,
            SeededDice(seed, i),
            limit=limits[i],
            group=(run, tuple(row)),
            index=i,
            tenant="" if keeps_learned else f"\0{run}",
        )
        for i, row in enumerate(rows)
    ]


def prompts(input_ids: Tensor, mask: Tensor | None) -> list[list[int]]:
    """The rows of token ids without padding."""
    if mask is None:
        return input_ids.tolist()
    pairs = zip(input_ids, mask.to(input_ids.device).bool(), strict=True)
    return [row[kept].tolist() for row, kept in pairs]


def limit(target: HFTarget, length: int, max_new: int) -> int:
    """Max new tokens of a prompt of `length` tokens; warns beyond the trained length.

    Raises CapacityError for a prompt that is longer than the stored positions.
    """
    name = type(target.model).__name__
    if length > target.max_context:
        raise CapacityError(
            f"the prompt has {length} tokens, and {name} stores {target.max_context} positions; "
            "shorten the prompt"
        )
    if max_new < UNLIMITED and length + max_new > target.trained:
        log.warning(
            "%d prompt tokens and %d new ones exceed the %d positions that %s was trained for; "
            "quality may suffer beyond them",
            length,
            max_new,
            target.trained,
            name,
        )
    # the last token is not computed, so it needs no position
    return min(max_new, target.max_context + 1 - length)


def _streamers(stream_to: Any, streamer: Any, input_ids: Tensor) -> list[TokenStreamer]:
    """Listeners of both streamers; `generate` has already put the prompt into its own."""
    found = [] if stream_to is None else [TokenStreamer(stream_to, len(input_ids), input_ids)]
    return [*found, *([] if streamer is None else [TokenStreamer(streamer, len(input_ids))])]


def _run(engine: Engine, model: Any, seqs: list[Sequence]) -> None:
    """Steps until all sequences have ended; processors that call the model find it in eval mode."""
    for seq in seqs:
        engine.submit(seq)
    while not engine.scheduler.is_idle:
        with engine.target.lock, eval_mode(model):
            engine.step()


def _run_all(engine: Engine, model: Any, seqs: list[Sequence], criteria: Criteria) -> None:
    """Runs the sequences to the ends that `generate` gives them, then cleans up."""
    assert isinstance(engine.target, HFTarget)
    try:
        _run(engine, model, seqs)
        _check_ends(seqs, engine.target, criteria.max_new_tokens)
        if not criteria.has_ends:
            _extend_to_longest(engine, model, seqs, criteria)
    finally:
        _clean_up(engine, seqs)


def _check_ends(seqs: list[Sequence], target: HFTarget, max_new: int) -> None:
    """Raises CapacityError if the stored positions ended a text, where `generate` would fail."""
    for seq in seqs:
        if seq.finish == "length" and seq.num_generated < max_new:
            raise CapacityError(
                f"{type(target.model).__name__} stores {target.max_context} positions, and a text "
                f"reached them after {seq.num_generated} of {max_new} new tokens; use "
                f"max_new_tokens of at most {seq.num_generated} for this prompt"
            )


def _extend_to_longest(
    engine: Engine, model: Any, seqs: list[Sequence], criteria: Criteria
) -> None:
    """Continues shorter rows to the longest length, as `generate` does without end tokens."""
    most = max(seq.num_generated for seq in seqs)
    short = [seq for seq in seqs if seq.num_generated < most]
    for seq in short:
        seq.finish, seq.limit = None, most
    criteria.is_length_only = True
    _run(engine, model, short)


def _clean_up(engine: Engine, seqs: list[Sequence]) -> None:
    """Ends the sequences, and drops their cells and what the drafter learned from them."""
    groups: set[Hashable] = {seq.group for seq in seqs}
    tenants: set[Hashable] = {kept_key("tenant", seq.tenant) for seq in seqs if seq.tenant}
    target = engine.target
    assert isinstance(target, HFTarget)
    with target.lock:
        for seq in seqs:
            engine.cancel(seq)
        engine.retire()
        for key in groups | tenants:
            forget(engine.drafter, key)
        target.cache.drop_free()


def _pad(config: Any, criteria: Criteria) -> int:
    """The id after the end of a row: the one that `generate` prepared."""
    pad = getattr(config, "_pad_token_tensor", None)
    pad = config.pad_token_id if pad is None else pad
    return int(pad) if pad is not None else min(criteria.eos_ids, default=0)
