"""The draft model that comes with a model: `forerun-draft.json` in its folder names it.

`{"model": "DRAFT"}`: a folder, relative to the model's folder or absolute, or a model that ships
with forerun. A draft model is never downloaded.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple
from weakref import WeakKeyDictionary, WeakValueDictionary

from forerun.assets import MODELS, embedded
from forerun.errors import ConfigError, ModelError
from forerun.models.identity import tokenizer_hash
from forerun.models.paths import located

if TYPE_CHECKING:
    from forerun.core.roles import Target
    from forerun.models.tokenizer import Tokenizer
    from forerun.runner.model_runner import ModelRunner

FILE = "forerun-draft.json"
FORM = 'expected {"model": "DRAFT"}, the folder of a draft model'
SHOWN_IDS = 3  # of the tokens that differ between two vocabularies, in an error
MAX_DRAFT_SEQS = 4096  # of a shared draft model; KV cells are allocated on demand
# by name; entries exist as long as a drafter uses them
_shared: WeakKeyDictionary[Target, WeakValueDictionary[str, ModelRunner]] = WeakKeyDictionary()


def companion(folder: Path) -> Path | None:
    """The draft folder that a model's folder names; None if it names none.

    Raises ModelError for a bad file, and if the folder has no model.
    """
    path = folder / FILE
    if not path.exists():
        return None
    try:
        text = path.read_text(encoding="utf-8")
        name = _name_in(text)
        local = folder / Path(name).expanduser()
        found = Path(embedded(name)) if name in MODELS and not local.is_dir() else local
        is_there = (found / "config.json").is_file()
        is_itself = is_there and found.samefile(folder)
    except (OSError, ValueError, RuntimeError) as error:  # bad paths and texts
        raise ModelError(f"{path} cannot be used ({error}); {FORM}") from None
    if not name:
        raise ModelError(f"{path}: {FORM}, got {text[:80]!r}; correct or remove the file")
    if is_itself and name:
        raise ModelError(f"{path} names the model itself as its draft; {FORM}, or remove the file")
    if not is_there:
        raise ModelError(
            f"{path} names the draft {name!r}, and there is no model in {local}; put one there, "
            "correct the name or remove the file"
        )
    return found


def _name_in(text: str) -> str:
    """The draft named in the text of a file; "" if the text has another form."""
    try:
        name = json.loads(text)["model"]
    except (ValueError, TypeError, KeyError):
        return ""
    return name if isinstance(name, str) else ""


def name_companion(folder: Path, draft: str | Path) -> None:
    """Writes the file that names the draft of a model's folder."""
    (folder / FILE).write_text(json.dumps({"model": str(draft)}) + "\n", encoding="utf-8")


def shared_draft(target: Target, name: str, tokenizer: Tokenizer | None) -> ModelRunner:
    """The draft model of a target, with its dtype and device; shared by all drafters.

    Raises ModelError if it cannot be loaded, ConfigError for another vocabulary.
    """
    from forerun.models.load import DTYPES

    known, name = _shared.setdefault(target, WeakValueDictionary()), located(name)
    if Path(name).is_dir():
        name = str(Path(name).resolve())
    draft = known.get(name)
    if draft is None:
        model = getattr(target, "model", None)
        kinds = [kind for kind, dtype in DTYPES.items() if dtype == getattr(model, "dtype", None)]
        device = str(getattr(model, "device", "auto"))
        kind = kinds[0] if kinds else "auto"
        draft = load_draft(name, kind, device, MAX_DRAFT_SEQS, tokenizer, target)
        check_size(draft, target, tokenizer)
        known[name] = draft
    return draft


def check_size(draft: ModelRunner, target: Target, tokenizer: Tokenizer | None) -> None:
    """Raises ConfigError for a draft model with fewer logits than there are tokens.

    Without a tokenizer, fewer logits than the target's are taken for another padding.
    """
    if draft.vocab_size >= target.vocab_size or tokenizer is None:
        return
    num_tokens = 1 + max(tokenizer.vocabulary().values(), default=-1)
    if draft.vocab_size < min(num_tokens, target.vocab_size):
        raise ConfigError(
            f"the draft has {draft.vocab_size} logits, and the vocabulary {num_tokens} tokens; use "
            "a draft of the same family"
        )


def load_draft(
    name: str,
    dtype: str,
    device: str,
    max_seqs: int,
    tokenizer: Tokenizer | None,
    target: Target | None = None,
) -> ModelRunner:
    """Loads a draft model; `exits` of the runner names the sub-models of a sorted draft.

    tokenizer: of the target, if the draft must have the same. target: CUDA graphs are off for both
    models or for none. Raises ModelError, and ConfigError for another vocabulary.
    """
    from forerun.models.load import load_target
    from forerun.models.sub_models import read_exits
    from forerun.models.tokenizer import Tokenizer
    from forerun.runner.model_runner import ModelRunner

    path = located(name)
    if tokenizer is not None:
        check_vocabulary(tokenizer, Tokenizer.load(path))
    graphs = getattr(target, "graphs", True)
    how: dict[str, Any] = {"dtype": dtype, "device": device, "graphs": graphs, "is_draft": True}
    found: ModelRunner = load_target(path, max_seqs=max_seqs, **how)  # type: ignore[assignment]
    if isinstance(found, ModelRunner) and Path(path).is_dir():
        found.exits = read_exits(Path(path))
    return found


class ForeignDraft(NamedTuple):
    """A draft model of any vocabulary, and its tokenizer."""

    runner: ModelRunner
    tokenizer: Tokenizer


def load_foreign_draft(
    name: str, dtype: str, device: str, max_seqs: int, target: Target | None = None
) -> ForeignDraft:
    """Loads a draft model of any vocabulary. Raises ModelError."""
    from forerun.models.tokenizer import Tokenizer

    runner = load_draft(name, dtype, device, max_seqs, None, target)
    return ForeignDraft(runner, Tokenizer.load(located(name)))


def has_vocabulary_of(target: Tokenizer, name: str) -> bool:
    """Whether the draft in a folder has the target's tokens with the same ids."""
    from forerun.models.tokenizer import Tokenizer

    return target.vocabulary() == Tokenizer.load(located(name)).vocabulary()


def check_vocabulary(
    target: Tokenizer,
    draft: Tokenizer,
    models: str = "the draft and the target",
    fix: str = "use a draft of the same family, or drafter 'cross_vocab'",
) -> None:
    """Raises ConfigError unless both map the same token strings to the same ids.

    models, fix: what the error calls the two models, and its advice.
    """
    ours, theirs = target.vocabulary(), draft.vocabulary()
    if ours != theirs:
        differ = sorted((i, token) for token, i in theirs.items() if ours.get(token) != i)
        names = ", ".join(f"{i} {token!r}" for i, token in differ[:SHOWN_IDS])
        more = f" and {len(differ) - SHOWN_IDS} more" if len(differ) > SHOWN_IDS else ""
        shown = f"{len(differ)} differ: {names}{more}" if differ else "the draft lacks some"
        hashes = f"{tokenizer_hash(draft)[:8]} and {tokenizer_hash(target)[:8]}"
        raise ConfigError(
            f"{models} have different vocabularies ({len(theirs)} and {len(ours)} tokens; hashes "
            f"{hashes}; {shown}); {fix}"
        )
