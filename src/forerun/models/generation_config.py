"""What a checkpoint's generation_config.json says of sampling: told at load, obeyed by nobody here.

transformers' generate takes its defaults from there. Ours are those of `Sampling`, whatever the
model; so one warning names what is set, and the options that do the same here.
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
SAMPLED = {"temperature", "top_k", "top_p", "min_p"}  # looked at only where do_sample is true,
SAMPLED |= {"typical_p", "top_h", "epsilon_cutoff", "eta_cutoff"}  # and so are these
OFF = {  # name -> the value that changes nothing; null and what is empty never do
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
TOP_K = 50  # what transformers takes where a file that samples names none
ROOM = {"max_new_tokens": 1 << 40}  # for a min_new_tokens that is looked at alone
SHORT = reprlib.Repr()
SHORT.maxlist, SHORT.maxstring = 16, 80


class Defaults(NamedTuple):
    """What a generation config changes.

    said: its fields that do; is_greedy: whether transformers does not sample then; ours: fields of
    Sampling for the same; rest: names for which, or for whose value, there is none.
    """

    said: dict[str, Any]
    is_greedy: bool
    ours: dict[str, Any]
    rest: list[str]

    @classmethod
    def of(cls, given: dict[str, Any]) -> Defaults:
        """As transformers reads it. One that sets nothing here counts as silent, although without
        do_sample nothing is sampled there."""
        said = {n: given[n] for n in OFF if given.get(n) not in (None, "", [], {}, OFF[n])}
        is_greedy = bool(said) and given.get("do_sample") is not True
        ours: dict[str, Any] = {"temperature": 0} if is_greedy else {}
        if given.get("do_sample") is True and given.get("top_k") is None:
            ours["top_k"] = TOP_K
        rest = []
        for name in said:
            if name == "do_sample" or (is_greedy and name in SAMPLED):
                continue
            if _is_alike(name, said[name]):
                ours[ALIKE[name]] = said[name]
            else:
                rest.append(name)
        return cls(said, is_greedy, ours, rest)


def tell_defaults(model: Any) -> None:
    """Warns once if a folder, hub id or loaded transformers model has defaults of sampling.

    Raises ModelError for a damaged file.
    """
    given, where = _read(model)
    found = Defaults.of(given)
    if not found.said and not found.ours:
        return
    why = " (do_sample is not true: nothing is sampled)" if found.is_greedy else ""
    what = _listed(found.said or {"do_sample": True})
    text = (
        f"{where} sets {what}; transformers' generate obeys that by default{why}, forerun does not"
    )
    if found.ours:
        text += f"; as options here: {_listed(found.ours)}"
    if found.rest:
        text += f"; no option for {', '.join(found.rest)}"
    log.warning("%s", text)


def _read(model: Any) -> tuple[dict[str, Any], str]:
    """A generation config, empty where there is none, and where it stands."""
    if isinstance(model, str | Path):
        path = model_folder(model, TOKENIZER) / FILE
        return (read_json(path) if path.is_file() else {}), str(path)
    config = getattr(model, "generation_config", None)
    where = "generation_config of the model"
    return (config.to_diff_dict() if config is not None else {}), where


def _is_alike(name: str, value: Any) -> bool:
    """Whether Sampling has such a field, and takes such a value for it."""
    if name not in ALIKE:
        return False
    try:
        Sampling(**{**ROOM, ALIKE[name]: value})
    except ConfigError:
        return False
    return True


def _listed(fields: dict[str, Any]) -> str:
    """As arguments are written; long values are cut."""
    return ", ".join(f"{name}={SHORT.repr(value)}" for name, value in fields.items())
