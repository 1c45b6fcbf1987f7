"""A server of completions for tests of the runner: right answers, and each way to go wrong.

What it does with a request is chosen by the name that its prompt's first token stands for.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field

GOOD, STATUS, CUT, LOST, SILENT, ENDLESS, WRONG_USAGE, NO_USAGE, RUBBISH, SAYS_ERROR = range(10)
"""First tokens of prompts."""
CACHED = 4
"""Prompt tokens of each that it says were cached."""
METRICS = (
    "# HELP vllm:prompt_tokens_total all\n"
    'vllm:prompt_tokens_total{{engine="0"}} {prompt}.0\n'
    'vllm:prefix_cache_hits_total{{engine="0"}} {device}.0\n'
    'vllm:external_prefix_cache_hits_total{{engine="0"}} {connector}.0\n'
    'vllm:prompt_tokens_cached_by_source_total{{engine="0",source="device"}} {device}.0\n'
    'vllm:prompt_tokens_cached_by_source_total{{engine="0",source="host"}} {connector}.0\n'
    'kvtier_engine_loaded_bytes_total{{engine="0"}} {connector}.0\n'
)


@dataclass
class Faulty:
    """The server: what it was asked, and when."""

    url: str = ""
    bodies: list[dict] = field(default_factory=list)
    """In the order in which they came."""
    under_way: int = 0
    most_under_way: int = 0
    ended: list[int] = field(default_factory=list)
    """Second tokens of prompts, in the order in which their answers ended."""
    metrics: bool = True
    gate: asyncio.Event = field(default_factory=asyncio.Event)
    """Good answers wait for it before their first token."""
    arrived: Callable[[], None] = lambda: None
    """Is called when a request has come."""
    tasks: set[asyncio.Task] = field(default_factory=set)
    """One a connection."""

    async def connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Answer one request, and close."""
        self.tasks.add(asyncio.current_task())
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
            try:
                await self._answer(reader, writer)
            finally:
                writer.close()

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        if head.startswith("GET /metrics"):
            writer.write(self._metrics())
            await writer.drain()
            return
        length = int(head.lower().split("content-length:")[1].split("\r\n")[0])
        body = json.loads(await reader.readexactly(length))
        self.bodies.append(body)
        self.under_way += 1
        self.most_under_way = max(self.most_under_way, self.under_way)
        self.arrived()
        try:
            await self._complete(body, writer)
        finally:
            self.under_way -= 1
            self.ended.append(body["prompt"][1])

    async def _complete(self, body: dict, writer: asyncio.StreamWriter) -> None:
        how, output = body["prompt"][0], body["max_tokens"]
        if how == STATUS:
            text = '{"error": {"message": "the engine is dead"}}'
            writer.write(f"HTTP/1.1 500 No\r\nContent-Length: {len(text)}\r\n\r\n{text}".encode())
            await writer.drain()
            return
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n")
        if how == LOST:
            writer.write(b"Content-Length: 1000000\r\n")
        writer.write(b"Connection: close\r\n\r\n")
        await self.gate.wait()
        for number in range(output):
            _say(writer, {"choices": [{"text": f"{body['prompt'][1]}.{number} "}]})
            await writer.drain()
            if how != GOOD and number == 1:
                break
        if how == SILENT:
            await asyncio.sleep(60)
        while how == ENDLESS:
            _say(writer, {"choices": [{"text": "more"}]})
            await writer.drain()
            await asyncio.sleep(0.01)
        if how == RUBBISH:
            writer.write(b'data: {"choices": 7}\n\n')
        if how == SAYS_ERROR:
            _say(writer, {"error": {"message": "out of memory"}})
        if how in {GOOD, WRONG_USAGE, NO_USAGE}:
            _finish(writer, body)
        await writer.drain()

    def _metrics(self) -> bytes:
        if not self.metrics:
            return b"HTTP/1.1 404 No\r\nContent-Length: 0\r\n\r\n"
        prompt = sum(len(body["prompt"]) for body in self.bodies)
        device = len(self.bodies)
        text = METRICS.format(prompt=prompt, device=device, connector=3 * device)
        return f"HTTP/1.1 200 OK\r\nContent-Length: {len(text)}\r\n\r\n{text}".encode()


def _say(writer: asyncio.StreamWriter, what: dict) -> None:
    writer.write(f"data: {json.dumps(what)}\n\n".encode())


def _finish(writer: asyncio.StreamWriter, body: dict) -> None:
    _say(writer, {"choices": [{"text": "", "finish_reason": "length"}]})
    prompt, output = len(body["prompt"]), body["max_tokens"]
    usage = {
        "prompt_tokens": prompt,
        "completion_tokens": output + (body["prompt"][0] == WRONG_USAGE),
        "prompt_tokens_details": {"cached_tokens": CACHED},
    }
    if body["prompt"][0] != NO_USAGE:
        _say(writer, {"choices": [], "usage": usage})
    writer.write(b"data: [DONE]\n\n")


@contextlib.asynccontextmanager
async def serving() -> AsyncIterator[Faulty]:
    """Give a running server, which ends with the block."""
    faulty = Faulty()
    faulty.gate.set()
    listening = await asyncio.start_server(faulty.connected, "127.0.0.1", 0)
    faulty.url = f"http://127.0.0.1:{listening.sockets[0].getsockname()[1]}"
    try:
        yield faulty
    finally:
        listening.close()
        for task in faulty.tasks:
            task.cancel()
        await asyncio.gather(*faulty.tasks, return_exceptions=True)
