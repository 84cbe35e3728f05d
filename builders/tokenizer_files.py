"""The tokeniser's file as the entry serves it."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from builders.errors import SourceError
from builders.source import EncoderSource


def write_tokenizer(source: EncoderSource, destination: Path) -> Path:
    """Copy tokenizer.json without its baked-in padding and truncation.

    A published file may carry both (MiniLM's pads every text to 128 tokens and cuts it there); the entry pads to
    the bucket and cuts at `max_tokens` itself. A model whose sentence-transformers file asks for lower case gets that
    as its first step, as the library does it. Everything else stays as it is, the template of pairs too.

    Args:
        source: the model.
        destination: folder to write into; made if it is missing.

    Returns:
        The written file, `destination/tokenizer.json`.

    Raises:
        SourceError: tokenizer.json is no tokenizer that the `tokenizers` package reads.
    """
    from tokenizers import Tokenizer

    origin = source.transformer / "tokenizer.json"
    remedy = "write it again: AutoTokenizer.from_pretrained(FOLDER).save_pretrained(FOLDER)"
    try:
        document = json.loads(origin.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise SourceError(f"tokenizer.json cannot be read ({error})", value=str(origin), remedy=remedy) from None
    if not isinstance(document, dict):
        raise SourceError("tokenizer.json is no JSON object", value=str(origin), remedy=remedy)
    document |= {"padding": None, "truncation": None}
    if source.lower_case:
        document["normalizer"] = _lowered(document.get("normalizer"))
    text = json.dumps(document, ensure_ascii=False)
    try:
        Tokenizer.from_str(text)
    except Exception as error:  # the Rust side raises plain Exception
        raise SourceError(f"tokenizer.json is no tokenizer ({error})", value=str(origin), remedy=remedy) from None
    destination.mkdir(parents=True, exist_ok=True)
    written = destination / "tokenizer.json"
    # A name of its own: two builds may share the folder.
    draft = written.with_name(f".tokenizer.json.{os.getpid()}")
    draft.write_text(text, encoding="utf-8")
    draft.replace(written)
    return written


def _lowered(normalizer: Any) -> Any:
    """A tokeniser's normalizer with lower-casing before it, unless it has such a step."""
    steps = [] if normalizer is None else normalizer.get("normalizers", [normalizer])
    if any(step.get("type") == "Lowercase" for step in steps):
        return normalizer
    return {"type": "Sequence", "normalizers": [{"type": "Lowercase"}, *steps]}
