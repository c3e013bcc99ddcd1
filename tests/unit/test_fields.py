"""Whatever a config.json says, a model loads or is refused in words."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
from parity import TINY, branching, forward, prompt, saved, sequence
from transformers import AutoConfig, AutoModelForCausalLM

from forerun.errors import ForerunError, ModelError
from forerun.models.config_check import COUNTS, SIZES
from forerun.models.load import load_target

NAN = float("nan")
VALUES = [0, -5, 7, 10**9, 10**30, NAN, "x", None, [], [1, 2], True]
OTHERS = (  # fields that we read beside numbers
    *("model_type", "architectures", "dtype", "tie_word_embeddings", "hidden_act", "layer_types"),
    *("attention_bias", "rope_parameters", "sliding_window", "mlp_only_layers", "eos_token_id"),
    *("activation_function", "quantization_config", "transformers_version", "no_rope_layers"),
)


def rewritten(folder: Path, **fields: Any) -> Path:
    """The folder with other fields in its config.json."""
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))
    return folder


@pytest.mark.parametrize(
    ("case", "version"),
    [  # 5.0 is read as written where it can be, 4.40 by transformers
        ("llama", "5.0"),
        ("llama", "4.40"),
        ("gpt2", "5.0"),
        ("qwen3_moe", "4.40"),
        ("gemma2", "5.0"),
        ("gemma3_text", "5.0"),
        ("phi3-longrope", "4.40"),
        ("phi3-partial", "5.0"),
        ("granite", "5.0"),
        ("smollm3", "5.0"),
    ],
)
def test_no_value_of_a_field_ends_in_an_inner_error(
    case: str, version: str, tmp_path: Path
) -> None:
    saved(case, tmp_path)
    rewritten(tmp_path, transformers_version=version)
    said = (tmp_path / "config.json").read_text()
    rotation = json.loads(said).get("rope_parameters") or {}
    pairs = itertools.product(
        [*(name for name in json.loads(said) if name in known()), None], VALUES
    )
    assert attempt(tmp_path, "as it was written")
    loaded = 0
    for name, value in pairs:
        if name is not None:
            loaded += attempt(rewritten(tmp_path, **{name: value}), f"{name} {value}")
        else:
            for inner in rotation:
                changed = {"rope_parameters": {**rotation, inner: value}}
                attempt(rewritten(tmp_path, **changed), f"{inner} {value}")
        (tmp_path / "config.json").write_text(said)
    assert loaded > 20, "null, lists and other sound values of fields that others read"


def known() -> set[str]:
    """The fields that we look at."""
    return {*COUNTS, *SIZES, *OTHERS}


def attempt(folder: Path, what: str) -> bool:
    """Loads a model and runs it, or is told why not; fails for errors that are no user's."""
    try:
        forward(load_target(folder), [sequence(prompt(5))], [branching()])
    except ForerunError:
        return False
    except Exception as cause:
        pytest.fail(f"{what}: {type(cause).__name__}: {cause}")
    return True


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"num_key_value_heads": 0}, "num_key_value_heads must be an integer from 1 to .*, got 0"),
        ({"num_key_value_heads": 3}, "4 heads do not share 3 key-value heads"),
        ({"num_attention_heads": -4}, "num_attention_heads must be an integer .*, got -4"),
        ({"max_position_embeddings": -5}, "max_position_embeddings must be .*, got -5"),
        ({"head_dim": 0}, "head_dim must be an integer of at least 1, got 0"),
        ({"hidden_size": "48"}, "hidden_size must be an integer .*, got '48'"),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers must be .* to 4,096, got 1000000000"),
        ({"rms_norm_eps": NAN}, "rms_norm_eps must be a finite number of at least 0, got nan"),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 0}}, "rope_theta must be .* 0"),
    ],
)
@pytest.mark.parametrize("version", ["5.0", "4.40"])
def test_wrong_fields_are_named(
    fields: dict[str, Any], said: str, version: str, tmp_path: Path
) -> None:
    saved("llama", tmp_path)
    rewritten(tmp_path, transformers_version=version, **fields)
    with pytest.raises(ModelError, match=rf"config\.json cannot be used: {said}"):
        load_target(tmp_path)


def test_fields_of_other_models_are_looked_at_too(tmp_path: Path) -> None:
    """Before a prompt comes: what transformers loads may not run."""
    config = AutoConfig.for_model("gpt_neox", **TINY)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    rewritten(tmp_path, max_position_embeddings=-5)
    with pytest.raises(ModelError, match=r"config\.json cannot be used: max_position_embeddings"):
        load_target(tmp_path)


@pytest.mark.parametrize("fields", [{"num_experts": 16384}, {"head_dim": 0}], ids=str)
def test_what_other_families_write_is_no_fault(fields: dict[str, int], tmp_path: Path) -> None:
    """Doge counts experts of one row each, also where it has none; heads that do not turn have 0
    dimensions that do."""
    config = AutoConfig.for_model("gpt_neox", **TINY)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    assert attempt(rewritten(tmp_path, **fields), str(fields))


@pytest.mark.parametrize("version", ["5.0", "4.40"])
def test_our_decoder_makes_no_part_for_each_of_many_experts(version: str, tmp_path: Path) -> None:
    saved("qwen3_moe", tmp_path)
    rewritten(tmp_path, transformers_version=version, num_local_experts=1 << 20)
    with pytest.raises(ModelError, match="expected at most 4,096 experts, got 1048576"):
        load_target(tmp_path)


@pytest.mark.parametrize("case", ["mistral", "qwen3_moe"])
def test_no_window_is_not_a_window_of_0(case: str, tmp_path: Path) -> None:
    saved(case, tmp_path)
    rewritten(tmp_path, sliding_window=0, use_sliding_window=True)
    with pytest.raises(ModelError, match="sliding_window must be an integer of at least 1, got 0"):
        load_target(tmp_path)
