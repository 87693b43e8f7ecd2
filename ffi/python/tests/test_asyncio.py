"""Awaiting handles and events: many, cancelled, in several loops, in loops that go away."""

import asyncio
import gc
import threading
import weakref

import pytest
from conftest import WAIT, collect

import kvxfer

BLOCK = 256


@pytest.fixture
def pools(pair):
    prefill, decode = pair
    layout = kvxfer.Layout.opaque(BLOCK, 64)
    return prefill, prefill.allocate(layout, "serve"), decode, decode.allocate(layout, "receive")


def run(coroutine):
    async def bounded():
        return await asyncio.wait_for(coroutine, WAIT)

    return asyncio.run(bounded())


def hand_over(pools, key):
    prefill, serve, decode, receive = pools
    claim = decode.claim(key, receive, [prefill.address])
    claim.fill((0, 1, [hash(key) % 64]))
    offer = prefill.offer(key, serve)
    offer.append((0, 1, [3]))
    offer.finish(1)
    return claim, offer


def test_many_handles_at_once(pools):
    async def main():
        for round in range(5):
            handles = [handle for n in range(40) for handle in hand_over(pools, f"{round}-{n}")]
            results = await asyncio.gather(*handles)
            assert {type(result) for result in results} == {kvxfer.Arrival, kvxfer.Release}
            # Ended handles can be awaited again.
            assert (await handles[0]).bytes == BLOCK

    run(main())


def test_errors_are_raised(pools):
    _, _, decode, receive = pools

    async def main():
        claim = decode.claim("never", receive, ["127.0.0.1:1"])
        asyncio.get_running_loop().call_later(0.02, claim.cancel)
        with pytest.raises(kvxfer.Cancelled):
            await claim

    run(main())


def test_cancelling_a_wait_leaves_the_handle_alone(pools):
    _, _, decode, receive = pools

    async def main():
        claim = decode.claim("never", receive, ["127.0.0.1:1"])
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(claim, 0.02)
        tasks = [asyncio.ensure_future(_wait(claim)) for _ in range(10)]
        await asyncio.sleep(0)
        for task in tasks[:5]:
            task.cancel()
        await asyncio.sleep(0)
        assert not claim.done() and all(task.cancelled() for task in tasks[:5])
        claim.cancel()
        results = await asyncio.gather(*tasks[5:], return_exceptions=True)
        assert all(isinstance(result, kvxfer.Cancelled) for result in results)

    run(main())


async def _wait(handle):
    return await handle


def test_a_loop_that_goes_away_while_handles_are_awaited(pools):
    _, _, decode, receive = pools
    claim = decode.claim("never", receive, ["127.0.0.1:1"])
    loop = asyncio.new_event_loop()
    task = loop.create_task(_wait(claim))
    loop.call_soon(loop.stop)
    loop.run_forever()
    loop.close()
    claim.cancel()
    with pytest.raises(kvxfer.Cancelled):
        claim.wait(WAIT)
    seen = weakref.ref(loop)
    task._log_destroy_pending = False
    del task, loop
    collect()
    assert seen() is None
    # Another loop takes over.
    with pytest.raises(kvxfer.Cancelled):
        run(_wait(claim))


def test_several_loops_in_threads_wait_for_one_handle(pools):
    _, _, decode, receive = pools
    claim = decode.claim("never", receive, ["127.0.0.1:1"])
    results = []

    def loop():
        try:
            run(_wait(claim))
        except kvxfer.Cancelled as error:
            results.append(error)

    threads = [threading.Thread(target=loop) for _ in range(6)]
    for thread in threads:
        thread.start()
    claim.cancel()
    for thread in threads:
        thread.join(WAIT)
    assert len(results) == 6


def test_loops_do_not_leave_descriptors(pools):
    import os

    def descriptors():
        gc.collect()
        return len(os.listdir("/proc/self/fd"))

    for warm in range(2):
        run(asyncio.wait_for(_all(hand_over(pools, f"warm{warm}")), WAIT))
    before = descriptors()
    for n in range(50):
        run(asyncio.wait_for(_all(hand_over(pools, f"r{n}")), WAIT))
    assert descriptors() <= before + 2


async def _all(handles):
    return [await handle for handle in handles]


def test_events_as_they_come_until_the_endpoint_is_closed(pools):
    prefill, serve, decode, receive = pools

    async def main():
        seen = []

        async def follow():
            async for event in decode.events:
                seen.append((event.data, event.kind))

        following = asyncio.ensure_future(follow())
        for n in range(10):
            claim = decode.claim(f"r{n}", receive, [prefill.address], events=n)
            claim.fill((0, 1, [n]))
            offer = prefill.offer(f"r{n}", serve)
            offer.append((0, 1, [3]))
            offer.finish(1)
            await claim
            await offer
        kept = decode.claim("open", receive, [prefill.address], events=99)
        await asyncio.get_running_loop().run_in_executor(None, decode.close)
        await asyncio.wait_for(following, WAIT)
        assert [data for data, kind in seen if kind == "ended"] == [*range(10), 99]
        with pytest.raises(kvxfer.Closed):
            await kept

    run(main())


def test_following_events_can_be_cancelled(pools):
    decode = pools[2]

    async def main():
        async def follow():
            async for _ in decode.events:
                pass

        tasks = [asyncio.ensure_future(follow()) for _ in range(3)]
        await asyncio.sleep(0.02)
        for task in tasks:
            task.cancel()
        results = await asyncio.gather(*tasks, return_exceptions=True)
        assert all(isinstance(result, asyncio.CancelledError) for result in results)

    run(main())


def test_awaiting_without_a_loop_says_so(pools):
    claim, offer = hand_over(pools, "r")
    claim.wait(WAIT), offer.wait(WAIT)
    # What has ended needs no loop.
    with pytest.raises(StopIteration):
        claim.__await__().send(None)
    open_claim = pools[2].claim("never", pools[3], ["127.0.0.1:1"])
    with pytest.raises(RuntimeError, match="no running event loop"):
        open_claim.__await__().send(None)
    open_claim.cancel()


def test_leaving_the_iteration_leaves_the_rest_in_the_queue(pools):
    """However it is left: by break, by an exception, by being cancelled; and the other views see what it has left."""
    decode, receive = pools[2:]
    for number in range(50):
        receive.grant((0, 1, [0]), events=number).cancel()

    async def main():
        seen = []
        async for event in decode.events:
            seen.append(event.data)
            if len(seen) == 3:
                break
        seen += [event.data for event in decode.events.drain(2)]
        with pytest.raises(KeyError):
            async for event in decode.events:
                seen.append(event.data)
                raise KeyError

        async def follow():
            async for event in decode.events:
                seen.append(event.data)
                if len(seen) == 10:
                    task.cancel()
                await asyncio.sleep(0)

        task = asyncio.ensure_future(follow())
        with pytest.raises(asyncio.CancelledError):
            await task
        assert len(seen) == 10
        while len(seen) < 50:
            assert decode.events.wait(WAIT)
            seen += [event.data for event in decode.events.drain()]
        assert seen == list(range(50))

    run(main())
