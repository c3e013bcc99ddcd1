"""How much memory a peer is given and taken to need: cells from the run, libraries as measured."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from safetensors.numpy import load_file
from test_peers import contestant, fake, sharing  # noqa: F401 - fixtures

from forerun.bench.contestants import CacheDemand
from forerun.bench.local_runner import LocalMethod
from forerun.bench.peers import catalog, sizing
from forerun.bench.peers import peer as peer_module
from forerun.bench.peers.sizing import MEASURED, context_of, memory_need, model_size, num_cells
from forerun.bench.peers.workers import serve
from forerun.core.sampling import Sampling
from forerun.tasks.base import Example

VLLM, LLAMA = catalog.PEERS["vllm"], catalog.PEERS["llama_cpp"]
LAYERS, KV_HEADS, HEAD_DIM = 30, 3, 64  # SmolLM2-135M


def checkpoint(folder: Path, **changes: Any) -> Path:
    """A folder with the config of SmolLM2-135M, and one small tensor."""
    config = {
        "num_hidden_layers": LAYERS,
        "num_attention_heads": 9,
        "num_key_value_heads": KV_HEADS,
        "hidden_size": 576,
        "max_position_embeddings": 8192,
    }
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config | changes))
    header = json.dumps({"x": {"dtype": "BF16", "shape": [5, 7], "data_offsets": [0, 70]}})
    data = len(header).to_bytes(8, "little") + header.encode() + bytes(70)
    (folder / "model.safetensors").write_bytes(data)
    return folder


def test_numbers_of_a_checkpoint(tiny_folder: Path, tmp_path: Path) -> None:
    cell = LAYERS * 2 * KV_HEADS * HEAD_DIM
    assert model_size(checkpoint(tmp_path / "a")) == sizing.ModelSize(35, cell)
    wide = checkpoint(tmp_path / "b", head_dim=128, num_key_value_heads=None)
    assert model_size(wide).cell == LAYERS * 2 * 9 * 128  # every head has keys of its own
    inner = json.loads((wide / "config.json").read_text())
    (wide / "config.json").write_text(json.dumps({"text_config": inner}))
    assert model_size(wide).cell == LAYERS * 2 * 9 * 128  # of a model that also sees images
    numbers = sum(tensor.size for tensor in load_file(tiny_folder / "model.safetensors").values())
    assert model_size(tiny_folder).parameters == numbers


@pytest.mark.parametrize(
    ("tokens", "longest", "context"),
    [(100, 8192, 512), (512, 8192, 512), (513, 8192, 1024), (5000, 8192, 8192), (600, 700, 700)],
)
def test_the_context_is_a_power_of_two_within_the_model(
    tokens: int, longest: int, context: int
) -> None:
    assert context_of(CacheDemand(1, tokens), longest) == context


@pytest.mark.parametrize(
    ("seqs", "tokens", "context", "blocks"),
    [
        (1, 300, 512, 3 * 2 + 1),  # a sequence of 3 blocks, another one, and a block
        (8, 300, 512, 3 * 9 + 1),
        (1, 520, 1024, 5 * 2 + 1),
        (1, 257, 1024, 8 + 1),  # vLLM wants room for one sequence of the whole context
        (1, 900, 700, 6 * 2 + 1),  # the model has no longer ones
    ],
)
def test_cells_for_the_sequences_at_once(seqs: int, tokens: int, context: int, blocks: int) -> None:
    assert num_cells(VLLM, CacheDemand(seqs, tokens), context) == 128 * blocks


def test_what_a_peer_will_take(tmp_path: Path) -> None:
    folder, cell = checkpoint(tmp_path / "model"), LAYERS * 2 * KV_HEADS * HEAD_DIM
    need = memory_need("vllm", [folder], "bfloat16", 1000, tmp_path)
    assert (need.weights, need.cache, need.base) == (35 * 2, 1000 * cell * 2, VLLM.base)
    assert need.total == need.weights + need.cache + need.base
    with_draft = memory_need("vllm", [folder, folder], "float32", 1000, tmp_path)
    assert (with_draft.weights, with_draft.cache) == (2 * 35 * 4, 2 * 1000 * cell * 4)
    half = memory_need("llama_cpp", [folder], "float32", 1000, tmp_path)
    assert (half.weights, half.cache) == (35 * 4, 1000 * cell * 2)  # its cells are fp16
    sizing.remember(tmp_path, "vllm", 123_456)
    sizing.remember(tmp_path, "vllm", 99)  # less, as where a cache is not yet in use
    sizing.remember(tmp_path, "openvino", 5)
    assert memory_need("vllm", [folder], "bfloat16", 1000, tmp_path).base == 123_456
    assert json.loads((tmp_path / MEASURED).read_text()) == {"vllm": 123_456, "openvino": 5}
    (tmp_path / MEASURED).write_text('{"vllm": "much"')
    assert memory_need("vllm", [folder], "bfloat16", 1000, tmp_path).base == VLLM.base


EXAMPLE, FEW = Example("a", "the cat", ""), Sampling(n=3, max_new_tokens=4, seed=7)
Make = Callable[[str], peer_module.PeerContestant]


def test_a_worker_gets_its_sizes(contestant: Make) -> None:  # noqa: F811
    one = contestant("fake")
    one.size_for(CacheDemand(3, 70))
    one.start()
    [fields] = one._process().request("run", 120, **one._run_fields([1], FEW))["told"][0]
    cells = 70 * 4 + 1  # its blocks are single cells
    assert (fields["context"], fields["num_seqs"], fields["num_cells"]) == (128, 3, cells)
    assert fields["cache_bytes"] == one.need.cache == cells * model_size(one.setup.model).cell * 4
    one.close()


def test_the_libraries_are_measured_at_the_first_start(contestant: Make) -> None:  # noqa: F811
    one = contestant("fake")
    before = one.memory_needed()
    one.start()
    one.warm_up(EXAMPLE, FEW)
    if one.resident is None:
        pytest.skip("this system does not say how much memory a process has")
    base = one.resident - one.need.weights - one.need.cache
    assert sizing.measured(one.folder) == {"fake": base}
    assert one.need.base == base != before and one.memory_needed() == 0
    plan = one.memory_plan()
    assert plan["process_bytes"] == one.resident == plan["estimate_bytes"]
    one.close()
    assert one.memory_needed() == one.need.total  # as much as it will take when it starts again


def test_what_shares_a_process_is_counted_once(sharing: Make) -> None:  # noqa: F811
    one, two = sharing("fake"), sharing("fake:greedy")
    assert one.host == two.host and two.memory_needed() > 0
    one.start()
    one.warm_up(EXAMPLE, FEW)
    if one.resident is None:
        pytest.skip("this system does not say how much memory a process has")
    assert two.memory_needed() == 0
    one.close()


def test_vllm_gets_exactly_its_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[dict[str, Any]] = []
    engine = SimpleNamespace(LLM=lambda **given: made.append(given))
    monkeypatch.setitem(__import__("sys").modules, "vllm", engine)
    worker = serve.load_worker(catalog.WORKERS / "vllm.py")
    how = {"mode": "plain", "model": "m", "dtype": "bfloat16", "draft": None, "options": {}}
    for seqs in (1, 64):
        worker.load(**how, context=512, num_seqs=seqs, cache_bytes=12_345_678)
    assert [one["kv_cache_memory_bytes"] for one in made] == [12_345_678] * 2
    assert [one["max_model_len"] for one in made] == [512] * 2
    assert [one["block_size"] for one in made] == [VLLM.block] * 2
    assert [one["max_num_seqs"] for one in made] == [40, 64]


def test_our_cache_counts_as_far_as_it_will_grow(tiny_folder: Path) -> None:
    import forerun

    model = forerun.load(str(tiny_folder))
    one = LocalMethod("plain:batch=4", lambda: model)
    assert one.memory_needed() == 0  # nothing is asked of it yet
    one.size_for(CacheDemand(4, 10**6))
    cell = model_size(tiny_folder).cell * 4
    before = one.memory_needed()
    assert before >= 4 * 128 * cell  # four sequences of its whole context
    model.generate(["the cat"], n=4, batch=4, max_new_tokens=60, drafter="none")
    assert one.memory_needed() < before  # those cells are there
