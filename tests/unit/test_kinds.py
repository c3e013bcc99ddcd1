"""Kinds of methods: what is one, what other packages add, and the options that choose them."""

from __future__ import annotations

import importlib
import json
import re
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from command import Call, python, records

import forerun
from forerun import registry
from forerun.constraints.corpus import Corpus
from forerun.errors import ConfigError, UnknownName

SWITCH = "entropy_switch:small=draft,threshold="
TEXTS = ["the cat sat on the mat", "the cat ran away", "a dog sat on the cat"]
MEMBERS = [(kind, name) for kind in registry.KINDS for name in registry.names(kind)]


@pytest.mark.parametrize(("kind", "name"), MEMBERS, ids=".".join)
def test_every_name_is_one_class_of_its_role(kind: str, name: str) -> None:
    home, _, title = registry.KINDS[kind].role.partition(":")
    if find_spec(home) is None:
        pytest.skip(f"the role {title} has no module yet")
    cls = registry.get(kind, name)
    assert issubclass(cls, getattr(importlib.import_module(home), title))
    assert cls.__name__[0] != "_" and registry.summary(kind, name)


@pytest.mark.parametrize("kind", registry.KINDS)
def test_helpers_are_no_methods(kind: str) -> None:
    folder = Path(importlib.import_module(registry.KINDS[kind].package).__path__[0])
    modules = {path.stem for path in folder.glob("*.py")}
    helpers = {name for name in modules if name.startswith("_")} | registry.NO_METHODS
    assert set(registry.names(kind)) == modules - helpers


def test_an_unknown_kind_names_the_nearest() -> None:
    with pytest.raises(UnknownName, match="unknown kind 'constrain'; did you mean 'constraint'"):
        registry.names("constrain")


OTHER = '''
"""Methods of another package: found by their entry points."""

from pathlib import Path

from forerun.compression.base import Pruner
from forerun.core.roles import Shaper
from forerun.search.base import Search
from forerun.tasks.base import Example, Generated


class Last(Shaper):
    """Doubles the last logit. factor: by what it is multiplied."""

    def __init__(self, *, factor: float = 2.0) -> None:
        self.factor = factor

    def logits(self, state, logits):
        shaped = logits.copy()
        shaped[-1] *= self.factor
        return shaped


class Copy(Pruner):
    """Copies the config. suffix: appended to the file's name."""

    def __init__(self, *, suffix: str = ".json") -> None:
        self.suffix = suffix

    def prune(self, source: Path, out: Path):
        out.mkdir()
        (out / f"config{self.suffix}").write_bytes((source / "config.json").read_bytes())
        yield f"made {out.name} with {self.suffix}"


class Echo(Search):
    """Repeats the prompt. times: how often."""

    draws = False

    def __init__(self, *, times: int = 2) -> None:
        self.times = times

    def run(self, model, prompt, **options):
        return Echoed(str(prompt) * self.times)


class Echoed:
    def __init__(self, text):
        self.text = text

    def to_dict(self):
        return {"text": self.text}

    def shown(self):
        return self.text

    def remarks(self, seconds):
        return []


class Sums(Generated):
    """Sums."""

    def make(self, i, rng):
        return Example("", f"{i} + 1 =", str(i + 1))

    def score(self, example, text):
        return float(text.strip() == example.answer)
'''
GROUPS = """\
[forerun.constraints]
last = other_methods:Last
[forerun.pruners]
copy = other_methods:Copy
[forerun.searches]
echo = other_methods:Echo
[forerun.tasks]
sums = other_methods:Sums
"""
CODE = """
from forerun import registry
from forerun.cli.main import main
from forerun.tasks import get_task
print(registry.names("pruner"), "echo" in registry.names("search"))
print(registry.make("constraint", "last:factor=3").factor, get_task("sums").example(4).answer)
print(registry.summary("constraint", "last"))
assert main(["--help"]) == 0
assert main(["search", "--help"]) == 0
assert main(["prune", "copy", "--help"]) == 0
assert main(["prune", "copy", MODEL, "--out", OUT, "--suffix", ".txt"]) == 0
assert main(["search", "echo", "-m", MODEL, "-p", "ab", "--times", "3"]) == 0
"""


def test_another_package_joins_by_entry_points(
    tmp_path: Path, tiny_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "other_methods.py").write_text(OTHER)
    info = tmp_path / "other-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: other\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(GROUPS)
    monkeypatch.syspath_prepend(str(tmp_path))
    out = tmp_path / "pruned"
    said = python(CODE.replace("MODEL", repr(str(tiny_folder))).replace("OUT", repr(str(out))))
    lines = said.splitlines()
    assert lines[:3] == ["['copy'] True", "3.0 5", OTHER.split('"""')[1]]
    assert "prune" in said and re.search(r"echo +Methods of another package", said)
    assert re.search(r"--suffix .*Appended to the file's name\.", said)
    assert lines[-2:] == ["made pruned with .txt", "ababab"]
    assert (out / "config.txt").read_bytes() == (tiny_folder / "config.json").read_bytes()


def test_an_entry_point_that_cannot_be_loaded_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    info = tmp_path / "other-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: other\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[forerun.drafters]\nbroken = nope:Nope\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    said = python(
        "import sys; from forerun.cli.main import main; sys.stderr = sys.stdout\n"
        "assert main(['generate', '-p', 'x', '-d', 'broken']) == 2"
    )
    assert "drafter 'broken' cannot be loaded: No module named 'nope'" in said
    assert "entry point nope:Nope of package other" in said


def test_without_a_pruner_the_command_says_who_adds_one(call: Call) -> None:
    status, out, err = call("prune", "magnitude")
    assert (status, out) == (2, "") and "no pruner is installed" in err
    assert "entry point (forerun.pruners)" in err
    assert "prune" not in call("--help")[1].split()


@pytest.mark.parametrize(("threshold", "alone"), [("99", "draft"), ("-1", "reasoner")])
def test_a_target_is_chosen_on_the_command_line(call: Call, threshold: str, alone: str) -> None:
    """With a threshold that is never or always passed, one of the two models speaks alone."""
    problem, length = "Ann has 3 boxes with 12 pens each. How many pens?", 24
    words = ("-p", problem, "-t", 0, "--max-new-tokens", length, "--drafter", "prompt_lookup")
    status, out, _ = call("generate", *words, "--target", SWITCH + threshold, "--json")
    text = json.loads(out)["text"]
    how: dict[str, Any] = {"temperature": 0.0, "max_new_tokens": length}
    switched = forerun.load(target=SWITCH + threshold)
    assert status == 0 and text == switched.chat(problem, **how).text
    assert text == forerun.load(alone).chat(problem, **how).text


@pytest.mark.parametrize("command", ["generate", "verify", "search", "chat", "bench run"])
def test_bad_targets_are_refused_before_anything_is_loaded(
    call: Call, command: str, tmp_path: Path
) -> None:
    words = [*command.split(), *(["--out", tmp_path / "x"] if command == "bench run" else [])]
    words += ["-p", "x"] if command in ("generate", "search") else []
    for target, said in (
        ("entropy_swich", "unknown target 'entropy_swich'; did you mean 'entropy_switch'"),
        (
            "entropy_switch:small=draft",
            "needs threshold; write entropy_switch:small=VALUE,threshold=VALUE",
        ),
        ("entropy_switch:small=draft,treshold=1", "did you mean 'threshold'"),
        ("entropy_switch:small=draft,threshold=x", "threshold takes a number, got 'x'"),
        ("entropy_switch:small=./gone,threshold=1", "no model folder ./gone"),
    ):
        status, out, err = call(*words, "--target", target)
        assert (status, out) == (2, "") and said in err, err
    status, _, err = call(*words, "--constraint", "corpsu:index=x")
    assert status == 2 and "did you mean 'corpus'" in err


@pytest.fixture(scope="module")
def corpora(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """A text, an n-gram index and an FM-index of it, all with the reasoner's tokenizer."""
    from forerun.cli.main import main

    folder = tmp_path_factory.mktemp("corpora")
    text = folder / "c.jsonl"
    text.write_text("".join(json.dumps({"text": t}) + "\n" for t in TEXTS))
    assert main(["index", "fm", "build", str(folder / "c.fm"), str(text)]) == 0
    assert main(["index", "build", str(folder / "ix"), str(text)]) == 0
    return {"text": str(text), "fm": str(folder / "c.fm"), "index": str(folder / "ix")}


@pytest.mark.parametrize(
    ("older", "spec"),
    [
        ("--within fm --within-window 3", "corpus:index=fm,window=3"),
        ("--mix index --mix-weights 1,0.5", "infini:index=index,weigh=1+0.5"),
        ("--style text --style-lambda 1 --style-form floored", "ngram_style:style=text,"
         "strength=1,form=floored"),
    ],
)  # fmt: skip
def test_a_constraint_is_what_its_older_options_were(
    call: Call, corpora: dict[str, str], older: str, spec: str
) -> None:
    def placed(text: str) -> str:
        for name, path in corpora.items():
            text = re.sub(rf"(?<=[ =]){name}\b", path, text)
        return text

    words = ("generate", "-p", "Tell", "-n", 2, "-t", 2, "--seed", 1, "--max-new-tokens", 12)
    calls = placed(older).split(), ["--constraint", placed(spec)], []
    outputs = [call(*words, "--json", *given)[1] for given in calls]
    before, after, plain = ([one["text"] for one in records(out)] for out in outputs)
    assert before == after != plain


def test_a_constraint_in_python_is_a_text_or_an_object(corpora: dict[str, str]) -> None:
    model, how = forerun.load(), {"seed": 1, "max_new_tokens": 12, "drafter": "prompt_lookup"}
    spec = f"corpus:index={corpora['fm']}"
    own = Corpus(corpora["fm"], tokenizer=model.tokenizer)
    texts = [
        model.generate("Tell", constraint=given, **how)[0].text for given in (spec, [spec], own)
    ]
    assert texts == [model.generate("Tell", shapers=[own], **how)[0].text] * 3
    assert model.constraint(spec) is model.constraint(spec)
    with pytest.raises(ConfigError, match="expected the name of a constraint"):
        model.generate("Tell", constraint=[7])  # type: ignore[list-item]
    with pytest.raises(UnknownName, match="did you mean 'corpus'"):
        model.generate("Tell", constraint="corpsu:index=x")


def test_help_of_generate_is_short(call: Call) -> None:
    shown = call("generate", "--help")[1]
    flags = re.findall(r"^│ +(-[\w-]+)", shown, re.MULTILINE)
    assert 20 <= len(flags) <= 32, flags
    for panel in ("Prompts", "Sampling", "Constraints", "Methods", "Model", "Output"):
        assert f"─ {panel} ─" in shown


OLDER = {  # option -> the same by `--set`
    "--min-p=0.3": "min_p=0.3",
    "--repetition-penalty=1.5": "repetition_penalty=1.5",
    "--presence-penalty=1.5": "presence-penalty=1.5",
    "--frequency-penalty=1": "frequency_penalty=1",
    "--logit-bias=97=9": 'logit_bias={"97":9}',
    "--ban=97": "banned_tokens=[97]",
    "--min-new-tokens=11": "min_new_tokens=11",
    "--ignore-eos": "ignore_eos=true",
    "--logprobs=1": "logprobs=1",
}


def test_other_fields_of_sampling_are_set_by_name(call: Call, tiny_folder: Path) -> None:
    words = ("generate", "-m", tiny_folder, "-p", "the cat", "--seed", 1, "--max-new-tokens", 12)
    words += ("--json", "-d", "prompt_lookup", "--controller", "fixed")
    for older, field in OLDER.items():
        found = [json.loads(call(*words, *given)[1]) for given in ([older], ["--set", field])]
        for record in found:
            for name in ("call", "stats"):
                record.pop(name)
        assert found[0] == found[1], field
    for given, said in (
        (["min_p"], "--set takes NAME=VALUE, e.g. min_p=0.05, got 'min_p'"),
        (["minp=0.1"], "did you mean 'min_p'"),
        (["n=4"], "unknown field of --set: 'n'"),
        (["min_p=0.1", "min-p=0.2"], "gives min_p twice"),
        (["min_p=many"], "min_p"),
    ):
        status, _, err = call(*words, *[f"--set={one}" for one in given])
        assert status == 2 and said in err, err


@pytest.mark.parametrize(
    ("older", "newer"),
    [
        (["-n", "2"], ["best_of", "-n", "2"]),
        (["--method", "best-of", "-n", "2"], ["best_of", "-n", "2"]),
        (["-n", "2", "--method=beam", "--scorer=likelihood", "--width=2", "--answer=x"],
         ["step-beam", "-n", "2", "--scorer=likelihood", "--width=2", "--parse=x"]),
    ],
)  # fmt: skip
def test_a_search_is_named_first(
    call: Call, tiny_folder: Path, older: list[str], newer: list[str]
) -> None:
    """Lines that name it by --method, or not at all, mean the same."""
    common = ("-m", tiny_folder, "-p", "the cat", "--max-new-tokens", 8, "--seed", 3, "--json")
    found = [json.loads(call("search", *words, *common)[1]) for words in (older, newer)]
    for record in found:
        assert record.pop("call").startswith(f"forerun search {record['method']} ")
        record.pop("stats")
        for sample in record.get("samples", ()):
            sample.pop("tau")
    assert found[0] == found[1]


def test_help_of_searches_comes_from_the_classes(call: Call) -> None:
    shown = call("search", "--help")[1]
    for name in registry.names("search"):
        assert registry.summary("search", name)[:30] in " ".join(shown.split())
    shown = " ".join(call("search", "best_of", "--help")[1].replace("│", " ").split())
    assert "Samples to run one by one before the rest." in shown and "--width" not in shown
    assert "[default: 16]" in shown
    status, _, err = call("search", "bets_of", "-p", "x")
    assert status == 2 and "unknown search method 'bets_of'; did you mean 'best_of'" in err


def test_methods_of_a_kind_are_listed(call: Call) -> None:
    found = json.loads(call("methods", "--kind", "target", "--json")[1])
    assert [(row["name"], row["kind"]) for row in found] == [("entropy_switch", "target")]
    listed = call("methods", "--kind", "search")[1].splitlines()
    assert [line.split()[0] for line in listed] == registry.names("search")
    status, out, err = call("methods", "--kind", "pruner")
    assert (status, out) == (0, "") and "no pruner" in err
    both = json.loads(call("methods", "infini", "--json")[1])
    assert set(both["parts"]) == {"drafter", "constraint"}
    one = json.loads(call("methods", "infini", "--kind", "constraint", "--json")[1])
    assert set(one["parts"]) == {"constraint"}
    status, _, err = call("methods", "--kind", "serch")
    assert status == 2 and "did you mean 'search'" in err


def test_the_command_that_methods_prints_runs(call: Call) -> None:
    import shlex

    found = json.loads(call("methods", "entropy_switch", "--json")[1])
    words = shlex.split(found["example"])[1:]
    status, out, _ = call(*words, "--max-new-tokens", 4, "--json")
    assert status == 0 and len(out.splitlines()) == 16
