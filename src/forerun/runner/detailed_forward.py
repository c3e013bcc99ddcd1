"""`Runner.forward` for batches that need more than logits and hidden rows of the tree.

Law: a pass over some layers (`layers`) commits nothing. Its cells stay after the committed ones, in
those layers, until the next pass of the sequence; `Tree.resume` continues from them.
"""

from __future__ import annotations

from collections.abc import Sequence as Many
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from forerun.core.forward_batch import ForwardBatch, fields, missing
from forerun.core.records import PromptRows, Rows, Sequence
from forerun.core.tree import Resume, Tree
from forerun.errors import CapacityError, ConfigError
from forerun.runner.forward_batch import (
    MAX_JOINED_TOKENS,
    DetailedWork,
    PassRequest,
    Work,
    WorkRows,
)

if TYPE_CHECKING:
    from forerun.runner.base import Runner
    from forerun.runner.slots import Slot


def detailed_rows(runner: Runner, batch: ForwardBatch, leads: Many[int]) -> list[Rows]:
    """Rows of the batch; sequence i uses those of sequence leads[i]."""
    return DetailedForward(runner, batch).rows(leads)


class DetailedForward:
    """One forward pass of a batch, with prefill passes for prompt rows."""

    def __init__(self, runner: Runner, batch: ForwardBatch) -> None:
        check(runner, batch)
        self.runner, self.batch, self.fields = runner, batch, fields(batch.needs)
        layers = batch.layers
        self.layers = None if layers is None else tuple(layers)
        # a later pass may resume after these layers if they are a prefix of the model
        is_prefix = layers is not None and tuple(layers) == tuple(range(len(layers)))
        self.prefix = len(self.layers or ()) if is_prefix else 0

    def rows(self, leads: Many[int]) -> list[Rows]:
        """The rows of every sequence."""
        own = sorted(set(leads))
        parts: dict[int, list[WorkRows]] = {i: [] for i in own}
        most = self.runner.chunk if len(own) == 1 else MAX_JOINED_TOKENS
        works = {i: self._work(i, parts[i], most) for i in own}
        request = PassRequest(
            self.layers, self.fields.taps, True, self.fields.prompt_logits and self.layers is None
        )
        found = self.runner.run_detailed(list(works.values()), request)
        if self.layers is None:
            for work in works.values():
                work.keep()
        else:
            for work in works.values():
                work.keep_partial(self.prefix)
        for i, part in zip(works, found, strict=True):
            parts[i].append(part)
        return [self._assembled(i, lead, parts[lead]) for i, lead in enumerate(leads)]

    def start(self, i: int) -> int | None:
        """Start of the wanted prompt rows of sequence i."""
        starts = self.batch.prompt_rows
        return None if starts is None else starts[i]

    def queries(self, i: int) -> Many[int]:
        """Indices of the queries that return attention weights."""
        if not self.fields.attention:
            return ()
        given = self.batch.attention_queries
        return [len(self.batch.seqs[i].tokens) - 1] if given is None else given[i]

    def _work(self, i: int, parts: list[WorkRows], most: int) -> DetailedWork:
        """Computes the slot of sequence i except its last tokens, and describes the rest.

        most: tokens that run in the same pass as the tree.
        """
        seq, tree = self.batch.seqs[i], self.batch.trees[i]
        slot = self.runner.synced(seq, tree)
        root = len(seq.tokens) - 1
        queries = sorted(self.queries(i))
        start = min([root, *queries, *([] if (s := self.start(i)) is None else [s])])
        resume = None if queries or start < root else self._resume(slot, seq, tree)
        if len(slot.tokens) > start:
            slot.truncate(start)
        slot.clear_scratch()
        is_root_alone = self.layers is not None or resume is not None
        stop = root if is_root_alone else root + 1 - most
        self._prefill(slot, seq, start, stop, queries, parts)
        held = len(slot.tokens)
        return DetailedWork(
            slot,
            seq.tokens[held:],
            tree.tokens.tolist(),
            np.ascontiguousarray(tree.parents, np.int32),
            first_row=max(start - held, 0),
            queries=[index - held for index in queries if index >= held],
            resume=resume,
        )

    def _prefill(
        self, slot: Slot, seq: Sequence, start: int, stop: int, queries: Many[int],
        parts: list[WorkRows],
    ) -> None:  # fmt: skip
        """Computes tokens before `stop` in chunks; adds rows from `start` on to `parts`."""
        f, chunk = self.fields, self.runner.chunk
        request = PassRequest(None, f.taps, f.prompt_logits, f.prompt_logits)
        while len(slot.tokens) < stop:
            at = len(slot.tokens)
            end = min(at + chunk, stop if at >= start else min(start, stop))
            if end <= start:  # nothing of these rows is wanted
                self.runner.run([Work(slot, seq.tokens[at:end])], frozenset())
                continue
            asked = [index - at for index in queries if at <= index < end]
            work = DetailedWork(slot, seq.tokens[at:end], queries=asked)
            parts += self.runner.run_detailed([work], request)
            work.keep()

    def _resume(self, slot: Slot, seq: Sequence, tree: Tree) -> Resume | None:
        """The tree's resume, if the slot still has the cells of its pass."""
        resume, partial = tree.resume, slot.partial
        if resume is None or partial is None or len(slot.tokens) != len(seq.tokens) - 1:
            return None
        known = len(resume.rows) - 1
        held = partial.nodes[:known], partial.parents[:known]
        is_same = (
            partial.root == seq.tokens[-1]
            and 0 <= known <= min(len(partial.nodes), len(tree))
            and held == (tree.tokens[:known].tolist(), tree.parents[:known].tolist())
        )
        is_known = resume.layer <= partial.num_layers
        has_taps = all(layer >= resume.layer - 1 for layer in self.fields.taps)
        return resume if is_same and is_known and has_taps else None

    def _assembled(self, i: int, lead: int, parts: list[WorkRows]) -> Rows:
        """`Rows` of sequence i from the passes over its lead's prompt and tree."""
        seq, tree = self.batch.seqs[i], self.batch.trees[i]
        last, count = parts[-1], len(tree) + 1
        total = len(self.batch.trees[lead]) + 1  # the lead may have a tree when i has none
        ids = torch.tensor([seq.tokens[-1], *tree.tokens.tolist()])
        mine = slice(len(last.hidden) - total, len(last.hidden) - total + count)
        at = len(last.logits) - total
        logits: Tensor | np.ndarray = last.logits[at : at + count]
        if isinstance(logits, Tensor) and logits.is_cpu and logits.dtype is torch.float32:
            logits = logits.numpy()  # verifiers read it in place
        rows = Rows(
            logits,
            last.hidden[mine] if self.fields.hidden else None,
            taps={n: x[mine] for n, x in last.taps.items()} if self.fields.taps else None,
            attention=self._attention(i, lead, parts) if self.fields.attention else None,
            embeddings=self.runner.embed(ids) if self.fields.embeddings else None,
            prompt=self._prompt(i, lead, parts),
        )
        if lead != i:
            rows.lead = lead
            self.runner.cache.follow(seq)
        return rows

    def _prompt(self, i: int, lead: int, parts: list[WorkRows]) -> PromptRows | None:
        """Rows before the root, from all passes."""
        start = self.start(i)
        if start is None:
            return None
        tokens, total = self.batch.seqs[i].tokens, len(self.batch.trees[lead]) + 1
        # queries may start before `prompt_rows`, so the passes have more rows
        num, f = len(tokens) - 1 - start, self.fields

        def joined(found: list[Tensor]) -> Tensor:
            found[-1] = found[-1][: len(found[-1]) - total]
            whole = torch.cat(found)
            return whole[len(whole) - num :]

        ids = torch.tensor(tokens[start:-1], dtype=torch.int64)
        return PromptRows(
            start,
            joined([part.logits for part in parts]) if f.prompt_logits else None,
            joined([part.hidden for part in parts]) if f.hidden else None,
            {n: joined([part.taps[n] for part in parts]) for n in f.taps} if f.taps else None,
            self.runner.embed(ids) if f.embeddings else None,
        )

    def _attention(self, i: int, lead: int, parts: list[WorkRows]) -> dict[int, Tensor]:
        """Weights by layer, [heads, queries, tokens and nodes]; zero for cells not seen."""
        cells = len(self.batch.seqs[lead].tokens) + len(self.batch.trees[lead])
        found: dict[int, list[Tensor]] = {}
        for part in parts:
            for layer, weights in part.attention.items():
                padded = torch.nn.functional.pad(weights, (0, cells - weights.shape[2]))
                found.setdefault(layer, []).append(padded)
        order = np.argsort(np.argsort(self.queries(i), kind="stable"), kind="stable").tolist()
        return {layer: torch.cat(many, 1)[:, order] for layer, many in found.items()}


def check(runner: Runner, batch: ForwardBatch) -> None:
    """Raises ConfigError for needs that the runner lacks or that cannot be combined."""
    if lacks := [*missing(batch.needs, runner.gives), *sorted(batch.kinds - runner.gives)]:
        raise ConfigError(
            f"{type(runner).__name__} gives no {', '.join(dict.fromkeys(lacks))}; use a model of a "
            "family that forerun runs itself (`forerun doctor` lists them)"
        )
    wanted, count = fields(batch.needs), runner.num_layers
    run = range(count) if batch.layers is None else tuple(batch.layers)
    if not run or list(run) != sorted(set(run)) or run[0] < 0 or run[-1] >= count:
        raise ConfigError(f"layers={batch.layers} must be ascending and within 0 .. {count - 1}")
    if outside := sorted(set(wanted.taps) - set(run)):
        raise ConfigError(f"taps name layer {outside[0]}, and the pass runs layers {run}; drop it")
    _check_indexes(batch)
    if batch.layers is not None and (batch.prompt_rows or batch.attention_queries):
        raise ConfigError(
            "a pass over some layers has rows of the root and the tree only; request prompt rows "
            "and attention of earlier tokens in a pass over all layers"
        )


def _check_indexes(batch: ForwardBatch) -> None:
    for i, (seq, tree) in enumerate(zip(batch.seqs, batch.trees, strict=True)):
        start = None if batch.prompt_rows is None else batch.prompt_rows[i]
        if start is not None and not 0 <= start < len(seq.tokens):
            raise ConfigError(
                f"prompt_rows={start} is no index of the {len(seq.tokens)} tokens of sequence {i}"
            )
        queries = () if batch.attention_queries is None else batch.attention_queries[i]
        if not all(0 <= index < len(seq.tokens) + len(tree) for index in queries):
            raise ConfigError(
                f"attention_queries={list(queries)} must be within 0 .. "
                f"{len(seq.tokens) + len(tree) - 1} for sequence {i}"
            )


def check_positions(positions: np.ndarray, num_tokens: int, num_nodes: int, context: int) -> None:
    """Raises ConfigError unless there is one per token, CapacityError beyond the context."""
    if len(positions) > num_tokens or not len(positions) or positions.min() < 0:
        raise ConfigError(
            f"positions need one number of at least 0 for each of the first {num_tokens} tokens, "
            f"got {len(positions)}"
        )
    top = int(positions[-1]) + num_tokens - len(positions) + num_nodes
    if max(top, int(positions.max())) >= context:
        raise CapacityError(f"position {top} exceeds the context of {context} tokens")
