"""What the documents say is what the code does: settings, metrics, routes, formats, examples."""

import ast
import hashlib
import json
import os
import re
from pathlib import Path

import msgspec
import pytest
import yaml
from kvtier import protocol as wire
from kvtier.accounts import QUOTA_KEYS
from kvtier.client import FAILURES
from kvtier.config import descriptions, load_settings
from kvtier.core import Manifest, Role, SlotRef
from kvtier.engine.options import KEYS, read_options
from kvtier.live import Kept
from kvtier.lmcache import options as adapter
from kvtier.quotas import QuotaKeeper
from kvtier.readings import Readings
from kvtier.serve import Server
from support import MANIFEST, hierarchy

ROOT = Path(__file__).resolve().parents[2]
OPERATIONS = (ROOT / "docs/operations.md").read_text("utf-8")
FORMATS = (ROOT / "docs/formats.md").read_text("utf-8")
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")])
EXAMPLE = ROOT / "deploy/kvtier.example.yaml"
ENGINE_EXAMPLES = {
    "README.md": "/tmp/kvtier.sock",
    "docs/operations.md": "/run/kvtier/kvtier.sock",
    "docker-compose.yml": "/run/kvtier/kvtier.sock",
    "deploy/k8s/vllm.yaml": "/run/kvtier/kvtier.sock",
}
"""Where a --kv-transfer-config stands, and the socket that the server beside it has."""


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch):
    for name in list(os.environ):
        if name.upper().startswith("KVTIER"):
            monkeypatch.delenv(name)


def table(page, name):
    """Return the rows of the table between `<!-- name -->` and `<!-- /name -->`, as cells."""
    text = page.split(f"<!-- {name} -->")[1].split(f"<!-- /{name} -->")[0]
    lines = [line for line in text.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]


def plain(cell):
    return cell.strip("`")


def read_cache():
    """Return a small cache and its metrics, read once."""
    cache = hierarchy(4)
    cache.tenants.tally("acme").lookups += 1
    QuotaKeeper(cache).set({"acme": dict.fromkeys(QUOTA_KEYS, 4096)})
    Readings(cache).refresh_metrics()
    cache.host.close()
    return cache, cache.metrics


def test_the_settings_reference_has_exactly_the_settings_with_their_defaults():
    rows = {plain(key): plain(default) for key, default, _ in table(OPERATIONS, "settings")}
    known = descriptions()
    assert list(rows) == list(known)
    for key, default in rows.items():
        assert re.match(rf"Default {re.escape(default)}[.:,]", known[key]), key


def test_the_connectors_reference_has_exactly_its_keys_with_their_defaults(monkeypatch):
    rows = {plain(key): plain(default) for key, default, _ in table(OPERATIONS, "connector")}
    assert tuple(rows) == KEYS
    monkeypatch.setenv("XDG_RUNTIME_DIR", "/run/user/7")
    options = read_options({})
    assert rows["deadline_ms"] == str(options.deadline_ms)
    assert rows["socket"].replace("$XDG_RUNTIME_DIR", "/run/user/7") == str(options.socket)


def test_the_reference_of_lmcaches_adapter_has_exactly_its_parameters_with_their_defaults():
    rows = {plain(key): plain(default) for key, default, _ in table(OPERATIONS, "adapter")}
    assert tuple(rows) == adapter.KEYS
    options = adapter.read_options({"label": "l"})
    for key in ("tenant", "chunk_tokens", "deadline_ms", "wait_ms"):
        assert rows[key] == str(getattr(options, key)), key


def test_the_metrics_reference_has_exactly_the_metrics_with_their_types_and_labels():
    documented = {}
    for name, kind, labels, _ in table(OPERATIONS, "metrics"):
        found = {}
        for label in labels.split("; ") if labels else []:
            key, _, values = label.partition(": ")
            found[plain(key)] = {plain(value) for value in values.split(", ") if value}
        documented[plain(name)] = (kind, found)
    existing = {}
    for family in read_cache()[1].registry.collect():
        name = f"{family.name}_total" if family.type == "counter" else family.name
        labels = {}
        for sample in family.samples:
            for key, value in sample.labels.items():
                if key != "le":
                    labels.setdefault(key, set()).add(value)
        for open_label in labels.keys() & {"version", "tenant"}:
            labels[open_label] = set()
        existing[name] = (family.type, labels)
    assert documented == existing


def engine_metrics():
    """Return the names of the connector's metrics; its module needs vLLM, so it is only read."""
    assigned = {}
    for node in ast.parse((ROOT / "server/engine/stats.py").read_text("utf-8")).body:
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            assigned[node.targets[0].id] = ast.literal_eval(node.value)
    reasons = [assigned[name] for name in ("MISSES", "BYPASSED", "NOT_NUMBERS")]
    names = [*assigned["COPIES"], *reasons]
    return [f"kvtier_engine_{name}" for name in names]


def test_the_reference_of_the_engines_metrics_has_exactly_those():
    rows = {plain(name): labels for name, _, labels, _ in table(OPERATIONS, "engine-metrics")}
    assert list(rows) == [f"{name}_total" for name in engine_metrics()]
    reasons = rows["kvtier_engine_misses_total"].partition(": ")[2].split(", ")
    assert tuple(map(plain, reasons)) == FAILURES


def test_every_metric_that_a_document_names_exists():
    known = {family.name for family in read_cache()[1].registry.collect()} | {*engine_metrics()}
    for page in PAGES:
        for name in re.findall(r"`(kvtier_[a-z_]+)", page.read_text("utf-8")):
            bare = re.sub(r"_(total|bucket|sum|count)$", "", name)
            assert bare in known, f"{page.name}: {name}"


def test_the_routes_reference_has_exactly_the_routes():
    paths = Server(load_settings(), Kept(1, 1, {}), load_settings).app().openapi()["paths"]
    known = {
        path if method == "get" else f"{method.upper()} {path}"
        for path, methods in paths.items()
        for method in methods
    }
    rows = [plain(route) for route, _ in table(OPERATIONS, "routes")]
    assert len(rows) == len(set(rows))
    assert set(rows) == known


def source_texts():
    """Return all texts in the package, what varies in them as `…`."""
    found = []
    for file in ROOT.glob("server/**/*.py"):
        for node in ast.walk(ast.parse(file.read_text("utf-8"))):
            if isinstance(node, ast.JoinedStr):
                parts = [
                    str(part.value) if isinstance(part, ast.Constant) else "…"
                    for part in node.values
                ]
                found.append("".join(parts))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.append(re.sub(r"%(?:\.\d)?[sdf]", "…", node.value))
    return found


def test_every_sentence_of_the_troubleshooting_table_is_one_that_the_code_says():
    texts = source_texts()
    rows = table(OPERATIONS, "logs")
    assert rows
    for sentence, _ in rows:
        pattern = re.escape(plain(sentence)).replace("…", ".+")
        assert any(re.search(pattern, text) for text in texts), sentence


def test_the_fields_of_each_frame_are_documented_in_order():
    documented = {}
    for name, fields in re.findall(r"^\| `(\w+)` \|((?: `\w+`,?)* ?)\|$", FORMATS, re.MULTILINE):
        documented[name] = re.findall(r"`(\w+)`", fields)
    frames = [*wire.Request.__args__, *wire.Reply.__args__]
    assert documented == {
        frame.__struct_config__.tag: [field.name for field in msgspec.structs.fields(frame)]
        for frame in frames
    }


def test_the_roles_of_a_session_are_documented():
    cell = re.search(r"^\| `role` \| text \| (.*)\. \|$", FORMATS, re.MULTILINE)[1]
    assert re.findall(r"`(\w+)`", cell) == list(Role)


def test_the_example_frame_is_what_the_protocol_encodes():
    example = bytes.fromhex(re.search(r"```hex\n(.*?)```", FORMATS, re.DOTALL)[1])
    chain = wire.Chain(b"", bytes(range(32)), [SlotRef(2, 5).packed])
    assert example == wire.encode(wire.Step(3, commits=[chain], need=1, stock=32))


def test_the_manifest_reference_has_exactly_the_fields():
    rows = [plain(field) for field, _, _ in table(FORMATS, "manifest")]
    assert rows == [field.name for field in msgspec.inspect.type_info(Manifest).fields]


def test_the_example_manifest_has_the_digest_that_stands_beside_it():
    fields = json.loads(re.search(r"```json\n(.*?)```", FORMATS, re.DOTALL)[1])
    digest = re.search(r"```digest\n(\w+)\n```", FORMATS)[1]
    assert Manifest(**fields).digest() == digest
    assert Manifest(**fields) == MANIFEST
    text = json.dumps(fields, sort_keys=True, separators=(",", ":"))
    assert hashlib.sha256(text.encode()).hexdigest() == digest


def test_the_example_settings_are_all_settings_with_their_defaults():
    example = load_settings(EXAMPLE).effective()
    written = yaml.safe_load(EXAMPLE.read_text("utf-8"))
    assert str(example.pop("socket")) == written.pop("socket") == "/run/kvtier/kvtier.sock"
    assert str(example.pop("state")) == written.pop("state") == "/var/lib/kvtier"
    defaults = load_settings().effective()
    del defaults["socket"], defaults["state"]
    assert example == written == defaults


@pytest.mark.parametrize(("file", "socket"), ENGINE_EXAMPLES.items())
def test_every_example_of_an_engine_names_the_socket_of_its_server(file, socket):
    text = (ROOT / file).read_text("utf-8")
    configs = re.findall(r'\{"kv_connector".*?\}\}', text, re.DOTALL)
    assert len(configs) == 1
    config = json.loads(configs[0])
    assert config["kv_load_failure_policy"] == "recompute"
    assert str(read_options(config["kv_connector_extra_config"]).socket) == socket
    assert file.endswith("operations.md") or "sha256_cbor" in text


def test_the_settings_in_the_deployment_files_are_valid(tmp_path):
    documents = list(yaml.safe_load_all((ROOT / "deploy/k8s/kvtier.yaml").read_text("utf-8")))
    file = tmp_path / "kvtier.yaml"
    file.write_text(documents[0]["data"]["kvtier.yaml"].replace("16GiB", "64MiB"))
    assert str(load_settings(file).socket) == "/run/kvtier/kvtier.sock"
    image = (ROOT / "deploy/Dockerfile").read_text("utf-8")
    assert "KVTIER_SOCKET=/run/kvtier/kvtier.sock" in image


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_link_inside_the_documents_leads_somewhere(page):
    for target in re.findall(r"\]\(([^)]+)\)", page.read_text("utf-8")):
        name, _, anchor = target.partition("#")
        linked = (page.parent / name).resolve() if name else page
        assert linked.exists(), target
        if anchor:
            headings = re.findall(r"^#+ (.*)$", linked.read_text("utf-8"), re.MULTILINE)
            assert anchor in [heading.lower().replace(" ", "-") for heading in headings], target


def test_every_test_and_every_source_file_that_the_documents_name_exists():
    tests = "".join(file.read_text("utf-8") for file in ROOT.glob("tests/**/test_*.py"))
    defined = set(re.findall(r"def (test_\w+)\(", tests))
    for page in PAGES:
        text = page.read_text("utf-8")
        for name in re.findall(r"`(test_\w+)`", text):
            assert name in defined, f"{page.name}: {name}"
        for path in re.findall(r"`([\w/]+\.py)`", text):
            places = [ROOT / path, ROOT / "server" / path]
            assert any(place.exists() for place in places), f"{page.name}: {path}"
