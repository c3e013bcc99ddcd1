"""The forward contract: every field of `Rows` against transformers.

For prefill, cached step, tree pass and a ragged batch, by torch and by our kernels.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence as Many
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from parity import branching, error, prompt, saved, sequence

from forerun.core.forward_batch import ForwardBatch, fields, missing
from forerun.core.records import Rows, Sequence
from forerun.core.tree import EMPTY, Tree, chain
from forerun.errors import CapacityError, ConfigError
from forerun.models.hf import HFTarget
from forerun.models.load import load_target
from forerun.runner.attention import TorchDecoder
from forerun.runner.base import CHUNK, Runner
from forerun.runner.model_runner import ModelRunner
from forerun.runner.native.decoder import NativeDecoder

FAMILIES = ("llama", "qwen3", "gemma2", "phi3", "gpt2")
TOLERANCE = 1e-4
ALL = frozenset({"hidden", "taps:0,1", "attention", "embeddings", "prompt_logits"})
TAPS = (0, 1)
Saved = tuple[Any, Path]


@pytest.fixture(scope="module", params=FAMILIES)
def family(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Saved:
    folder = tmp_path_factory.mktemp(request.param)
    return saved(request.param, folder), folder


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Saved:
    folder = tmp_path_factory.mktemp("llama")
    return saved("llama", folder, max_position_embeddings=2048), folder


def runner_of(folder: Path, kind: str = "torch") -> ModelRunner:
    """A runner with passes by torch, or by our kernels where they can."""
    runner = load_target(folder)
    assert isinstance(runner, ModelRunner)
    if kind == "torch":
        runner.decode = TorchDecoder(runner.model)
    return runner


@torch.inference_mode()
def reference(model: Any, tokens: list[int]) -> dict[str, torch.Tensor]:
    """Every field after every token, by one plain pass of transformers."""
    out = model(torch.tensor([tokens]), output_hidden_states=True, output_attentions=True)
    found = {"logits": out.logits[0], "hidden": out.hidden_states[-1][0]}
    found |= {f"taps {i}": out.hidden_states[i + 1][0] for i in TAPS}
    found |= {f"attention {i}": weights[0] for i, weights in enumerate(out.attentions)}
    found["embeddings"] = model.get_input_embeddings()(torch.tensor(tokens))
    return found


def raw_embeddings(model: Any, ids: Many[int]) -> torch.Tensor:
    """Rows of the embedding matrix, without the scale that gemma's module applies."""
    return model.get_input_embeddings().weight.detach()[list(ids)]


def check_tree(model: Any, seq: Sequence, tree: Tree, rows: Rows) -> None:
    """Each row of the root and the nodes against a plain pass over its path."""
    length = len(seq.tokens)
    for node in range(-1, len(tree)):
        path = seq.tokens + tree.path(node)
        want = reference(model, path)
        got = {"logits": rows.logits}
        if rows.hidden is not None:
            got["hidden"] = rows.hidden
        got |= {f"taps {i}": x for i, x in (rows.taps or {}).items()}
        for name, values in got.items():
            assert len(values) == len(tree) + 1
            assert error(values[node + 1], want[name][-1]) < TOLERANCE, (name, node)
        if rows.embeddings is not None:
            assert torch.equal(rows.embeddings[node + 1], raw_embeddings(model, path[-1:])[0])
    if rows.attention is not None:
        assert all(w.shape[2] == length + len(tree) for w in rows.attention.values())


def check_prompt(model: Any, seq: Sequence, rows: Rows, start: int) -> None:
    """Each prompt row against one plain pass."""
    want, found = reference(model, seq.tokens), rows.prompt
    assert found is not None and found.start == start
    stop = len(seq.tokens) - 1
    got = {"logits": found.logits, "hidden": found.hidden}
    got |= {f"taps {i}": x for i, x in (found.taps or {}).items()}
    for name, values in got.items():
        assert values is not None and len(values) == stop - start
        if stop > start:
            assert error(values, want[name][start:stop]) < TOLERANCE, name
    assert found.embeddings is not None
    assert torch.equal(found.embeddings, raw_embeddings(model, seq.tokens[start:stop]))


def check_attention(
    model: Any, seq: Sequence, tree: Tree, rows: Rows, queries: Many[int]
) -> None:  # fmt: skip
    """Weights of each query by cell: ancestors as in a plain pass over its path, the rest 0."""
    length = len(seq.tokens)
    assert rows.attention is not None
    for at, index in enumerate(queries):
        node = index - length
        path = seq.tokens[: index + 1] if node < 0 else seq.tokens + tree.path(node)
        want = reference(model, path)
        cells = list(range(min(index + 1, length)))
        while node >= 0:
            cells.append(length + node)
            node = int(tree.parents[node])
        cells[length:] = cells[length:][::-1]
        for layer, weights in rows.attention.items():
            row = weights[:, at]
            assert error(row[:, cells], want[f"attention {layer}"][:, -1]) < TOLERANCE
            others = [cell for cell in range(row.shape[1]) if cell not in cells]
            assert not row[:, others].any()


@pytest.mark.parametrize("kind", ["torch", "native"])
def test_every_field_of_a_ragged_batch(family: Saved, kind: str) -> None:
    """Prefill with prompt rows, then a cached tree pass, then a cached plain step."""
    model, folder = family
    runner = runner_of(folder, kind)
    seqs, starts = [sequence(prompt(n)) for n in (30, 5, 12)], [0, 2, 11]
    trees = [branching(1), EMPTY, chain([4, 5, 6])]
    queries = [[29, 3, 33], [4], [12, 11]]
    found = runner.forward(
        ForwardBatch(seqs, trees, ALL, prompt_rows=starts, attention_queries=queries)
    )
    for seq, tree, rows, start, asked in zip(seqs, trees, found, starts, queries, strict=True):
        check_tree(model, seq, tree, rows)
        check_prompt(model, seq, rows, start)
        check_attention(model, seq, tree, rows, asked)
    needs = ALL - {"prompt_logits"}
    for trees in ([branching(2), chain([9]), EMPTY], [EMPTY] * 3):
        for seq, tree in zip(seqs, trees, strict=True):
            seq.tokens += [*(tree.path(0) if len(tree) else []), 7]
        before = runner.num_rows
        found = runner.forward(ForwardBatch(seqs, trees, needs))
        assert runner.num_rows - before <= 3 * 4 + sum(map(len, trees)), "cells were kept"
        for seq, tree, rows in zip(seqs, trees, found, strict=True):
            check_tree(model, seq, tree, rows)
            check_attention(model, seq, tree, rows, [len(seq.tokens) - 1])
            assert rows.prompt is None


def test_native_passes_and_torch_passes_share_cells(family: Saved) -> None:
    """What one decoder wrote, the other reads, within one sequence."""
    model, folder = family
    runner, seq = runner_of(folder, "native"), sequence(prompt(20))
    for needs in ({"hidden"}, {"taps:0,1"}, set(), {"hidden", "taps:1"}):
        tree = branching(len(seq.tokens))
        (rows,) = runner.forward(ForwardBatch([seq], [tree], frozenset(needs)))
        check_tree(model, seq, tree, rows)
        seq.tokens += [*tree.path(5), 3]


def test_fields_are_absent_unless_asked(llama: Saved) -> None:
    runner, seq = runner_of(llama[1]), sequence(prompt(9))
    (rows,) = runner.forward(ForwardBatch([seq], [EMPTY]))
    given = (rows.hidden, rows.taps, rows.attention, rows.embeddings, rows.prompt, rows.probes)
    assert given == (None,) * 6
    (rows,) = runner.forward(ForwardBatch([seq], [EMPTY], frozenset({"taps:1"}), prompt_rows=[3]))
    assert rows.hidden is None and rows.taps is not None and rows.prompt is not None
    assert (rows.prompt.hidden, rows.prompt.logits) == (None, None)
    assert set(rows.prompt.taps or {}) == {1}


def test_prompt_rows_of_a_long_prompt(llama: Saved) -> None:
    """Several prefill passes; the cells of another sequence do not stand in for rows."""
    model, folder = llama
    runner = runner_of(folder, "native")
    seqs = [sequence(prompt(CHUNK + 40)) for _ in range(2)]
    runner.forward(ForwardBatch(seqs[:1], [EMPTY]))
    batch = ForwardBatch(seqs, [EMPTY] * 2, ALL - {"attention"}, prompt_rows=[None, 10])
    first, second = runner.forward(batch)
    assert first.prompt is None
    check_prompt(model, seqs[1], second, 10)
    check_tree(model, seqs[1], EMPTY, second)


def test_samples_of_a_prompt_share_prompt_rows(llama: Saved) -> None:
    model, folder = llama
    runner, seqs = runner_of(folder), [sequence(prompt(20)) for _ in range(3)]
    needs = frozenset({"hidden", "taps:0,1", "prompt_logits", "embeddings"})
    tree = branching()
    batch = ForwardBatch(seqs, [tree, EMPTY, EMPTY], needs, prompt_rows=[2, 2, 3])
    found = runner.forward(batch)
    assert [rows.lead for rows in found] == [None, 0, None]
    for seq, one, rows, start in zip(seqs, batch.trees, found, (2, 2, 3), strict=True):
        check_tree(model, seq, one, rows)
        check_prompt(model, seq, rows, start)


def test_what_native_lacks_is_said_once(
    llama: Saved, caplog: pytest.LogCaptureFixture
) -> None:  # fmt: skip
    runner, seq = runner_of(llama[1], "native"), sequence(prompt(9))
    if not isinstance(runner.decode, NativeDecoder):
        pytest.skip("our kernels are not built here")
    with caplog.at_level(logging.WARNING, logger="forerun"):
        for needs in ("hidden", "taps:1", "taps:0", "embeddings"):
            runner.forward(ForwardBatch([seq], [EMPTY], frozenset({needs})))
        runner.forward(ForwardBatch([seq], [EMPTY], frozenset({"taps:1", "attention"})))
    said = [record.getMessage() for record in caplog.records]
    assert [line.partition(":")[0] for line in said] == [
        "NativeDecoder has no taps",
        "NativeDecoder has no attention",
    ]


# some layers only, and going on from them


def cut(model: Any, layers: Many[int]) -> Any:
    """The transformers model with these layers only."""
    import copy

    small = copy.deepcopy(model)
    small.model.layers = torch.nn.ModuleList([small.model.layers[i] for i in layers])
    small.config.num_hidden_layers = len(layers)
    for at, layer in enumerate(small.model.layers):
        layer.self_attn.layer_idx = at
    return small


@pytest.mark.parametrize("kind", ["torch", "native"])
def test_the_first_layers_are_a_cut_model(llama: Saved, kind: str) -> None:
    model, folder = llama
    runner, seqs = runner_of(folder, kind), [sequence(prompt(n)) for n in (14, 6)]
    trees = [branching(3), EMPTY]
    needs = frozenset({"taps:0,1", "hidden"})
    for _ in range(2):
        found = runner.forward(ForwardBatch(seqs, trees, needs, layers=range(2)))
        for seq, tree, rows in zip(seqs, trees, found, strict=True):
            for node in range(-1, len(tree)):
                want = reference(cut(model, [0, 1]), seq.tokens + tree.path(node))
                assert error(rows.logits[node + 1], want["logits"][-1]) < TOLERANCE
                assert rows.hidden is not None and rows.taps is not None
                assert error(rows.hidden[node + 1], want["hidden"][-1]) < TOLERANCE
        whole = runner.forward(ForwardBatch(seqs, trees))  # nothing was committed wrongly
        for seq, tree, rows in zip(seqs, trees, whole, strict=True):
            check_tree(model, seq, tree, rows)
            seq.tokens += [*(tree.path(4) if len(tree) else []), 8]


@pytest.mark.parametrize("layers", [range(1), range(1, 3), range(2, 3), range(3)])
def test_native_runs_neighbouring_layers(
    family: Saved, layers: range, caplog: pytest.LogCaptureFixture
) -> None:
    """With the residual stream after the last of them, without torch and as torch does."""
    native, plain = runner_of(family[1], "native"), runner_of(family[1])
    if not isinstance(native.decode, NativeDecoder):
        pytest.skip("our kernels are not built here")
    seqs, trees = [sequence(prompt(n)) for n in (14, 6, 9)], [branching(3), EMPTY, chain([4])]
    needs = frozenset({"hidden", "embeddings", f"taps:{layers[-1]}"})
    with caplog.at_level(logging.WARNING, logger="forerun"):
        for run in (layers, None if len(layers) == 3 else layers):
            batch = ForwardBatch(seqs, trees, needs, layers=run)
            for one, other in zip(native.forward(batch), plain.forward(batch), strict=True):
                assert error(one.logits, other.logits) < TOLERANCE
                assert one.hidden is not None and other.hidden is not None
                assert error(one.hidden, other.hidden) < TOLERANCE
                assert one.taps is not None and other.taps is not None
                assert error(one.taps[layers[-1]], other.taps[layers[-1]]) < TOLERANCE
    assert not caplog.records
    for seq, rows in zip(seqs, native.forward(ForwardBatch(seqs, trees)), strict=True):
        assert error(rows.logits[0], reference(family[0], seq.tokens)["logits"][-1]) < TOLERANCE


def test_skipped_layers_read_the_whole_models_cells(llama: Saved) -> None:
    """As transformers with the middle layer taken out for the last token alone."""
    model, folder = llama
    seq = sequence(prompt(15))
    (rows,) = runner_of(folder).forward(ForwardBatch([seq], [EMPTY], layers=(0, 2)))
    from transformers import DynamicCache

    cache = DynamicCache()
    with torch.inference_mode():
        model(torch.tensor([seq.tokens[:-1]]), past_key_values=cache)
        layers = model.model.layers
        try:
            model.model.layers = torch.nn.ModuleList([layers[0], layers[2]])
            model.config.num_hidden_layers = 2
            want = model(torch.tensor([seq.tokens[-1:]]), past_key_values=cache).logits[0]
        finally:
            model.model.layers, model.config.num_hidden_layers = layers, 3
    assert error(rows.logits, want) < TOLERANCE


@pytest.mark.parametrize("kind", ["torch", "native"])
def test_resuming_equals_a_whole_pass(family: Saved, kind: str) -> None:
    """A self-drafter: level by level through two layers, then the rest of the model."""
    from dataclasses import replace

    from forerun.core.tree import Resume

    model, folder = family
    runner, seq = runner_of(folder, kind), sequence(prompt(11))
    tap = frozenset({"taps:1"})
    for step in range(2):
        small, large = chain([4, 5 + step]), chain([4, 5 + step, 6])
        (rows,) = runner.forward(ForwardBatch([seq], [small], tap, layers=range(2)))
        assert rows.taps is not None
        before = runner.num_rows
        more = replace(large, resume=Resume(2, rows.taps[1]))
        (rows,) = runner.forward(ForwardBatch([seq], [more], tap, layers=range(2)))
        assert runner.num_rows - before == 1, "the known rows are not computed again"
        assert rows.taps is not None
        before = runner.num_rows
        verified = replace(large, resume=Resume(2, rows.taps[1]))
        (rows,) = runner.forward(ForwardBatch([seq], [verified], tap))
        assert runner.num_rows == before
        check_tree(model, seq, large, rows)
        seq.tokens += [4, 5 + step, 9]


def test_resume_with_other_nodes_is_computed_again(llama: Saved) -> None:
    from dataclasses import replace

    from forerun.core.tree import Resume

    model, folder = llama
    runner, seq = runner_of(folder), sequence(prompt(11))
    (rows,) = runner.forward(
        ForwardBatch([seq], [chain([4, 5])], frozenset({"taps:1"}), layers=range(2))
    )
    assert rows.taps is not None
    stale = Resume(2, rows.taps[1])
    for tree in (replace(chain([4, 6]), resume=stale), replace(chain([4, 5]), resume=stale)):
        (rows,) = runner.forward(ForwardBatch([seq], [tree]))
        check_tree(model, seq, tree, rows)


# cells with positions of their own, and cells that are gone


@torch.inference_mode()
def placed(model: Any, tokens: list[int], positions: Many[int]) -> torch.Tensor:
    """transformers' logits with these positions."""
    return model(torch.tensor([tokens]), position_ids=torch.tensor([list(positions)])).logits[0]


@pytest.mark.parametrize("kind", ["torch", "native"])
def test_positions_of_a_prompt_with_gaps(family: Saved, kind: str) -> None:
    model, folder = family
    if getattr(model.config, "sliding_window", None):
        pytest.skip("transformers' windows count cells; ours count positions")
    runner, seq = runner_of(folder, kind), sequence(prompt(12))
    positions = np.array([0, 1, 2, 3, 9, 10, 14, 20, 21, 22, 30, 31])
    tree, start = branching(), 32
    (rows,) = runner.forward(ForwardBatch([seq], [tree], positions=[positions]))
    for node in range(-1, len(tree)):
        path = tree.path(node)
        want = placed(model, seq.tokens + path, [*positions, *range(start, start + len(path))])
        assert error(rows.logits[node + 1], want[-1]) < TOLERANCE
    seq.tokens += [*tree.path(5), 6]  # they go on by one, without being named again
    before = runner.num_rows
    (rows,) = runner.forward(ForwardBatch([seq], [EMPTY]))
    more = range(start, start + len(seq.tokens) - 12)
    want = placed(model, seq.tokens, [*positions, *more])
    assert error(rows.logits[0], want[-1]) < TOLERANCE
    assert runner.num_rows - before == 1, "accepted nodes keep their cells"
    other = sequence(list(seq.tokens))  # no other sequence takes over such cells
    (rows,) = runner.forward(ForwardBatch([other], [EMPTY]))
    assert error(rows.logits[0], reference(model, other.tokens)["logits"][-1]) < TOLERANCE


class HiddenCells:
    """transformers' eager attention of llama with cells masked per layer and KV head."""

    def __init__(self, model: Any, gone: dict[tuple[int, int], list[int]], first: int) -> None:
        self.model, self.gone, self.first = model, gone, first

    @torch.inference_mode()
    def __call__(self, tokens: list[int]) -> torch.Tensor:
        """Logits of all tokens, where those from `first` on do not see the cells."""
        import transformers.models.llama.modeling_llama as llama

        plain = llama.eager_attention_forward

        def masked(
            module: Any, q: Any, k: Any, v: Any, mask: Any, *more: Any, **options: Any
        ) -> Any:
            fold = q.shape[1] // k.shape[1]
            mask = mask.expand(-1, q.shape[1], -1, -1).clone()
            for (layer, head), cells in self.gone.items():
                if layer == module.layer_idx:
                    heads = slice(head * fold, (head + 1) * fold)
                    mask[:, heads, self.first :, cells] = -torch.inf
            return plain(module, q, k, v, mask, *more, **options)

        from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

        ALL_ATTENTION_FUNCTIONS["masked"] = masked
        self.model.config._attn_implementation = "masked"
        try:
            mask = torch.full((len(tokens), len(tokens)), -torch.inf).triu(1)[None, None]
            return self.model(torch.tensor([tokens]), attention_mask=mask).logits[0]
        finally:
            self.model.config._attn_implementation = "eager"
            del ALL_ATTENTION_FUNCTIONS["masked"]


@pytest.mark.parametrize("kind", ["torch", "native"])
def test_dropped_cells_equal_a_masked_reference(llama: Saved, kind: str) -> None:
    model, folder = llama
    runner, seq, tree = runner_of(folder, kind), sequence(prompt(16)), branching()
    runner.forward(ForwardBatch([seq], [EMPTY]))
    seq.tokens += [5]
    gone = {(0, 0): [0, 3, 4], (1, 1): [2, 15], (2, 0): list(range(1, 12)), (2, 1): [7]}
    for (layer, head), cells in gone.items():
        keep = np.ones(16, bool)
        keep[cells] = False
        runner.drop_cells(seq, layer, head, keep)
    hidden = HiddenCells(model, gone, 16)
    for needs in (frozenset[str](), frozenset({"taps:1"})):
        (rows,) = runner.forward(ForwardBatch([seq], [tree], needs))
        for node in range(-1, len(tree)):
            want = hidden(seq.tokens + tree.path(node))[-1]
            assert error(rows.logits[node + 1], want) < TOLERANCE
            plain = reference(model, seq.tokens + tree.path(node))["logits"][-1]
            assert error(rows.logits[node + 1], plain) > 100 * TOLERANCE
        seq.tokens += [*tree.path(4), 7]
    row = runner.rows_at([(seq, (9,))])[0]
    assert error(row, hidden([*seq.tokens, 9])[-1]) < TOLERANCE
    runner.release(seq)
    other = sequence(list(seq.tokens))
    (rows,) = runner.forward(ForwardBatch([other], [EMPTY]))
    assert error(rows.logits[0], reference(model, other.tokens)["logits"][-1]) < TOLERANCE


def test_altered_cells_are_not_lent(llama: Saved) -> None:
    """A sequence of the same text has rows of its own, by the plain law."""
    model, folder = llama
    runner, seq = runner_of(folder), sequence(prompt(16))
    runner.forward(ForwardBatch([seq], [EMPTY]))
    runner.drop_cells(seq, 1, 0, np.arange(16) > 9)
    seqs = [seq, *(sequence(prompt(16)) for _ in range(2))]
    found = runner.forward(ForwardBatch(seqs, [EMPTY] * 3))
    assert [rows.lead for rows in found] == [None, None, 1]
    want = reference(model, seq.tokens)["logits"][-1]
    assert [error(rows.logits[0], want) < TOLERANCE for rows in found] == [False, True, True]


def test_attention_in_blocks_equals_attention_at_once(
    llama: Saved, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = []
    for size in (1 << 24, 200):
        monkeypatch.setattr("forerun.runner.full_attention.MAX_SCORES", size)
        batch = ForwardBatch(
            [sequence(prompt(30))], [branching()], ALL, attention_queries=[[33, 2, 7, 29]]
        )
        found += runner_of(llama[1]).forward(batch)
    whole, blocks = found
    assert torch.allclose(whole.logits, blocks.logits, atol=1e-5)
    assert whole.attention is not None and blocks.attention is not None
    for layer, weights in whole.attention.items():
        assert torch.allclose(weights, blocks.attention[layer], atol=1e-6)


# what is refused


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"needs": frozenset({"taps:3"})}, "taps name layer 3"),
        ({"needs": frozenset({"taps:2"}), "layers": range(2)}, "taps name layer 2"),
        ({"needs": frozenset({"taps"})}, "bad layer numbers"),
        ({"needs": frozenset({"states"})}, "unknown need 'states'"),
        ({"layers": range(2, 9)}, r"layers=range\(2, 9\)"),
        ({"layers": ()}, r"layers=\(\)"),
        ({"layers": range(2), "prompt_rows": [0]}, "over some layers"),
        ({"prompt_rows": [9]}, "prompt_rows=9 is no index of the 9 tokens"),
        ({"needs": frozenset({"attention"}), "attention_queries": [[9]]}, "must be within 0 .. 8"),
        ({"positions": [np.arange(12)]}, "first 9 tokens, got 12"),
    ],
)
def test_a_bad_batch_is_refused(llama: Saved, change: dict[str, Any], message: str) -> None:
    runner, seq = runner_of(llama[1]), sequence(prompt(9))
    with pytest.raises(ConfigError, match=message):
        runner.forward(ForwardBatch([seq], [EMPTY], **change))


def test_positions_beyond_the_context_are_refused(llama: Saved) -> None:
    runner, seq = runner_of(llama[1]), sequence(prompt(3))
    with pytest.raises(CapacityError, match="position 5000"):
        runner.forward(ForwardBatch([seq], [EMPTY], positions=[np.array([0, 1, 5000])]))


def test_cells_that_are_not_there_cannot_be_dropped(llama: Saved) -> None:
    runner, seq = runner_of(llama[1]), sequence(prompt(9))
    runner.forward(ForwardBatch([seq], [EMPTY]))
    with pytest.raises(ConfigError, match="layer 3, KV head 0"):
        runner.drop_cells(seq, 3, 0, np.ones(4, bool))
    with pytest.raises(ConfigError, match="keep has 40 cells"):
        runner.drop_cells(seq, 0, 0, np.ones(40, bool))


def test_needs_are_read_once() -> None:
    found = fields(frozenset({"taps:5,2", "taps:8", "hidden"}))
    assert (found.taps, found.hidden, found.attention) == ((2, 5, 8), True, False)
    gives = frozenset({"hidden", "taps"})
    assert missing(frozenset({"hidden", "taps:3", "attention"}), gives) == ["attention"]


# models that transformers runs


@pytest.mark.parametrize("way", ["tree", "paths", "full"])
def test_a_transformers_target_gives_the_same_fields(llama: Saved, way: str) -> None:
    model, _ = llama
    target: Runner = HFTarget(model, way=way)
    seqs, trees, starts = [sequence(prompt(n)) for n in (20, 6)], [branching(), EMPTY], [4, 0]
    needs = ALL & {*target.gives, "taps:0,1"}
    assert ("attention" in needs) == (way == "tree")
    found = target.forward(ForwardBatch(seqs, trees, needs, prompt_rows=starts))
    for seq, tree, rows, start in zip(seqs, trees, found, starts, strict=True):
        check_tree(model, seq, tree, rows)
        check_prompt(model, seq, rows, start)
        if way == "tree":
            check_attention(model, seq, tree, rows, [len(seq.tokens) - 1])


def test_a_transformers_target_says_what_it_lacks(llama: Saved) -> None:
    target = HFTarget(llama[0], way="paths")
    seq = sequence(prompt(6))
    with pytest.raises(ConfigError, match="gives no layers"):
        target.forward(ForwardBatch([seq], [EMPTY], layers=range(1)))
    with pytest.raises(ConfigError, match="gives no attention"):
        target.forward(ForwardBatch([seq], [EMPTY], frozenset({"attention"})))
    with pytest.raises(ConfigError, match="takes no positions"):
        target.forward(ForwardBatch([seq], [EMPTY], positions=[np.arange(6) * 2]))
    with pytest.raises(ConfigError, match="taps:2 is the last layer"):
        target.forward(ForwardBatch([seq], [EMPTY], frozenset({"taps:2"})))
