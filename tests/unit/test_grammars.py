"""Grammars, schemas and expressions: what is allowed, with real tokenizers; what is refused."""

from __future__ import annotations

import gzip
import json
import tarfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import forerun
from fakes import FakeTarget
from forerun.constraints import _compiled, _matcher
from forerun.constraints._after import After
from forerun.constraints._grammar_constraint import GrammarConstraint
from forerun.constraints.base import Constraint
from forerun.constraints.choice import Choice
from forerun.constraints.grammar import Grammar
from forerun.constraints.json_schema import JsonSchema
from forerun.constraints.python import Predicate
from forerun.constraints.regex import Regex
from forerun.core.records import Sequence
from forerun.core.roles import Shaper
from forerun.core.sampling import Sampling
from forerun.errors import ConfigError, DataError
from forerun.models.tokenizer import Tokenizer

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 9},
        "tags": {"type": "array", "items": {"enum": ["a"]}},
    },
    "required": ["name", "tags"],
    "additionalProperties": False,
}
NEW = {"max_new_tokens": 40, "seed": 1, "temperature": 1.0}


@pytest.fixture(scope="module")
def model() -> forerun.Model:
    return forerun.load()


def gpt2(folder: Path) -> Tokenizer:
    """The real vocabulary and merges."""
    from transformers import GPT2TokenizerFast

    ids = json.loads(gzip.decompress((folder / "vocab.json.gz").read_bytes()))
    lines = gzip.decompress((folder / "merges.txt.gz").read_bytes()).decode().splitlines()
    merges = [tuple(line.split(" ")) for line in lines if line and not line.startswith("#version")]
    return Tokenizer(GPT2TokenizerFast(vocab=ids, merges=merges), [ids["<|endoftext|>"]])


def phi3(folder: Path) -> Tokenizer:
    """The real tokenizer: SentencePiece with byte fallback."""
    from tokenizers import Tokenizer as Backend
    from transformers import PreTrainedTokenizerFast

    text = gzip.decompress((folder / "tokenizer.json.gz").read_bytes()).decode()
    inner = PreTrainedTokenizerFast(tokenizer_object=Backend.from_str(text))
    return Tokenizer(inner, [inner.convert_tokens_to_ids("<|endoftext|>")])


@pytest.fixture(scope="module", params=["reasoner", "gpt2", "phi3"])
def tokenizer(request: pytest.FixtureRequest, model: forerun.Model) -> Tokenizer:
    if request.param == "reasoner":
        return model.tokenizer
    folder = request.getfixturevalue("data_dir") / "tokenizers" / request.param
    return {"gpt2": gpt2, "phi3": phi3}[request.param](folder)


def state_after(constraint: GrammarConstraint, tokenizer: Tokenizer, text: str):
    return constraint.after(tokenizer.encode_inside(text))


@pytest.mark.parametrize(
    ("constraint", "whole", "parts", "wrong"),
    [
        (JsonSchema(PERSON), '{"name": "é☃", "tags": ["a"]}', ["{", '{"name":'], ["[", '{"x"']),
        (JsonSchema(), '{"a": [1, null, {"b": -2.5e3}]}', ["{", '{"a'], ["[1]", "1"]),
        (Regex(r"[0-9]{3}-[0-9]{4}"), "555-1234", ["5", "555-"], ["x", "5555"]),
        (Choice("yes|yes please|no"), "yes please", ["y", "yes "], ["x", "yes x"]),
        (Grammar('start: "(" start ")" | "x"'), "((x))", ["((", "(x"], [")", "x("]),
        (Grammar('root ::= "a" Root | "b"\nRoot ::= [cd]+'), "acd", ["a"], ["c", "ab"]),
    ],
    ids=["schema", "any object", "regex", "choice", "lark", "gbnf"],
)
def test_what_is_allowed(constraint, whole, parts, wrong, tokenizer: Tokenizer) -> None:
    """By real tokenizers: beginnings are open, whole texts complete, others forbidden; the mask,
    single tests and forced tokens agree at every place."""
    vocab = tokenizer.vocab_size
    bound = constraint.bind(tokenizer, vocab)
    for text in parts:
        assert not bound.is_complete(state_after(bound, tokenizer, text))
        assert bound.allowed(state_after(bound, tokenizer, text)).any()
    for text in wrong:
        assert not bound.allowed(state_after(bound, tokenizer, text)).any()
    state = bound.after([])
    for token in tokenizer.encode_inside(whole):
        mask = bound.allowed(state)
        assert mask[token]
        some = np.random.default_rng(0).integers(0, vocab, 50).tolist()
        assert [bound.allows(state, t) for t in some] == mask[some].tolist()
        forced = bound.forced(state)
        assert not len(forced) or mask[forced[0]]
        state = bound.advance(state, token)
    assert bound.is_complete(state) and bound.allowed(state)[list(tokenizer.eos_ids)].all()
    ended = bound.advance(state, tokenizer.eos_ids[0])
    assert np.flatnonzero(bound.allowed(ended)).tolist() == sorted(tokenizer.eos_ids)
    assert bound.is_complete(ended)


def test_forced_tokens_write_the_forced_text(tokenizer: Tokenizer) -> None:
    bound = Choice(("the only text", "there")).bind(tokenizer, tokenizer.vocab_size)
    state, said = state_after(bound, tokenizer, "the o"), "the o"
    run = bound.forced(state)
    while len(run) and run[0] not in tokenizer.eos_ids:
        said += tokenizer.decode_inside(list(run))
        for token in run:
            state = bound.advance(state, token)
        run = bound.forced(state)
    assert said == "the only text" and bound.is_complete(state)


def test_shared_grammars_compile(data_dir: Path, model: forerun.Model) -> None:
    """llama.cpp's GBNF and the EBNF of GAD's tasks; six of these are broken, and named so."""
    broken, count = [], 0
    for archive in ("llamacpp_grammars.tar.gz", "gad_sygus_grammars.tar.gz"):
        with tarfile.open(data_dir / "prompts" / archive) as files:
            names = [m.name for m in files if m.name.endswith((".gbnf", ".ebnf"))]
            for name in names if archive.startswith("llama") else names[::7]:
                text = files.extractfile(name).read().decode()  # type: ignore[union-attr]
                try:
                    bound = model.constraint(Grammar(text))
                    assert bound.allowed(bound.after([])).any()
                    count += 1
                except DataError as error:
                    broken.append(str(error))
    assert count > 45 and all("the grammar is no GBNF" in error for error in broken)
    assert len(broken) <= 2


def test_a_schema_may_be_a_pydantic_model(model: forerun.Model) -> None:
    pydantic = pytest.importorskip("pydantic")
    made = pydantic.create_model("Person", age=(int, ...))
    bound = model.constraint(JsonSchema(made))
    assert bound.is_complete(state_after(bound, model.tokenizer, '{"age": 3}'))


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: JsonSchema({"properties": {"a": {"not": {}}}}), "#/properties/a/not"),
        (lambda: JsonSchema({"type": "strange"}), "the JSON schema cannot be used"),
        (lambda: JsonSchema("{"), "the schema is no JSON"),
        (lambda: JsonSchema("7"), "a JSON schema is an object, got 7"),
        (lambda: JsonSchema({}, file="x"), "not both"),
        (lambda: JsonSchema(file="/no/such/file"), "cannot be read"),
        (lambda: Regex("(a"), "unclosed group"),
        (lambda: Regex("(?=a)b"), "look-around"),
        (lambda: Regex("x" * 2_000_000), "at most 1048576"),
        (lambda: Grammar("start: a"), "unknown name"),
        (lambda: Grammar("start: start"), "the grammar cannot be used: it allows no text at all"),
        (lambda: Grammar('start: "a"\n%llguidance {"x": 1}'), "line 2: unknown option 'x'"),
        (lambda: Grammar("root ::= a"), "the grammar is no GBNF: Rule 'a' not found"),
        (lambda: Grammar("x", notation="bnf"), "unknown notation 'bnf'"),
        (lambda: Grammar(), "a text or a file"),
        (lambda: Choice(()), "one or more texts"),
        (lambda: Choice("a||b"), "not empty"),
        (lambda: Predicate(), "a function `prefix` or a file"),
        (lambda: Predicate(file="/no/such.py"), "gives no predicate"),
        (lambda: After("", Regex("a")), "must not be empty"),
    ],
)
def test_bad_constraints_are_refused(make, said: str, model: forerun.Model) -> None:
    with pytest.raises((ConfigError, DataError)) as error:
        model.generate("x", constraint=make(), **NEW)
    assert said in str(error.value) and "\n" not in str(error.value)


def test_other_misuse(model: forerun.Model, tmp_path: Path) -> None:
    for given, said in (
        ({"constraint_start": "x"}, "needs a constraint"),
        ({"constraint_sampling": "awrs"}, "needs a constraint"),
        ({"allowed_mass": True}, "needs a constraint"),
        ({"constraint_sampling": "guess"}, "one of mask, asap, awrs, smc"),
        ({"constraint": Regex("a"), "constraint_sampling": "asap", "temperature": 0}, "above 0"),
        ({"constraint": Regex("a"), "constraint_sampling": "asap", "top_k": 3}, "top_k"),
    ):
        with pytest.raises(ConfigError, match=said):
            model.generate("x", **{**NEW, **given})
    with pytest.raises(ConfigError, match="constraint must be a constraint"):
        model.generate("x", Sampling(constraint="regex"), max_new_tokens=3)
    (tmp_path / "p.py").write_text("def prefix(text): return len(text) < 4\n")
    text = model.generate("x", constraint=f"python:file={tmp_path / 'p.py'}", **NEW)[0].text
    assert 0 < len(text.encode()) < 4


def one(model: forerun.Model, constraint: Constraint, **options):
    return model.generate("Ann has 3 pens.", constraint=constraint, **NEW | options)[0].samples[0]


@pytest.mark.parametrize("drafter", ["none", "auto", "stand", "fuse:parts=forced+suffix"])
def test_texts_are_valid_documents(model: forerun.Model, drafter: str) -> None:
    found = model.generate(
        "Ann has 3 pens.",
        constraint=JsonSchema(PERSON, whitespace=False),
        drafter=drafter,
        **NEW | {"n": 4, "max_new_tokens": 200},
    )[0]
    for sample in found.samples:
        assert sample.valid == (sample.finish == "stop")
        if sample.valid:
            assert set(json.loads(sample.text)) == {"name", "tags"}
    assert any(sample.valid for sample in found.samples)


def test_a_cut_text_need_not_be_valid(model: forerun.Model) -> None:
    sample = one(model, Regex("[ab]{60}"), max_new_tokens=5)
    assert sample.finish == "length" and sample.valid is False
    assert one(model, Regex("[ab]{1,60}"), max_new_tokens=5).valid is not False  # may end anywhere


def test_a_stop_string_is_judged_by_the_text_that_is_left(model: forerun.Model) -> None:
    sample = one(model, Regex("ab?c+"), stop="c", max_new_tokens=9)
    assert sample.finish == "stop" and sample.text in ("a", "ab") and sample.valid is False
    sample = one(model, Regex("a+;?b"), stop=";", logit_bias=bias(model, ";", 50))
    assert set(sample.text) <= {"a"} and sample.valid is False


def bias(model: forerun.Model, text: str, value: float) -> dict[int, float]:
    return dict.fromkeys(model.tokenizer.encode_inside(text), value)


NOTHING = Grammar('start: "ab" NEVER\nNEVER: /[^\\s\\S]/')


@pytest.mark.parametrize("drafter", ["none", "stand", "suffix", "forced", "auto"])
def test_a_dead_end_ends_the_text_and_not_the_batch(model: forerun.Model, drafter: str) -> None:
    constraints = [NOTHING, Regex("[0-9]{3}"), Predicate(lambda text: False), None]
    samplings = [Sampling(constraint=c, **NEW) for c in constraints]
    found = model.generate(["Ann has 3 pens."] * 4, samplings, drafter=drafter)
    assert [r.samples[0].valid for r in found] == [False, True, False, None]
    assert found[0].text in ("", "a", "ab") and found[2].text == ""
    assert found[0].samples[0].finish == found[2].samples[0].finish == "stop"


def test_a_predicate_that_raises_is_reported(model: forerun.Model) -> None:
    sample = one(model, Predicate(lambda text: 1 / (3 - len(text)) > 0, lambda text: False))
    assert sample.valid is False and "ZeroDivisionError" in sample.constraint.error


def test_end_tokens_follow_the_grammar(model: forerun.Model) -> None:
    """min_new_tokens cannot lengthen a text that has ended; ignore_eos repeats the end."""
    assert one(model, Choice("a"), min_new_tokens=9).text == "a"
    sample = one(model, Choice("a"), ignore_eos=True, max_new_tokens=6)
    assert sample.text == "a" and len(sample.tokens) == 6 and sample.valid


@pytest.mark.parametrize("drafter", ["none", "stand", "auto"])
def test_a_marker_begins_the_constraint(model: forerun.Model, drafter: str) -> None:
    options = {"constraint_start": "e", "drafter": drafter, "n": 6, "max_new_tokens": 60}
    for sample in model.generate("Ann", constraint=Regex(" ?[0-9]+;"), **NEW | options)[0].samples:
        before, marker, after = sample.text.partition("e")
        if not marker:
            assert sample.valid is False
        elif sample.valid:
            assert after.strip(" ;").isdigit() and after.endswith(";")
        else:
            assert sample.finish == "length"


def test_a_marker_that_never_comes(model: forerun.Model) -> None:
    sample = one(model, Choice("a"), constraint_start="no such marker", max_new_tokens=8)
    assert sample.valid is False and sample.finish in ("length", "stop")


def test_allowed_mass_is_that_of_the_model(model: forerun.Model) -> None:
    """A greedy choice of two texts: the mass by a plain pass."""
    sample = one(model, Regex("[0-9]"), allowed_mass=True, logprobs=400, temperature=1.0)
    digits = set(model.tokenizer.encode_inside("0123456789"))
    every = model.generate("Ann has 3 pens.", max_new_tokens=1, seed=1, logprobs=1000)[0].samples[0]
    wanted = sum(np.exp(every.logprobs[0].get(token, -np.inf)) for token in digits)
    assert len(sample.constraint.allowed_mass) == len(sample.tokens)
    assert sample.constraint.allowed_mass[0] == pytest.approx(wanted, rel=1e-3)


@pytest.mark.parametrize(
    "constraint",
    [
        Regex("(a+)+b"),
        Regex("(a|a)*(a|a)*(a|a)*b{1,900}"),
        Grammar("start: start start | /[ab]/"),
        Grammar('start: start "a" | "b"'),
    ],
    ids=["nested stars", "many ways", "ambiguous", "left recursion"],
)
def test_costly_grammars_end_in_time(model: forerun.Model, constraint: Constraint) -> None:
    """60 tokens within a time that backtracking would exceed by orders of magnitude."""
    start = time.monotonic()
    sample = one(model, constraint, max_new_tokens=60)
    assert set(sample.text) <= {"a", "b"} and time.monotonic() - start < 60


def test_objects_serve_several_models(model: forerun.Model) -> None:
    constraint = Choice("one|two")
    other = forerun.load(dtype="fp32")
    for some in (model, other, model):
        assert some.generate("x", constraint=constraint, **NEW)[0].text in ("one", "two")


def test_corpus_and_grammar_hold_together(model: forerun.Model) -> None:
    found = model.generate("x", constraint=[Regex("[ab]+"), Regex("a{1,3}|c")], n=5, **NEW)[0]
    assert all(sample.text in ("a", "aa", "aaa") for sample in found.samples if sample.valid)
    assert all(sample.valid for sample in found.samples)


def test_options_in_a_text_leave_every_split_allowed(tokenizer: Tokenizer) -> None:
    """A line `%llguidance` of the user, or such a text in a schema, replaces no option of ours."""
    line = '%llguidance {"no_forcing": false}\n'
    plain = Grammar('start: "the only text"')
    wanted = plain.bind(tokenizer, tokenizer.vocab_size)
    for text in (line + plain.text, plain.text + "\n" + line):
        bound = Grammar(text).bind(tokenizer, tokenizer.vocab_size)
        found = bound.allowed(bound.after([]))
        assert found.sum() > 1
        assert found.tolist() == wanted.allowed(wanted.after([])).tolist()
    schema = JsonSchema({"const": "the text %llguidance {}"}, whitespace=False)
    bound = schema.bind(tokenizer, tokenizer.vocab_size)
    assert bound.allowed(bound.after(tokenizer.encode_inside('"'))).sum() > 1


def test_forced_text_without_an_end_is_cut(tokenizer: Tokenizer) -> None:
    """A long one is found piece by piece; one without an end hangs nothing."""
    for constraint in (Regex("a{1000000000}"), Grammar("start: /a{1000}/ start")):
        bound = constraint.bind(tokenizer, tokenizer.vocab_size)
        state, said = bound.after([]), b""
        while len(said) < 2000:
            run = bound.forced(state)
            assert 0 < len(run) <= 512
            for token in run:
                assert bound.allows(state, token)
                state = bound.advance(state, token)
            said += b"".join(tokenizer.token_bytes(tokenizer.vocab_size)[t] or b"" for t in run)
        assert not said.strip(b"a") and not bound.error(state)


def hostile() -> Grammar:
    """A grammar of which one mask would take a quarter of a second with a vocabulary of 50,000."""
    rules = [
        f"r{i}: /[a-z ]/ r{(i * 7 + 1) % 900} | /[a-z ]/ r{(i * 13 + 5) % 900} | /[a-f ]/"
        for i in range(900)
    ]
    return Grammar("\n".join(['start: "a long beginning" r0', *rules]))


def path_of(state) -> list[int]:
    """The tokens of a state."""
    found = []
    while state.above is not None:
        found.append(state.token)
        state = state.above
    return found[::-1]


def test_a_text_that_needs_too_much_work_is_given_up(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At the limit of one mask, and at that of a text; other texts of the grammar go on."""
    vocab = tokenizer.vocab_size
    bound = hostile().bind(tokenizer, vocab)
    monkeypatch.setitem(_compiled.LIMITS, "step_max_items", 300)
    small = Grammar(hostile().text + "\n").bind(tokenizer, vocab)  # compiled with this limit
    state = small.after([])
    mask = small.allowed(state)
    while mask.any():
        state = small.advance(state, int(np.flatnonzero(mask)[-1]))
        mask = small.allowed(state)
    assert "Too many items (limit 300" in small.error(state)
    # another object of the same text, as the engine makes after a draft
    again = state.cursor.root
    for token in path_of(state):
        again = small.advance(again, token)
    assert small.error(again) == small.error(state)
    assert not small.error(again.above)
    assert not small.error(small.after([]))
    monkeypatch.setattr(_matcher, "TEXT_SECONDS", 0.0)
    monkeypatch.setattr(_matcher, "TOKEN_SECONDS", 0.0)
    state = bound.after([])
    bound.allowed(state)  # the last one
    assert not bound.allowed(state).any() and "processor time" in bound.error(state)
    assert not bound.allows(state, 5) and not bound.forced(state)


WIDE_REGEX = r"(.|\n)*[ae](.|\n){12}[io](.|\n)*"  # its states depend on where the letters stood


@pytest.mark.parametrize("drafter", ["none", "auto"])
def test_other_texts_do_not_use_up_the_lexer(
    model: forerun.Model, drafter: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Texts share a lexer; where it is full, they go on with an empty one."""
    monkeypatch.setitem(_compiled.LIMITS, "max_lexer_states", 1500)
    constraint = Regex(WIDE_REGEX)

    def texts(**options: Any) -> list[tuple[str, bool, str]]:
        found = model.generate(
            "Ann has 3 pens.", constraint=constraint, temperature=1.3, max_new_tokens=60,
            drafter=drafter, **options,
        )  # fmt: skip
        return [(s.text, s.valid, s.constraint.error) for s in found[0].samples]

    dropped: list[None] = []
    drop = _compiled.Compiled.drop_lexer
    monkeypatch.setattr(
        _compiled.Compiled, "drop_lexer", lambda self: (dropped.append(None), drop(self))
    )
    before = texts(seed=1, n=4)
    for seed in range(2, 6):
        assert not any(error for *_, error in texts(seed=seed, n=8))
    assert dropped, "the lexer was never full: nothing was tested"
    if drafter == "none":
        assert texts(seed=1, n=4) == before


@pytest.mark.parametrize("drafter", ["none", "auto"])
def test_the_first_text_beyond_a_limit_names_the_cause_too(
    model: forerun.Model, drafter: str
) -> None:
    pattern = "((((a{1,49}){1,50}){1,50}){1,50}){50}" + ("" if drafter == "none" else "b?")
    for _ in range(2):
        sample = one(model, Regex(pattern), drafter=drafter, max_new_tokens=40)
        assert not sample.valid and "too many expressions" in sample.constraint.error


def test_options_of_llguidance_in_a_schema_are_refused() -> None:
    """They would accept keywords that are not supported."""
    schema = {"x-guidance": {"lenient": True}, "type": "integer", "not": {}}
    for given in (schema, json.dumps(schema)):
        with pytest.raises(DataError, match="'x-guidance'.*leave #/x-guidance out"):
            JsonSchema(given)
    JsonSchema({"type": "object", "properties": {"x-guidance": {"type": "string"}}})


def test_a_panic_of_llguidance_is_put_plainly(tokenizer: Tokenizer) -> None:
    text = 'start: "a"' + ' ("b" | "c")?' * 20_000
    with pytest.raises(DataError, match=r"too large or too deep for llguidance; simplify it$"):
        Grammar(text).bind(tokenizer, tokenizer.vocab_size)


class Shifted(Shaper):
    """Another law of the model: one token is more probable."""

    def start(self, seq: Sequence) -> None:
        return None

    def logits(self, state: None, logits: np.ndarray) -> np.ndarray:
        return logits + np.eye(1, len(logits), 70)[0]


def test_bounds_of_asap_belong_to_one_law_of_the_model(tokenizer: Tokenizer) -> None:
    """Other shapers, and other weights, have other bounds."""
    vocab = tokenizer.vocab_size
    model = forerun.Model(FakeTarget(lambda tokens: np.full(vocab, 1 / vocab), vocab), tokenizer)
    call = {"constraint": Regex("[ab]{2}"), "constraint_sampling": "asap", "max_new_tokens": 4}
    model.generate([[1, 2]], **call, drafter="none")
    model.generate([[1, 2]], **call, drafter="none")
    assert len(model.asap.tries) == 1
    model.generate([[1, 2]], **call, drafter="none", shapers=[Shifted()])
    assert len(model.asap.tries) == 2
    model.target.weights_version = 1  # type: ignore[attr-defined]
    model.generate([[1, 2]], **call, drafter="none")
    assert len(model.asap.tries) == 1


def test_a_choice_may_have_thousands_of_options(tokenizer: Tokenizer) -> None:
    options = tuple(f"option number {i}" for i in range(5000))
    bound = Choice(options).bind(tokenizer, tokenizer.vocab_size)
    state = state_after(bound, tokenizer, options[4321])
    assert bound.is_complete(state) and not bound.error(state)
    assert not bound.is_complete(state_after(bound, tokenizer, "option number"))


def test_asap_tells_predicates_apart(model: forerun.Model) -> None:
    """Predicates of later calls may lie at the same address; each has its own bounds."""
    for letter in (b"a", b"b", b"c", b"d"):
        (text,) = {
            sample.text
            for sample in model.generate(
                ["Ann"],
                constraint=Predicate(
                    lambda text, letter=letter: letter.startswith(text),
                    lambda text, letter=letter: text == letter,
                ),
                constraint_sampling="asap",
                n=2,
                max_new_tokens=4,
            )[0].samples
        }
        assert text == letter.decode()
    assert len(model.asap.tries) == 4


def test_an_error_of_a_predicate_belongs_to_one_text(model: forerun.Model) -> None:
    def prefix(text: bytes) -> bool:
        if text == b"b":
            raise ValueError("no b")
        return True

    bound = Predicate(prefix).bind(model.tokenizer, model.target.vocab_size)
    first, second = (bound.begin(b"") for _ in range(2))
    (b,) = model.tokenizer.encode_inside("b")
    assert not bound.allows(first, b)
    assert bound.error(first) == "ValueError: no b" and not bound.error(second)
