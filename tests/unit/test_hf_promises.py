"""What `generate` of transformers promises: kept inside it, or refused by name."""

from __future__ import annotations

import copy
import gc
import inspect
import io
import logging
import pickle
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    BloomConfig,
    DynamicCache,
    FalconMambaConfig,
    Gemma2Config,
    GPT2Config,
    LlamaConfig,
    LlamaForCausalLM,
    LogitsProcessor,
    LogitsProcessorList,
    Mamba2Config,
    MambaConfig,
    MptConfig,
    Phi3Config,
    Qwen2Config,
    RepetitionPenaltyLogitsProcessor,
    StoppingCriteria,
    StoppingCriteriaList,
    set_seed,
)
from transformers.generation.stopping_criteria import (
    EosTokenCriteria,
    MaxLengthCriteria,
    MaxTimeCriteria,
)
from transformers.generation.streamers import BaseStreamer

from forerun.api import Model
from forerun.core.dice import SeededDice
from forerun.core.forward_batch import ForwardBatch
from forerun.core.records import Sequence
from forerun.core.roles import Drafter
from forerun.core.sampling import Sampling
from forerun.core.tree import EMPTY
from forerun.errors import CapacityError, ConfigError, ForerunError
from forerun.integrations.hf import generate
from forerun.integrations.hf_candidates import candidates
from forerun.models.hf import HFTarget

VOCAB = 48
IS_RENAMED = "cache" in inspect.signature(LlamaForCausalLM.forward).parameters  # from 5.24 on
CACHE = "cache" if IS_RENAMED else "past_key_values"
SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "bos_token_id": 1,
    "eos_token_id": None,
    "pad_token_id": 0,
}
PROMPT = torch.tensor([[5, 6, 7, 5, 6, 9, 5, 6, 7]])
FACTORS = {"short_factor": [1.0] * 8, "long_factor": [4.0 + i for i in range(8)]}


def made(kind: str, **fields: Any) -> Any:
    """A small random model whose texts vary."""
    plain = {"vocab_size": VOCAB, "bos_token_id": 1, "eos_token_id": None, "pad_token_id": 0}
    configs: dict[str, Any] = {
        "llama": lambda: LlamaConfig(**SIZES, **{"max_position_embeddings": 256, **fields}),
        "qwen2": lambda: Qwen2Config(**SIZES, **{"max_position_embeddings": 256, **fields}),
        "gemma2": lambda: Gemma2Config(
            **SIZES,
            **{"max_position_embeddings": 256, "head_dim": 16, "sliding_window": 12, **fields},
        ),
        "phi3": lambda: Phi3Config(**SIZES, **{"max_position_embeddings": 256, **fields}),
        "gpt2": lambda: GPT2Config(
            **plain, **{"n_embd": 32, "n_layer": 2, "n_head": 2, "n_positions": 64, **fields}
        ),
        "bloom": lambda: BloomConfig(**plain, hidden_size=32, n_layer=2, n_head=2, **fields),
        "mpt": lambda: MptConfig(
            **plain, **{"d_model": 32, "n_layers": 2, "n_heads": 2, "max_seq_len": 64, **fields}
        ),
    }
    torch.manual_seed(7)
    model = AutoModelForCausalLM.from_config(configs[kind]())
    for parameter in model.parameters():
        parameter.data *= 4 if parameter.dim() > 1 else 1
    model.generation_config.eos_token_id = fields.get("eos")
    model.generation_config.pad_token_id = 0
    return model.eval()


@pytest.fixture(scope="module")
def llama() -> Any:
    return made("llama")


@pytest.fixture
def fresh(llama: Any) -> Any:
    return copy.deepcopy(llama)


def both(model: Any, ids: torch.Tensor = PROMPT, **options: Any) -> tuple[Any, Any]:
    """The output of plain generate, and ours with drafts."""
    options = {"max_new_tokens": 24, "do_sample": False, **options}
    plain = {name: value for name, value in options.items() if name != "rowwise"}
    return model.generate(ids, **plain), ours(model, ids, **options)


def ours(model: Any, ids: torch.Tensor = PROMPT, **options: Any) -> Any:
    options = {"max_new_tokens": 24, "do_sample": False, "drafter": "stand", **options}
    return model.generate(ids, controller="fixed", **options, custom_generate=generate)


def same(model: Any, ids: torch.Tensor = PROMPT, **options: Any) -> bool:
    want, got = both(model, ids, **options)
    return torch.equal(want, got)


# 1. weights change


def sgd_step(model: Any) -> None:
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.3)
    model(input_ids=PROMPT, labels=PROMPT).loss.backward()
    optimizer.step()


def write_data(model: Any) -> None:
    """torch's counters miss it."""
    for parameter in model.parameters():
        parameter.data.copy_(torch.flip(parameter.data, (-1,)))


def load_state(model: Any) -> None:
    state = {name: torch.roll(x, 1, -1) for name, x in model.state_dict().items()}
    model.load_state_dict(state)


def swap_data(model: Any) -> None:
    for parameter in model.parameters():
        parameter.data = parameter.data.flip(-1)


def swap_layer(model: Any) -> None:
    layers = model.model.layers
    layers[0], layers[1] = layers[1], layers[0]


def hook_layer(model: Any) -> None:
    model.model.layers[0].mlp.register_forward_hook(lambda module, args, out: -3 * out)


def replace_forward(model: Any) -> None:
    mlp = model.model.layers[0].mlp
    old = mlp.forward
    mlp.forward = lambda x: -3 * old(x)


def replace_class(model: Any) -> None:
    mlp = model.model.layers[0].mlp
    kind = type(mlp)
    mlp.__class__ = type("Own", (kind,), {"forward": lambda self, x: -3 * kind.forward(self, x)})


def write_table(model: Any) -> None:
    """A buffer that is not in the state dict."""
    model.model.rotary_emb.inv_freq.data.mul_(-9)


def replace_table(model: Any) -> None:
    rotary = model.model.rotary_emb
    rotary.inv_freq = rotary.inv_freq * -9


CHANGES = [
    *(sgd_step, write_data, load_state, swap_data, swap_layer, hook_layer),
    *(replace_forward, replace_class, write_table, replace_table),
]


@pytest.mark.parametrize("change", CHANGES)
def test_changed_weights_give_the_text_of_the_changed_model(fresh: Any, change: Any) -> None:
    before = ours(fresh)
    change(fresh)
    want, got = both(fresh)
    assert torch.equal(want, got) and not torch.equal(got, before)


@pytest.mark.parametrize("change", CHANGES)
def test_a_loaded_module_follows_its_weights(fresh: Any, change: Any) -> None:
    """Prompts of a length whose cells are shared with later ones."""
    target = HFTarget(fresh)
    ids = torch.randint(3, VOCAB, (1, 80), generator=torch.Generator().manual_seed(1))
    greedy_with(target, ids[0].tolist())
    change(fresh)
    check_no_old_cells(fresh, target, ids)


def check_no_old_cells(model: Any, target: HFTarget, ids: torch.Tensor) -> None:
    """The next text is the model's, and all its rows are computed."""
    before, num = target.num_rows, ids.shape[1]
    want = model.generate(ids, max_new_tokens=8, do_sample=False)[0, num:].tolist()
    assert greedy_with(target, ids[0].tolist()) == want
    assert target.num_rows - before == num + 7


def steer(model: Any) -> Callable[[], Any]:
    """A tensor that is a plain attribute, read by a hook."""
    mlp = model.model.layers[0].mlp
    mlp.steer = torch.zeros(32)
    mlp.register_forward_hook(lambda module, args, out: out + module.steer)
    return lambda: mlp.steer.normal_().mul_(20)


def hook_state(model: Any) -> Callable[[], Any]:
    """A tensor in a dict that a hook holds."""
    state = {"v": torch.zeros(32)}
    model.model.layers[0].mlp.register_forward_hook(lambda module, args, out: out + state["v"])
    return lambda: state.update(v=torch.randn(32) * 20)


def lora(model: Any) -> Callable[[], Any]:
    """A low-rank update by hand: a function that holds two tensors."""
    linear = model.model.layers[0].mlp.down_proj
    old, a, b = linear.forward, torch.randn(4, 48), torch.zeros(32, 4)
    linear.forward = lambda x: old(x) + x @ a.T @ b.T
    return lambda: b.normal_().mul_(5)


def class_forward(model: Any) -> Callable[[], Any]:
    """The method of the class is replaced."""
    mlp = model.model.layers[0].mlp
    kind = type(mlp)
    mlp.__class__ = own = type("Own", (kind,), {})
    return lambda: setattr(own, "forward", lambda self, x: -3 * kind.forward(self, x))


@pytest.mark.parametrize("prepare", [steer, hook_state, lora, class_forward])
def test_a_loaded_module_follows_what_its_code_holds(fresh: Any, prepare: Any) -> None:
    torch.manual_seed(5)
    change, ids = prepare(fresh), torch.randint(3, VOCAB, (1, 80))
    target = HFTarget(fresh)
    greedy_with(target, ids[0].tolist())
    change()
    check_no_old_cells(fresh, target, ids)


hidden_scale = [1.0]  # a global, which is not watched


@pytest.mark.parametrize("is_twin", [False, True])
def test_an_update_of_no_weights_drops_what_was_computed(fresh: Any, is_twin: bool) -> None:
    mlp, ids = fresh.model.layers[0].mlp, torch.randint(3, VOCAB, (1, 80))
    mlp.register_forward_hook(lambda module, args, out: hidden_scale[0] * out)
    target = HFTarget(fresh)
    other = target.twin() if is_twin else target
    greedy_with(other, ids[0].tolist())
    version = other.weights_version
    hidden_scale[0] = -3.0
    try:
        target.update_weights({})
        check_no_old_cells(fresh, other, ids)
        assert other.weights_version > version, "models drop what drafters learned"
    finally:
        hidden_scale[0] = 1.0


def greedy_with(target: HFTarget, prompt: list[int], num: int = 8) -> list[int]:
    """A greedy text of one sequence without drafts, on the cells that the target keeps."""
    seq = Sequence(list(prompt), len(prompt), Sampling(), SeededDice(0), limit=num)
    for _ in range(num):
        rows = target.forward(ForwardBatch([seq], [EMPTY]))[0]
        seq.tokens.append(int(rows.row(-1).argmax()))
    target.release(seq)
    return seq.generated


def test_unchanged_weights_keep_their_cells(fresh: Any) -> None:
    target = HFTarget(fresh)
    prompt = list(range(3, 43)) * 2
    greedy_with(target, prompt)
    before = target.num_rows
    greedy_with(target, prompt)
    assert target.num_rows - before == 8


def test_a_model_drops_what_drafters_learned_from_old_weights(fresh: Any, tmp_path: Path) -> None:
    model = Model(HFTarget(fresh), WholeNumbers(), repr(fresh))  # type: ignore[arg-type]
    prompt = [PROMPT[0].tolist()]
    for kept in (False, True):
        before = model.drafter("suffix")
        assert model.drafter("suffix") is before
        if kept:
            model.memory(tmp_path / "kept", drafter="suffix")
        sgd_step(fresh)
        result = model.generate(prompt, drafter="suffix", temperature=0.0, max_new_tokens=12)
        want = fresh.generate(PROMPT, max_new_tokens=12, do_sample=False)
        assert result[0].samples[0].tokens == want[0, PROMPT.shape[1] :].tolist()
        assert (model.drafter("suffix") is before) == kept


class WholeNumbers:
    """A tokenizer whose texts are numbers."""

    eos_ids: tuple[int, ...] = ()

    def encode(self, text: str, special: bool = True) -> list[int]:
        return [int(word) for word in text.split()]

    def vocabulary(self) -> dict[str, int]:
        return {str(token): token for token in range(VOCAB)}

    def decode(self, tokens: list[int], **_: Any) -> str:
        return " ".join(map(str, tokens))


def test_a_step_while_a_text_runs_reaches_its_next_token(fresh: Any) -> None:
    class Changes(Drafter):
        def observe(self, step: Any) -> None:
            if len(step.seqs[0].generated) >= 6 and not done:
                done.append(len(step.seqs[0].generated))
                with torch.no_grad():
                    fresh.lm_head.weight.neg_()

    done: list[int] = []
    got = ours(fresh, drafter=Changes())[0].tolist()
    head = PROMPT.shape[1] + done[0]
    want = fresh.generate(torch.tensor([got[:head]]), max_new_tokens=len(got) - head)
    assert got == want[0].tolist()


def test_resized_and_converted_models(fresh: Any) -> None:
    ours(fresh)
    fresh.resize_token_embeddings(VOCAB + 16)
    assert same(fresh)
    fresh.to(torch.float64)
    assert same(fresh)
    fresh.set_attn_implementation("eager")
    assert same(fresh)


# 2. the module stays as it was


def state_of(model: Any) -> Any:
    modes = [(name, m.training) for name, m in model.named_modules()]
    hooks = [len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules()]
    configs = model.config.to_json_string(), model.generation_config.to_json_string()
    return modes, hooks, configs, model.config._attn_implementation, sorted(vars(model))


@pytest.mark.parametrize("mode", ["train", "mixed", "eval"])
def test_a_module_is_left_as_it_was(fresh: Any, mode: str) -> None:
    fresh.train(mode != "eval")
    fresh.model.layers[0].train(mode == "train")
    before, grads = state_of(fresh), [p.requires_grad for p in fresh.parameters()]
    rng = torch.get_rng_state()
    got = ours(fresh)
    assert state_of(fresh) == before
    assert [p.requires_grad for p in fresh.parameters()] == grads
    assert torch.equal(torch.get_rng_state(), rng), "greedy texts draw nothing"
    assert torch.equal(got, copy.deepcopy(fresh).eval().generate(PROMPT, max_new_tokens=24))


def test_a_used_module_is_trained_and_used_again(fresh: Any) -> None:
    fresh.train()
    getattr(fresh, "activation_checkpointing_enable", fresh.gradient_checkpointing_enable)()
    for _ in range(3):
        ours(fresh, max_new_tokens=6)
        assert fresh.training and all(x.gradient_checkpointing for x in fresh.model.layers)
        sgd_step(fresh)
    assert same(fresh.eval())


@pytest.mark.parametrize("kind", ["dynamic", "longrope"])
def test_rotary_tables_made_in_a_run_do_not_stop_training(kind: str) -> None:
    model = made("llama", **rope(kind))
    ours(model, max_new_tokens=40)
    before = ours(model, max_new_tokens=4)
    model.train()
    sgd_step(model)
    assert not any(x.is_inference() for m in model.modules() for x in m._buffers.values())
    assert not torch.equal(before, ours(model.eval(), max_new_tokens=4))


def test_a_used_module_is_copied_saved_and_freed(fresh: Any) -> None:
    want = ours(fresh)
    assert not [name for name in vars(fresh) if "forerun" in name]
    file = io.BytesIO()
    torch.save(fresh, file)
    file.seek(0)
    for twin in (
        copy.deepcopy(fresh),
        pickle.loads(pickle.dumps(fresh)),
        torch.load(file, weights_only=False),
    ):
        assert torch.equal(ours(twin), want)
    watch = weakref.ref(twin)
    del twin
    gc.collect()
    assert watch() is None


# 3. inputs


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("position_ids", torch.arange(9)[None] + 3),
        (CACHE, DynamicCache()),
        ("output_attentions", True),
        ("prompt_lookup_num_tokens", 4),
        ("num_beams", 2),
        ("cache_implementation", "quantized"),
    ],
)
def test_arguments_without_a_use_are_refused_by_name(fresh: Any, name: str, value: Any) -> None:
    options = {name: value, "return_dict_in_generate": True}
    with pytest.raises((ConfigError, ImportError), match="cache|" + name):
        ours(fresh, **options)


def test_embeddings_as_inputs_are_refused(fresh: Any) -> None:
    embeds = fresh.get_input_embeddings()(PROMPT)
    options = {"max_new_tokens": 4, "custom_generate": generate}
    with pytest.raises(ConfigError, match="inputs_embeds"):
        fresh.generate(inputs_embeds=embeds, **options)
    with pytest.raises(ConfigError, match="inputs_embeds"):
        fresh.generate(PROMPT, inputs_embeds=embeds, **options)


def test_token_types_of_gpt2_are_refused() -> None:
    with pytest.raises(ConfigError, match="token_type_ids"):
        ours(made("gpt2"), token_type_ids=torch.zeros_like(PROMPT))


def test_an_assistant_model_is_refused(fresh: Any) -> None:
    with pytest.raises(ConfigError, match="assistant_model"):
        ours(fresh, assistant_model=copy.deepcopy(fresh))


@pytest.mark.parametrize("shape", [(1, 12), (1, 5), (2, 9)])
def test_a_mask_of_another_shape_is_named(fresh: Any, shape: tuple[int, int]) -> None:
    with pytest.raises(ConfigError, match=r"attention_mask must have the shape of input_ids, \[1"):
        ours(fresh, attention_mask=torch.ones(shape))


@pytest.mark.parametrize("role", ["drafter", "verifier", "controller"])
@pytest.mark.parametrize("value", [None, 3, [], {}, int])
def test_what_is_no_method_is_refused_in_a_line(fresh: Any, role: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=f"{role} must be a name, such as '.*', got"):
        fresh.generate(PROMPT, max_new_tokens=2, custom_generate=generate, **{role: value})
    if role == "drafter":
        with pytest.raises(ConfigError, match="drafter must be a name"), candidates(fresh, value):
            pass


KINDS_WITH_STATE: dict[str, tuple[Any, dict[str, Any]]] = {
    "mamba": (MambaConfig, {}),
    "falcon_mamba": (FalconMambaConfig, {}),
    "mamba2": (Mamba2Config, {"num_heads": 4, "head_dim": 16, "state_size": 8, "n_groups": 1}),
}


@pytest.mark.parametrize("kind", KINDS_WITH_STATE)
def test_models_without_attention_are_served(kind: str) -> None:
    config, own = KINDS_WITH_STATE[kind]
    torch.manual_seed(7)
    names = ("vocab_size", "hidden_size", "num_hidden_layers", "pad_token_id")
    sizes = {name: SIZES[name] for name in names} | {"bos_token_id": 1, "eos_token_id": None}
    model = AutoModelForCausalLM.from_config(config(**sizes, **own)).eval()
    for parameter in model.parameters():
        parameter.data *= 4 if parameter.dim() > 1 else 1
    assert same(model)
    ids = torch.tensor([[0, 0, 5, 6, 7, 5, 6], [4, 9, 3, 9, 3, 7, 7]])
    assert same(model, ids, attention_mask=(ids > 0).long())
    name = "cache" if IS_RENAMED else "cache_params"
    cache = model(input_ids=PROMPT, use_cache=True)[name]
    with pytest.raises(ConfigError, match=f"{name}=DynamicCache with a state"):
        ours(model, **{name: cache})


def test_usual_positions_and_masks_are_served(fresh: Any) -> None:
    ids = torch.tensor([[0, 0, 5, 6, 7], [4, 9, 3, 9, 3]])
    mask = (ids > 0).long()
    mask[1] = 1
    assert same(fresh, ids, attention_mask=mask)
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    assert same(fresh, ids, attention_mask=mask, position_ids=positions)
    assert same(fresh, PROMPT, attention_mask=torch.ones_like(PROMPT).bool())
    assert same(fresh, PROMPT, use_cache=False)


def test_right_padding_in_a_boolean_mask_is_refused(fresh: Any) -> None:
    mask = torch.tensor([[True] * 6 + [False] * 3])
    with pytest.raises(ConfigError, match="left"):
        ours(fresh, attention_mask=mask)


class Kept(BaseStreamer):
    def __init__(self) -> None:
        self.got: list[int] = []
        self.ends = 0

    def put(self, value: torch.Tensor) -> None:
        self.got += value.flatten().tolist()

    def end(self) -> None:
        self.ends += 1


def test_the_streamer_of_generate_is_served(fresh: Any) -> None:
    streamer = Kept()
    out = ours(fresh, streamer=streamer)
    assert streamer.got == out[0].tolist() and streamer.ends == 1


def tiny_vlm() -> Any:
    """A LLaVA with small towers."""
    from transformers import CLIPVisionConfig, LlavaConfig, LlavaForConditionalGeneration

    vision = CLIPVisionConfig(
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        image_size=8,
        patch_size=4,
    )
    text = LlamaConfig(**SIZES, max_position_embeddings=128)
    torch.manual_seed(3)
    config = LlavaConfig(vision_config=vision, text_config=text, image_token_index=40)
    model = LlavaForConditionalGeneration(config).eval()
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0
    return model


def test_images_are_refused_and_text_of_the_same_model_is_served() -> None:
    model = tiny_vlm()
    ids = torch.tensor([[5, 40, 40, 40, 40, 6]])
    pixels = torch.randn(1, 3, 8, 8)
    with pytest.raises(ConfigError, match="pixel_values"):
        ours(model, ids, pixel_values=pixels)
    assert same(model)


# 4. logits processors with state


class Counting(LogitsProcessor):
    """Favours tokens by the number of its calls, and records them."""

    def __init__(self) -> None:
        self.calls: list[tuple[int, ...]] = []
        self.seen: list[list[int]] = []

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self.calls.append(tuple(input_ids.shape))
        self.seen.append(input_ids[0].tolist())
        bias = torch.zeros_like(scores)
        bias[:, (7 * len(self.calls)) % VOCAB] = 3.0
        return scores + bias


@pytest.mark.parametrize("drafter", ["stand", "prompt_lookup", "suffix", "auto"])
@pytest.mark.parametrize("end", [None, 5, "criterion"])
def test_a_processor_with_state_is_called_once_a_token(
    fresh: Any, drafter: str, end: Any, caplog: pytest.LogCaptureFixture
) -> None:
    theirs, mine = Counting(), Counting()
    options: dict[str, Any] = {
        "return_dict_in_generate": True,
        "output_scores": True,
        "output_logits": True,
        "max_new_tokens": 40,
        "do_sample": False,
    }
    if end == "criterion":
        options["stopping_criteria"] = StoppingCriteriaList([EndsWith(21)])
    elif end is not None:
        options["eos_token_id"] = end
    want = fresh.generate(PROMPT, **options, logits_processor=LogitsProcessorList([theirs]))
    got = ours(fresh, drafter=drafter, **options, logits_processor=LogitsProcessorList([mine]))
    assert torch.equal(got.sequences, want.sequences)
    assert mine.calls == theirs.calls and mine.seen == theirs.seen
    for name in ("scores", "logits"):
        pairs = zip(getattr(got, name), getattr(want, name), strict=True)
        assert all(torch.allclose(a, b, atol=1e-4) for a, b in pairs)
    assert "failed" not in caplog.text


class EndsWith(StoppingCriteria):
    """Ends a row at a token."""

    def __init__(self, token: int) -> None:
        self.token = token

    def __call__(self, input_ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
        return input_ids[:, -1] == self.token


def test_classifier_free_guidance(fresh: Any) -> None:
    options = {"guidance_scale": 1.7, "negative_prompt_ids": torch.tensor([[9, 3]])}
    assert same(fresh, **options)
    assert same(fresh.train().eval(), guidance_scale=0.4)
    with pytest.raises(ConfigError, match="Guidance.*batch size 2"):
        ours(fresh, PROMPT.repeat(2, 1), guidance_scale=1.7)


class Slotted(LogitsProcessor):
    """State that `vars` does not show."""

    __slots__ = ("count",)

    def __init__(self) -> None:
        self.count = 0

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self.count += 1
        return scores


class Late(LogitsProcessor):
    """State that the first call does not change; a subclass of one without state."""

    def __init__(self) -> None:
        self.count = 0

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self.count += input_ids.shape[1] > PROMPT.shape[1]
        return scores


class OwnPenalty(RepetitionPenaltyLogitsProcessor):
    """A subclass of one without state."""


def closure(input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
    calls.append(1)
    return scores


calls: list[int] = []
KINDS = [Counting(), Slotted(), Late(), OwnPenalty(1.2), closure, lambda ids, scores: scores]


@pytest.mark.parametrize("processor", KINDS, ids=lambda p: type(p).__name__)
def test_processors_of_unknown_code_are_refused_in_a_batch(fresh: Any, processor: Any) -> None:
    name = getattr(processor, "__name__", type(processor).__name__)
    for options in ({}, {"num_return_sequences": 3, "do_sample": True}):
        ids = PROMPT if options else PROMPT.repeat(3, 1)
        with pytest.raises(ConfigError, match=f"processor {name} .*batch size 3.*rowwise=True"):
            ours(fresh, ids, logits_processor=LogitsProcessorList([processor]), **options)
    assert not calls, "refused before the first call"


def test_a_prefix_function_needs_a_batch_of_one_or_a_declaration(fresh: Any) -> None:
    def allowed(row: int, ids: torch.Tensor) -> list[int]:
        return [(3 * int(ids[-1]) + row) % VOCAB, 4]

    ids = torch.tensor([[5, 6, 7, 5], [9, 3, 9, 3]])
    assert same(fresh, prefix_allowed_tokens_fn=allowed)
    with pytest.raises(ConfigError, match="prefix_allowed_tokens_fn cannot be used with batch"):
        ours(fresh, ids, prefix_allowed_tokens_fn=allowed)
    assert same(fresh, ids, prefix_allowed_tokens_fn=allowed, rowwise=True)
    with pytest.raises(ConfigError, match="Guidance"):  # it does keep state
        ours(fresh, ids, guidance_scale=1.7, rowwise=True)


class RowBias(LogitsProcessor):
    """Without state; depends on the row of the batch."""

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        bias = torch.zeros_like(scores)
        for row in range(len(scores)):
            bias[row, 3 + 5 * row] = 2.0 + (input_ids[row, -1] % 3)
        return scores + bias


def test_a_processor_without_state_serves_a_batch(fresh: Any) -> None:
    ids = torch.tensor([[5, 6, 7, 5], [9, 3, 9, 3], [4, 4, 4, 4]])
    assert same(fresh, ids, logits_processor=LogitsProcessorList([RowBias()]), rowwise=True)


# 5. stopping criteria


@pytest.mark.parametrize(
    "criteria",
    [
        [EosTokenCriteria(torch.tensor(21))],
        [EosTokenCriteria(torch.tensor([21, 8])), MaxLengthCriteria(20)],
        [MaxLengthCriteria(14)],
        [MaxLengthCriteria(60)],
        [MaxLengthCriteria(3)],
        [MaxTimeCriteria(0.0)],
        [EndsWith(21)],
    ],
    ids=["end", "ends and length 20", "length 14", "length 60", "length 3", "no time", "own"],
)
@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("eos", [None, 30])
def test_the_users_criteria_win(fresh: Any, criteria: list[Any], rows: int, eos: Any) -> None:
    ids = torch.tensor([[5, 6, 7, 5], [9, 3, 9, 3], [4, 4, 4, 4]])[:rows]
    options: dict[str, Any] = {"stopping_criteria": StoppingCriteriaList(criteria)}
    options |= {"eos_token_id": eos, "rowwise": any(isinstance(c, EndsWith) for c in criteria)}
    assert same(fresh, ids, **options, max_new_tokens=30)


class Calls(StoppingCriteria):
    """Ends all rows at its fifth call."""

    def __init__(self) -> None:
        self.count = 0

    def __call__(self, input_ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
        self.count += 1
        return torch.full((len(input_ids),), self.count >= 5)


class OwnEnd(EosTokenCriteria):
    """A subclass of one without state."""


def test_a_criterion_with_state_needs_a_batch_of_one(fresh: Any) -> None:
    def options() -> dict[str, Any]:
        return {"stopping_criteria": StoppingCriteriaList([Calls()])}

    want = fresh.generate(PROMPT, max_new_tokens=24, do_sample=False, **options())
    assert torch.equal(ours(fresh, **options()), want) and want.shape[1] == PROMPT.shape[1] + 5
    for criterion in (Calls(), OwnEnd(5), lambda ids, scores: torch.zeros(len(ids)).bool()):
        name = getattr(criterion, "__name__", type(criterion).__name__)
        with pytest.raises(ConfigError, match=f"criterion {name} .*batch size 3.*rowwise=True"):
            ours(fresh, PROMPT.repeat(3, 1), stopping_criteria=StoppingCriteriaList([criterion]))


def test_a_criterion_gets_the_scores_that_were_asked_for(fresh: Any) -> None:
    class Sure(StoppingCriteria):
        def __init__(self) -> None:
            self.got: list[torch.Tensor] = []

        def __call__(self, input_ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
            assert len(scores) == input_ids.shape[1] - PROMPT.shape[1]
            self.got.append(scores[-1])
            return torch.full((len(input_ids),), len(scores) == 11)

    theirs, mine = Sure(), Sure()
    options: dict[str, Any] = {"return_dict_in_generate": True, "output_scores": True}
    options |= {"do_sample": False, "max_new_tokens": 30}
    want = fresh.generate(PROMPT, stopping_criteria=StoppingCriteriaList([theirs]), **options)
    got = ours(fresh, stopping_criteria=StoppingCriteriaList([mine]), **options)
    assert torch.equal(got.sequences, want.sequences) and len(mine.got) == len(theirs.got) == 11
    assert all(torch.allclose(a, b, atol=1e-4) for a, b in zip(mine.got, theirs.got, strict=True))


# 6. length


def rope(kind: str, factor: float = 4.0, own: int = 32) -> dict[str, Any]:
    params: dict[str, Any] = {"rope_type": kind, "rope_theta": 10000.0, "factor": factor}
    if kind == "yarn":
        params["original_max_position_embeddings"] = own
    if kind == "longrope":
        params |= {**FACTORS, "original_max_position_embeddings": own}
        own *= 8
    return {"max_position_embeddings": own, "rope_parameters": params}


@pytest.mark.parametrize("kind", ["llama", "qwen2", "gemma2", "phi3", "bloom"])
def test_texts_go_beyond_the_declared_length_as_in_generate(
    kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    fields = {} if kind == "bloom" else {"max_position_embeddings": 24}
    model = made(kind, **fields)
    with caplog.at_level(logging.WARNING, "forerun"):
        assert same(model, max_new_tokens=60)
    assert ("24 positions" in caplog.text) == (kind != "bloom")


@pytest.mark.parametrize(("kind", "long"), [("linear", 128), ("yarn", 128), ("dynamic", 128)])
def test_scaling_factors_extend_the_length(
    kind: str, long: int, caplog: pytest.LogCaptureFixture
) -> None:
    model = made("llama", **rope(kind))
    assert HFTarget(model).context == long
    with caplog.at_level(logging.WARNING, "forerun"):
        assert same(model, max_new_tokens=80)
    assert "trained for" not in caplog.text


@pytest.mark.parametrize("kind", ["gpt2", "mpt"])
def test_stored_positions_end_with_a_clear_refusal(kind: str) -> None:
    model = made(kind)
    assert same(model, max_new_tokens=64 - 9 + 1) or kind == "mpt"
    with pytest.raises(CapacityError, match="stores 64 positions"):
        ours(model, max_new_tokens=100)
    with pytest.raises(CapacityError, match="prompt has 70 tokens"):
        ours(model, torch.randint(3, VOCAB, (1, 70)), max_new_tokens=4)


# 7. tables that depend on the length of a pass


@pytest.mark.parametrize("length", [20, 31, 32, 33, 40])
@pytest.mark.parametrize("kind", ["llama longrope", "llama dynamic", "phi3 longrope"])
@pytest.mark.parametrize("drafter", ["stand", "prompt_lookup", "none"])
def test_drafts_near_the_switch_of_tables_change_nothing(
    kind: str, length: int, drafter: str
) -> None:
    family, _, name = kind.partition(" ")
    fields = rope(name)
    if family == "phi3":
        fields["original_max_position_embeddings"] = 32
    model = made(family, **fields)
    ids = torch.tensor([[5 + i % 4 for i in range(length)]])
    want = copy.deepcopy(model).generate(ids, max_new_tokens=40, do_sample=False)
    assert torch.equal(ours(model, ids, max_new_tokens=40, drafter=drafter), want)
    texts = model.generate(ids, max_new_tokens=40, do_sample=False)
    assert torch.equal(texts, want), "plain generate finds its tables as before"


class OwnRope(torch.nn.Module):
    """Rotary embeddings of foreign code, scaled by the last position of the pass."""

    def __init__(self, inner: Any) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor, position_ids: torch.Tensor) -> Any:
        scale = 1 + max(int(position_ids.max()) - 20, 0) / 16
        return self.inner(x, position_ids.float() / scale)


def test_unknown_tables_are_found_by_a_probe(caplog: pytest.LogCaptureFixture) -> None:
    model = made("llama")
    model.model.rotary_emb = OwnRope(model.model.rotary_emb)
    with caplog.at_level(logging.WARNING, "forerun"):
        assert same(model, max_new_tokens=40)
    assert caplog.text.count("position tables that change") == 1


@pytest.mark.parametrize("kind", ["dynamic", "longrope"])
def test_rotary_state_of_the_module_is_restored(kind: str) -> None:
    model = made("llama", **rope(kind))
    rotary = model.model.rotary_emb
    before = {name: x.clone() for name, x in rotary.named_buffers()}
    names, cached = set(vars(rotary)), rotary.max_seq_len_cached
    ours(model, max_new_tokens=60)
    assert rotary.max_seq_len_cached == cached and set(vars(rotary)) == names
    assert all(torch.equal(x, before[name]) for name, x in rotary.named_buffers())


# 8. borders


@pytest.mark.parametrize(
    "options",
    [{"top_p": 0.0}, {"top_p": 0.0, "top_k": 0}, {"top_k": 1}, {"min_p": 1.0, "top_k": 0}],
    ids=str,
)
def test_samples_of_one_token_are_greedy(fresh: Any, options: dict[str, Any]) -> None:
    want = fresh.generate(PROMPT, max_new_tokens=24, do_sample=False)
    assert torch.equal(ours(fresh, do_sample=True, **options), want)


class Levels(LogitsProcessor):
    """Equal scores in steps of 0.5."""

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        return (scores * 2).round() / 2


@pytest.mark.parametrize(
    "options",
    [{"top_k": 3}, {"top_k": 0, "top_p": 0.3}, {"top_k": 7, "top_p": 0.5, "temperature": 1.5}],
    ids=str,
)
def test_equal_scores_at_a_border_count_as_in_generate(fresh: Any, options: dict[str, Any]) -> None:
    """The tokens that get drawn are exactly those that plain generate leaves possible."""
    processors = {"logits_processor": LogitsProcessorList([Levels()])}
    plain = fresh.generate(
        PROMPT,
        max_new_tokens=1,
        do_sample=True,
        return_dict_in_generate=True,
        output_scores=True,
        **options,
        **processors,
    )
    possible = plain.scores[0][0].isfinite().nonzero().flatten().tolist()
    probs = plain.scores[0][0].softmax(-1)
    set_seed(0)
    drawn = ours(
        fresh,
        max_new_tokens=1,
        do_sample=True,
        num_return_sequences=400,
        rowwise=True,
        **options,
        logits_processor=LogitsProcessorList([Levels()]),
    )
    counts = torch.bincount(drawn[:, -1], minlength=VOCAB)
    assert counts.nonzero().flatten().tolist() == possible
    assert float((counts / 400 - probs).abs().max()) < 0.1


class Nothing(LogitsProcessor):
    def __init__(self, value: float) -> None:
        self.value = value

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        return torch.full_like(scores, self.value)


@pytest.mark.parametrize("do_sample", [False, True])
@pytest.mark.parametrize(("value", "said"), [(-torch.inf, "Nothing"), (torch.nan, "NaN")])
def test_rows_without_a_token_are_named(
    fresh: Any, value: float, said: str, do_sample: bool
) -> None:
    processors = LogitsProcessorList([Nothing(float(value))])
    with pytest.raises(ForerunError, match=said):
        ours(fresh, do_sample=do_sample, logits_processor=processors)


def test_a_row_without_a_prompt_is_named(fresh: Any) -> None:
    ids = PROMPT.repeat(2, 1)
    mask = torch.ones_like(ids)
    mask[1] = 0
    with pytest.raises(ConfigError, match="row 1 is all zeros"):
        ours(fresh, ids, attention_mask=mask)
    with pytest.raises(ConfigError, match="prompt is empty"):
        ours(fresh, PROMPT[:, :0])
