"""Weights in 8 or 4 bits on a GPU: refused where unsupported; errors within bounds elsewhere."""

from __future__ import annotations

import tomllib
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from parity import forward, prompt, saved, sequence

from forerun import registry
from forerun.controllers.fixed import Fixed
from forerun.core.dice import SeededDice
from forerun.core.records import Sequence
from forerun.core.sampling import Sampling
from forerun.core.tree import EMPTY
from forerun.engine.engine import Engine
from forerun.engine.safe_drafter import SafeDrafter
from forerun.errors import ConfigError
from forerun.models import checkpoint, layers, torchao
from forerun.models.layers import Linear
from forerun.models.load import check_rounding, load_target, planned
from forerun.runner.attention import TorchDecoder
from forerun.runner.model_runner import ModelRunner
from forerun.runner.native.weight_format import UNQUANTIZED, WeightFormat

CUDA = torch.device("cuda")
has_torchao = pytest.mark.skipif(find_spec("torchao") is None, reason="torchao is not installed")
ERRORS = {"int8": 0.01, "fp8": 0.04}  # of a product of random numbers


@pytest.mark.parametrize("weights", ["fp8", "int4", "int4:64"])
def test_on_a_cpu_they_are_refused_with_a_way_out(weights: str, tmp_path: Path) -> None:
    saved("llama", tmp_path)
    said = f"weights '{weights}' cannot be used on cpu: fp8 and int4 need CUDA; use int8"
    with pytest.raises(ConfigError, match=said):
        load_target(tmp_path, weights=weights, device="cpu")
    with pytest.raises(ConfigError, match="need a checkpoint, and the model is loaded"):
        load_target(torch.nn.Linear(2, 2), weights=weights, device="cpu")


@pytest.mark.parametrize(
    ("weights", "dtype", "capability", "said"),
    [
        ("int8:128", None, (9, 0), "is for CPUs; use int8"),
        ("int4", torch.float16, (9, 0), "int4 is for bf16 models, .*float16; use dtype 'bf16'"),
        ("int4", torch.bfloat16, (7, 5), "int4 needs Ampere or later, not a GPU; use int8"),
        ("fp8", torch.float16, (7, 5), ""),
        ("int8", torch.float32, (7, 5), ""),
        ("int4:64", torch.bfloat16, (8, 0), ""),
    ],
)
def test_what_a_gpu_takes(
    weights: str,
    dtype: torch.dtype | None,
    capability: tuple[int, int],
    said: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torchao, "find_spec", lambda _: object())
    monkeypatch.setattr(torchao, "version", lambda _: "0.18.0")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "a GPU")
    given: Any = weights, WeightFormat.parse(weights), "model", CUDA, dtype
    if said:
        with pytest.raises(ConfigError, match=f"weights '{weights}' cannot be .* cuda: .*{said}"):
            check_rounding(*given)
    else:
        check_rounding(*given)


def test_without_torchao_the_extra_is_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torchao, "find_spec", lambda _: None)
    with pytest.raises(
        ConfigError, match=r"pip install '.\[quant\]' in a clone of forerun, or use auto"
    ):
        check_rounding("fp8", WeightFormat.parse("fp8"), "model", CUDA, None)


@pytest.mark.parametrize("release", ["0.9.1+cu128", "0.9rc1", "0.9"])
def test_a_release_that_lacks_the_configs_is_refused(
    monkeypatch: pytest.MonkeyPatch, release: str
) -> None:
    monkeypatch.setattr(torchao, "find_spec", lambda _: object())
    monkeypatch.setattr(torchao, "version", lambda _: release)
    with pytest.raises(ConfigError, match=r"need torchao 0.18 or later, not 0.9; run pip install"):
        check_rounding("int8", WeightFormat.parse("int8"), "model", CUDA, None)


def test_the_extra_asks_for_the_release_that_is_checked() -> None:
    extras = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    least = ".".join(map(str, torchao.MIN_RELEASE))
    assert extras["optional-dependencies"]["quant"] == [f"torchao>={least}"]


@pytest.mark.parametrize(
    ("weights", "width", "said"),
    [
        ("int4", 192, "multiples of 128, and one is 192; use int4:64 or int8"),
        ("int4:256", 128, "multiples of 256, and one is 128; use int4:128 or int8"),
        ("int4:32", 80, "multiples of 32, and one is 80; use int8"),
    ],
)
def test_groups_that_do_not_divide_a_width_are_refused(weights: str, width: int, said: str) -> None:
    with pytest.raises(ConfigError, match=f"{said}$"):
        torchao.quantized(torch.zeros(64, width), WeightFormat.parse(weights))


@has_torchao
@pytest.mark.parametrize("weights", ERRORS)
@pytest.mark.parametrize("bias", [False, True])
def test_products_are_near_those_of_the_whole_weight(weights: str, bias: bool) -> None:
    torch.manual_seed(0)
    weight, x = torch.randn(96, 256).bfloat16(), torch.randn(5, 256).bfloat16()
    own = torch.randn(96).bfloat16() if bias else None
    linear = Linear(weight, own, pack=False, rounding=WeightFormat.parse(weights))
    assert linear.is_quantized and not linear.can_look_up and linear.shape == (96, 256)
    assert linear.nbytes < 0.6 * weight.nbytes + (0 if own is None else own.nbytes)
    with torch.inference_mode():
        want = F.linear(x.float(), weight.float(), None if own is None else own.float())
        got = linear(x).float()
    assert 0 < float((got - want).norm() / want.norm()) < ERRORS[weights]


@pytest.fixture
def as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights of a CPU are held as those of a GPU are."""
    for module in (layers, checkpoint):
        monkeypatch.setattr(module, "can_pack", lambda _: False)
    made = Linear.__init__
    monkeypatch.setattr(
        Linear, "__init__", lambda *given, **how: made(*given, **(how | {"pack": False}))
    )


def runner(folder: Path, dtype: torch.dtype, rounding: WeightFormat) -> ModelRunner:
    """A checkpoint with quantised weights, on torch."""
    plan, _ = planned(folder)
    files = checkpoint.shard_files(folder)
    model = checkpoint.load_decoder(plan, files, dtype, torch.device("cpu"), rounding)
    assert all(one.is_quantized == (rounding != UNQUANTIZED) for one in model.linears())
    found = ModelRunner(model, context=64)
    found.decode = TorchDecoder(model)
    return found


@has_torchao
@pytest.mark.usefixtures("as_on_a_gpu")
@pytest.mark.parametrize("weights", ERRORS)
@pytest.mark.parametrize("case", ["llama", "llama-biased-tied"])
def test_a_model_with_such_weights_says_nearly_the_same(
    weights: str, case: str, tmp_path: Path
) -> None:
    """A tied table is kept for looking up, and the head is rounded."""
    saved(case, tmp_path, hidden_size=64, intermediate_size=128)
    roundings = UNQUANTIZED, WeightFormat.parse(weights)
    runners = [runner(tmp_path, torch.bfloat16, rounding) for rounding in roundings]
    assert runners[1].model.nbytes < runners[0].model.nbytes
    (want,), (got,) = (forward(one, [sequence(prompt(20))], [EMPTY]) for one in runners)
    off = (got.logits.float() - want.logits.float()).norm() / want.logits.float().norm()
    assert 0 < float(off) < 6 * ERRORS[weights]


@has_torchao
@pytest.mark.usefixtures("as_on_a_gpu")
def test_passes_of_such_a_model_are_graphs_around_products_of_torchao(tmp_path: Path) -> None:
    pytest.importorskip("triton")
    from forerun.runner.gpu.bodies import FewRows
    from forerun.runner.gpu.graphs import GraphDecoder

    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "head_dim": 16}
    sizes |= {"num_attention_heads": 2, "num_key_value_heads": 1}
    saved("llama", tmp_path, **sizes)
    ours, plain = (runner(tmp_path, torch.float16, WeightFormat.parse("int8")) for _ in range(2))
    ours.decode = GraphDecoder(ours.model)
    seqs = [sequence(prompt(20)) for _ in range(2)]
    for _ in range(3):  # the prompt, one row, one row; of a new shape the rows are torch's
        pairs = zip((ours, plain), seqs, strict=True)
        (got,), (want,) = (forward(one, [seq], [EMPTY]) for one, seq in pairs)
        torch.testing.assert_close(got.logits.float(), want.logits.float(), rtol=1e-2, atol=1e-2)
        for seq in seqs:
            seq.tokens.append(7)
    (shapes,) = (held.shapes for held in ours.decode._graphs.values())
    assert ours.decode.is_trusted and {shape.rows for shape in shapes} == {1, 32}
    assert {type(one.body) for one in shapes.values()} == {FewRows}


INT4 = WeightFormat.parse("int4")
HERE = CUDA if torch.cuda.is_available() else torch.device("cpu")
why_no_int4 = torchao.why_not(INT4, HERE, torch.bfloat16)
has_int4 = pytest.mark.skipif(bool(why_no_int4), reason=f"int4: {why_no_int4}")


@has_int4
@pytest.mark.parametrize("group_size", [32, 64, 128, 256])
@pytest.mark.parametrize("shape", [(96, 256), (1024, 2048), (70, 768)])
def test_products_in_int4_are_near_those_of_the_whole_weight(
    group_size: int, shape: tuple[int, int]
) -> None:
    """Also where torch's kernel pads: outputs to multiples of 8, inputs to multiples of 1024."""
    torch.manual_seed(0)
    weight = torch.randn(shape, device=CUDA).bfloat16()
    linear = Linear(weight, pack=False, rounding=WeightFormat(4, group_size))
    assert linear.is_quantized and linear.shape == shape
    for rows in (1, 5, 64):
        x = torch.randn(rows, shape[1], device=CUDA).bfloat16()
        with torch.inference_mode():
            want, got = F.linear(x.float(), weight.float()), linear(x).float()
        assert got.shape == want.shape
        assert 0.01 < float((got - want).norm() / want.norm()) < 0.15
    if shape == (1024, 2048):
        assert linear.nbytes < 0.35 * weight.nbytes


@has_int4
def test_a_model_in_int4_decodes_with_drafts_as_without_them(tmp_path: Path) -> None:
    """Passes of the quantised model are graphs; its head and its table stay in bf16."""
    pytest.importorskip("triton")
    from forerun.runner.gpu.graphs import GraphDecoder

    saved("llama", tmp_path, hidden_size=256, intermediate_size=512, head_dim=64)
    models = [
        load_target(tmp_path, dtype="bf16", device="cuda", weights=weights)
        for weights in ("auto", "int4")
    ]
    assert models[1].model.nbytes < models[0].model.nbytes  # type: ignore[attr-defined]
    assert not models[1].model.head.is_quantized  # type: ignore[attr-defined]
    (want,), (got,) = (forward(one, [sequence(prompt(20))], [EMPTY]) for one in models)
    off = (got.logits.float() - want.logits.float()).norm() / want.logits.float().norm()
    assert 0 < float(off) < 0.6
    texts = []
    for drafter in ("none", "suffix"):
        engine = Engine(
            models[1],
            SafeDrafter(registry.make("drafter", drafter)),
            registry.make("verifier", "speculative"),
            Fixed(nodes=4, depth=4),
        )
        seq = Sequence([5, 6, 7] * 4, 12, Sampling(temperature=0.0), SeededDice(0), 40)
        engine.submit(seq)
        engine.run()
        texts.append(seq.generated)
    assert len(texts[0]) == 40 and texts[0] == texts[1]
    decoder = models[1].decode  # type: ignore[attr-defined]
    assert isinstance(decoder, GraphDecoder) and decoder.is_trusted
