"""Bad input of every call: each is an exception that says what is wrong, before anything is registered or opened."""

import array
import math
import sys

import numpy as np
import pytest

import kvxfer

LAYOUT = kvxfer.Layout.opaque(16, 8)


@pytest.fixture(scope="module")
def world():
    with kvxfer.Endpoint("bad", listen="127.0.0.1:0", transports=["tcp"]) as endpoint, kvxfer.Endpoint(
        "other", listen="127.0.0.1:0", transports=["tcp"]
    ) as other:
        pool = endpoint.allocate(LAYOUT, "both")
        yield {
            "endpoint": endpoint,
            "other": other,
            "pool": pool,
            "offer": endpoint.offer("kept", pool),
            "claim": endpoint.claim("kept-too", pool, ["127.0.0.1:1"]),
            "grant": pool.grant((0, 1, [7])),
        }


read_only = np.zeros((8, 16), np.uint8)
read_only.flags.writeable = False
frozen_objects = np.array([None] * 16)
frozen_objects.flags.writeable = False
group = kvxfer.Group("a", kvxfer.Geometry.attention("f16", 16, 8, 64), 4)
plane = kvxfer.Plane("0", "key")
huge = 1 << 70

CASES = [
    # endpoints and configuration
    ("kvxfer.Endpoint(name=5)", TypeError, "name"),
    ("kvxfer.Endpoint(name='x' * 65)", kvxfer.InvalidArgument, "too long"),
    ("kvxfer.Endpoint(listen='nowhere')", kvxfer.InvalidArgument, "not an IP address"),
    ("kvxfer.Endpoint(listen=['127.0.0.1:0'] * 3)", kvxfer.InvalidArgument, "listen"),
    ("kvxfer.Endpoint(transports=['pigeon'])", kvxfer.InvalidArgument, "pigeon"),
    ("kvxfer.Endpoint(transports=5)", TypeError, ""),
    ("kvxfer.Endpoint(listen='0.0.0.0:0', transports=['tcp'])", kvxfer.Unauthenticated, "loopback"),
    ("kvxfer.Endpoint(security={'mode': 'magic'})", kvxfer.InvalidArgument, "security.mode"),
    ("kvxfer.Endpoint(security={'mood': 'none'})", kvxfer.InvalidArgument, "mood"),
    ("kvxfer.Endpoint(config='limits = ')", kvxfer.InvalidArgument, "not TOML"),
    ("kvxfer.Endpoint(config={'limits': {'slot_max': 1}})", kvxfer.InvalidArgument, "limits.slots_max"),
    ("kvxfer.Endpoint(config={'limits': {'slots_max': 0}})", kvxfer.InvalidArgument, "out of range"),
    ("kvxfer.Endpoint(config={'limits': {'slots_max': 'many'}})", kvxfer.InvalidArgument, "slots_max"),
    ("kvxfer.Endpoint(config={'tcp': {'lanes': None}})", TypeError, "lanes"),
    ("kvxfer.Endpoint(config={5: 5})", TypeError, "name"),
    ("kvxfer.Endpoint(config=5)", TypeError, "configuration"),
    ("kvxfer.Endpoint(config=pathlib.Path('/nonexistent.toml'))", kvxfer.InvalidArgument, "cannot be read"),
    ("kvxfer.Endpoint(rank=(0, 1))", TypeError, "rank"),
    ("kvxfer.Endpoint(colour='red')", TypeError, "colour"),
    ("kvxfer.Rank(tensor=(1,))", (TypeError, ValueError), ""),
    ("kvxfer.Rank(tensor=(-1, 1))", kvxfer.InvalidArgument, "-1"),
    ("endpoint.connect('localhost:1')", kvxfer.InvalidArgument, "not an IP address"),
    ("endpoint.connect(5)", TypeError, "address"),
    ("endpoint.connect('127.0.0.1:1', timeout=-1)", kvxfer.InvalidArgument, "negative"),
    ("endpoint.connect('127.0.0.1:1', timeout='soon')", TypeError, ""),
    ("endpoint.explain(None)", TypeError, "address"),
    ("endpoint.drain()", TypeError, "timeout"),
    ("endpoint.close(timeout=math.nan)", kvxfer.InvalidArgument, "negative"),
    ("endpoint.events.drain(-1)", kvxfer.InvalidArgument, "-1"),
    ("endpoint.events.drain(True)", TypeError, "bool"),
    ("endpoint.events.wait(True)", TypeError, "seconds, not bool"),
    ("endpoint.connect('127.0.0.1:1', timeout=np.True_)", TypeError, "seconds, not bool"),
    ("endpoint.events.wait('x')", TypeError, ""),
    ("kvxfer.EndpointAddress('')", kvxfer.InvalidArgument, ""),
    ("kvxfer.EndpointAddress('x' * 1000)", kvxfer.InvalidArgument, "bytes"),
    ("kvxfer.EndpointAddress('\\ud800')", UnicodeEncodeError, ""),
    ("kvxfer.EndpointAddress.from_bytes(b'\\xff')", kvxfer.InvalidArgument, "short"),
    ("kvxfer.EndpointAddress.from_bytes('text')", TypeError, "bytes"),
    ("kvxfer.Grant.from_bytes(b'')", kvxfer.Error, ""),
    ("kvxfer.Grant.from_bytes(np.zeros((4, 4), np.uint8)[:, ::2])", kvxfer.InvalidArgument, "contiguous"),
    ("kvxfer.Grant()", TypeError, ""),
    ("kvxfer.Offer()", TypeError, ""),
    # layouts
    ("kvxfer.Layout([], [])", kvxfer.InvalidArgument, "without"),
    ("kvxfer.Layout(5, [])", TypeError, ""),
    ("kvxfer.Layout(['a'], [])", TypeError, "kvxfer.Group"),
    ("kvxfer.Layout([group], ['p'])", TypeError, "kvxfer.Plane"),
    ("kvxfer.Layout([group], [plane], regions={0: 5})", kvxfer.OutOfBounds, "region"),
    ("kvxfer.Layout([group], [plane], regions=[5])", TypeError, "regions"),
    ("kvxfer.Layout([group], [kvxfer.Plane('0', 'quay')])", kvxfer.InvalidArgument, "quay"),
    ("kvxfer.Layout([group], [kvxfer.Plane(0, 'key')])", TypeError, "Plane.layer"),
    ("kvxfer.Layout([group], [kvxfer.Plane('0', 'key', group=3)])", kvxfer.OutOfBounds, "cache group 3"),
    ("kvxfer.Layout([group], [kvxfer.Plane('0', 'key', order='DHN')])", kvxfer.InvalidArgument, "DHN"),
    ("kvxfer.Layout([group], [kvxfer.Plane('0', 'key', order=('token', 'head', 'bread'))])", kvxfer.InvalidArgument, "bread"),
    ("kvxfer.Layout([group], [kvxfer.Plane('0', 'key', order=('token', 'head'))])", kvxfer.InvalidArgument, "order"),
    ("kvxfer.Layout([group], [kvxfer.Plane('0', 'key', order=('dim',))])", kvxfer.InvalidArgument, "1 axes"),
    ("kvxfer.Layout([group], [kvxfer.Plane('0', 'key', heads=(0, 4))])", kvxfer.InvalidArgument, "missing"),
    ("kvxfer.Layout([group], [kvxfer.Plane('0', 'key', stride=1)])", kvxfer.InvalidArgument, "overlap"),
    ("kvxfer.Layout([group], [kvxfer.Plane('0', 'key', base=-1)])", kvxfer.InvalidArgument, "-1"),
    ("kvxfer.Layout([kvxfer.Group('a', group.geometry, 0)], [plane])", kvxfer.InvalidArgument, "0 blocks"),
    ("kvxfer.Layout([kvxfer.Group('a', 'g', 1)], [plane])", TypeError, "Geometry"),
    ("kvxfer.Layout([kvxfer.Group('a', kvxfer.Geometry.attention('f17', 16, 8, 64), 4)], [plane])", kvxfer.InvalidArgument, "f17"),
    ("kvxfer.Layout([kvxfer.Group('a', kvxfer.Geometry.attention('f16', 16, 8, 64, sharding=kvxfer.Sharding.heads(3, 3)), 4)], [plane])", kvxfer.InvalidArgument, "rank 3 of 3"),
    ("kvxfer.Layout([kvxfer.Group('a', kvxfer.Geometry.attention('f16', 16, 8, 64, sharding=kvxfer.Sharding('tokens', 0, 2)), 4)], [plane])", kvxfer.Unsupported, "tokens"),
    ("kvxfer.Layout.opaque(0, 1)", kvxfer.InvalidArgument, ""),
    ("kvxfer.Layout.opaque(1 << 32, 1)", kvxfer.InvalidArgument, "4294967296"),
    ("kvxfer.Layout.opaque(2.5, 1)", TypeError, ""),
    ("kvxfer.Layout.opaque(True, 1)", TypeError, "bool"),
    ("kvxfer.Layout.preset('gpt-9')", kvxfer.InvalidArgument, "llama"),
    ("kvxfer.Layout.preset('llama-3.1-8b', arrangement='heap')", kvxfer.InvalidArgument, "per_layer_nhd"),
    ("kvxfer.Layout.preset('llama-3.1-8b', rank=4, size=4)", kvxfer.InvalidArgument, "rank"),
    ("kvxfer.Layout.preset('llama-3.1-8b', layers=[900])", kvxfer.InvalidArgument, ""),
    ("LAYOUT.block_bytes(3)", IndexError, "3"),
    ("LAYOUT.plane(9)", IndexError, "9"),
    ("LAYOUT.plane_offset(0, 8)", kvxfer.OutOfBounds, "block 8"),
    # memory
    ("endpoint.register(LAYOUT, [np.zeros((8, 15), np.uint8)], 'both')", kvxfer.OutOfBounds, "120 bytes"),
    ("endpoint.register(LAYOUT, [], 'both')", kvxfer.InvalidArgument, "0 regions"),
    ("endpoint.register(LAYOUT, [bytearray(128)] * 2, 'both')", kvxfer.InvalidArgument, "2 regions"),
    ("endpoint.register(LAYOUT, bytearray(128), 'both')", TypeError, "a list"),
    ("endpoint.register(LAYOUT, [bytes(128)], 'both')", kvxfer.InvalidArgument, "read-only"),
    ("endpoint.register(LAYOUT, [bytes(128)], 'receive')", kvxfer.InvalidArgument, "read-only"),
    ("endpoint.register(LAYOUT, [read_only], 'receive')", kvxfer.InvalidArgument, "read-only"),
    ("endpoint.register(LAYOUT, [np.zeros((8, 32), np.uint8)[:, ::2]], 'both')", kvxfer.InvalidArgument, "one piece"),
    ("endpoint.register(LAYOUT, [np.zeros((8, 16), np.uint8).T], 'both')", kvxfer.InvalidArgument, "one piece"),
    ("endpoint.register(LAYOUT, [np.zeros((0, 16), np.uint8)], 'both')", kvxfer.InvalidArgument, "no bytes"),
    ("endpoint.register(LAYOUT, [np.zeros((8, 16), np.uint8)[::-1]], 'both')", kvxfer.InvalidArgument, "one piece"),
    ("endpoint.register(LAYOUT, ['text'], 'both')", TypeError, "memory is"),
    ("endpoint.register(LAYOUT, [5], 'both')", TypeError, "memory is"),
    ("endpoint.register(LAYOUT, [None], 'both')", TypeError, "memory is"),
    ("endpoint.register(LAYOUT, [np.ndarray], 'both')", TypeError, "ndarray'> is a class: give an object"),
    ("endpoint.register(LAYOUT, [bytearray], 'both')", TypeError, "bytearray'> is a class"),
    ("endpoint.register(LAYOUT, [np.array([None] * 16)], 'both')", kvxfer.InvalidArgument, "Python objects"),
    ("endpoint.register(LAYOUT, [frozen_objects], 'serve')", kvxfer.InvalidArgument, "pointers"),
    ("endpoint.register(LAYOUT, [memoryview(frozen_objects)], 'serve')", kvxfer.InvalidArgument, "Python objects"),
    ("endpoint.register(LAYOUT, [np.zeros(16, [('no', 'i4'), ('yes', 'O')])], 'both')", kvxfer.InvalidArgument, "Python objects"),
    ("endpoint.register(LAYOUT, [memoryview(np.zeros(16, [('no', 'i4'), ('yes', 'O')]))], 'both')", kvxfer.InvalidArgument, "Python objects"),
    ("endpoint.register(LAYOUT, [Broken({'data': (4096, False), 'shape': (16,), 'typestr': '|O'})], 'both')", kvxfer.InvalidArgument, "Python objects"),
    ("kvxfer.layout_of([group], [kvxfer.TensorPlane(frozen_objects, ('block',))])", kvxfer.InvalidArgument, "Python objects"),
    ("endpoint.register(LAYOUT, [(0, 128)], 'both')", kvxfer.InvalidArgument, "null"),
    ("endpoint.register(LAYOUT, [(4096, 0)], 'both')", kvxfer.InvalidArgument, "zero"),
    ("endpoint.register(LAYOUT, [(2**64 - 16, 128)], 'both')", kvxfer.InvalidArgument, "overflows"),
    ("endpoint.register(LAYOUT, [(4096, 1 << 64)], 'both')", kvxfer.InvalidArgument, "18446744073709551616"),
    ("endpoint.register(LAYOUT, [(-1, 128)], 'both')", kvxfer.InvalidArgument, "-1"),
    ("endpoint.register(LAYOUT, [(4096,)], 'both')", TypeError, "1 values"),
    ("endpoint.register(LAYOUT, [(4096, 'x')], 'both')", TypeError, ""),
    ("endpoint.register(LAYOUT, [Cuda()], 'both')", kvxfer.Unsupported, "cuda"),
    ("endpoint.register(LAYOUT, [Broken({})], 'both')", TypeError, "data"),
    ("endpoint.register(LAYOUT, [Broken(5)], 'both')", TypeError, ""),
    ("endpoint.register(LAYOUT, [Broken({'data': (4096, False), 'shape': (8, 16), 'typestr': 'what'})], 'both')", TypeError, "typestr"),
    ("endpoint.register(LAYOUT, [Broken({'data': (4096, False), 'shape': (8, 16), 'typestr': '|u1', 'strides': (1,)})], 'both')", TypeError, "strides"),
    ("endpoint.register(LAYOUT, [bytearray(128)], 'owner')", kvxfer.InvalidArgument, "role"),
    ("endpoint.register('layout', [bytearray(128)], 'both')", TypeError, "layout"),
    ("endpoint.allocate(LAYOUT, 'owner')", kvxfer.InvalidArgument, "role"),
    ("endpoint.allocate(kvxfer.Layout.opaque(1 << 31, 1 << 17), 'both')", kvxfer.Error, ""),
    ("pool.copy_in(1, 0, 0, b'x')", kvxfer.OutOfBounds, "plane 1"),
    ("pool.copy_in(0, 8, 0, b'x')", kvxfer.OutOfBounds, "block 8"),
    ("pool.copy_in(0, 0, 16, b'x')", kvxfer.OutOfBounds, "offset 16"),
    ("pool.copy_in(0, 0, 0, 'text')", TypeError, "bytes"),
    ("pool.copy_in(0, -1, 0, b'x')", kvxfer.InvalidArgument, "-1"),
    ("pool.copy_out(0, 0, 0, 17)", kvxfer.OutOfBounds, "17 bytes"),
    ("pool.copy_out(0, 0, 0, 2**32 - 1)", kvxfer.OutOfBounds, "4294967295"),
    ("pool.copy_out(7, 0, 0, 2**32 - 1)", kvxfer.OutOfBounds, "plane 7"),
    ("pool.close_wait(-1)", kvxfer.InvalidArgument, "negative"),
    # selections
    ("kvxfer.Selection()", TypeError, "groups"),
    ("kvxfer.Selection(0, 1)", TypeError, "groups"),
    ("kvxfer.Selection(0, 1, [0], groups=[])", TypeError, "groups"),
    ("kvxfer.Selection(-1, 1, [0])", kvxfer.InvalidArgument, "-1"),
    ("kvxfer.Selection(0, huge, [0])", kvxfer.InvalidArgument, "1180591620717411303424"),
    ("kvxfer.Selection(0, 1, [-1])", kvxfer.OutOfBounds, "block -1"),
    ("kvxfer.Selection(0, 1, [huge])", kvxfer.OutOfBounds, "block 1180591620717411303424"),
    ("kvxfer.Selection(0, 1, [1 << 32])", kvxfer.OutOfBounds, "block 4294967296"),
    ("kvxfer.Selection(0, 1, [1.0])", TypeError, "float"),
    ("kvxfer.Selection(0, 1, [True])", TypeError, "bool"),
    ("kvxfer.Selection(0, 1, ['1'])", TypeError, "str"),
    ("kvxfer.Selection(0, 1, '1')", TypeError, "str"),
    ("kvxfer.Selection(0, 1, b'1')", TypeError, "bytes"),
    ("kvxfer.Selection(0, 1, 5)", TypeError, "int"),
    ("kvxfer.Selection(0, 1, None)", TypeError, "groups"),
    ("kvxfer.Selection(0, 1, np.array([-1]))", kvxfer.OutOfBounds, "block -1"),
    ("kvxfer.Selection(0, 1, np.array([1 << 32]))", kvxfer.OutOfBounds, "4294967296"),
    ("kvxfer.Selection(0, 1, np.array([1.0]))", TypeError, '"d"'),
    ("kvxfer.Selection(0, 1, np.array([1], np.uint8))", TypeError, '"B"'),
    ("kvxfer.Selection(0, 1, np.array([1], '>i4'))", TypeError, '">i"'),
    ("kvxfer.Selection(0, 1, np.array([[1]]))", TypeError, "2"),
    ("kvxfer.Selection(0, 1, np.array(1))", TypeError, "0"),
    ("kvxfer.Selection(groups=[(0, 1)])", TypeError, "cache group"),
    ("kvxfer.Selection(groups=5)", TypeError, ""),
    ("kvxfer.Target('x')", TypeError, "selection"),
    ("kvxfer.Target((0, 1, [0]), heads=[(0, -1)])", kvxfer.InvalidArgument, "-1"),
    # handles
    ("endpoint.offer(5, pool)", TypeError, "key"),
    ("endpoint.offer('k' * 257, pool)", kvxfer.InvalidArgument, "256"),
    ("endpoint.offer('', pool)", kvxfer.InvalidArgument, "key"),
    ("endpoint.offer('k', 'pool')", TypeError, "pool"),
    ("endpoint.offer('k', pool, readers=0)", kvxfer.InvalidArgument, ""),
    ("endpoint.offer('k', pool, readers=70000)", kvxfer.InvalidArgument, "70000"),
    ("endpoint.offer('k', pool, deadline=-1.0)", kvxfer.InvalidArgument, "negative"),
    ("endpoint.offer('k', pool, deadline=10**400)", kvxfer.InvalidArgument, "more seconds"),
    ("endpoint.offer('k', pool, deadline=False)", TypeError, "seconds, not bool"),
    ("offer.wait(10**400)", kvxfer.InvalidArgument, "more seconds"),
    ("endpoint.offer('k', pool, priority=256)", kvxfer.InvalidArgument, "256"),
    ("endpoint.offer('k', pool, checksum='yes')", TypeError, "checksum"),
    ("endpoint.offer('k', pool, events=-1)", kvxfer.InvalidArgument, "-1"),
    ("endpoint.offer('kept', pool)", kvxfer.DuplicateKey, "kept"),
    ("other.offer('k', pool)", kvxfer.NotRegistered, "another|bad|belongs"),
    ("offer.append(5)", TypeError, "selection"),
    ("offer.append((0, 2, [0]))", kvxfer.InvalidArgument, "1 blocks"),
    ("offer.append((0, 1, [8]))", kvxfer.OutOfBounds, "block 8"),
    ("offer.append((1, 0, []))", kvxfer.InvalidArgument, ""),
    ("offer.append((0, 2, [3, 3]))", kvxfer.InvalidArgument, "twice"),
    ("offer.append([(0, 1, [0]), (0, 1, [1])])", kvxfer.InvalidArgument, "2 cache groups"),
    ("offer.append([])", kvxfer.InvalidArgument, "0 cache groups"),
    ("offer.ready(0, 1)", kvxfer.OutOfBounds, ""),
    ("offer.ready(1, 0)", kvxfer.OutOfBounds, ""),
    ("offer.ready(0, 1, layers=5)", TypeError, "layers"),
    ("offer.finish(5)", kvxfer.OutOfBounds, ""),
    ("offer.retract([6])", kvxfer.InvalidArgument, ""),
    ("offer.wait(-1)", kvxfer.InvalidArgument, "negative"),
    ("endpoint.ready_many([(offer, 0)])", (TypeError, ValueError), ""),
    ("endpoint.ready_many([('offer', 0, 1, None)])", TypeError, ""),
    ("endpoint.ready_many([(offer, 0, 1, None)])", kvxfer.OutOfBounds, ""),
    ("endpoint.ready_many(5)", TypeError, ""),
    ("endpoint.claim('k', pool, [])", kvxfer.InvalidArgument, ""),
    ("endpoint.claim('k', pool, '127.0.0.1:1')", TypeError, "list"),
    ("endpoint.claim('k', pool, [5])", TypeError, "address"),
    ("endpoint.claim('k', pool, ['x'])", kvxfer.InvalidArgument, ""),
    ("endpoint.claim('k', pool, ['127.0.0.1:1'], set=-1)", kvxfer.InvalidArgument, "-1"),
    ("endpoint.claim('k', pool, ['127.0.0.1:1'], set=1 << 128)", kvxfer.InvalidArgument, ""),
    ("endpoint.claim('k', pool, ['127.0.0.1:1'], member=1, members=1)", kvxfer.InvalidArgument, ""),
    ("claim.fill((0, 9, range(9)))", kvxfer.OutOfBounds, "block 8"),
    ("claim.fill('x')", TypeError, "selection"),
    ("pool.grant((0, 1, [9]))", kvxfer.OutOfBounds, "block 9"),
    ("pool.grant([(0, 0, 0, 17)])", (kvxfer.OutOfBounds, kvxfer.InvalidArgument), ""),
    ("pool.grant([(0, 0, 0, 1), 5])", TypeError, ""),
    ("pool.grant(kvxfer.Target((0, 1, [0]), layers=[5]))", kvxfer.OutOfBounds, ""),
    ("pool.grant((0, 1, [0]), holder='x')", kvxfer.InvalidArgument, "hexadecimal"),
    ("pool.grant((0, 1, [0]), deadline=math.nan)", kvxfer.InvalidArgument, "negative"),
    ("pool.serve((0, 1, [9]))", kvxfer.OutOfBounds, "block 9"),
    ("endpoint.push(pool, (0, 1, [0]), 'grant')", TypeError, "grant"),
    ("endpoint.push(pool, (0, 1, [0]), grant.grant, message='text')", TypeError, "bytes"),
    ("endpoint.push(pool, (0, 1, [0]), grant.grant, message=bytes(1 << 20))", kvxfer.InvalidArgument, ""),
    ("endpoint.push(pool, (0, 2, [0, 1]), grant.grant)", kvxfer.InvalidArgument, ""),
    ("endpoint.pull(grant.grant, pool, (0, 1, [0]))", kvxfer.InvalidArgument, "grant to write"),
]


class Cuda:
    __cuda_array_interface__ = {"data": (4096, False), "shape": (8, 16), "typestr": "|u1", "version": 3}


class Broken:
    def __init__(self, described):
        self.__array_interface__ = described


@pytest.mark.parametrize("call, error, words", CASES, ids=[case[0] for case in CASES])
def test_bad_input(world, call, error, words):
    import pathlib

    names = {**globals(), **world, "pathlib": pathlib}
    # Before 3.11 exceptions have no notes, which is where the names of arguments are.
    told = words if words and not (error is TypeError and sys.version_info < (3, 11)) else None
    with pytest.raises(error, match=told) as caught:
        eval(call, names)  # the table above is the only source
    if isinstance(caught.value, kvxfer.Error):
        assert caught.value.kind == type(caught.value).__name__ and len(str(caught.value)) > 10


def test_nothing_was_registered_or_opened(world):
    endpoint = world["endpoint"]
    pool = endpoint.allocate(LAYOUT, "both")
    assert pool.id == world["pool"].id + 1
    handle = pool.grant((0, 1, [0]))
    assert handle.id == world["grant"].id + 1
    handle.cancel()


GOOD_BLOCKS = [
    [3, 1],
    (3, 1),
    iter([3, 1]),
    range(3, 0, -2),
    {3: "dict keys", 1: "too"},
    array.array("I", [3, 1]),
    array.array("q", [3, 1]),
    np.array([3, 1], np.int32),
    np.array([3, 1], np.uint32),
    np.array([3, 1], np.int64),
    np.array([3, 1], np.uint64),
    np.array([3, 0, 1, 0])[::2],
    np.array([1, 3])[::-1],
    list(np.array([3, 1])),
    memoryview(np.array([3, 1], np.int32)),
]


@pytest.mark.parametrize("blocks", GOOD_BLOCKS, ids=lambda blocks: type(blocks).__name__)
def test_block_lists(blocks):
    assert kvxfer.Selection(0, 2, blocks).groups == [(0, 2, [3, 1])]


def test_empty_block_lists():
    for blocks in ([], (), np.zeros(0, np.int64), array.array("i"), range(0)):
        assert kvxfer.Selection(0, 0, blocks).groups == [(0, 0, [])]


def test_the_exceptions_are_those_of_rust():
    import pickle

    from kvxfer._kvxfer import _kinds

    kinds = _kinds()
    assert len(kinds) == 25
    for name, number, retryable in kinds:
        error = getattr(kvxfer, name)
        assert (error.kind, error.number, error.retryable) == (name, number, retryable)
        made = error("what: why")
        assert made.destination == "untouched"
        made.destination = "written"
        again = pickle.loads(pickle.dumps(made))
        assert type(again) is error and str(again) == "what: why" and again.destination == "written"
        assert error.__module__ == "kvxfer" and error.__doc__
    bases = {
        "InvalidArgument": ValueError,
        "OutOfBounds": IndexError,
        "DeadlineExceeded": TimeoutError,
        "WaitTimeout": kvxfer.DeadlineExceeded,
        "Unreachable": ConnectionError,
        "PeerLost": ConnectionError,
    }
    for name, base in bases.items():
        assert issubclass(getattr(kvxfer, name), base)


def test_infinite_times_are_for_ever(world):
    claim = world["endpoint"].claim("infinite", world["pool"], ["127.0.0.1:1"], deadline=math.inf)
    claim.cancel()
    with pytest.raises(kvxfer.Cancelled):
        claim.wait(math.inf)
