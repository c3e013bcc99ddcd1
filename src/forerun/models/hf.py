"""A Target for any causal LM of transformers; it computes one sequence after the other.

Three ways to compute a tree, tried at load in this order and compared with plain passes:
    tree   one pass over all nodes with a 4D mask; accepted cells are gathered in the cache
    paths  pending tokens on the cache, then every root-to-leaf path on a copy of it
    full   every path from the first token, without a cache
"""

from __future__ import annotations

import inspect
import logging
import weakref
from collections.abc import Hashable, Mapping
from collections.abc import Sequence as Many
from contextlib import ExitStack
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from forerun.core.forward_batch import ForwardBatch
from forerun.core.growing import Path
from forerun.core.records import Rows, Sequence
from forerun.errors import CapacityError, ConfigError, ModelError
from forerun.models.checkpoint import flaw
from forerun.models.hf_cache import Caches, Held
from forerun.models.hf_checks import FarPosition, check_tree_passes, effect_of_far_position
from forerun.models.hf_paths import PathRows
from forerun.models.hf_rope import (
    UNLIMITED,
    LengthRope,
    hard_limit,
    length_rope,
    max_positions,
    trained_length,
)
from forerun.models.hf_scopes import eager_attention, eval_mode
from forerun.models.weight_update import update_module
from forerun.models.weight_version import counters, fingerprint
from forerun.runner.base import Runner
from forerun.runner.forward_batch import DetailedWork, PassRequest, Work, WorkRows
from forerun.runner.slots import MIN_REUSE_TOKENS, Slot
from forerun.utils.device_copy import to_device

log = logging.getLogger("forerun")
CACHES = ("cache", "cache_params", "past_key_values")  # by release and kind of model
WAYS = ("tree", "paths", "full")
WINDOWS = ("sliding_window", "attention_chunk_size", "attention_window_size", "window_size")
WATCHES = {
    "none": "no other code changes the weights",
    "counters": "torch's in-place counters at every pass",
    "content": "counters, and a checksum of the weights before cells of another text are reused",
}
GIVES = frozenset({"hidden", "probes", "taps", "embeddings", "prompt_rows", "prompt_logits"})


class CallRequest(NamedTuple):
    """The outputs that one call of the model returns."""

    hidden: bool = False
    logits: bool = True  # of all rows
    taps: tuple[int, ...] = ()
    attention: bool = False
    first: int = 0  # rows of a work before this one are not needed


class HFTarget(Runner):
    """A loaded transformers model as a Target. way: how it computes trees.

    context: max sequence length; None is the length that the config declares. is_weak: the model is
    held by a weak reference, and its owner must outlive each call. watch: how changed weights are
    noticed, see `WATCHES`. Raises ModelError if a weight is NaN or infinite.
    """

    def __init__(
        self,
        model: Any,
        *,
        max_seqs: int = 16,
        context: int | None = None,
        way: str | None = None,
        reason: str = "",
        is_weak: bool = False,
        watch: str = "content",
    ) -> None:
        for name, weight in model.named_parameters():
            if found := flaw(weight.detach(), weight.dtype):
                raise ModelError(f"parameter {name} {found}")
        self._model = weakref.ref(model) if is_weak else lambda: model
        self.reason, self.max_seqs, self.watch = reason, max_seqs, watch
        self.device = model.device
        text = model.config.get_text_config()
        self.trained, self.max_context = trained_length(text), hard_limit(model, text)
        self.context = self.max_context
        self.vocab_size = text.vocab_size
        parameters = inspect.signature(model.forward).parameters
        self._can_trim = "logits_to_keep" in parameters
        self._cache_name = next((n for n in CACHES if n in parameters), CACHES[-1])
        self._rope: LengthRope | None = length_rope(model, text)
        self._has_warned = False
        self._counters, self._updates = counters(model), 0
        self._num_requests = [0]  # of updates; shared by twins
        self._last_tag: Hashable = None
        if way is None:
            if "position_ids" in parameters:
                self._find_far_limit(max_positions(text))
            self._choose_way(text)
        else:
            self._set_way(way)
        self.context = min(context or self.trained, self.max_context)
        self.num_layers = text.num_hidden_layers

    @property
    def model(self) -> Any:
        """The transformers model."""
        model = self._model()
        assert model is not None, "the model was deleted"
        return model

    @torch.no_grad()
    def forward(self, batch: ForwardBatch) -> list[Rows]:
        self._tag_cells(batch.seqs)
        return super().forward(batch)

    @torch.no_grad()
    def rows_at(self, requests: Many[tuple[Sequence, Path]]) -> Tensor:
        self._tag_cells([seq for seq, _ in requests])
        return super().rows_at(requests)

    @property
    def weights_version(self) -> int:
        """Number of updates, and of changes that were noticed so far."""
        if self.watch != "none":
            found = counters(self.model)
            if found != self._counters:
                self._counters, self._updates = found, self._updates + 1
        return self._updates + self._num_requests[0]

    def _tag_cells(self, seqs: Many[Sequence]) -> None:
        """Before new sequences get slots: sets the tag of cells that they may share."""
        if self.watch != "content":
            return
        lengths = [len(seq.tokens) for seq in seqs if not self.cache.holds(seq)]
        if lengths:  # short prompts are not worth a fingerprint
            is_long = max(lengths) >= MIN_REUSE_TOKENS
            self.cache.tag = tag = fingerprint(self.model) if is_long else None
            if is_long and tag != self._last_tag:
                self._updates += self._last_tag is not None
                self._last_tag = tag

    def max_depth(self, seq: Sequence) -> int:
        """Levels of a draft that can be computed in one pass: tables may depend on the length."""
        rope, length = self._rope, len(seq.tokens)
        if rope is None or (length > rope.switch and not rope.grows):
            return super().max_depth(seq)
        if length >= rope.switch and not self._has_warned:
            self._has_warned = True
            log.warning(
                "%s has position tables that change after %d tokens; drafts end there%s",
                type(self.model).__name__,
                rope.switch,
                ", and longer texts are computed token by token" if rope.grows else "",
            )
        return max(rope.switch - length, 0)

    def memory_report(self) -> dict[str, int]:
        """Bytes of weights, caches, and logits kept for draft paths."""
        weights = sum(p.nbytes for p in self.model.parameters())
        return {
            "weights": weights,
            "kv cache": self.cache.nbytes,
            "scratch": self.kept_bytes(),
        }

    @torch.no_grad()
    def run(self, works: list[Work], needs: frozenset[str]) -> tuple[Tensor, Tensor]:
        parts = []
        for work in works:
            wanted = CallRequest("hidden" in needs, "logits" in needs, first=work.first)
            parts.append(self._computed(work, wanted))
            work.keep()
        hidden, logits = (torch.cat(column) for column in zip(*parts, strict=True))
        return hidden, logits

    @torch.no_grad()
    def run_detailed(self, works: list[DetailedWork], request: PassRequest) -> list[WorkRows]:
        last = self.num_layers - 1
        if last in request.taps:
            raise ConfigError(
                f"taps:{last} is the last layer, and transformers returns its rows only after the "
                "norm; use hidden, or an earlier layer"
            )
        found = []
        for work in works:
            wanted = CallRequest(True, True, request.taps, bool(work.queries), work.first_row)
            hidden, logits, *rest = self._computed(work, wanted)
            taps = dict(zip(request.taps, rest, strict=False))
            start = 0 if request.has_prompt_logits else max(work.root - work.first_row, 0)
            logits = logits[start:] if request.has_logits else logits[:0]
            # [q, layers, heads, n]
            weights = rest[-1][[q - work.first_row for q in work.queries]] if work.queries else None
            by_layer = {} if weights is None else dict(enumerate(weights.permute(1, 2, 0, 3)))
            found.append(WorkRows(hidden, logits, taps, by_layer))
        return found

    def embed(self, ids: Tensor) -> Tensor:
        with torch.no_grad():
            return F.embedding(ids.to(self.device), self.model.get_input_embeddings().weight)

    def update_weights(self, state: Mapping[str, Tensor]) -> None:
        with self.lock:
            update_module(self.model, state)
            self._num_requests[0] += 1  # all cells are dropped, also without a new weight
            self.forget_cells()

    def _computed(self, work: Work, wanted: CallRequest) -> tuple[Tensor, ...]:
        """The outputs of `_call` for the rows of a work. Raises CapacityError if out of memory."""
        compute = {"tree": self._tree, "paths": self._paths, "full": self._full}[self.way]
        before = len(work.slot.tokens)
        try:
            outputs = compute(work, wanted)
        except BaseException as cause:  # layers may now have different numbers of cells
            self.cache.renew(work.slot)
            work.slot.truncate(0)
            if not isinstance(cause, MemoryError | torch.OutOfMemoryError):
                raise
            raise CapacityError(
                f"{work.num_rows} tokens after {before} do not fit into memory; "
                "use shorter prompts or fewer sequences at once"
            ) from cause
        self.num_rows += work.num_rows
        return outputs

    def _prefill(self, slot: Slot, seq: Sequence, most: int) -> None:
        if self._rope is None:  # otherwise the table belongs to the whole prompt: one pass
            super()._prefill(slot, seq, most)

    def _tree(self, work: Work, wanted: CallRequest) -> tuple[Tensor, ...]:
        """One pass over pending tokens and nodes; nodes attend to their ancestors."""
        span, held = work.span, self.cache.held(work.slot)
        held.cut(span.start)
        options: dict[str, Any] = {}
        if work.nodes:
            hidden = to_device(~span.sees, self.device)  # type: ignore[operator]
            shape = (1, 1, span.num_rows, span.stop)
            mask = torch.zeros(shape, dtype=self.model.dtype, device=self.device)
            mask[..., span.base :].masked_fill_(hidden, torch.finfo(mask.dtype).min)
            options["attention_mask"] = mask
            options["position_ids"] = to_device(span.positions, self.device)[None]
        outputs = self._call([*work.pending, *work.nodes], held.cache, wanted, **options)
        held.length = span.stop
        return tuple(part[wanted.first :] for part in outputs)

    def _paths(self, work: Work, wanted: CallRequest) -> tuple[Tensor, ...]:
        """Pending tokens on the kept cache, then each path on a copy of it."""
        slot, num = work.slot, len(work.pending)
        held, rows = self.cache.held(slot), PathRows(work)
        if held.length > len(slot.tokens):  # tokens were removed
            held = self.cache.renew(slot)
        text = [*slot.tokens, *work.pending]
        if todo := len(text) - held.length:
            outputs = self._extend(
                held, text, todo, wanted._replace(first=wanted.first + todo - num)
            )
            rows.put(range(num), [part[todo - num :] for part in outputs])
        for nodes, tokens in rows.leaf_paths():
            whole = wanted._replace(first=0)
            outputs = self._extend(held.copy(), text + tokens, len(tokens), whole)
            rows.put([num + node for node in nodes], outputs)
        return rows.stacked(wanted.first)

    def _extend(
        self, held: Held, text: list[int], num: int, wanted: CallRequest
    ) -> tuple[Tensor, ...]:
        """Outputs of the last `num` tokens of a text; the tokens before them are in the cache.

        One pass, or several if the rotary tables differ.
        """
        rope = self._rope
        if rope is None:
            outputs = self._call(text[held.length :], held.cache, wanted)
            held.length += num
            return outputs
        parts = []
        for size in rope.pass_sizes(held.length, num):
            stop = held.length + size
            is_late = stop > rope.switch
            if is_late and rope.recomputes and held.length and not held.is_late:
                held.cache = self.cache.new()
                outputs = self._call(text[:stop], held.cache, wanted._replace(first=0))
                outputs = tuple(part[-size:] for part in outputs)
            else:
                outputs = self._call(text[held.length : stop], held.cache, wanted._replace(first=0))
            held.length, held.is_late = stop, held.is_late or is_late
            parts.append(outputs)
        return tuple(torch.cat(column) for column in zip(*parts, strict=True))

    def _full(self, work: Work, wanted: CallRequest) -> tuple[Tensor, ...]:
        """Each path with all tokens before it."""
        before, num = [*work.slot.tokens, *work.pending], len(work.pending)
        rows = PathRows(work)
        if num:
            outputs = self._call(before, None, wanted._replace(first=len(before) - num))
            rows.put(range(num), [part[len(before) - num :] for part in outputs])
        for nodes, tokens in rows.leaf_paths():
            outputs = self._call(before + tokens, None, wanted._replace(first=len(before)))
            rows.put([num + node for node in nodes], [part[len(before) :] for part in outputs])
        return rows.stacked(wanted.first)

    def logits_of(self, tokens: list[int], **options: Any) -> Tensor:
        """Logits [n, V] of a plain pass over `tokens`, without a cache."""
        return self._call(tokens, None, CallRequest(), **options)[1]

    def _call(
        self, tokens: list[int], cache: Any, wanted: CallRequest, **options: Any
    ) -> tuple[Tensor, ...]:
        """Hidden rows [n, d] after the last norm (or a placeholder) and logits [n, V].

        Then the residual stream [n, d] after each requested layer, and attention weights
        [n, layers, heads, cells]. Logits of rows before wanted.first are placeholders.
        """
        model, num = self.model, len(tokens)
        options["use_cache"] = cache is not None
        if cache is not None:
            options[self._cache_name] = cache
        if wanted.hidden or wanted.taps:
            options["output_hidden_states"] = True
        if self._can_trim:
            options["logits_to_keep"] = max(num - wanted.first, 1) if wanted.logits else 1
        if wanted.attention:
            options["output_attentions"] = True
        ids = to_device(torch.tensor([tokens]), self.device)
        with ExitStack() as stack:
            stack.enter_context(eval_mode(model))
            if wanted.attention:
                stack.enter_context(eager_attention(model))
            if self._rope is not None:
                stack.enter_context(self._rope.fresh())
            out = model(input_ids=ids, return_dict=True, **options)
        logits = out.logits[0]
        if len(logits) < num:
            logits = torch.cat([logits[:1].expand(num - len(logits), -1), logits])
        found = [out.hidden_states[-1][0] if wanted.hidden else logits, logits]
        found += [out.hidden_states[layer + 1][0] for layer in wanted.taps]
        if wanted.attention:
            found.append(torch.stack([w[0] for w in out.attentions]).permute(2, 0, 1, 3))
        return tuple(found)

    def _find_far_limit(self, declared: int | None) -> None:
        """Limits the context, or the drafts, of code that serves no position beyond `declared`."""
        if self._rope is not None or self.max_context != UNLIMITED or declared is None:
            return
        effect = effect_of_far_position(self, declared)
        if effect is FarPosition.MISSING:
            self.max_context = self.context = declared
        elif effect is FarPosition.CHANGES_ROWS:
            self._rope = LengthRope([], 0, grows=True, recomputes=False)

    def _set_way(self, way: str) -> None:
        config = None if way == "tree" else self.model.config
        self.way = way
        switch = None if self._rope is None else self._rope.switch
        self.cache: Caches = Caches(self.max_seqs, config, can_move=way == "tree", switch=switch)
        # paths are computed separately, so their attention has no common cells
        self.gives = GIVES | {"attention"} if way == "tree" else GIVES
        self.num_rows = 0

    def _choose_way(self, text: Any) -> None:
        """Selects the first way that agrees with plain passes. Raises ModelError if none does."""
        windowed = any(getattr(text, name, None) for name in WINDOWS)
        problems = ["tree: the model has windowed attention"] if windowed else []
        if self._rope is not None:
            problems.append("tree: rotary tables depend on the length of a pass")
        # one mask cannot serve different windows, one pass cannot have different tables
        for way in WAYS[1:] if problems else WAYS:
            self._set_way(way)
            try:
                check_tree_passes(self)
                self._set_way(way)
                return
            except Exception as cause:  # try the next way
                first = str(cause).strip().partition("\n")[0]
                problems.append(f"{way}: {first or type(cause).__name__}")
        raise ModelError(
            f"{type(self.model).__name__} cannot be run step by step ({'; '.join(problems)})"
        )
