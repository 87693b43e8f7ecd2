"""Hand-overs within one process: every call of the interface once, with what it gives."""

import pickle

import numpy as np
import pytest
from conftest import WAIT, until

import kvxfer

BLOCK = 4096


@pytest.fixture
def pools(pair):
    """Both sides with registered arrays of 64 blocks."""
    prefill, decode = pair
    layout = kvxfer.Layout.opaque(BLOCK, 64)
    source = np.random.default_rng(1).integers(0, 255, (64, BLOCK), dtype=np.uint8)
    destination = np.full_like(source, 0xEE)
    serve = prefill.register(layout, [source], role="serve")
    receive = decode.register(layout, [destination], role="receive")
    return prefill, serve, source, decode, receive, destination


def test_a_hand_over_by_key(pools):
    prefill, serve, source, decode, receive, destination = pools
    claim = decode.claim("r", receive, [prefill.address])
    claim.fill(kvxfer.Selection.whole_blocks(1, [8, 9, 10]))
    assert not claim.done() and claim.poll() is None and claim.error() is None
    what, seconds = claim.waiting_on()
    assert what and seconds >= 0
    offer = prefill.offer(b"r", serve, priority=3, checksum=True)
    for token, block in enumerate([40, 23, 7]):
        offer.append((token, token + 1, [block]))
        offer.ready(token, token + 1)
    offer.finish(3)
    assert claim.wait(WAIT).bytes == 3 * BLOCK
    assert claim.done() and claim.poll().bytes == 3 * BLOCK and claim.waiting_on() is None
    release = offer.wait(WAIT)
    (member,) = release.members
    assert member.verdict == "arrived" and member.error is None and member.peer == decode.incarnation
    assert (destination[[8, 9, 10]] == source[[40, 23, 7]]).all()
    assert (destination[11:] == 0xEE).all()


def test_parts_of_many_requests_in_one_call(pools):
    prefill, serve, source, decode, receive, destination = pools
    offers, claims = [], []
    for number in range(8):
        claim = decode.claim(f"r{number}", receive, [str(prefill.address)])
        claim.fill((0, 2, [2 * number, 2 * number + 1]))
        offer = prefill.offer(f"r{number}", serve)
        offer.append((0, 2, (40 + number, 20 + number)))
        offers.append(offer)
        claims.append(claim)
    prefill.ready_many([(offer, 0, 1, None) for offer in offers])
    prefill.ready_many([(offer, 1, 2, (0, 1)) for offer in offers])
    for offer in offers:
        offer.finish(2)
    for number, claim in enumerate(claims):
        assert claim.wait(WAIT).bytes == 2 * BLOCK
        assert (destination[2 * number] == source[40 + number]).all()
        assert (destination[2 * number + 1] == source[20 + number]).all()
    for offer in offers:
        offer.wait(WAIT)


def test_push_with_a_message_and_pull(pools):
    prefill, serve, source, decode, receive, destination = pools
    grant = receive.grant((0, 2, np.array([3, 4], np.int64)), deadline=60.0, holder=prefill.incarnation)
    carried = kvxfer.Grant.from_bytes(bytes(grant.grant))
    assert carried == grant.grant == pickle.loads(pickle.dumps(grant.grant))
    assert carried.access == "write" and carried.address == decode.address and 50 < carried.remaining <= 60
    prefill.connect(decode.address, timeout=WAIT)
    push = prefill.push(serve, [(0, 2, [30, 31])], carried, message=b"three\0four", checksum=True)
    assert push.wait(WAIT).bytes == 2 * BLOCK
    arrival = grant.wait(WAIT)
    assert (arrival.bytes, arrival.message) == (2 * BLOCK, b"three\0four")
    assert (destination[[3, 4]] == source[[30, 31]]).all()
    path = push.path()
    assert path.transport == "tcp" and path.rails and path.rails_configured >= 1
    served = serve.serve(kvxfer.Target((0, 1, [12]), layers=[0]))
    pull = decode.pull(served.grant, receive, kvxfer.Selection(0, 1, [5]))
    assert pull.wait(WAIT).bytes == BLOCK
    assert served.wait(WAIT).bytes == BLOCK
    assert (destination[5] == source[12]).all()
    with pytest.raises(kvxfer.InvalidArgument, match="grant to read"):
        prefill.push(serve, (0, 1, [1]), served.grant)


def test_descriptors(pools):
    prefill, serve, source, decode, receive, destination = pools
    grant = receive.grant([kvxfer.BlockDescriptor(0, 7, 100, 50), (0, 9, 0, 10)])
    push = prefill.push(serve, [(0, 1, 0, 60)], grant.grant)
    assert push.wait(WAIT).bytes == 60
    assert (destination[7, 100:150] == source[1, :50]).all()
    assert (destination[9, :10] == source[1, 50:60]).all()


def test_endings(pools):
    prefill, serve, _, decode, receive, _ = pools
    claim = decode.claim("declined", receive, [prefill.address])
    offer = prefill.offer("declined", serve)
    claim.decline()
    with pytest.raises(kvxfer.Declined):
        claim.wait(WAIT)
    with pytest.raises(kvxfer.Declined):
        offer.wait(WAIT)

    offer = prefill.offer("retracted", serve)
    claim = decode.claim("retracted", receive, [prefill.address])
    claim.fill((0, 1, [1]))
    offer.append((0, 1, [1]))
    offer.retract([1])
    with pytest.raises(kvxfer.Retracted):
        offer.wait(WAIT)
    with pytest.raises(kvxfer.Retracted):
        claim.wait(WAIT)

    offer = prefill.offer("restarted", serve)
    offer.append((0, 1, [1]))
    offer.restart()
    until(offer.voided, "no block of the first attempt is read")
    offer.append((0, 1, [2]))
    offer.cancel()
    with pytest.raises(kvxfer.Cancelled) as caught:
        offer.wait(WAIT)
    assert isinstance(offer.error(), kvxfer.Cancelled) and str(offer.error()) == str(caught.value)

    with pytest.raises(kvxfer.DuplicateKey):
        first = prefill.offer("twice", serve)
        prefill.offer("twice", serve)
    first.detach()

    grant = receive.grant((0, 1, [3]), deadline=0.05)
    with pytest.raises(kvxfer.DeadlineExceeded) as caught:
        grant.wait(WAIT)
    assert isinstance(caught.value, TimeoutError) and not isinstance(caught.value, kvxfer.WaitTimeout)


def test_a_wait_that_is_over_is_a_timeout_and_says_that_the_blocks_are_not_free(pools):
    prefill, _, _, decode, receive, _ = pools
    claim = decode.claim("slow", receive, [prefill.address])
    with pytest.raises(kvxfer.WaitTimeout, match="0.02 s.*the handle is still open") as caught:
        claim.wait(0.02)
    assert isinstance(caught.value, (TimeoutError, kvxfer.DeadlineExceeded)) and caught.value.kind == "DeadlineExceeded"
    assert not claim.done() and caught.value.destination == "quarantined" and caught.value.retryable
    claim.cancel()
    with pytest.raises(kvxfer.Cancelled):
        claim.wait(WAIT)


def test_events(pools):
    prefill, serve, _, decode, receive, _ = pools
    events = decode.events
    assert not events.wait(0) and events.drain() == []
    claim = decode.claim("r", receive, [prefill.address], events=1 << 63)
    claim.fill((0, 1, [1]))
    offer = prefill.offer("r", serve)
    offer.append((0, 1, [1]))
    offer.finish(1)
    seen = []
    while not seen or seen[-1].kind != "ended":
        assert events.wait(WAIT)
        seen += events.drain(1)
    assert [event.kind for event in seen] == ["matched", "ended"]
    assert all(event.data == 1 << 63 and event.handle == claim.id for event in seen)
    assert seen[-1].error is None
    import select

    assert select.select([events], [], [], 0)[0] == []
    claim = decode.claim("s", receive, [prefill.address], events=5)
    claim.cancel()
    assert select.select([events.fileno()], [], [], WAIT)[0]
    assert events.drain()[-1].error == "Cancelled"


def test_what_an_endpoint_says_of_itself(pools):
    prefill, serve, _, decode, receive, _ = pools
    assert decode.name == "decode" and len(decode.incarnation) == 32 and not decode.closed
    decode.connect(prefill.address, timeout=WAIT)
    (peer,) = decode.peers()
    assert peer.name == "prefill" and peer.state == "ready" and peer.transport == "tcp"
    assert peer.address == prefill.address and peer.error is None
    assert "path: tcp" in decode.explain(prefill.address)
    assert "kvxfer_" in decode.metrics()
    assert serve.role == "serve" and receive.id >= 0 and serve.layout == kvxfer.Layout.opaque(BLOCK, 64)
    assert serve.regions[0][1] == 64 * BLOCK
    for shown in (decode, serve, receive, peer, decode.events, prefill.address, serve.layout):
        assert "kvxfer." in repr(shown)


def test_addresses_and_ranks(endpoint):
    one = endpoint("ranked", rank=kvxfer.Rank(tensor=(3, 4), pipeline=(1, 2)))
    address = one.address
    again = kvxfer.EndpointAddress(str(address))
    assert again == address == kvxfer.EndpointAddress.from_bytes(bytes(address)) == pickle.loads(pickle.dumps(address))
    assert hash(again) == hash(address) and len({again, address}) == 1
    assert address.rank == kvxfer.Rank((3, 4), (1, 2)) == pickle.loads(pickle.dumps(address.rank))
    assert address.incarnation == one.incarnation and address.sockets[0].startswith("127.0.0.1:")
    assert kvxfer.EndpointAddress("127.0.0.1:1").incarnation is None
    assert address != "text" and not address == 5


def test_pools(endpoint):
    one = endpoint()
    layout = kvxfer.Layout.opaque(16, 4)
    pool = one.allocate(layout, role="both")
    pool.copy_in(0, 2, 3, bytearray(b"abc"))
    assert pool.copy_out(0, 2, 2, 5) == b"\0abc\0"
    pool.copy_in(0, 1, 0, np.arange(2, dtype=np.uint64))
    assert pool.copy_out(0, 1, 0, 16) == np.arange(2, dtype=np.uint64).tobytes()
    pool.suspend()
    with pytest.raises(kvxfer.NotRegistered):
        pool.id
    pool.resume()
    grant = pool.grant((0, 1, [1]))
    with pytest.raises(kvxfer.Busy):
        pool.close()
    grant.cancel()
    pool.close_wait(WAIT)
    with pytest.raises(kvxfer.Closed):
        pool.resume()
    with one.allocate(layout, role="serve") as scoped:
        assert scoped.role == "serve"
    with pytest.raises(kvxfer.Closed):
        scoped.id
    assert "closed" in repr(scoped)


def test_closing(endpoint):
    with endpoint() as one:
        pool = one.allocate(kvxfer.Layout.opaque(16, 4), "both")
        claim = one.claim("r", pool, ["127.0.0.1:1"])
        with pytest.raises(kvxfer.DeadlineExceeded):
            one.drain(0.05)
    assert one.closed and "closed" in repr(one)
    with pytest.raises((kvxfer.Closed, kvxfer.Unreachable)):
        claim.wait(WAIT)
    one.close()
    for call in (
        lambda: one.offer("k", pool),
        lambda: one.claim("k", pool, ["127.0.0.1:1"]),
        lambda: one.allocate(kvxfer.Layout.opaque(16, 4), "both"),
        lambda: pool.grant((0, 1, [0])),
    ):
        with pytest.raises(kvxfer.Closed):
            call()
    one.metrics(), one.peers(), one.events.drain(), one.explain("127.0.0.1:1")


def test_the_reader_of_all_ranks(endpoint):
    """One decode rank of size 1 reads from two prefill ranks, by heads."""
    decode = endpoint("decode")
    prefills = [endpoint(f"prefill-{rank}") for rank in range(2)]

    def layout(rank, size):
        return kvxfer.Layout.preset("llama-3.1-8b", rank, size, blocks=4, layers=[0, 1])

    receive = decode.allocate(layout(0, 1), "receive")
    sources = [one.allocate(layout(rank, 2), "serve") for rank, one in enumerate(prefills)]
    claim = decode.claim("r", receive, [one.address for one in prefills], set=1 << 100, member=0, members=1)
    claim.fill((0, 32, [2, 1]))
    offers = []
    for one, pool in zip(prefills, sources):
        offer = one.offer("r", pool)
        offer.append((0, 32, [0, 3]))
        offer.finish(32)
        offers.append(offer)
    assert claim.wait(WAIT).bytes == 2 * receive.layout.block_bytes()
    for offer in offers:
        assert offer.wait(WAIT).members[0].set == 1 << 100
