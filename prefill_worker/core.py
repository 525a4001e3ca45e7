"""Everything that a prefill worker decides. Facts in, actions out; no clock, no streams, no device.

    begin(request)        a prompt joins the line           -> its key
    receive, lost, stalled   what came of its stream        -> actions
    plan, stored, apply   a step: decided, its pages complete, its samples there
    end                   its stream is over: nothing stays held

Each hand-off has a `HandoffSource` (kvtransfer/source.py), which decides about its pages; the
`PrefillScheduler` decides about steps. The core joins the two: pages that a chunk finishes go to
the source, pages that the source lets go back to the scheduler. The service (service.py) carries
the actions out over gRPC, the simulator's host on virtual time.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from common.errors import MalformedMessage, PullFailed, TandemError
from common.handoff_messages import FirstTokens, HandoffRequest, PagesReady, PagesTaken
from common.scheduling.block_hash import HashChain, HashRoots
from common.scheduling.kv_cache import KvCache
from common.scheduling.plan import StepPlan, StepResult
from common.scheduling.prompt_pages import PromptNames
from common.scheduling.prompt_queue import Prompt, shareable
from common.types import OutputKey
from kvtransfer import source
from kvtransfer.source import HandoffSource
from prefill_worker.scheduler import ChunkComputed, PrefillScheduler, PromptComputed, PromptFailed
from prefill_worker.scheduler import Fact as StepFact
from worker.watch import Load

# --- actions --------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Send:
    key: OutputKey
    message: PagesReady | FirstTokens


@dataclass(frozen=True, slots=True, kw_only=True)
class EndStream:
    """After what was sent before; at once when the receiver takes nothing any more."""

    key: OutputKey
    error: TandemError | None = None
    at_once: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class NoteChunk:
    """For those who keep count: the `number`-th chunk of a prompt, and the blocks handed out."""

    key: OutputKey
    number: int
    num_tokens: int
    blocks: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class NoteFirstTokens:
    """For those who keep count. `num_cached_tokens` without those that the receiver holds itself,
    which it has counted.
    """

    key: OutputKey
    num_tokens: int
    num_cached_tokens: int
    seconds: float


Action = Send | EndStream | NoteChunk | NoteFirstTokens


@dataclass(slots=True, eq=False)
class _Handoff:
    key: OutputKey
    arrival: float
    num_held_tokens: int
    """Leading ones that the receiver has in its own prefix cache."""
    source: HandoffSource = field(default_factory=HandoffSource)
    stalls_at: float = math.inf
    num_chunks: int = 0
    was_aborted: bool = False
    error: TandemError | None = None


class PrefillCore:
    def __init__(
        self,
        cache: KvCache,
        *,
        roots: HashRoots,
        chunk_tokens: int,
        max_model_len: int,
        handoff_stall_s: float,
    ) -> None:
        """A receiver that takes no page for `handoff_stall_s` is given up."""
        self.scheduler = PrefillScheduler(
            cache, chunk_tokens=chunk_tokens, max_model_len=max_model_len
        )
        self._cache = cache
        self._roots = roots
        self._max_model_len = max_model_len
        self._handoff_stall_s = handoff_stall_s
        self._handoffs: dict[OutputKey, _Handoff] = {}
        self._num_handoffs = 0

    @property
    def num_handoffs(self) -> int:
        return len(self._handoffs)

    def load(self) -> Load:
        return Load(
            blocks=self._cache.load,
            running=self.scheduler.num_running,
            waiting=self.scheduler.num_waiting,
            num_queued_tokens=self.scheduler.num_queued_tokens,
            max_prompt_tokens=min(self._max_model_len, self._cache.max_tokens),
            chunk_tokens=self.scheduler.chunk_tokens,
            step_times=self.scheduler.step_times,
        )

    # --- hand-offs --------------------------------------------------------------------------------

    def chain(self, salt: str, token_ids: NDArray[np.int32]) -> HashChain:
        """Names of a prompt's blocks."""
        chain = HashChain(self._roots.root(salt), self._cache.block_size)
        chain.extend(token_ids)
        return chain

    def begin(
        self, message: HandoffRequest, token_ids: NDArray[np.int32], chain: HashChain, now: float
    ) -> OutputKey:
        """Puts the prompt in line; `chain` covers it. Raises when it can never be computed here."""
        request, size = message.request, self._cache.block_size
        if not 0 <= message.num_held_blocks <= (len(token_ids) - 1) // size:
            raise MalformedMessage("num_held_blocks is out of range")
        self._num_handoffs += 1
        # numbered, since a retry may come before its first try is forgotten
        key = f"{request.request_id}#{self._num_handoffs}"
        prompt = Prompt(
            key=key,
            token_ids=token_ids,
            num_prompt_tokens=request.num_prompt_tokens,
            sampling=request.sampling,
            hashes=shareable(chain.full, len(token_ids), size, request.sampling),
            output_index=request.output_index,
            priority=request.priority,
            client=request.client,
        )
        names = PromptNames.of(chain, len(token_ids), size)
        self.scheduler.add(prompt, names, message.num_held_blocks, now)
        self._handoffs[key] = _Handoff(
            key=key, arrival=now, num_held_tokens=message.num_held_blocks * size
        )
        return key

    def receive(self, key: OutputKey, message: object | None, now: float) -> list[Action]:
        """What the receiver says; None: it wants nothing more."""
        match message:
            case None:
                return self._on(self._handoffs[key], source.PeerFinished(), now)
            case PagesTaken(blocks=blocks):
                return self._on(self._handoffs[key], source.Taken(blocks=blocks), now)
            case _:
                return self._lose(key, MalformedMessage("expected PagesTaken"), now)

    def lost(self, key: OutputKey, now: float) -> list[Action]:
        """Its stream broke."""
        return self._on(self._handoffs[key], source.StreamLost(), now)

    def stall_in_s(self, key: OutputKey, now: float) -> float:
        """How long from now until a receiver that does nothing is given up; it may be later by
        then.
        """
        return min(self._handoff_stall_s, self._handoffs[key].stalls_at - now)

    def stalled(self, key: OutputKey, now: float) -> list[Action]:
        """Ends the hand-off if its time is up."""
        if self._handoffs[key].stalls_at > now:
            return []
        return [
            replace(action, at_once=True) if isinstance(action, EndStream) else action
            for action in self._lose(
                key,
                PullFailed(
                    f"the receiver took no page for {self._handoff_stall_s:g} s; "
                    "the hand-off was ended"
                ),
                now,
            )
        ]

    def give_back_all(self, error: TandemError, now: float) -> list[Action]:
        """Whatever is here goes elsewhere; receivers are told why."""
        return [action for key in self._handoffs for action in self._lose(key, error, now)]

    def end(self, key: OutputKey, now: float) -> str:
        """Its stream is over, however that came about: nothing stays held. Returns how it ended:
        error, abort or done.
        """
        handoff = self._handoffs[key]
        self._on(handoff, source.StreamLost(), now)
        del self._handoffs[key]
        if handoff.error is not None:
            return "error"
        return "abort" if handoff.was_aborted else "done"

    # --- steps ------------------------------------------------------------------------------------

    def plan(self, now: float) -> StepPlan | None:
        """The next step; None when there is nothing to do."""
        return self.scheduler.plan(now)

    def stored(self, plan: StepPlan, now: float) -> list[Action]:
        """The step's pages are complete: they are on their way while the logits are computed."""
        return self._on_step(self.scheduler.stored(plan), now)

    def apply(self, plan: StepPlan, result: StepResult, now: float) -> list[Action]:
        return self._on_step(self.scheduler.apply(plan, result, now), now)

    def check_invariants(self) -> None:
        self.scheduler.check_invariants()
        for handoff in self._handoffs.values():
            handoff.source.check_invariants()

    # --- inside -----------------------------------------------------------------------------------

    def _on_step(self, facts: Sequence[StepFact], now: float) -> list[Action]:
        return [action for fact in facts for action in self._on_fact(fact, now)]

    def _on_fact(self, fact: StepFact, now: float) -> list[Action]:
        handoff = self._handoffs.get(fact.key)
        match fact:
            case ChunkComputed(pages=pages) if handoff is None:
                self.scheduler.release((page.kind, page.block_id) for page in pages)
                return [NoteChunk(key=fact.key, number=0, num_tokens=fact.num_tokens)]
            case ChunkComputed(pages=pages) if handoff is not None:
                note = NoteChunk(
                    key=fact.key,
                    number=handoff.num_chunks,
                    num_tokens=fact.num_tokens,
                    blocks=tuple(page.index for page in pages),
                )
                handoff.num_chunks += 1
                return [note, *self._on(handoff, source.PagesFinished(pages=pages), now)]
            case PromptComputed(first_tokens=first) if handoff is not None:
                told = NoteFirstTokens(
                    key=fact.key,
                    num_tokens=len(first.token_ids),
                    num_cached_tokens=max(0, first.num_cached_tokens - handoff.num_held_tokens),
                    seconds=now - handoff.arrival,
                )
                return [told, *self._on(handoff, source.PromptDone(first), now)]
            case PromptFailed(error=error) if handoff is not None:
                return self._on(handoff, source.PromptLost(error=error), now)
        return []

    def _lose(self, key: OutputKey, error: TandemError, now: float) -> list[Action]:
        """The prompt is not computed here any more."""
        actions = self._on(self._handoffs[key], source.PromptLost(error=error), now)
        self.scheduler.abort(key)
        return actions

    def _on(self, handoff: _Handoff, fact: source.Fact, now: float) -> list[Action]:
        actions: list[Action] = []
        for action in handoff.source.on(fact):
            match action:
                case source.Send(message=message):
                    actions.append(Send(key=handoff.key, message=message))
                case source.Release(pages=pages):
                    self.scheduler.release(pages)
                case source.AbortPrompt():
                    handoff.was_aborted = True
                    self.scheduler.abort(handoff.key)
                case source.EndStream(error=error):
                    handoff.error = error
                    actions.append(EndStream(key=handoff.key, error=error))
        waits_for_receiver = bool(handoff.source.held)
        handoff.stalls_at = now + self._handoff_stall_s if waits_for_receiver else math.inf
        return actions
