"""kvxfer.vllm, the worker side: real endpoints and host arrays, driven step by step as vLLM does."""

import time

import pytest

from kvxfer.vllm.layout import CacheLayout, GroupSpec, view_of
from kvxfer.vllm.messages import (
    ClaimFill,
    ClaimOpen,
    ClaimRefuse,
    OfferEnd,
    OfferStep,
    StepMessages,
)
from kvxfer.vllm.settings import Settings
from kvxfer.vllm.tables import GroupTokens
from kvxfer.vllm.records import Place
from kvxfer.vllm.worker import NAME_BYTES_MAX, Worker, endpoint_name

np = pytest.importorskip("numpy", reason="numpy is not installed: arrays are not tested")
pytest.importorskip("kvxfer._kvxfer", reason="needs the built package")

LAYERS, HEADS, DIM = 3, 4, 8
#: Longest wait for what must come, in seconds.
SOON = 20.0


class Rank:
    """A worker with a cache of its own."""

    def __init__(self, role, rank=0, size=1, tokens=32, blocks=24, inner="packed", tag="@cpu-test", **settings):
        heads = HEADS // size
        self.tokens = tokens
        self.cache = np.full((LAYERS, blocks, heads, tokens, 2 * DIM), -1, np.float32)
        layers = tuple(f"layers.{layer}.attn" for layer in range(LAYERS))
        spec = GroupSpec("attention-0", "attention", "f32", tokens, HEADS, DIM, DIM, layers, rank, size)
        self.layers = layers
        self.worker = Worker(Settings.parse(settings), Place(rank, size), role, f"test-{role}")
        views = {name: view_of(self.cache[layer]) for layer, name in enumerate(layers)}
        self.worker.register(CacheLayout([spec], views, inner, tag))
        self.sent, self.received, self.failed = [], [], []
        self.counted = {}

    def step(self, compute=None, **messages):
        """One step: before the forward, the forward, after it."""
        step = StepMessages(**messages)
        self.worker.take_back(step.preempted)
        self.worker.begin_step(step)
        for layer, name in enumerate(self.layers):
            if compute is not None:
                compute(layer)
            if self.worker.settings.layerwise:
                self.worker.layer_done(step, name)
        self.worker.end_step(step)
        return self.poll()

    def poll(self):
        reports = self.worker.results()
        self.sent += sorted(reports.sent)
        self.received += sorted(reports.received)
        self.failed += sorted(reports.failed)
        stats = self.worker.take_stats()
        for name, value in (stats.data if stats else {}).items():
            self.counted[name] = self.counted.get(name, 0) + (len(value) if isinstance(value, list) else value)
        return self

    def until(self, what):
        deadline = time.monotonic() + SOON
        while not what(self.poll()):
            assert time.monotonic() < deadline, (self.sent, self.received, self.failed, self.counted)
            time.sleep(0.001)
        return self

    def offer(self, request, first, end, blocks, finish=None, key=None, readers=1, compute=None):
        part = OfferStep(request, key or request, readers, [GroupTokens(first, end, blocks)], (first, end), finish)
        return self.step(compute, offers=[part])

    def claim(self, request, sources, key=None):
        addresses = tuple(str(source.worker.endpoint.address) for source in sources)
        return self.step(claims=[ClaimOpen(request, key or "p", addresses, 7)])

    def fill(self, request, first, end, blocks):
        return self.step(fills=[ClaimFill(request, [GroupTokens(first, end, blocks)])])


@pytest.fixture
def ranks():
    made = []

    def make(*arguments, **named):
        rank = Rank(*arguments, **named)
        made.append(rank)
        return rank

    yield make
    for rank in made:
        rank.worker.close()


def pattern(seed, tokens, layer=None):
    """The KV of a request: [layers, tokens, heads, 2 * DIM]."""
    count = LAYERS * tokens * HEADS * 2 * DIM
    values = (np.arange(count, dtype=np.int64) * 31 + seed * 1_000_003) % 1_000_033
    return values.astype(np.float32).reshape(LAYERS, tokens, HEADS, 2 * DIM)


def put(rank, kv, first, end, blocks, heads=slice(None), layers=range(LAYERS)):
    """Writes tokens ``first..end`` of a request into its blocks."""
    for token in range(first, end):
        block, slot = blocks[token // rank.tokens], token % rank.tokens
        for layer in layers:
            rank.cache[layer, block, :, slot] = kv[layer, token, heads]


def check(rank, kv, first, end, blocks, heads=slice(None)):
    """Compares tokens ``first..end``; `blocks` is the table from token 0."""
    for token in range(first, end):
        block, slot = blocks[token // rank.tokens], token % rank.tokens
        got = rank.cache[:, block, :, slot]
        assert (got == kv[:, token, heads]).all(), (token, block)


def test_chunks_are_handed_over_while_prefill_computes(ranks, caplog):
    caplog.set_level("INFO")
    prefill, decode = ranks("serve"), ranks("receive")
    kv, table, mine = pattern(1, 150), [3, 9, 4, 20, 5], [1, 0, 7, 8, 2]
    decode.claim("d", [prefill])
    decode.fill("d", 0, 150, mine)
    put(prefill, kv, 0, 64, table)
    prefill.offer("p", 0, 64, table[:2])
    prefill.until(lambda rank: rank.worker._offers["p"].matched)
    put(prefill, kv, 64, 128, table)
    prefill.offer("p", 64, 128, table[2:4])
    put(prefill, kv, 128, 150, table)
    prefill.offer("p", 128, 150, table[4:], finish=150)
    prefill.step(offer_ends=[OfferEnd("p", "p", cancel=False, report=True)])
    decode.until(lambda rank: rank.received)
    prefill.until(lambda rank: rank.sent)
    check(decode, kv, 0, 150, mine)
    assert (decode.received, decode.failed, prefill.sent) == (["d"], [], ["p"])
    assert prefill.counted["parts_before_finish"] == 2 and prefill.counted["parts_overlapped"] >= 1
    assert decode.counted["bytes_received"] == 5 * 32 * LAYERS * HEADS * 2 * DIM * 4
    assert decode.counted["claims_arrived"] == decode.counted["claim_seconds"] == 1
    address = str(prefill.worker.endpoint.address)
    assert f"receives from {prefill.worker.name} ({address}) over tcp" in caplog.text
    assert "transports here: tcp" in caplog.text


def test_layer_by_layer(ranks):
    prefill, decode = ranks("serve", layerwise=True), ranks("receive")
    kv, table, mine = pattern(2, 96), [3, 9, 4], [1, 0, 7]
    decode.claim("d", [prefill])
    decode.fill("d", 0, 96, mine)
    prefill.offer("p", 0, 64, table[:2], compute=lambda layer: put(prefill, kv, 0, 64, table, layers=[layer]))
    prefill.offer(
        "p", 64, 96, table[2:], finish=96, compute=lambda layer: put(prefill, kv, 64, 96, table, layers=[layer])
    )
    prefill.step(offer_ends=[OfferEnd("p", "p", cancel=False, report=True)])
    decode.until(lambda rank: rank.received)
    check(decode, kv, 0, 96, mine)
    assert prefill.counted["parts_before_finish"] == 2 * LAYERS


def test_at_the_limit_of_parts_the_rest_goes_at_the_end(ranks):
    prefill, decode = ranks("serve", layerwise=True, config={"limits": {"parts_max": 4}}), ranks("receive")
    kv, table = pattern(10, 128), [3, 9, 4, 5]
    put(prefill, kv, 0, 128, table)
    for index in range(4):
        prefill.offer("p", index * 32, index * 32 + 32, table[index : index + 1], finish=128 if index == 3 else None)
    decode.claim("d", [prefill])
    decode.fill("d", 0, 128, [0, 1, 2, 7])
    decode.until(lambda rank: rank.received)
    check(decode, kv, 0, 128, [0, 1, 2, 7])
    assert decode.failed == [] and prefill.counted["parts_before_finish"] == 4


@pytest.mark.parametrize(("from_size", "to_size"), [(2, 1), (1, 2), (2, 2), (4, 2)])
def test_tensor_parallel_sizes_may_differ(ranks, from_size, to_size):
    sources = [ranks("serve", rank, from_size) for rank in range(from_size)]
    readers = [ranks("receive", rank, to_size) for rank in range(to_size)]
    kv, table, mine = pattern(3, 70), [3, 9, 4], [1, 0, 7]

    def share(rank, size):
        return slice(rank * HEADS // size, (rank + 1) * HEADS // size)

    for rank, source in enumerate(sources):
        put(source, kv, 0, 70, table, share(rank, from_size))
        source.offer("p", 0, 70, table, finish=70)
        source.step(offer_ends=[OfferEnd("p", "p", cancel=False, report=True)])
    for reader in readers:
        reader.claim("d", sources)
        reader.fill("d", 0, 70, mine)
    for rank, reader in enumerate(readers):
        reader.until(lambda one: one.received)
        assert reader.failed == []
        check(reader, kv, 0, 70, mine, share(rank, to_size))
    for source in sources:
        source.until(lambda one: one.sent)
        assert source.sent == ["p"]


def test_a_server_of_both_roles_hands_on_what_it_received(ranks):
    first, middle, last = ranks("serve"), ranks("both"), ranks("receive")
    kv = pattern(11, 64)
    put(first, kv, 0, 64, [3, 4])
    first.offer("p", 0, 64, [3, 4], finish=64)
    middle.claim("m", [first])
    middle.fill("m", 0, 64, [7, 8])
    middle.until(lambda rank: rank.received)
    middle.offer("m", 0, 64, [7, 8], finish=64, key="q")
    last.claim("l", [middle], key="q")
    last.fill("l", 0, 64, [1, 0])
    last.until(lambda rank: rank.received)
    check(last, kv, 0, 64, [1, 0])


def test_only_the_tokens_not_held_are_written(ranks):
    prefill, decode = ranks("serve"), ranks("receive")
    kv, table, mine = pattern(4, 120), [3, 9, 4, 5], [1, 0, 7, 8]
    put(prefill, kv, 0, 120, table)
    prefill.offer("p", 0, 120, table, finish=120)
    decode.claim("d", [prefill])
    decode.fill("d", 64, 120, mine[2:])
    decode.until(lambda rank: rank.received)
    check(decode, kv, 64, 120, mine)
    assert (decode.cache[:, mine[:2]] == -1).all()


def test_a_declined_claim_releases_the_offer_and_is_never_reported(ranks):
    prefill, decode = ranks("serve"), ranks("receive")
    prefill.offer("p", 0, 32, [3], finish=32)
    decode.claim("d", [prefill])
    decode.step(declines=["d"])
    prefill.step(offer_ends=[OfferEnd("p", "p", cancel=False, report=True)])
    prefill.until(lambda rank: rank.sent)
    assert prefill.counted["offers_declined"] == 1
    time.sleep(0.1)
    decode.poll()
    assert decode.received == decode.failed == [] and decode.worker._claims == decode.worker._handles == {}


def test_opened_filled_and_aborted_in_one_step(ranks):
    prefill, decode = ranks("serve"), ranks("receive")
    address = (str(prefill.worker.endpoint.address),)
    decode.step(
        claims=[ClaimOpen("d", "p", address, 7)],
        fills=[ClaimFill("d", [GroupTokens(0, 32, [0])])],
        claim_aborts=["d"],
    )
    decode.until(lambda rank: rank.received)
    decode.step(claim_aborts=["d"])
    time.sleep(0.05)
    decode.poll()
    assert (decode.received, decode.failed) == (["d"], [])
    assert decode.counted["aborts_in_flight"] == 1


def test_an_abort_in_flight_is_reported_once_and_nothing_is_written_after(ranks):
    prefill, decode = ranks("serve", blocks=200), ranks("receive", blocks=200)
    table, mine = list(range(150)), list(range(199, 49, -1))
    tokens = 150 * 32
    kv = pattern(5, tokens)
    put(prefill, kv, 0, 320, table)
    decode.claim("d", [prefill])
    decode.fill("d", 0, tokens, mine)
    prefill.offer("p", 0, 4000 // 32 * 32, table[: 4000 // 32])
    prefill.until(lambda rank: rank.worker._offers["p"].matched)
    decode.step(claim_aborts=["d"])
    decode.until(lambda rank: rank.received)
    decode.cache[:] = -7  # The blocks belong to others now.
    prefill.step(offer_ends=[OfferEnd("p", "p", cancel=True, report=True)])
    prefill.until(lambda rank: rank.sent)
    time.sleep(0.2)
    decode.poll()
    assert (decode.cache == -7).all()
    assert (decode.received, decode.failed, prefill.sent) == (["d"], [], ["p"])


class Withheld:
    """An endpoint whose events come only when they are let go: fences are too quick here to be seen otherwise."""

    def __init__(self, endpoint):
        self.endpoint, self.held = endpoint, True

    def __getattr__(self, name):
        return getattr(self.endpoint, name)

    @property
    def events(self):
        return self

    def drain(self, most):
        return [] if self.held else self.endpoint.events.drain(most)


class Gated:
    """An offer that notes what its parts wait for, of which there is no driver here to know."""

    def __init__(self, handle):
        self.handle, self.after = handle, []

    def __getattr__(self, name):
        return getattr(self.handle, name)

    def ready(self, *arguments, after):
        self.after.append(after)
        return self.handle.ready(*arguments)

    def finish(self, *arguments, after):
        self.after.append(after)
        return self.handle.finish(*arguments)


def test_what_a_device_computes_is_released_behind_an_event_of_its_own(ranks):
    prefill = ranks("serve", layerwise=True)
    events = []
    prefill.worker._mark = lambda: events.append(object()) or events[-1]
    open_offer = prefill.worker.endpoint.offer

    class Endpoint:
        def __getattr__(self, name):
            return getattr(endpoint, name)

        def offer(self, *arguments, **named):
            handles.append(Gated(open_offer(*arguments, **named)))
            return handles[-1]

    endpoint, handles = prefill.worker.endpoint, []
    prefill.worker.endpoint = Endpoint()
    prefill.offer("p", 0, 32, [3])
    prefill.offer("p", 32, 64, [4], finish=64)
    # One for each layer, none twice, and nothing without.
    assert len(handles[0].after) >= 2 * LAYERS
    assert all(after in events for after in handles[0].after)
    assert len(set(map(id, handles[0].after))) == len(handles[0].after)
    # A step without offers records nothing.
    count = len(events)
    prefill.step()
    assert len(events) == count


def test_what_is_aborted_is_reported_only_once_it_is_fenced(ranks):
    prefill, decode = ranks("serve"), ranks("receive")
    decode.claim("d", [prefill])
    decode.fill("d", 0, 64, [0, 1])
    prefill.offer("p", 0, 32, [3])
    prefill.until(lambda rank: rank.worker._offers["p"].matched)
    for rank in (prefill, decode):
        rank.worker.endpoint = Withheld(rank.worker.endpoint)
    decode.step(claim_aborts=["d"])
    prefill.step(offer_ends=[OfferEnd("p", "p", cancel=True, report=True)])
    for _ in range(10):
        time.sleep(0.01)
        assert decode.poll().received == prefill.poll().sent == []
    for rank in (prefill, decode):
        rank.worker.endpoint.held = False
    decode.until(lambda rank: rank.received)
    prefill.until(lambda rank: rank.sent)
    decode.step(claim_aborts=["d"])
    assert (decode.poll().received, decode.failed, prefill.poll().sent) == (["d"], [], ["p"])


def test_an_aborted_prefill_fails_the_load_and_reports_its_blocks_once(ranks):
    prefill, decode = ranks("serve"), ranks("receive")
    decode.claim("d", [prefill])
    decode.fill("d", 0, 64, [0, 1])
    prefill.offer("p", 0, 32, [3])
    prefill.until(lambda rank: rank.worker._offers["p"].matched)
    prefill.step(offer_ends=[OfferEnd("p", "p", cancel=True, report=True)])
    decode.until(lambda rank: rank.received)
    prefill.until(lambda rank: rank.sent)
    assert (decode.received, decode.failed, prefill.sent) == (["d"], ["d"], ["p"])
    assert prefill.counted["aborts_in_flight"] == 1 and decode.counted["claims_failed"] == 1


def test_a_prefill_aborted_before_it_began_ends_the_claim_that_waits(ranks):
    prefill, decode = ranks("serve"), ranks("receive")
    decode.claim("d", [prefill])
    decode.fill("d", 0, 64, [0, 1])
    time.sleep(0.1)
    prefill.step(offer_ends=[OfferEnd("p", "p", cancel=True, report=False)])
    decode.until(lambda rank: rank.received)
    assert decode.failed == ["d"]
    prefill.until(lambda rank: not rank.worker._offers and not rank.worker._handles)
    assert prefill.sent == []
    # Later claims of the key hear of it too.
    decode.claim("e", [prefill])
    decode.fill("e", 0, 64, [0, 1])
    decode.until(lambda rank: rank.received == ["d", "e"])


def test_a_preempted_hand_off_goes_on_with_the_recomputed_blocks(ranks):
    prefill, decode = ranks("serve"), ranks("receive")
    kv, old, table, mine = pattern(6, 96), [3, 9], [10, 11, 12], [1, 0, 7]
    decode.claim("d", [prefill])
    decode.fill("d", 0, 96, mine)
    put(prefill, kv, 0, 64, old)
    prefill.offer("p", 0, 64, old)
    prefill.until(lambda rank: rank.worker._offers["p"].matched)
    prefill.step(preempted=["p"])
    prefill.cache[:, old] = -5  # Another request's.
    put(prefill, kv, 0, 96, table)
    prefill.offer("p", 0, 96, table, finish=96)
    decode.until(lambda rank: rank.received)
    assert decode.failed == [] and decode.received == ["d"]
    check(decode, kv, 0, 96, mine)
    assert prefill.counted["retracts"] == 1 and decode.counted["claims_restarted"] >= 1
    assert prefill.counted.get("retracts_late", 0) == 0


def test_preemption_before_any_claim(ranks):
    prefill, decode = ranks("serve"), ranks("receive")
    kv = pattern(7, 64)
    prefill.offer("p", 0, 32, [3])
    prefill.step(preempted=["p"])
    put(prefill, kv, 0, 64, [5, 6])
    prefill.offer("p", 0, 64, [5, 6], finish=64)
    decode.claim("d", [prefill])
    decode.fill("d", 0, 64, [0, 1])
    decode.until(lambda rank: rank.received)
    check(decode, kv, 0, 64, [0, 1])


def test_retract_ends_the_hand_off_if_that_was_chosen(ranks):
    prefill, decode = ranks("serve", preemption="retract"), ranks("receive")
    decode.claim("d", [prefill])
    decode.fill("d", 0, 64, [0, 1])
    prefill.offer("p", 0, 32, [3])
    prefill.until(lambda rank: rank.worker._offers["p"].matched)
    prefill.step(preempted=["p"])
    decode.until(lambda rank: rank.received)
    assert decode.failed == ["d"]
    prefill.offer("p", 0, 64, [5, 6], finish=64)
    prefill.step(offer_ends=[OfferEnd("p", "p", cancel=False, report=True)])
    prefill.until(lambda rank: rank.sent)
    assert prefill.sent == ["p"] and prefill.counted["retracts"] == 1


def test_an_address_of_an_earlier_life_fails_when_the_blocks_come(ranks):
    prefill, decode = ranks("serve", listen="127.0.0.1:0"), ranks("receive")
    address = str(prefill.worker.endpoint.address)
    prefill.worker.close()
    decode.step(claims=[ClaimOpen("d", "p", (address,), 7)])
    decode.until(lambda rank: rank.worker._claims["d"].failure)
    assert decode.received == []  # vLLM has no use for it yet.
    decode.fill("d", 0, 32, [0])
    assert (decode.received, decode.failed) == (["d"], ["d"])
    decode.step(claim_aborts=["d"])
    assert decode.received == ["d"]


def test_a_claim_that_failed_before_it_had_blocks_may_still_be_declined(ranks):
    decode = ranks("receive")
    decode.step(claims=[ClaimOpen("d", "p", ("nonsense",), 7)])
    decode.step(declines=["d"])
    decode.step(claims=[ClaimOpen("e", "p", ("nonsense",), 7)])
    decode.fill("e", 0, 32, [0])
    assert (decode.received, decode.failed) == (["e"], ["e"])


def test_refused_parameters_are_a_failed_load(ranks):
    decode = ranks("receive")
    decode.step(refusals=[ClaimRefuse("d", "transfer_id is missing")])
    assert (decode.received, decode.failed) == (["d"], ["d"])


def test_one_prefill_for_several_readers(ranks):
    prefill, decode = ranks("serve"), ranks("receive")
    kv = pattern(8, 64)
    put(prefill, kv, 0, 64, [3, 4])
    prefill.offer("p", 0, 64, [3, 4], finish=64, readers=2)
    prefill.step(offer_ends=[OfferEnd("p", "p", cancel=False, report=True)])
    address = (str(prefill.worker.endpoint.address),)
    decode.step(claims=[ClaimOpen("d-0", "p", address, 1)], fills=[ClaimFill("d-0", [GroupTokens(0, 64, [0, 1])])])
    decode.until(lambda rank: rank.received == ["d-0"])
    assert prefill.poll().sent == []
    decode.step(claims=[ClaimOpen("d-1", "p", address, 2)], fills=[ClaimFill("d-1", [GroupTokens(0, 64, [2, 3])])])
    decode.until(lambda rank: rank.received == ["d-0", "d-1"])
    prefill.until(lambda rank: rank.sent)
    check(decode, kv, 0, 64, [0, 1])
    check(decode, kv, 0, 64, [2, 3])
    decode.step(claims=[ClaimOpen("d-2", "p", address, 3)], fills=[ClaimFill("d-2", [GroupTokens(0, 64, [4, 5])])])
    decode.until(lambda rank: rank.failed == ["d-2"])


def test_what_nobody_claims_is_given_up_and_only_then(ranks, caplog):
    prefill, decode = ranks("serve", unclaimed_seconds=1), ranks("receive")
    for name, block in (("p", 3), ("q", 4), ("r", 5)):
        prefill.offer(name, 0, 32, [block], finish=32)
    decode.claim("d", [prefill], key="q")  # Met, though not filled: it is not given up.
    prefill.until(lambda rank: rank.worker._offers["q"].matched)
    began = time.monotonic()
    prefill.step(offer_ends=[OfferEnd(name, name, cancel=False, report=True) for name in ("p", "q")])
    prefill.until(lambda rank: rank.sent)
    assert time.monotonic() - began >= 1
    time.sleep(0.2)
    # r still computes, as far as is known here.
    assert prefill.poll().sent == ["p"] and prefill.counted["offers_unclaimed"] == 1
    assert "unclaimed_seconds" in caplog.text
    decode.fill("d", 0, 32, [0])
    decode.until(lambda rank: rank.received)
    assert decode.failed == []
    prefill.until(lambda rank: rank.sent == ["p", "q"])


class BeingRead:
    """An offer that is being read for the next `looks` looks at it."""

    def __init__(self, handle, looks):
        self.handle, self.looks = handle, looks

    def __getattr__(self, name):
        return getattr(self.handle, name)

    def voided(self):
        self.looks -= 1
        return self.looks < 0 and self.handle.voided()


def test_preempted_blocks_are_waited_for_and_not_for_ever(ranks):
    prefill = ranks("serve", preemption_wait_ms=200)
    for name, looks in (("p", 100), ("q", 10**9)):
        prefill.offer(name, 0, 32, [3], key=name)
        offer = prefill.worker._offers[name]
        offer.handle = BeingRead(offer.handle, looks)
        began = time.monotonic()
        prefill.step(preempted=[name])
        if name == "p":
            assert offer.handle.looks < 0
        else:
            assert time.monotonic() - began >= 0.2 and prefill.counted["retracts_late"] == 1
        offer.handle = offer.handle.handle


def test_what_its_claim_has_no_blocks_for_is_given_up_in_the_end(ranks, caplog):
    prefill, decode = ranks("serve", unclaimed_seconds=1, unserved_seconds=2), ranks("receive")
    prefill.offer("p", 0, 32, [3], finish=32)
    decode.claim("d", [prefill], key="p")
    prefill.until(lambda rank: rank.worker._offers["p"].matched)
    began = time.monotonic()
    prefill.step(offer_ends=[OfferEnd("p", "p", cancel=False, report=True)])
    prefill.until(lambda rank: rank.sent)
    assert time.monotonic() - began >= 2 and prefill.counted["offers_unclaimed"] == 1
    assert "unserved_seconds" in caplog.text
    decode.fill("d", 0, 32, [0])
    decode.until(lambda rank: rank.received)
    assert decode.failed == ["d"]


def test_time_in_which_the_worker_stood_still_does_not_count(ranks):
    prefill = ranks("serve", unclaimed_seconds=3)
    prefill.offer("p", 0, 32, [3], finish=32)
    prefill.step(offer_ends=[OfferEnd("p", "p", cancel=False, report=True)])
    prefill.worker._last_step -= 1000
    assert prefill.poll().sent == []
    time.sleep(0.2)
    assert prefill.poll().sent == []
    prefill.until(lambda rank: rank.sent)


def test_a_reader_that_does_not_come_is_given_up_too(ranks):
    prefill, decode = ranks("serve", unclaimed_seconds=1), ranks("receive")
    prefill.offer("p", 0, 32, [3], finish=32, readers=2)
    prefill.step(offer_ends=[OfferEnd("p", "p", cancel=False, report=True)])
    decode.claim("d", [prefill])
    decode.fill("d", 0, 32, [0])
    decode.until(lambda rank: rank.received)
    prefill.until(lambda rank: rank.sent)
    assert decode.failed == [] and prefill.counted["offers_unclaimed"] == 1


def test_packed_blocks_of_another_size_are_refused_with_the_reason(ranks, caplog):
    prefill, decode = ranks("serve"), ranks("receive", tokens=64)
    prefill.offer("p", 0, 64, [3, 4], finish=64)
    decode.claim("d", [prefill])
    decode.fill("d", 0, 64, [0])
    decode.until(lambda rank: rank.received)
    assert decode.failed == ["d"]
    assert "packed" in caplog.text


def test_a_declared_order_allows_other_block_sizes(ranks):
    prefill, decode = ranks("serve", inner="declared", tag=""), ranks("receive", tokens=64, inner="declared", tag="")
    kv, table, mine = pattern(9, 100), [3, 9, 4, 5], [7, 2]

    def cells(rank, token, blocks):
        """K and V of a token, where the declared order has them: per head K (dim, token), then V (token, dim)."""
        block, slot = blocks[token // rank.tokens], token % rank.tokens
        flat = rank.cache[:, block].reshape(LAYERS, HEADS, 2, -1)
        keys = flat[:, :, 0].reshape(LAYERS, HEADS, DIM, rank.tokens)[..., slot]
        values = flat[:, :, 1].reshape(LAYERS, HEADS, rank.tokens, DIM)[:, :, slot]
        return keys, values

    for token in range(100):
        keys, values = cells(prefill, token, table)
        keys[:], values[:] = kv[:, token, :, :DIM], kv[:, token, :, DIM:]
    prefill.offer("p", 0, 100, table, finish=100)
    decode.claim("d", [prefill])
    decode.fill("d", 0, 100, mine)
    decode.until(lambda rank: rank.received)
    assert decode.failed == []
    for token in range(100):
        keys, values = cells(decode, token, mine)
        assert (keys == kv[:, token, :, :DIM]).all() and (values == kv[:, token, :, DIM:]).all()


def test_blocks_packed_by_different_kernels_never_meet(ranks, caplog):
    prefill, decode = ranks("serve", tag="@cpu-amx"), ranks("receive", tag="@cpu-vec")
    prefill.offer("p", 0, 64, [3, 4], finish=64)
    decode.claim("d", [prefill])
    decode.fill("d", 0, 64, [0, 1])
    decode.until(lambda rank: rank.received)
    assert decode.failed == ["d"] and (decode.cache == -1).all()


def test_names_fit_and_keep_the_workers_number():
    assert endpoint_name("engine", 3) == "engine-3"
    for label in ("x" * 100, "\u00e4" * 63, ""):
        name = endpoint_name(label, 12)
        assert name.endswith("-12") and len(name.encode()) <= NAME_BYTES_MAX


def test_closing_with_open_handles_is_bounded(ranks):
    prefill, decode = ranks("serve"), ranks("receive")
    decode.claim("d", [prefill])
    decode.fill("d", 0, 64, [0, 1])
    prefill.offer("p", 0, 32, [3])
    began = time.monotonic()
    prefill.worker.close()
    decode.worker.close()
    assert time.monotonic() - began < SOON
    decode.worker.close()
