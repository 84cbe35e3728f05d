"""Where a server's traces go: flags for tritonserver, variables for the entry's processes (docs/tracing.md).

The container's launcher does the same with a file of its own (`docker/tracing.py`); a test holds the two together.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from builders.errors import ServerError
from builders.serving.entry.tracing import SERVICE_VARIABLE, URL_VARIABLE

_SERVICE = "encoder-lanes"


@dataclass(frozen=True)
class Traces:
    """An OTLP receiver, and which requests are traced.

    Attributes:
        url: over HTTP and with its path, `http://127.0.0.1:4318/v1/traces`.
        rate: of so many requests one is traced; 0: those alone that bring a `traceparent` header, which are traced at
            any rate.

    Raises:
        ServerError: Triton could not use the address or the rate.
    """

    url: str
    rate: int = 0

    def __post_init__(self) -> None:
        """Check both."""
        # Triton takes these flags apart at commas.
        if not re.fullmatch(r"https?://[^\s,]+/[^\s,]*", self.url):
            raise ServerError(
                "traces cannot be sent there", value=self.url, limit="http:// or https://, no commas and blanks",
                remedy="give an address with its path: --traces-url http://127.0.0.1:4318/v1/traces",
            )  # fmt: skip
        if not 0 <= self.rate < 10**9:
            raise ServerError("no such rate of traces", value=self.rate, limit="0 to 999999999", remedy="--trace-rate")

    def flags(self) -> list[str]:
        """What tritonserver is told."""
        return [
            "--trace-config=mode=opentelemetry",
            "--trace-config=level=TIMESTAMPS",
            f"--trace-config=rate={self.rate}",
            "--trace-config=count=-1",
            f"--trace-config=opentelemetry,url={self.url}",
            f"--trace-config=opentelemetry,resource=service.name={_SERVICE}",
            # Milliseconds: a trace is there when one goes to look for it.
            "--trace-config=opentelemetry,bsp_schedule_delay=1000",
        ]

    def variables(self) -> dict[str, str]:
        """What the entry's processes need to send spans of their own to the same place."""
        return {URL_VARIABLE: self.url, SERVICE_VARIABLE: _SERVICE}
