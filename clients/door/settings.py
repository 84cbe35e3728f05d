"""Settings of the door: each is an option of `python -m clients door` and a variable DOOR_*; an option goes first.

A value outside its limits, and two that contradict each other, raise pydantic's ValidationError.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import Field, FilePath, SecretStr, model_validator
from pydantic_settings import BaseSettings, SettingsConfigDict

from clients.connection import Tls

Seconds = Annotated[float, Field(gt=0, le=86_400)]
Rate = Annotated[float, Field(gt=0, le=1e9)]
_ADDRESS = re.compile(r"^(?:\[(?P<six>[0-9A-Fa-f:.]+)\]|(?P<host>[^:\[\]\s]+)):(?P<port>[0-9]{1,5})$")
_ALIAS = re.compile(r"^[^=\s]+=[^=\s]+$")


class DoorSettings(BaseSettings):
    """OpenAI-compatible HTTP in front of the entry models, until Ctrl-C or SIGTERM.

    Each option may be given as the variable DOOR_NAME instead; an option goes first.
    """

    model_config = SettingsConfigDict(
        env_prefix="DOOR_",
        frozen=True,
        extra="ignore",
        env_ignore_empty=True,
        use_attribute_docstrings=True,
        cli_kebab_case=True,
        cli_prog_name="python -m clients door",
        cli_hide_none_type=True,
        cli_avoid_json=True,
    )

    listen: str = "127.0.0.1:8080"
    """Address to listen on, HOST:PORT; [::]:PORT for IPv6."""
    triton: str = "127.0.0.1:8001"
    """Triton's gRPC endpoint: HOST:PORT, grpcs://HOST:PORT when it is encrypted, dns:///HOST:PORT for a name of several
    servers, which are called in turn."""
    triton_root: FilePath | None = None
    """PEM file that vouches for Triton's certificate; the connection is encrypted."""
    triton_token: SecretStr | None = None
    """Sent to Triton as a bearer token; better in the environment (DOOR_TRITON_TOKEN)."""
    models: str = ""
    """Entry models to serve, with commas; empty: `encode` and every `encode_NAME` that the server has loaded."""
    aliases: str = ""
    """Other names of models, NAME=MODEL with commas, for clients whose model name is fixed."""
    tokenizer: FilePath | None = None
    """tokenizer.json that the token ids of /v1/embeddings are of; without it ids are refused."""
    keys: FilePath | None = None
    """File of API keys, a line each: NAME KEY, or NAME sha256:HEX; then optionally requests_per_s=, texts_per_s=,
    tokens_per_s= of this key. Read again when it changes. Without it everybody may call."""
    requests_per_s: Rate | None = None
    """Most requests a second of one key."""
    texts_per_s: Rate | None = None
    """Most texts a second of one key."""
    tokens_per_s: Rate | None = None
    """Most tokens a second of one key. They are known afterwards: who spent too many waits before the next request."""
    burst_s: Seconds = 2.0
    """How many seconds of its rate a key may save up."""
    priority: Literal["interactive", "background"] = "background"
    """Of requests without the header X-Priority."""
    truncate: Literal["end", "start", "error", "chunk"] = "end"
    """What becomes of a text that is too long where the request does not say; the header X-Cut-Tokens tells."""
    deadline_s: Seconds = 60.0
    """Longest time of a request, seconds; the header X-Deadline-Ms shortens it."""
    queue_timeout_s: Seconds | None = None
    """Longest wait in Triton's queue, seconds; the header X-Queue-Timeout-Ms shortens it. Empty: the server's own."""
    retry_after_s: Seconds = 1.0
    """What Retry-After says when the server is overloaded."""
    max_inputs: int = Field(default=2048, ge=1, le=1_000_000)
    """Most texts of one request."""
    max_body_bytes: int = Field(default=8_388_608, ge=1024, le=1 << 31)
    """Largest body, bytes."""
    max_bodies_bytes: int = Field(default=67_108_864, ge=1024, le=1 << 40)
    """Most bytes of all bodies at once; what goes beyond is refused as overload. A body in work takes several times its
    size."""
    head_timeout_s: Seconds = 10.0
    """Longest time for a request's line and headers to arrive, seconds; then the connection is closed."""
    body_timeout_s: Seconds = 30.0
    """Longest time for a body to arrive, seconds."""
    max_in_flight: int = Field(default=256, ge=1, le=100_000)
    """Most requests at once; one more is refused as overload."""
    refresh_s: Seconds = 10.0
    """How often the server is asked which models it has, seconds."""
    drain_s: Seconds = 30.0
    """How long a stop waits for requests under way, seconds."""
    certificate: FilePath | None = None
    """PEM file of the door's own certificate chain: it speaks HTTPS."""
    certificate_key: FilePath | None = None
    """PEM file of its private key."""

    @model_validator(mode="after")
    def _fits(self) -> Self:
        found = _ADDRESS.match(self.listen)
        if found is None or int(found["port"]) > 65_535:
            raise ValueError(f"listen is {self.listen!r}; limit: HOST:PORT with a port from 0 to 65535")
        if (self.certificate is None) != (self.certificate_key is None):
            raise ValueError("certificate and certificate_key: give both or neither")
        if self.max_bodies_bytes < self.max_body_bytes:
            raise ValueError(
                f"max_bodies_bytes is {self.max_bodies_bytes}; limit: max_body_bytes, {self.max_body_bytes}, or more"
            )
        for one in _parts(self.aliases):
            if not _ALIAS.match(one):
                raise ValueError(f"aliases has {one!r}; limit: NAME=MODEL, with commas between them")
        return self

    @property
    def host(self) -> str:
        """Host to listen on, an IPv6 address without its brackets."""
        found = _ADDRESS.match(self.listen)
        return (found["six"] or found["host"]) if found else ""

    @property
    def port(self) -> int:
        """Port to listen on; 0 for any."""
        return int(self.listen.rpartition(":")[2])

    @property
    def model_names(self) -> tuple[str, ...]:
        """Entry models named in `models`; none: whatever is loaded."""
        return tuple(_parts(self.models))

    @property
    def alias_names(self) -> dict[str, str]:
        """Model by alias."""
        return dict(one.split("=", 1) for one in _parts(self.aliases))

    @property
    def tls(self) -> Tls | None:
        """How Triton is trusted."""
        return None if self.triton_root is None else Tls(root=Path(self.triton_root))


def _parts(text: str) -> list[str]:
    return [part.strip() for part in text.split(",") if part.strip()]
