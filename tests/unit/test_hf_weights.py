"""Weights and code of a module that change between runs, and a module left as it was."""

from __future__ import annotations

import copy
import gc
import io
import pickle
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hf_small import PROMPT, VOCAB, both, made, ours, rope, same

from forerun.api import Model
from forerun.core.dice import SeededDice
from forerun.core.forward_batch import ForwardBatch
from forerun.core.records import Sequence
from forerun.core.roles import Drafter
from forerun.core.sampling import Sampling
from forerun.core.tree import EMPTY
from forerun.models.hf import HFTarget


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


def own_config(model: Any) -> Callable[[], Any]:
    """A config that is not the model's, as parts of multimodal models have."""
    mlp = model.model.layers[0].mlp
    mlp.config = copy.deepcopy(model.config)
    mlp.config.scale = 1.0
    mlp.register_forward_hook(lambda module, args, out: module.config.scale * out)
    return lambda: setattr(mlp.config, "scale", -3.0)


@pytest.mark.parametrize("prepare", [steer, hook_state, lora, class_forward, own_config])
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
