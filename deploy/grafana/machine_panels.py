"""The folded rows of the dashboard: the GPU engine, the door, and the machine with the processes on it."""

from __future__ import annotations

from panel import AT, Panel, Query, rate, ratio

GPU = (
    Panel(
        "GPU memory",
        "Of the device, by all processes (LanesGpuMemoryHigh).",
        "bytes",
        (
            Query(f"nv_gpu_memory_used_bytes{{{AT}}}", "used {{instance}} {{gpu_uuid}}"),
            Query(f"nv_gpu_memory_total_bytes{{{AT}}}", "total {{instance}} {{gpu_uuid}}", is_line=True),
        ),
    ),
    Panel(
        "Arena",
        "Allocated at start, and the most of it that was in use; device memory by the lane's own account.",
        "bytes",
        (
            Query(f"encoder_lanes_engine_arena_bytes{{{AT}}}", "arena {{model}}"),
            Query(f"encoder_lanes_engine_arena_peak_bytes{{{AT}}}", "peak {{model}}"),
            Query(f"encoder_lanes_engine_device_bytes{{{AT}}}", "device {{model}}"),
        ),
    ),
    Panel(
        "Late allocations",
        "Of device memory, after the lane was ready: there should be none (LanesLateAllocations).",
        "short",
        (Query(f"increase(encoder_lanes_engine_late_allocations_total{{{AT}}}[10m])", "{{model}} {{instance}}"),),
    ),
    Panel(
        "Batches that ran as a CUDA graph",
        "Under 90 %: a batch step is missing (LanesGraphMisses).",
        "percentunit",
        (
            Query(
                ratio(
                    rate("encoder_lanes_engine_graph_hits_total", "model", AT),
                    rate("encoder_lanes_engine_graph_hits_total", "model", AT)
                    + " + "
                    + rate("encoder_lanes_engine_graph_misses_total", "model", AT),
                ),
                "{{model}}",
            ),
        ),
        top=1,
    ),
    Panel(
        "Copies a batch",
        "Between host and GPU; one there and one back is what to expect.",
        "short",
        (
            Query(
                ratio(
                    rate("encoder_lanes_engine_copies_total", "model", AT),
                    rate("encoder_lanes_engine_batches_total", "model", AT),
                ),
                "{{model}}",
            ),
        ),
    ),
    Panel(
        "Rows added to reach a batch step",
        "Share of the computed rows: more batch steps make it smaller.",
        "percentunit",
        (
            Query(
                ratio(
                    rate("encoder_lanes_engine_padded_rows_total", "model", AT),
                    rate("encoder_lanes_engine_padded_rows_total", "model", AT)
                    + " + "
                    + rate("encoder_lanes_engine_rows_total", "model", AT),
                ),
                "{{model}}",
            ),
        ),
        top=1,
    ),
    Panel(
        "Staging, host time a batch",
        "Writing a batch and starting it.",
        "s",
        (
            Query(
                ratio(
                    rate("encoder_lanes_engine_staging_seconds_total", "model", AT),
                    rate("encoder_lanes_engine_batches_total", "model", AT),
                ),
                "{{model}}",
            ),
        ),
        width=12,
    ),
    Panel(
        "Failed batches, broken lanes",
        "A broken lane refuses everything until it is loaded again (LanesGpuBroken).",
        "short",
        (
            Query(rate("encoder_lanes_engine_failed_batches_total", "model", AT), "failed {{model}}, a second"),
            Query(f"encoder_lanes_engine_broken{{{AT}}}", "broken {{model}}"),
        ),
        width=12,
    ),
)
DOOR = (
    Panel(
        "Answers of the door",
        "429: a key over its rate, or an overload (LanesDoorRefuses). 499: the client went away.",
        "reqps",
        (Query("sum by (status) (rate(door_requests_total[$__rate_interval]))", "{{status}}"),),
        stacked=True,
    ),
    Panel(
        "P99 of the door by priority",
        "From the request's head to its answer. The only P99 that keeps interactive and background apart.",
        "s",
        (
            Query(
                "histogram_quantile(0.99, sum by (le, priority) ("
                "rate(door_request_duration_seconds_bucket[$__rate_interval])))",
                "{{priority}}",
            ),
            Query("encoder_lanes:objective_p99_seconds", "line", is_line=True),
        ),
    ),
    Panel(
        "Under way at the door",
        "Requests now.",
        "short",
        (Query("sum by (route) (door_requests_in_flight)", "{{route}}"),),
    ),
    Panel(
        "Refused by rate",
        "Which limit of a key was reached.",
        "reqps",
        (Query("sum by (limit) (rate(door_rate_limited_total[$__rate_interval]))", "{{limit}}"),),
    ),
    Panel(
        "Work through the door",
        "Tokens the models read, and tokens cut off.",
        "short",
        (
            Query("sum by (model) (rate(door_tokens_total[$__rate_interval]))", "tokens {{model}}"),
            Query("sum by (model) (rate(door_cut_tokens_total[$__rate_interval]))", "cut {{model}}"),
        ),
    ),
    Panel(
        "Models the door sees",
        "1: ready when last asked (LanesDoorNotReady).",
        "short",
        (Query("min by (model) (door_model_ready)", "{{model}}"),),
        top=1,
    ),
)
MACHINE = (
    Panel(
        "Targets",
        "1: Prometheus reads it.",
        "short",
        (Query('up{job=~"triton|supervisor|door"}', "{{job}} {{instance}}"),),
        top=1,
    ),
    Panel(
        "Models, as the supervisor sees them",
        "1: it answers, and no process of it is dead (LanesModelIll). The port is the supervisor's, not the server's.",
        "short",
        (Query("min by (instance, model) (encoder_lanes_supervisor_ready)", "{{model}} {{instance}}"),),
        top=1,
    ),
    Panel(
        "Dead and replaced model processes",
        "Dead: not replaced yet. Healed: replaced by `serve` in the last hour (LanesHealed). New starts: of the "
        "container, which heals in no other way (LanesRestarts).",
        "short",
        (
            Query("sum by (instance, model) (encoder_lanes_supervisor_dead_processes)", "dead {{model}} {{instance}}"),
            Query(
                "sum by (instance, model) (increase(encoder_lanes_supervisor_heals_total[1h]))",
                "healed {{model}} {{instance}}",
            ),
            Query(
                "max by (instance, model) (encoder_lanes_supervisor_crash_loop)", "crash loop {{model}} {{instance}}"
            ),
            Query("changes(encoder_lanes_launcher_start_time_seconds[1h])", "new starts {{instance}}"),
        ),
    ),
    Panel(
        "Canary",
        "How long the supervisor's own small request to each model took.",
        "s",
        (Query("max by (instance, model) (encoder_lanes_supervisor_canary_seconds)", "{{model}} {{instance}}"),),
    ),
    Panel(
        "Entry processes that are warm",
        "They have made their own first calls. Fewer than there are: it starts (LanesEntryCold); more: some were "
        "replaced since.",
        "short",
        (
            Query(
                f"sum by (instance, model, version, of) (encoder_lanes_warm_processes_total{{{AT}}})",
                "{{model}} {{version}}, of {{of}} {{instance}}",
            ),
        ),
    ),
    Panel(
        "CPU",
        "Of the machine. Full: the entry's processes and the door take turns.",
        "percentunit",
        (Query(f"nv_cpu_utilization{{{AT}}}", "{{instance}}"),),
        top=1,
    ),
    Panel(
        "Memory",
        "Of the machine.",
        "bytes",
        (
            Query(f"nv_cpu_memory_used_bytes{{{AT}}}", "used {{instance}}"),
            Query(f"nv_cpu_memory_total_bytes{{{AT}}}", "total {{instance}}", is_line=True),
        ),
    ),
)
