"""NIXL's agent as the transport uses it: one that does not keep a core busy, and the lists of rows
that are prepared once for many reads.

Called on the transport's thread.
"""

import logging
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

# NIXL reads these when it is first imported; its own INFO lines are not for our users
os.environ.setdefault("NIXL_LOG_LEVEL", "WARN")

import torch

if torch.version.cuda is not None and torch.version.cuda.startswith("13"):
    import nixl_cu13._bindings as bindings
    from nixl_cu13._api import nixl_agent, nixl_agent_config
else:
    import nixl_cu12._bindings as bindings
    from nixl_cu12._api import nixl_agent, nixl_agent_config

from common.errors import ConfigError
from common.handoff_messages import Memory, PoolAddress
from kvtransfer.descriptors import WHOLE, Cut, regions_of, rows_of

log = logging.getLogger(__name__)

Disconnected: type[Exception] = bindings.nixlRemoteDisconnectError

PROGRESS_PAUSE_US = 100
OURSELVES = "NIXL_INIT_AGENT"


def open_agent(name: str, arenas: Sequence[Any]) -> Any:
    """An agent that knows the memory of these arenas. Raises ConfigError when UCX has no lane that
    works.
    """
    try:
        agent = _PacedAgent(name, nixl_agent_config(backends=["UCX"]))
        for arena in arenas:
            register(agent, arena)
    except Exception as error:
        raise ConfigError(
            f"NIXL cannot start: {error} (UCX_TLS is {os.environ.get('UCX_TLS', 'not set')}). "
            "Allow a lane that reports peer failure, for example UCX_TLS=tcp,self"
        ) from error
    return agent


def register(agent: Any, arena: Any) -> None:
    for tensor in (arena.packed, arena.exact):
        if tensor.numel():
            agent.register_memory([tensor])


def address_of(arena: Any, heads: tuple[int, ...], name: str, metadata: bytes) -> PoolAddress:
    is_cuda = arena.packed.is_cuda
    return PoolAddress(
        agent_name=name,
        agent_metadata=metadata,
        pages=regions_of(arena),
        heads=heads,
        memory=Memory.DEVICE if is_cuda else Memory.HOST,
        device=arena.packed.get_device() if is_cuda else 0,
    )


@dataclass(slots=True)
class Rows:
    """The rows of one pool or landing zone, prepared for the reads of agent `name` (of ours:
    `OURSELVES`), for each cut when it is wanted first.
    """

    agent: Any
    name: str
    address: PoolAddress
    _prepared: dict[Cut, Any] = field(default_factory=dict)

    def prepared(self, cut: Cut = WHOLE) -> Any:
        found = self._prepared.get(cut)
        if found is None:
            rows = rows_of(self.address.pages, cut, self.address.device)
            found = self.agent.prep_xfer_dlist(self.name, rows, mem_type=str(self.address.memory))
            self._prepared[cut] = found
        return found

    def remove(self) -> None:
        """With the other worker's agent that they belong to."""
        try:
            for found in self._prepared.values():
                found.release()
            self.agent.remove_remote_agent(self.name)
        except Exception as error:
            log.info("removing %s: %s", self.name, error)


def add_remote(agent: Any, address: PoolAddress) -> Rows:
    name = agent.add_remote_agent(address.agent_metadata)
    return Rows(agent, name.decode() if isinstance(name, bytes) else str(name), address)


class _PacedAgent(nixl_agent):  # type: ignore[misc,unused-ignore]
    """An agent whose progress thread pauses between rounds.

    NIXL's Python class fixes the pause at 0, with which that thread keeps one core busy for ever,
    also in a worker that has nothing to do. At 100 us it takes 3 %. (The thread itself is needed:
    without it a source does not answer when somebody connects.)
    """

    def __init__(self, name: str, config: nixl_agent_config) -> None:
        create = bindings.nixlAgent

        def create_paced(agent_name: str, agent_config: Any) -> Any:
            agent_config.pthrDelay = PROGRESS_PAUSE_US
            return create(agent_name, agent_config)

        bindings.nixlAgent = create_paced
        try:
            super().__init__(name, config)
        finally:
            bindings.nixlAgent = create
