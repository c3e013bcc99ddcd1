"""Code of checkpoints runs only if it is trusted, and there is no interactive question."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from tiny import make_tiny

import forerun
from forerun.errors import ModelError
from forerun.models.tokenizer import Tokenizer

SOURCE = Path(__file__).parents[2] / "src"
CODE = """
from pathlib import Path
from transformers import LlamaConfig, LlamaForCausalLM
Path({marker!r}).touch()

class StrangeConfig(LlamaConfig):
    model_type = "strange"

class StrangeForCausalLM(LlamaForCausalLM):
    config_class = StrangeConfig
"""


@pytest.fixture
def strange(tmp_path: Path) -> tuple[Path, Path]:
    """A model with code of its own, and the file that exists once the code has run."""
    folder, marker = make_tiny(tmp_path / "strange"), tmp_path / "it-ran"
    config = json.loads((folder / "config.json").read_text())
    config |= {
        "model_type": "strange",
        "architectures": ["StrangeForCausalLM"],
        "auto_map": {
            "AutoConfig": "modeling_strange.StrangeConfig",
            "AutoModelForCausalLM": "modeling_strange.StrangeForCausalLM",
        },
    }
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "modeling_strange.py").write_text(CODE.format(marker=str(marker)))
    return folder, marker


def run(*words: object) -> subprocess.CompletedProcess[str]:
    """The command, with a user who answers every question with yes."""
    call = [sys.executable, "-m", "forerun", *map(str, words)]
    env = os.environ | {"PYTHONPATH": str(SOURCE)}
    return subprocess.run(call, input="y\n" * 9, capture_output=True, text=True, env=env)


@pytest.mark.parametrize(
    "words",
    [
        ("generate", "--max-new-tokens", 2, "--prompt", "the cat", "--model"),
        pytest.param(("serve", "--port", 0), marks=pytest.mark.slow),
        pytest.param(("verify", "--model"), marks=pytest.mark.slow),
    ],
)
def test_code_does_not_run_unless_trusted(strange: tuple[Path, Path], words: tuple) -> None:
    folder, marker = strange
    ended = run(*words, folder)
    assert ended.returncode == 2, ended.stderr
    errors = [line for line in ended.stderr.splitlines() if line.startswith("error")]
    assert len(errors) == 1 and "--trust-remote-code" in errors[0]
    assert "[y/N]" not in ended.stdout + ended.stderr and not marker.exists()


def test_trusted_code_runs(strange: tuple[Path, Path]) -> None:
    folder, marker = strange
    words = ("generate", "--max-new-tokens", 2, "--prompt", "the cat", "--model", folder)
    ended = run(*words, "--trust-remote-code")
    assert ended.returncode == 0, ended.stderr
    assert marker.exists()


def test_python_takes_the_same_option(strange: tuple[Path, Path]) -> None:
    folder, marker = strange
    with pytest.raises(ModelError, match="trust_remote_code=True in forerun.load"):
        forerun.load(folder)
    assert not marker.exists()
    model = forerun.load(folder, trust_remote_code=True)
    assert marker.exists() and model.target.vocab_size
    with pytest.raises(ModelError):  # the permission was for that model only
        forerun.load(folder)


def test_code_of_a_tokenizer_does_not_run(tmp_path: Path) -> None:
    folder, marker = make_tiny(tmp_path / "tiny"), tmp_path / "it-ran"
    path = folder / "tokenizer_config.json"
    config = json.loads(path.read_text())
    config |= {
        "tokenizer_class": "StrangeTokenizer",
        "auto_map": {"AutoTokenizer": ["tokenization_strange.StrangeTokenizer", None]},
    }
    path.write_text(json.dumps(config))
    code = f"from pathlib import Path\nPath({str(marker)!r}).touch()\n"
    (folder / "tokenization_strange.py").write_text(code)
    try:
        Tokenizer.load(folder)
    except ModelError as error:
        assert "--trust-remote-code" in str(error)
    assert not marker.exists()


@pytest.mark.slow
def test_bin_checkpoints_say_how_to_convert_them(tmp_path: Path) -> None:
    """One line, and its command works."""
    folder = make_tiny(tmp_path / "tiny")
    from safetensors.torch import load_file

    torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()
    words = ("generate", "--max-new-tokens", 4, "--temperature", 0, "--prompt", "the cat")
    ended = run(*words, "--model", folder)
    assert ended.returncode == 0, ended.stderr
    lines = [line for line in ended.stderr.splitlines() if ".bin" in line]
    assert len(lines) == 1 and "go through transformers" in lines[0]
    command = shlex.split(re.search(r"python -c .*", lines[0])[0])  # type: ignore[index]
    subprocess.run([sys.executable, *command[1:]], cwd=tmp_path, check=True, capture_output=True)
    again = run(*words, "--model", tmp_path / "converted")
    assert again.returncode == 0 and ".bin" not in again.stderr
    assert again.stdout == ended.stdout
