"""A worker without a model: serves Watch and Session over real gRPC and makes tokens by a script.

By default it repeats the prompt. It keeps the rules of the protocol (stop ids, caps, resubmission,
cancel) and does what a test tells it to: wait with admission, step by step, fail, drop the stream,
die.
"""

import asyncio
import dataclasses
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import cycle, islice

import anyio
import numpy as np

from common.errors import TandemError, WorkerLost
from common.messages import (
    Admitted,
    Cancel,
    ChunkBudget,
    Failed,
    GenerateRequest,
    Hello,
    KvEvents,
    PoolLoad,
    PrefillDone,
    Route,
    Submit,
    TokenBatch,
    Watch,
    WorkerState,
    unpack_tokens,
)
from common.rpc import RpcServer, Stream, serve
from common.types import FinishReason, PromptLogprobs, Role, TokenLogprobs

Script = Callable[[list[int], int], Iterator[int]]
"""Prompt and output index to the tokens of that output, without end or ending in end of text."""

EOS = 2


def repeat_prompt(prompt: list[int], output_index: int) -> Iterator[int]:
    return cycle(prompt)


def tokens(*token_ids: int) -> Script:
    """Always these, then end of text."""
    return lambda prompt, output_index: iter([*token_ids, EOS])


@dataclass
class _Output:
    index: int
    source: Iterator[int]
    num_tokens: int
    has_finished: bool = False


@dataclass
class _Running:
    request: GenerateRequest
    outputs: list[_Output]
    has_prefilled: bool = False


@dataclass
class _Session:
    stream: Stream
    running: dict[str, _Running] = field(default_factory=dict)
    is_dropped: bool = False
    scope: anyio.CancelScope = field(default_factory=anyio.CancelScope)
    lock: anyio.Lock = field(default_factory=anyio.Lock)

    async def send(self, message: object) -> None:
        """gRPC takes one write at a time."""
        async with self.lock:
            await self.stream.send(message)


def scores_of(request: GenerateRequest) -> PromptLogprobs | None:
    """Token i of the prompt has log-probability -i/8 and rank 2; the best are 100, 101, ..."""
    num_top = request.sampling.prompt_logprobs
    if num_top is None:
        return None
    count = request.num_prompt_tokens - 1
    return PromptLogprobs(
        num_top=num_top,
        logprobs=np.array([-i / 8 for i in range(1, count + 1)], dtype="<f4").tobytes(),
        ranks=np.full(count, 2, dtype="<i4").tobytes(),
        top_ids=np.tile(np.arange(100, 100 + num_top, dtype="<i4"), count).tobytes(),
        top_logprobs=np.full(count * num_top, -0.0625, dtype="<f4").tobytes(),
    )


class FakeWorker:
    def __init__(
        self,
        role: Role = Role.COLOCATED,
        *,
        script: Script = repeat_prompt,
        incarnation: str = "",
        **state: object,
    ) -> None:
        self._script = script
        self.state = WorkerState(
            role=role,
            incarnation=incarnation or f"{role.value}-{id(self):x}",
            pid=1,
            metrics="http://127.0.0.1:1/metrics",
            model_fingerprint="model-a",
            layout="fp8",
            block_size=16,
            max_model_len=8192,
            max_prompt_tokens=100_000,
            draining=False,
            blocks=PoolLoad(total=100, free=100, cached=0, held=0),
            running=0,
            waiting=0,
            num_queued_tokens=0,
        )
        self.state = dataclasses.replace(self.state, **state)  # type: ignore[arg-type]
        self._sessions: list[_Session] = []
        self._wake = asyncio.Event()
        self._watches: set[asyncio.Event] = set()
        self._told: list[KvEvents] = []
        self._server: RpcServer | None = None
        self.address = ""
        self.reset()

    def reset(self) -> None:
        """As new, except for what is connected; nothing may be running."""
        self.script = self._script
        self.submitted: list[GenerateRequest] = []
        self.cancelled: list[str] = []
        self.cancelled_outputs: list[tuple[str, int | None]] = []
        self.routes: list[Route] = []
        self.chunk_budgets: list[int] = []
        self.num_tokens_sent = 0
        self.admits = True
        self.refuses: Callable[[GenerateRequest], TandemError | None] = lambda request: None
        self.steps_allowed: int | None = None
        self.fails_after: tuple[int, TandemError] | None = None
        """Once a request has so many tokens of output 0, it fails; then this is over."""
        self.num_cached_tokens = 0
        self.has_prefill_pause = False

    def reset_script(self) -> None:
        self.script = self._script

    # --- life -------------------------------------------------------------------------------------

    async def start(self, address: str = "127.0.0.1:0") -> None:
        self._server = await serve(address, {"Watch": self._watch, "Session": self._session})
        host = address.rpartition(":")[0]
        self.address = f"{host}:{self._server.port}"

    async def stop(self) -> None:
        if self._server is not None:
            await self._server.stop(0)
            self._server = None

    def set_state(self, **changes: object) -> None:
        self.state = dataclasses.replace(self.state, **changes)  # type: ignore[arg-type]
        for event in self._watches:
            event.set()

    def forget_told(self) -> None:
        """New Watch streams are told nothing of what came before."""
        self._told.clear()

    def tell(self, events: KvEvents) -> None:
        """Of its prefix cache, on every Watch stream."""
        self._told.append(events)
        for event in self._watches:
            event.set()

    def allow(self, num_steps: int | None) -> None:
        """How many more steps may happen; None: no limit."""
        if num_steps is not None and self.steps_allowed is not None:
            num_steps += self.steps_allowed
        self.steps_allowed = num_steps
        self._wake.set()

    def wake(self) -> None:
        self._wake.set()

    async def admit_all(self) -> None:
        """What has been submitted so far, and all that comes."""
        self.admits = True
        for session in self._sessions:
            for request in self.submitted:
                await self._admit(session, request)

    def drop_sessions(self) -> None:
        for session in self._sessions:
            session.is_dropped = True
            session.scope.cancel()

    @property
    def num_running(self) -> int:
        return sum(len(session.running) for session in self._sessions)

    # --- streams ----------------------------------------------------------------------------------

    async def _watch(self, stream: Stream) -> None:
        assert isinstance(await stream.receive(), Watch)
        event = asyncio.Event()
        self._watches.add(event)
        num_told = 0
        try:
            while True:
                await stream.send(self.state)
                while num_told < len(self._told):
                    num_told += 1
                    await stream.send(self._told[num_told - 1])
                await event.wait()
                event.clear()
        finally:
            self._watches.discard(event)

    async def _session(self, stream: Stream) -> None:
        assert isinstance(await stream.receive(), Hello)
        session = _Session(stream)
        self._sessions.append(session)
        try:
            async with anyio.create_task_group() as group:
                session.scope = group.cancel_scope
                group.start_soon(self._step_for_ever, session)
                while (message := await stream.receive()) is not None:
                    await self._take(session, message)
                group.cancel_scope.cancel()
        except* TandemError:
            pass
        finally:
            self._sessions.remove(session)
        if session.is_dropped:
            raise WorkerLost("dropped on purpose")

    async def _take(self, session: _Session, message: object) -> None:
        match message:
            case Submit(request=request):
                self.submitted.append(request)
                error = self.refuses(request)
                if error is not None:
                    await session.send(Failed.of(request.request_id, error))
                elif self.admits:
                    await self._admit(session, request)
            case ChunkBudget(max_tokens=max_tokens):
                self.chunk_budgets.append(max_tokens)
            case Route():
                self.routes.append(message)
                request = next(r for r in self.submitted if r.request_id == message.request_id)
                self._run(session, request)
            case Cancel(request_id=request_id, output_index=None):
                self.cancelled.append(request_id)
                session.running.pop(request_id, None)
            case Cancel(request_id=request_id, output_index=index):
                self.cancelled_outputs.append((request_id, index))
                for output in getattr(session.running.get(request_id), "outputs", ()):
                    output.has_finished |= output.index == index

    async def _admit(self, session: _Session, request: GenerateRequest) -> None:
        needs_route = self.state.role is Role.DECODE
        await session.send(
            Admitted(
                request_id=request.request_id,
                num_cached_tokens=self.num_cached_tokens,
                needs_route=needs_route,
            )
        )
        if not needs_route:
            self._run(session, request)

    def _run(self, session: _Session, request: GenerateRequest) -> None:
        ids = unpack_tokens(request.token_ids).tolist()
        prompt, so_far = ids[: request.num_prompt_tokens], ids[request.num_prompt_tokens :]
        outputs = []
        for index in range(request.output_index, request.output_index + request.sampling.n):
            source = self._source(request, prompt, index)
            assert list(islice(source, len(so_far))) == so_far, "resubmitted with other tokens"
            outputs.append(_Output(index, source, len(so_far)))
        session.running[request.request_id] = _Running(request, outputs)
        self._wake.set()

    def _source(self, request: GenerateRequest, prompt: list[int], index: int) -> Iterator[int]:
        forced = [token_id for token_id, bias in request.sampling.logit_bias if bias >= 100]
        return cycle(forced) if forced else iter(self.script(prompt, index))

    # --- steps ------------------------------------------------------------------------------------

    async def _step_for_ever(self, session: _Session) -> None:
        while True:
            while session.running and self.steps_allowed != 0 and not self.has_prefill_pause:
                if self.steps_allowed is not None:
                    self.steps_allowed -= 1
                await self._step(session)
            self._wake.clear()
            await self._wake.wait()

    async def _step(self, session: _Session) -> None:
        rows: list[tuple[str, int, int, FinishReason | None, TokenLogprobs | None]] = []
        for request_id, running in list(session.running.items()):
            if not running.has_prefilled:
                running.has_prefilled = True
                await session.send(
                    PrefillDone(
                        request_id=request_id,
                        num_cached_tokens=self.num_cached_tokens,
                        prompt_logprobs=scores_of(running.request),
                    )
                )
            if await self._has_failed(session, running):
                continue
            for output in running.outputs:
                if not output.has_finished:
                    rows.append((request_id, output.index, *self._next(running, output)))
            if all(output.has_finished for output in running.outputs):
                session.running.pop(request_id, None)
        if rows:
            columns = list(zip(*rows, strict=True))
            self.num_tokens_sent += len(rows)
            has_logprobs = any(entry is not None for entry in columns[4])
            await session.send(
                TokenBatch(
                    request_ids=columns[0],
                    output_indices=columns[1],
                    token_ids=columns[2],
                    finish_reasons=columns[3],
                    logprobs=columns[4] if has_logprobs else (),
                )
            )

    async def _has_failed(self, session: _Session, running: _Running) -> bool:
        if self.fails_after is None or running.outputs[0].num_tokens < self.fails_after[0]:
            return False
        error, self.fails_after = self.fails_after[1], None
        session.running.pop(running.request.request_id, None)
        await session.send(Failed.of(running.request.request_id, error))
        return True

    def _next(
        self, running: _Running, output: _Output
    ) -> tuple[int, FinishReason | None, TokenLogprobs | None]:
        sampling = running.request.sampling
        token_id = next(output.source)
        can_stop = output.num_tokens >= sampling.min_tokens
        output.num_tokens += 1
        reason = None
        if token_id in sampling.stop_token_ids and can_stop:
            reason = FinishReason.STOP
        elif output.num_tokens >= sampling.max_tokens:
            reason = FinishReason.LENGTH
        output.has_finished = reason is not None
        logprobs = None
        if sampling.logprobs is not None:
            top = (token_id, *range(100, 120))[: sampling.logprobs]
            logprobs = TokenLogprobs(
                logprob=-0.5, top_ids=top, top_logprobs=(-0.5, *[-3.0] * 20)[: len(top)]
            )
        return token_id, reason, logprobs
