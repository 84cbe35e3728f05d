"""The task as the model's own files say it, and the settings that may say otherwise."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from builders.contract import Contract
from builders.errors import SourceError
from tests.builders.test_sentence_folder import MEAN, OLD, PLAIN
from tests.builders.test_source import add_modules, made_up, opened, write


def labelled(*names: str) -> dict[str, Any]:
    return {"id2label": {str(number): name for number, name in enumerate(names)}}


SEQUENCE = {"architectures": ["BertForSequenceClassification"], "type_vocab_size": 2}


@pytest.mark.parametrize(
    ("config", "name", "contract"),
    [
        ({}, "embedding", Contract("EMBEDDING", 8)),
        ({"architectures": ["BertModel"]}, "embedding", Contract("EMBEDDING", 8)),
        ({"architectures": ["BertForMaskedLM"]}, "embedding", Contract("EMBEDDING", 8)),
        (SEQUENCE | labelled("a", "b", "c"), "classification", Contract("SCORES", 3, segment=True)),
        (SEQUENCE | labelled("score"), "reranking", Contract("SCORES", 1, segment=True)),
        (SEQUENCE | labelled("a", "b") | {"type_vocab_size": 1}, "classification", Contract("SCORES", 2)),
        ({"architectures": ["BertForTokenClassification"]} | labelled("O", "B", "I"), "tagging",
         Contract("TAGS", 3, per_token=True)),
        ({"architectures": ["BertForQuestionAnswering"], "type_vocab_size": 2}, "answering",
         Contract("SPANS", 2, per_token=True, segment=True)),
    ],
)  # fmt: skip
def test_task_and_tensors_are_those_of_the_architecture(
    tmp_path: Path, config: dict[str, Any], name: str, contract: Contract
) -> None:
    task = opened(made_up(tmp_path, **config)).task
    assert (task.name, task.contract) == (name, contract)
    pairs = {"embedding": "none", "tagging": "none", "classification": "optional"}
    assert task.pair == pairs.get(name, "required")


def test_head_is_left_out_when_a_classifier_is_served_as_an_encoder(tmp_path: Path) -> None:
    task = opened(made_up(tmp_path, **SEQUENCE), task="embedding").task
    assert (task.name, task.auto_class, task.size) == ("embedding", "AutoModel", 8)


@pytest.mark.parametrize("wanted", ["classification", "tagging", "answering"])
def test_task_is_refused_when_the_model_has_no_head_for_it(tmp_path: Path, wanted: str) -> None:
    made_up(tmp_path, architectures=["BertModel"])
    with pytest.raises(SourceError, match=f"no head for model.task: '{wanted}'; limit: config.json names BertModel"):
        opened(tmp_path, task=wanted)
    add_modules(made_up(tmp_path, **SEQUENCE), *PLAIN, pooling=MEAN)
    with pytest.raises(SourceError, match=r"no head for model.task"):
        opened(tmp_path, task=wanted)


def test_reranker_is_refused_when_it_has_several_labels(tmp_path: Path) -> None:
    made_up(tmp_path, **SEQUENCE, **labelled("a", "b"))
    with pytest.raises(SourceError, match=r"one score for a pair: '2 labels'.*model.task: classification"):
        opened(tmp_path, task="reranking")


def test_labels_are_in_the_order_of_their_numbers(tmp_path: Path) -> None:
    made_up(
        tmp_path,
        **SEQUENCE,
        id2label={"10": "k", "2": "c", "0": "a", "1": "b", **{str(n): f"l{n}" for n in range(3, 10)}},
    )
    assert opened(tmp_path).task.labels[:3] == ("a", "b", "c")
    assert opened(tmp_path).task.labels[10] == "k"


@pytest.mark.parametrize(
    ("config", "labels"), [({}, ("LABEL_0", "LABEL_1")), ({"num_labels": 3}, ("LABEL_0", "LABEL_1", "LABEL_2"))]
)
def test_labels_are_numbered_when_config_names_none(
    tmp_path: Path, config: dict[str, Any], labels: tuple[str, ...]
) -> None:
    assert opened(made_up(tmp_path, **SEQUENCE, **config)).task.labels == labels


@pytest.mark.parametrize(
    ("found", "words"),
    [({"0": "a", "2": "c"}, "has gaps"), ({}, "has gaps"), ({"x": "a"}, "names no labels"), ([], "names no labels")],
)
def test_labels_are_refused_when_config_is_wrong(tmp_path: Path, found: object, words: str) -> None:
    with pytest.raises(SourceError, match=f"id2label of config.json {words}"):
        opened(made_up(tmp_path, **SEQUENCE, id2label=found))


def test_labels_are_the_settings_when_they_fit(tmp_path: Path) -> None:
    made_up(tmp_path, **SEQUENCE, **labelled("LABEL_0", "LABEL_1"))
    assert opened(tmp_path, labels=("no", "yes")).task.labels == ("no", "yes")
    for wrong in (("no",), ("yes", "yes")):
        with pytest.raises(SourceError, match=r"model.labels does not fit.*limit: 2 different names"):
            opened(tmp_path, labels=wrong)


@pytest.mark.parametrize(
    ("config", "activation"),
    [
        (labelled("a", "b"), "softmax"),
        (labelled("a", "b") | {"problem_type": "single_label_classification"}, "softmax"),
        (labelled("a", "b") | {"problem_type": "multi_label_classification"}, "sigmoid"),
        (labelled("a", "b") | {"problem_type": "regression"}, "none"),
        (labelled("score"), "sigmoid"),
        (labelled("score") | {"sbert_ce_default_activation_function": "torch.nn.modules.linear.Identity"}, "none"),
        (labelled("score") | {"sbert_ce_default_activation_function": None}, "sigmoid"),
        (labelled("score") | {"sentence_transformers": {"activation_fn": "torch.nn.modules.linear.Identity"}}, "none"),
        (labelled("a", "b") | {"sentence_transformers": {"version": "4.0"}}, "none"),
        # Not torch's own: the library does not import it either.
        (labelled("score") | {"sentence_transformers": {"activation_fn": "own.Activation"}}, "sigmoid"),
    ],
)  # fmt: skip
def test_activation_is_that_of_the_models_own_library(tmp_path: Path, config: dict[str, Any], activation: str) -> None:
    made_up(tmp_path, **SEQUENCE, **config)
    assert opened(tmp_path).task.activation == activation
    other = opened(tmp_path, activation="softmax")
    assert other.task.activation == "softmax"
    assert (other.sha256 != opened(tmp_path).sha256) == (activation != "softmax")


def test_activation_of_a_cross_encoder_folder_comes_before_config(tmp_path: Path) -> None:
    made_up(tmp_path, **SEQUENCE, **labelled("score"), sentence_transformers={"activation_fn": "torch.nn.Sigmoid"})
    add_modules(tmp_path, f"{OLD}Transformer")
    own = {"model_type": "CrossEncoder", "activation_fn": "torch.nn.modules.linear.Identity"}
    write(tmp_path / "config_sentence_transformers.json", own)
    task = opened(tmp_path).task
    assert (task.name, task.activation, task.pair) == ("reranking", "none", "required")
    write(tmp_path / "config_sentence_transformers.json", own | {"activation_fn": "torch.nn.modules.activation.Tanh"})
    with pytest.raises(SourceError, match=r"activation is not served: 'torch.nn.modules.activation.Tanh'"):
        opened(tmp_path)
    assert opened(tmp_path, activation="none").task.activation == "none"
    write(tmp_path / "config_sentence_transformers.json", own | {"prompts": {"q": "q: "}, "default_prompt_name": "q"})
    with pytest.raises(SourceError, match=r"cross-encoder has a default prompt: 'q'"):
        opened(tmp_path)


def test_dimensions_are_refused_beyond_the_vector(tmp_path: Path) -> None:
    made_up(tmp_path)
    assert opened(tmp_path, dimensions=(8, 2, 4)).task.dimensions == (2, 4, 8)
    with pytest.raises(SourceError, match=r"model.dimensions are beyond the vector: \[9\]; limit: 1 to 8"):
        opened(tmp_path, dimensions=(4, 9))


@pytest.mark.parametrize(
    ("name", "value", "tasks"),
    [
        ("pooling", "mean", "embedding"),
        ("normalize", False, "embedding"),
        ("dimensions", (2,), "embedding"),
        ("prompts", {"q": "q: "}, "embedding"),
        ("aggregation", "max", "tagging"),
        ("max_answer_tokens", 5, "answering"),
    ],
)
def test_setting_of_another_task_is_refused(tmp_path: Path, name: str, value: object, tasks: str) -> None:
    made_up(tmp_path, **SEQUENCE)
    with pytest.raises(
        SourceError, match=f"model.{name} does not belong .*classification.*for {tasks}.*leave model.{name}"
    ):
        opened(tmp_path, **{name: value})


def test_setting_of_classifiers_is_refused_for_an_encoder(tmp_path: Path) -> None:
    made_up(tmp_path)
    for name, value in (("activation", "none"), ("labels", ("a",))):
        with pytest.raises(SourceError, match=f"model.{name} does not belong to the model's task, embedding"):
            opened(tmp_path, **{name: value})
