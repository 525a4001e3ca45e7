"""What follows from the table of workers: which of them fit together, and who is left out, and why.

Pure functions of the workers; `fleet` keeps the result until something changes.
"""

from dataclasses import dataclass

from common.messages import PROTOCOL_VERSION, WorkerState
from common.types import Role
from router.fleet.breaker import State
from router.fleet.pairs import misfit
from router.fleet.worker import BlockNaming, Worker


@dataclass(frozen=True, slots=True, kw_only=True)
class View:
    """Computed anew after each change of the table. `excluded` says by `Worker.order` why one that
    answers is not in use, or None.
    """

    linked: list[Worker]
    excluded: dict[int, str | None]
    decoding: list[Worker]
    prefilling: list[Worker]
    namings: tuple[BlockNaming, ...]
    has_full_path: bool


def view_of(workers: list[Worker], is_remote_only: bool) -> View:
    linked = sorted((w for w in workers if w.is_linked), key=lambda w: w.order)
    first_of: dict[str, Worker] = {}
    for worker in linked:
        first_of.setdefault(worker.state.incarnation, worker)
    unique = [
        w
        for w in linked
        if first_of[w.state.incarnation] is w
        and w.state.protocol == PROTOCOL_VERSION
        and not w.state.draining
    ]
    partners = [w for w in unique if w.can_decode]
    excluded = {
        w.order: _basic_fault(w, first_of[w.state.incarnation]) or _misfit(w, partners)
        for w in linked
    }
    excluded |= _sick([w for w in linked if excluded[w.order] is None], is_remote_only)
    in_use = [w for w in linked if excluded[w.order] is None]
    decoding = [w for w in in_use if w.can_decode]
    prefilling = [w for w in in_use if not w.can_decode]
    alone = [w for w in decoding if not _has_full_path(w, prefilling)]
    if is_remote_only:
        excluded |= {w.order: "has no prefill worker, and may not do without" for w in alone}
        decoding = [w for w in decoding if w not in alone]
    return View(
        linked=linked,
        excluded=excluded,
        decoding=decoding,
        prefilling=prefilling,
        namings=tuple(sorted({n for w in in_use if (n := _naming(w.state)) is not None})),
        has_full_path=any(_has_full_path(w, prefilling) for w in decoding),
    )


def _has_full_path(worker: Worker, prefilling: list[Worker]) -> bool:
    return worker.state.role is Role.COLOCATED or any(
        misfit(prefill, worker) is None for prefill in prefilling
    )


def _sick(workers: list[Worker], is_remote_only: bool) -> dict[int, str | None]:
    """Which of the workers that could be used have failed too often, and are not."""
    sick = [w for w in workers if w.breaker.state is not State.CLOSED]
    decoding = [w for w in sick if w.can_decode]
    prefilling = [w for w in sick if not w.can_decode]
    num_decoding = sum(w.can_decode for w in workers)
    out = decoding[: num_decoding // 2]
    out += prefilling[: (len(workers) - num_decoding) // 2] if is_remote_only else prefilling
    return {w.order: f"has failed too often ({w.breaker.state})" for w in out}


def _naming(state: WorkerState) -> BlockNaming | None:
    try:
        return BlockNaming(bytes.fromhex(state.model_fingerprint), state.block_size)
    except ValueError:
        return None


def _basic_fault(worker: Worker, twin: Worker) -> str | None:
    state = worker.state
    if state.protocol != PROTOCOL_VERSION:
        return f"speaks protocol {state.protocol}, this router speaks {PROTOCOL_VERSION}"
    if twin is not worker:
        return f"is the same process as {twin.address}"
    if state.draining:
        return "is draining"
    return state.unhealthy or None


def _misfit(worker: Worker, partners: list[Worker]) -> str | None:
    """Compares `worker` with the decode-capable ones; the longest-known of them sets the model."""
    state = worker.state
    if partners and state.model_fingerprint != partners[0].state.model_fingerprint:
        first = partners[0].state
        return (
            f"serves model {state.model_fingerprint}, but {first.role} {partners[0].address} "
            f"serves {first.model_fingerprint}: give all workers the same --model"
        )
    if worker.can_decode:
        return None if worker.has_session else "has no session yet"
    if partners and all(misfit(worker, w) is not None for w in partners):
        other = partners[0]
        return f"{other.state.role} {other.address} cannot read its pages: {misfit(worker, other)}"
    return None
