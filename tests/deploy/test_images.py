"""Dockerfiles and docker-compose.yml: what they copy, mount and name is there."""

import fnmatch
import json
import re
import shlex
import shutil
import subprocess

import pytest
import yaml

from deploy.generate.catalog import ROOT

DOCKERFILES = sorted((ROOT / "deploy").glob("Dockerfile*"))
COMPOSE = ROOT / "docker-compose.yml"
PLAIN_PATH = re.compile(r"[A-Za-z0-9_./-]+")


def copies(dockerfile):
    """Return sources and destination of each COPY."""
    text = dockerfile.read_text("utf-8").replace("\\\n", " ")
    lines = [shlex.split(line) for line in text.splitlines() if line.startswith(("COPY", "ADD"))]
    return [(line[1:-1], line[-1]) for line in lines]


def sent():
    """Return what .dockerignore lets through: it excludes everything, and names exceptions."""
    lines = (ROOT / ".dockerignore").read_text("utf-8").splitlines()
    assert "*" in lines
    return [line[1:] for line in lines if line.startswith("!")]


@pytest.fixture(scope="module")
def services():
    return yaml.safe_load(COMPOSE.read_text("utf-8"))["services"]


@pytest.mark.parametrize("dockerfile", DOCKERFILES, ids=lambda path: path.name)
def test_what_a_dockerfile_copies_is_there_and_goes_to_a_plain_path(dockerfile):
    assert copies(dockerfile)
    for sources, destination in copies(dockerfile):
        assert PLAIN_PATH.fullmatch(destination), destination
        assert len(sources) == 1 or destination.endswith("/")
        for source in sources:
            assert PLAIN_PATH.fullmatch(source), source
            assert (ROOT / source).exists(), source
            assert any(fnmatch.fnmatch(source, each) for each in sent()), source


@pytest.mark.parametrize("dockerfile", DOCKERFILES, ids=lambda path: path.name)
def test_a_dockerfile_installs_the_package_with_extras_that_there_are(dockerfile):
    project = (ROOT / "pyproject.toml").read_text("utf-8")
    text = dockerfile.read_text("utf-8").replace("\\\n", " ")
    installs = [shlex.split(line) for line in text.splitlines() if "pip install" in line]
    assert len(installs) == 1
    [installed] = [word for word in installs[0] if re.fullmatch(r"\.(\[.*\])?", word)]
    for extra in re.findall(r"\w+", installed):
        assert re.search(rf"^{extra} = \[", project, re.MULTILINE), extra


def test_the_server_in_a_container_can_compress():
    assert "'.[compression]'" in (ROOT / "deploy/Dockerfile").read_text("utf-8")


def test_images_have_the_same_user_because_they_share_a_socket():
    users = {
        re.search(r"useradd --uid (\d+) --create-home kvtier", file.read_text("utf-8"))[1]
        for file in DOCKERFILES
    }
    assert users == {"10001"}


def test_docker_compose_up_still_starts_the_server_and_an_engine_on_cpus(services):
    assert "profiles" not in services["kvtier"]
    assert services["vllm"]["profiles"] == ["cpu"]
    assert "COMPOSE_PROFILES=cpu" in (ROOT / ".env").read_text("utf-8").splitlines()


def test_every_profile_is_told_of_at_the_top(services):
    profiles = {name for each in services.values() for name in each.get("profiles", [])}
    head = COMPOSE.read_text("utf-8").partition("services:")[0]
    assert set(re.findall(r"^#   (\w+)  +\S", head, re.MULTILINE)) >= profiles


def test_public_images_are_pinned_and_ports_stay_on_this_machine(services):
    for name, service in services.items():
        assert ("image" in service) != ("build" in service), name
        if "image" in service:
            assert re.search(r":v?\d+\.\d+\.\d+(-\w+)?$", service["image"]), name
        for port in service.get("ports", []):
            assert port.startswith("127.0.0.1:"), name


def test_what_is_built_and_mounted_from_the_repository_is_there(services):
    for service in services.values():
        if "build" in service:
            assert (ROOT / service["build"]["dockerfile"]).is_file()
        for volume in service.get("volumes", []):
            if volume.startswith("./"):
                assert (ROOT / volume.split(":")[0]).exists(), volume


def test_prometheus_reaches_the_servers_loopback_and_grafana_reaches_prometheus(services):
    assert services["prometheus"]["network_mode"] == "service:kvtier"
    folder = ROOT / "deploy/grafana/provisioning"
    [source] = yaml.safe_load((folder / "datasources/prometheus.yaml").read_text())["datasources"]
    assert source["url"] == "http://kvtier:9090"
    prometheus = yaml.safe_load((ROOT / "deploy/prometheus/prometheus.yaml").read_text())
    assert source["jsonData"]["timeInterval"] == prometheus["global"]["scrape_interval"]
    for job in prometheus["scrape_configs"]:
        for found in job.get("dns_sd_configs", []):
            assert set(found["names"]) == {"vllm", "vllm-gpu"} <= set(services)
            published = {
                port.split(":")[-1] for each in found["names"] for port in services[each]["ports"]
            }
            assert published == {str(found["port"])}


def test_grafana_finds_the_dashboards_where_they_are_mounted(services):
    mounts = dict(volume.split(":")[:2] for volume in services["grafana"]["volumes"])
    [provider] = yaml.safe_load(
        (ROOT / "deploy/grafana/provisioning/dashboards/kvtier.yaml").read_text()
    )["providers"]
    assert mounts["./deploy/grafana/dashboards"] == provider["options"]["path"]
    home = services["grafana"]["environment"]["GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH"]
    assert (ROOT / "deploy/grafana/dashboards" / home.rpartition("/")[2]).is_file()
    assert home.startswith(provider["options"]["path"])


def test_both_engines_have_the_same_connector(services):
    configs = [
        argument
        for name in ("vllm", "vllm-gpu")
        for argument in services[name]["command"]
        if "kv_connector" in argument
    ]
    assert len(configs) == 2
    assert json.loads(configs[0]) == json.loads(configs[1])


def test_the_redis_of_the_profile_is_set_up_as_the_documents_say(services):
    command = " ".join(services["redis"]["command"])
    for option in ("--save  ", "--appendonly no", "--maxmemory-policy allkeys-lru"):
        assert option in command
    assert "KVTIER_REDIS__URL" in services["kvtier"]["environment"]
    assert "redis://redis:6379/0" in COMPOSE.read_text("utf-8")


def compose():
    """Return the command of a compose that is installed; None if there is none."""
    for command in (["docker", "compose"], ["docker-compose"]):
        if shutil.which(command[0]):
            asked = subprocess.run([*command, "version"], capture_output=True, check=False)
            if asked.returncode == 0:
                return command
    return None


@pytest.mark.skipif(compose() is None, reason="needs docker compose")
def test_compose_finds_nothing_to_say_about_any_profile():
    profiles = [f"--profile={name}" for name in ("cpu", "gpu", "redis", "observability")]
    command = [*compose(), *profiles, "config", "--quiet"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
