"""Tokens and names as settings: where they come from, and what is refused without repeating it."""

import os

import pytest
from kvtier.config import load_settings
from kvtier.errors import SettingsError
from kvtier.http_section import HttpTokens

CHANGE = "change-token-0123456789"
READ = "reading-token-0123456789"
TOKENS = HttpTokens(CHANGE, READ)


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch):
    for name in list(os.environ):
        if name.upper().startswith("KVTIER"):
            monkeypatch.delenv(name)


def tokens_of(tmp_path, text):
    file = tmp_path / "kvtier.yaml"
    file.write_text(text)
    return load_settings(file).http_tokens()


def test_tokens_come_from_settings_or_files(tmp_path, monkeypatch):
    (tmp_path / "t").write_text(f"{CHANGE}\n")
    monkeypatch.setenv("KVTIER_HTTP__READ_TOKEN", READ)
    assert tokens_of(tmp_path, f"http: {{token_file: {tmp_path}/t}}") == TOKENS
    monkeypatch.setenv("KVTIER_HTTP__TOKEN", CHANGE)
    assert tokens_of(tmp_path, "") == TOKENS


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("http: {token: short-secret}", "http.token (in "),
        ("http: {token: 'spaced secret spaced secret'}", "16 to 512 visible ASCII"),
        ("http: {token: [secret]}", "http.token (in "),
        ("http: {read_token: 123456789012345678}", "http.read_token (in "),
        (f"http: {{token: {CHANGE}, token_file: /x}}", "http.token and http.token_file are both"),
        (f"http: {{token: {CHANGE}, read_token: {CHANGE}}}", "are the same"),
        ("http: {token_file: /nowhere/secret}", "http.token_file (/nowhere/secret) can't be read"),
        ("http: {read_token_file: FILE}", "http.read_token: a token is 16 to 512"),
        ("http: {host: 0.0.0.0}", "set http.token_file or KVTIER_HTTP__TOKEN"),
        ("http: {host: 192.168.7.7, hosts: [a]}", "not a loopback address"),
    ],
)
def test_tokens_that_cannot_work_are_refused_and_not_repeated(tmp_path, text, said):
    (tmp_path / "short").write_text("short-secret")
    with pytest.raises(SettingsError) as refused:
        tokens_of(tmp_path, text.replace("FILE", str(tmp_path / "short")))
    assert said in str(refused.value)
    for part in ("short-secret", "spaced", CHANGE, "[secret", "123456789012345678"):
        assert part not in str(refused.value)


@pytest.mark.parametrize("key", ["token", "read_token", "token_file", "read_token_file"])
@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.168.7.7"])
def test_any_token_opens_other_addresses(tmp_path, key, host):
    (tmp_path / "t").write_text(CHANGE)
    value = tmp_path / "t" if key.endswith("file") else CHANGE
    file = tmp_path / "kvtier.yaml"
    file.write_text(f"http: {{host: '{host}', {key}: {value}}}")
    assert load_settings(file).http.host == host


def test_hosts_are_a_list_in_the_file_and_have_commas_in_a_variable(tmp_path, monkeypatch):
    file = tmp_path / "kvtier.yaml"
    file.write_text("http: {hosts: [KV.internal, '[::2]']}")
    assert load_settings(file).http.hosts == ("kv.internal", "::2")
    monkeypatch.setenv("KVTIER_HTTP__HOSTS", "a, b.c")
    assert load_settings(file).http.hosts == ("a", "b.c")
    for wrong in ("http://a", "a:80", "a,,b", "*"):
        monkeypatch.setenv("KVTIER_HTTP__HOSTS", wrong)
        with pytest.raises(SettingsError, match=r"http\.hosts"):
            load_settings(file)


def test_the_clients_variable_does_not_stop_a_server(monkeypatch):
    monkeypatch.setenv("KVTIER_TOKEN", READ)
    assert not load_settings().http.guarded


def test_off_loopback_without_a_token_nothing_starts_and_the_fix_is_named(kvtier, tmp_path):
    result = kvtier("serve", "--socket", tmp_path / "s", "--port", 0, KVTIER_HTTP__HOST="0.0.0.0")
    assert result.returncode == 1
    assert len(result.stderr.splitlines()) == 1
    for part in ("http.host", "0.0.0.0", "http.token_file", "KVTIER_HTTP__TOKEN"):
        assert part in result.stderr
