"""One client call under way: a journey per prompt, a text per output.

`service.begin` makes it; whoever answers reads `pieces()` until it is done, and closes it whatever
happened.
"""

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from common.clock import Clock
from common.errors import TandemError
from common.messages import GenerateRequest
from common.types import FinishReason, PromptLogprobs, RequestId
from router.admission.admission import Admission, Ticket
from router.fleet.dispatch import Placing
from router.fleet.fleet import Fleet
from router.fleet.journey import Inbox, Journey
from router.fleet.metrics import RouterMetrics
from router.generation.options import Options
from router.generation.scores import LARGE_SCORES, PromptEntry, PromptScores, num_scores
from router.generation.served_model import ServedModel
from router.reading.side_threads import SideThreads
from router.text.text_output import Piece, TextOutput


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Surroundings:
    """What a call meets on its way; one of each in a router."""

    fleet: Fleet
    dispatcher: Placing
    admission: Admission
    metrics: RouterMetrics
    clock: Clock
    threads: SideThreads = dataclasses.field(default_factory=SideThreads)


@dataclass(frozen=True, slots=True, kw_only=True)
class Checked:
    """A call that may start."""

    request_id: RequestId
    prompts: Sequence[list[int]]
    texts: Sequence[str | None]
    """The prompts as the client wrote them, where it did."""
    options: Options
    arrived_at: float
    continued: str = ""
    """What an answer in a chat begins with before the model says anything."""


class Generation:
    def __init__(
        self,
        call: Checked,
        ticket: Ticket,
        *,
        model: ServedModel,
        around: Surroundings,
        on_close: "Callable[[Generation], None]",
    ) -> None:
        self.call = call
        self._ticket = ticket
        self._model = model
        self._around = around
        self._on_close = on_close
        self._n = call.options.sampling.n
        self._inbox = Inbox()
        self._journeys: list[Journey] = []
        self._prompts = [
            PromptScores(ids, text, _scores_of(self._journeys, index))
            for index, (ids, text) in enumerate(zip(call.prompts, call.texts, strict=True))
        ]
        self._num_prompt_tokens = sum(map(len, call.prompts))
        self._outputs = [
            TextOutput(
                choice,
                model.texts_for(call.options),
                stops=call.options.stops,
                include_stop=call.options.include_stop,
                min_tokens=call.options.sampling.min_tokens,
                keeps_ids=call.options.returns_token_ids,
            )
            for choice in range(len(call.prompts) * self._n)
        ]
        self._num_unfinished = len(self._outputs)
        self._token_times: list[float | None] = [None] * len(self._outputs)
        self._first_token_at: float | None = None
        self._last_token_at = call.arrived_at
        self._has_queued = True
        self._has_closed = False

    def add(self, request: GenerateRequest) -> None:
        """Sends the next prompt off. Raises NotReady."""
        journey = Journey(
            request,
            prompt_index=len(self._journeys),
            inbox=self._inbox,
            dispatcher=self._around.dispatcher,
            clock=self._around.clock,
            on_admitted=self._admitted,
        )
        self._journeys.append(journey)
        journey.start()

    @property
    def num_choices(self) -> int:
        return len(self._outputs)

    @property
    def is_done(self) -> bool:
        return self._num_unfinished == 0

    async def pieces(self) -> list[Piece]:
        """The next pieces, at least one. Raises the error that ended the call."""
        assert not self.is_done
        options = self.call.options
        found: list[Piece] = []
        while not found:
            events = await self._inbox.take()
            self._measure(len(events))
            now = self._last_token_at
            times = self._token_times
            gap = self._around.metrics.tokens.gap
            for prompt_index, output_index, token_id, finish_reason, logprobs in events:
                choice = prompt_index * self._n + output_index
                output = self._outputs[choice]
                before = times[choice]
                if before is not None:
                    gap(now - before)
                elif options.echo:
                    found.append(await self._echoed(choice))
                times[choice] = now
                if options.max_tokens == 0:
                    piece = output.end_unseen()
                else:
                    piece = output.push(token_id, finish_reason, logprobs)
                if piece is not None:
                    found.append(piece)
                    if piece.finish_reason is not None:
                        self._finished(prompt_index, output_index, finish_reason)
        return found

    async def whole(self) -> list[Piece]:
        """One piece per choice, in their order."""
        texts: list[list[str]] = [[] for _ in self._outputs]
        entries: list[list[Any]] = [[] for _ in self._outputs]
        ids: list[list[int]] = [[] for _ in self._outputs]
        ends: list[Piece | None] = [None] * len(self._outputs)
        while not self.is_done:
            for piece in await self.pieces():
                texts[piece.choice].append(piece.text)
                entries[piece.choice].extend(piece.entries)
                ids[piece.choice].extend(piece.token_ids)
                ends[piece.choice] = piece
        return [
            dataclasses.replace(
                end,
                text="".join(texts[end.choice]),
                entries=tuple(entries[end.choice]),
                token_ids=tuple(ids[end.choice]),
            )
            for end in ends
            if end is not None
        ]

    def prompt_ids(self, choice: int) -> list[int]:
        return self._prompts[choice // self._n].ids

    def prompt_text(self, choice: int) -> str | None:
        """As the client wrote it, where it did."""
        return self._prompts[choice // self._n].text

    def prompt_logprobs(self, choice: int) -> list[PromptEntry]:
        return self._prompts[choice // self._n].entries

    def usage(self) -> Usage:
        return Usage(
            prompt_tokens=self._num_prompt_tokens,
            completion_tokens=sum(output.num_tokens for output in self._outputs),
            cached_tokens=sum(journey.num_cached_tokens for journey in self._journeys),
        )

    async def written(self, pieces: Sequence[Piece], write: Callable[[], bytes]) -> bytes:
        """What `write` makes of these pieces, in a thread when they carry many scores."""
        if num_scores(pieces, self.call.options, self._num_prompt_tokens) < LARGE_SCORES:
            return write()
        return await self._around.threads.run(write)

    def fail(self, error: TandemError) -> None:
        self._inbox.fail(error)

    def close(self) -> None:
        """Workers are told if they still work on it. Idempotent."""
        if self._has_closed:
            return
        self._has_closed = True
        metrics = self._around.metrics
        for journey in self._journeys:
            journey.stop()
            metrics.retries.inc(journey.num_retries)
            metrics.preemptions.inc(journey.num_preemptions)
        self._ticket.leave()
        self._on_close(self)
        if self.is_done:
            metrics.e2e.observe(self._around.clock.now() - self.call.arrived_at)
            longest = max(output.num_tokens for output in self._outputs)
            if longest > 1 and self._first_token_at is not None:
                metrics.tpot.observe((self._last_token_at - self._first_token_at) / (longest - 1))

    # --- inside -----------------------------------------------------------------------------------

    async def _echoed(self, choice: int) -> Piece:
        """The prompt as the first piece of an answer."""
        prompt = self._prompts[choice // self._n]
        num_top = self.call.options.sampling.logprobs
        return await prompt.echo(
            choice, num_top, self._model.tokenizer.decode, self._around.threads
        )

    def _admitted(self) -> None:
        if self._has_queued:
            self._has_queued = False
            now = self._around.clock.now()
            self._around.metrics.queue.observe(now - self.call.arrived_at)
        self._ticket.start()

    def _finished(
        self, prompt_index: int, output_index: int, workers_reason: FinishReason | None
    ) -> None:
        self._num_unfinished -= 1
        if workers_reason is None:
            self._journeys[prompt_index].finish_output(output_index)

    def _measure(self, num_tokens: int) -> None:
        metrics = self._around.metrics
        now = self._around.clock.now()
        if self._first_token_at is None:
            self._first_token_at = now
            metrics.ttft.observe(now - self.call.arrived_at)
        self._last_token_at = now
        metrics.tokens.num_tokens += num_tokens


def _scores_of(journeys: Sequence[Journey], index: int) -> Callable[[], PromptLogprobs | None]:
    return lambda: journeys[index].prompt_logprobs
