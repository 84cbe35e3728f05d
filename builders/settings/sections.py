"""One settings class per concern. A field's docstring is its documentation, its help and its error's remedy."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationInfo, field_validator

# Strict: a YAML `true` is no number.
Integer = Annotated[int, Field(strict=True)]
Number = Annotated[float, Field(strict=True)]
Tokens = Annotated[Integer, Field(ge=1, le=65536)]
Milliseconds = Annotated[Number, Field(ge=0, le=600_000)]
Count = Annotated[Integer, Field(ge=1, le=1_000_000)]


class Section(BaseModel):
    """Base of all sections: frozen, unknown keys refused, field docstrings kept as descriptions."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True, strict=False)


class ModelSettings(Section):
    """The encoder to serve."""

    source: str = Field(min_length=1)
    """Where the model is: a folder, `package:NAME/PATH` inside an installed package, or `hub:ORG/NAME`."""
    task: Literal["auto", "embedding", "classification", "reranking", "tagging", "answering"] = "auto"
    """What the model answers (docs/architecture.md has the outputs); `auto` reads it from the model's own files."""
    pooling: Literal["auto", "mean", "cls", "max", "last", "weighted", "mean_sqrt"] = "auto"
    """How token vectors become one vector; `auto` reads modules.json and 1_Pooling/config.json of the model."""
    normalize: bool | None = None
    """Scale each vector to length 1; left out, modules.json of the model decides."""
    dimensions: tuple[Count, ...] = ()
    """Sizes that a request may cut vectors to (`dimensions`), for models trained to be cut (Matryoshka)."""
    prompts: dict[str, str] = Field(default={}, max_length=64)
    """Texts that a request may have put before its own (`prompt`), by name; added to the model's own prompts."""
    default_prompt: str | None = None
    """Name of the prompt of requests that name none; left out, the model's own default, if it has one."""
    activation: Literal["auto", "softmax", "sigmoid", "none"] = "auto"
    """What makes scores of logits; `auto` reads the model's files: `problem_type`, or the cross-encoder's own."""
    labels: tuple[str, ...] | None = None
    """Names of the labels in the order of id2label of config.json; left out, those of config.json."""
    aggregation: Literal["none", "simple", "first", "average", "max"] = "simple"
    """How tagged tokens become entities where a request does not say it, as in transformers' pipeline."""
    max_answer_tokens: Annotated[Integer, Field(ge=1, le=512)] = 30
    """Longest answer that is looked for in a context, tokens."""
    overlap: Annotated[Integer, Field(ge=0, le=65535)] | None = None
    """Tokens that two windows of a long text share (`truncate=chunk`); left out, an eighth of the limit."""
    max_tokens: Annotated[Integer, Field(ge=4, le=65536)] | None = None
    """Longest text in tokens, special tokens included; left out, the model's sentence_bert_config.json decides."""
    tile_positions: Tokens | None = None
    """Tile a learned position table to this many rows (a whole multiple), for a model whose own table is shorter."""


class ShortLaneSettings(Section):
    """The lane of short texts: answered before anything long."""

    up_to: Tokens = 512
    """Longest bucket of this lane, tokens."""
    batch: Count = 32
    """Largest batch of one bucket model, texts; a bucket also keeps to engine.max_batch_tokens."""
    window_ms: Milliseconds = 0.0
    """How long a bucket model waits for more texts, milliseconds."""
    late_from: Tokens | None = None
    """Buckets from this one on are answered when they are done instead of together with the batch; none by default."""
    late_bound: Annotated[Integer, Field(ge=1, le=64)] = 2
    """Batches with late groups that one entry process lets run beside the next batch; beyond it the process waits."""
    threads: Annotated[Integer, Field(ge=1, le=256)] = 1
    """Threads of a bucket model's engine (CPU engine only)."""
    nice: Annotated[Integer, Field(ge=0, le=19)] = 0
    """Niceness of the bucket models' processes (CPU engine only)."""
    stream_priority: Literal["max", "default", "min"] = "max"
    """CUDA stream priority of the bucket models (native TensorRT backend only)."""


class LongLaneSettings(Section):
    """The lane of long texts: larger batches in tokens, never in the way of a short text."""

    above: Tokens = 512
    """Buckets longer than this belong to the long lane, tokens."""
    batch: Count = 32
    """Largest batch of one bucket model, texts; a bucket also keeps to engine.max_batch_tokens."""
    window_ms: Milliseconds = 20.0
    """How long a bucket model waits for more texts, milliseconds."""
    workers: Annotated[Integer, Field(ge=1, le=64)] = 1
    """Threads of one entry process that carry long groups to the lane."""
    bound: Count = 64
    """Long texts one entry process holds, waiting or running (background: half); one more is refused at once."""
    background_every: Annotated[Integer, Field(ge=2, le=1000)] = 5
    """While interactive long texts wait too, one group of so many is background's, so that it is never starved."""
    threads: Annotated[Integer, Field(ge=1, le=256)] = 1
    """Threads of a bucket model's engine (CPU engine only)."""
    nice: Annotated[Integer, Field(ge=0, le=19)] = 0
    """Niceness of the bucket models' processes (CPU engine only)."""
    stream_priority: Literal["max", "default", "min"] = "min"
    """CUDA stream priority of the bucket models (native TensorRT backend only)."""


class LanesSettings(Section):
    """The two lanes; together they cover every bucket once."""

    short: ShortLaneSettings = ShortLaneSettings()
    """Short lane."""
    long: LongLaneSettings = LongLaneSettings()
    """Long lane."""


class LevelSettings(Section):
    """Queue policy of one priority level of the entry."""

    timeout_ms: Annotated[Number, Field(ge=1, le=3_600_000)]
    """A request that waits longer in the queue, or then in the long lane, is rejected, ms; `timeout` may shorten it."""
    queue_size: Count
    """Requests of this level that may wait; one more is refused at once with UNAVAILABLE."""


class DegradeSettings(Section):
    """Small batches under backlog: each request is answered as soon as its part of the batch is done."""

    enabled: bool = False
    """Whether it is done at all; docs/reliability.md shows when it wins."""
    above: Count = 256
    """From so many requests waiting in the entry's queue on, batches are small."""
    below: Annotated[Integer, Field(ge=0, le=1_000_000)] = 64
    """With fewer waiting than this for half a second they are normal again."""
    batch: Annotated[Integer, Field(ge=1, le=1024)] = 8
    """Texts of a small batch."""
    metrics_url: str = Field(default="http://127.0.0.1:8002/metrics", pattern=r"^http://[^/]+/")
    """Triton's own metrics as an entry process reaches them; `serve` tells its own. Unreadable, batches stay normal."""


class EntrySettings(Section):
    """The entry model `encode`: queue, tokenisation, routing."""

    processes: Annotated[Integer, Field(ge=1, le=64)] = 8
    """Tokenising processes; each holds one batch at a time."""
    batch: Annotated[Integer, Field(ge=1, le=1024)] = 32
    """Largest dynamic batch, and the most texts of one request."""
    window_ms: Milliseconds = 10.0
    """How long the dynamic batcher waits for a full batch, milliseconds."""
    interactive: LevelSettings = LevelSettings(timeout_ms=200, queue_size=1024)
    """Priority 1."""
    background: LevelSettings = LevelSettings(timeout_ms=5000, queue_size=8192)
    """Priority 2, and every request that names none."""
    max_text_bytes: Annotated[Integer, Field(ge=1, le=16 * 1024 * 1024)] = 65_536
    """Longest text accepted, bytes of UTF-8; a longer one is refused before it is tokenised."""
    max_request_bytes: Annotated[Integer, Field(ge=1, le=64 * 1024 * 1024)] = 524_288
    """Most bytes of all texts of one request: a process tokenises them at one go, and others wait meanwhile."""
    max_windows: Annotated[Integer, Field(ge=1, le=4096)] = 64
    """Most windows that one request's long texts may be read in (`truncate=chunk`); more are refused."""
    tokenizer_threads: Annotated[Integer, Field(ge=1, le=256)] = 1
    """Threads of the tokeniser in each process."""
    wake_after_ms: Annotated[Number, Field(ge=0, le=250)] = 2.0
    """Quiet time after real work until the queue is woken, milliseconds; 0 turns the wake-up off (docs/queue.md)."""
    degrade: DegradeSettings = DegradeSettings()
    """Small batches under backlog."""

    @field_validator("interactive", "background", mode="before")
    @classmethod
    def _keep_the_other_default(cls, value: object, info: ValidationInfo) -> object:
        """A level of which one key is given keeps its default for the other."""
        default = cls.model_fields[info.field_name or ""].default
        return default.model_dump() | value if isinstance(value, dict) else value


class EnsemblesSettings(Section):
    """Declarative ensembles, for callers that know the lengths of their texts; each loads its engine once more."""

    buckets: tuple[Tokens, ...] = ()
    """Buckets that get an `ensemble_<bucket>`, with a queue of its own, beside the entry; none by default."""
    processes: Annotated[Integer, Field(ge=1, le=64)] = 2
    """Tokenising processes of each ensemble."""


class EngineSettings(Section):
    """What runs the bucket models."""

    kind: Literal["tensorrt", "onnxruntime"] = "tensorrt"
    """`tensorrt`: plans on a GPU; `onnxruntime`: the Python backend on the CPU."""
    backend: Literal["native", "python"] = "native"
    """What runs plans: Triton's TensorRT backend, or this project's engine, a process a bucket (`tensorrt` only)."""
    techniques: tuple[Literal["arena", "pinned", "graphs", "overlap"], ...] = ("arena", "pinned", "graphs")
    """What the Python engine does; each needs those before it. `overlap` costs a mix 8 % (docs/gpu.md)."""
    arena_factor: Annotated[Number, Field(ge=1, le=10)] = 1.2
    """Size of the Python engine's arena over the GPU memory that its plan reports to need."""
    precision: Literal["fp16", "bf16", "fp32", "int8"] = "fp16"
    """Arithmetic: fp16, bf16 or fp32 of a plan; fp32, or int8 in the blocks' products, of the CPU engine."""
    max_batch: Annotated[Integer, Field(ge=1, le=1024)] = 32
    """Largest batch the engine is built for, texts."""
    max_batch_tokens: Annotated[Integer, Field(ge=1, le=16_777_216)] = 16_384
    """Largest batch the engine is built for, tokens: a bucket of L takes min(max_batch, this / L) texts, at least 1."""
    batch_steps: tuple[Count, ...] = (1, 2, 4, 8, 12, 16, 20, 24, 28, 32)
    """Batch sizes that get a CUDA graph and a warm-up run; a bucket keeps those up to its own largest batch."""
    memory_limit_mb: Annotated[Integer, Field(ge=16, le=1_000_000)] | None = None
    """Most workspace TensorRT may use while it compiles, MiB; left out, all there is (`tensorrt` only)."""
    gpus: tuple[Annotated[Integer, Field(ge=0, le=63)], ...] = Field(default=(0,), min_length=1)
    """GPU numbers of the bucket models (`tensorrt` only)."""


class ObjectiveSettings(Section):
    """The stop line: bench, tune and verify pass or fail against it."""

    rate: Annotated[Number, Field(gt=0, le=1_000_000)] = 100.0
    """Texts a second offered while p99_ms is measured, one text a request (`bench`, `tune`)."""
    p99_ms: Annotated[Number, Field(gt=0, le=600_000)] = 400.0
    """P99 of the latency at the objective's rate, milliseconds."""
    gpu_utilization: Annotated[Number, Field(ge=0, le=1)] | None = 0.70
    """Least GPU utilisation at maximum load, share of 1; none where there is no GPU."""
    accuracy_loss: Annotated[Number, Field(ge=0, le=1)] = 0.005
    """Largest loss of the task metric against FP32, share of 1."""
