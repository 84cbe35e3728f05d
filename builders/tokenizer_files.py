"""The tokeniser's file as the entry serves it."""

from __future__ import annotations

import json
import os
from pathlib import Path

from builders.errors import SourceError
from builders.source import EncoderSource


def write_tokenizer(source: EncoderSource, destination: Path) -> Path:
    """Copy tokenizer.json without its baked-in padding and truncation.

    A published file may carry both (MiniLM's pads every text to 128 tokens and cuts it there); the entry pads to
    the bucket and cuts at `max_tokens` itself. Everything else stays as it is.

    Args:
        source: the model.
        destination: folder to write into; made if it is missing.

    Returns:
        The written file, `destination/tokenizer.json`.

    Raises:
        SourceError: tokenizer.json is no tokenizer that the `tokenizers` package reads.
    """
    from tokenizers import Tokenizer

    origin = source.folder / "tokenizer.json"
    remedy = "write it again: AutoTokenizer.from_pretrained(FOLDER).save_pretrained(FOLDER)"
    try:
        document = json.loads(origin.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise SourceError(f"tokenizer.json cannot be read ({error})", value=str(origin), remedy=remedy) from None
    if not isinstance(document, dict):
        raise SourceError("tokenizer.json is no JSON object", value=str(origin), remedy=remedy)
    document |= {"padding": None, "truncation": None}
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
