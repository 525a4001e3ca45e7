"""Which prefill worker's pages a decode worker can read, by what both say of their pages and by the
links that it has refused. Pure.
"""

from collections.abc import Iterable

from common.layout_facts import fit
from common.types import Role
from router.fleet.worker import Worker


def misfit(prefill: Worker, decode: Worker) -> str | None:
    """Why the pages of `prefill` cannot be read by `decode`, and what to do; None: they can."""
    for refused in decode.state.refused_links:
        if refused.incarnation == prefill.state.incarnation:
            return refused.reason
    if prefill.kv_identity == decode.kv_identity:
        return None
    ours, theirs = decode.state, prefill.state
    if theirs.facts is not None and ours.facts is not None:
        found = fit(theirs.facts, ours.facts)
        if found.misfit is not None or found.converts:
            return found.misfit
    return (
        f"KV is stored as {theirs.layout} in blocks of {theirs.block_size} at the prefill worker "
        f"and as {ours.layout} in blocks of {ours.block_size} at the decode worker: start both "
        "with the same release, --kv-codec, --block-size and --weight-dtype"
    )


def other_bits(prefill: Worker, decode: Worker) -> str | None:
    """Why a prompt that `prefill` computed may be answered with other last bits than one that
    `decode` computed itself; None: with the same. For a pair that fits.
    """
    ours, theirs = decode.state, prefill.state
    found = []
    if ours.num_ranks != theirs.num_ranks:
        found.append(f"ranks: {theirs.num_ranks} at the prefill worker, {ours.num_ranks} here")
    facts = theirs.facts, ours.facts
    if facts[0] is not None and facts[1] is not None and fit(facts[0], facts[1]).converts:
        found.append(
            f"KV codec: {facts[0].codec} at the prefill worker, converted to {facts[1].codec} here"
        )
    return "; ".join(found) or None


def misfits(decode: Worker, workers: Iterable[Worker]) -> dict[str, str]:
    """By address, the prefill workers whose pages `decode` cannot read, and why."""
    found = {w.address: misfit(w, decode) for w in workers if _would_read(decode, w)}
    return {address: reason for address, reason in found.items() if reason is not None}


def others_bits(decode: Worker, workers: Iterable[Worker]) -> dict[str, str]:
    """By address, those whose pages give other last bits than those of `decode`, and why."""
    found = {
        w.address: other_bits(w, decode)
        for w in workers
        if _would_read(decode, w) and misfit(w, decode) is None
    }
    return {address: reason for address, reason in found.items() if reason is not None}


def _would_read(decode: Worker, worker: Worker) -> bool:
    return decode.state.role is Role.DECODE and worker.state.role is Role.PREFILL
