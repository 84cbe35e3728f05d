"""`python -m clients door`: runs the door. Its options are DoorSettings; the packages are those of the extra `door`."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from typing import TYPE_CHECKING

import typer

from clients.errors import EncoderError

if TYPE_CHECKING:
    import uvicorn
    from starlette.applications import Starlette

    from clients.door.settings import DoorSettings

#: For typer's `command`: every argument, --help too, is passed on to the settings, which are their own description.
PASS_ON = {"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []}


def door(context: typer.Context) -> None:
    """OpenAI-compatible HTTP in front of the entry models; `door --help` lists its options."""
    try:
        from pydantic import ValidationError

        import clients.door.app
        import clients.door.settings  # noqa: F401 - to find out whether their packages are there
    except ImportError as error:
        typer.echo(f"error: a package of the door is missing: {error.name}; to do: install the extra `door`", err=True)
        raise typer.Exit(1) from None
    try:
        serve(read_settings(context.args))
    except ValidationError as error:
        for one in error.errors(include_url=False):
            name = ".".join(str(part) for part in one["loc"])
            where = f"{name} (--{name.replace('_', '-')}, DOOR_{name.upper()}): " if name else ""
            typer.echo(f"error: {where}{one['msg']}", err=True)
        raise typer.Exit(2) from None
    except EncoderError as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(2) from None


def read_settings(arguments: list[str]) -> DoorSettings:
    """The settings out of options and DOOR_* variables.

    Raises:
        pydantic.ValidationError: a value is wrong.
        SystemExit: --help, or an unknown option.
    """
    from pydantic_settings import CliApp

    from clients.door.settings import DoorSettings

    return CliApp.run(DoorSettings, cli_args=arguments)


def unknown_variables(environment: Mapping[str, str]) -> list[str]:
    """Names of variables DOOR_* that are no setting: a slip in DOOR_KEYS would leave the door open."""
    from clients.door.settings import DoorSettings

    known = {f"DOOR_{name.upper()}" for name in DoorSettings.model_fields}
    return sorted(name for name in environment if name.startswith("DOOR_") and name not in known)


def serve(settings: DoorSettings) -> None:
    """Runs until it is told to stop; requests under way have `drain_s` to end.

    Raises:
        InvalidInput: as `make_app`.
        SystemExit: the address cannot be listened on; the log says why.
    """
    import uvicorn

    from clients.door.app import make_app
    from clients.door.log import LOGGER, write_logs

    app = make_app(settings)
    write_logs()
    if strange := unknown_variables(os.environ):
        # Not refused: Kubernetes sets DOOR_PORT and others for a Service of the name `door`.
        logging.getLogger(LOGGER).warning("unknown variables", extra={"door": {"variables": strange}})
    try:
        uvicorn.Server(server_config(app, settings)).run()
    except KeyboardInterrupt:
        logging.getLogger(LOGGER).debug("stopped by Ctrl-C")


def server_config(app: Starlette, settings: DoorSettings) -> uvicorn.Config:
    """How uvicorn runs the door."""
    import uvicorn

    from clients.door.connection import connection_class

    return uvicorn.Config(
        app,
        host=settings.host,
        port=settings.port,
        http=connection_class(settings),
        ws="none",
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=False,
        lifespan="on",
        timeout_graceful_shutdown=max(1, round(settings.drain_s)),
        timeout_keep_alive=75,  # longer than the minute after which common proxies drop an idle connection themselves
        ssl_certfile=settings.certificate,
        ssl_keyfile=settings.certificate_key,
    )
