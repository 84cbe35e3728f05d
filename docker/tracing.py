"""Tracing, when TRACES_URL says where to: flags for tritonserver, variables for the entry's processes.

* TRACES_URL: an OTLP receiver over HTTP with its path, `http://jaeger:4318/v1/traces`. Empty: no tracing.
* TRACE_RATE: of so many requests one is traced; 0 (default) traces those alone that bring a `traceparent` header. A
  request that brings one is traced at any rate.

docs/tracing.md says what a trace shows. Standard library alone.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from repository import LaunchError

_SERVICE = "encoder-lanes"


def trace_flags(environment: Mapping[str, str]) -> list[str]:
    """tritonserver's flags; none without TRACES_URL.

    Raises:
        LaunchError: the address or the rate cannot be used.
    """
    url = environment.get("TRACES_URL", "")
    if not url:
        return []
    # Triton takes these flags apart at commas.
    if not re.fullmatch(r"https?://[^\s,]+/[^\s,]*", url):
        raise LaunchError(f"TRACES_URL is {url!r}: give an address with its path: http://jaeger:4318/v1/traces")
    rate = environment.get("TRACE_RATE", "") or "0"
    if not re.fullmatch(r"\d{1,9}", rate):
        raise LaunchError(f"TRACE_RATE is {rate!r}: give a whole number, 100 for one request in 100, 0 for none")
    return [
        "--trace-config=mode=opentelemetry",
        "--trace-config=level=TIMESTAMPS",
        f"--trace-config=rate={rate}",
        "--trace-config=count=-1",
        f"--trace-config=opentelemetry,url={url}",
        f"--trace-config=opentelemetry,resource=service.name={_SERVICE}",
        # Milliseconds: a trace is there when one goes to look for it.
        "--trace-config=opentelemetry,bsp_schedule_delay=1000",
    ]


def trace_variables(environment: Mapping[str, str]) -> dict[str, str]:
    """What the entry's processes need to send spans of their own to the same place."""
    url = environment.get("TRACES_URL", "")
    return {"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": url, "OTEL_SERVICE_NAME": _SERVICE} if url else {}
