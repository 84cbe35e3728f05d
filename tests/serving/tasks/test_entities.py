"""Entities, compared with transformers' own pipeline class on random scores, for each kind of vocabulary."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any, get_args

import numpy as np
import pytest
from numpy.typing import NDArray
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

from builders.serving.entry.config import Aggregation
from builders.serving.entry.request import Options, Question
from builders.serving.entry.tasks.entities import Entities, merged_scores
from builders.serving.entry.tokenise import Piece, Tokeniser
from tests.serving.tasks.parts import answered, window

LABELS = ("O", "B-PER", "I-PER", "B-LOC", "I-LOC", "MISC", "X-RAY-1")
STRATEGIES: tuple[Aggregation, ...] = get_args(Aggregation)
TEXTS = [
    "Wolfgang Amadeus Mozart lived in Salzburg, unbelievably far away.",
    "Grüße aus Köln! Élodie's naïve 🚲 cost $5.00",
    "שלום עולם مرحبا 中文分词",
    "a\0b  \n\n double   spaces\tand tabs ",
    "[SEP] ##ing ﬁne Å\u202eright to left",
    "",
    " ",
    "supercalifragilisticexpialidocious antidisestablishmentarianism",
]


def trained(kind: str, path: Path) -> Path:
    """A tiny vocabulary of a kind, made of the texts' own words."""
    if kind == "bpe":
        tokenizer = Tokenizer(models.BPE())
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = decoders.ByteLevel()
        trainer: Any = trainers.BpeTrainer(
            vocab_size=400,
            special_tokens=["<s>", "</s>", "<unk>"],
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        )
    else:
        tokenizer = Tokenizer(models.Unigram())
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
        tokenizer.decoder = decoders.Metaspace()
        trainer = trainers.UnigramTrainer(
            vocab_size=90,
            special_tokens=["<s>", "</s>", "<unk>"],
            unk_token="<unk>",  # noqa: S106 - no password
            show_progress=False,
        )
    tokenizer.train_from_iterator(TEXTS[:2] * 5, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", special_tokens=[("<s>", 0), ("</s>", 1)]
    )
    tokenizer.save(str(path))
    return path


@pytest.fixture(scope="module", params=["wordpiece", "bpe", "unigram"])
def tokenizer_file(
    request: pytest.FixtureRequest, minilm_tokenizer: Path, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    if request.param == "wordpiece":
        return minilm_tokenizer
    return trained(request.param, tmp_path_factory.mktemp("tokenizer") / "tokenizer.json")


def pipeline_of(path: Path) -> Any:
    """transformers' own class, with the vocabulary and no model."""
    transformers = pytest.importorskip("transformers")
    unknown = "[UNK]" if "janitor" in str(path) else "<unk>"
    own = object.__new__(transformers.TokenClassificationPipeline)
    own.tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_file=str(path), unk_token=unknown)
    own.model = SimpleNamespace(config=SimpleNamespace(id2label=dict(enumerate(LABELS))))
    return own


def librarys(pipeline: Any, text: str, scores: NDArray[np.float32], strategy: Aggregation) -> list[dict[str, Any]]:
    """What the pipeline makes of scores, FP32 [tokens, labels], special tokens included."""
    from transformers.pipelines.token_classification import AggregationStrategy

    kind = AggregationStrategy(strategy)
    encoded = pipeline.tokenizer(
        text, return_offsets_mapping=True, return_special_tokens_mask=True, return_tensors="np"
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        parts = pipeline.gather_pre_entities(
            text,
            encoded["input_ids"][0],
            scores,
            encoded["offset_mapping"][0],
            encoded["special_tokens_mask"][0],
            kind,
        )
    found = pipeline.aggregate(parts, kind)
    key = "entity" if strategy == "none" else "entity_group"
    return [{name: one[name] for name in (key, "score", "word", "start", "end")} for one in found if one[key] != "O"]


def same(one: list[dict[str, Any]], other: list[dict[str, Any]]) -> bool:
    without = [[{**entity, "score": None} for entity in entities] for entities in (one, other)]
    scores = [[float(entity["score"]) for entity in entities] for entities in (one, other)]
    return without[0] == without[1] and np.allclose(*scores, atol=2e-6)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_entities_equal_transformers_own_on_random_scores(tokenizer_file: Path, strategy: Aggregation) -> None:
    tokenise = Tokeniser(tokenizer_file, 512, spans=True)
    pipeline, entities = pipeline_of(tokenizer_file), Entities(LABELS, tokenise)
    chance = np.random.default_rng(5)
    question = Question(tuple(TEXTS), None, Options(aggregation=strategy))
    (tokens,) = tokenise.read([question])
    assert isinstance(tokens, list)
    count = 0
    for _ in range(15):
        # Few labels far apart, so that neighbours often agree, and the padding of a bucket behind.
        rows = [
            chance.dirichlet(np.full(len(LABELS), 0.2), size=text.ids.size + 3).astype(np.float32) for text in tokens
        ]
        documents = entities(answered(tokens, rows, question))
        for (document,), text, row, own in zip(documents, TEXTS, rows, tokens, strict=True):
            expected = librarys(pipeline, text, row[: own.ids.size], strategy)
            assert same(json.loads(document), expected), (text, json.loads(document), expected)
            count += len(expected)
    assert count > 100


def test_document_holds_the_texts_own_characters(minilm_tokenizer: Path) -> None:
    tokenise = Tokeniser(minilm_tokenizer, 64, spans=True)
    question = Question(("Ein 🚲 aus Zürich",), None, Options(aggregation="simple"))
    (tokens,) = tokenise.read([question])
    assert isinstance(tokens, list)
    assert tokens[0].spans
    scores = np.zeros((tokens[0].ids.size, 2), dtype=np.float32)
    scores[:, 0] = 1
    place = 1 + tokens[0].spans.tokens.index("zurich")
    scores[place] = [0.25, 0.75]
    ((document,),) = Entities(("O", "B-LOC"), tokenise)(answered(tokens, [scores], question))
    assert json.loads(document) == [{"entity_group": "LOC", "score": 0.75, "word": "zurich", "start": 10, "end": 16}]
    assert question.texts[0][10:16] == "Zürich"


# Windows


def direct(pieces: list[Piece], rows: list[NDArray[np.float32]]) -> NDArray[np.float32]:
    """Each token by itself: the window in which it is farthest from the edge, the first of equal ones."""
    merged = []
    for place in range(max(piece.start + piece.own for piece in pieces)):
        depths = [
            min(place - piece.start, piece.start + piece.own - 1 - place)
            if piece.start <= place < piece.start + piece.own
            else -1
            for piece in pieces
        ]
        best = depths.index(max(depths))
        merged.append(rows[best][pieces[best].lead + place - pieces[best].start])
    return np.array(merged)


@pytest.mark.parametrize("overlap", [0, 1, 2, 5, 9])
@pytest.mark.parametrize("total", [11, 20, 37])
def test_windows_merged_where_a_token_is_farthest_from_the_edge(total: int, overlap: int) -> None:
    chance = np.random.default_rng(total)
    starts = range(0, max(total - 10, 0) + (10 - overlap), 10 - overlap)
    pieces = [window(start, min(10, total - start)) for start in starts if start < total]
    rows = [chance.random((15, 4)).astype(np.float32) for _ in pieces]
    assert (merged_scores(pieces, rows) == direct(pieces, rows)).all()


def test_one_piece_gives_its_own_rows() -> None:
    row = np.arange(20, dtype=np.float32).reshape(10, 2)
    assert (merged_scores([window(7, 5, lead=2)], [row]) == row[2:7]).all()


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_windows_give_the_entities_of_the_whole_text(minilm_tokenizer: Path, strategy: Aggregation) -> None:
    text = " ".join(TEXTS[:2] * 3)
    whole = Tokeniser(minilm_tokenizer, 512, spans=True)
    windowed = Tokeniser(minilm_tokenizer, 16, spans=True, overlap=5)
    options = Options(truncate="chunk", aggregation=strategy)
    question = Question((text,), None, options)
    (one,), (many,) = whole.read([question]), windowed.read([question])
    assert isinstance(one, list)
    assert isinstance(many, list)
    assert len(many[0].pieces) > 5
    scores = np.random.default_rng(3).dirichlet(np.full(len(LABELS), 0.2), size=one[0].ids.size).astype(np.float32)
    rows = []
    for piece in many[0].pieces:
        row = np.zeros((20, len(LABELS)), dtype=np.float32)
        row[piece.lead : piece.lead + piece.own] = scores[1:-1][piece.start : piece.start + piece.own]
        rows.append(row)
    answers = [
        Entities(LABELS, whole)(answered(tokens, own, question)) for tokens, own in ((one, [scores]), (many, rows))
    ]
    assert answers[0][0, 0] == answers[1][0, 0]
    assert len(json.loads(answers[0][0, 0])) > 5


@pytest.mark.parametrize("truncate", ["end", "start"])
def test_entities_of_a_cut_text_keep_their_place_in_the_whole_one(minilm_tokenizer: Path, truncate: Any) -> None:
    tokenise = Tokeniser(minilm_tokenizer, 8, spans=True)
    text = " ".join(f"{number}" for number in range(30))
    question = Question((text,), None, Options(truncate=truncate, aggregation="none"))
    (tokens,) = tokenise.read([question])
    assert isinstance(tokens, list)
    row = np.tile(np.array([0.25, 0.75], dtype=np.float32), (8, 1))
    ((document,),) = Entities(("O", "I-N"), tokenise)(answered(tokens, [row], question))
    found = json.loads(document)
    numbers = range(6) if truncate == "end" else range(24, 30)
    assert [entity["word"] for entity in found] == [str(number) for number in numbers]
    assert [text[entity["start"] : entity["end"]] for entity in found] == [str(number) for number in numbers]
