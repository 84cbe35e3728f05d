"""The tables of a visit, from its results.json; what was not measured is a dash.

    python -m tests.measurements.h200.tables RESULTS.json [--markdown]

`--markdown` gives the tables of docs/measurements/, everything else is for the terminal.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

TECHNIQUES = ("one-bucket", "buckets", "arena", "pinned", "graphs", "overlap", "product")
WINDOWS = ("window-5", "window-2", "window-0")


def tables(results: dict[str, Any]) -> str:
    """All tables that have a row."""
    lines: list[str] = []
    rows = [(f"before, {n} worker{'s' * (n > 1)}", f"before_{n}_max", f"before_{n}_preprocessing") for n in (1, 2, 4)]
    lines += ["", "| at the maximum | texts/s | P50 | P99 | GPU | GPU MiB | preprocessing |"]
    lines += ["|---|---|---|---|---|---|---|"]
    for title, name, share in rows:
        lines += _maximum(title, results.get(name), results.get(share))
    for variant in TECHNIQUES:
        lines += _maximum(f"technique: {variant}", results.get(f"technique_{variant}_max"), None)
    lines += _maximum("product, best", results.get("max_mix"), None)
    lines += _maximum("product, texts up to 128", results.get("max_short"), None)
    lines += _maximum("MiniLM, texts up to 128", results.get("minilm_max"), None)
    lines += ["", f"| at {results.get('before_rate') or 0:.0f} requests/s | P50 | P99 | worst | answered | GPU |"]
    lines += ["|---|---|---|---|---|---|"]
    names = ["before_4_rate", "rate_product", "rate_window-5", "rate_window-2", "rate_window-0"]
    names += [f"technique_{name}_rate" for name in TECHNIQUES]
    for name in names:
        found = results.get(name)
        if found:
            lines.append(
                f"| {name} | {found['p50']:.1f} | {found['p99']:.1f} | {found['worst']:.1f} | {found['answered']} of "
                f"{found['sent']} | {_share(found.get('gpu_utilisation'))} |"
            )
    lines += ["", "| answers | compared | wrong | least cosine | errors |", "|---|---|---|---|---|"]
    for name in [name for name in results if name.startswith(("check_", "soak", "minilm_check", "kill_after"))]:
        found = results[name]
        if isinstance(found, dict) and "compared" in found:
            lines.append(
                f"| {name} | {found['compared']} | {found['wrong']} | {found['least_cosine']:.6f} | "
                f"{found['errors'] or ''} |"
            )
    for name in (
        "first_50",
        "before_memory",
        "memory_serving",
        "soak_memory",
        "slicing",
        "kill",
        "spans",
        "spans_at_rate",
    ):
        if name in results:
            lines.append(f"{name}: {json.dumps(results[name])[:1200]}")
    for name in ("kernels_128", "kernels_512"):
        lines += [f"{name}: {json.dumps(row)[:600]}" for row in results.get(name, [])]
    return "\n".join(lines)


def _maximum(title: str, found: dict[str, Any] | None, share: float | None) -> list[str]:
    if not found:
        return []
    return [
        f"| {title} | {found['throughput']:.0f} | {found['p50']:.1f} | {found['p99']:.1f} | "
        f"{_share(found.get('gpu_utilisation'))} | {found.get('gpu_memory_mib') or '-'} | {_share(share)} |"
    ]


def _share(value: float | None) -> str:
    return "-" if value is None else f"{value:.1%}"


def targets(results: dict[str, Any]) -> str:
    """The targets of the serving measurement, each with what was found."""
    before, best, short = (results.get(name) or {} for name in ("before_4_max", "max_mix", "max_short"))
    old, new, first = (results.get(name) or {} for name in ("before_4_rate", "rate_product", "first_50"))
    windows = {name: results[f"rate_{name}"] for name in ("product", *WINDOWS) if f"rate_{name}" in results}
    tuned: tuple[str, dict[str, Any]] = ("", {})
    if windows:
        tuned = min(windows.items(), key=lambda item: float(item[1]["p99"]))
    gaps = [
        row["gap_share"]
        for name in ("kernels_128", "kernels_512")
        for row in results.get(name, [])
        if row.get("graphs")
    ]
    rows = [
        ("mix, texts/s over \"before\" with 4 workers", "at least 2.5 ×", _ratio(best, before, "throughput")),
        (f"P99 at 90 % of that, window tuned ({tuned[0] or '-'})", "at most 0.6 ×", _ratio(tuned[1], old, "p99")),
        ("the same, 10 ms window", "-", _ratio(new, old, "p99")),
        ("P50, 10 ms window", "-", _ratio(new, old, "p50")),
        ("mix, texts/s", "at least 3,860", _number(best.get("throughput"))),
        ("texts up to 128, texts/s", "at least 8,700", _number(short.get("throughput"))),
        ("GPU utilisation at the maximum", "at least 70 %", _share(best.get("gpu_utilisation"))),
        (
            "GPU idle while a request is prepared, at the maximum", "at most 8 %",
            _share((results.get("spans") or {}).get("idle_while_preparing")),
        ),
        ("gaps between the kernels of a batch", "at most 4 %", _share(max(gaps) if gaps else None)),
        ("first 50 requests: median over steady P50", "at most 1.2 ×", _times(first.get("median_ratio"))),
        ("first 50 requests: maximum over steady P99", "at most 1.5 ×", _times(first.get("max_ratio"))),
    ]  # fmt: skip
    return "\n".join(["| | target | found |", "|---|---|---|", *(f"| {' | '.join(row)} |" for row in rows)])


def markdown(results: dict[str, Any]) -> str:
    """Targets first, then every table, without the lines of JSON."""
    rest = [line for line in tables(results).splitlines() if not line or line.startswith("|")]
    short = ["", "| texts up to 128 | texts/s | P50 | P99 | GPU | cores |", "|---|---|---|---|---|---|"]
    for name, found in results.items():
        if name.startswith("short_"):
            cores = ", ".join(
                f"{group} {'-' if used is None else f'{used:g}'}"
                for group, used in found.get("cores", {}).items()
                if used != 0
            )
            short.append(
                f"| {name.removeprefix('short_')} | {found['throughput']:.0f} | {found['p50']:.1f} | "
                f"{found['p99']:.1f} | {_share(found.get('gpu_utilisation'))} | {cores} |"
            )
    kernels = ["", "| bucket, rows | graph | kernels | span ms | gaps | largest kernels |", "|---|---|---|---|---|---|"]
    alone = ["", "| bucket, rows | techniques | alone ms | overlapped ms |", "|---|---|---|---|"]
    for name in ("kernels_128", "kernels_512"):
        for row in results.get(name, []):
            if "gap_share" in row:
                largest = ", ".join(f"`{part[0][:40]}` {part[1]:.0%}" for part in row["largest"][:3])
                kernels.append(
                    f"| {row['length']}, {row['rows']} | {'yes' if row['graphs'] else 'no'} | {row['kernels']} | "
                    f"{row['span_ms']:.3f} | {row['gap_share']:.1%} | {largest} |"
                )
            if "alone_ms" in row:
                alone.append(
                    f"| {row['length']}, {row['rows']} | {', '.join(row['techniques']) or 'none'} | "
                    f"{row['alone_ms']:.2f} | {row.get('overlapped_ms', '-')} |"
                )
    parts = [part for part in (short, kernels, alone) if len(part) > 3]
    return "\n".join([targets(results), *rest, *(line for part in parts for line in part)])


def _ratio(new: dict[str, Any], old: dict[str, Any], name: str) -> str:
    if not new or not old:
        return "-"
    return f"{new[name] / old[name]:.2f} × ({new[name]:.0f} to {old[name]:.0f})"


def _times(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f} ×"


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:,.0f}"


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", type=Path)
    parser.add_argument("--markdown", action="store_true")
    options = parser.parse_args()
    found = json.loads(options.results.read_text())
    sys.stdout.write((markdown(found) if options.markdown else tables(found)) + "\n")
