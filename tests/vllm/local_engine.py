"""Runs `vllm.LLM` in this process and answers JSON lines: see `harness.LocalEngine`.

python local_engine.py CONTROL_SOCKET OPTIONS_AS_JSON
"""

import json
import socket
import sys
import traceback

SOURCE_METRIC = "vllm:prompt_tokens_cached_by_source"


class Engine:
    """The operations that a test may ask for; their names are those of the requests."""

    def __init__(self, options):
        from vllm import LLM

        self.llm = LLM(**options)
        self.names = {"llm": self.llm}

    def complete(self, prompts, max_tokens):
        from vllm import SamplingParams

        greedy = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
        asked = [{"prompt_token_ids": prompt} for prompt in prompts]
        return [
            [list(got.outputs[0].token_ids), len(got.prompt_token_ids), got.num_cached_tokens or 0]
            for got in self.llm.generate(asked, greedy, use_tqdm=False)
        ]

    def forget(self):
        return self.llm.reset_prefix_cache()

    def cached_by_source(self):
        metrics = [each for each in self.llm.get_metrics() if each.name == SOURCE_METRIC]
        return {each.labels["source"]: int(each.value) for each in metrics}

    def run(self, code):
        exec(code, self.names)
        return self.names.get("result")


def main():
    path, options = sys.argv[1:]
    engine = Engine(json.loads(options))
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(path)
        with connection.makefile("rw") as lines:
            for line in lines:
                request = json.loads(line)
                try:
                    answer = {"result": getattr(engine, request.pop("op"))(**request)}
                except Exception:  # noqa: BLE001 (the test that asked is told)
                    answer = {"error": traceback.format_exc()}
                lines.write(json.dumps(answer) + "\n")
                lines.flush()


if __name__ == "__main__":
    main()
