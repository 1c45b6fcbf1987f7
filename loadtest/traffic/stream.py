"""Sends one request and reads its answer as it comes, over HTTP and server-sent events.

Nothing that a server does raises here: what went wrong is part of the record.
"""

from __future__ import annotations

import asyncio
import hashlib
import time
from dataclasses import dataclass, field
from itertools import pairwise

import httpx
import msgspec

from .records import Failure, Record
from .requests import Request
from .web import new_client

DATA, DONE = "data:", "[DONE]"
DETAIL_CHARACTERS = 300
"""Of what a server says about an error."""
DIGEST_CHARACTERS = 16


@dataclass(frozen=True, slots=True)
class Limits:
    """How long an answer may take, in seconds; a sentence names the limit that was reached."""

    connect: float = 10.0
    silence: float = 600.0
    """Between one piece of an answer and the next, the first token included."""
    answer: float = 1200.0
    """From sending to the end."""


class _Details(msgspec.Struct):
    cached_tokens: int | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int
    completion_tokens: int = 0
    prompt_tokens_details: _Details | None = None


class _Choice(msgspec.Struct):
    text: str = ""
    finish_reason: str | None = None


class _Chunk(msgspec.Struct):
    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: object = None


_decode = msgspec.json.Decoder(_Chunk).decode


class _Failed(Exception):
    """The answer can't count. The text is a sentence."""

    def __init__(self, failure: Failure, error: str) -> None:
        super().__init__(error)
        self.failure = failure


@dataclass(slots=True)
class _Answer:
    """What has come of an answer so far."""

    sent: float
    token_times: list[float] = field(default_factory=list)
    text: list[str] = field(default_factory=list)
    usage: _Usage | None = None
    finished: bool = False

    def take(self, line: str, now: float) -> None:
        """Take in one line of the stream. Raises _Failed."""
        if not line.startswith(DATA):
            return
        data = line[len(DATA) :].strip()
        if data == DONE:
            self.finished = True
            return
        try:
            chunk = _decode(data)
        except msgspec.DecodeError as error:
            raise _Failed(
                Failure.MALFORMED, f"A piece of the stream is no completion: {error}."
            ) from None
        if chunk.error is not None:
            said = _cut(msgspec.json.encode(chunk.error).decode())
            raise _Failed(Failure.STATUS, f"The server said in the stream: {said}")
        self.usage = chunk.usage or self.usage
        for choice in chunk.choices:
            # A token may have no text yet, as half a character has none; an end without text is
            # no token.
            if choice.text or choice.finish_reason is None:
                self.token_times.append(now)
                self.text.append(choice.text)


class Client:
    """Sends requests to one server, each on a connection of a pool without limit."""

    def __init__(self, url: str, model: str, limits: Limits, began: float) -> None:
        """`began` is the time, by `time.perf_counter`, from which records count."""
        self._model = model
        self._limits = limits
        self._began = began
        timeout = httpx.Timeout(limits.silence, connect=limits.connect)
        self._http = new_client(timeout)
        self._url = url.rstrip("/") + "/v1/completions"

    async def send(self, request: Request, late: float = 0.0) -> Record:
        """Return what came of a request. Waits for the answer, and not beyond the limits."""
        body = _body(self._model, request)
        answer = _Answer(time.perf_counter())
        failure, error = None, None
        try:
            async with asyncio.timeout(self._limits.answer):
                await self._read(body, answer)
            _check(request, answer)
        except _Failed as caught:
            failure, error = caught.failure, str(caught)
        except (httpx.HTTPError, httpx.StreamError, OSError, TimeoutError) as caught:
            failure, error = self._explain(caught)
        return self._record(request, answer, late, (failure, error))

    async def close(self) -> None:
        """Close the connections."""
        await self._http.aclose()

    async def _read(self, body: bytes, answer: _Answer) -> None:
        headers = {"Content-Type": "application/json"}
        sent = self._http.stream("POST", self._url, content=body, headers=headers)
        async with sent as response:
            if response.status_code != 200:
                said = _cut((await response.aread()).decode(errors="replace"))
                raise _Failed(Failure.STATUS, f"The server answered {response.status_code}: {said}")
            async for line in response.aiter_lines():
                answer.take(line, time.perf_counter())
        if not answer.finished:
            raise _Failed(
                Failure.LOST,
                f"The stream ended without an end mark, after {len(answer.text)} pieces.",
            )

    def _explain(self, error: Exception) -> tuple[Failure, str]:
        limits = self._limits
        match error:
            case httpx.ConnectTimeout():
                return Failure.REFUSED, f"No connection came about in {limits.connect:g} s."
            case httpx.ConnectError():
                return Failure.REFUSED, f"No connection came about: {_said(error)}."
            case httpx.TimeoutException():
                return Failure.TIMEOUT, f"Nothing came for {limits.silence:g} s (limit: silence)."
            case TimeoutError():
                return (
                    Failure.TIMEOUT,
                    f"The answer was not whole after {limits.answer:g} s (limit: answer).",
                )
            case _:
                return Failure.LOST, f"The connection was lost: {_said(error)}."

    def _record(
        self,
        request: Request,
        answer: _Answer,
        late: float,
        outcome: tuple[Failure | None, str | None],
    ) -> Record:
        times, usage = answer.token_times, answer.usage
        details = usage and usage.prompt_tokens_details
        return Record(
            name=request.name,
            sent=answer.sent - self._began,
            ended=time.perf_counter() - self._began,
            late=late,
            ttft=times[0] - answer.sent if times else None,
            gaps=[after - before for before, after in pairwise(times)],
            prompt_tokens=usage.prompt_tokens if usage else 0,
            cached_tokens=details.cached_tokens if details else None,
            output_tokens=usage.completion_tokens if usage else 0,
            digest=digest("".join(answer.text)),
            failure=outcome[0],
            error=outcome[1],
        )


def digest(text: str) -> str:
    """Return what tells an answer from every other one."""
    return hashlib.sha256(text.encode()).hexdigest()[:DIGEST_CHARACTERS]


def _body(model: str, request: Request) -> bytes:
    return msgspec.json.encode(
        {
            "model": model,
            "prompt": request.prompt,
            "max_tokens": request.output_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
    )


def _check(request: Request, answer: _Answer) -> None:
    """Raise _Failed if the answer's own counts are not those that were asked for."""
    usage = answer.usage
    if usage is None:
        raise _Failed(Failure.USAGE, "The answer came without usage.")
    for what, have, want in (
        ("prompt tokens", usage.prompt_tokens, len(request.prompt)),
        ("output tokens", usage.completion_tokens, request.output_tokens),
    ):
        if have != want:
            raise _Failed(Failure.USAGE, f"The answer counts {have} {what}, and not {want}.")
    cached = usage.prompt_tokens_details and usage.prompt_tokens_details.cached_tokens
    if cached and not 0 <= cached <= len(request.prompt):
        raise _Failed(
            Failure.USAGE, f"The answer counts {cached} cached tokens of {len(request.prompt)}."
        )


def _said(error: Exception) -> str:
    return _cut(str(error) or type(error).__name__).rstrip(".")


def _cut(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= DETAIL_CHARACTERS else f"{line[:DETAIL_CHARACTERS]}…"
