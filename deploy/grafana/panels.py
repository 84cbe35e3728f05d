"""What the dashboard shows: rows of panels, and the queries of each.

The order is the order in which to look: service objectives first, then queue, lanes, waste, long lane, GPU, door. The
series whose names have colons are made in deploy/prometheus/rules.yml.
"""

from __future__ import annotations

from machine_panels import DOOR, GPU, MACHINE
from panel import AT, BUCKET, LANES, OF, Panel, Query, rate, ratio, summary

_OBJECTIVES = (
    Panel(
        "P99 against the line",
        "Inside Triton, queue included, all priorities, about the last minute. Runbook: LanesP99OverLine.",
        "s",
        (
            Query(f"encoder_lanes:p99_seconds{{{OF}}}", "P99 {{model}} {{instance}}"),
            Query(f"encoder_lanes:p50_seconds{{{OF}}}", "P50 {{model}} {{instance}}"),
            Query("encoder_lanes:objective_p99_seconds", "line", is_line=True),
        ),
        width=12,
    ),
    Panel(
        "GPU utilisation against the objective",
        "Low with a high P99: the GPU waits for data (LanesGpuStarved). Both high: the GPU is the limit.",
        "percentunit",
        (
            Query(f"avg by (instance, gpu_uuid) (nv_gpu_utilization{{{AT}}})", "{{instance}} {{gpu_uuid}}"),
            Query("encoder_lanes:objective_gpu_utilization_ratio", "objective", is_line=True),
        ),
        width=6,
        top=1,
    ),
    Panel(
        "Errors and rejects, share of requests",
        "Errors are this side's failures; rejects waited too long or met a full queue, wake-ups not counted.",
        "percentunit",
        (
            Query(f"encoder_lanes:errors:ratio1m{{{OF}}}", "errors {{model}}"),
            Query(f"encoder_lanes:rejects:ratio1m{{{OF}}}", "rejects {{model}}"),
        ),
        width=6,
    ),
)
_QUEUE = (
    Panel(
        "Requests",
        "Answered by the entry, and rejected by its queue.",
        "reqps",
        (
            Query(f"encoder_lanes:answers:rate1m{{{OF}}}", "answered {{model}}"),
            Query(f"encoder_lanes:rejects:rate1m{{{OF}}}", "rejected {{model}}"),
        ),
    ),
    Panel(
        "Refused by the entry",
        "invalid: the client's fault. overloaded, timeout: the long lane. failed: a lane.",
        "reqps",
        (Query(rate("encoder_lanes_refusals_total", "kind"), "{{kind}}"),),
        stacked=True,
    ),
    Panel(
        "Requests waiting",
        "In the entry's queue, where priority holds. Rising: LanesQueueGrows.",
        "short",
        (
            Query(
                f'sum by (instance, model) (nv_inference_pending_request_count{{{OF}, model!~".*_[0-9]+"}})',
                "{{model}} {{instance}}",
            ),
        ),
    ),
    Panel(
        "Time in the queue",
        "The batching window is part of it.",
        "s",
        (
            Query(
                summary("nv_inference_queue_summary_us", "0.99", f'{OF}, model!~".*_[0-9]+"'),
                "P99 {{model}} {{instance}}",
            ),
            Query(f"encoder_lanes:queue_seconds:mean1m{{{OF}}}", "mean {{model}} {{instance}}"),
        ),
    ),
    Panel(
        "Texts in a dynamic batch",
        "Small batches and a throughput that does not rise: a larger window or batch.",
        "short",
        (
            Query(
                ratio(
                    rate("nv_inference_count", "model", f'{OF}, model!~".*_[0-9]+"'),
                    rate("nv_inference_exec_count", "model", f'{OF}, model!~".*_[0-9]+"'),
                ),
                "{{model}}",
            ),
        ),
    ),
    Panel(
        "Wake-ups",
        "Requests that the entry sends to its own queue; Triton counts each as rejected (docs/queue.md).",
        "reqps",
        (Query(f"encoder_lanes:wakeups:rate1m{{{OF}}}", "{{model}} {{instance}}"),),
    ),
)
_LANES_ROW = (
    Panel(
        "Texts by bucket",
        "Which lengths come.",
        "short",
        (Query(rate("encoder_lanes_texts_total", "lane, bucket"), "{{lane}} {{bucket}}"),),
        stacked=True,
    ),
    Panel(
        "Time of a call by bucket",
        "Mean, from the entry to the bucket model and back, its queue included.",
        "s",
        (
            Query(
                ratio(rate("encoder_lanes_call_seconds_total", "bucket"), rate("encoder_lanes_calls_total", "bucket")),
                BUCKET,
            ),
        ),
    ),
    Panel(
        "Texts in a call by bucket",
        "The batch that the engine gets, before the bucket model's own batcher puts calls together.",
        "short",
        (
            Query(
                ratio(rate("encoder_lanes_texts_total", "bucket"), rate("encoder_lanes_calls_total", "bucket")),
                BUCKET,
            ),
        ),
    ),
    Panel(
        "In flight by bucket",
        "Texts at the bucket model now.",
        "short",
        (Query(f"sum by (lane, bucket) (encoder_lanes_in_flight_texts{{{OF}}})", "{{lane}} {{bucket}}"),),
        stacked=True,
    ),
    Panel(
        "P99 in a lane's own queue",
        "High in the short lane: the engine, or too few instances of it, is the limit.",
        "s",
        (Query(summary("nv_inference_queue_summary_us", "0.99", LANES), "{{model}} {{instance}}"),),
    ),
    Panel(
        "Failed calls by bucket",
        "All calls of one bucket: its process has died (LanesBucketFails).",
        "reqps",
        (Query(rate("encoder_lanes_failed_calls_total", "bucket"), BUCKET),),
    ),
    Panel(
        "Requests by version",
        "Both while a version is changed. A version on trial is answered through the served one: the graphs below.",
        "reqps",
        (
            Query(
                rate("nv_inference_request_success", "model, version", f'{OF}, model!~".*_[0-9]+"'),
                "{{model}} version {{version}}",
            ),
        ),
        width=12,
    ),
    Panel(
        "P99 by version",
        "A new version against the old one.",
        "s",
        (
            Query(
                "max by (model, version) ("
                + summary("nv_inference_request_summary_us", "0.99", f'{OF}, model!~".*_[0-9]+"')
                + ")",
                "{{model}} version {{version}}",
            ),
        ),
        width=12,
    ),
    Panel(
        "Version on trial",
        "Beside the served one; 0: none.",
        "short",
        (Query(f"max by (instance, model) (encoder_lanes_candidate_version{{{OF}}})", "{{model}} {{instance}}"),),
    ),
    Panel(
        "Requests of a trial",
        "The candidate's share, and as large a one of the served version as its control. What the candidate fails "
        "or is late with, the served version answers.",
        "reqps",
        (Query(rate("encoder_lanes_candidate_requests_total", "arm, outcome"), "{{arm}} {{outcome}}"),),
        stacked=True,
    ),
    Panel(
        "P99 of a trial",
        "From the coming of a request's batch to its answer; data only while there is a trial.",
        "s",
        (
            Query(
                f"histogram_quantile(0.99, {rate('encoder_lanes_candidate_seconds_bucket', 'le, arm')})",
                "{{arm}}",
            ),
        ),
    ),
)
_WASTE = (
    Panel(
        "Padding, share of computed tokens",
        "High in one bucket: put another bucket below it (LanesPaddingHigh).",
        "percentunit",
        (Query(f"encoder_lanes:padding:ratio5m{{{OF}}}", "{{model}} bucket {{bucket}}"),),
        top=1,
    ),
    Panel(
        "Tokens",
        "Read and padded, all buckets.",
        "short",
        (
            Query(rate("encoder_lanes_tokens_total", "model"), "tokens {{model}}"),
            Query(rate("encoder_lanes_padded_tokens_total", "model"), "padding {{model}}"),
        ),
        stacked=True,
    ),
    Panel(
        "Preprocessing, share of the entry's time",
        "Decoding and tokenising against calls of lanes (LanesPreprocessingHigh).",
        "percentunit",
        (Query(f"encoder_lanes:preprocessing:ratio5m{{{OF}}}", "{{model}} {{instance}}"),),
        top=1,
    ),
    Panel(
        "Tokenising a batch",
        "Mean.",
        "s",
        (
            Query(
                ratio(
                    rate("encoder_lanes_tokenise_seconds_total", "model"),
                    rate("encoder_lanes_entry_batches_total", "model"),
                ),
                "{{model}}",
            ),
        ),
        width=12,
    ),
    Panel(
        "Processes that tokenise",
        "Of entry.processes; near all of them: more processes, until IPC eats the gain.",
        "percentunit",
        (
            Query(
                ratio(
                    rate("encoder_lanes_tokenise_seconds_total", "instance, model"),
                    f"count by (instance, model) (encoder_lanes_degraded{{{OF}}})",
                ),
                "{{model}} {{instance}}",
            ),
        ),
        width=12,
        top=1,
    ),
)
_LONG = (
    Panel(
        "Long lane, how full",
        "At 1 the next long text is refused at once (LanesLongLaneFull).",
        "percentunit",
        (Query(f"encoder_lanes:long_lane:ratio{{{OF}}}", "{{class}} {{instance}}"),),
        top=1,
    ),
    Panel(
        "Long texts held",
        "Waiting or running, and the most that may.",
        "short",
        (
            Query(f"sum by (class) (encoder_lanes_long_held_texts{{{OF}}})", "{{class}}"),
            Query(f"sum by (class) (encoder_lanes_long_bound_texts{{{OF}}})", "bound {{class}}", is_line=True),
        ),
    ),
    Panel(
        "Processes with small batches",
        "entry.degrade: batches are small while the backlog is above its threshold (LanesDegraded).",
        "short",
        (
            Query(f"sum by (instance, model) (encoder_lanes_degraded{{{OF}}})", "{{model}} {{instance}}"),
            Query(rate("encoder_lanes_degrade_switches_total", "to"), "switches to {{to}}, a second"),
        ),
    ),
)
#: Title and panels of each row, from top to bottom; and whether it is folded at first.
ROWS: tuple[tuple[str, tuple[Panel, ...], bool], ...] = (
    ("Service objectives", _OBJECTIVES, False),
    ("Requests and queue", _QUEUE, False),
    ("Lanes, buckets, versions", _LANES_ROW, False),
    ("Padding and preprocessing", _WASTE, False),
    ("Long lane and small batches", _LONG, False),
    ("GPU engine", GPU, True),
    ("Door", DOOR, True),
    ("Machine", MACHINE, True),
)
