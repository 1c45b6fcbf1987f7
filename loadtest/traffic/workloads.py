"""The workloads: what many users of one model ask, as prompts of token ids.

Each is made by a function of a writer and of its sizes. `WORKLOADS` has them by name, with sizes
that suit a model of some length; `build` makes one.
"""

from __future__ import annotations

import dataclasses
import difflib
import math
import random
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from itertools import accumulate, product

from .requests import NO_PARAMETERS, Parameter, Request, TrafficError, Workload
from .texts import Writer


def shared_prompt(
    writer: Writer, *, users: int, rounds: int, system: int, question: int, output: int
) -> tuple[Request, ...]:
    """One system prompt of `system` tokens in front of every user's own question."""
    head = writer.write("system prompt", system)
    return tuple(
        Request(f"{turn}-{user}", head + writer.write(f"question {turn}-{user}", question), output)
        for turn, user in product(range(rounds), range(users))
    )


def documents(
    writer: Writer, *, documents: int, readers: int, document: int, question: int, output: int
) -> tuple[Request, ...]:
    """Long documents, each asked about by many readers; all of them are read in turn."""
    requests = []
    for reader, number in product(range(readers), range(documents)):
        text = writer.write(f"document {number}", document)
        asked = writer.write(f"question {number}-{reader}", question)
        requests.append(Request(f"{number}-{reader}", text + asked, output))
    return tuple(requests)


def chat(
    writer: Writer, *, sessions: int, turns: int, system: int, message: int, output: int
) -> tuple[Request, ...]:
    """Conversations with one system prompt: each turn repeats all that was said before.

    Between two turns of a session, all other sessions have theirs.
    """
    head = writer.write("system prompt", system)
    talks = [
        _grown(writer, f"session {n}", head, (turns, message, output)) for n in range(sessions)
    ]
    return tuple(talks[n][turn] for turn, n in product(range(turns), range(sessions)))


def agents(
    writer: Writer, *, agents: int, steps: int, tools: int, observation: int, output: int
) -> tuple[Request, ...]:
    """Agents that share a description of tools: each step replays and grows the context.

    An agent takes its next step as soon as the last one has ended.
    """
    head = writer.write("tools", tools)
    loops = [
        _grown(writer, f"agent {n}", head, (steps, observation, output)) for n in range(agents)
    ]
    return tuple(request for each in loops for request in each)


def unique(writer: Writer, *, requests: int, prompt: int, output: int) -> tuple[Request, ...]:
    """Prompts that nobody has seen: what a cache costs where it can't help."""
    return tuple(
        Request(str(n), writer.write(f"unique {n}", prompt), output) for n in range(requests)
    )


def churn(
    writer: Writer,
    *,
    cache_bytes: float,
    bytes_a_token: float,
    times: float,
    rounds: int,
    prompt: int,
    output: int,
) -> tuple[Request, ...]:
    """More prompts than a cache holds, asked for again and again, each round in another order.

    They are `times` as large as the cache: its bytes, at so many bytes of KV a token.
    """
    tokens = cache_bytes * times / bytes_a_token
    numbers = list(range(max(math.ceil(tokens / prompt), 1)))
    order = random.Random(f"{writer.seed}/order")
    requests = []
    for turn in range(rounds):
        requests += [
            Request(f"{turn}-{n}", writer.write(f"churn {n}", prompt), output) for n in numbers
        ]
        order.shuffle(numbers)
    return tuple(requests)


@dataclass(frozen=True, slots=True)
class Kind:
    """One workload by name: what makes it, and its sizes for a model of some length."""

    make: Callable[..., tuple[Request, ...]]
    counts: Mapping[str, Parameter]
    """Sizes that do not depend on the model."""
    shares: Mapping[str, float]
    """Sizes in tokens, as shares of the model's length."""

    def sizes(self, model_tokens: int) -> dict[str, Parameter]:
        """Return all its sizes for a model of so many tokens."""
        tokens = {name: int(share * model_tokens) for name, share in self.shares.items()}
        return {**self.counts, **tokens}

    @property
    def about(self) -> str:
        """What it is, in a sentence."""
        return (self.make.__doc__ or "").partition("\n")[0]


WORKLOADS: Mapping[str, Kind] = {
    "shared_prompt": Kind(
        shared_prompt, {"users": 16, "rounds": 2, "output": 16}, {"system": 0.5, "question": 0.03}
    ),
    "documents": Kind(
        documents,
        {"documents": 4, "readers": 6, "output": 16},
        {"document": 0.75, "question": 0.02},
    ),
    "chat": Kind(chat, {"sessions": 8, "turns": 6, "output": 32}, {"system": 0.2, "message": 0.1}),
    "agents": Kind(
        agents, {"agents": 4, "steps": 10, "output": 16}, {"tools": 0.3, "observation": 0.05}
    ),
    "unique": Kind(unique, {"requests": 24, "output": 16}, {"prompt": 0.25}),
    "churn": Kind(
        churn,
        {
            "cache_bytes": 1 << 30,
            "bytes_a_token": 46_080,  # SmolLM2-135M in float32.
            "times": 1.5,
            "rounds": 3,
            "output": 4,
        },
        {"prompt": 0.4},
    ),
}
"""All workloads by name, but for the replay of a trace (`traces.py`)."""


def build(
    name: str,
    writer: Writer,
    model_tokens: int,
    sizes: Mapping[str, Parameter] = NO_PARAMETERS,
) -> Workload:
    """Return a workload by name, for a model of so many tokens; `sizes` replace its own.

    Raises TrafficError for a name or a size that there is none of, and if it does not fit.
    """
    if name not in WORKLOADS:
        raise TrafficError(f"There is no workload {name}; {_nearest(name, WORKLOADS)}")
    kind = WORKLOADS[name]
    chosen = kind.sizes(model_tokens)
    for size, value in sizes.items():
        if size not in chosen:
            raise TrafficError(f"The workload {name} has no size {size}; {_nearest(size, chosen)}")
        if not isinstance(value, int | float) or value <= 0:
            raise TrafficError(f"The size {size} of {value} makes nothing: name one above 0.")
    chosen |= sizes
    requests = kind.make(writer, **chosen)
    return Workload(name, kind.about, writer.seed, requests, chosen).check(model_tokens)


def arriving(workload: Workload, a_second: float) -> Workload:
    """Return it with times for the open loop: at random, so many a second on average.

    Raises TrafficError.
    """
    if a_second <= 0:
        raise TrafficError(f"At {a_second:g} requests a second nothing arrives: name more.")
    generator = random.Random(f"{workload.seed}/arrivals")
    pauses = (generator.expovariate(a_second) for _ in workload.requests)
    pairs = zip(workload.requests, accumulate(pauses), strict=True)
    requests = tuple(dataclasses.replace(request, at=at) for request, at in pairs)
    parameters = {**workload.parameters, "arrivals": a_second}
    return dataclasses.replace(workload, requests=requests, parameters=parameters)


def _grown(
    writer: Writer, name: str, head: tuple[int, ...], steps: tuple[int, int, int]
) -> list[Request]:
    """Return the turns of one session: how many, tokens that each adds, and of each answer.

    What was answered stands in later prompts as the writer wrote it, not as the server did.
    """
    turns, added, output = steps
    requests: list[Request] = []
    context = head
    for turn in range(turns):
        context += writer.write(f"{name} turn {turn}", added)
        after = requests[-1].name if requests else None
        requests.append(Request(f"{name} turn {turn}", context, output, after=after))
        context += writer.write(f"{name} answer {turn}", output)
    return requests


def _nearest(name: str, known: Iterable[str]) -> str:
    names = list(known)
    near = difflib.get_close_matches(name, names, 1, 0)
    return f"there are {', '.join(names)}; the nearest is {near[0]}."
