"""What the router can do for a client. All fronts hold one `TextService`.

service.begin(ask, caller) -> Generation     encoded, checked, compiled, and sent off
"""

import dataclasses
from collections.abc import Callable, Sequence

from common.errors import NotReady, TandemError
from common.messages import GenerateRequest, pack_tokens
from common.types import RequestId
from router.admission.keys import Key
from router.fleet.prompt_hashes import LARGE_TOKENS
from router.generation.access import Access
from router.generation.ask import Ask, Caller
from router.generation.generation import Checked, Generation, Surroundings
from router.generation.limits import Room, check_call
from router.generation.options import Options
from router.generation.served_model import ServedModel
from router.grammar.compiler import GrammarCompiler

_LEAST_S = 0.001
"""What a request whose time is over is still given."""


class TextService:
    def __init__(
        self,
        model: ServedModel,
        around: Surroundings,
        *,
        access: Access,
        compiler: GrammarCompiler,
        request_timeout_s: float,
        wall_time: Callable[[], float],
        draw_bits: Callable[[int], int],
    ) -> None:
        """`wall_time` is for show only; `draw_bits(k)` is k random bits."""
        self.model = model
        self.access = access
        self.compiler = compiler
        self.fleet = around.fleet
        self.admission = around.admission
        self.metrics = around.metrics
        self.clock = around.clock
        self.threads = around.threads
        self._around = around
        self._request_timeout_s = request_timeout_s
        self._wall_time = wall_time
        self._draw_bits = draw_bits
        self._active: dict[Generation, None] = {}
        self.started_at = self.wall_clock()

    def new_request_id(self) -> RequestId:
        return f"{self._draw_bits(128):032x}"

    def new_call_id(self) -> str:
        return f"call_{self._draw_bits(96):024x}"

    def wall_clock(self) -> int:
        return int(self._wall_time())

    @property
    def is_ready(self) -> bool:
        """Whether a request would succeed."""
        return self.fleet.is_ready() and not self.admission.is_draining

    def reasons(self, key: Key | None) -> list[str]:
        """What keeps a request from succeeding. Who has no key where keys are in use is told no
        addresses.
        """
        found = self.fleet.reasons(with_workers=self.access.keys.is_open or key is not None)
        return ["the router is shutting down", *found] if self.admission.is_draining else found

    @property
    def max_model_len(self) -> int:
        """Longest prompt plus answer: the model's own limit, or a smaller one of the workers."""
        return self._room().max_model_len

    def _room(self) -> Room:
        workers = [worker.state for worker in self.fleet.linked() if worker.can_decode]
        limits = [state.max_model_len for state in workers]
        return Room(min([self.model.max_position_embeddings, *limits]), workers)

    # --- a call -----------------------------------------------------------------------------------

    async def begin(self, ask: Ask, caller: Caller) -> Generation:
        """Everything from a request that has been read to its first step on a worker. Raises
        whatever keeps it from being served; then nothing is left of it.
        """
        prompts = await self.model.encode(ask, self.max_model_len)
        options = self.access.allowed(ask.options, caller.key)
        options = await self._with_grammar(options, caller)
        await self._prepare(prompts, options)
        call = Checked(
            request_id=self.new_request_id(),
            prompts=prompts,
            texts=ask.texts(len(prompts)),
            options=options,
            arrived_at=caller.arrived_at,
            continued=ask.continued,
        )
        return self._start(call, caller, ask.default_max_tokens)

    async def _with_grammar(self, options: Options, caller: Caller) -> Options:
        if options.form is None:
            return options
        grammar = await self.compiler.compile(options.form.job(), caller.client)
        sampling = dataclasses.replace(options.sampling, grammar=grammar)
        return dataclasses.replace(options, sampling=sampling)

    async def _prepare(self, prompts: Sequence[list[int]], options: Options) -> None:
        """What takes long with large prompts."""
        for prompt in prompts:
            if LARGE_TOKENS <= len(prompt) <= self.max_model_len:
                await self._around.dispatcher.prepare(pack_tokens(prompt), options.cache_salt)

    def _start(self, call: Checked, caller: Caller, default_max_tokens: int | None) -> Generation:
        options, room = call.options, self._room()
        check_call(call.prompts, options)
        limits = [room.max_tokens(len(p), options, default_max_tokens) for p in call.prompts]
        self.admission.check_open()
        if not self.is_ready:
            raise NotReady("; ".join(self.fleet.reasons()), retry_after_s=1.0)
        ticket = self.admission.enter(len(call.prompts) * options.sampling.n, caller.key)
        generation = Generation(
            call, ticket, model=self.model, around=self._around, on_close=self._forget
        )
        self._active[generation] = None
        try:
            for index, max_tokens in enumerate(limits):
                generation.add(self._request(call, index, max_tokens, caller))
        except BaseException:
            generation.close()
            raise
        self.metrics.prompt_tokens.inc(sum(map(len, call.prompts)))
        return generation

    def _request(
        self, call: Checked, index: int, max_tokens: int, caller: Caller
    ) -> GenerateRequest:
        options, prompt = call.options, call.prompts[index]
        seed = self._draw_bits(64) if options.seed is None else options.seed % 2**64
        limit_s = min(self._request_timeout_s, caller.timeout_s or self._request_timeout_s)
        deadline_s = limit_s - (self.clock.now() - caller.arrived_at)
        return GenerateRequest(
            request_id=f"{call.request_id}-{index}" if index else call.request_id,
            token_ids=pack_tokens(prompt),
            num_prompt_tokens=len(prompt),
            sampling=options.sampling_for(max_tokens, seed),
            priority=options.priority or 0,
            cache_salt=options.cache_salt,
            deadline_s=max(deadline_s, _LEAST_S),
            client="" if caller.key is None else caller.key.client,
        )

    def end_all(self, error: TandemError) -> None:
        """Whatever runs ends with `error`."""
        for generation in list(self._active):
            generation.fail(error)

    def _forget(self, generation: Generation) -> None:
        self._active.pop(generation, None)
