"""Warns of sampling defaults in a checkpoint's generation_config.json, which forerun does not use.

transformers' generate takes its defaults from this file. forerun always uses those of `Sampling`.
One warning lists the values, and the options that do the same here.
"""

from __future__ import annotations

import logging
import reprlib
from pathlib import Path
from typing import Any, NamedTuple

from forerun.core.sampling import Sampling
from forerun.errors import ConfigError
from forerun.models.paths import TOKENIZER, model_folder, read_json

log = logging.getLogger("forerun")

FILE = "generation_config.json"
ALIKE = {  # their name -> the field of Sampling that does the same
    **{name: name for name in ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")},
    **{name: name for name in ("min_new_tokens", "max_new_tokens")},
    "suppress_tokens": "banned_tokens",
    "stop_strings": "stop",
    "num_return_sequences": "n",
}
SAMPLED = {"temperature", "top_k", "top_p", "min_p"}  # ignored by transformers unless do_sample
SAMPLED |= {"typical_p", "top_h", "epsilon_cutoff", "eta_cutoff"}
OFF = {  # name -> neutral value; null and empty values are neutral too
    "do_sample": True,
    **{theirs: getattr(Sampling(), ours) for theirs, ours in ALIKE.items()},
    **dict.fromkeys(("typical_p", "encoder_repetition_penalty", "guidance_scale"), 1),
    **dict.fromkeys(("no_repeat_ngram_size", "encoder_no_repeat_ngram_size", "min_length"), 0),
    **dict.fromkeys(("epsilon_cutoff", "eta_cutoff", "penalty_alpha", "token_healing"), 0),
    **dict.fromkeys(("top_h", "bad_words_ids", "sequence_bias", "begin_suppress_tokens")),
    **dict.fromkeys(("forced_bos_token_id", "forced_eos_token_id", "dola_layers")),
    **dict.fromkeys(("exponential_decay_length_penalty", "watermarking_config")),
    **dict.fromkeys(("max_length", "max_time")),
    "num_beams": 1,
}
TOP_K = 50  # default of transformers if do_sample is true
ROOM = {"max_new_tokens": 1 << 40}  # so that any min_new_tokens is valid
SHORT = reprlib.Repr()
SHORT.maxlist, SHORT.maxstring = 16, 80


class Defaults(NamedTuple):
    """The sampling defaults in a generation config.

    given: fields with a non-neutral value. is_greedy: whether transformers is greedy with them.
    ours: equivalent fields of Sampling. rest: names without an equivalent.
    """

    given: dict[str, Any]
    is_greedy: bool
    ours: dict[str, Any]
    rest: list[str]

    @classmethod
    def of(cls, config: dict[str, Any]) -> Defaults:
        """The defaults as transformers reads them; none if all fields are neutral."""
        given = {n: config[n] for n in OFF if config.get(n) not in (None, "", [], {}, OFF[n])}
        is_greedy = bool(given) and config.get("do_sample") is not True
        ours: dict[str, Any] = {"temperature": 0} if is_greedy else {}
        if config.get("do_sample") is True and config.get("top_k") is None:
            ours["top_k"] = TOP_K
        rest = []
        for name in given:
            if name == "do_sample" or (is_greedy and name in SAMPLED):
                continue
            if _is_alike(name, given[name]):
                ours[ALIKE[name]] = given[name]
            else:
                rest.append(name)
        return cls(given, is_greedy, ours, rest)


def warn_of_defaults(model: Any) -> None:
    """Warns once if a folder, hub id or loaded transformers model has defaults of sampling.

    Raises ModelError for a damaged file.
    """
    config, where = _read(model)
    found = Defaults.of(config)
    if not found.given and not found.ours:
        return
    reason = " (do_sample is not true: nothing is sampled)" if found.is_greedy else ""
    values = _listed(found.given or {"do_sample": True})
    text = (
        f"{where} sets {values}; transformers' generate uses that by default{reason}, forerun does "
        "not"
    )
    if found.ours:
        text += f"; as options here: {_listed(found.ours)}"
    if found.rest:
        text += f"; no option for {', '.join(found.rest)}"
    log.warning("%s", text)


def _read(model: Any) -> tuple[dict[str, Any], str]:
    """A generation config, {} if there is none, and its location."""
    if isinstance(model, str | Path):
        path = model_folder(model, TOKENIZER) / FILE
        return (read_json(path) if path.is_file() else {}), str(path)
    config = getattr(model, "generation_config", None)
    where = "generation_config of the model"
    return (config.to_diff_dict() if config is not None else {}), where


def _is_alike(name: str, value: Any) -> bool:
    """Whether Sampling has an equivalent field and accepts the value."""
    if name not in ALIKE:
        return False
    try:
        Sampling(**{**ROOM, ALIKE[name]: value})
    except ConfigError:
        return False
    return True


def _listed(fields: dict[str, Any]) -> str:
    """Fields as arguments; long values are shortened."""
    return ", ".join(f"{name}={SHORT.repr(value)}" for name, value in fields.items())
