"""Second processes of the tests: `python workers.py FUNCTION ARGUMENTS...`. They talk in lines."""

import sys
import time

import numpy as np

import kvxfer

BLOCK = 4096
WAIT = 30.0


def say(text):
    print(text, flush=True)


def open_endpoint(name, **settings):
    return kvxfer.Endpoint(name, listen=settings.pop("listen", "127.0.0.1:0"), transports=["tcp"], **settings)


def pattern(blocks):
    return (np.arange(blocks * BLOCK, dtype=np.uint32) * 2654435761 >> 24).astype(np.uint8).reshape(blocks, BLOCK)


def prefill(key, count, hold="no", listen="127.0.0.1:0"):
    """Offers `count` blocks under a key. With `hold`, the last part is released only when told to."""
    count = int(count)
    memory = pattern(count)
    with open_endpoint("prefill", listen=listen) as endpoint:
        pool = endpoint.register(kvxfer.Layout.opaque(BLOCK, count), [memory], role="serve")
        offer = endpoint.offer(key, pool)
        offer.append((0, count, range(count)))
        say(endpoint.address)
        if hold != "no":
            offer.ready(0, 1)
            sys.stdin.readline()
        offer.finish(count)
        say(offer.wait(WAIT).members[0].verdict)
        pool.close_wait(WAIT)


def decode(address, key, count):
    """Claims `count` blocks and says whether they are those of `prefill`."""
    count = int(count)
    memory = np.zeros((count, BLOCK), np.uint8)
    with open_endpoint("decode") as endpoint:
        pool = endpoint.register(kvxfer.Layout.opaque(BLOCK, count), [memory], role="receive")
        claim = endpoint.claim(key, pool, [address])
        claim.fill((0, count, list(range(count))))
        say(claim.wait(WAIT).bytes)
        say("right" if (memory == pattern(count)).all() else "wrong")


def granter(count):
    """Grants blocks, says the grant and what came."""
    count = int(count)
    with open_endpoint("granter") as endpoint:
        pool = endpoint.allocate(kvxfer.Layout.opaque(BLOCK, count), role="receive")
        handle = pool.grant((0, count, range(count)))
        say(bytes(handle.grant).hex())
        arrival = handle.wait(WAIT)
        say(f"{arrival.bytes} {arrival.message.decode()}")


def exit_with(state):
    """Ends the interpreter in some state: what matters is that it ends well."""
    import asyncio
    import threading

    one, two = open_endpoint("one"), open_endpoint("two")
    layout = kvxfer.Layout.opaque(1 << 20, 64)
    source, destination = one.allocate(layout, "serve"), two.allocate(layout, "receive")
    keep = [one, two, source, destination]
    if state == "open":
        pass
    elif state == "in-flight":
        handle = destination.grant((0, 64, range(64)))
        keep += [handle, one.push(source, (0, 64, range(64)), handle.grant)]
    elif state == "claim":
        keep.append(two.claim("never", destination, [one.address]))
    elif state in ("waiting", "waiting-daemon"):
        claim = two.claim("never", destination, [one.address])

        def wait():
            try:
                claim.wait()
            except kvxfer.Closed:
                pass

        threading.Thread(target=wait, daemon=state == "waiting-daemon").start()
        time.sleep(0.2)
        if state == "waiting":
            claim.cancel()
    elif state == "polling-daemon":
        claim = two.claim("never", destination, [one.address])

        def poll():
            while True:
                try:
                    claim.wait(0.01)
                except kvxfer.Error:
                    pass

        for _ in range(4):
            threading.Thread(target=poll, daemon=True).start()
        time.sleep(0.2)
    elif state == "events-daemon":
        threading.Thread(target=lambda: one.events.wait(), daemon=True).start()
        time.sleep(0.2)
    elif state == "connect-daemon":
        threading.Thread(target=lambda: one.connect("192.0.2.1:9", timeout=60), daemon=True).start()
        time.sleep(0.2)
    elif state == "awaiting":
        # The loop is left running in a thread, with handles awaited.
        loop = asyncio.new_event_loop()

        async def wait_for(claim):
            await claim

        async def main():
            claims = [two.claim(f"never-{n}", destination, [one.address]) for n in range(8)]
            await asyncio.gather(*(wait_for(claim) for claim in claims), return_exceptions=True)

        threading.Thread(target=lambda: loop.run_until_complete(main()), daemon=True).start()
        time.sleep(0.2)
    elif state == "loop-stopped":
        claim = two.claim("never", destination, [one.address])
        loop = asyncio.new_event_loop()
        task = loop.create_task(_await(claim))
        loop.call_later(0.1, loop.stop)
        loop.run_forever()
        keep += [loop, task]
    elif state == "exception":
        keep.append(two.claim("never", destination, [one.address]))
        raise SystemExit(7)
    elif state == "collected":
        del one, two
        keep.clear()
    elif state == "module-globals":
        globals()["kept_by_the_module"] = (one, two, source, destination, two.claim("never", destination, [one.address]))
    elif state == "cycle":
        keep.append(keep)
    elif state == "atexit":
        import atexit

        atexit.register(lambda: one.metrics())
    else:
        raise SystemExit(f"no state {state}")
    say("ends")


async def _await(handle):
    await handle


if __name__ == "__main__":
    globals()[sys.argv[1]](*sys.argv[2:])
