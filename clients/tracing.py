"""The W3C trace headers of a call, from OpenTelemetry where it is installed."""

from __future__ import annotations

from clients.connection import Headers


def trace_headers() -> Headers:
    """`traceparent` and `tracestate` of the span that is current in the caller's context.

    Empty without the package opentelemetry-api or without a span. Both are the names of
    https://www.w3.org/TR/trace-context/, which Triton reads with `--trace-config mode=opentelemetry`.
    """
    try:
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
    except ImportError:
        return ()
    carrier: dict[str, str] = {}
    TraceContextTextMapPropagator().inject(carrier)
    return tuple(carrier.items())
