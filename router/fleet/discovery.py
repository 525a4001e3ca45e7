"""Finds the workers: names to addresses, and for each of these a `Contact`
(router/fleet/contact.py).

`Discovery.run` owns everything: a loop per configured entry resolves its name again and again, and
every address found gets a task that lives until the name no longer leads there and the worker has
gone quiet. Entries are `host:port`, `name:port` with any number of addresses behind the name, or
`[v6]:port`.
"""

import asyncio
import logging
from collections.abc import Sequence

import anyio
from anyio.abc import TaskGroup

from common.addresses import split_address
from common.clock import Clock
from router.fleet.contact import Contact
from router.fleet.dispatch import Dispatcher
from router.fleet.fleet import Fleet
from router.fleet.interleave import Interleave
from router.fleet.reach import Reach
from router.fleet.worker import Worker

log = logging.getLogger(__name__)

LOCAL_AFTER_S = 5.0
"""A fleet without prefill workers serves without them after that."""


class Discovery:
    def __init__(
        self,
        entries: Sequence[str],
        *,
        fleet: Fleet,
        dispatcher: Dispatcher,
        reach: Reach,
        clock: Clock,
        interleave: Interleave | None = None,
    ) -> None:
        self._entries = [(entry, *split_address(entry)) for entry in dict.fromkeys(entries)]
        self._fleet = fleet
        self._dispatcher = dispatcher
        self._reach = reach
        self._clock = clock
        self._interleave = interleave or Interleave()
        self._wanted: dict[str, set[str]] = {}
        self._contacts: dict[str, Contact] = {}
        self._fleet_change = asyncio.Event()
        fleet.on_opened = self._opened

    async def run(self) -> None:
        async with anyio.create_task_group() as group:
            group.start_soon(self._follow_degradation)
            for entry, host, port in self._entries:
                group.start_soon(self._follow_name, group, entry, host, port)

    async def _follow_name(self, group: TaskGroup, entry: str, host: str, port: int) -> None:
        while True:
            addresses = await self._reach.resolve(host, port)
            if addresses:
                self._wanted[entry] = set(addresses)
                if entry not in addresses:
                    self._fleet.forget(entry)
            elif not self._wanted.get(entry):
                self._fleet.refuse(entry, "the name does not resolve")
            for address in addresses:
                if address not in self._contacts:
                    self._contacts[address] = self._contact(address)
                    group.start_soon(self._follow_address, address)
            await self._clock.sleep(self._reach.refresh_s)

    def _contact(self, address: str) -> Contact:
        return Contact(
            address,
            fleet=self._fleet,
            dispatcher=self._dispatcher,
            interleave=self._interleave,
            reach=self._reach,
            clock=self._clock,
            on_change=self._changed,
        )

    async def _follow_address(self, address: str) -> None:
        try:
            await self._contacts[address].run(lambda: self._is_wanted(address))
        finally:
            del self._contacts[address]

    def _is_wanted(self, address: str) -> bool:
        return any(address in addresses for addresses in self._wanted.values())

    def _opened(self, worker: Worker) -> None:
        log.warning(
            "%s %s has failed too often: it gets no requests, and is tested in %.0f s",
            worker.state.role, worker.address, self._fleet.probe_in_s(worker),
        )  # fmt: skip
        contact = self._contacts.get(worker.address)
        if contact is not None:
            contact.test(worker)

    def _changed(self) -> None:
        self._fleet_change.set()
        self._dispatcher.fleet_changed()

    async def _follow_degradation(self) -> None:
        """Lets decode workers compute prompts when no prefill worker comes, and says so."""
        was_degraded = False
        while True:
            self._fleet_change.clear()
            if self._fleet.lacks_prefill() and not self._fleet.is_remote_only:
                with self._clock.deadline(LOCAL_AFTER_S):
                    while self._fleet.lacks_prefill():
                        await self._fleet_change.wait()
                        self._fleet_change.clear()
                if self._fleet.lacks_prefill():
                    self._fleet.accept_local()
                    self._dispatcher.fleet_changed()
            if self._fleet.is_degraded() != was_degraded:
                was_degraded = not was_degraded
                if was_degraded:
                    log.warning("no prefill worker: decode workers compute prompts themselves")
                else:
                    log.info("no longer without prefill workers that could be used")
            await self._fleet_change.wait()
