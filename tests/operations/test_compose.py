"""docker-compose.yml: its schema, what Compose itself makes of it, and the rules that every service keeps."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from builders.triton_wheel import locate_triton
from tests.operations.container import compose
from tests.operations.test_image import tool
from tests.tools.repositories import ROOT

SERVICES = compose()["services"]
#: Profiles that are on together, and the services that they bring.
PROFILES = {
    "gpu,door,tls": {"triton", "door", "proxy"},
    "cpu,traces": {"triton-cpu", "jaeger"},
    "build,build-cpu": {"builder", "builder-cpu"},
}


def composed(profiles: str) -> dict[str, Any]:
    """What `docker-compose config` makes of the file."""
    command = [
        *(tool("docker-compose", "docker-compose (apt)"), "--project-directory", str(ROOT)),
        *("--env-file", str(ROOT / ".env.example"), "-f", str(ROOT / "docker-compose.yml"), "config"),
    ]
    environment = {"PATH": os.environ["PATH"], "COMPOSE_PROFILES": profiles}
    run = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert (run.returncode, run.stderr) == (0, "")
    document: dict[str, Any] = yaml.safe_load(run.stdout)
    return document


def test_the_file_keeps_to_the_compose_specification() -> None:
    command = [tool("check-jsonschema", "check-jsonschema"), "--builtin-schema", "vendor.compose-spec"]
    good = subprocess.run([*command, str(ROOT / "docker-compose.yml")], capture_output=True, text=True, check=False)
    assert good.returncode == 0, good.stdout


def test_the_schema_check_is_one_that_finds_things(tmp_path: Path) -> None:
    wrong = tmp_path / "docker-compose.yml"
    text = (ROOT / "docker-compose.yml").read_text(encoding="utf-8")
    wrong.write_text(text.replace("  read_only: true", "  readonly: true"), encoding="utf-8")
    command = [tool("check-jsonschema", "check-jsonschema"), "--builtin-schema", "vendor.compose-spec", str(wrong)]
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    assert run.returncode == 1
    assert "readonly" in run.stdout


@pytest.mark.parametrize(("profiles", "services"), PROFILES.items())
def test_compose_itself_accepts_every_profile(profiles: str, services: set[str]) -> None:
    found = composed(profiles)["services"]
    wanted = {
        name for name, one in found.items() if not one.get("profiles") or {*one["profiles"]} & {*profiles.split(",")}
    }
    assert wanted == services | {"prometheus", "grafana"}


def test_no_profile_is_left_out_of_these() -> None:
    named = {profile for service in SERVICES.values() for profile in service.get("profiles", [])}
    assert named == set(",".join(PROFILES).split(","))


def test_every_variable_of_the_file_is_in_the_example_with_the_same_default() -> None:
    text = (ROOT / "docker-compose.yml").read_text(encoding="utf-8")
    used = dict(re.findall(r"\$\{([A-Z_]+):-([^}]*)\}", text))
    lines = (ROOT / ".env.example").read_text(encoding="utf-8").splitlines()
    example = dict(line.split("=", 1) for line in lines if line and not line.startswith("#"))
    assert {name: example.get(name) for name in used} == used
    assert set(example) - set(used) == {"COMPOSE_PROFILES"}


@pytest.mark.parametrize("name", sorted(SERVICES))
def test_every_service_runs_without_root_without_capabilities_read_only_and_within_limits(name: str) -> None:
    service = SERVICES[name]
    assert service["read_only"] is True
    assert service["cap_drop"] == ["ALL"]
    assert service["security_opt"] == ["no-new-privileges:true"]
    assert int(service["user"].split(":")[0]) > 0
    limits = service["deploy"]["resources"]["limits"]
    assert {"cpus", "memory"} <= set(limits)
    assert not service.get("privileged")
    assert all("docker.sock" not in str(volume) for volume in service.get("volumes", []))


@pytest.mark.parametrize("name", sorted(set(SERVICES) - {"builder", "builder-cpu"}))
def test_every_lasting_service_restarts_rotates_its_log_and_has_a_health_check(name: str) -> None:
    service = SERVICES[name]
    assert service["restart"] == "unless-stopped"
    assert service["logging"]["options"]["max-size"]
    assert {"test", "interval", "timeout", "retries", "start_period"} <= set(service["healthcheck"])


def test_no_secret_stands_in_the_file_or_the_example() -> None:
    document = compose()
    assert set(document["secrets"]) == {"control_key", "api_keys", "grafana_password", "tls_certificate", "tls_key"}
    for secret in document["secrets"].values():
        assert set(secret) == {"file"}
    for path in ("docker-compose.yml", ".env.example"):
        text = (ROOT / path).read_text(encoding="utf-8")
        assert not re.search(r"(password|secret|key|token)[^\n]*[=:]\s*[A-Za-z0-9+/]{12,}\s*$", text, re.IGNORECASE)


def test_the_server_stops_within_the_time_that_compose_gives_it() -> None:
    flags = dict(flag.lstrip("-").split("=", 1) for flag in SERVICES["triton"]["command"] if "=" in flag)
    grace = int(SERVICES["triton"]["stop_grace_period"].removesuffix("s"))
    # The drain, tritonserver's own exit, and what the launcher waits beyond that before it kills.
    assert grace >= 2 * int(flags["exit-timeout-secs"]) + 10


def test_both_servers_differ_in_image_volume_and_gpu_alone() -> None:
    ignore = {"profiles", "build", "image", "volumes", "deploy"}
    gpu, cpu = (
        {key: value for key, value in SERVICES[name].items() if key not in ignore} for name in ("triton", "triton-cpu")
    )
    assert gpu == cpu
    devices = SERVICES["triton"]["deploy"]["resources"]["reservations"]["devices"]
    assert devices[0]["capabilities"] == ["gpu"]
    assert "reservations" not in SERVICES["triton-cpu"]["deploy"]["resources"]


def test_every_flag_of_the_server_is_one_that_tritonserver_knows() -> None:
    install = locate_triton()
    environment = {"LD_LIBRARY_PATH": str(install.library_folder), "PATH": os.environ["PATH"]}
    run = subprocess.run([str(install.binary), "--help"], capture_output=True, text=True, env=environment, check=False)
    known = set(re.findall(r"^\s+--([a-z-]+)", run.stdout + run.stderr, re.MULTILINE))
    used = {flag.lstrip("-").split("=")[0] for flag in SERVICES["triton"]["command"]}
    assert len(known) > 50
    assert used <= known


def test_prometheus_asks_where_the_servers_and_their_launchers_answer() -> None:
    aliases = SERVICES["triton"]["networks"]["serving"]["aliases"]
    ports = {"triton": "8002", "supervisor": SERVICES["triton"]["environment"]["HEALTH_PORT"]}
    for job, port in ports.items():
        (one,) = yaml.safe_load((ROOT / "deploy" / "prometheus" / "targets" / f"{job}.yml").read_text("utf-8"))
        assert one["targets"] == [f"{alias}:{port}" for alias in aliases]
    assert "serving" in SERVICES["prometheus"]["networks"]


def test_what_the_services_mount_from_the_project_is_there() -> None:
    for name, service in SERVICES.items():
        for volume in service.get("volumes", []):
            source = volume.split(":")[0]
            if source.startswith("./"):
                assert (ROOT / source).exists(), (name, source)
            elif not source.startswith("$"):
                assert source in compose()["volumes"], (name, source)
