"""Builds the tokenizer of a GGUF file, equal to the original model's tokenizer.json.

The file names the split before byte-level BPE (`tokenizer.ggml.pre`). An unknown name is an error,
since another split gives other ids.
"""

from __future__ import annotations

import json
from collections.abc import Sequence as Many
from pathlib import Path
from typing import TYPE_CHECKING, Any

from forerun.errors import ModelError, in_a_line
from forerun.models.gguf import GgufFile
from forerun.models.gguf_config import token_id
from forerun.models.gguf_splits import SPLITS, pre_tokenizer
from forerun.utils.version import MADE_BY

if TYPE_CHECKING:
    from tokenizers import AddedToken, Tokenizer

UNKNOWN, CONTROL, USER_DEFINED = 2, 3, 4  # tokenizer.ggml.token_type
SPACE = "\u2581"  # sentencepiece's space
ENDS = (  # control tokens that end an answer, even if the file does not name them
    "<|im_end|>",
    "<|endoftext|>",
    "<|eot_id|>",
    "<|eom_id|>",
    "<|end_of_text|>",
    "<|end|>",
    "<end_of_turn>",
)


class Vocabulary:
    """The tokens of a file and their types. Raises ModelError if it has none."""

    def __init__(self, file: GgufFile) -> None:
        self.file = file
        self.tokens: list[str] = self.field("tokens", list)
        kinds: Any = file.metadata.get("tokenizer.ggml.token_type")
        is_usable = isinstance(kinds, list) and len(kinds) == len(self.tokens)
        self.kinds: list[int] = kinds if is_usable else [1] * len(self.tokens)  # 1: normal
        rows = file.tensors["token_embd.weight"].shape[0]
        if len(self.tokens) > rows:
            raise self.error(f"it has {len(self.tokens):,} tokens and {rows:,} embeddings")

    @property
    def ids(self) -> dict[str, int]:
        """Token -> id; the first id of a duplicate token."""
        return {token: i for i, token in reversed(list(enumerate(self.tokens)))}

    def field(self, name: str, kind: type) -> Any:
        """A field of the file. Raises ModelError if it is empty or not a `kind`."""
        value = self.file.metadata.get(f"tokenizer.ggml.{name}")
        if not isinstance(value, kind) or not value:
            raise self.error(f"tokenizer.ggml.{name} is missing")
        return value

    def flag(self, name: str, otherwise: bool) -> bool:
        """A boolean field."""
        return bool(self.file.metadata.get(f"tokenizer.ggml.{name}", otherwise))

    def error(self, cause: str) -> ModelError:
        return ModelError(
            f"the tokenizer in {self.file.path} cannot be built: {cause}; convert the model again "
            "with a recent llama.cpp"
        )

    def text_of(self, key: str) -> str | None:
        """The text of a special token."""
        found = token_id(self.file, key)
        return None if found is None else self.tokens[found]


def save_tokenizer(file: GgufFile, folder: Path) -> None:
    """Writes tokenizer.json, tokenizer_config.json and the chat template. Raises ModelError."""
    vocabulary = Vocabulary(file)
    inner = build(vocabulary)
    inner.save(str(folder / "tokenizer.json"))
    names = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
    special = {name: vocabulary.text_of(key) for name, key in names.items()}
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        "made_by": MADE_BY,
        **{name: text for name, text in special.items() if text is not None},
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2), encoding="utf-8")
    template = file.metadata.get("tokenizer.chat_template")
    if isinstance(template, str) and template:
        (folder / "chat_template.jinja").write_text(template, encoding="utf-8")


def end_ids(file: GgufFile) -> list[int]:
    """Ids that end a text: those named in the file, and the control tokens in ENDS."""
    vocabulary = Vocabulary(file)
    named = [token_id(file, key) for key in ("eos", "eot", "eom")]
    ids = vocabulary.ids
    usual = [ids[text] for text in ENDS if text in ids]
    usual = [i for i in usual if vocabulary.kinds[i] == CONTROL]
    return list(dict.fromkeys(i for i in (*named, *usual) if i is not None))


def build(vocabulary: Vocabulary) -> Tokenizer:
    """The tokenizer. Raises ModelError with the cause."""
    model = vocabulary.field("model", str)
    makers = {"gpt2": _byte_level, "llama": _sentencepiece}
    if model not in makers:
        raise vocabulary.error(f"its model is {model!r}, supported are {', '.join(makers)}")
    try:
        inner, adds_bos = makers[model](vocabulary)
        _add_tokens(inner, vocabulary)
        _frame(inner, vocabulary, adds_bos)
    except ModelError:
        raise
    except Exception as cause:  # the Rust library raises plain Exception
        raise vocabulary.error(in_a_line(cause)) from cause
    return inner


def _byte_level(vocabulary: Vocabulary) -> tuple[Tokenizer, bool]:
    from tokenizers import Tokenizer, decoders, models, normalizers

    name = vocabulary.field("pre", str)
    if name not in SPLITS:
        raise vocabulary.error(
            f"it splits text by the rule {name!r}, which is unknown; known are {', '.join(SPLITS)}"
        )
    split = SPLITS[name]
    merges = _pairs(vocabulary, vocabulary.field("merges", list))
    model = models.BPE(vocabulary.ids, merges, ignore_merges=split.takes_whole)
    inner = Tokenizer(model)
    if split.has_nfc:
        inner.normalizer = normalizers.NFC()
    inner.pre_tokenizer = pre_tokenizer(split)
    inner.decoder = decoders.ByteLevel()
    return inner, split.adds_bos


def _sentencepiece(vocabulary: Vocabulary) -> tuple[Tokenizer, bool]:
    from tokenizers import Tokenizer, decoders, models, normalizers

    is_gemma = vocabulary.file.architecture.startswith("gemma")
    if is_gemma:  # runs of spaces are stored as spaces
        vocabulary.tokens = [
            token.replace(" ", SPACE) if not token.strip(" ") else token
            for token in vocabulary.tokens
        ]
    unknown = token_id(vocabulary.file, "unknown")
    model = models.BPE(
        vocabulary.ids,
        _merges(vocabulary, is_gemma),
        unk_token=None if unknown is None else vocabulary.tokens[unknown],
        fuse_unk=True,
        byte_fallback=True,
    )
    inner = Tokenizer(model)
    spaces: list[Any] = [normalizers.Replace(" ", SPACE)]
    steps: list[Any] = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    if vocabulary.flag("add_space_prefix", not is_gemma):
        spaces.insert(0, normalizers.Prepend(SPACE))
        steps.append(decoders.Strip(" ", 1, 0))
    inner.normalizer, inner.decoder = normalizers.Sequence(spaces), decoders.Sequence(steps)
    return inner, True


def _merges(vocabulary: Vocabulary, is_gemma: bool) -> list[tuple[str, str]]:
    """All pairs of tokens that form a token, in the order of the original tokenizer.json.

    Tokens are ordered by descending score; for gemma, which has no scores, by id. The pairs of one
    token are ordered by their ids; for gemma by the length of the left part.
    """
    given = vocabulary.file.metadata.get("tokenizer.ggml.merges")
    if given:
        return _pairs(vocabulary, given)
    tokens, ids = vocabulary.tokens, vocabulary.ids
    order: Many[int] = range(len(tokens))
    if not is_gemma:
        scores = vocabulary.field("scores", list)
        order = sorted(order, key=lambda i: -scores[i])
    merges = []
    for i in order:
        token = tokens[i]
        cuts = ((token[:at], token[at:]) for at in range(1, len(token)))
        pairs = [(left, right) for left, right in cuts if left in ids and right in ids]
        if not is_gemma:
            pairs.sort(key=lambda pair: (ids[pair[0]], ids[pair[1]]))
        merges += pairs
    return merges


def _pairs(vocabulary: Vocabulary, given: list[str]) -> list[tuple[str, str]]:
    """Merges as stored: two tokens separated by a space."""
    pairs = [merge.split(" ") for merge in given]
    bad = next((merge for merge, pair in zip(given, pairs, strict=True) if len(pair) != 2), None)
    if bad is not None:
        raise vocabulary.error(f"{bad!r} is no merge of two tokens")
    return [(left, right) for left, right in pairs]


def _add_tokens(inner: Tokenizer, vocabulary: Vocabulary) -> None:
    """Adds control and user-defined tokens, which match as a whole."""
    from tokenizers import AddedToken

    known = inner.get_vocab(with_added_tokens=False)
    pairs = list(zip(vocabulary.tokens, vocabulary.kinds, strict=True))

    def added(kind: int) -> list[AddedToken]:
        return [
            AddedToken(token, normalized=False, special=kind != USER_DEFINED, rstrip=_eats(token))
            for token, own in pairs
            if own == kind and token in known and token.strip(SPACE)
        ]

    def _eats(token: str) -> bool:
        return is_phi3 and token not in ("<unk>", "<s>", "<|endoftext|>")

    is_phi3 = vocabulary.file.architecture == "phi3" and vocabulary.field("model", str) == "llama"
    inner.add_special_tokens(added(UNKNOWN) + added(CONTROL))
    inner.add_tokens(added(USER_DEFINED))


def _frame(inner: Tokenizer, vocabulary: Vocabulary, adds_bos: bool) -> None:
    """Adds bos and eos around a text."""
    from tokenizers import processors

    flags = {"bos": vocabulary.flag("add_bos_token", adds_bos)}
    flags["eos"] = vocabulary.flag("add_eos_token", False)
    found = {key: vocabulary.text_of(key) if flag else None for key, flag in flags.items()}
    bos, eos = ([text] if text else [] for text in found.values())
    if not bos and not eos:
        return
    ids = vocabulary.ids
    inner.post_processor = processors.TemplateProcessing(
        single=[*bos, "$A", *eos],
        pair=[*bos, "$A", *eos, *(f"{text}:1" for text in bos), "$B:1", *(f"{t}:1" for t in eos)],
        special_tokens=[(text, ids[text]) for text in dict.fromkeys((*bos, *eos))],
    )
