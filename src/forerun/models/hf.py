"""A Target for any causal LM of transformers; it computes sequence by sequence.

Three ways to compute a tree, tried at load in this order and compared with plain passes:
    tree   one pass over all nodes with a 4D mask; accepted cells are gathered in the cache
    paths  pending tokens on the cache, then every root-to-leaf path on a copy of it
    full   every path from the first token, without a cache
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from forerun.core.dice import SeededDice
from forerun.core.forward_batch import ForwardBatch
from forerun.core.records import Sequence
from forerun.core.sampling import Sampling
from forerun.core.tree import Tree, TreeBuilder
from forerun.errors import CapacityError, ConfigError, ModelError
from forerun.models.checkpoint import flaw
from forerun.models.hf_cache import Caches
from forerun.models.weight_update import update_module
from forerun.runner.base import Runner
from forerun.runner.forward_batch import DetailedWork, PassRequest, Work, WorkRows

WAYS = ("tree", "paths", "full")
WINDOWS = ("sliding_window", "attention_chunk_size", "attention_window_size", "window_size")
MAX_ROUNDING_ERROR = 1e-4  # relative, in the check at load
GIVES = frozenset({"hidden", "probes", "taps", "embeddings", "prompt_rows", "prompt_logits"})


class Asked(NamedTuple):
    """Outputs requested from a call of the model."""

    hidden: bool = False
    logits: bool = True  # of all rows
    taps: tuple[int, ...] = ()
    attention: bool = False


@contextmanager
def eager_attention(model: Any) -> Iterator[None]:
    """Sets an attention implementation that returns weights, within the context."""
    before = model.config._attn_implementation
    model.set_attn_implementation("eager")
    try:
        yield
    finally:
        model.set_attn_implementation(before)


class HFTarget(Runner):
    """A loaded transformers model as a Target. way: how it computes trees.

    Raises ModelError if a weight is NaN or infinite.
    """

    def __init__(
        self,
        model: Any,
        *,
        max_seqs: int = 16,
        context: int | None = None,
        way: str | None = None,
        reason: str = "",
    ) -> None:
        for name, weight in model.named_parameters():
            if found := flaw(weight.detach(), weight.dtype):
                raise ModelError(f"parameter {name} {found}")
        self.model, self.reason, self.max_seqs = model.eval(), reason, max_seqs
        self.device = model.device
        text = model.config.get_text_config()
        own = getattr(text, "max_position_embeddings", None) or 1 << 30
        self.context = own
        self.vocab_size = text.vocab_size
        self._can_trim = "logits_to_keep" in inspect.signature(model.forward).parameters
        if way is None:
            self._choose_way(text)
        else:
            self._set_way(way)
        self.context = min(context or own, own)
        self.num_layers = text.num_hidden_layers

    # cache tensors made in inference mode can only be changed in inference mode
    forward = torch.inference_mode()(Runner.forward)
    rows_at = torch.inference_mode()(Runner.rows_at)

    def memory_report(self) -> dict[str, int]:
        """Bytes of weights, caches, and logits kept for draft paths."""
        weights = sum(p.numel() * p.element_size() for p in self.model.parameters())
        return {
            "weights": weights,
            "kv cache": self.cache.nbytes,
            "scratch": self.kept_bytes(),
        }

    @torch.inference_mode()
    def run(self, works: list[Work], needs: frozenset[str]) -> tuple[Tensor, Tensor]:
        asked, parts = Asked("hidden" in needs, "logits" in needs), []
        for work in works:
            outputs = self._computed(work, asked)
            work.keep()
            parts.append([part[work.first :] for part in outputs])
        hidden, logits = (torch.cat(column) for column in zip(*parts, strict=True))
        return hidden, logits

    @torch.inference_mode()
    def run_detailed(self, works: list[DetailedWork], request: PassRequest) -> list[WorkRows]:
        last = self.num_layers - 1
        if last in request.taps:
            raise ConfigError(
                f"taps:{last} is the last layer, and transformers returns its rows only after the "
                "norm; use hidden, or an earlier layer"
            )
        found = []
        for work in works:
            asked = Asked(True, True, request.taps, bool(work.queries))
            outputs = self._computed(work, asked)
            hidden, logits, *rest = (part[work.first_row :] for part in outputs)
            taps = dict(zip(request.taps, rest, strict=False))
            start = 0 if request.has_prompt_logits else max(work.root - work.first_row, 0)
            logits = logits[start:] if request.has_logits else logits[:0]
            weights = outputs[-1][work.queries] if work.queries else None  # [q, layers, heads, n]
            by_layer = {} if weights is None else dict(enumerate(weights.permute(1, 2, 0, 3)))
            found.append(WorkRows(hidden, logits, taps, by_layer))
        return found

    def embed(self, ids: Tensor) -> Tensor:
        with torch.inference_mode():
            return F.embedding(ids.to(self.device), self.model.get_input_embeddings().weight)

    def update_weights(self, state: Mapping[str, Tensor]) -> None:
        with self.lock:
            update_module(self.model, state)
            self.cache.invalidate()

    def _computed(self, work: Work, asked: Asked) -> tuple[Tensor, ...]:
        """The outputs of `_call` for the rows of a work. Raises CapacityError if out of memory."""
        compute = {"tree": self._tree, "paths": self._paths, "full": self._full}[self.way]
        before = len(work.slot.tokens)
        try:
            outputs = compute(work, asked)
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

    def _tree(self, work: Work, asked: Asked) -> tuple[Tensor, ...]:
        """One pass over pending tokens and nodes; nodes attend to their ancestors."""
        span, held = work.span, self.cache.held(work.slot)
        held.cut(span.start)
        options: dict[str, Any] = {}
        if work.nodes:
            hidden = torch.from_numpy(~span.sees).to(self.device)  # type: ignore[operator]
            shape = (1, 1, span.num_rows, span.stop)
            mask = torch.zeros(shape, dtype=self.model.dtype, device=self.device)
            mask[..., span.base :].masked_fill_(hidden, torch.finfo(mask.dtype).min)
            options["attention_mask"] = mask
            options["position_ids"] = torch.from_numpy(span.positions).to(self.device)[None]
        outputs = self._call([*work.pending, *work.nodes], held.cache, asked, **options)
        held.length = span.stop
        return outputs

    def _paths(self, work: Work, asked: Asked) -> tuple[Tensor, ...]:
        """Pending tokens on the kept cache, then each path on a copy of it."""
        slot, num = work.slot, len(work.pending)
        held, rows = self.cache.held(slot), Gathered(work)
        if held.length > len(slot.tokens):  # tokens were removed
            held = self.cache.renew(slot)
        todo = [*slot.tokens, *work.pending][held.length :]
        if todo:
            outputs = self._call(todo, held.cache, asked)
            held.length += len(todo)
            rows.put(range(num), [part[len(todo) - num :] for part in outputs])
        for nodes, tokens in rows.leaf_paths():
            outputs = self._call(tokens, copy.deepcopy(held.cache), asked)
            rows.put([num + node for node in nodes], outputs)
        return rows.stacked()

    def _full(self, work: Work, asked: Asked) -> tuple[Tensor, ...]:
        """Each path with all tokens before it."""
        before, num = [*work.slot.tokens, *work.pending], len(work.pending)
        rows = Gathered(work)
        if num:
            outputs = self._call(before, None, asked)
            rows.put(range(num), [part[len(before) - num :] for part in outputs])
        for nodes, tokens in rows.leaf_paths():
            outputs = self._call(before + tokens, None, asked)
            rows.put([num + node for node in nodes], [part[len(before) :] for part in outputs])
        return rows.stacked()

    def _call(
        self, tokens: list[int], cache: Any, asked: Asked, **options: Any
    ) -> tuple[Tensor, ...]:
        """Hidden rows [n, d] after the last norm (or a placeholder) and logits [n, V].

        Then the residual stream [n, d] after each requested layer, and attention weights
        [n, layers, heads, cells].
        """
        if cache is None:
            options["use_cache"] = False
        else:
            options |= {"past_key_values": cache, "use_cache": True}
        if asked.hidden or asked.taps:
            options["output_hidden_states"] = True
        if not asked.logits and self._can_trim:
            options["logits_to_keep"] = 1
        ids = torch.tensor([tokens], device=self.device)
        if asked.attention:
            with eager_attention(self.model):
                out = self.model(input_ids=ids, output_attentions=True, **options)
        else:
            out = self.model(input_ids=ids, **options)
        logits = out.logits[0]
        if len(logits) < len(tokens):  # placeholder rows
            logits = logits.expand(len(tokens), -1)
        found = [out.hidden_states[-1][0] if asked.hidden else logits, logits]
        found += [out.hidden_states[layer + 1][0] for layer in asked.taps]
        if asked.attention:
            found.append(torch.stack([w[0] for w in out.attentions]).permute(2, 0, 1, 3))
        return tuple(found)

    def _set_way(self, way: str) -> None:
        config = None if way == "tree" else self.model.config
        self.way = way
        self.cache: Caches = Caches(self.max_seqs, config, can_move=way == "tree")
        # paths are computed separately, so their attention has no common cells
        self.gives = GIVES | {"attention"} if way == "tree" else GIVES
        self.num_rows = 0

    def _choose_way(self, text: Any) -> None:
        """Selects the first way that agrees with plain passes. Raises ModelError if none does."""
        windowed = any(getattr(text, name, None) for name in WINDOWS)
        problems = ["tree: the model has windowed attention"] if windowed else []
        for way in WAYS[1:] if windowed else WAYS:  # one mask cannot serve different windows
            self._set_way(way)
            try:
                self._check_way()
                self._set_way(way)
                return
            except Exception as cause:  # try the next way
                first = str(cause).strip().partition("\n")[0]
                problems.append(f"{way}: {first or type(cause).__name__}")
        raise ModelError(
            f"{type(self.model).__name__} cannot be run step by step ({'; '.join(problems)})"
        )

    @torch.inference_mode()
    def _check_way(self) -> None:
        """Compares two tree passes, the second after a branch was accepted, with plain passes."""
        tokens = np.random.default_rng(0).integers(0, self.vocab_size, 16).tolist()
        tree = _probe_tree(tokens[8:])
        seq = Sequence(tokens[:8], 8, Sampling(), SeededDice(0), limit=8)
        gap_share = 0.3 if torch.finfo(self.model.dtype).bits < 32 else 0.0  # of half precision
        for _ in range(2):
            rows = self.forward(ForwardBatch([seq], [tree]))[0]
            # a pass without a tree mask: its error is the scale of a wrong result
            unmasked = self._call(seq.tokens + tree.tokens.tolist(), None, Asked())[1]
            for node in range(-1, len(tree)):
                plain = self._call(seq.tokens + tree.path(node), None, Asked())[1][-1].float()
                error = float((rows.logits[node + 1].float() - plain).abs().max())
                gap = float((unmasked[len(seq.tokens) + node].float() - plain).abs().max())
                bound = max(MAX_ROUNDING_ERROR * float(plain.abs().max()), gap_share * gap)
                if not error <= bound:
                    raise ModelError(f"rows differ by {error:.2g} from plain passes")
            seq.tokens += [*tree.path(4), tokens[0]]


class Gathered:
    """Collects the rows of a work while its paths are computed one after another."""

    def __init__(self, work: Work) -> None:
        old = [] if work.pending else work.slot.nodes
        self._tokens = [*old, *work.nodes]
        self._parents = [*([] if work.pending else work.slot.parents), *work.new_parents]
        self._first = len(old)  # nodes before it were computed earlier
        self._rows: list[list[Tensor] | None] = [None] * work.num_rows

    def put(self, rows: Any, outputs: Any) -> None:
        """Sets rows; negative indices belong to earlier nodes and are skipped."""
        for at, row in enumerate(rows):
            if row >= 0:
                self._rows[row] = [part[at] for part in outputs]

    def leaf_paths(self) -> Iterator[tuple[list[int], list[int]]]:
        """Per new leaf: its path as indices of new nodes (earlier nodes: negative), its tokens."""
        inner = set(self._parents[self._first :])
        for leaf in range(self._first, len(self._tokens)):
            if leaf in inner:
                continue
            path, node = [], leaf
            while node >= 0:
                path.append(node)
                node = self._parents[node]
            path.reverse()
            numbers = [n - self._first if n >= self._first else -(1 << 30) for n in path]
            yield numbers, [self._tokens[n] for n in path]

    def stacked(self) -> tuple[Tensor, ...]:
        """The outputs of `_call` for all rows."""
        return tuple(map(torch.stack, zip(*self._rows, strict=True)))  # type: ignore[arg-type]


def _probe_tree(tokens: list[int]) -> Tree:
    """Two branches with siblings, 7 nodes; node 4 is on the second branch."""
    builder = TreeBuilder()
    for token, parent in zip(tokens[:7], (-1, -1, 0, 0, 1, 2, 4), strict=True):
        builder.add(token, parent)
    return builder.build()
