"""A prefill worker of the simulation: carries out on virtual time what prefill_worker/core.py
decides.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Protocol

from common.errors import TandemError
from common.handoff_messages import FirstTokens, HandoffRequest, PagesReady
from common.messages import unpack_tokens
from common.scheduling.block_hash import HashChain, HashRoots
from common.scheduling.step_time import StepShape
from common.types import OutputKey, RequestId
from decode_worker.actions import PullId
from prefill_worker.core import Action, EndStream, PrefillCore, Send
from simulator.events import EventQueue
from simulator.host import MODEL_FINGERPRINT, Host, WorkerSetup, sampled
from worker.watch import Load


class Receiver(Protocol):
    """The host of a decode worker, as hand-offs know it."""

    def token_of(self, request_id: RequestId) -> int: ...

    def from_prefill(self, pull: "Pull", message: PagesReady | FirstTokens) -> None: ...

    def handoff_failed(self, pull: "Pull", error: TandemError) -> None: ...


@dataclass(frozen=True, slots=True, eq=False)
class Pull:
    """The hand-off's stream, as its two ends know it."""

    host: Receiver
    source: "PrefillHost"
    id: PullId


@dataclass(frozen=True, slots=True, eq=False)
class _Handoff:
    pull: Pull
    token_id: int


class PrefillHost(Host):
    def __init__(self, setup: WorkerSetup, order: int, events: EventQueue) -> None:
        super().__init__(setup, order, events)
        self._core: PrefillCore = PrefillCore(
            self.cache,
            roots=HashRoots(MODEL_FINGERPRINT, setup.layout.block_size),
            chunk_tokens=setup.chunk_tokens,
            max_model_len=setup.max_model_len,
            handoff_stall_s=math.inf,
        )
        self._handoffs: dict[OutputKey, _Handoff] = {}
        self._keys: dict[int, OutputKey] = {}
        """By the pull's id."""

    def _load(self) -> Load:
        """With the step times that a worker would have measured long ago."""
        return replace(self._core.load(), step_times=self.setup.step_times)

    # --- messages ---------------------------------------------------------------------------------

    def open(self, message: HandoffRequest, chain: HashChain, pull: Pull) -> None:
        """A hand-off begins. `chain` covers the prompt: both sides would compute the same one."""
        token_ids = unpack_tokens(message.request.token_ids)
        try:
            key = self._core.begin(message, token_ids, chain, self.events.now)
        except TandemError as error:
            self._to(pull.host.handoff_failed, pull, error)
            return
        token_id = pull.host.token_of(message.request.request_id)
        self._handoffs[key] = _Handoff(pull, token_id)
        self._keys[id(pull)] = key
        self._wake()

    def hear(self, pull: Pull, message: object | None) -> None:
        """From the receiver; None: it half-closes."""
        key = self._keys.get(id(pull))
        if key is not None:
            self._perform(self._core.receive(key, message, self.events.now))
            self._wake()

    def _perform(self, actions: Iterable[Action]) -> None:
        for action in actions:
            match action:
                case Send(key=key, message=message):
                    pull = self._handoffs[key].pull
                    self._to(pull.host.from_prefill, pull, message)
                case EndStream(key=key, error=error):
                    assert error is None
                    pull = self._handoffs.pop(key).pull
                    del self._keys[id(pull)]
                    self._core.end(key, self.events.now)

    # --- steps ------------------------------------------------------------------------------------

    def _wake(self) -> None:
        if self._plan is None:
            self._begin()

    def _begin(self) -> None:
        now = self.events.now
        plan = self._core.plan(now)
        if plan is None:
            return
        seconds = self.setup.costs.step_s(StepShape.of(plan, 0)) if plan.chunks else 0.0
        self._run(plan, now, seconds)

    def _step_ended(self, life: int) -> None:
        if life != self._life:
            return
        plan, self._plan = self._plan, None
        assert plan is not None
        self._observe_peak(self._core.scheduler.num_running)
        self.record.num_prompt_tokens += plan.num_tokens
        result = sampled(plan, self._token_of)
        self._perform(self._core.apply(plan, result, self.events.now))
        self._begin()

    def _token_of(self, key: OutputKey) -> int:
        handoff = self._handoffs.get(key)
        return 0 if handoff is None else handoff.token_id
