"""What lives how long: collected handles and endpoints, memory that is kept and let go, forks, threads, exits."""

import gc
import os
import subprocess
import sys
import threading
import time
import warnings
import weakref

import numpy as np
import pytest
from conftest import HERE, WAIT, collect, until

import kvxfer

BLOCK = 4096


def test_a_handle_collected_while_live_cancels_and_warns(pair):
    prefill, decode = pair
    pool = decode.allocate(kvxfer.Layout.opaque(BLOCK, 4), "both")
    grant = pool.grant((0, 1, [0]), events=3)
    with pytest.warns(ResourceWarning, match="grant .* collected while open"):
        del grant
        collect()
    assert decode.events.wait(WAIT)
    assert decode.events.drain()[-1].error == "Cancelled"
    pool.close_wait(WAIT)


def test_detached_and_ended_handles_do_not_warn(pair):
    _, decode = pair
    pool = decode.allocate(kvxfer.Layout.opaque(BLOCK, 4), "both")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        detached = pool.grant((0, 1, [0]))
        detached.detach()
        del detached
        ended = pool.grant((0, 1, [1]))
        ended.cancel()
        with pytest.raises(kvxfer.Cancelled):
            ended.wait(WAIT)
        del ended
        collect()
    with pytest.raises(kvxfer.Busy):
        pool.close()


def test_a_warning_that_is_an_error_does_not_break_anything(pair):
    """A finaliser cannot raise: it is told as unraisable, and what was on its way stays on its way."""
    _, decode = pair
    pool = decode.allocate(kvxfer.Layout.opaque(BLOCK, 4), "both")
    told = []
    hook, sys.unraisablehook = sys.unraisablehook, told.append
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            with pytest.raises(KeyError):
                grant = pool.grant((0, 1, [0]))
                try:
                    raise KeyError
                finally:
                    del grant
    finally:
        sys.unraisablehook = hook
    assert len(told) == 1 and told[0].exc_type is ResourceWarning
    pool.close_wait(WAIT)


def test_an_endpoint_collected_while_open_is_closed_and_warns():
    one = kvxfer.Endpoint("forgotten", listen="127.0.0.1:0", transports=["tcp"])
    pool = one.allocate(kvxfer.Layout.opaque(BLOCK, 4), "both")
    grant = pool.grant((0, 1, [0]))
    with pytest.warns(ResourceWarning, match="forgotten was not closed"):
        del one
        collect()
    with pytest.raises(kvxfer.Closed):
        grant.wait(WAIT)


class Owner:
    """Something that can be seen to go away."""


def test_registered_memory_is_kept_alive_and_let_go(pair):
    prefill, decode = pair
    layout = kvxfer.Layout.opaque(BLOCK, 64)
    source = np.arange(64 * BLOCK, dtype=np.uint8).reshape(64, BLOCK)
    expected = source.copy()
    source_gone = weakref.ref(source)
    owner = Owner()
    owner_gone = weakref.ref(owner)
    destination = np.zeros_like(source)
    serve = prefill.register(layout, [source], "serve")
    receive = decode.register(layout, [(destination.ctypes.data, destination.nbytes, owner)], "receive")
    del source, owner
    collect()
    # The allocator would reuse what was freed.
    noise = [np.full((64, BLOCK), 0xAA, np.uint8) for _ in range(4)]
    assert source_gone() is not None and owner_gone() is not None
    claim = decode.claim("r", receive, [prefill.address])
    claim.fill((0, 64, range(64)))
    offer = prefill.offer("r", serve)
    offer.append((0, 64, range(64)))
    offer.finish(64)
    claim.wait(WAIT), offer.wait(WAIT)
    assert (destination == expected).all()
    del noise
    # Closing is not enough, the pool may be asked for its regions; being collected is not enough while it is used.
    serve.close_wait(WAIT), receive.close_wait(WAIT)
    del serve, receive, claim, offer

    def gone():
        collect()
        prefill.peers()  # entering the module gives back what other threads dropped
        return source_gone() is None and owner_gone() is None

    until(gone, "the memory is let go")


def test_an_exporter_cannot_move_while_registered(endpoint):
    memory = bytearray(8 * BLOCK)
    one = endpoint()
    pool = one.register(kvxfer.Layout.opaque(BLOCK, 8), [memory], "both")
    with pytest.raises(BufferError):
        memory.extend(b"more")
    pool.close()
    del pool

    def can_grow():
        collect()
        one.peers()
        try:
            memory.extend(b"more")
        except BufferError:
            return False
        return True

    until(can_grow, "the buffer is let go")


def test_a_refused_registration_keeps_nothing(endpoint):
    one = endpoint()
    owner = Owner()
    gone = weakref.ref(owner)
    for regions in ([(4096, 1, owner)], [(4096, 1 << 20, owner), "wrong"], [(0, 1, owner)]):
        with pytest.raises((kvxfer.Error, TypeError)):
            one.register(kvxfer.Layout.opaque(BLOCK, 8), regions, "both")
    del owner, regions
    collect()
    assert gone() is None


def resident():
    with open("/proc/self/statm") as statm:
        return int(statm.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def test_thousands_of_hand_overs_leak_nothing(endpoint):
    # What is remembered by design is kept small, so that what leaks would show.
    config = {"limits": {"ended_keys_max": 16}, "deadlines": {"verdict_retention_ms": 100}}
    prefill, decode = endpoint("prefill", config=config), endpoint("decode", config=config)
    layout = kvxfer.Layout.opaque(64, 128)
    source, destination = np.zeros((128, 64), np.uint8), np.zeros((128, 64), np.uint8)
    serve, receive = prefill.register(layout, [source], "serve"), decode.register(layout, [destination], "receive")
    key, blocks, address, message = "k" * 200, np.arange(100), prefill.address, b"m" * 1000

    def hand_over(n):
        claim = decode.claim(f"{key}{n}", receive, [address], events=n)
        claim.fill((0, 100, blocks))
        offer = prefill.offer(f"{key}{n}", serve)
        offer.append((0, 100, blocks.tolist()))
        offer.finish(100)
        claim.wait(WAIT), offer.wait(WAIT)
        grant = receive.grant([(0, 1, [1])])
        push = prefill.push(serve, (0, 1, [2]), kvxfer.Grant.from_bytes(bytes(grant.grant)), message=message)
        assert grant.wait(WAIT).message == message
        push.wait(WAIT)
        with pytest.raises(kvxfer.OutOfBounds):
            receive.grant((0, 1, [500]))
        decode.events.drain()

    def counts():
        gc.collect()
        return [sys.getrefcount(one) for one in (source, destination, blocks, layout, serve, receive, message, address)]

    for n in range(500):
        hand_over(n)
    before, began = counts(), resident()
    for n in range(500, 3500):
        hand_over(n)
    assert counts() == before
    # 3,000 rounds with keys of 200 bytes, messages of 1,000 and 200 block ids: 10 MB if any of them stayed.
    assert resident() - began < 4 << 20


def test_registering_again_and_again_leaks_nothing(endpoint):
    one = endpoint()
    layout = kvxfer.Layout.opaque(BLOCK, 256)
    memory = np.zeros((256, BLOCK), np.uint8)
    before = None
    for n in range(600):
        if n == 100:
            gc.collect()
            before = (sys.getrefcount(memory), sys.getrefcount(layout), resident())
        one.register(layout, [memory], "both").close()
        one.allocate(layout, "both").close()
    gc.collect()
    one.peers()
    assert (sys.getrefcount(memory), sys.getrefcount(layout)) == before[:2]
    assert resident() - before[2] < 16 << 20


def test_threads_share_an_endpoint(pair):
    prefill, decode = pair
    layout = kvxfer.Layout.opaque(BLOCK, 64)
    serve, receive = prefill.allocate(layout, "serve"), decode.allocate(layout, "receive")
    failed = []

    def work(thread):
        try:
            for n in range(40):
                claim = decode.claim(f"{thread}-{n}", receive, [prefill.address])
                claim.fill((0, 1, [thread]))
                offer = prefill.offer(f"{thread}-{n}", serve)
                offer.append((0, 1, [thread]))
                offer.finish(1)
                assert claim.wait(WAIT).bytes == BLOCK
                offer.wait(WAIT)
        except BaseException as error:  # noqa: B902
            failed.append(error)

    threads = [threading.Thread(target=work, args=(thread,)) for thread in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WAIT)
    assert not failed and not any(thread.is_alive() for thread in threads)


def test_waiting_releases_the_interpreters_lock(endpoint):
    one = endpoint()
    pool = one.allocate(kvxfer.Layout.opaque(16, 4), "both")
    grant = pool.grant((0, 1, [0]))
    ended = []

    def wait():
        try:
            grant.wait(WAIT)
        except kvxfer.Cancelled as error:
            ended.append(error)

    thread = threading.Thread(target=wait)
    thread.start()
    for _ in range(100):  # this thread goes on meanwhile
        time.sleep(0.001)
    assert thread.is_alive() and not ended
    grant.cancel()
    thread.join(WAIT)
    assert len(ended) == 1


def test_a_signal_interrupts_a_wait():
    code = (
        "import signal, kvxfer\n"
        "one = kvxfer.Endpoint('x', listen='127.0.0.1:0', transports=['tcp'])\n"
        "grant = one.allocate(kvxfer.Layout.opaque(16, 4), 'both').grant((0, 1, [0]))\n"
        "signal.setitimer(signal.ITIMER_REAL, 0.3)\n"
        "signal.signal(signal.SIGALRM, lambda *_: (_ for _ in ()).throw(KeyError('alarm')))\n"
        "try:\n"
        "    grant.wait()\n"
        "except KeyError:\n"
        "    print('interrupted')\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=WAIT)
    assert done.stdout == "interrupted\n" and done.returncode == 0, done


FORKED = """
import gc, os, sys, warnings
import kvxfer
one = kvxfer.Endpoint("parent", listen="127.0.0.1:0", transports=["tcp"])
pool = one.allocate(kvxfer.Layout.opaque(4096, 8), "both")
grant = pool.grant((0, 1, [0]), events=1)
events, address, layout = one.events, one.address, pool.layout
child = os.fork()
if child == 0:
    calls = [
        lambda: one.offer("k", pool), lambda: one.claim("k", pool, [address]), lambda: one.close(),
        lambda: one.metrics(), lambda: one.peers(), lambda: one.allocate(layout, "both"), lambda: one.closed,
        lambda: one.explain(address), lambda: one.events, lambda: one.drain(1), lambda: one.connect(address),
        lambda: one.register(layout, [bytearray(8 * 4096)], "both"), lambda: one.ready_many([]),
        lambda: one.push(pool, (0, 1, [0]), grant.grant), lambda: one.pull(grant.grant, pool, (0, 1, [0])),
        lambda: pool.id, lambda: pool.close(), lambda: pool.copy_out(0, 0, 0, 1), lambda: pool.grant((0, 1, [1])),
        lambda: pool.copy_in(0, 0, 0, b"x"), lambda: pool.suspend(), lambda: pool.resume(), lambda: pool.role,
        lambda: pool.serve((0, 1, [1])), lambda: pool.close_wait(1), lambda: pool.regions,
        lambda: grant.wait(1), lambda: grant.poll(), lambda: grant.done(), lambda: grant.cancel(),
        lambda: grant.detach(), lambda: grant.error(), lambda: grant.waiting_on(), lambda: grant.__await__().send(None),
        lambda: events.drain(), lambda: events.fileno(), lambda: events.wait(0),
    ]
    for number, call in enumerate(calls):
        try:
            call()
        except kvxfer.Unsupported as error:
            assert "made before fork" in str(error) and "spawn" in str(error), error
        else:
            os._exit(100 + number)
    shown = repr(one), repr(pool), repr(grant), repr(events)
    assert all("of the parent process" in text for text in shown), shown
    assert str(address) and layout.planes == 1 and grant.id >= 0 and one.name == "parent"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        del one, pool, grant, events, calls, call
        gc.collect()
    # A new endpoint in the child works, and with it a hand-over to itself.
    with kvxfer.Endpoint("child", listen="127.0.0.1:0", transports=["tcp"]) as own:
        mine = own.allocate(layout, "both")
        handle = mine.grant((0, 1, [1]))
        handle.cancel()
        try:
            handle.wait(20)
        except kvxfer.Cancelled:
            print("child: well", flush=True)
    sys.exit(0)
_, status = os.waitpid(child, 0)
assert os.waitstatus_to_exitcode(status) == 0, status
assert not grant.done()
grant.cancel()
try:
    grant.wait(20)
except kvxfer.Cancelled:
    print("parent: well", flush=True)
one.close()
"""


def test_fork():
    for code in (FORKED, FORKED.replace("sys.exit(0)", "os._exit(0)")):
        done = subprocess.run(
            [sys.executable, "-W", "ignore::DeprecationWarning", "-c", code],
            capture_output=True,
            text=True,
            timeout=2 * WAIT,
        )
        assert (done.returncode, done.stdout) == (0, "child: well\nparent: well\n"), done


def test_multiprocessing_fork_with_live_objects(endpoint):
    """A forked child that inherits everything and touches nothing ends well, and the parent goes on."""
    import multiprocessing

    one = endpoint()
    pool = one.allocate(kvxfer.Layout.opaque(16, 4), "both")
    grant = pool.grant((0, 1, [0]))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        context = multiprocessing.get_context("fork")
        children = [context.Process(target=sum, args=([1, 2],)) for _ in range(4)]
        for child in children:
            child.start()
    for child in children:
        child.join(WAIT)
        assert child.exitcode == 0
    grant.cancel()
    with pytest.raises(kvxfer.Cancelled):
        grant.wait(WAIT)


STATES = [
    "open",
    "in-flight",
    "claim",
    "waiting",
    "waiting-daemon",
    "polling-daemon",
    "events-daemon",
    "connect-daemon",
    "awaiting",
    "loop-stopped",
    "exception",
    "collected",
    "module-globals",
    "cycle",
    "atexit",
]


@pytest.mark.parametrize("state", STATES)
def test_the_interpreter_ends_in_bounded_time_and_well(state):
    began = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-X", "faulthandler", str(HERE / "workers.py"), "exit_with", state],
        capture_output=True,
        text=True,
        timeout=WAIT,
    )
    assert time.monotonic() - began < WAIT / 2
    assert done.returncode == (7 if state == "exception" else 0), done
    assert "Fatal" not in done.stderr and "panicked" not in done.stderr, done
    if state != "exception":
        assert done.stdout == "ends\n", done
