"""docs/guide.md: every command of it is run, or checked in another way; every query is one of metrics that are there.

The commands are typed in the order of the page, in a checkout with a tiny model (workplace.py). Those of "The first
hour" run always, the others with the slow tests; run the file as a whole: what is promoted was built further up.
"""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from tests.operations.guide import (
    GUIDE,
    RUN,
    UNRUN,
    Block,
    anchors,
    check,
    inline_commands,
    links,
    programs,
    read_blocks,
    text_alone,
)
from tests.operations.metric_names import NAMES, RECORDED, names_in
from tests.operations.test_alerts import promtool
from tests.operations.workplace import Workplace
from tests.tools.repositories import ROOT
from tests.tools.waiting import until

TEXT = GUIDE.read_text(encoding="utf-8")
BLOCKS = read_blocks(TEXT)
SHELL = [block for block in BLOCKS if block.language == "sh"]
QUERIES = [line for block in BLOCKS if block.language == "promql" for line in block.text.splitlines()]
#: What a block may hold, by what it needs.
PROGRAMS = {
    "a GPU": {"make", "python"},
    "Docker": {"docker"},
    "a cluster": {"kubectl"},
    "the internet": {"pip", ".venv/bin/pip", "python", "python3", "touch"},
}
#: Options that make a long command short; nothing else of it changes.
SHORTER = {
    "make profile ": "--seconds 2 --clients 4",
    'make bench ARGS="--paired': "--pairs 6 --pair-seconds 1",
    "make bench ": "--rounds 1 --seconds 2 --closed-seconds 1 --clients 4",
    "make tune ": "--rounds 2 --seconds 0.5 --closed-seconds 0.5 --clients 4 --grid 5/16",
    "python -m clients bench ": "--seconds 2 --warm 0",
}
#: Exit codes beside 0. Of bench and tune: past the line, and no verdict on a noisy machine. A tiny random model may
#: fail the gate in int8, and a load generator may be late.
CODES = {
    "make bench": {1, 3},
    "make tune": {1, 3},
    'make verify ARGS="--precision int8': {1},
    "python -m clients bench": {6},
}
#: What is to be seen in the output of a command.
SEEN = {
    "curl -fs http://127.0.0.1:8003/readyz": '"ready": true|"ok": true|ready',
    "python -m clients status": "encode",
    "python -m clients encode": '"tokens": 8',
    "python deploy/grafana/ask.py": r"\d\d of \d+ queries have data",
    "promtool query instant": "encode",
    "promtool check config": "SUCCESS",
    "python -m builders check": "can be built|can_be_built",
    "make versions": "served",
    "make verify": "the gate (holds|fails)",
    "make promote": "version 3",
    "make rollback": "version 2",
    "curl -s -o /dev/null": "^403$",
    "make profile": "(?i)bottleneck|scheduling|compute|data supply",
    "python docker/check_image.py": "as it should be",
}
#: Minutes each, and they change nothing: run where they stand first.
_ONCE = ("make profile ", "make tune ", "make verify")
_STAYS = re.compile(r"make serve$|-m builders serve|^prometheus ")


def shortened(command: str) -> str:
    """The command with the options of SHORTER."""
    for start, options in SHORTER.items():
        if command.startswith(start):
            return f'{command[:-1]} {options}"' if command.endswith('"') else f"{command} {options}"
    return command


def own_code(done: subprocess.CompletedProcess[str]) -> int:
    """The exit code of the command itself: make's own is 2 whatever failed."""
    found = re.findall(r"^make: \*\*\* \[[^]]*\] Error (\d+)", done.stdout, re.MULTILINE)
    return int(found[-1]) if found else done.returncode


def name_of(block: Block) -> str:
    return f"{block.section} {block.number}"


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Workplace]:
    made = Workplace(tmp_path_factory.mktemp("guide"))
    try:
        yield made
    finally:
        made.close()


def serve(place: Workplace, command: str = "HEALTH_PORT=8003 make serve", name: str = "server") -> Path:
    return place.start(name, command, lambda text: "Ctrl-C stops" in text)


def live(place: Workplace, block: Block) -> None:
    """Run a block's commands, one after the other, with beside them what it needs."""
    if block.needs != "this checkout" and not place.is_running("server"):
        serve(place)
    if block.section == "A new model, or a new build of it":
        place.new_model()
    for command in block.commands:
        if command.startswith(_ONCE) and command in place.done:
            continue
        place.done.add(command)
        if not _STAYS.search(command):
            if "grafana/ask.py" in command:
                # The load was shorter than on the page.
                assert until(lambda: bool(place.ask("encoder_lanes:p99_seconds")), 30.0)
            done = place.run(shortened(command))
            codes = next((codes for start, codes in CODES.items() if command.startswith(start)), set())
            code = own_code(done)
            assert code in {0, *codes}, f"{command} ended with {code}:\n{done.stdout[-4000:]}"
            for start, seen in SEEN.items():
                if command.startswith(start):
                    assert re.search(seen, done.stdout, re.MULTILINE), f"{command}:\n{done.stdout[-4000:]}"
        elif command.startswith("prometheus"):
            place.start("prometheus", command, lambda _: place.is_watched())
        else:
            stays(place, command, first=block is SHELL[0])


def stays(place: Workplace, command: str, *, first: bool) -> None:
    """Start a server of the page; all but the first one stop again, so that there is one at a time."""
    place.stop("server")
    output = serve(place, command)
    if first:
        return
    place.stop("server")
    text = output.read_text(encoding="utf-8")
    assert "stopped" in text
    if "--log-format json" in command:
        lines = [json.loads(line) for line in text.splitlines() if line.startswith("{")]
        assert {"loaded"} <= {line.get("event") for line in lines}
        assert lines[-1]["message"] == "stopped"
        events = (place.folder / "build" / "events.jsonl").read_text(encoding="utf-8").splitlines()
        assert [json.loads(line)["kind"] for line in events].count("loaded") == 3


FIRST = [block for block in SHELL if block.section == "The first hour"]
REST = [block for block in SHELL if block.needs in RUN and block not in FIRST]


@pytest.mark.parametrize("block", FIRST, ids=name_of)
def test_commands_of_the_first_hour_run(place: Workplace, block: Block) -> None:
    live(place, block)


def test_prometheus_answers_every_query_of_the_page(place: Workplace) -> None:
    assert place.is_running("prometheus")

    def answered() -> int:
        return sum(bool(place.ask(query)) for query in QUERIES)

    # Tokens, texts, tokenising, batches, calls, waiting: what there is on a healthy CPU.
    assert until(lambda: answered() > 12, 30.0), [query for query in QUERIES if place.ask(query)]


@pytest.mark.slow
@pytest.mark.timeout(2400)
@pytest.mark.parametrize("block", REST, ids=name_of)
def test_commands_of_the_rest_run(place: Workplace, block: Block) -> None:
    live(place, block)


@pytest.mark.parametrize("block", [block for block in SHELL if block.needs in UNRUN], ids=name_of)
def test_commands_that_are_not_run_name_what_is_there(block: Block) -> None:
    for command in block.commands:
        assert programs(command) <= PROGRAMS[block.needs], command
        check(command)


@pytest.mark.parametrize("block", [block for block in SHELL if block.needs in RUN], ids=name_of)
def test_commands_that_are_run_take_the_options_they_are_given(block: Block) -> None:
    assert block.commands
    for command in block.commands:
        check(command)


def test_every_block_says_what_it_needs_and_no_command_stands_in_another_kind_of_block() -> None:
    assert {block.language for block in BLOCKS} == {"sh", "promql", ""}
    assert {name_of(block) for block in SHELL if block.needs not in (*RUN, *UNRUN)} == set()
    assert {name_of(block) for block in BLOCKS if block.language != "sh" and block.needs} == set()
    for block in BLOCKS:
        if block.language == "":
            assert " = " in block.text, "a formula"
    # As many as are seen: none is lost on the way.
    assert (
        len(re.findall(r"^```sh$", TEXT, re.MULTILINE))
        == len(SHELL)
        == len(FIRST) + len(REST) + sum(block.needs in UNRUN for block in SHELL)
    )


def test_commands_inside_sentences_could_be_run() -> None:
    found = inline_commands(TEXT)
    assert len(found) >= 8
    for command in found:
        check(re.sub(r"\b(STEP|N)\b", "1", command))


@pytest.mark.parametrize(
    "command",
    [
        "make tune ARGS=--onyl", "make nothing", "python -m builders promote two", "python -m clients stauts",
        "docker compose up -d tritn", "docker compose up --detached triton", "docker save -o x encoder-lanes-servr:1",
        "docker compose --profile bild run builder", "docker compose run builder promot 2",
        "kubectl apply -k deploy/nothing",
        "kubectl rollout undo deployment/encoder-lane", "pip download -d wheels '.[srve]'", "pip install --no-indx x",
        "sudo reboot",
    ],
)  # fmt: skip
def test_the_check_is_one_that_finds_things(command: str) -> None:
    with pytest.raises(AssertionError):
        check(command)


def test_an_unclassified_block_would_be_found() -> None:
    (block,) = read_blocks("## A\n\n*Needs: Docker.*\n\nand then\n\n```sh\nls\n```\n")
    assert block.needs == ""
    (block,) = read_blocks("## A\n\n*Needs: Docker.*\n\n```sh\nls -l  # all\n\n# no command\n```\n")
    assert (block.section, block.needs, block.commands) == ("A", "Docker", ["ls -l"])


def test_promtool_reads_every_query(tmp_path: Path) -> None:
    rules = [{"record": f"guide:query{number}", "expr": query} for number, query in enumerate(QUERIES)]
    file = tmp_path / "rules.yml"
    file.write_text(yaml.safe_dump({"groups": [{"name": "guide", "rules": rules}]}), encoding="utf-8")
    run = promtool("check", "rules", file)
    assert run.returncode == 0, run.stdout + run.stderr
    assert f"{len(QUERIES)} rules found" in run.stdout
    file.write_text(file.read_text(encoding="utf-8").replace("sum by (", "sum bi (", 1), encoding="utf-8")
    assert promtool("check", "rules", file).returncode != 0


def test_the_page_asks_for_nothing_that_nobody_exports() -> None:
    used = {name for query in QUERIES for name in names_in(query)}
    assert used - NAMES - RECORDED == set()
    assert len(used) > 25
    shown = set(re.findall(r"`((?:nv_|encoder_lanes[_:]|door_)[a-z0-9_:]+)`", text_alone(TEXT)))
    assert shown - NAMES - RECORDED == set()


def test_every_symptom_has_its_section_with_a_query_a_command_and_what_to_turn() -> None:
    trouble = TEXT.split("\n## Trouble\n", 1)[1].split("\n## ", 1)[0]
    rows = re.findall(r"^\| [^|]+ \| [^|]+ \| \[([^\]]+)\]\(#[\w-]+\) \|$", trouble, re.MULTILINE)
    sections = re.findall(r"^### (.+)$", trouble, re.MULTILINE)
    assert rows == sections
    assert len(sections) >= 7
    for section in sections:
        mine = [block.language for block in BLOCKS if block.section == section]
        assert {"promql", "sh"} <= set(mine), section
        text = trouble.split(f"### {section}\n", 1)[1].split("\n### ", 1)[0]
        assert re.search(r"^(Turn:|Send no traffic)", text, re.MULTILINE), section


@pytest.mark.parametrize("page", ["docs/guide.md", "SECURITY.md", "CHANGELOG.md"])
def test_every_link_leads_somewhere(page: str) -> None:
    path = ROOT / page
    for target in links(path.read_text(encoding="utf-8")):
        name, _, anchor = target.partition("#")
        file = (path.parent / name).resolve() if name else path
        assert file.exists(), target
        if anchor:
            assert anchor in anchors(file.read_text(encoding="utf-8")), target
