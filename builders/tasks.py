"""What a model answers: its task, the head of its graph, its labels, and what a request may ask of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal

from builders.contract import Contract
from builders.errors import SourceError

if TYPE_CHECKING:
    from builders.families import Architecture
    from builders.sentence_folder import SentenceFolder
    from builders.settings import ModelSettings

Task = Literal["embedding", "classification", "reranking", "tagging", "answering"]
PoolingMode = Literal["mean", "cls", "max", "last", "weighted", "mean_sqrt"]
Activation = Literal["softmax", "sigmoid", "none"]
Pair = Literal["none", "optional", "required"]

_OUTPUTS: Mapping[Task, str] = MappingProxyType({
    "embedding": "EMBEDDING", "classification": "SCORES", "reranking": "SCORES", "tagging": "TAGS",
    "answering": "SPANS",
})  # fmt: skip
_PAIRS: Mapping[Task, Pair] = MappingProxyType({
    "embedding": "none", "classification": "optional", "reranking": "required", "tagging": "none",
    "answering": "required",
})  # fmt: skip
_HEADS: Mapping[Task, str] = MappingProxyType({
    "classification": "ForSequenceClassification", "reranking": "ForSequenceClassification",
    "tagging": "ForTokenClassification", "answering": "ForQuestionAnswering",
})  # fmt: skip
# Settings that say something of some tasks only.
_SETTINGS: Mapping[str, tuple[Task, ...]] = MappingProxyType({
    "pooling": ("embedding",), "normalize": ("embedding",), "dimensions": ("embedding",), "prompts": ("embedding",),
    "default_prompt": ("embedding",), "activation": ("classification", "reranking"),
    "labels": ("classification", "reranking", "tagging"), "aggregation": ("tagging",),
    "max_answer_tokens": ("answering",),
})  # fmt: skip
_ACTIVATIONS: Mapping[str, Activation] = MappingProxyType(
    {"Sigmoid": "sigmoid", "Identity": "none", "Softmax": "softmax"}
)


@dataclass(frozen=True)
class Dense:
    """A linear layer behind the pooling, with its activation (sentence-transformers' module of that name)."""

    folder: str
    """Folder of its weights, relative to the model's."""
    inputs: int
    """Width before."""
    outputs: int
    """Width behind."""
    bias: bool
    """It adds a bias."""
    activation: str
    """Class of torch.nn, made without arguments."""
    residual: bool
    """Its input is added to its result, projected where the widths differ."""


@dataclass(frozen=True)
class Normalize:
    """Scales the vector to length 1."""


@dataclass(frozen=True)
class Shorten:
    """Keeps the first numbers of the vector."""

    size: int
    """How many."""


Step = Dense | Normalize | Shorten


@dataclass(frozen=True)
class TaskFacts:
    """A model's task, decided: what the graph's head computes and what a request may ask for."""

    name: Task
    """The task."""
    size: int
    """Last axis of the output: width of a vector, number of labels, or start and end."""
    labels: tuple[str, ...] = ()
    """Names of the places on that axis, by number; empty for embedding and answering."""
    pooling: tuple[PoolingMode, ...] = ()
    """How token vectors become one vector; the vectors of several modes are put one behind the other."""
    steps: tuple[Step, ...] = ()
    """What follows the pooling, in its order."""
    activation: Activation = "none"
    """What makes scores of the logits."""
    pair: Pair = "none"
    """Whether a request may or must bring a second text."""
    segment: bool = False
    """The second text is told to the lane (`segment_start`): the model has token types for it."""
    dimensions: tuple[int, ...] = ()
    """Sizes that a vector may be cut to on request."""
    prompts: Mapping[str, str] = field(default_factory=dict)
    """Texts that a request may have put before its own, by name."""
    default_prompt: str | None = None
    """Name of the prompt of a request that names none."""

    @property
    def output(self) -> str:
        """Name of the lanes' output."""
        return _OUTPUTS[self.name]

    @property
    def per_token(self) -> bool:
        """The lanes' output has a row for each token."""
        return self.name in ("tagging", "answering")

    @property
    def normalize(self) -> bool:
        """Vectors come out with length 1."""
        return bool(self.steps) and isinstance(self.steps[-1], Normalize)

    @property
    def auto_class(self) -> str:
        """Class of transformers that loads the model with its head."""
        return f"AutoModel{_HEADS.get(self.name, '')}"

    @property
    def contract(self) -> Contract:
        """The lanes' tensors."""
        return Contract(self.output, self.size, self.per_token, self.segment)

    def decisive(self) -> dict[str, Any]:
        """All of it as plain values, for a hash."""
        steps = [[type(step).__name__, vars(step)] for step in self.steps]
        return {**vars(self), "steps": steps, "prompts": dict(self.prompts)}


def read_task(
    settings: ModelSettings, config: dict[str, Any], architecture: Architecture, sentence: SentenceFolder | None
) -> TaskFacts:
    """Decide the task from the model's own files, with the settings on top.

    Args:
        settings: the `model` section.
        config: config.json.
        architecture: what it says of the encoder.
        sentence: what a sentence-transformers folder says besides, if it is one.

    Raises:
        SourceError: the model has no head for the task, or a setting does not fit it.
    """
    task = _task(settings, config, sentence)
    _check_settings(settings, task)
    if task == "embedding":
        return _embedding(settings, architecture, sentence)
    pair = _PAIRS[task]
    segment = pair != "none" and architecture.segments >= 2
    if task == "answering":
        return TaskFacts(task, size=2, pair=pair, segment=segment)
    labels = _labels(settings, config)
    if task == "reranking" and len(labels) != 1:
        raise SourceError(
            "a reranker gives one score for a pair",
            value=f"{len(labels)} labels",
            remedy="set model.task: classification",
        )
    activation: Activation = (
        "softmax" if task == "tagging" else _activation(settings, config, sentence, task, len(labels))
    )
    return TaskFacts(task, size=len(labels), labels=labels, activation=activation, pair=pair, segment=segment)


def _task(settings: ModelSettings, config: dict[str, Any], sentence: SentenceFolder | None) -> Task:
    named = config.get("architectures")
    heads = [str(name) for name in named] if isinstance(named, list) else []
    known = sentence is not None and sentence.kind == "encoder"
    if settings.task == "auto":
        if known:
            return "embedding"
        if any(name.endswith("ForTokenClassification") for name in heads):
            return "tagging"
        if any(name.endswith("ForQuestionAnswering") for name in heads):
            return "answering"
        if sentence is not None or any(name.endswith("ForSequenceClassification") for name in heads):
            return "reranking" if len(_labels(settings, config)) == 1 else "classification"
        return "embedding"
    wanted = _HEADS.get(settings.task, "")
    if wanted and (known or (heads and not any(name.endswith(wanted) for name in heads))):
        raise SourceError(
            "the model has no head for model.task", value=settings.task,
            limit=f"config.json names {', '.join(heads) or 'none'}",
            remedy="leave model.task out, or use another model",
        )  # fmt: skip
    return settings.task


def _check_settings(settings: ModelSettings, task: Task) -> None:
    for name, tasks in _SETTINGS.items():
        value = getattr(settings, name)
        if task not in tasks and value != type(settings).model_fields[name].get_default(call_default_factory=True):
            raise SourceError(
                f"model.{name} does not belong to the model's task, {task}", value=value,
                limit=f"for {' and '.join(tasks)}", remedy=f"leave model.{name} out",
            )  # fmt: skip


def _embedding(settings: ModelSettings, architecture: Architecture, sentence: SentenceFolder | None) -> TaskFacts:
    pooling: tuple[PoolingMode, ...] = sentence.pooling if sentence else ("mean",)
    if settings.pooling != "auto":
        pooling = (settings.pooling,)
    steps = sentence.steps if sentence else ()
    if settings.normalize is not None:
        while steps and isinstance(steps[-1], Normalize):
            steps = steps[:-1]
        steps = (*steps, Normalize()) if settings.normalize else steps
    size = len(pooling) * architecture.hidden_size
    for step in steps:
        if isinstance(step, Dense):
            if step.inputs != size:
                raise SourceError(
                    f"the Dense module in {step.folder} takes vectors of another width", value=step.inputs,
                    limit=f"{size}: what comes before it", remedy="leave model.pooling out, or save the model again",
                )  # fmt: skip
            size = step.outputs
        elif isinstance(step, Shorten):
            size = min(size, step.size)
    if wrong := [wanted for wanted in settings.dimensions if wanted > size]:
        raise SourceError(
            "model.dimensions are beyond the vector", value=wrong, limit=f"1 to {size}", remedy="correct them"
        )
    prompts = {**(sentence.prompts if sentence else {}), **settings.prompts}
    default = settings.default_prompt or (sentence.default_prompt if sentence else None)
    if default is not None and default not in prompts:
        raise SourceError(
            "the default prompt is none of the model's", value=default,
            limit=f"prompts: {', '.join(prompts) or 'none'}",
            remedy="correct model.default_prompt, or add it to model.prompts",
        )  # fmt: skip
    return TaskFacts(
        "embedding", size=size, pooling=pooling, steps=steps, prompts=prompts, default_prompt=default,
        dimensions=tuple(sorted(settings.dimensions)),
    )  # fmt: skip


def _labels(settings: ModelSettings, config: dict[str, Any]) -> tuple[str, ...]:
    """The labels by number; transformers takes two without names where config.json says nothing."""
    remedy = "correct id2label of config.json"
    found = config.get("id2label")
    if found is None:
        count = config.get("num_labels", config.get("_num_labels", 2))
        if isinstance(count, bool) or not isinstance(count, int) or count < 1:
            raise SourceError("num_labels of config.json is no positive integer", value=count, remedy=remedy)
        found = {str(number): f"LABEL_{number}" for number in range(count)}
    try:
        by_number = {int(number): str(label) for number, label in found.items()}
    except (AttributeError, TypeError, ValueError):
        raise SourceError("id2label of config.json names no labels", value=found, remedy=remedy) from None
    if sorted(by_number) != list(range(len(by_number))) or not by_number:
        raise SourceError(
            "id2label of config.json has gaps", value=sorted(by_number), limit="numbers from 0 on", remedy=remedy
        )
    labels = tuple(by_number[number] for number in range(len(by_number)))
    if settings.labels is None:
        return labels
    if len(settings.labels) != len(labels) or len(set(settings.labels)) < len(labels):
        raise SourceError(
            "model.labels does not fit the model", value=list(settings.labels),
            limit=f"{len(labels)} different names", remedy="name each label once, in the order of id2label",
        )  # fmt: skip
    return settings.labels


def _activation(
    settings: ModelSettings, config: dict[str, Any], sentence: SentenceFolder | None, task: Task, labels: int
) -> Activation:
    """As sentence-transformers' CrossEncoder for its own folders and for rerankers, else as transformers' pipeline."""
    if settings.activation != "auto":
        return settings.activation
    # The order of CrossEncoder: config_sentence_transformers.json, config.json, its key of before version 4.
    inner = config.get("sentence_transformers")
    inner = inner if isinstance(inner, dict) else {}
    old = inner["activation_fn"] if "activation_fn" in inner else config.get("sbert_ce_default_activation_function")
    for path in (sentence.activation if sentence else None, old):
        # What is not torch's own needs trust_remote_code there, and is passed over without it.
        if not isinstance(path, str) or not path.startswith("torch."):
            continue
        name = path.rpartition(".")[2]
        if name not in _ACTIVATIONS:
            raise SourceError(
                "the cross-encoder's activation is not served", value=path,
                limit=f"torch.nn: {', '.join(_ACTIVATIONS)}", remedy="set model.activation",
            )  # fmt: skip
        return _ACTIVATIONS[name]
    if task == "reranking" or sentence is not None or inner or old is not None:
        return "sigmoid" if labels == 1 else "none"
    kind = config.get("problem_type")
    if kind == "regression":
        return "none"
    return "sigmoid" if labels == 1 or kind == "multi_label_classification" else "softmax"
