"""Settings are strict: what is misspelt or wrong stops the start and is named."""

import json
import os
import re

import pytest
import yaml
from kvtier.config import Settings, descriptions, load_settings
from kvtier.errors import SettingsError
from kvtier.sizes import machine_memory


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch):
    for name in list(os.environ):
        if name.upper().startswith("KVTIER"):
            monkeypatch.delenv(name)


@pytest.fixture
def load(tmp_path):
    """Load settings from text as a file would hold it."""

    def load_text(text, overrides=None):
        file = tmp_path / "kvtier.yaml"
        file.write_text(text)
        return load_settings(file, overrides)

    return load_text


def refusal(call, *arguments):
    """Return the sentence that `call` is refused with: one line, ending in a full stop."""
    with pytest.raises(SettingsError) as caught:
        call(*arguments)
    sentence = str(caught.value)
    assert "\n" not in sentence
    assert sentence.endswith(".")
    return sentence


def test_nothing_set_gives_the_documented_defaults(monkeypatch):
    monkeypatch.setenv("XDG_RUNTIME_DIR", "/run/user/7")
    monkeypatch.setenv("XDG_STATE_HOME", "/home/u/.state")
    settings = load_settings()
    assert settings.effective() == {
        "socket": "/run/user/7/kvtier/kvtier.sock",
        "allow_group": None,
        "shutdown_seconds": 5.0,
        "state": "/home/u/.state/kvtier",
        "http": {
            "host": "127.0.0.1",
            "port": 9555,
            "token": None,
            "token_file": None,
            "read_token": None,
            "read_token_file": None,
            "hosts": [],
        },
        "host": {
            "capacity": "4GiB",
            "policy": "auto",
            "high_watermark": 0.98,
            "low_watermark": 0.95,
            "pin_share": 0.25,
            "huge_pages": "auto",
        },
        "disk": {
            "path": None,
            "capacity": "20GiB",
            "keep_free": "1GiB",
            "policy": "mq",
            "write_mode": "through",
            "admission": "learned",
            "write_rate": None,
            "codec": "none",
            "slow_seconds": 2.0,
            "failures": 3,
            "threads": 4,
        },
        "redis": {
            "url": None,
            "username": None,
            "password": None,
            "password_file": None,
            "ca_file": None,
            "cluster": False,
            "capacity": "20GiB",
            "ttl_seconds": 604_800,
            "timeout_seconds": 0.25,
            "policy": "mq",
            "write_mode": "through",
            "admission": "always",
            "write_rate": None,
            "codec": "none",
            "failures": 3,
            "connections": 4,
        },
        "loads": {"mode": "auto", "wait_seconds": 5.0},
        "quotas": {"tenants": {}, "salts_file": None},
        "recording": {"path": None, "capacity": "256MiB"},
        "log": {"level": "info"},
    }


def test_without_a_runtime_directory_the_socket_is_in_a_folder_of_the_user(monkeypatch):
    monkeypatch.delenv("XDG_RUNTIME_DIR", raising=False)
    assert str(load_settings().socket) == f"/tmp/kvtier-{os.getuid()}/kvtier.sock"


def test_every_setting_says_its_default_and_when_to_change_it():
    for key, text in descriptions().items():
        assert text.startswith("Default "), key
        assert text.endswith("."), key
        assert text.count(". ") >= 1, key


def test_the_later_source_wins_key_by_key(load, monkeypatch):
    monkeypatch.setenv("KVTIER_HTTP__PORT", "2222")
    monkeypatch.setenv("KVTIER_HOST__CAPACITY", "2GiB")
    settings = load(
        "http: {port: 1111, host: '::1'}\nhost: {capacity: 1GiB, high_watermark: 0.97}",
        {"host.capacity": "3GiB", "http.port": None},
    )
    assert settings.host.capacity == 3 * 2**30
    assert settings.http.port == 2222
    assert settings.http.host == "::1"
    assert settings.host.high_watermark == 0.97


def test_effective_settings_are_a_settings_file_that_reads_back_the_same(load):
    first = load("host: {capacity: 1.5GiB, low_watermark: 0.5}\nsocket: /tmp/x.sock\n")
    again = load(yaml.safe_dump(first.effective()))
    assert again == first


def test_settings_are_immutable():
    with pytest.raises(ValueError, match="frozen"):
        load_settings().socket = "/elsewhere"


# Misspelt keys.


@pytest.mark.parametrize(
    ("text", "named", "nearest"),
    [
        ("sockte: /x", "sockte", "socket"),
        ("hosts: {capacity: 1GiB}", "hosts", "host"),
        ("capacity: 1GiB", "capacity", "host.capacity"),
        ("port: 80", "port", "http.port"),
        ("host: {capcity: 1GiB}", "host.capcity", "host.capacity"),
        ("host: {Capacity: 1GiB}", "host.Capacity", "host.capacity"),
        ("host: {high-watermark: 0.9}", "host.high-watermark", "host.high_watermark"),
        ("host: {port: 80}", "host.port", "http.port"),
        ("http: {prot: 80}", "http.prot", "http.port"),
        ("log: {levle: info}", "log.levle", "log.level"),
        ("log_level: info", "log_level", "log.level"),
        ("eviction_policy: lru", "eviction_policy", "host.policy"),
    ],
)
def test_an_unknown_key_is_named_with_its_file_and_the_nearest_valid_one(
    load, tmp_path, text, named, nearest
):
    sentence = refusal(load, text)
    assert f'no setting "{named}"' in sentence
    assert str(tmp_path / "kvtier.yaml") in sentence
    assert f'nearest valid one is "{nearest}"' in sentence


def test_every_key_with_one_letter_missing_is_refused_naming_the_key(load):
    for key in descriptions():
        section, _, name = key.rpartition(".")
        misspelt = name[:2] + name[3:]
        text = f"{section}: {{{misspelt}: 1}}" if section else f"{misspelt}: 1"
        assert f'is "{key}"' in refusal(load, text)


def test_a_key_that_stands_twice_is_refused(load):
    sentence = refusal(load, "host: {capacity: 1GiB}\nhost: {policy: lru}\n")
    assert '"host" stands twice' in sentence


# The environment.


@pytest.mark.parametrize(
    ("name", "nearest"),
    [
        ("KVTIER_HOST_CAPACITY", "KVTIER_HOST__CAPACITY"),
        ("KVTIER_CAPACITY", "KVTIER_HOST__CAPACITY"),
        ("KVTIER-HOST", "KVTIER_HOST__CAPACITY"),
        ("KVTIER_HOST", "KVTIER_HOST__CAPACITY"),
        ("KVTIER-HOST__CAPACITY", "KVTIER_HOST__CAPACITY"),
        ("KV_TIER_HOST__CAPACITY", "KVTIER_HOST__CAPACITY"),
        ("KVTEIR_HOST__CAPACITY", "KVTIER_HOST__CAPACITY"),
        ("kvtier_host__capacity", "KVTIER_HOST__CAPACITY"),
        ("KVTIER__HOST__CAPACITY", "KVTIER_HOST__CAPACITY"),
        ("KVTIER_HOST__CAPCITY", "KVTIER_HOST__CAPACITY"),
        ("KVTIER_LOGLEVEL", "KVTIER_LOG__LEVEL"),
        ("KVTIER_PORT", "KVTIER_HTTP__PORT"),
        ("KVTIER_SOCKET_PATH", "KVTIER_SOCKET"),
    ],
)
def test_a_variable_that_is_no_setting_is_named_with_the_right_spelling(monkeypatch, name, nearest):
    """Case B47."""
    monkeypatch.setenv(name, "1GiB")
    sentence = refusal(load_settings)
    assert f"variable {name} is not a setting" in sentence
    assert sentence.endswith(f"is {nearest}.")


def test_every_key_can_be_set_by_the_environment(monkeypatch):
    values = {
        "KVTIER_SOCKET": "/tmp/e.sock",
        "KVTIER_ALLOW_GROUP": "root",
        "KVTIER_SHUTDOWN_SECONDS": "9",
        "KVTIER_STATE": "/tmp/state",
        "KVTIER_HTTP__HOST": "localhost",
        "KVTIER_HTTP__PORT": "1234",
        "KVTIER_HTTP__TOKEN_FILE": "/tmp/token",
        "KVTIER_HTTP__READ_TOKEN_FILE": "/tmp/reading",
        "KVTIER_HTTP__HOSTS": "kv.internal",
        "KVTIER_HOST__CAPACITY": "64MiB",
        "KVTIER_HOST__POLICY": "lru",
        "KVTIER_HOST__HIGH_WATERMARK": "0.9",
        "KVTIER_HOST__LOW_WATERMARK": "0.8",
        "KVTIER_HOST__PIN_SHARE": "0.5",
        "KVTIER_HOST__HUGE_PAGES": "never",
        "KVTIER_DISK__PATH": "/tmp/blocks",
        "KVTIER_DISK__CAPACITY": "64MiB",
        "KVTIER_DISK__KEEP_FREE": "2GiB",
        "KVTIER_DISK__POLICY": "lru",
        "KVTIER_DISK__WRITE_MODE": "on_evict",
        "KVTIER_DISK__ADMISSION": "cost",
        "KVTIER_DISK__WRITE_RATE": "50MiB",
        "KVTIER_DISK__CODEC": "always",
        "KVTIER_DISK__SLOW_SECONDS": "3",
        "KVTIER_DISK__FAILURES": "4",
        "KVTIER_DISK__THREADS": "8",
        "KVTIER_REDIS__URL": "rediss://cache:6380/1",
        "KVTIER_REDIS__USERNAME": "kvtier",
        "KVTIER_REDIS__CA_FILE": "/tmp/ca.pem",
        "KVTIER_REDIS__CLUSTER": "True",
        "KVTIER_REDIS__CAPACITY": "1TiB",
        "KVTIER_REDIS__TTL_SECONDS": "60",
        "KVTIER_REDIS__TIMEOUT_SECONDS": "0.5",
        "KVTIER_REDIS__POLICY": "arc",
        "KVTIER_REDIS__WRITE_MODE": "on_reuse",
        "KVTIER_REDIS__ADMISSION": "second_hit",
        "KVTIER_REDIS__WRITE_RATE": "1GB",
        "KVTIER_REDIS__CODEC": "auto",
        "KVTIER_REDIS__FAILURES": "5",
        "KVTIER_REDIS__CONNECTIONS": "9",
        "KVTIER_REDIS__PASSWORD_FILE": "/tmp/secret",
        "KVTIER_LOADS__MODE": "always",
        "KVTIER_LOADS__WAIT_SECONDS": "7",
        "KVTIER_QUOTAS__TENANTS": '{"acme": {"hard": "1GiB"}}',
        "KVTIER_QUOTAS__SALTS_FILE": "/tmp/salts",
        "KVTIER_RECORDING__PATH": "/tmp/lookups",
        "KVTIER_RECORDING__CAPACITY": "1GiB",
        "KVTIER_LOG__LEVEL": "debug",
    }
    assert len(values) == len(descriptions()) - 3, "and three secrets, which are not shown"
    for name, value in values.items():
        monkeypatch.setenv(name, value)
    effective = load_settings().effective()
    for name, value in values.items():
        section, _, key = name.removeprefix("KVTIER_").lower().rpartition("__")
        found = effective[section][key] if section else effective[key]
        text = ",".join(found) if isinstance(found, list) else str(found)
        text = json.dumps(found) if isinstance(found, dict) else text
        assert text.removesuffix(".0") == value


def test_a_wrong_value_from_the_environment_is_named_by_its_variable(monkeypatch):
    monkeypatch.setenv("KVTIER_HOST__CAPACITY", "20G")
    assert "host.capacity (in KVTIER_HOST__CAPACITY)" in refusal(load_settings)


def test_variables_that_kubernetes_sets_for_a_service_of_our_name_do_not_stop_the_start(
    monkeypatch,
):
    monkeypatch.setenv("KVTIER_SERVICE_HOST", "10.0.0.7")
    monkeypatch.setenv("KVTIER_SERVICE_PORT_HTTP", "9555")
    monkeypatch.setenv("KVTIER_PORT", "tcp://10.0.0.7:9555")
    monkeypatch.setenv("KVTIER_PORT_9555_TCP_ADDR", "10.0.0.7")
    assert load_settings().http.port == 9555


# Wrong values.


@pytest.mark.parametrize("size", ["5", '"5"', '"10%"', "20G", "-1", "0", "null", "yes", "[1GiB]"])
def test_a_size_without_a_unit_is_refused_naming_the_key_and_a_good_example(load, size):
    """Case B47."""
    sentence = refusal(load, f"host: {{capacity: {size}}}")
    assert sentence.startswith("host.capacity (in ")
    assert re.search(r'for example "\d+GiB"', sentence)


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("host: {policy: lruu}", ["host.policy", '"lruu"', "nearest is lru"]),
        ("host: {policy: ''}", ["host.policy", "lru"]),
        ("host: {huge_pages: allways}", ["host.huge_pages", "nearest is always"]),
        ("disk: {codec: zstd}", ["disk.codec", '"zstd"', "none, always, auto"]),
        ("log: {level: WARN}", ["log.level", '"WARN"', "nearest is warning"]),
        ("host: {low_watermark: 0.98}", ["host.low_watermark (0.98)", "host.high_watermark"]),
        ("host: {high_watermark: 0.5}", ["host.low_watermark (0.95)", "host.high_watermark"]),
        ("host: {high_watermark: 1.5}", ["host.high_watermark", "1.5"]),
        ("host: {high_watermark: 98%}", ["host.high_watermark", '"98%"']),
        ("host: {low_watermark: .nan}", ["host.low_watermark", "nan"]),
        ("http: {port: 65536}", ["http.port", "65536", "65535"]),
        ("http: {port: http}", ["http.port", '"http"']),
        ("http: {port: true}", ["http.port", "True"]),
        ("http: {host: 0.0.0.0}", ["http.host", '"0.0.0.0"', '"127.0.0.1"']),
        ("http: {host: '::'}", ["http.host", '"::"', '"127.0.0.1"']),
        ("http: {host: example}", ["http.host", '"example"', '"127.0.0.1"']),
        ("shutdown_seconds: 0", ["shutdown_seconds", "greater than 0"]),
        ("shutdown_seconds: .inf", ["shutdown_seconds", "inf"]),
        ("allow_group: no-such-group", ["allow_group", '"no-such-group"']),
        ("socket: ''", ["socket", "path"]),
        ("socket: 5", ["socket", "path"]),
        ("host: 5", ["host", "5", "host.capacity"]),
        ("host:", ["host", "host.capacity"]),
        ("- host", ["must hold keys"]),
        ("host: {capacity: 1GiB", ["not valid YAML", "line 1"]),
        ("host: {5: 1}", ["host"]),
    ],
)
def test_a_wrong_value_is_refused_naming_the_key_and_what_is_right(load, text, parts):
    sentence = refusal(load, text)
    for part in parts:
        assert part in sentence


def test_a_capacity_larger_than_the_machine_is_refused_naming_both(load):
    memory, _ = machine_memory()
    above = memory // 2**30 + 1
    sentence = refusal(load, f"host: {{capacity: {above}GiB}}")
    assert f"host.capacity ({above}GiB) is larger than" in sentence
    assert f"{memory / 2**30:.1f}GiB" in sentence


def test_a_capacity_just_below_the_machine_is_taken(load):
    below = machine_memory()[0] // 2**30
    assert load(f"host: {{capacity: {below}GiB}}").host.capacity == below * 2**30


@pytest.mark.parametrize("kind", ["missing", "folder", "binary"])
def test_a_settings_file_that_cannot_be_read_is_named(tmp_path, kind):
    file = tmp_path / "settings.yaml"
    if kind == "folder":
        file.mkdir()
    elif kind == "binary":
        file.write_bytes(b"\xff\xfe\x00")
    assert str(file) in refusal(load_settings, file)


def test_an_empty_file_is_all_defaults(load):
    assert load("# nothing\n") == Settings()


def test_a_relative_socket_becomes_absolute_so_that_engines_find_it(load, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert load("socket: kv.sock").socket == tmp_path / "kv.sock"


def test_a_password_is_taken_and_never_shown(load, monkeypatch, tmp_path):
    monkeypatch.setenv("KVTIER_REDIS__PASSWORD", "hunter2")
    settings = load_settings()
    assert settings.redis_password() == "hunter2"
    assert "hunter2" not in f"{settings!r} {settings} {settings.effective()}"
    file = tmp_path / "secret"
    file.write_text("hunter3\n")
    assert "leave one of them out" in refusal(load, f"redis: {{password_file: {file}}}")
    monkeypatch.delenv("KVTIER_REDIS__PASSWORD")
    assert load(f"redis: {{password_file: {file}}}").redis_password() == "hunter3"
    missing = load("redis: {password_file: /nowhere/secret}")
    assert "redis.password_file (/nowhere/secret)" in refusal(missing.redis_password)


@pytest.mark.parametrize(
    "text",
    [
        "redis: {url: 'redis://:hunter2@cache:6379'}",
        "redis: {password: [hunter2]}",
        "redis: {url: 'redis://:hunter2@[cache'}",
    ],
)
def test_what_may_be_a_secret_is_not_repeated_in_a_refusal(load, text):
    said = refusal(load, text)
    assert "hunter2" not in said
    assert "redis." in said
