"""Whatever a config.json says, a model loads or is refused in words."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
from parity import branching, forward, prompt, saved, sequence

from forerun.errors import ForerunError, ModelError
from forerun.models.load import load_target

NAN = float("nan")
VALUES = [0, -5, 10**9, NAN, "x", None, [1, 2]]
FIELDS = (
    "hidden_size",
    "num_hidden_layers",
    "num_key_value_heads",
    "rope_parameters",
    "layer_types",
)


def rewritten(folder: Path, **fields: Any) -> Path:
    """The folder with other fields in its config.json."""
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))
    return folder


@pytest.mark.parametrize("case", ["llama", "gemma2", "gpt2"])
@pytest.mark.parametrize("version", ["5.0", "4.40"])
def test_no_value_of_a_field_ends_in_an_inner_error(
    case: str, version: str, tmp_path: Path
) -> None:
    """Version 5.0 is read as written where it can be, 4.40 by transformers."""
    saved(case, tmp_path)
    rewritten(tmp_path, transformers_version=version)
    said = (tmp_path / "config.json").read_text()
    assert attempt(tmp_path, "as it was written")
    for name, value in itertools.product([f for f in FIELDS if f in json.loads(said)], VALUES):
        attempt(rewritten(tmp_path, **{name: value}), f"{name} {value}")
        (tmp_path / "config.json").write_text(said)


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
        ({"num_key_value_heads": 3}, "4 heads do not share 3 key-value heads"),
        ({"num_hidden_layers": 10**9}, "num_layers must be at most 4,096, got 1000000000"),
        ({"max_position_embeddings": -5}, "context must be an integer of at least 1, got -5"),
    ],
)
def test_sizes_that_do_not_fit_are_named(fields: dict[str, Any], said: str, tmp_path: Path) -> None:
    saved("llama", tmp_path)
    rewritten(tmp_path, transformers_version="5.0", **fields)
    with pytest.raises(ModelError, match=rf"config\.json cannot be used: {said}"):
        load_target(tmp_path)


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
