"""Manifests for Kubernetes: each is valid by its schema, and they fit each other."""

import contextlib
import http.server
import json
import shutil
import subprocess
import threading
import urllib.error
import urllib.request
from pathlib import Path

import jsonschema
import kubernetes_validate
import pytest
import yaml
from kvtier.endpoints import free_port
from support import until

from deploy.generate.catalog import ROOT
from deploy.generate.files import GRAFANA

K8S = ROOT / "deploy/k8s"
SCHEMAS = Path(__file__).with_name("schemas")
KUBERNETES = "1.31"
OPERATOR = "monitoring.coreos.com/v1"
MANIFESTS = ["kvtier.yaml", "vllm.yaml", "monitoring/podmonitors.yaml", "monitoring/rules.yaml"]
CONFIG_MAP_BYTES = 1 << 20

needs_kubectl = pytest.mark.skipif(not shutil.which("kubectl"), reason="needs kubectl")


def documents(name):
    return list(yaml.safe_load_all((K8S / name).read_text("utf-8")))


def check(document):
    """Raise if a document is not valid."""
    if document["apiVersion"] == OPERATOR:
        schema = json.loads((SCHEMAS / f"{document['kind']}.json").read_text("utf-8"))
        jsonschema.validate(document, schema)
    else:
        kubernetes_validate.validate(document, KUBERNETES, strict=True)


def one(found, kind, name="kvtier"):
    [document] = [
        each for each in found if (each["kind"], each["metadata"]["name"]) == (kind, name)
    ]
    return document


@pytest.fixture(scope="module")
def applied():
    """What `kubectl apply -k deploy/k8s` applies."""
    command = ["kubectl", "kustomize", str(K8S)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return list(yaml.safe_load_all(done.stdout))


@pytest.mark.parametrize("name", MANIFESTS)
def test_every_manifest_is_valid_by_its_schema(name):
    for document in documents(name):
        check(document)


def test_a_misspelt_field_is_found():
    [monitor, *_] = documents("monitoring/podmonitors.yaml")
    monitor["spec"]["podMetricsEndpoint"] = monitor["spec"].pop("podMetricsEndpoints")
    with pytest.raises(jsonschema.ValidationError):
        check(monitor)
    daemon = one(documents("kvtier.yaml"), "DaemonSet")
    daemon["spec"]["template"]["spec"]["container"] = []
    with pytest.raises(kubernetes_validate.ValidationError):
        check(daemon)


@needs_kubectl
def test_what_kustomize_makes_is_valid_and_small_enough(applied):
    kinds = {(each["kind"], each["metadata"]["name"].split("-")[0]) for each in applied}
    assert {("DaemonSet", "kvtier"), ("PodMonitor", "vllm"), ("PrometheusRule", "kvtier")} <= kinds
    for document in applied:
        check(document)
        if document["kind"] == "ConfigMap":
            assert len(json.dumps(document["data"])) < CONFIG_MAP_BYTES


@needs_kubectl
def test_all_dashboards_are_in_the_config_map_that_grafana_looks_for(applied):
    dashboards = one(applied, "ConfigMap", "kvtier-dashboards")
    assert dashboards["metadata"]["labels"] == {"grafana_dashboard": "1"}
    texts = {path.name: path.read_text("utf-8") for path in GRAFANA.iterdir()}
    assert dashboards["data"] == texts


def test_the_kustomization_names_all_dashboards():
    written = yaml.safe_load((ROOT / "deploy/grafana/kustomization.yaml").read_text("utf-8"))
    files = {Path(file).name for file in written["configMapGenerator"][0]["files"]}
    assert files == {path.name for path in GRAFANA.iterdir()}


@needs_kubectl
def test_the_monitor_asks_the_port_that_hands_the_metrics_on(applied):
    pod = one(applied, "DaemonSet")["spec"]["template"]
    monitor = one(applied, "PodMonitor")["spec"]
    assert monitor["selector"]["matchLabels"].items() <= pod["metadata"]["labels"].items()
    assert pod["metadata"]["labels"][monitor["jobLabel"]] == "kvtier"
    [sidecar] = [each for each in pod["spec"]["containers"] if each["name"] == "metrics"]
    [port] = sidecar["ports"]
    assert [each["port"] for each in monitor["podMetricsEndpoints"]] == [port["name"]]
    nginx = (K8S / "monitoring/nginx.conf").read_text("utf-8")
    assert f"listen {port['containerPort']};" in nginx
    assert "proxy_pass http://127.0.0.1:9555;" in nginx
    [server] = [each for each in pod["spec"]["containers"] if each["name"] == "kvtier"]
    plain = yaml.safe_load_all((ROOT / "deploy/k8s/kvtier.yaml").read_text("utf-8"))
    [daemon] = [each for each in plain if each["kind"] == "DaemonSet"]
    assert [server] == daemon["spec"]["template"]["spec"]["containers"], "it stays as it is"


def test_the_monitor_of_vllm_asks_the_engines_port():
    [engine] = documents("vllm.yaml")
    monitor = one(documents("monitoring/podmonitors.yaml"), "PodMonitor", "vllm")["spec"]
    labels = engine["spec"]["template"]["metadata"]["labels"]
    assert labels[monitor["jobLabel"]] == "vllm"
    ports = [each["name"] for each in engine["spec"]["template"]["spec"]["containers"][0]["ports"]]
    assert [each["port"] for each in monitor["podMetricsEndpoints"]] == ports


class Echo(http.server.BaseHTTPRequestHandler):
    """Answers with the path that it was asked for, in the place of a server."""

    def do_GET(self):
        self.send_response(200)
        self.end_headers()
        self.wfile.write(self.path.encode())

    def log_message(self, *arguments):
        pass


def status(url, method="GET"):
    """Return status and body of an answer; 0 while there is none."""
    try:
        with urllib.request.urlopen(urllib.request.Request(url, method=method)) as answer:
            return answer.status, answer.read()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, b""
    except OSError:
        return 0, b""


@pytest.fixture
def proxy(tmp_path):
    """The address of an nginx with the settings of the manifest, in front of an `Echo`."""
    with contextlib.ExitStack() as stack:
        server = stack.enter_context(http.server.ThreadingHTTPServer(("127.0.0.1", 0), Echo))
        threading.Thread(target=server.serve_forever, daemon=True).start()
        stack.callback(server.shutdown)
        address = f"127.0.0.1:{free_port('127.0.0.1')}"
        written = (K8S / "monitoring/nginx.conf").read_text("utf-8")
        settings = tmp_path / "nginx.conf"
        settings.write_text(
            written.replace("127.0.0.1:9555", f"127.0.0.1:{server.server_port}")
            .replace("listen 9556", f"listen {address}")
            .replace("/tmp/", f"{tmp_path}/")
        )
        with (tmp_path / "log").open("wb") as log:
            nginx = subprocess.Popen(["nginx", "-c", settings], stdout=log, stderr=log)
        stack.callback(nginx.wait, 20)
        stack.callback(nginx.terminate)
        until(lambda: status(f"http://{address}/")[0], "nginx")
        yield f"http://{address}"


@pytest.mark.slow
@pytest.mark.skipif(not shutil.which("nginx"), reason="needs nginx")
def test_the_cluster_gets_the_metrics_and_nothing_else_of_the_control_plane(proxy):
    assert status(f"{proxy}/metrics") == (200, b"/metrics")
    assert status(f"{proxy}/metrics", "POST")[0] == 403
    for path in ("/", "/v1/stats", "/metrics/", "/metrics/../v1/config", "/docs"):
        assert status(f"{proxy}{path}")[0] == 404, path
