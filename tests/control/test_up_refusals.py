"""`kvtier up` refuses what can't work with one sentence, before it starts anything."""

import json
import socket

import pytest
from kvtier.engine_command import engine_command, engine_environment
from kvtier.errors import StartError
from servers import run_kvtier

HIDE_VLLM = "import sys\nsys.modules['vllm'] = None\n"


@pytest.fixture
def up(tmp_path):
    """Run `kvtier up` with some arguments for vLLM, and return its one sentence."""
    (tmp_path / "model").mkdir()

    def run(*arguments, **environment):
        path = tmp_path / "kvtier.sock"
        options = ["--socket", path, "--port", "0", "--capacity", "1MiB"]
        done = run_kvtier("up", *options, "--", *arguments, **environment)
        assert done.returncode == 1
        assert done.stdout == ""
        assert done.stderr.count("\n") == 1
        assert not path.exists()
        return done.stderr

    return run


@pytest.fixture
def config(tmp_path):
    def write(text):
        path = tmp_path / "vllm.yaml"
        path.write_text(text)
        return str(path)

    return write


def refusal(*arguments):
    """Return the sentence that refuses arguments for vLLM."""
    with pytest.raises(StartError) as refused:
        engine_command(arguments, "/run/k.sock")
    assert "\n" not in str(refused.value)
    return str(refused.value)


def command(*arguments, socket_path="/run/k.sock"):
    return list(engine_command(arguments, socket_path).command)


def value(arguments, option):
    return arguments[arguments.index(option) + 1]


def test_the_command_ends_with_the_sentence_and_leaves_nothing(up):
    assert "writes --kv-transfer-config itself" in up("some/model", "--kv-transfer-config", "{}")
    assert "xxhash can't be shared" in up("some/model", "--prefix-caching-hash-algo", "xxhash")


@pytest.mark.parametrize(
    "written",
    [
        ["--kv-transfer-config", "{}"],
        ["--kv_transfer_config={}"],
        ["--kv-transfer-config.kv_role", "kv_both"],
    ],
)
def test_a_connector_of_the_users_is_refused(written):
    assert "writes --kv-transfer-config itself" in refusal("some/model", *written)


@pytest.mark.parametrize("algorithm", ["xxhash", "xxhash_cbor", "builtin"])
def test_a_hash_that_cannot_be_shared_is_refused_with_the_reason(algorithm):
    said = refusal("some/model", "--prefix-caching-hash-algo", algorithm)
    assert algorithm in said
    assert "two prompts may get one key" in said
    assert "use sha256_cbor" in said


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["serve", "some/model"], "Leave out 'vllm serve'"),
        (["vllm", "serve", "some/model"], "Leave out 'vllm serve'"),
        (["--port", "8000"], "No model is named"),
        (["some/model", "--model", "other/model"], "some/model and other/model"),
        (["./no/such/folder"], "./no/such/folder does not exist"),
        (["some/model", "--port", "0"], "--port 0"),
        (["some/model", "--port", "many"], "--port many"),
        (["some/model", "--por", "8000"], "Write --port in full"),
        (["some/model", "--no-enable-prefix-caching"], "leave out --no-enable-prefix-caching"),
        (["some/model", "--headless"], "--headless asks for none"),
        (["some/model", "--api-server-count", "2"], "runs one API server"),
        (["some/model", "--api-server-count=4"], "runs one API server"),
        (["some/model", "--config", "missing.yaml"], "missing.yaml, can't be read"),
    ],
)
def test_arguments_that_cannot_work_are_refused(arguments, said):
    assert said in refusal(*arguments)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("kv-transfer-config: {kv_role: kv_both}", "writes --kv-transfer-config itself"),
        ("prefix_caching_hash_algo: xxhash", "xxhash can't be shared"),
        ("enable-prefix-caching: false", "leave out --no-enable-prefix-caching"),
        ("- a list", "must hold options"),
        ("{", "can't be read"),
    ],
)
def test_a_config_file_of_vllm_is_held_to_the_same(config, text, said):
    assert said in refusal("some/model", "--config", config(text))


@pytest.mark.vllm
def test_a_port_that_another_process_has_is_refused(up):
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        assert f"127.0.0.1:{port}" in up("some/model", "--port", port)


def test_a_missing_vllm_is_named_with_the_extra_that_brings_it(up, tmp_path):
    (tmp_path / "sitecustomize.py").write_text(HIDE_VLLM)
    said = up("some/model", PYTHONPATH=str(tmp_path))
    assert "kvtier[gpu]" in said
    assert "kvtier[cpu]" in said


def test_the_connector_is_configured_to_recompute_what_it_cannot_load():
    transfer = json.loads(value(command("some/model"), "--kv-transfer-config"))
    assert transfer["kv_connector"] == "KVTierConnector"
    assert transfer["kv_load_failure_policy"] == "recompute"
    assert transfer["kv_connector_extra_config"] == {"socket": "/run/k.sock"}


def test_a_model_may_be_named_first_by_option_or_in_the_config_file(config):
    assert value(command("some/model"), "--model") == "some/model"
    assert value(command("--model", "some/model"), "--model") == "some/model"
    in_file = config("model: some/model\nport: 8123\n")
    assert engine_command(["--config", in_file], "/run/k.sock").endpoint.port == 8123


def test_choices_of_the_user_that_can_be_shared_are_kept():
    chosen = command("some/model", "--prefix-caching-hash-algo", "sha256")
    assert chosen.count("--prefix-caching-hash-algo") == 1
    assert value(command("some/model"), "--prefix-caching-hash-algo") == "sha256_cbor"
    assert (
        command("m", "--enable-prompt-tokens-details").count("--enable-prompt-tokens-details") == 1
    )


@pytest.mark.parametrize(
    ("arguments", "url"),
    [
        ([], "http://127.0.0.1:8000"),
        (["--host", "0.0.0.0"], "http://127.0.0.1:8000"),
        (["--host=::", "--port=81"], "http://[::1]:81"),
        (["--host", "10.0.0.1", "--ssl-certfile", "c"], "https://10.0.0.1:8000"),
    ],
)
def test_vllm_is_watched_where_its_arguments_say_it_listens(arguments, url):
    assert engine_command(["some/model", *arguments], "/run/k.sock").endpoint.url == url


def test_the_environment_of_the_user_wins_over_the_defaults_for_cpus():
    engine = engine_command(["some/model"], "/run/k.sock")
    given = {"VLLM_CPU_KVCACHE_SPACE": "3", "VLLM_CPU_OMP_THREADS_BIND": "0-1", "OTHER": "kept"}
    assert engine_environment(given, engine) == given


def test_a_cache_size_in_the_arguments_is_not_overruled_by_a_default():
    engine = engine_command(["some/model", "--kv-cache-memory-bytes", "1000"], "/run/k.sock")
    assert "VLLM_CPU_KVCACHE_SPACE" not in engine_environment({}, engine)
