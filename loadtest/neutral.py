"""A cross-check by a load generator that is not ours: `vllm bench serve`, beside vLLM alone.

    python -m loadtest.neutral [--to DIR] [--trace FILE] [--prompts N]

Its data set `prefix_repetition` asks prompts with a few beginnings in common, more of them than
the engine's own cache holds. With --trace its data set `timed_trace` sends requests of a recorded
trace as well, scaled to the model and to a pace that two cores can keep: DIR gets what is sent, as
`trace.jsonl`. `kvtier up` is asked first and ended, then vLLM by itself with the same options. DIR
gets the generator's own results, a JSON file each; a table of TTFTs goes to stderr.

NVIDIA's generator is not here: aiperf 0.13.0 installs, but asks a hub even for a tokenizer that
lies in a folder, and downloads its own one at run time: it can't run without the network.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from . import model
from .model import ModelError
from .peers import Setup, Tiers
from .peers.peer import MODEL_NAME, engine_options
from .report import Row, show
from .rig import MODEL_TOKENS
from .stack import ONE_PROCESS_ENVIRONMENT, Part, StackError, start_up, start_vllm
from .traffic.requests import TrafficError
from .traffic.traces import Window, shapes

DEFAULT_TO = model.REPOSITORY / ".cache" / "neutral"
PREFIXES = 12
PREFIX_TOKENS = 1024
"""All prefixes together are 12,288 tokens, and the engine's own cache holds 10,000."""
SUFFIX_TOKENS = 128
ANSWER_TOKENS = 16
PROMPTS = 48
AT_ONCE = 2
WINDOW = Window(conversations=0.01)
"""A few conversations as a whole, so that as many requests repeat as in all of the trace."""
TRACE_SEED = 1
TRACE_GAP_SECONDS = 8.0
"""Between two requests of a trace, in the mean; their times keep their proportions. Two cores take
six for the 1,500 tokens of a mean prompt."""
BENCH_SECONDS = 1800
BENCH = """
from vllm.benchmarks.serve import add_cli_args, main
from vllm.utils.argparse_utils import FlexibleArgumentParser
parser = FlexibleArgumentParser()
add_cli_args(parser)
main(parser.parse_args())
"""
"""`vllm bench serve`, past a command that asks for the version of a package named `vllm`, which the
one for CPUs is not."""
BENCH_ENVIRONMENT = {"HF_HUB_OFFLINE": "1", "PYTHONHASHSEED": "0"}
"""It makes a trace's prompts from Python's hashes: with this they are the same for both systems."""


class NeutralError(Exception):
    """The other load generator failed. The message is a sentence and the end of its output."""


@dataclass(frozen=True, slots=True)
class Options:
    """What is measured, and where the results go."""

    to: Path
    trace: Path | None
    prompts: int

    def workloads(self) -> dict[str, list[str]]:
        """Return options of `vllm bench serve` by name of the workload. Raises TrafficError."""
        found = {
            "prefix_repetition": [
                "--dataset-name", "prefix_repetition",
                "--prefix-repetition-num-prefixes", str(PREFIXES),
                "--prefix-repetition-prefix-len", str(PREFIX_TOKENS),
                "--prefix-repetition-suffix-len", str(SUFFIX_TOKENS),
                "--prefix-repetition-output-len", str(ANSWER_TOKENS),
                "--max-concurrency", str(AT_ONCE),
            ]
        }  # fmt: skip
        if self.trace is not None:
            found["timed_trace"] = [
                "--dataset-name", "timed_trace",
                "--dataset-path", str(_write_trace(self.trace, self.prompts, self.to)),
                "--timed-trace-chunk-hash-size", str(WINDOW.block),
                "--self-timed",
            ]  # fmt: skip
        return found


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure both systems; return 1 with a sentence if one of them can't be."""
    parser = argparse.ArgumentParser(prog="python -m loadtest.neutral", description=__doc__)
    parser.add_argument("--to", type=Path, default=DEFAULT_TO, help="folder of the results")
    parser.add_argument("--trace", type=Path, help="trace that `kvtier replay` reads")
    parser.add_argument("--prompts", type=int, default=PROMPTS, help="how many are sent")
    given = parser.parse_args(arguments)
    options = Options(given.to.absolute(), given.trace, given.prompts)
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        measure(options)
    except (NeutralError, StackError, ModelError, TrafficError) as error:
        print(f"neutral: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("neutral: stopped; nothing runs on", file=sys.stderr)
        return 130
    return 0


def measure(options: Options) -> None:
    """Ask kvtier and vLLM alone, one after the other, and show their TTFTs."""
    options.to.mkdir(parents=True, exist_ok=True)
    setup = Setup(model.prepare(model.DEFAULT_FOLDER), Tiers.HOST)
    workloads = options.workloads()
    rows: dict[str, list[Row]] = {each: [] for each in workloads}
    for name, start in (("kvtier", _kvtier), ("vllm", _vllm)):
        with tempfile.TemporaryDirectory(prefix="kvtier-neutral-") as work:
            part = start(Path(work), setup)
            try:
                part.wait()
                for workload, what in workloads.items():
                    times = _bench(part, setup.model, options, f"{workload}-{name}", what)
                    rows[workload].append(Row(f"TTFT {name}", times, "ms", 1e3))
            finally:
                part.stop()
    for workload, found in rows.items():
        show(f"vllm bench serve, {workload}", found)
    print(f"neutral: results are in {options.to}", file=sys.stderr)


def _write_trace(trace: Path, prompts: int, to: Path) -> Path:
    """Write the requests of a trace as `vllm bench serve` reads them. Raises TrafficError."""
    found = shapes(trace, TRACE_SEED, MODEL_TOKENS, replace(WINDOW, requests=prompts))
    pace = TRACE_GAP_SECONDS * (len(found) - 1) / (found[-1].seconds or 1.0)
    lines = (
        {
            "timestamp": round(each.seconds * pace, 3),
            "input_length": each.tokens,
            "output_length": each.output,
            "hash_ids": each.blocks,
        }
        for each in found
    )
    file = to / "trace.jsonl"
    file.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    return file


def _kvtier(work: Path, setup: Setup) -> Part:
    up = ["--socket", str(work / "kvtier.sock"), "--capacity", f"{setup.host_mib}MiB"]
    engine = [str(setup.model), *engine_options(setup)]
    return start_up(work, up, engine, "kvtier", ONE_PROCESS_ENVIRONMENT)


def _vllm(work: Path, setup: Setup) -> Part:
    engine = ["--model", str(setup.model), *engine_options(setup)]
    return start_vllm(work, engine, "vllm", ONE_PROCESS_ENVIRONMENT)


def _bench(
    part: Part, folder: Path, options: Options, name: str, what: Sequence[str]
) -> list[float]:
    """Run `vllm bench serve`, which writes NAME.json; return its TTFTs. Raises NeutralError."""
    command = [sys.executable, "-c", BENCH]
    command += ["--base-url", part.url, "--model", MODEL_NAME, "--tokenizer", str(folder)]
    command += ["--num-prompts", str(options.prompts), "--seed", "1", "--ignore-eos"]
    command += ["--save-result", "--save-detailed", "--disable-tqdm"]
    command += ["--result-dir", str(options.to), "--result-filename", f"{name}.json", *what]
    _run(command)
    result = json.loads((options.to / f"{name}.json").read_text())
    if result["failed"]:
        raise NeutralError(f"{result['failed']} requests of {name} failed: see {options.to}.")
    return [float(each) for each in result["ttfts"]]


def _run(command: Sequence[str]) -> None:
    environment = os.environ | BENCH_ENVIRONMENT
    try:
        subprocess.run(
            command,
            check=True,
            capture_output=True,
            text=True,
            timeout=BENCH_SECONDS,
            env=environment,
        )
    except subprocess.TimeoutExpired:
        raise NeutralError(f"vllm bench serve was not over in {BENCH_SECONDS} s.") from None
    except subprocess.CalledProcessError as error:
        raise NeutralError(f"vllm bench serve failed.\n{error.stderr[-2000:]}") from None


if __name__ == "__main__":
    sys.exit(main())
