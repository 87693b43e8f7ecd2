"""Many hand-overs at once with asyncio: `python await_many.py`. Both workers live in this process, for brevity."""

import asyncio

import kvxfer

REQUESTS, BLOCK_BYTES, BLOCKS = 100, 64 << 10, 400


async def serve(endpoint: kvxfer.Endpoint, pool: kvxfer.Pool, request: int) -> None:
    """The prefill worker's side of one request."""
    offer = endpoint.offer(f"request-{request}", pool)
    offer.append((0, 4, range(4 * request, 4 * request + 4)))
    offer.finish(4)
    await offer


async def fetch(endpoint: kvxfer.Endpoint, pool: kvxfer.Pool, request: int, source: kvxfer.EndpointAddress) -> int:
    """The decode worker's side of one request."""
    claim = endpoint.claim(f"request-{request}", pool, [source], events=request)
    claim.fill((0, 4, range(4 * request, 4 * request + 4)))
    arrival = await claim
    return arrival.bytes


async def count_events(endpoint: kvxfer.Endpoint) -> int:
    """How many requests ended, as the event queue tells it."""
    ended = 0
    async for event in endpoint.events:
        ended += event.kind == "ended"
    return ended


async def main() -> None:
    layout = kvxfer.Layout.opaque(BLOCK_BYTES, BLOCKS)
    prefill = kvxfer.Endpoint("prefill-0", listen="127.0.0.1:0", transports=["tcp"])
    decode = kvxfer.Endpoint("decode-0", listen="127.0.0.1:0", transports=["tcp"])
    source, destination = prefill.allocate(layout, "serve"), decode.allocate(layout, "receive")
    counting = asyncio.ensure_future(count_events(decode))
    serving = [serve(prefill, source, request) for request in range(REQUESTS)]
    fetching = [fetch(decode, destination, request, prefill.address) for request in range(REQUESTS)]
    sizes, _ = await asyncio.gather(asyncio.gather(*fetching), asyncio.gather(*serving))
    print(f"{len(sizes)} requests, {sum(sizes) >> 20} MiB")
    loop = asyncio.get_running_loop()
    for endpoint in (prefill, decode):  # closing may wait: not on the loop
        await loop.run_in_executor(None, endpoint.close)
    print(f"{await counting} ended, says the event queue")


if __name__ == "__main__":
    asyncio.run(main())
