"""Base class of runners: chooses the rows of a forward pass, given the cells in the slots.

The rows of a sequence in a pass are its pending tokens (committed, not yet computed) and its tree
nodes. Logits are computed for the last pending token, which is the root, and for the nodes.

Samples of a prompt start with the same tokens, which are computed once: a sequence gets a slot only
when its text or its tree differs from that of the others.
"""

from __future__ import annotations

import copy
from abc import abstractmethod
from collections.abc import Sequence as Many

import numpy as np
import torch
from torch import Tensor

from forerun.core.forward_batch import ForwardBatch
from forerun.core.growing import Path
from forerun.core.records import Rows, Sequence, Verdict
from forerun.core.roles import Target
from forerun.core.tree import Tree
from forerun.errors import CapacityError, ConfigError
from forerun.runner.detailed_forward import check_positions, detailed_rows
from forerun.runner.forward_batch import (
    MAX_JOINED_TOKENS,
    DetailedWork,
    PassRequest,
    Work,
    WorkRows,
    warm_up,
)
from forerun.runner.slots import Slot, Slots

CHUNK = 512  # rows of a prefill pass
LOGITS: frozenset[str] = frozenset({"logits"})
HIDDEN: frozenset[str] = frozenset({"hidden"})
NOTHING: frozenset[str] = frozenset()
PLAIN = frozenset({"hidden", "probes"})  # needs without a detailed pass


class Runner(Target):
    """Rows, slots and paths, independent of how a pass is computed."""

    cache: Slots
    num_layers: int
    chunk = CHUNK
    version = 0  # version of the weights that computed the cells
    num_rows = 0  # rows computed so far, with prefill
    keeps_hidden = False  # whether `rows_at` also keeps hidden rows, for `hidden_at`

    @abstractmethod
    def run(self, works: list[Work], needs: frozenset[str]) -> tuple[Tensor, Tensor | np.ndarray]:
        """Hidden rows [n, d] and logits [n, V] of the wanted rows of all works, in order.

        Outputs that are not in `needs` may be empty. Calls `Work.keep` on each computed work.
        """

    def warm_up(self) -> None:
        warm_up()

    def twin(self) -> Runner:
        found = copy.copy(self)  # shares lock and buffers
        found.cache, found.num_rows = self.cache.empty(), 0
        return found

    def forward(self, batch: ForwardBatch) -> list[Rows]:
        """Rows of the root and of every node, with the further outputs that the batch needs.

        Raises CapacityError if a sequence with its tree exceeds the context, or memory runs out.
        """
        if self.version != self.weights_version:  # updated through another runner of the same model
            self.forget_cells()
        if batch.positions is not None:
            self._set_positions(batch)
        is_plain = batch.layers is None and batch.kinds <= PLAIN
        return self._plain(batch) if is_plain else detailed_rows(self, batch, self._owners(batch))

    def _plain(self, batch: ForwardBatch) -> list[Rows]:
        """Logits and hidden rows of roots and nodes, in one pass of the fastest decoder."""
        seqs, trees, needs = batch.seqs, batch.trees, batch.needs
        leads = self._leads(seqs, trees)
        own = [i for i, lead in enumerate(leads) if lead == i]
        works = [self._tree_work(seqs[i], trees[i], len(own)) for i in own]
        hidden, logits = self.run(works, needs | LOGITS)
        if isinstance(logits, Tensor) and logits.is_cpu and logits.dtype is torch.float32:
            logits = logits.numpy()  # one conversion per pass
        has_hidden, found, at = "hidden" in needs, [], 0
        firsts: list[int] = []
        for i, (tree, lead) in enumerate(zip(trees, leads, strict=True)):
            firsts.append(at if lead == i else firsts[lead])
            part = slice(firsts[i], firsts[i] + 1 + len(tree))
            found.append(Rows(logits[part], hidden[part] if has_hidden else None))
            if lead != i:
                found[i].lead = lead
                self.cache.follow(seqs[i])
            at = max(at, part.stop)
        return found

    def run_detailed(self, works: list[DetailedWork], request: PassRequest) -> list[WorkRows]:
        """Wanted rows of each work. Does not call `Work.keep`."""
        raise ConfigError(f"{type(self).__name__} computes logits and hidden rows only")

    def embed(self, ids: Tensor) -> Tensor:
        """Rows [n, d] of the input embedding matrix for token ids int64 [n], unscaled."""
        raise ConfigError(f"{type(self).__name__} gives no embeddings")

    @property
    def weights_version(self) -> int:
        """Number of weight updates of the model."""
        return 0

    def forget_cells(self) -> None:
        """Drops all cells after a weight update."""
        self.cache.invalidate()
        self.version = self.weights_version

    def _set_positions(self, batch: ForwardBatch) -> None:
        assert batch.positions is not None
        if "positions" not in self.gives:
            raise ConfigError(f"{type(self).__name__} takes no positions; leave them out")
        for seq, tree, positions in zip(batch.seqs, batch.trees, batch.positions, strict=True):
            if positions is not None:
                check_positions(positions, len(seq.tokens), len(tree), self.context)
                self.synced(seq, tree).set_positions(np.asarray(positions, np.int64))

    def _owners(self, batch: ForwardBatch) -> list[int]:
        """Like `_leads`, for sequences that may need different rows."""
        is_own = batch.attention_queries is not None or batch.layers is not None
        if is_own or any(tree.resume is not None for tree in batch.trees):
            return list(range(len(batch.seqs)))
        starts = batch.prompt_rows or [None] * len(batch.seqs)
        leads = self._leads(batch.seqs, batch.trees)
        return [lead if starts[i] == starts[lead] else i for i, lead in enumerate(leads)]

    def commit(self, seqs: Many[Sequence], trees: Many[Tree], verdicts: Many[Verdict]) -> None:
        """Does nothing: the next pass finds the accepted nodes by their tokens."""

    def release(self, seq: Sequence) -> None:
        self.cache.release(seq)

    @property
    def num_held(self) -> int:
        return self.cache.num_held

    def check_room(self, seqs: int, tokens: int, taken: int = 0) -> int:
        return self.cache.check_room(seqs, tokens, taken)

    def reused(self, seq: Sequence) -> int:
        return self.cache.reused.get(seq, 0)

    def num_unread(self, seq: Sequence) -> int:
        """Tokens of a text that are not in its slot."""
        return len(seq.tokens) - self.cache.known(seq)

    def rows_at(self, requests: Many[tuple[Sequence, Path]]) -> Tensor:
        """Logits [n, V] after seq.tokens + path; computes only new nodes.

        Raises CapacityError as `forward` does.
        """
        if self.version != self.weights_version:
            self.forget_cells()
        paths_of: dict[Sequence, list[Path]] = {}
        for seq, path in requests:
            paths_of.setdefault(seq, []).append(path)
        works = {seq: self._path_work(seq, paths) for seq, paths in paths_of.items()}
        todo = [work for work in works.values() if work.num_rows]
        if todo:
            hidden, logits = self.run(todo, LOGITS | HIDDEN if self.keeps_hidden else LOGITS)
            _keep(todo, torch.as_tensor(logits), "logits")
            if self.keeps_hidden:
                _keep(todo, hidden, "hidden")
        rows = [_known(works[seq].slot, path) for seq, path in requests]
        if len({row.device for row in rows}) > 1:  # small logits are on the host
            rows = [row.float().cpu() for row in rows]
        return torch.stack(rows)

    def hidden_at(self, seq: Sequence, path: Path) -> Tensor:
        """Hidden row [d] after seq.tokens + path; needs a call of `rows_at` in this step."""
        slot = self.cache.sync(seq)
        return slot.hidden[_node(slot, path)]

    def kept_bytes(self) -> int:
        """Bytes of logits kept for draft paths."""
        rows = [row for slot in self.cache.slots for row in slot.logits.values()]
        stores = {row.untyped_storage().data_ptr(): row.untyped_storage().nbytes() for row in rows}
        return sum(stores.values())

    def _leads(self, seqs: Many[Sequence], trees: Many[Tree]) -> list[int]:
        """For each sequence the index of the one that computes its rows, mostly its own.

        A sequence without a slot uses the rows of the first one of its tenant with the same text,
        if its tree is empty or the same; the root's row comes first.
        """
        leads = list(range(len(seqs)))
        if len(seqs) == 1 or all(map(self.cache.holds, seqs)):
            return leads
        texts: dict[tuple[str, int, int], list[int]] = {}  # by tenant, length and last token
        for i, (seq, tree) in enumerate(zip(seqs, trees, strict=True)):
            key = seq.cells_owner, len(seq.tokens), seq.tokens[-1]
            alike = texts.setdefault(key, [])
            if not self.cache.holds(seq):
                for lead in alike:
                    is_tree = not len(tree) or tree.has_same_nodes(trees[lead])
                    if is_tree and seq.tokens == seqs[lead].tokens:
                        leads[i] = lead
                        break
            if leads[i] == i and not self.cache.is_altered(seq):
                alike.append(i)
        return leads

    def _tree_work(self, seq: Sequence, tree: Tree, num_works: int) -> Work:
        """All rows of a tree pass; at least the last token is pending."""
        slot = self.synced(seq, tree)
        if len(slot.tokens) == len(seq.tokens):
            slot.truncate(len(seq.tokens) - 1)
        slot.clear_scratch()
        self._prefill(slot, seq, MAX_JOINED_TOKENS if num_works > 1 else CHUNK)
        pending = seq.tokens[len(slot.tokens) :]
        if not len(tree):
            return Work(slot, pending)
        parents = np.ascontiguousarray(tree.parents, np.int32)
        return Work(slot, pending, tree.tokens.tolist(), parents)

    def _path_work(self, seq: Sequence, paths: list[Path]) -> Work:
        """Pending tokens and new nodes of one sequence; no rows if all are computed."""
        slot = self.synced(seq, max(paths, key=len))
        if len(slot.tokens) == len(seq.tokens) and -1 not in slot.logits:
            slot.truncate(len(seq.tokens) - 1)  # `forward` computed these cells without logits
        self._prefill(slot, seq, MAX_JOINED_TOKENS)
        pending = seq.tokens[len(slot.tokens) :]
        if pending:
            slot.clear_scratch()
        nodes, parents = _missing(slot, paths)
        return Work(slot, pending, nodes, np.array(slot.parents + parents, dtype=np.int32))

    def synced(self, seq: Sequence, draft: Tree | Path) -> Slot:
        """The slot of a sequence, synchronised. Raises CapacityError beyond the context."""
        length = len(seq.tokens)
        if length + len(draft) > self.context:  # a tree may have fewer levels than nodes
            depth = int(draft.depths.max(initial=0)) if isinstance(draft, Tree) else len(draft)
            if length + depth > self.context:
                what = f"{length} tokens" + (f" and a tree of depth {depth}" if depth else "")
                raise CapacityError(
                    f"the sequence has {what}, but the context is {self.context}; shorten the "
                    "prompt, or load the model with a larger `context` if it supports one"
                )
        return self.cache.sync(seq)

    def _prefill(self, slot: Slot, seq: Sequence, most: int) -> None:
        """Computes many pending tokens in chunks, except the last one."""
        start, stop = len(slot.tokens), len(seq.tokens) - 1
        if stop - start < most:
            return
        for at in range(start, stop, CHUNK):
            self.run([Work(slot, seq.tokens[at : min(at + CHUNK, stop)])], NOTHING)


def _missing(slot: Slot, paths: list[Path]) -> tuple[list[int], list[int]]:
    """Tokens and parents of the nodes that the paths need and the slot lacks."""
    new: dict[tuple[int, int], int] = {}
    for path in paths:
        node = -1
        for token in path:
            key = node, token
            found = slot.where.get(key)
            node = new.setdefault(key, len(slot.nodes) + len(new)) if found is None else found
    return [token for _, token in new], [parent for parent, _ in new]


def _known(slot: Slot, path: Path) -> Tensor:
    """The kept logits [V] after `path`."""
    return slot.logits[_node(slot, path)]


def _node(slot: Slot, path: Path) -> int:
    """The scratch node at the end of `path`."""
    node = -1
    for token in path:
        node = slot.where[node, token]
    return node


def _keep(works: list[Work], rows: Tensor, name: str) -> None:
    """Stores wanted rows of a pass in the slots, by node."""
    left = iter(rows.unbind(0))
    for work in works:
        total = len(work.slot.nodes)
        first = total - len(work.nodes) - bool(work.pending)
        getattr(work.slot, name).update({node: next(left) for node in range(first, total)})
