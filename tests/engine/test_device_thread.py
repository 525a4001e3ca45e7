"""The device thread: one job at a time, in order; answers and errors come back to the loop."""

import asyncio
import threading

import pytest

from engine.device_thread import DeviceThread


def test_jobs_run_in_order_on_one_thread() -> None:
    async def main() -> None:
        ran: list[tuple[int, int]] = []

        def job(number: int, *, double: bool = False) -> int:
            ran.append((number, threading.get_ident()))
            return number * (2 if double else 1)

        with DeviceThread() as device:
            found = await asyncio.gather(*(device.run(job, i, double=True) for i in range(20)))
        assert found == [2 * i for i in range(20)]
        assert [number for number, _ in ran] == list(range(20))
        assert {thread for _, thread in ran} != {threading.get_ident()}
        assert len({thread for _, thread in ran}) == 1

    asyncio.run(main())


def test_errors_reach_the_one_who_asked_and_nobody_else() -> None:
    def fail() -> None:
        raise ValueError("no")

    async def main() -> None:
        with DeviceThread() as device:
            with pytest.raises(ValueError, match="no"):
                await device.run(fail)
            assert await device.run(lambda: 3) == 3

    asyncio.run(main())


def test_run_first_goes_ahead_of_what_waits() -> None:
    async def main() -> None:
        ran: list[str] = []
        begun, go = threading.Event(), threading.Event()

        def block() -> None:
            begun.set()
            go.wait()

        with DeviceThread() as device:
            busy = asyncio.ensure_future(device.run(block))
            await asyncio.to_thread(begun.wait)
            step = asyncio.ensure_future(device.run(ran.append, "step"))
            await asyncio.sleep(0)
            landing = asyncio.ensure_future(device.run_first(ran.append, "landing"))
            await asyncio.sleep(0)
            go.set()
            await asyncio.gather(busy, step, landing)
        assert ran == ["landing", "step"]

    asyncio.run(main())


def test_a_cancelled_waiter_does_not_stop_its_job() -> None:
    async def main() -> None:
        done = threading.Event()
        begun, go = threading.Event(), threading.Event()

        def job() -> None:
            begun.set()
            go.wait()
            done.set()

        with DeviceThread() as device:
            waiting = asyncio.ensure_future(device.run(job))
            await asyncio.to_thread(begun.wait)
            queued = asyncio.ensure_future(device.run(done.is_set))
            await asyncio.sleep(0)
            waiting.cancel()
            with pytest.raises(asyncio.CancelledError):
                await waiting
            go.set()
            assert await queued

    asyncio.run(main())


def test_closing_finishes_what_was_handed_in_and_takes_no_more() -> None:
    async def main() -> None:
        ran: list[int] = []
        device = DeviceThread()
        with device:
            jobs = [asyncio.ensure_future(device.run(ran.append, i)) for i in range(5)]
            await asyncio.sleep(0)
        await asyncio.gather(*jobs)
        assert ran == [0, 1, 2, 3, 4]
        with pytest.raises(RuntimeError, match="closed"):
            await device.run(ran.append, 5)

    asyncio.run(main())
