"""How prompt chunks are interleaved with decoding: each worker's chunk budget, from the ITL target
and what the worker measured of its steps.

    WorkerState -> observed -> chunk_budget (common/scheduling) -> ChunkBudget on the session

A budget is sent when it has changed noticeably. It holds as long as its session; a worker with
several routers takes the smallest. Nothing is sent without a target, nor while the worker has not
measured enough; it uses the same function by itself then, and knows best what waits there.
"""

from collections.abc import Callable

from common.messages import WorkerState
from common.scheduling.chunk_budget import chunk_budget

NOTICEABLE_SHARE = 0.2
MAX_BUDGET = 65_536
"""Workers know their own maximum and cut a budget to it."""

Send = Callable[[int], None]


class Interleave:
    """`discovery` reports workers' states and sessions. Without a target nothing is sent."""

    def __init__(self, itl_target_s: float | None = None) -> None:
        self._itl_target_s = itl_target_s
        self._sends: dict[str, Send] = {}
        self._told: dict[str, int] = {}

    def session_opened(self, state: WorkerState, send: Send) -> None:
        """`state` is the last one known of the worker."""
        self._sends[state.incarnation] = send
        self._told.pop(state.incarnation, None)
        self.observed(state)

    def session_closed(self, incarnation: str) -> None:
        self._sends.pop(incarnation, None)
        self._told.pop(incarnation, None)

    def observed(self, state: WorkerState) -> None:
        send = self._sends.get(state.incarnation)
        budget = self.budget(state)
        if send is None or budget is None:
            return
        told = self._told.get(state.incarnation)
        if told is None or abs(budget - told) >= max(state.block_size, NOTICEABLE_SHARE * told):
            self._told[state.incarnation] = budget
            send(budget)

    def budget(self, state: WorkerState) -> int | None:
        """Prompt tokens beside the streams that run now, or beside a single one when none does.
        None without a target, and while the worker has not measured its steps.
        """
        if self._itl_target_s is None or state.step_times is None:
            return None
        return chunk_budget(
            state.step_times,
            self._itl_target_s,
            max(1, state.num_decodes),
            state.num_context_tokens,
            block_size=state.block_size,
            max_tokens=MAX_BUDGET,
        )
