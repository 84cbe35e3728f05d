"""docs/door.md says what the code does."""

from __future__ import annotations

import re
import shlex
import subprocess
from pathlib import Path

from clients.door.app import make_app
from clients.door.command import read_settings
from clients.door.keys import read_keys
from clients.door.settings import DoorSettings
from tests.tools.repositories import ROOT

PAGE = (ROOT / "docs" / "door.md").read_text(encoding="utf-8")


def options_table() -> str:
    """The table of all options, out of the settings."""
    lines = ["| option | default | meaning |", "|---|---|---|"]
    for name, field in DoorSettings.model_fields.items():
        default = "" if field.default in (None, "") else f"`{field.default}`"
        lines.append(f"| `--{name.replace('_', '-')}` | {default} | {' '.join((field.description or '').split())} |")
    return "\n".join(lines) + "\n"


def sh_blocks() -> list[str]:
    return re.findall(r"```sh\n(.*?)```", PAGE, flags=re.S)


def test_table_of_options_is_the_settings_own() -> None:
    shown = re.search(r"<!-- options: .*?-->\n(.*?)<!-- /options -->", PAGE, flags=re.S)
    assert shown is not None
    assert shown.group(1) == options_table()


def test_every_path_is_on_the_page_and_every_option_named_there_exists() -> None:
    for route in make_app(DoorSettings()).routes:
        path = getattr(route, "path", "").replace("{model:path}", "NAME")
        assert f"{path}`" in PAGE
    known = {f"--{name.replace('_', '-')}" for name in DoorSettings.model_fields}
    assert set(re.findall(r"`(--[a-z-]+)", PAGE)) <= known


def test_every_code_of_the_table_of_problems_is_on_the_page() -> None:
    from clients.door import problems

    codes = set(re.findall(r"\b[a-z]+(?:_[a-z]+)+\b", problems.__doc__ or "")) - {"client_gone"}
    assert len(codes) > 10
    assert all(f"`{code}`" in PAGE for code in codes)


def test_command_that_starts_it_is_one_it_takes() -> None:
    (command,) = [block for block in sh_blocks() if block.startswith("python -m clients door")]
    assert read_settings(shlex.split(command)[4:]).port == 8080


def test_commands_that_make_keys_make_keys(tmp_path: Path) -> None:
    (command,) = [block for block in sh_blocks() if "> keys" in block]
    subprocess.run(["bash", "-euc", command], cwd=tmp_path, check=True, timeout=20)  # noqa: S607
    search, batch = read_keys(tmp_path / "keys")
    assert (search.name, search.rates) == ("search", {})
    assert (batch.name, batch.rates) == ("batch", {"texts_per_s": 500, "tokens_per_s": 50_000})
