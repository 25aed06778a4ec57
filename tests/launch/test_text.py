"""Tokenizer and corpora."""

from __future__ import annotations

import hashlib
import json
import platform
import sys

import pytest
import torch
from mistral_tokenizer import (
    PROBE,
    PROBE_IDS,
    check_known_ids,
    load_mistral_tokenizer,
    load_tokenizer,
)
from text_corpus import Blocks, Corpus, load_corpus

from hf_attn_backends.errors import LaunchError

needs_demo = pytest.mark.skipif(
    __import__("importlib.util").util.find_spec("mistral_common") is None,
    reason="the extra 'demo' is not installed",
)


@needs_demo
def test_the_real_tokenizer_has_its_vocabulary_and_its_ids():
    tokenizer = load_mistral_tokenizer()
    assert tokenizer.vocabulary == 32_000
    assert tokenizer.encode([PROBE]) == [[1, *PROBE_IDS, 2]]
    assert tokenizer.processor.decode(PROBE_IDS) == PROBE
    assert len(tokenizer.sha256) == 64
    assert tokenizer.encode(["a  b", ""]) == [[1, 264, 28705, 287, 2], [1, 2]]


def test_another_tokenizer_under_the_name_is_refused():
    with pytest.raises(LaunchError, match="must have 32000 pieces, got 3"):
        check_known_ids(3, PROBE_IDS)
    with pytest.raises(LaunchError, match="must read its probe text"):
        check_known_ids(32_000, PROBE_IDS[:-1])


@pytest.mark.parametrize("module", ["mistral_common", "sentencepiece"])
def test_a_missing_package_names_the_extra(monkeypatch, module):
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(LaunchError) as caught:
        load_mistral_tokenizer()
    assert "extra 'demo'" in str(caught.value)
    assert "pip install 'hf-attn-backends[demo]'" in str(caught.value)


def test_an_unknown_tokenizer_folder_is_refused(tmp_path):
    with pytest.raises(LaunchError, match="mistral-v1, or a folder"):
        load_tokenizer(str(tmp_path))


def test_python_docs_are_the_topics_in_order():
    from pydoc_data.topics import topics

    corpus = load_corpus("python-docs")
    assert corpus.documents == tuple(topics[key] for key in sorted(topics))
    facts = corpus.facts()
    assert facts["characters"] == sum(len(text) for text in topics.values()) > 300_000
    assert facts["python"] == platform.python_version()
    assert facts["sha256"] == load_corpus("python-docs").facts()["sha256"]


def test_a_python_without_its_docs_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "pydoc_data.topics", None)
    with pytest.raises(LaunchError, match="packaged without"):
        load_corpus("python-docs")


def test_the_standard_library_is_added_without_its_tests():
    corpus = load_corpus("python-stdlib")
    docs = load_corpus("python-docs")
    assert corpus.documents[: len(docs.documents)] == docs.documents
    assert corpus.facts()["characters"] > 5_000_000
    assert any(text.startswith('r"""HTTP/1.1 client library') for text in corpus.documents)
    with open(pytest.__file__) as file:
        assert file.read() not in corpus.documents  # site-packages


def test_digest_is_over_the_documents_in_order():
    facts = Corpus("x", ("ab", "c")).facts()
    assert facts["sha256"] == hashlib.sha256(b"ab\0c\0").hexdigest()
    assert facts["sha256"] != Corpus("x", ("a", "bc")).facts()["sha256"]
    assert (facts["characters"], facts["documents"]) == (3, 2)


def test_own_text_and_json_lines(tmp_path):
    (tmp_path / "b.txt").write_text("second")
    rows = [{"text": "one", "id": 1}, {"text": "two"}]
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, rows)) + "\n\n")
    (tmp_path / "c.md").write_text("left out of a folder")
    assert load_corpus(str(tmp_path)).documents == ("one", "two", "second")
    assert load_corpus(str(tmp_path / "b.txt")).documents == ("second",)


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("x.jsonl", '{"text": "a"}\n{"no": 1}\n', "x.jsonl:2 must have a field 'text'"),
        ("x.jsonl", '{"text": \n', "x.jsonl:1 must be one JSON object"),
        ("x.csv", "a,b", "must end in .txt or .jsonl, got x.csv"),
        ("x.txt", "  \n", "must hold text, got 1 empty documents"),
    ],
)
def test_broken_corpora_say_where(tmp_path, name, content, says):
    (tmp_path / name).write_text(content)
    with pytest.raises(LaunchError) as caught:
        load_corpus(str(tmp_path / name))
    assert says in str(caught.value)


def test_a_name_that_is_nothing_lists_what_there_is():
    with pytest.raises(LaunchError, match="python-docs, python-stdlib"):
        load_corpus("python-dox")


def test_blocks_join_documents_and_drop_the_rest():
    blocks = Blocks([[1, 10, 2], [1, 11, 12, 2]], 3)
    assert (len(blocks), blocks.tokens) == (2, 7)
    assert torch.equal(blocks[1]["input_ids"], torch.tensor([1, 11, 12]))
    assert torch.equal(blocks[1]["labels"], blocks[1]["input_ids"])
    with pytest.raises(LaunchError, match="one block of 8 tokens, got 7"):
        Blocks([[1, 10, 2], [1, 11, 12, 2]], 8)
