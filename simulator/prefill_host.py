"""A prefill worker of the simulation: `PrefillScheduler` and one `HandoffSource` for each hand-off,
as prefill_worker/service.py runs them.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from common.errors import TandemError
from common.messages import HandoffRequest, PagesTaken
from common.scheduling.block_hash import HashChain
from common.scheduling.prompt_queue import Prompt, shareable
from common.scheduling.step_time import StepShape
from common.types import OutputKey
from kvtransfer.source import (
    AbortPrompt,
    Action,
    EndStream,
    Fact,
    HandoffSource,
    PagesFinished,
    PeerFinished,
    PromptDone,
    Release,
    Send,
    Taken,
)
from prefill_worker.scheduler import ChunkComputed, PrefillScheduler, PromptComputed
from prefill_worker.scheduler import Fact as SchedulerFact
from simulator.events import EventQueue
from simulator.host import Host, WorkerSetup, sampled
from worker.watch import Load

if TYPE_CHECKING:
    from simulator.decode_host import Pull


@dataclass(slots=True, eq=False)
class _Handoff:
    key: OutputKey
    pull: "Pull"
    token_id: int
    source: HandoffSource = field(default_factory=HandoffSource)


class PrefillHost(Host):
    def __init__(self, setup: WorkerSetup, order: int, events: EventQueue) -> None:
        super().__init__(setup, order, events)
        self.scheduler = PrefillScheduler(
            self.cache, chunk_tokens=setup.chunk_tokens, max_model_len=setup.max_model_len
        )
        self._handoffs: dict[OutputKey, _Handoff] = {}
        self._by_pull: dict[int, _Handoff] = {}
        self._num_handoffs = 0

    def check_invariants(self) -> None:
        self.scheduler.check_invariants()

    def _load(self) -> Load:
        scheduler = self.scheduler
        return Load(
            blocks=self.cache.load,
            running=scheduler.num_running,
            waiting=scheduler.num_waiting,
            num_queued_tokens=scheduler.num_queued_tokens,
            max_prompt_tokens=min(self.setup.max_model_len, self.cache.max_tokens),
            chunk_tokens=scheduler.chunk_tokens,
            step_times=self.setup.step_times,
        )

    # --- messages ---------------------------------------------------------------------------------

    def open(self, message: HandoffRequest, chain: HashChain, pull: "Pull") -> None:
        """A hand-off begins. `chain` covers the prompt: both sides would compute the same one."""
        request, entry = message.request, pull.entry
        self._num_handoffs += 1
        key = f"{request.request_id}#{self._num_handoffs}"
        full = chain.full.copy()
        prompt = Prompt(
            key=key,
            token_ids=entry.token_ids,
            num_prompt_tokens=request.num_prompt_tokens,
            sampling=request.sampling,
            hashes=shareable(full, entry.num_tokens, self.cache.block_size, request.sampling),
            output_index=request.output_index,
            priority=request.priority,
            client=request.client,
        )
        try:
            self.scheduler.add(prompt, full, chain.open, message.num_held_blocks, self.events.now)
        except TandemError as error:
            self._to(pull.host.handoff_failed, pull, error)
            return
        handoff = _Handoff(key=key, pull=pull, token_id=pull.host.token_of(request.request_id))
        self._handoffs[key] = self._by_pull[id(pull)] = handoff
        self._wake()

    def taken(self, pull: "Pull", message: PagesTaken) -> None:
        handoff = self._by_pull.get(id(pull))
        if handoff is not None:
            self._on(handoff, Taken(blocks=message.blocks))
            self._wake()

    def finished(self, pull: "Pull") -> None:
        """The receiver half-closes."""
        handoff = self._by_pull.get(id(pull))
        if handoff is not None:
            self._on(handoff, PeerFinished())
            self._wake()

    # --- steps ------------------------------------------------------------------------------------

    def _wake(self) -> None:
        if self._plan is None:
            self._begin()

    def _begin(self) -> None:
        now = self.events.now
        plan = self.scheduler.plan(now)
        if plan is None:
            return
        seconds = self.setup.costs.step_s(StepShape.of(plan, 0)) if plan.chunks else 0.0
        self._run(plan, now, seconds)

    def _step_ended(self, life: int) -> None:
        if life != self._life:
            return
        plan, self._plan = self._plan, None
        assert plan is not None
        self._observe_peak(self.scheduler.num_running)
        self.record.num_prompt_tokens += plan.num_tokens
        result = sampled(plan, self._token_of)
        for fact in self.scheduler.apply(plan, result, self.events.now):
            self._on_scheduler(fact)
        self._begin()

    def _token_of(self, key: OutputKey) -> int:
        handoff = self._handoffs.get(key)
        return 0 if handoff is None else handoff.token_id

    def _on_scheduler(self, fact: SchedulerFact) -> None:
        handoff = self._handoffs.get(fact.key)
        match fact:
            case ChunkComputed(pages=pages):
                if handoff is None:
                    self.scheduler.release((page.kind, page.block_id) for page in pages)
                else:
                    self._on(handoff, PagesFinished(pages=pages))
            case PromptComputed() if handoff is not None:
                done = PromptDone(
                    token_ids=fact.token_ids,
                    logprobs=fact.logprobs,
                    num_cached_tokens=fact.num_cached_tokens,
                )
                self._on(handoff, done)

    # --- hand-offs --------------------------------------------------------------------------------

    def _on(self, handoff: _Handoff, fact: Fact) -> None:
        self._perform(handoff, handoff.source.on(fact))

    def _perform(self, handoff: _Handoff, actions: Iterable[Action]) -> None:
        pull = handoff.pull
        for action in actions:
            match action:
                case Send(message=message):
                    self._to(pull.host.from_prefill, pull, message)
                case Release(pages=pages):
                    self.scheduler.release(pages)
                case AbortPrompt():
                    self.scheduler.abort(handoff.key)
                case EndStream(error=error):
                    assert error is None
                    del self._handoffs[handoff.key]
                    del self._by_pull[id(pull)]
