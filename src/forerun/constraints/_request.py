"""The constraint of a request: how it is sampled, applied as one shaper of the engine, reported."""

from __future__ import annotations

import math
from collections.abc import Mapping
from collections.abc import Sequence as Many
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from forerun.constraints._after import After
from forerun.constraints._all_of import AllOf
from forerun.constraints._report import Report as Report
from forerun.constraints.asap import Asap, AsapMemory
from forerun.constraints.awrs import Awrs
from forerun.constraints.base import Constraint
from forerun.core.records import Sequence, Step
from forerun.core.roles import Shaper
from forerun.core.sampling import Sampling, softmax
from forerun.errors import ConfigError

if TYPE_CHECKING:
    from forerun.models.tokenizer import Tokenizer


@dataclass(eq=False, slots=True)
class Counts:
    """Work of a constraint on one sequence."""

    masks: int = 0
    tests: int = 0  # of single tokens


class Applied(NamedTuple):
    """A constraint, its state, and the counts of the sequence."""

    constraint: Constraint
    state: Any
    counts: Counts


class RequestConstraint(Shaper):
    """Applies `Sampling.constraint` to each sequence that has one."""

    forbids = True

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer

    def start(self, seq: Sequence) -> Applied | None:
        own = seq.sampling.constraint
        return None if own is None else Applied(own, own.start(seq), Counts())

    def advance(self, state: Applied, token: int) -> Applied:
        own, inner, counts = state
        return Applied(own, own.advance(inner, token), counts)

    def logits(self, state: Applied, logits: np.ndarray) -> np.ndarray:
        state.counts.masks += not state.constraint.tests(state.state)
        return state.constraint.logits(state.state, logits)

    def allows(self, state: Applied, token: int) -> bool:
        state.counts.tests += 1
        return state.constraint.allows(state.state, token)

    def forced(self, state: Applied) -> Many[int]:
        return state.constraint.forced(state.state)

    def tests(self, state: Applied) -> bool:
        return state.constraint.tests(state.state)

    def mask(self, state: Applied) -> np.ndarray | None:
        found = state.constraint.mask(state.state)
        state.counts.masks += found is not None
        return found

    def report(self, seq: Sequence, text: str) -> Report | None:
        applied = seq.states[seq.shapers.index(self)]
        if applied is None:
            return None
        own, state, counts = applied
        if seq.end is not None:  # a stop string has cut the text
            kept = cut_tokens(self.tokenizer, seq.generated, text)
            tokens = seq.tokens[: seq.num_prompt] + kept
            state = own.start(replace(seq, tokens=tokens, end=None))
        mass = seq.allowed_mass[: len(seq.generated)] if seq.sampling.allowed_mass else None
        done = own.is_complete(state)
        logw = seq.logw if done or not own.tests(state) else -math.inf
        error, missing = own.error(state), own.missing(state)
        return Report(done, logw, counts.masks, counts.tests, mass, error, missing)


def check_given(given: Any) -> None:
    """Raises ConfigError for a schema or an expression where a constraint or its name belongs."""
    if isinstance(given, Mapping) or hasattr(given, "model_json_schema"):
        name = given.__name__ if isinstance(given, type) else repr(given)
        made = f"JsonSchema({name:.60})"
    elif isinstance(given, str) and given.lstrip()[:1] in ("{", "["):
        made = "JsonSchema(text) for a schema, Regex(text) for a regular expression"
    else:
        return
    raise ConfigError(
        f"constraint must be a constraint or its name, got {given!r:.60}; write {made}, with "
        "from forerun.constraints.json_schema import JsonSchema"
    )


def cut_tokens(tokenizer: Tokenizer, tokens: Many[int], text: str) -> list[int]:
    """The tokens of a text that a stop string has cut.

    tokens: those of which the text begins before the cut. They stay, as special tokens have no text
    that could be encoded; only the rest, where the cut is inside a token, is encoded.
    """
    if tokenizer.pieces is None:
        return tokenizer.encode_inside(text)
    whole, at = text.encode(), 0
    kept, ends = list[int](), [0]  # ends: bytes of the text after each kept token
    for token in tokens:
        piece = b"" if token in tokenizer.specials else tokenizer.pieces(token) or b""
        if not whole.startswith(piece, at):
            break
        at += len(piece)
        kept.append(token)
        ends.append(at)
    while _is_inside_character(whole, ends[-1]):
        kept.pop()
        ends.pop()
    return kept + tokenizer.encode_inside(whole[ends[-1] :].decode())


def _is_inside_character(text: bytes, at: int) -> bool:
    """Whether a text in UTF-8 has the rest of a character from `at` on."""
    return at < len(text) and 0x80 <= text[at] < 0xC0


def prepared(
    sampling: Sampling,
    constraints: Many[Constraint],
    tokenizer: Tokenizer,
    vocab_size: int,
    memory: AsapMemory | None = None,
    law: str = "",
) -> Sampling:
    """The sampling parameters with their constraint and `constraints` as one, ready for a model.

    constraints: bound to the model. memory: of ASAp. law: a text that names the other shapers.
    Raises ConfigError, DataError for a constraint that cannot be used.
    """
    own = sampling.constraint
    if own is not None and not isinstance(own, Constraint):
        check_given(own)
        raise ConfigError(
            f"constraint must be a constraint such as JsonSchema(...), got {own!r:.80}; pass names "
            "and styles to `generate(constraint=...)`"
        )
    bound = [*constraints, *([] if own is None else [own.bind(tokenizer, vocab_size)])]
    if not bound:
        check_method(sampling, is_constrained=False)
        return sampling
    whole = bound[0] if len(bound) == 1 else AllOf(bound)
    if sampling.constraint_start is not None:
        whole = After(sampling.constraint_start, whole).bind(tokenizer, vocab_size)
    check_method(sampling)
    how = sampling.constraint_method
    if how != "mask":
        whole = Asap(whole, memory, law) if how == "asap" else Awrs(whole)
    return replace(sampling, constraint=whole)


DEFAULTS = {"constraint_start": None, "constraint_sampling": "mask", "allowed_mass": False}


def check_method(sampling: Sampling, *, is_constrained: bool = True) -> None:
    """Raises ConfigError for a way to sample that the other settings exclude."""
    if not is_constrained:
        for name, default in DEFAULTS.items():
            if (value := getattr(sampling, name)) != default:
                raise ConfigError(f"{name}={value!r} needs a constraint; give one, or leave it out")
    elif sampling.constraint_method != "mask":
        _check_whole_law(sampling)


def _check_whole_law(sampling: Sampling) -> None:
    """Raises ConfigError for settings under which the law of a text is not the whole one."""
    if sampling.ignore_eos:
        raise ConfigError(
            f"constraint_sampling={sampling.constraint_sampling!r} weighs texts with their end "
            "token; leave ignore_eos out"
        )
    if sampling.is_greedy or sampling.truncates:
        raise ConfigError(
            f"constraint_sampling={sampling.constraint_sampling!r} corrects towards the whole law "
            "of the model; it needs a temperature above 0, without top_k, top_p and min_p"
        )


def record_allowed_mass(step: Step) -> None:
    """Listener: stores the probability of the allowed tokens at each emitted one, if requested."""
    for i, (seq, laws) in enumerate(zip(step.seqs, step.laws, strict=True)):
        if not seq.sampling.allowed_mass:
            continue
        for node, _ in zip(step.visited(i), step.emitted[i], strict=True):
            own, state, _ = next(s for s in laws.states(node) if isinstance(s, Applied))
            free = softmax(laws.unconstrained(node).astype(np.float64), seq.sampling.divisor)
            seq.allowed_mass.append(float(free[own.allowed(state)].sum()))
