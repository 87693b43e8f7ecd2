"""Two real processes: hand-over, kill -9, SIGSTOP, abort with reuse, restart."""

import os
import signal
import time

import numpy as np
import pytest
from conftest import WAIT, until
from workers import BLOCK, pattern

import kvxfer

LIVENESS = {"deadlines": {"liveness_ms": 600, "heartbeat_ms": 100}}


def receiver(endpoint, count, **settings):
    one = endpoint("here", **settings)
    memory = np.full((count, BLOCK), 0xEE, np.uint8)
    return one, memory, one.register(kvxfer.Layout.opaque(BLOCK, count), [memory], role="receive")


def test_a_hand_over_between_processes(worker):
    prefill = worker("prefill", "r", 64)
    decode = worker("decode", prefill.says(), "r", 64)
    assert decode.says() == str(64 * BLOCK)
    assert decode.says() == "right"
    assert prefill.says() == "arrived"
    assert (prefill.ends(), decode.ends()) == (0, 0)


def test_a_push_to_another_process(worker, endpoint):
    granter = worker("granter", 4)
    grant = kvxfer.Grant.from_bytes(bytes.fromhex(granter.says()))
    here = endpoint("here")
    pool = here.register(kvxfer.Layout.opaque(BLOCK, 4), [pattern(4)], role="serve")
    push = here.push(pool, (0, 4, range(4)), grant, message=b"hello")
    assert push.wait(WAIT).bytes == 4 * BLOCK
    assert granter.says() == f"{4 * BLOCK} hello"
    granter.tell("the verdict is here")
    assert granter.ends() == 0


def test_spawn_from_multiprocessing(worker):
    import multiprocessing

    import workers

    prefill = worker("prefill", "r", 8)
    context = multiprocessing.get_context("spawn")
    child = context.Process(target=workers.decode, args=(prefill.says(), "r", 8))
    child.start()
    assert prefill.says() == "arrived"
    child.join(WAIT)
    assert child.exitcode == 0


def test_a_killed_prefill_ends_the_claim_within_seconds(worker, endpoint):
    here, memory, pool = receiver(endpoint, 8, config=LIVENESS)
    prefill = worker("prefill", "r", 8, "hold")
    claim = here.claim("r", pool, [prefill.says()])
    claim.fill((0, 8, range(8)))
    until(lambda: (memory[0] == pattern(8)[0]).all(), "the first part has arrived")
    prefill.kill()
    began = time.monotonic()
    with pytest.raises(kvxfer.PeerLost) as caught:
        claim.wait(WAIT)
    assert time.monotonic() - began < WAIT / 2
    assert isinstance(caught.value, ConnectionError) and caught.value.destination != "quarantined"
    pool.close_wait(WAIT)


def test_a_stopped_prefill_is_lost_or_goes_on(worker, endpoint):
    here, memory, pool = receiver(endpoint, 8, config=LIVENESS)
    prefill = worker("prefill", "r", 8, "hold")
    claim = here.claim("r", pool, [prefill.says()])
    claim.fill((0, 8, range(8)))
    until(lambda: (memory[0] == pattern(8)[0]).all(), "the first part has arrived")
    os.kill(prefill.pid, signal.SIGSTOP)
    try:
        with pytest.raises(kvxfer.PeerLost):
            claim.wait(WAIT)
    finally:
        os.kill(prefill.pid, signal.SIGCONT)
    memory[:] = 0x11
    prefill.tell("go on")
    # What it still sends is for a claim that has ended: none of it lands.
    time.sleep(0.5)
    assert (memory == 0x11).all()


def test_after_an_abort_the_blocks_are_free(worker, endpoint):
    here, memory, pool = receiver(endpoint, 64)
    for attempt in range(5):
        prefill = worker("prefill", f"r{attempt}", 64)
        claim = here.claim(f"r{attempt}", pool, [prefill.says()])
        claim.fill((0, 64, range(64)))
        time.sleep(0.002 * attempt)
        claim.cancel()
        try:
            claim.wait(WAIT)
        except kvxfer.Cancelled:
            pass
        memory[:] = attempt
        prefill.process.wait(WAIT)
        assert (memory == attempt).all()


def test_a_restarted_prefill_is_stale(worker, endpoint):
    here, _, pool = receiver(endpoint, 8)
    prefill = worker("prefill", "r", 8, "hold")
    address = prefill.says()
    prefill.kill()
    socket = kvxfer.EndpointAddress(address).sockets[0]
    again = worker("prefill", "r", 8, "hold", socket)
    fresh = again.says()
    assert fresh != address
    claim = here.claim("r", pool, [address])
    claim.fill((0, 8, range(8)))
    with pytest.raises(kvxfer.StalePeer):
        claim.wait(WAIT)
    claim = here.claim("r", pool, [fresh])
    claim.fill((0, 8, range(8)))
    again.tell("go on")
    assert claim.wait(WAIT).bytes == 8 * BLOCK
    assert again.ends() == 0


def test_nobody_there(endpoint):
    here, _, pool = receiver(endpoint, 8, config={"deadlines": {"connect_ms": 100}})
    with pytest.raises(ConnectionError):
        here.connect("127.0.0.1:1", timeout=0.3)
    claim = here.claim("r", pool, ["127.0.0.1:1"], deadline=0.3)
    with pytest.raises((kvxfer.Unclaimed, kvxfer.Unreachable)):
        claim.wait(WAIT)


@pytest.fixture
def held(worker, endpoint):
    """An endpoint whose close takes more than a second: it pushes more than sockets hold to a peer that is stopped."""
    granter = worker("granter", 16384)
    grant = kvxfer.Grant.from_bytes(bytes.fromhex(granter.says()))
    here = endpoint("here", config={"deadlines": {"liveness_ms": 60_000, "heartbeat_ms": 100}})
    pool = here.allocate(kvxfer.Layout.opaque(BLOCK, 16384), "serve")
    here.connect(grant.address)
    os.kill(granter.pid, signal.SIGSTOP)
    push = here.push(pool, (0, 16384, range(16384)), grant)
    # Nothing tells that the sockets are full.
    until(lambda: push.waiting_on()[1] > 1, "the push is held up")
    yield here, pool, push
    granter.kill()


class Rang(Exception):
    pass


@pytest.fixture
def alarm():
    """Calls something, and a signal whose handler raises, as that of Ctrl-C does, comes meanwhile."""

    def ring(*_):
        raise Rang

    before = signal.signal(signal.SIGALRM, ring)

    def interrupt(call):
        signal.setitimer(signal.ITIMER_REAL, 0.3)
        began = time.monotonic()
        with pytest.raises(Rang):
            call()
        assert time.monotonic() - began < WAIT / 2

    yield interrupt
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, before)


def test_a_signal_interrupts_closing_which_goes_on(held, alarm):
    here, _, push = held
    alarm(lambda: here.close(2 * WAIT))
    assert not here.closed
    # The second call waits for the first.
    here.close(WAIT)
    assert here.closed and push.done()


def test_a_signal_interrupts_connecting(endpoint, alarm):
    here = endpoint("here")
    # Reserved for documentation: nobody answers.
    alarm(lambda: here.connect("192.0.2.1:9", timeout=2 * WAIT))


def test_connecting_waits_for_a_peer_that_answers_late(endpoint):
    here, there = endpoint("here"), endpoint("there")
    with pytest.raises(kvxfer.Unreachable, match="within 250ms"):
        here.connect("192.0.2.1:9", timeout=0.25)
    here.connect(there.address, timeout=WAIT)
    here.connect(there.address, timeout=0)
    # What cannot be is said at once.
    there.close()
    here.close()
    with pytest.raises(kvxfer.Closed):
        here.connect(there.address, timeout=WAIT)


def test_what_the_body_of_with_raised_comes_out_at_once(held):
    here, pool, push = held
    began = time.monotonic()
    with pytest.raises(KeyError):
        with pool:
            raise KeyError
    # Leaving the pool otherwise waits 5 s for the push, and is refused.
    assert time.monotonic() - began < 4.5
    assert not push.done() and pool.id == 0
    with pytest.raises(KeyError):
        with here:
            raise KeyError
    assert not here.closed
    until(lambda: here.closed, "closing goes on")
    assert push.done()


def test_with_closes_when_its_body_raised(endpoint):
    here = endpoint("here")
    with pytest.raises(KeyError):
        with here, here.allocate(kvxfer.Layout.opaque(16, 4), "both") as pool:
            raise KeyError
    until(lambda: here.closed, "the endpoint is closed")
    with pytest.raises(kvxfer.Closed):
        pool.id
