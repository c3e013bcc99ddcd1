"""Constraints: distance from the conditional law, tests, speed, real models, peers.

    python benchmarks/constraints/run.py --part kl [--data-dir DATA] [--out FOLDER]

kl      KL to the conditional law after 1, 10, 100, 1000 samples: mask, asap, particles
tests   constraint tests per token: AWRS against full masks, three sizes of vocabulary
speed   unconstrained and constrained decoding, with and without drafts, interleaved; cost of masks
models  validity, accuracy, tokens per second and likelihood of JSON, function calls, SQL, strings
peers   transformers with llguidance or xgrammar, vLLM: validity and tokens per second

A part writes <part>.json and <part>.md to --out. Rows that are there already are not measured
again; other options start a new run.
"""

from __future__ import annotations

import sys
from importlib import import_module
from pathlib import Path

sys.path[0] = str(Path(__file__).parents[1])  # of `scripts` and of this package

import scripts  # noqa: E402

from constraints.common import Setting  # noqa: E402

DEFAULTS = {  # of options that parts need differently
    "kl": {"samples": 1000, "repeats": 5, "problems": 2, "tokens": 96},
    "tests": {"samples": 100, "repeats": 1, "problems": 1, "tokens": 1},
    "speed": {"samples": 1, "repeats": 3, "problems": 6, "tokens": 128},
    "models": {"samples": 4, "repeats": 1, "problems": 8, "tokens": 192},
    "peers": {"samples": 1, "repeats": 1, "problems": 8, "tokens": 192},
}


def main() -> None:
    parser = scripts.parser(__doc__)
    parser.add_argument("--part", required=True, choices=[*DEFAULTS])
    for name, text in (
        ("samples", "of a prompt, or laws of a kind"),
        ("repeats", "of a measurement, with other seeds"),
        ("problems", "of each kind"),
        ("tokens", "of a text at most"),
    ):
        parser.add_argument(f"--{name}", type=scripts.count, help=f"{text}; depends on the part")
    parser.add_argument("--seed", type=scripts.number, default=49)
    parser.add_argument("--model", default="smollm2-135m", help="of kl (SyGuS), speed and peers")
    parser.add_argument("--data-dir", type=Path, default=Path("../shared/data"))
    parser.add_argument("--models-dir", type=Path, default=Path("runs/models"))
    parser.add_argument("--peers-dir", type=Path, default=Path(".peers"))
    parser.add_argument("--python", type=Path, help="of an environment with peers")
    parser.add_argument("--out", type=Path, default=Path("runs/constraints"))
    given = parser.parse_args()
    chosen = {name: getattr(given, name) or value for name, value in DEFAULTS[given.part].items()}
    setting = Setting(
        out=given.out,
        data=given.data_dir if given.data_dir.exists() else None,
        models=given.models_dir,
        peers=given.peers_dir,
        python=given.python,
        model=given.model,
        seed=given.seed,
        **chosen,
    )
    import_module(f"constraints.part_{given.part}").run(setting)


if __name__ == "__main__":
    scripts.run(main)
