"""Passes as a GPU runs them against torch's: where there is one on it, with CUDA graphs; elsewhere
by Triton's interpreter, kernel by kernel."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from command import Call
from parity import VOCAB, branching, forward, prompt, saved, sequence

import forerun
from forerun.core.forward_batch import ForwardBatch
from forerun.core.tree import EMPTY, Tree, TreeBuilder
from forerun.drafters.draft_model import DraftModel
from forerun.models import layers
from forerun.models.draft_link import shared_draft
from forerun.models.load import load_target
from forerun.runner import gpu
from forerun.runner import model_runner as runner
from forerun.runner.attention import TorchDecoder
from forerun.runner.model_runner import ModelRunner
from forerun.runner.native.decoder import warn_once

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
pytest.importorskip("triton")

from forerun.runner.gpu import bodies, graphs  # noqa: E402
from forerun.runner.gpu.graphs import GraphDecoder  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning:triton")
SMALL = {"head_dim": 16, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1}
SMALL |= {"num_attention_heads": 2, "num_key_value_heads": 1}
LLAMAS = {  # with products and norms of ours
    "llama": {},
    "llama-biased-tied": {},
    "llama-wide": {"hidden_size": 48, "num_attention_heads": 6, "num_key_value_heads": 2},
    "mistral": {"sliding_window": 256, "max_position_embeddings": 512},
    "qwen2": {"use_sliding_window": False},
}
OTHERS = {
    "qwen3": {},
    "gemma2": {"num_hidden_layers": 2, "sliding_window": 256, "max_position_embeddings": 512},
    "gemma3_text": {
        "num_hidden_layers": 2,
        "layer_types": ["sliding_attention", "full_attention"],
        "sliding_window": 256,
        "max_position_embeddings": 512,
    },
    "smollm3": {"num_hidden_layers": 2, "no_rope_layers": [0, 1]},
    "granite": {},
    "olmo2": {},
    "gpt2": {"n_embd": 32, "n_head": 2, "n_layer": 1},
}


@pytest.fixture(autouse=True)
def _plain_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights as a GPU holds them, on a CPU too."""
    monkeypatch.setattr(layers, "can_pack", lambda _: False)
    monkeypatch.setattr(layers, "HAS_BLOCKED", False)


def runners(case: str, folder: Path, dtype: str, **options: int) -> tuple[ModelRunner, ModelRunner]:
    """The same checkpoint as graphs and on torch."""
    family = case.partition("-")[0]
    saved(case, folder, **({} if family == "gpt2" else SMALL) | options)
    ours, plain = (load_target(folder, dtype=dtype, device=DEVICE) for _ in range(2))
    assert not gpu.unsupported_config(ours.model.config)
    ours.decode, plain.decode = GraphDecoder(ours.model), TorchDecoder(plain.model)
    return ours, plain


def error(ours: ModelRunner, plain: ModelRunner, seqs: list, trees: list[Tree]) -> float:
    """The largest difference of logits and hidden rows, over the largest of either."""
    needs, worst = frozenset({"hidden"}), 0.0
    found = [
        r.forward(ForwardBatch(s, trees, needs)) for r, s in zip((ours, plain), seqs, strict=True)
    ]
    for got, want in zip(*found, strict=True):
        for a, b in ((got.logits, want.logits), (got.hidden, want.hidden)):
            assert a is not None and b is not None
            a, b = a.double().cpu(), b.double().cpu()
            worst = max(worst, float((a - b).abs().max() / b.abs().max()))
    assert ours.decode.is_trusted
    return worst


QUICK = {("llama", "fp16"), ("gpt2", "fp32")}  # kernels of ours for all, for attention alone
PASSES = [*((case, "fp16") for case in LLAMAS), *((case, "fp32") for case in ("llama", *OTHERS))]


@pytest.mark.parametrize(
    ("case", "dtype"),
    [pytest.param(*one, marks=() if one in QUICK else pytest.mark.slow) for one in PASSES],
)
def test_pass_matches_torch(case: str, dtype: str, tmp_path: Path) -> None:
    """One row twice, a step of several texts, a tree, and a ragged batch of them."""
    ours, plain = runners(case, tmp_path, dtype, **{**LLAMAS, **OTHERS}[case])
    most = 1e-5 if dtype == "fp32" else 1e-2
    lengths = [(300 if "max_position_embeddings" in LLAMAS.get(case, {}) else 70), 5, 33]
    seqs = [[sequence(prompt(n, seed=n)) for n in lengths] for _ in range(2)]
    for trees in ([EMPTY], [EMPTY] * 3, [branching()], [branching(), EMPTY, bush(20)]):
        some = [row[: len(trees)] for row in seqs]
        for _ in range(2):  # what a new shape says is torch's
            assert error(ours, plain, some, trees) <= most
        for seq in some[0] + some[1]:
            seq.tokens.append(7)


def bush(nodes: int) -> Tree:
    """More rows than one tile has."""
    tree = TreeBuilder()
    for node in range(nodes):
        tree.add(3 + node, node - 1 if node % 3 else -1)
    return tree.build()


def test_accepted_nodes_are_found_again(tmp_path: Path) -> None:
    """What a tree's rows have written is read by later passes, moved or not."""
    ours, plain = runners("llama", tmp_path, "fp16")
    seqs, tree = [[sequence(prompt(20))] for _ in range(2)], branching()
    path = tree.path(len(tree) - 1)
    for _ in range(3):
        assert error(ours, plain, seqs, [tree]) <= 1e-2
        for (seq,) in seqs:
            seq.tokens += [*path, 9]


def test_paths_that_grow_match_torch(tmp_path: Path) -> None:
    """As draft models ask for them: nodes below nodes of earlier passes."""
    ours, plain = runners("llama", tmp_path, "fp16")
    seqs = [sequence(prompt(20)), sequence(prompt(20))]
    for paths in ([()], [(4,), (5,)], [(4, 6), (4, 7), (5, 8)]):
        got, want = (
            runner.rows_at([(seq, path) for path in paths])
            for runner, seq in zip((ours, plain), seqs, strict=True)
        )
        assert float((got.cpu() - want.float().cpu()).abs().max()) <= 1e-2 * float(want.abs().max())


def test_cells_that_move_are_followed(tmp_path: Path) -> None:
    """A text that outgrows its cells, and a twin with cells of its own."""
    ours, plain = runners("llama", tmp_path, "fp16", max_position_embeddings=1024)
    twin = ours.twin()
    seqs = [[sequence(prompt(250))] for _ in range(3)]
    for _ in range(3):
        assert error(ours, plain, seqs[:2], [EMPTY]) <= 1e-2
        assert error(twin, plain, [seqs[2], seqs[1]], [EMPTY]) <= 1e-2
        for (seq,) in seqs:
            seq.tokens += prompt(200, seed=len(seq.tokens))


def test_tokens_without_a_row_are_refused(tmp_path: Path) -> None:
    ours, _ = runners("llama", tmp_path, "fp16")
    forward(ours, [seq := sequence([3, 4])], [EMPTY])
    seq.tokens.append(VOCAB)
    with pytest.raises(IndexError, match=f"token {VOCAB}"):
        forward(ours, [seq], [EMPTY])


def test_kernels_that_say_something_else_than_torch_are_given_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """What they said is not passed on, and it is said once."""
    warn_once.cache_clear()
    ours, plain = runners("llama", tmp_path, "fp16")
    own = bodies.Attention.look
    monkeypatch.setattr(bodies.Attention, "look", lambda *args: own(*args) * -1)
    seqs = [sequence(prompt(20)), sequence(prompt(20))]
    for _ in range(2):
        pairs = zip((ours, plain), seqs, strict=True)
        (got,), (want,) = (forward(runner, [seq], [EMPTY]) for runner, seq in pairs)
        assert torch.equal(got.logits.float(), want.logits.float())
        for seq in seqs:
            seq.tokens.append(7)
    assert not ours.decode.is_trusted
    assert sum("differ from those of torch" in text for text in caplog.messages) == 1


def test_what_cannot_be_compiled_or_recorded_goes_to_torch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """No compiler, no memory, a GPU that lacks something: texts go on."""
    warn_once.cache_clear()
    ours, plain = runners("llama", tmp_path, "fp16")

    def look(*_: object) -> None:
        raise RuntimeError("out of resource: shared memory")

    monkeypatch.setattr(bodies.Attention, "look", look)
    seqs = [sequence(prompt(20)), sequence(prompt(20))]
    for _ in range(2):
        pairs = zip((ours, plain), seqs, strict=True)
        (got,), (want,) = (forward(runner, [seq], [EMPTY]) for runner, seq in pairs)
        assert torch.equal(got.logits, want.logits)
    held = ours.decode._graphs.values()
    assert not ours.decode.is_trusted and not any(one.shapes for one in held)
    assert sum("shared memory" in text for text in caplog.messages) == 1


def test_one_wrong_row_is_seen() -> None:
    rows = torch.randn(128, 50)
    wrong = rows.clone()
    wrong[77] = 0
    assert graphs._alike(rows + 1e-3, rows) and not graphs._alike(wrong, rows)
    assert not graphs._alike(torch.full_like(rows, torch.nan), rows)


@pytest.mark.slow
def test_many_logits_stay_and_outlive_the_next_pass(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours, plain = runners("llama", tmp_path, "fp16")
    seqs, found = [[sequence(prompt(20))] for _ in range(2)], []
    for host in (1 << 20, 0, 0):
        monkeypatch.setattr(graphs, "MAX_HOST_BYTES", host)
        assert error(ours, plain, seqs, [EMPTY]) <= 1e-2
        (rows,) = forward(ours, seqs[0], [EMPTY])
        found.append((rows.logits.clone(), rows.logits))
        for (seq,) in seqs:
            seq.tokens.append(7)
    assert all(torch.equal(before, now) for before, now in found)


@pytest.mark.parametrize(
    ("case", "options", "reason"),
    [
        ("qwen3_moe", {}, "experts"),
        ("llama", {"head_dim": 48}, "a head size of 48"),
        ("llama", {"head_dim": 256}, "a head size of 256"),
        ("mistral", {"sliding_window": 64}, "a window of 64"),
    ],
)
def test_what_graphs_lack_is_said(case: str, options: dict, reason: str, tmp_path: Path) -> None:
    saved(case, tmp_path, **SMALL | options)
    assert reason in gpu.unsupported_config(load_target(tmp_path, dtype="fp32").model.config)


def test_commands_load_models_with_graphs_unless_the_environment_says_off(
    call: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: list[object] = []
    monkeypatch.setattr(forerun, "load", lambda *_, **how: given.append(how["graphs"]) or 1 / 0)
    words = "generate", "--model", str(tmp_path), "--prompt", "a"
    saved("llama", tmp_path, **SMALL)
    for value in ("off", "", "on"):
        monkeypatch.setenv("FORERUN_GRAPHS", value)
        assert call(*words)[0] == 70
    assert given == [False, True, True]
    monkeypatch.setenv("FORERUN_GRAPHS", "no")
    status, out, err = call("methods")
    assert (status, out) == (2, "")
    assert (
        err
        == "error: FORERUN_GRAPHS must be on or off, got 'no'; off runs forward passes on torch\n"
    )


@pytest.mark.parametrize("graphs", [True, False])
def test_a_draft_model_has_the_graphs_of_its_target(graphs: bool, tmp_path: Path) -> None:
    saved("llama", tmp_path, **SMALL)
    target = load_target(tmp_path, dtype="fp32", graphs=graphs)
    drafts = [
        shared_draft(target, str(tmp_path), None),
        DraftModel(model=str(tmp_path), target=target).runner,
    ]
    assert [one.graphs for one in (target, *drafts)] == [graphs] * 3  # type: ignore[attr-defined]


def test_a_model_on_a_gpu_runs_on_graphs_and_without_them_on_torch_with_one_message(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    warn_once.cache_clear()
    saved("llama", tmp_path, **SMALL)
    model = load_target(tmp_path, dtype="fp32").model  # type: ignore[attr-defined]
    caplog.clear()  # of what loading on a CPU says
    monkeypatch.setattr(model, "device", torch.device("cuda"))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    assert type(runner.decoder(model)) is GraphDecoder and not caplog.messages
    for _ in range(2):
        assert type(runner.decoder(model, graphs=False)) is TorchDecoder
    assert [text.rpartition(": ")[2] for text in caplog.messages] == ["CUDA graphs are turned off"]


@pytest.mark.skipif(DEVICE == "cpu", reason="records graphs, which takes a GPU")
def test_what_is_recorded_says_what_is_run(tmp_path: Path) -> None:
    """After other shapes were recorded too: the first one shares no memory with them."""
    ours, plain = runners("llama", tmp_path, "fp16")
    ours.warm_up()
    for num in (1, 3, 2, 1, 3):
        seqs = [[sequence(prompt(20 + i, seed=i)) for i in range(num)] for _ in range(2)]
        for trees in ([EMPTY] * num, [bush(20)] + [EMPTY] * (num - 1)):
            for _ in range(3):
                assert error(ours, plain, seqs, trees) <= 1e-2
                torch.empty(1 << 20, device=DEVICE).fill_(np.nan)
    shapes = ours.decode._graphs[ours.cache].shapes.values()
    assert shapes and all(one.graph is not None for one in shapes)
