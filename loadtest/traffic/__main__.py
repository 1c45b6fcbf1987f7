"""Drives any server that speaks OpenAI's completions with one workload, and writes what came.

    python -m loadtest.traffic --url http://127.0.0.1:8000 --model NAME --workload chat --out DIR

The folder gets raw.jsonl (one line a request, as it ends), summary.json, page.md with pictures, and
hardware.json. Where --model is the folder of a model, prompts are real text by its tokenizer;
otherwise they are token ids drawn from the seed.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections.abc import Sequence
from pathlib import Path

from .hardware import ended, hardware
from .page import LATENCY, THROUGHPUT, table, write_page
from .requests import Parameter, TrafficError, Workload
from .runner import Closed, Loop, Open, RunOptions, run
from .stream import Limits
from .summary import RAW, Labelled, save
from .texts import FIRST_TOKEN, LAST_TOKEN, SeededWriter, TextWriter, Writer
from .traces import Window, replay
from .workloads import WORKLOADS, arriving, build

REPLAY = "replay"
SHARE = "conversations"
MODEL_TOKENS = 4096
SEED = 1


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; return a process exit code: 1 if nothing could be sent or answered."""
    options = _parser().parse_args(arguments)
    try:
        return _drive(options)
    except TrafficError as error:
        print(f"traffic: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print(f"traffic: stopped; {options.out / RAW} has what was answered", file=sys.stderr)
        return 130


def _drive(options: argparse.Namespace) -> int:
    workload = _timed(options, _workload(options))
    out: Path = options.out
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise TrafficError(f"The folder {out} can't be made: {error}.") from None
    measured = hardware(out)
    limits = Limits(silence=options.silence, answer=options.answer)
    kept = RunOptions(raw=out / RAW, limits=limits, metrics=options.metrics)
    done = asyncio.run(run(options.url, options.model, workload, _loop(options), options=kept))
    facts = workload.facts(options.block_tokens)
    labelled = Labelled(options.system, options.scenario or workload.name, facts, done)
    told = save(labelled, out)
    if not told.answered:
        raise TrafficError(f"No request was answered. The first one: {done.records[0].error}")
    page = write_page([labelled], options.system, out, ended(measured))
    print(f"{table(LATENCY, [told])}\n\n{table(THROUGHPUT, [told])}\n\n{page}")
    return 0


def _workload(options: argparse.Namespace) -> Workload:
    writer = _writer(options)
    sizes = dict(map(_size, options.size))
    if options.workload != REPLAY:
        return build(options.workload, writer, options.model_tokens, sizes)
    if options.trace is None:
        raise TrafficError("The workload replay needs the file of a trace: add --trace FILE.")
    return replay(writer, options.trace, options.model_tokens, _window(sizes))


def _timed(options: argparse.Namespace, workload: Workload) -> Workload:
    if options.arrivals is not None:
        return arriving(workload, options.arrivals)
    if options.rate is not None and not any(request.at for request in workload.requests):
        raise TrafficError(
            f"The workload {workload.name} has no times that a rate could scale: use --arrivals."
        )
    return workload


def _window(sizes: dict[str, Parameter]) -> Window:
    whole = {name: value for name, value in sizes.items() if isinstance(value, int)}
    share = sizes.get(SHARE, 1.0)
    known = Window.__dataclass_fields__
    for name in sizes:
        if name not in known or (name not in whole and name != SHARE):
            raise TrafficError(f"A replay has the sizes {', '.join(known)}, and no {name} like it.")
    whole.pop(SHARE, None)
    return Window(**whole, conversations=float(share))


def _writer(options: argparse.Namespace) -> Writer:
    if options.tokens is None and (Path(options.model) / "tokenizer.json").is_file():
        return TextWriter(options.seed, Path(options.model))
    return SeededWriter(options.seed, *(options.tokens or (FIRST_TOKEN, LAST_TOKEN)))


def _loop(options: argparse.Namespace) -> Loop:
    if options.arrivals is not None:
        return Open()
    return Closed(options.users) if options.rate is None else Open(options.rate)


def _size(text: str) -> tuple[str, Parameter]:
    name, _, value = text.partition("=")
    try:
        number = float(value)
    except ValueError:
        raise TrafficError(f"{text} is no size: write one such as users=8.") from None
    return name, int(number) if number.is_integer() else number


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m loadtest.traffic",
        description=__doc__,
        epilog=_workloads(),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    names = [*WORKLOADS, REPLAY]
    add = parser.add_argument
    add("--url", required=True, help="of the server, such as http://127.0.0.1:8000")
    add("--model", required=True, help="its name there; the folder of a model gives real text")
    add("--workload", required=True, choices=names, metavar="NAME", help="one of those below")
    add("--out", required=True, type=Path, help="folder for what comes of it")
    loop = parser.add_mutually_exclusive_group()
    loop.add_argument("--users", type=int, default=4, help="closed loop: so many ask (default 4)")
    loop.add_argument("--arrivals", type=float, metavar="N", help="open loop: N requests a second")
    loop.add_argument("--rate", type=float, help="open loop: a trace's times, so much faster")
    add("--model-tokens", type=int, default=MODEL_TOKENS, help="the model's length (default 4096)")
    add("--size", action="append", default=[], metavar="NAME=N", help="replace one size; repeat")
    add("--trace", type=Path, help="file that the workload replay reads")
    add("--seed", type=int, default=SEED, help="of all that is made up (default 1)")
    add("--tokens", type=int, nargs=2, metavar=("FIRST", "END"), help="draw ids from this range")
    add("--block-tokens", type=int, default=32, help="of the engine's blocks (default 32)")
    add("--metrics", action="append", default=[], help="URL that counts tokens; repeat")
    add("--silence", type=float, default=Limits().silence, help="longest wait for a token, in s")
    add("--answer", type=float, default=Limits().answer, help="longest time of an answer, in s")
    add("--system", default="the server", help="what tables and plots call it")
    add("--scenario", help="what they call the situation (default: the workload)")
    return parser


def _workloads() -> str:
    lines = ["workloads, with their sizes:"]
    for name, kind in WORKLOADS.items():
        sizes = ", ".join(f"{size}={value}" for size, value in kind.sizes(MODEL_TOKENS).items())
        lines += [f"  {name}", f"      {kind.about}", f"      {sizes}"]
    lines += ["  replay", "      What a recorded trace asked for, scaled (--trace FILE)."]
    sizes = ", ".join(f"{each}={getattr(Window(), each)}" for each in Window.__dataclass_fields__)
    return "\n".join([*lines, f"      {sizes}"])


if __name__ == "__main__":
    sys.exit(main())
