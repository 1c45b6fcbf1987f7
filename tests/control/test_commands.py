"""The other commands: status, config, version."""

import dataclasses
import json
import socket
import sys
from types import SimpleNamespace

import pytest
import yaml
from kvtier import __version__
from kvtier.__main__ import app
from kvtier.core import Role, SlotState, StoreOutcome, Tier
from kvtier.stats import Stats
from kvtier.status import Status, render, show_status
from kvtier.tier_readings import (
    HostDetails,
    NamespaceReading,
    SessionReading,
    TierReading,
    TierTraffic,
)
from rich.console import Console
from support import manifest
from typer.testing import CliRunner

pytestmark = pytest.mark.slow

DIGEST = "0123456789abcdef" * 4
MANIFEST = manifest(model="SmolLM2-135M")
BUSY = Status(
    stats=Stats(
        version="1.2.3",
        ready=True,
        lookups=9,
        traffic=[TierTraffic(Tier.DEVICE, 10_000, 2_500), TierTraffic(Tier.HOST, 7_500, 6_000)],
        total_hit_ratio=0.85,
        stores={
            **dict.fromkeys(StoreOutcome, 0),
            StoreOutcome.COMMITTED: 90,
            StoreOutcome.DUPLICATE: 10,
        },
    ),
    tiers=[
        TierReading(
            Tier.HOST,
            "lru",
            4 << 30,
            3 << 30,
            1_234,
            56,
            host=HostDetails(dict.fromkeys(SlotState, 0), 0.98, 0.95, huge_pages=False),
        )
    ],
    sessions=[SessionReading(3, Role.WORKER, "engine-a", 0, 4711, DIGEST, 3_700.0, 5, 6)],
    namespaces=[NamespaceReading(DIGEST, MANIFEST, 1_234, 3 << 30, 1_500, 1)],
)


def rendered(status, *, colour=False):
    console = Console(width=110, force_terminal=colour, color_system="standard" if colour else None)
    with console.capture() as capture:
        console.print(render(status, "http://127.0.0.1:9555"))
    return capture.get()


def test_status_says_each_ratio_with_what_it_is_a_part_of():
    text = rendered(BUSY)
    assert "85.0% of 10,000 prompt tokens" in text
    assert "device (L0) held 25.0% of them: 2,500 tokens" in text
    assert "host (L1) held 80.0% of the 7,500 tokens that the tiers above did not: 6,000" in text
    assert "90 of 100 offered blocks stored (10 duplicate)" in text


def test_status_shows_tiers_sessions_and_namespaces():
    text = rendered(BUSY)
    for part in ("75%", "3 GiB of 4 GiB", "1,234 blocks", "policy lru", "56 evictions"):
        assert part in text
    for part in ("engine-a", "worker", "4711", "1 h 1 min", DIGEST[:12], "SmolLM2-135M"):
        assert part in text


def test_a_name_that_looks_like_markup_is_shown_as_it_is(monkeypatch, capsys):
    space = dataclasses.replace(BUSY.namespaces[0], manifest=manifest(model="a[red]b:smile:"))
    status = dataclasses.replace(BUSY, namespaces=[space])
    monkeypatch.setattr("kvtier.status.read_status", lambda *_: status)
    monkeypatch.setenv("COLUMNS", "120")
    show_status("http://[::1]:9555/", as_json=False)
    shown = capsys.readouterr().out
    assert "a[red]b:smile:" in shown
    assert "at http://[::1]:9555, ready" in shown


def test_status_has_colour_on_a_terminal_only():
    assert "\x1b[" in rendered(BUSY, colour=True)
    assert "\x1b[" not in rendered(BUSY)


def test_status_of_a_real_server_reads_well_and_as_json(serve, kvtier):
    server = serve().ready()
    shown = kvtier("status", "--url", server.url)
    assert shown.returncode == 0, shown.stderr
    assert "0 B of 64 MiB" in shown.stdout
    assert "No engine is connected." in shown.stdout
    assert "\x1b[" not in shown.stdout
    document = json.loads(kvtier("status", "--url", server.url + "/", "--json").stdout)
    assert document["stats"]["ready"] is True
    assert document["tiers"] == server.json("/v1/tiers")
    assert document["namespaces"] == document["sessions"] == []


def free_port():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return listener.getsockname()[1]


def test_status_without_a_server_names_the_url_and_the_fix(kvtier):
    url = f"http://127.0.0.1:{free_port()}"
    result = kvtier("status", "--url", url)
    assert (result.returncode, result.stdout) == (1, "")
    assert len(result.stderr.splitlines()) == 1
    for part in (url, "Connection refused", "kvtier serve", "--url"):
        assert part in result.stderr


@pytest.mark.parametrize("url", ["127.0.0.1:9555", "ftp://127.0.0.1", "file:///etc/passwd", ""])
def test_status_of_something_that_is_no_url_is_one_sentence(kvtier, url):
    result = kvtier("status", "--url", url)
    assert result.returncode == 1
    assert f'"{url}" is not a URL' in result.stderr
    assert len(result.stderr.splitlines()) == 1


def test_status_of_another_program_is_one_sentence(serve, kvtier):
    url = serve().ready().url + "/elsewhere"
    result = kvtier("status", "--url", url)
    assert result.returncode == 1
    assert "not a kvtier server" in result.stderr
    assert len(result.stderr.splitlines()) == 1


def test_config_prints_a_settings_file_with_the_values_in_force(kvtier, tmp_path):
    file = tmp_path / "kvtier.yaml"
    file.write_text("host: {capacity: 1GiB}")
    result = kvtier("config", "--config", file, "--port", 7, KVTIER_LOG__LEVEL="debug")
    assert result.returncode == 0, result.stderr
    settings = yaml.safe_load(result.stdout)
    assert settings["host"]["capacity"] == "1GiB"
    assert settings["http"]["port"] == 7
    assert settings["log"]["level"] == "debug"
    explained = kvtier("config", "--config", file, "--explain").stdout
    assert "# host.capacity: Default 4GiB." in explained
    assert yaml.safe_load(explained)["host"]["capacity"] == "1GiB"


def test_the_server_reports_the_same_settings_as_the_command(serve, kvtier):
    server = serve().ready()
    arguments = ["--socket", server.socket, "--port", 0, "--capacity", "64MiB", "--json"]
    assert server.json("/v1/config") == json.loads(kvtier("config", *arguments).stdout)


def test_version_prints_the_version(kvtier):
    assert kvtier("version").stdout == f"{__version__}\n"


def test_up_without_a_model_says_how_to_name_one(kvtier):
    result = kvtier("up")
    assert result.returncode == 2
    assert "kvtier up -- " in result.stderr


@pytest.mark.parametrize("separator", [["--"], []])
def test_up_hands_vllm_its_arguments_and_keeps_its_own_options(monkeypatch, tmp_path, separator):
    called = []

    def run_up(arguments, settings):
        called.append((arguments, settings))
        return 3

    monkeypatch.setitem(sys.modules, "kvtier.up", SimpleNamespace(run_up=run_up))
    ours = ["--capacity", "64MiB", "--port", "7", "--socket", str(tmp_path / "s")]
    vllms = ["some/model", "--port", "8000", "--enforce-eager"]
    result = CliRunner().invoke(app, ["up", *ours, *separator, *vllms])
    assert result.exit_code == 3
    ((arguments, settings),) = called
    assert arguments == vllms
    assert (settings.host.capacity, settings.http.port) == (64 << 20, 7)


def test_an_option_of_up_that_is_misspelt_does_not_reach_vllm(kvtier):
    result = kvtier("up", "--capcity", "1GiB", "--", "model")
    assert result.returncode == 2
    assert "--capacity" in result.stderr
