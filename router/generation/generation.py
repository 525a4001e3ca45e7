"""One client call from token ids to text, and the service both fronts (HTTP, gRPC) make their calls
of.

service.prompt_* -> Prompt text, chat or ids, checked against the context and the pools
service.start(prompts, options) -> Generation generation.pieces() ... until it is done;
generation.close() whatever happened
"""

import dataclasses
import functools
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import anyio
import anyio.to_thread
import numpy as np
from google.protobuf import message as protobuf

from common.clock import Clock
from common.errors import (
    ContextLengthExceeded,
    InvalidRequest,
    ModelNotFound,
    NotReady,
    PromptTooLargeForPool,
    TandemError,
)
from common.limits import LARGE_BODY_BYTES, MAX_OUTPUTS, MAX_SCORES
from common.messages import GenerateRequest, WorkerState, pack_tokens
from common.model_config import ModelConfig
from common.types import FinishReason, PromptLogprobs, RequestId, TokenLogprobs
from router.admission.admission import Admission, Ticket
from router.admission.keys import DEFAULT_PRIORITIES, Key, KeyRing
from router.fleet.dispatch import Placing
from router.fleet.fleet import Fleet
from router.fleet.journey import Inbox, Journey
from router.fleet.metrics import RouterMetrics
from router.fleet.prompt_hashes import LARGE_TOKENS
from router.generation.options import Options, Vocabulary, check_products
from router.generation.sampling_defaults import NEUTRAL, SamplingDefaults
from router.grammar.compiler import GrammarCompiler
from router.reading.fields import Fields
from router.reading.json_body import parse_json_object, shortened
from router.reading.protobuf_bounds import parsed
from router.text.chat_template import Message
from router.text.detokenizer import TokenTexts
from router.text.parts import (
    REASONING_MARKERS,
    REASONING_PARSERS,
    TOOL_PARSERS,
    ListSplitter,
    MakeSplitter,
    NamedSplitter,
    PlainSplitter,
    ReasoningSplitter,
)
from router.text.text_output import Piece, TextOutput, TokenEntry
from router.text.tokenizer import Tokenizer

T = TypeVar("T")
M = TypeVar("M", bound=protobuf.Message)
log = logging.getLogger(__name__)

DEFAULT_COMPLETION_TOKENS = 16
MAX_THREADS = 4
MAX_CUT_CONTEXTS = 4
"""Contexts of tokens that a prompt may have which will be cut to its end."""
LARGE_SCORES = 4096
"""From so many on they are put together, and written, in a thread."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int


class TextService:
    """What the router can do for a client. Both fronts hold one."""

    def __init__(
        self,
        *,
        model_name: str,
        model: ModelConfig,
        tokenizer: Tokenizer,
        fleet: Fleet,
        dispatcher: Placing,
        admission: Admission,
        metrics: RouterMetrics,
        clock: Clock,
        request_timeout_s: float,
        wall_time: Callable[[], float],
        draw_bits: Callable[[int], int],
        keys: KeyRing,
        priorities: range = DEFAULT_PRIORITIES,
        salts_by_key: bool = True,
        keeps_tools_open: bool = False,
        defaults: SamplingDefaults = NEUTRAL,
        tool_parser: str = "hermes",
        reasoning_parser: str | None = None,
        compiler: GrammarCompiler,
    ) -> None:
        """`wall_time` is for show only; `draw_bits(k)` is k random bits."""
        self.model_name = model_name
        self.tokenizer = tokenizer
        self.vocabulary = Vocabulary(
            size=model.vocab_size,
            eos_token_ids=model.eos_token_ids,
            encode=lambda text: self._known(tokenizer.encode_words(text), "bad_words"),
            keeps_tools_open=keeps_tools_open,
            defaults=defaults,
        )
        self._num_strange = max(0, len(tokenizer.texts.parts) - model.vocab_size)
        if self._num_strange:
            log.warning(
                "the tokenizer has ids up to %d, the model only %d rows: requests whose text needs "
                "a token beyond are refused",
                len(tokenizer.texts.parts) - 1, model.vocab_size,
            )  # fmt: skip
        self.fleet = fleet
        self.metrics = metrics
        self.clock = clock
        self.admission = admission
        self.keys = keys
        self.compiler = compiler
        self._active: dict[Generation, None] = {}
        self._model_limit = model.max_position_embeddings
        self._dispatcher = dispatcher
        self._request_timeout_s = request_timeout_s
        self._wall_time = wall_time
        self.started_at = self.wall_clock()
        self._draw_bits = draw_bits
        self._threads: anyio.CapacityLimiter | None = None
        self.priorities = priorities
        self._salts_by_key = salts_by_key
        self._tool_parser = tool_parser
        self._reasoning_parser = reasoning_parser
        markers = REASONING_MARKERS + TOOL_PARSERS[tool_parser][1]
        self._texts_with_markers = tokenizer.texts.showing(markers)

    def new_request_id(self) -> RequestId:
        return f"{self._draw_bits(128):032x}"

    def new_call_id(self) -> str:
        return f"call_{self._draw_bits(96):024x}"

    def wall_clock(self) -> int:
        return int(self._wall_time())

    def check_model(self, name: str | None) -> None:
        """A request that names no model means the one there is."""
        if name is not None and name != self.model_name:
            raise ModelNotFound(f"the model {shortened(name)} does not exist", param="model")

    @property
    def is_ready(self) -> bool:
        """Whether a request would succeed."""
        return self.fleet.is_ready() and not self.admission.is_draining

    def reasons(self, key: Key | None) -> list[str]:
        """What keeps a request from succeeding. Who has no key where keys are in use is told no
        addresses.
        """
        found = self.fleet.reasons(with_workers=self.keys.is_open or key is not None)
        return ["the router is shutting down", *found] if self.admission.is_draining else found

    @property
    def max_model_len(self) -> int:
        """Longest prompt plus answer: the model's own limit, or a smaller one of the workers."""
        limits = [w.state.max_model_len for w in self.fleet.linked() if w.can_decode]
        return min([self._model_limit, *limits])

    # --- prompts ----------------------------------------------------------------------------------

    async def encode_texts(self, texts: Sequence[str], options: Options) -> list[list[int]]:
        prompts = await self.tokenizer.encode_all(texts, self._max_read(options))
        return [self._known(self.cut(prompt, options), "prompt") for prompt in prompts]

    def _known(self, token_ids: list[int], param: str) -> list[int]:
        """Raises InvalidRequest for a token of the tokenizer that the model has no row for."""
        size = self.vocabulary.size
        if self._num_strange and max(token_ids, default=0) >= size:
            strange = next(token_id for token_id in token_ids if token_id >= size)
            text = self.tokenizer.texts.raw(strange).decode(errors="replace")
            raise InvalidRequest(
                f"the text holds {text!r} (token {strange}), which the model, of {size} tokens, "
                "does not know",
                param=param,
            )
        return token_ids

    def _max_read(self, options: Options) -> int:
        """Tokens of a prompt that are read, more of one that will be cut."""
        return self.max_model_len * (1 if options.keeps_last is None else MAX_CUT_CONTEXTS)

    def cut(self, prompt: list[int], options: Options) -> list[int]:
        """The end of a prompt, where the client wants no more of it."""
        keeps = options.keeps_last
        if keeps is None:
            return prompt
        if keeps == -1:
            keeps = max(1, self.max_model_len - (options.max_tokens or 1))
        return prompt[-keeps:]

    async def encode_chat(
        self,
        messages: list[Message],
        add_generation_prompt: bool,
        variables: dict[str, Any],
        *,
        continue_final_message: bool = False,
        options: Options | None = None,
    ) -> list[int]:
        prompt = await self.tokenizer.encode_chat(
            messages,
            self.max_model_len if options is None else self._max_read(options),
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            variables=variables,
        )
        return self._known(prompt if options is None else self.cut(prompt, options), "messages")

    def texts_for(self, options: Options) -> TokenTexts:
        """Markers of tool calls and reasoning are seen where somebody looks for them."""
        is_split = options.tools is not None or self._reasoning_parser is not None
        return self._texts_with_markers if is_split else self.tokenizer.texts

    def splitter(self, options: Options, prompt: list[int]) -> MakeSplitter | None:
        """What takes a chat's answers apart; None when they are content and nothing else."""
        tools = options.tools
        make: MakeSplitter | None = None
        if tools is not None:
            make = TOOL_PARSERS[self._tool_parser][0]
            if tools.is_named:
                make = functools.partial(NamedSplitter, tools.choice)
            elif tools.choice == "required":
                make = ListSplitter
        if self._reasoning_parser is None or options.sampling.grammar is not None:
            return make
        tail = b"".join(map(self.tokenizer.texts.raw, prompt[-16:])).decode("utf-8", "replace")
        is_open = tail.rfind("<think>") > tail.rfind("</think>")
        begins_inside = is_open or REASONING_PARSERS[self._reasoning_parser]
        inner = make or PlainSplitter
        return lambda: ReasoningSplitter(inner(), begins_inside=begins_inside)

    async def checked(
        self,
        options: Options,
        prompts: Sequence[list[int]],
        key: Key | None,
        peer: str = "",
    ) -> Options:
        """The options to start with: what `key` may ask for, under its own salt. Does what takes
        long: grammars, large prompts. `peer` says who asks where there is no key. Raises
        InvalidRequest or Overloaded.
        """
        options = self._allowed(options, key)
        if options.form is not None:
            grammar = await self.compiler.compile(
                options.form.job(), peer if key is None else key.client
            )
            sampling = dataclasses.replace(options.sampling, grammar=grammar)
            options = dataclasses.replace(options, sampling=sampling)
        for prompt in prompts:
            if LARGE_TOKENS <= len(prompt) <= self.max_model_len:
                await self._dispatcher.prepare(pack_tokens(prompt), options.cache_salt)
        return options

    def _allowed(self, options: Options, key: Key | None) -> Options:
        priorities = self.priorities if key is None else key.priorities or self.priorities
        # 0 is usual, or the next to it that is allowed
        usual = min(max(0, priorities.start), priorities.stop - 1)
        asked = usual if options.priority is None else -options.priority
        options = dataclasses.replace(options, priority=-asked)
        if asked not in priorities:
            whose = "without an API key" if key is None else "for this API key"
            raise InvalidRequest(
                f"priority must be from {priorities.start} to {priorities.stop - 1} {whose}"
                f" (lower is sooner), got {asked}",
                param="priority",
            )
        if key is None or not self._salts_by_key:
            return options
        return dataclasses.replace(options, cache_salt=key.salted(options.cache_salt))

    async def reading(self, fields: Fields, read: Callable[[], T]) -> T:
        """What `read` makes of a request's fields, in a thread when they are large."""
        return read() if fields.are_small else await self.in_thread(read)

    async def parse(self, body: bytes) -> dict[str, Any]:
        """A JSON object that came inside another request, a large one in a thread."""
        parse = functools.partial(parse_json_object, body)
        return parse() if len(body) < LARGE_BODY_BYTES else await self.in_thread(parse)

    async def message(self, kind: type[M], data: bytes) -> M:
        """A protobuf message, a large one in a thread. Raises InvalidRequest."""
        parse = functools.partial(parsed, kind, data)
        return parse() if len(data) < LARGE_BODY_BYTES else await self.in_thread(parse)

    async def in_thread(self, work: Callable[[], T]) -> T:
        """Beside the event loop. Few at a time, since they share the interpreter with it."""
        if self._threads is None:
            self._threads = anyio.CapacityLimiter(MAX_THREADS)
        return await anyio.to_thread.run_sync(work, limiter=self._threads)

    # --- generation -------------------------------------------------------------------------------

    def start(
        self,
        request_id: RequestId,
        prompts: Sequence[list[int]],
        options: Options,
        *,
        arrived_at: float,
        default_max_tokens: int | None,
        timeout_s: float | None = None,
        key: Key | None = None,
    ) -> "Generation":
        """Checks the prompts and sends them off. Raises whatever keeps one of them from being
        served.
        """
        n = options.sampling.n
        if len(prompts) * n > MAX_OUTPUTS:
            raise InvalidRequest(f"more than {MAX_OUTPUTS} outputs in one request", param="n")
        _check_scores(sum(map(len, prompts)) * n, options.sampling.prompt_logprobs)
        check_products(len(prompts) * n, options)
        limits = [self._max_tokens(len(p), options, default_max_tokens) for p in prompts]
        if not self.fleet.is_ready() and not self.admission.is_draining:
            raise NotReady("; ".join(self.fleet.reasons()), retry_after_s=1.0)
        ticket = self.admission.enter(len(prompts) * n, key)
        generation = Generation(self, options, prompts, ticket, arrived_at)
        self._active[generation] = None
        elapsed_s = self.clock.now() - arrived_at
        deadline_s = min(self._request_timeout_s, timeout_s or self._request_timeout_s) - elapsed_s
        try:
            for index, (prompt, max_tokens) in enumerate(zip(prompts, limits, strict=True)):
                request = self._request(request_id, index, prompt, max_tokens, options)
                request = dataclasses.replace(
                    request,
                    deadline_s=max(deadline_s, 0.001),
                    client="" if key is None else key.client,
                )
                generation.add(request, self._dispatcher)
        except BaseException:
            generation.close()
            raise
        self.metrics.prompt_tokens.inc(sum(map(len, prompts)))
        return generation

    def end_all(self, error: TandemError) -> None:
        """Whatever runs ends with `error`."""
        for generation in list(self._active):
            generation.fail(error)

    def forget(self, generation: "Generation") -> None:
        self._active.pop(generation, None)

    def _request(
        self,
        request_id: RequestId,
        index: int,
        prompt: list[int],
        max_tokens: int,
        options: Options,
    ) -> GenerateRequest:
        seed = self._draw_bits(64) if options.seed is None else options.seed % 2**64
        return GenerateRequest(
            request_id=f"{request_id}-{index}" if index else request_id,
            token_ids=pack_tokens(prompt),
            num_prompt_tokens=len(prompt),
            sampling=options.sampling_for(max_tokens, seed),
            priority=options.priority or 0,
            cache_salt=options.cache_salt,
        )

    def _max_tokens(self, num_prompt: int, options: Options, default: int | None) -> int:
        """How many tokens the answer may have. Raises when prompt and answer cannot fit."""
        if num_prompt == 0:
            raise InvalidRequest("the prompt is empty: it has no tokens", param="prompt")
        limit = self.max_model_len
        # an echo without an answer still computes one token, which nobody sees
        asked = options.max_tokens if options.max_tokens != 0 else 1
        if num_prompt + (asked or 1) > limit:
            is_prompt = num_prompt + 1 > limit
            wanted = "at least 1 token" if is_prompt else f"max_tokens of {asked}"
            total = num_prompt + (1 if is_prompt else asked or 1)
            raise ContextLengthExceeded(
                f"the prompt has {num_prompt} tokens, with {wanted} for the answer that is "
                f"{total}; the context holds {limit}",
                param="prompt" if is_prompt else "max_tokens",
            )
        pools = [w.state.max_prompt_tokens for w in self.fleet.linked() if w.can_decode]
        pool = max(pools, default=limit)
        if num_prompt + (asked or 1) > pool:
            raise PromptTooLargeForPool(
                f"the prompt has {num_prompt} tokens and its answer {asked or 1}; the KV pool of a "
                f"worker holds {pool}, however idle it is",
                param="prompt",
            )
        room = min(limit, pool) - num_prompt
        n = options.sampling.n
        if asked is None and n > 1:
            states = [w.state for w in self.fleet.linked() if w.can_decode]
            room = min(room, max((_room_of_each(num_prompt, n, s) for s in states), default=room))
            if room < 1:
                raise PromptTooLargeForPool(
                    f"the prompt has {num_prompt} tokens; the KV pool of a worker cannot hold it "
                    f"with {n} answers, however idle it is",
                    param="n",
                )
        max_tokens = asked if asked is not None else min(room, default or room)
        if options.sampling.min_tokens > max_tokens:
            raise InvalidRequest(
                f"min_tokens is {options.sampling.min_tokens}, but only {max_tokens} can be made",
                param="min_tokens",
            )
        return max_tokens


def _room_of_each(num_prompt: int, n: int, state: WorkerState) -> int:
    """Tokens that each of `n` answers can have in an idle pool, at least: full blocks of the prompt
    are shared, all others are each answer's own.
    """
    size = state.block_size
    # a pool has at most 2 + 1/16 exact pages per packed one, and 2 more
    num_packed = max(state.max_prompt_tokens // size - 1, (state.blocks.total - 2) * 16 // 49)
    num_shared = num_prompt // size
    num_exact = 1 if num_shared else n  # first blocks
    num_own = (num_packed + num_exact - num_shared) // n
    return (num_shared + num_own) * size - num_prompt


@dataclass(frozen=True, slots=True)
class ScoredToken:
    """A prompt token's log-probability, its rank (from 1) and the most likely alternatives."""

    logprobs: TokenLogprobs
    rank: int


PromptEntry = ScoredToken | None


def prompt_entries(scores: PromptLogprobs) -> list[ScoredToken]:
    logprobs = np.frombuffer(scores.logprobs, dtype="<f4").tolist()
    ranks = np.frombuffer(scores.ranks, dtype="<i4").tolist()
    shape = (len(logprobs), scores.num_top)
    top_ids = np.frombuffer(scores.top_ids, dtype="<i4").reshape(shape).tolist()
    top_logprobs = np.frombuffer(scores.top_logprobs, dtype="<f4").reshape(shape).tolist()
    return [
        ScoredToken(
            TokenLogprobs(logprob=own, top_ids=tuple(ids), top_logprobs=tuple(values)), rank
        )
        for own, rank, ids, values in zip(logprobs, ranks, top_ids, top_logprobs, strict=True)
    ]


def _check_scores(num_tokens: int, num_top: int | None) -> None:
    """`num_tokens` counts a prompt once for each of its outputs, as the answer does."""
    if num_top is not None and num_tokens * (num_top + 1) > MAX_SCORES:
        raise InvalidRequest(
            f"log-probabilities of {num_tokens} prompt tokens with {num_top} alternatives each are "
            f"too many for one answer; the limit is {MAX_SCORES}",
            param="prompt_logprobs",
        )


class Generation:
    """A call under way: a journey per prompt, a text per output. `close` it, whatever happens."""

    def __init__(
        self,
        service: TextService,
        options: Options,
        prompts: Sequence[list[int]],
        ticket: Ticket,
        arrived_at: float,
    ) -> None:
        n = options.sampling.n
        self._service = service
        self._ticket = ticket
        self._arrived_at = arrived_at
        self._n = n
        self._inbox = Inbox()
        self._journeys: list[Journey] = []
        self._options = options
        self._prompts = prompts
        self.prompt_texts: Sequence[str | None] = (None,) * len(prompts)
        """For `echo`: the prompts' texts, where they were given as texts."""
        self._prompt_scores: dict[int, list[PromptEntry]] = {}
        self._echoes: dict[int, tuple[str, tuple[TokenEntry, ...]]] = {}
        self._num_prompt_tokens = sum(map(len, prompts))
        self._outputs = [
            TextOutput(
                choice,
                service.texts_for(options),
                stops=options.stops,
                include_stop=options.include_stop,
                min_tokens=options.sampling.min_tokens,
                keeps_ids=options.returns_token_ids,
            )
            for choice in range(len(prompts) * n)
        ]
        self._num_unfinished = len(self._outputs)
        self._token_times: list[float | None] = [None] * len(self._outputs)
        self._first_token_at: float | None = None
        self._last_token_at = arrived_at
        self._has_queued = True
        self._has_closed = False

    def add(self, request: GenerateRequest, dispatcher: Placing) -> None:
        journey = Journey(
            request,
            prompt_index=len(self._journeys),
            inbox=self._inbox,
            dispatcher=dispatcher,
            clock=self._service.clock,
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
        found: list[Piece] = []
        while not found:
            events = await self._inbox.take()
            self._measure(len(events))
            now = self._last_token_at
            times = self._token_times
            gap = self._service.metrics.tokens.gap
            for prompt_index, output_index, token_id, finish_reason, logprobs in events:
                choice = prompt_index * self._n + output_index
                output = self._outputs[choice]
                before = times[choice]
                if before is not None:
                    gap(now - before)
                elif self._options.echo:
                    found.append(await self._echoed(choice))
                times[choice] = now
                if self._options.max_tokens == 0:
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
        return self._prompts[choice // self._n]

    def prompt_logprobs(self, choice: int) -> list[PromptEntry]:
        """For each prompt token, once a token has come; the first one has none."""
        index = choice // self._n
        if index not in self._prompt_scores:
            found = self._journeys[index].prompt_logprobs
            if found is None:
                return []
            self._prompt_scores[index] = [None, *prompt_entries(found)]
        return self._prompt_scores[index]

    def usage(self) -> Usage:
        return Usage(
            prompt_tokens=self._num_prompt_tokens,
            completion_tokens=sum(output.num_tokens for output in self._outputs),
            cached_tokens=sum(journey.num_cached_tokens for journey in self._journeys),
        )

    async def written(self, pieces: Sequence[Piece], write: Callable[[], bytes]) -> bytes:
        """What `write` makes of these pieces, in a thread when they carry many scores."""
        sampling = self._options.sampling
        num_tokens = 0
        if sampling.logprobs is not None:
            num_tokens += sum(len(piece.entries) for piece in pieces)
        if self._options.prompt_logprobs is not None:
            num_tokens += self._num_prompt_tokens * self._n
        if num_tokens * (1 + max(sampling.logprobs or 0, sampling.prompt_logprobs or 0)) < (
            LARGE_SCORES
        ):
            return write()
        return await self._service.in_thread(write)

    def fail(self, error: TandemError) -> None:
        self._inbox.fail(error)

    def close(self) -> None:
        """Workers are told if they still work on it. Idempotent."""
        if self._has_closed:
            return
        self._has_closed = True
        metrics = self._service.metrics
        for journey in self._journeys:
            journey.stop()
            metrics.retries.inc(journey.num_retries)
            metrics.preemptions.inc(journey.num_preemptions)
        self._ticket.leave()
        self._service.forget(self)
        if self.is_done:
            metrics.e2e.observe(self._service.clock.now() - self._arrived_at)
            longest = max(output.num_tokens for output in self._outputs)
            if longest > 1 and self._first_token_at is not None:
                metrics.tpot.observe((self._last_token_at - self._first_token_at) / (longest - 1))

    # --- inside -----------------------------------------------------------------------------------

    async def _echoed(self, choice: int) -> Piece:
        """The prompt as the first piece of an answer. Outputs of one prompt share it."""
        index = choice // self._n
        if index not in self._echoes:
            ids = self._prompts[index]
            num_scores = len(ids) * (1 + (self._options.sampling.prompt_logprobs or 0))
            if num_scores < LARGE_SCORES:
                self._echoes[index] = self._echo(index)
            else:
                self._echoes[index] = await self._service.in_thread(lambda: self._echo(index))
        text, entries = self._echoes[index]
        return Piece(choice, text, None, entries)

    def _echo(self, index: int) -> tuple[str, tuple[TokenEntry, ...]]:
        ids = self._prompts[index]
        text = self.prompt_texts[index]
        if text is None:
            text = self._service.tokenizer.decode(ids)
        count = self._options.sampling.logprobs
        if count is None:
            return text, ()
        scores = [
            None if entry is None else entry.logprobs.first(count)
            for entry in self.prompt_logprobs(index * self._n)
        ]
        return text, tuple(zip(ids, scores, strict=True))

    def _admitted(self) -> None:
        if self._has_queued:
            self._has_queued = False
            self._service.metrics.queue.observe(self._service.clock.now() - self._arrived_at)
        self._ticket.start()

    def _finished(
        self, prompt_index: int, output_index: int, workers_reason: FinishReason | None
    ) -> None:
        self._num_unfinished -= 1
        if workers_reason is None:
            self._journeys[prompt_index].finish_output(output_index)

    def _measure(self, num_tokens: int) -> None:
        metrics = self._service.metrics
        now = self._service.clock.now()
        if self._first_token_at is None:
            self._first_token_at = now
            metrics.ttft.observe(now - self._arrived_at)
        self._last_token_at = now
        metrics.tokens.num_tokens += num_tokens


def is_clients_fault(error: TandemError) -> bool:
    return 400 <= error.http_status < 500
