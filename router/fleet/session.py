"""One session: the stream between this router and one life of a decode worker.

Requests go in by `submit`, `route` and `cancel` (none of them waits); what comes back is handed to
the request's sink. The session is the lease of its requests: when the stream ends, each of them
fails with `DecodeLost`, or with `Draining` when the worker said that it leaves. `discovery` opens
sessions and runs them; `dispatch` finds them by worker.
"""

import asyncio
from collections.abc import Callable
from typing import Protocol

import anyio

from common.errors import DecodeLost, Draining, MalformedMessage, TandemError, first_of
from common.messages import (
    Admitted,
    Cancel,
    ChunkBudget,
    Failed,
    GenerateRequest,
    Hello,
    PrefillDone,
    Route,
    Submit,
    TokenBatch,
    UnshareParams,
)
from common.rpc import Stream
from common.shared_params import LargeParams, SharedKeys, is_large, without_large
from common.types import FinishReason, PromptLogprobs, RequestId, SamplingParams, TokenLogprobs


class Sink(Protocol):
    """Where the news of one submitted request go. After `failed` nothing else comes."""

    def admitted(self, num_cached_tokens: int, needs_route: bool) -> None: ...

    def prefill_done(
        self, num_cached_tokens: int, prompt_logprobs: PromptLogprobs | None
    ) -> None: ...

    def token(
        self,
        output_index: int,
        token_id: int,
        finish_reason: FinishReason | None,
        logprobs: TokenLogprobs | None,
    ) -> None: ...

    def failed(self, error: TandemError, *, at_prefill: bool = False) -> None:
        """`at_prefill`: through the prefill worker's fault."""
        ...


class Session:
    def __init__(self, stream: Stream, address: str) -> None:
        self._stream = stream
        self._address = address
        self._sinks: dict[RequestId, Sink] = {}
        self._shared = SharedKeys()
        self._sharing: dict[RequestId, SamplingParams] = {}
        self.outbox: asyncio.Queue[object] = asyncio.Queue()
        """What is to be sent."""
        self._has_ended = False

    def submit(self, request: GenerateRequest, sink: Sink, *, shares: bool = False) -> None:
        """`shares`: the worker understands shared parameters. Raises DecodeLost when the session
        has ended.
        """
        if self._has_ended:
            raise DecodeLost(f"decode worker {self._address} is gone")
        assert request.request_id not in self._sinks
        self._sinks[request.request_id] = sink
        if shares and is_large(request.sampling):
            request = self._share(request)
        self.outbox.put_nowait(Submit(request=request))

    def _share(self, request: GenerateRequest) -> GenerateRequest:
        """The worker is told once what requests have in common."""
        sampling = request.sampling
        key, is_new = self._shared.hold(sampling)
        self._sharing[request.request_id] = sampling
        if is_new:
            self.outbox.put_nowait(LargeParams.of(sampling).message(key))
        return without_large(request, key)

    def _pop(self, request_id: RequestId) -> Sink | None:
        sampling = self._sharing.pop(request_id, None)
        if sampling is not None:
            unused = self._shared.release(sampling)
            if unused is not None:
                self.outbox.put_nowait(UnshareParams(key=unused))
        return self._sinks.pop(request_id, None)

    def route(self, request_id: RequestId, prefill: str | None, incarnation: str | None) -> None:
        if request_id in self._sinks:
            self.outbox.put_nowait(
                Route(request_id=request_id, prefill=prefill, incarnation=incarnation)
            )

    def cancel(self, request_id: RequestId, *, has_stopped: bool = False) -> None:
        """The request is not wanted any more, or has got all it wanted. Harmless when it has
        ended.
        """
        if self._pop(request_id) is not None:
            self.outbox.put_nowait(Cancel(request_id=request_id, has_stopped=has_stopped))

    def cancel_output(self, request_id: RequestId, output_index: int) -> None:
        """One of the request's outputs is not wanted any more."""
        if request_id in self._sinks:
            self.outbox.put_nowait(Cancel(request_id=request_id, output_index=output_index))

    def limit_chunks(self, max_tokens: int) -> None:
        """At most so many prompt tokens beside running streams, from now on."""
        self.outbox.put_nowait(ChunkBudget(max_tokens=max_tokens))

    def forget(self, request_id: RequestId) -> None:
        """The request has ended by itself: all its outputs have finished."""
        self._pop(request_id)

    async def run(self, hello: Hello, on_end: Callable[[TandemError], None]) -> None:
        """Until the stream ends. Raises what ended it (a clean end is `DecodeLost` too).

        `on_end` is called before the requests learn of the end, so that none of them comes back
        here.
        """
        error: TandemError = DecodeLost(f"decode worker {self._address} closed the session")
        try:
            await self._stream.send(hello)
            async with anyio.create_task_group() as group:
                group.start_soon(self._write)
                await self._read()
                group.cancel_scope.cancel()
        except* TandemError as found:
            error = first_of(found)
        finally:
            self._stream.cancel()
            self._has_ended = True
            on_end(error)
            self._fail_all(error)
        raise error

    def _fail_all(self, error: TandemError) -> None:
        sinks, self._sinks = list(self._sinks.values()), {}
        if not isinstance(error, Draining):
            error = DecodeLost(f"decode worker {self._address} was lost: {error.message}")
        for sink in sinks:
            sink.failed(error)

    async def _write(self) -> None:
        while True:
            await self._stream.send(await self.outbox.get())

    async def _read(self) -> None:
        while True:
            message = await self._stream.receive()
            if message is None:
                return
            self.deliver(message)

    def deliver(self, message: object) -> None:
        sinks = self._sinks
        match message:
            case TokenBatch():
                self._deliver_tokens(message)
            case Admitted(request_id=request_id):
                if request_id in sinks:
                    sinks[request_id].admitted(message.num_cached_tokens, message.needs_route)
            case PrefillDone(request_id=request_id, num_cached_tokens=num_cached_tokens):
                if request_id in sinks:
                    sinks[request_id].prefill_done(num_cached_tokens, message.prompt_logprobs)
            case Failed(request_id=request_id):
                sink = self._pop(request_id)
                if sink is not None:
                    sink.failed(message.error(), at_prefill=message.at_prefill)
            case _:
                raise MalformedMessage(f"a decode worker does not send {type(message).__name__}")

    def _deliver_tokens(self, batch: TokenBatch) -> None:
        num_rows = len(batch.request_ids)
        columns = (batch.output_indices, batch.token_ids, batch.finish_reasons)
        if any(len(column) != num_rows for column in columns):
            raise MalformedMessage("the columns of a TokenBatch differ in length")
        logprobs = batch.logprobs or (None,) * num_rows
        sinks = self._sinks
        for request_id, index, token_id, finish, entry in zip(
            batch.request_ids, *columns, logprobs, strict=True
        ):
            sink = sinks.get(request_id)
            if sink is not None:
                sink.token(index, token_id, finish, entry)
