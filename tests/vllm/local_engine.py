"""Imports vLLM, and forks engines that answer JSON lines: see `inprocess.Nursery`.

python local_engine.py CONTROL_SOCKET
"""

import ctypes
import importlib
import itertools
import json
import os
import signal
import socket
import sys
import threading
import traceback

PRELOADED = (
    "vllm.entrypoints.llm",
    "vllm.lora.request",
    "vllm.model_executor.models.llama",
    "vllm.v1.worker.cpu_worker",
)
"""What an engine imports, and every fork finds there."""
SOURCE_METRIC = "vllm:prompt_tokens_cached_by_source"
OUR_METRICS = "kvtier_engine_"
STEPS_AT_MOST = 100_000
IDLE_STEPS_AT_MOST = 1_000
PR_SET_PDEATHSIG = 1
ENDED = {}
"""How forks ended, by process id."""


class Engine:
    """The operations that a test may ask for; their names are those of the requests."""

    def __init__(self, options):
        from vllm import LLM

        self.llm = LLM(**options)
        self.names = {
            "llm": self.llm,
            "scheduler_side": self._scheduler_side,
            "worker_side": self._worker_side,
        }
        self.ids = map(str, itertools.count())

    def start(self, requests):
        """Hand requests to the engine and return their ids; `step` makes it go on."""
        return [self._start(**request) for request in requests]

    def step(self):
        """Take one step and return the answers that ended with it, by id."""
        outputs = self.llm.llm_engine.step()
        return {each.request_id: _answer(each) for each in outputs if each.finished}

    def abort(self, ids):
        """End requests before their answers are complete."""
        self.llm.llm_engine.abort_request(ids)

    def drain(self):
        """Take steps until no request is left; return the answers that ended, by id."""
        found = {}
        for _ in range(STEPS_AT_MOST):
            if not self.llm.llm_engine.has_unfinished_requests():
                break
            found |= self.step()
        self.settle()
        return found

    def generate(self, requests):
        """Return the answers to requests that run at the same time."""
        ids = self.start(requests)
        found = self.drain()
        return [found[each] for each in ids]

    def settle(self):
        """Take the steps that an idle server takes too: copies end, and blocks are freed."""
        for _ in range(IDLE_STEPS_AT_MOST):
            if not self._scheduler.has_requests():
                return
            self.llm.llm_engine.step()
        raise TimeoutError("the engine does not become idle")

    def forget(self, outer):
        """Empty the engine's own cache; with `outer`, the host tier's as well."""
        return self.llm.reset_prefix_cache(reset_connector=outer)

    def used_blocks(self):
        """Return how many blocks of the engine's own cache requests hold."""
        pool = self._scheduler.kv_cache_manager.block_pool
        return pool.num_gpu_blocks - 1 - pool.get_num_free_blocks()  # One is never given out.

    def cached_by_source(self):
        """Return how many prompt tokens came from which tier since the start."""
        metrics = [each for each in self.llm.get_metrics() if each.name == SOURCE_METRIC]
        return {each.labels["source"]: int(each.value) for each in metrics}

    def count(self, name):
        """Return a counter of vLLM's own."""
        return sum(int(each.value) for each in self.llm.get_metrics() if each.name == name)

    def counters(self):
        """Return the connector's counters, without prefix; one with a reason as `name:reason`."""
        from prometheus_client import REGISTRY

        found = {}
        for sample in (each for family in REGISTRY.collect() for each in family.samples):
            if sample.name.startswith(OUR_METRICS) and sample.name.endswith("_total"):
                name = sample.name.removeprefix(OUR_METRICS).removesuffix("_total")
                reason = sample.labels.get("reason")
                found[f"{name}:{reason}" if reason else name] = sample.value
        return found

    def run(self, code):
        """Run code and return what it names `result`.

        It may use `llm`, `scheduler_side()` and `worker_side()`, the connector's two halves.
        """
        exec(code, self.names)
        return self.names.get("result")

    @property
    def _scheduler(self):
        return self.llm.llm_engine.engine_core.engine_core.scheduler

    def _scheduler_side(self):
        return _ours(self._scheduler.connector)

    def _worker_side(self):
        from vllm.distributed.kv_transfer import get_kv_transfer_group

        return _ours(get_kv_transfer_group())

    def _start(self, sampling, tokens=None, embeds=None, salt=None, lora=None):
        from vllm import SamplingParams
        from vllm.lora.request import LoRARequest
        from vllm.sampling_params import RequestOutputKind

        prompt = {"prompt_token_ids": tokens} if tokens else {"prompt_embeds": _embeds(*embeds)}
        if salt is not None:
            prompt["cache_salt"] = salt
        greedy = {"temperature": 0, "ignore_eos": True}
        greedy["output_kind"] = RequestOutputKind.FINAL_ONLY
        params = SamplingParams(**greedy | sampling)
        adapter = LoRARequest(*lora) if lora else None
        number = next(self.ids)
        self.llm.llm_engine.add_request(number, prompt, params, lora_request=adapter)
        return number


def _ours(connector):
    """Return our half of a connector, which may be one of several children."""
    children = getattr(connector, "sub_connectors", [connector])
    [ours] = [each for each in children if hasattr(each, "_half")]
    return ours._half.side


def _embeds(seed, rows, width):
    """Return random prompt embeddings: equal seeds give equal ones, a prefix of longer ones."""
    import torch

    return torch.randn(rows, width, generator=torch.Generator().manual_seed(seed)) / 10


def _answer(output):
    return {
        "samples": [list(each.token_ids) for each in output.outputs],
        "prompt_tokens": len(output.prompt_token_ids or ()),
        "cached": output.num_cached_tokens or 0,
        "finish": output.outputs[0].finish_reason,
        "transfer": output.kv_transfer_params,
        "prompt_logprobs": [
            [[token, each.logprob] for token, each in place.items()]
            for place in output.prompt_logprobs or ()
            if place is not None
        ],
    }


def serve(path, options):
    """Be an engine until the test hangs up."""
    engine = Engine(options)
    with connected(path) as lines:
        for line in lines:
            request = json.loads(line)
            try:
                answer = {"result": getattr(engine, request.pop("op"))(**request)}
            except Exception:  # noqa: BLE001 (the test that asked is told)
                answer = {"error": traceback.format_exc()}
            lines.write(json.dumps(answer) + "\n")
            lines.flush()


def connected(path):
    """Return lines to and from the test that listens there."""
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(path)
        return connection.makefile("rw")


def fork(path, options, log):
    """Return the process id of a new engine; in that process, return None."""
    assert threading.active_count() == 1, "a fork would lose threads"
    parent = os.getpid()
    if pid := os.fork():
        return pid
    os.setsid()
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
    if os.getppid() != parent:
        sys.exit(1)
    output = os.open(log, os.O_WRONLY | os.O_APPEND)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.close(output)
    return None


def exit_code(pid):
    """Return how a fork ended, 128 and the signal's number if by one; None while it runs."""
    if pid not in ENDED:
        found, status = os.waitpid(pid, os.WNOHANG)
        if not found:
            return None
        code = os.waitstatus_to_exitcode(status)
        ENDED[pid] = code if code >= 0 else 128 - code
    return ENDED[pid]


def main():
    for name in PRELOADED:
        importlib.import_module(name)
    with connected(sys.argv[1]) as lines:
        for line in lines:
            request = json.loads(line)
            if request.pop("op") == "exit_code":
                answer = exit_code(**request)
            else:
                answer = fork(**request)
                if answer is None:
                    break
            lines.write(json.dumps(answer) + "\n")
            lines.flush()
        else:
            return
    serve(request["path"], request["options"])


if __name__ == "__main__":
    main()
