"""What indexes are built from: files of all forms, tokenizers, input that cannot be used."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest
from index_files import BYTES, IDS, TEXTS, corpus_file, data, write_lines

from forerun.errors import ConfigError, DataError
from forerun.ngrams.index.build import build as building
from forerun.ngrams.index.build import encoders
from forerun.ngrams.index.build.build import Options, build
from forerun.ngrams.index.build.check import check
from forerun.ngrams.index.build.documents import BadRecord, Document, Reading, list_sources, read
from forerun.ngrams.index.query.engine import Index


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    return corpus_file(tmp_path)


def test_counts_metadata_and_documents_of_a_built_index(corpus: Path, tmp_path: Path) -> None:
    manifest = build(tmp_path / "ix", [corpus], BYTES)
    index = Index.open(tmp_path / "ix")
    count = index.count_many([index.encoder.encode(t) for t in ("to be", "not", "xyz")])
    assert count.tolist() == [4, 2, 0]
    assert manifest.documents == len(TEXTS) and manifest.width == 2
    assert manifest.tokens == sum(map(len, TEXTS)) + len(TEXTS)
    for i, text in enumerate(TEXTS):
        passage = index.document(i)
        assert index.encoder.decode(passage.ids) == text and passage.length == len(text)
        assert passage.metadata == {"path": str(corpus), "line": i + 1, "fields": {"n": i}}
    assert check(tmp_path / "ix", deep=True) == []
    loaded = Index.open(tmp_path / "ix", load=True)
    assert loaded.count(list(b"to be")) == 4 and loaded.held_bytes > 0 == index.held_bytes


def test_all_forms_of_a_corpus_give_the_same_counts(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    zstandard = pytest.importorskip("zstandard")
    from pyarrow import ipc, parquet

    rows = [{"text": t} for t in TEXTS if t]
    lines = "".join(json.dumps(row) + "\n" for row in rows).encode()
    forms = tmp_path / "forms"
    forms.mkdir()
    (forms / "a.jsonl").write_bytes(lines)
    with gzip.open(forms / "b.jsonl.gz", "wb") as file:
        file.write(lines)
    (forms / "c.jsonl.zst").write_bytes(zstandard.ZstdCompressor().compress(lines))
    table = pyarrow.Table.from_pylist(rows)
    parquet.write_table(table, forms / "d.parquet")
    dataset = forms / "e"  # as Dataset.save_to_disk of Hugging Face datasets leaves it
    dataset.mkdir()
    (dataset / "state.json").write_text('{"_data_files": [{"filename": "data.arrow"}]}')
    with ipc.new_stream(str(dataset / "data.arrow"), table.schema) as writer:
        writer.write_table(table)
    (forms / "f.txt").write_text("\n".join(t for t in TEXTS if t) + "\n")
    (forms / ".hidden").write_text("to be")
    counts = []
    for form in sorted(forms.glob("[a-f]*")):
        build(
            tmp_path / "ix",
            [form],
            Options(tokenizer="bytes", reading=Reading(split="line"), workers=1),
            overwrite=True,
        )
        index = Index.open(tmp_path / "ix")
        counts.append((index.library.documents, *index.count_many([list(b"to be"), [98]])))
    assert counts == [(5, 4, 5)] * 6
    build(
        tmp_path / "all",
        [forms],
        Options(tokenizer="bytes", reading=Reading(split="line"), workers=1),
    )
    assert Index.open(tmp_path / "all").count(list(b"to be")) == 24


def test_text_files_are_cut_into_documents(tmp_path: Path) -> None:
    file = tmp_path / "t.txt"
    file.write_text("one\ntwo\n\n\nthree\n")

    def texts(split: str) -> list[tuple[int, str]]:
        return [
            (r.line, r.text) for r in read([file], Reading(split=split)) if isinstance(r, Document)
        ]

    assert texts("line") == [(1, "one"), (2, "two"), (5, "three")]
    assert texts("paragraph") == [(1, "one\ntwo"), (5, "three")]
    assert texts("file") == [(1, "one\ntwo\n\n\nthree\n")]
    with pytest.raises(ConfigError, match="split"):
        Reading(split="word")


def test_unreadable_records_are_named(tmp_path: Path) -> None:
    file = tmp_path / "c.jsonl"
    file.write_bytes(
        b'{"text": "a"}\nno json\n{"other": 1}\n\xff\xfe\n[1]\n{"text": 5}\n{"text": "a\\ud800"}\n'
        b'{"text": "b"}\n'
    )
    found = list(read([file], Reading()))
    bad = [r for r in found if isinstance(r, BadRecord)]
    assert [b.where.rsplit(":", 1)[1] for b in bad] == ["2", "3", "4", "5", "6", "7"]
    assert "no field 'text'" in bad[1].reason and "UTF-8" in bad[2].reason
    assert "field 'text' is not UTF-8 text: half of a surrogate pair (U+D800)" in bad[5].reason
    with pytest.raises(DataError, match=r"c.jsonl:2: not JSON .*--on-error skip"):
        build(tmp_path / "ix", [file], BYTES)
    skipping = Options(tokenizer="bytes", on_error="skip", workers=1)
    manifest = build(tmp_path / "ix", [file], skipping, restart=True)
    assert manifest.documents == 2 and manifest.skipped["count"] == 6
    assert "c.jsonl:2" in manifest.skipped["examples"][0]


def test_a_damaged_archive_is_one_unreadable_record(tmp_path: Path) -> None:
    whole = gzip.compress(b'{"text": "a"}\n' * 1000)
    file = tmp_path / "c.jsonl.gz"
    file.write_bytes(whole[: len(whole) // 2])
    assert isinstance(list(read([file], Reading()))[-1], BadRecord)
    file.write_bytes(b"no archive")
    assert [type(r) for r in read([file], Reading())] == [BadRecord]


def test_a_pool_gives_what_one_process_gives(corpus: Path, tmp_path: Path) -> None:
    build(tmp_path / "one", [corpus], Options(workers=1, shards=3))
    build(tmp_path / "two", [corpus], Options(workers=2, shards=3))
    assert data(tmp_path / "one") == data(tmp_path / "two")


# bad input


def test_ids_that_do_not_fit_are_named(tmp_path: Path) -> None:
    file = write_lines(tmp_path / "n.jsonl", [{"tokens": [1]}, {"tokens": [2, 65535]}])
    with pytest.raises(DataError, match=r"n.jsonl:2: token id 65535 .* 2 bytes .*--width 4"):
        build(tmp_path / "ix", [file], IDS)
    wide = Options(tokenizer="ids", reading=IDS.reading, width=4, workers=1)
    assert build(tmp_path / "ix", [file], wide, restart=True).shards[0].top == 65535
    write_lines(file, [{"tokens": [-1]}])
    with pytest.raises(DataError, match="token id -1"):
        build(tmp_path / "other", [file], IDS)


def big_tokenizer(folder: Path, size: int) -> Path:
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = {f"w{i}": i for i in range(size)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    folder.mkdir()
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


def test_a_large_vocabulary_gets_four_bytes_and_a_remark(tmp_path: Path) -> None:
    file = write_lines(tmp_path / "c.jsonl", [{"text": "w1 w69999 w2"}])
    large = str(big_tokenizer(tmp_path / "large", 70_000))
    manifest = build(tmp_path / "ix", [file], Options(tokenizer=large, width=2, workers=1))
    assert manifest.width == 4 and "using 4 bytes per token" in manifest.notes[0]
    assert Index.open(tmp_path / "ix").count([69_999]) == 1
    manifest = build(tmp_path / "auto", [file], Options(tokenizer=large, workers=1))
    assert manifest.width == 4 and not manifest.notes
    most = str(big_tokenizer(tmp_path / "most", 65_535))
    assert building.choose_width(0, encoders.load(most))[0] == 2


def test_an_index_of_another_tokenizer_is_refused(corpus: Path, tmp_path: Path) -> None:
    build(tmp_path / "ix", [corpus], Options(workers=1))
    assert Index.open(tmp_path / "ix", tokenizer="reasoner").count([1]) >= 0
    with pytest.raises(ConfigError, match="built with tokenizer 'reasoner'.*not with 'bytes'"):
        Index.open(tmp_path / "ix", tokenizer="bytes")


def test_empty_corpora_are_refused_and_leave_nothing(tmp_path: Path) -> None:
    empty = tmp_path / "e.jsonl"
    empty.write_text("\n")
    with pytest.raises(DataError, match="found none in 1 files"):
        build(tmp_path / "ix", [empty], BYTES)
    write_lines(empty, [{"text": ""}])
    with pytest.raises(DataError, match="1 empty documents"):
        build(tmp_path / "ix", [empty], BYTES)
    (tmp_path / "folder").mkdir()
    with pytest.raises(DataError, match="found none"):
        list_sources([tmp_path / "folder"])
    assert not (tmp_path / "ix/building").exists()


def test_options_that_cannot_work_are_refused() -> None:
    for wrong in ({"width": 3}, {"shards": 0}, {"on_error": "ignore"}, {"memory": 1 << 20}):
        with pytest.raises(ConfigError, match=next(iter(wrong))):
            Options(**wrong)


def test_end_ids_in_a_text_become_separators(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        encoders.Ids, "eos", property(lambda self: 9, lambda self, _: None), raising=False
    )
    file = write_lines(tmp_path / "n.jsonl", [{"tokens": [9, 1, 9, 2, 9]}, {"tokens": [9]}])
    build(tmp_path / "ix", [file], IDS)
    index = Index.open(tmp_path / "ix")
    end = index.separator
    assert index.shards[0].text.tolist() == [end, 1, end, 2, end]
    assert index.eos == 9 and index.count([1, 9, 2]) == 1 and index.prob([2], 9).prob == 1.0
    assert index.document(0).ids == [1, 9, 2] and index.document(1).ids == []


def test_a_function_may_tokenise(corpus: Path, tmp_path: Path) -> None:
    build(
        tmp_path / "ix", [corpus], Options(tokenizer=lambda text: [ord(c) for c in text], workers=1)
    )
    index = Index.open(tmp_path / "ix")
    assert index.count([ord(c) for c in "to be"]) == 4
    with pytest.raises(DataError, match="knows no tokenizer"):
        index.encoder.encode("to be")


def test_names_that_could_not_be_kept_are_refused_before_any_work(tmp_path: Path) -> None:
    folder = tmp_path / "texts"
    folder.mkdir()
    (folder / "a\udcff.txt").write_text("to be")
    with pytest.raises(DataError, match="is not UTF-8 text: byte 0xff after"):
        build(tmp_path / "ix", [folder], BYTES)
    assert not (tmp_path / "ix").exists()
