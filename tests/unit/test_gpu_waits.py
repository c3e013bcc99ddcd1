"""A step of the engine waits for the device once: for its verdict."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch
from fake_device import AWAY, Watch
from torch_graphs import TorchAttention

from forerun import registry
from forerun.constraints._penalties import Adjust
from forerun.controllers.fixed import Fixed
from forerun.core.dice import SeededDice
from forerun.core.records import Sequence, Step
from forerun.core.sampling import Sampling
from forerun.engine.engine import Engine
from forerun.engine.safe_drafter import SafeDrafter, observe_pending
from forerun.models.layers import GatedMLP, Linear, RMSNorm
from forerun.models.transformer import DecoderConfig, Layer, RopeConfig, Transformer
from forerun.runner.attention import TorchDecoder
from forerun.runner.model_runner import ModelRunner

VOCAB = 600
ROPE = RopeConfig(tuple(np.logspace(0, -3, 8).tolist()))
CONFIG = DecoderConfig(
    vocab_size=VOCAB, hidden_size=32, num_layers=2, num_heads=2, num_kv_heads=1, head_dim=16,
    mlp_size=48, context=256, attn_scale=0.25, ropes=(ROPE,),
)  # fmt: skip
WAITS = ("number", "shape", "to host", "to device, blocking")


@pytest.fixture(autouse=True)
def _no_inference_mode(monkeypatch: pytest.MonkeyPatch) -> None:
    """In it torch does not show all ops to those who watch."""
    call = TorchDecoder.__call__.__wrapped__  # type: ignore[attr-defined]
    monkeypatch.setattr(TorchDecoder, "__call__", torch.no_grad()(call))
    monkeypatch.setattr(torch, "inference_mode", torch.no_grad)


SMALL = "graphs, small logits"


@pytest.fixture(params=["torch", "graphs", pytest.param(SMALL, marks=pytest.mark.slow)])
def passes(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """How passes run; small logits are copied to the host in the pass."""
    if request.param != "torch":
        pytest.importorskip("triton")
        from forerun.runner.gpu import bodies, graphs

        monkeypatch.setattr(bodies, "Attention", TorchAttention)
        monkeypatch.setattr(graphs.GraphDecoder, "_to_host", lambda _, logits: logits.cpu().numpy())
        monkeypatch.setattr(graphs, "MAX_HOST_BYTES", 1 << 20 if request.param == SMALL else 0)
    return request.param


def decoder(device: torch.device) -> Transformer:
    """Random weights, the same on every device."""
    chance = torch.Generator().manual_seed(0)
    c = CONFIG

    def weight(*shape: int) -> torch.Tensor:
        made = torch.randn(*shape, generator=chance) * 2 * shape[-1] ** -0.5
        return made.to(device)

    def norm() -> RMSNorm:
        return RMSNorm(torch.ones(c.hidden_size).to(device), c.norm_eps)

    layers = []
    for _ in range(c.num_layers):
        qkv = Linear(weight(c.num_lanes * c.head_dim, c.hidden_size), pack=False)
        out = Linear(weight(c.hidden_size, c.num_heads * c.head_dim), pack=False)
        both = Linear(weight(2 * c.mlp_size, c.hidden_size), is_gated=True, pack=False)
        mlp = GatedMLP(both, Linear(weight(c.hidden_size, c.mlp_size), pack=False), c.act)
        layers.append(Layer(qkv, out, mlp, norm(), mlp_norm=norm()))
    head = Linear(weight(VOCAB, c.hidden_size), pack=False)
    return Transformer(c, weight(VOCAB, c.hidden_size), layers, norm(), head)


@contextmanager
def running(
    device: torch.device, drafter: str, sampling: Sampling, passes: str = "torch"
) -> Iterator[tuple[Engine, list[Sequence], list[Step]]]:
    """An engine with three texts, and a list of its steps.

    Two run at once; the third follows the first, which was short and of the same prompt.
    """
    runner = ModelRunner(decoder(device), max_seqs=4, context=256)
    runner.is_async = True  # on both, so that steps are learned at the same time
    if passes != "torch":
        from forerun.runner.gpu.graphs import GraphDecoder

        runner.decode = GraphDecoder(runner.model)
    steps: list[Step] = []
    engine = Engine(
        runner,
        SafeDrafter(registry.make("drafter", drafter)),
        registry.make("verifier", "speculative"),
        Fixed(nodes=6, depth=4),
        shapers=[Adjust()],
        listeners=[steps.append],
        max_seqs=2,
    )
    for part in (engine.target, engine.verifier):
        part.warm_up()
    seqs = []
    for i, limit in enumerate((8, 60, 60)):
        tokens = np.random.default_rng(i % 2).integers(0, 9, 20).tolist()
        seqs.append(Sequence(tokens, 20, sampling, SeededDice(i), limit, group=i % 2, index=i))
        engine.submit(seqs[-1])
    yield engine, seqs, steps


SAMPLINGS = [
    Sampling(temperature=0.3),
    Sampling(temperature=0.0),
    Sampling(temperature=0.8, top_k=20, top_p=0.9, min_p=0.02, repetition_penalty=1.1),
]
NAMES = ["sampled", "greedy", "truncated"]


@pytest.mark.parametrize(
    "drafter", ["none", "stand", pytest.param("auto:model=none", marks=pytest.mark.slow)]
)
@pytest.mark.parametrize("sampling", SAMPLINGS, ids=NAMES)
def test_a_step_waits_for_its_verdict_and_for_nothing_else(
    drafter: str, sampling: Sampling, passes: str
) -> None:
    """The first pass of a shape also waits, for the comparison with torch."""
    with Watch() as watch, running(AWAY, drafter, sampling, passes) as (engine, _, steps):
        engine.step()  # reads the prompts
        known, counted = num_shapes(engine), 0
        for _ in range(9):
            watch.events.clear()
            engine.step()
            is_known, known = num_shapes(engine) == known, num_shapes(engine)
            if not is_known:
                continue
            counted += 1
            waits = [event for event in watch.events if event[0] in WAITS]
            assert [kind for kind, _ in waits] == ["to host"], waits
            products = [i for i, (kind, _) in enumerate(watch.events) if kind == "product"]
            inside = watch.events[products[0] : products[-1]]
            assert all(kind == "product" for kind, _ in inside), "a copy waits for the pass"
        assert counted >= 4
        assert getattr(engine.target.decode, "is_trusted", True)  # type: ignore[attr-defined]
        drafted = sum(step.num_nodes for step in steps)
        assert bool(drafted) == (drafter != "none") and len(steps) == 10


def num_shapes(engine: Engine) -> int:
    """Shapes with a graph."""
    graphs = getattr(engine.target.decode, "_graphs", {})  # type: ignore[attr-defined]
    return sum(len(one.shapes) for one in graphs.values())


@pytest.mark.parametrize(
    "drafter", ["stand", pytest.param("stand:scope=tenant", marks=pytest.mark.slow)]
)
@pytest.mark.parametrize("sampling", SAMPLINGS, ids=NAMES)
def test_texts_and_what_is_learned_are_those_of_the_host(
    drafter: str, sampling: Sampling, passes: str
) -> None:
    """A device gives the largest entries alone, and the host whole laws."""
    found = []
    for device in (torch.device("cpu"), AWAY):
        how = passes if device == AWAY else "torch"
        with watched(device), running(device, drafter, sampling, how) as (engine, seqs, steps):
            for _ in range(15):
                engine.step()
            observe_pending(engine.drafter)
            stand: Any = engine.drafter.drafter  # type: ignore[attr-defined]
            memory = stand.memory(seqs[0])
            rows = memory.rows()
            order = np.argsort(rows.keys)
            found.append((
                [seq.tokens for seq in seqs],
                [[tree.tokens.tolist() for tree in step.trees] for step in steps],
                rows.keys[order],
                np.take_along_axis(rows.probs[order], np.argsort(rows.ids[order], 1), 1),
            ))  # fmt: skip
    (texts, trees, keys, probs), (texts2, trees2, keys2, probs2) = found
    assert texts == texts2 and trees == trees2
    assert any(map(len, sum(trees, [])))
    np.testing.assert_array_equal(keys, keys2)
    np.testing.assert_allclose(probs, probs2, rtol=1e-4, atol=1e-6)


@contextmanager
def watched(device: torch.device) -> Iterator[None]:
    """Tensors of the device have values in the block."""
    if device != AWAY:
        yield
        return
    with Watch():
        yield


@pytest.mark.parametrize(
    "wait",
    [
        lambda x: x.sum().item(),
        lambda x: x.cpu(),
        lambda x: bool((x > 0).any()),
        lambda x: x.nonzero(),
        lambda x: x[x > 0],
        lambda x: torch.zeros(3).copy_(x),
        lambda x: torch.unique(x),
        lambda x: torch.arange(3.0).to(AWAY),
        lambda x: x.copy_(torch.arange(3.0)),
    ],
)
def test_the_watch_sees_what_waits(wait: Callable[[torch.Tensor], object]) -> None:
    with Watch() as watch:
        x = torch.arange(3.0).to(AWAY, non_blocking=True)
        assert [kind for kind, _ in watch.events] == ["to device"]
        (x * 2).add_(torch.ones(3, device=AWAY)).softmax(-1)
        assert not watch.count(*WAITS)
        wait(x)
        assert watch.count(*WAITS)
