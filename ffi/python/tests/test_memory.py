"""Pools from every kind of memory: what is registered is where the object is, and the object is kept."""

import array
import ctypes
import mmap
import weakref

import numpy as np
import pytest
from conftest import WAIT, collect, until

import kvxfer

LAYOUT = kvxfer.Layout.opaque(64, 8)


class Only:
    """Shows one attribute of an array and hides the rest."""

    def __init__(self, inner, *names):
        for name in names:
            setattr(self, name, getattr(inner, name))


def objects():
    numbers = np.arange(512, dtype=np.uint8)
    yield "numpy", numbers, numbers.ctypes.data
    shaped = np.zeros((2, 4, 16), np.float32)
    yield "numpy-3d", shaped, shaped.ctypes.data
    inner = np.zeros((4, 512), np.uint8)
    yield "numpy-view", inner[2], inner[2].ctypes.data
    data = bytearray(512)
    yield "bytearray", data, ctypes.addressof(ctypes.c_char.from_buffer(data))
    view = memoryview(bytearray(1024))[256:768]
    yield "memoryview", view, ctypes.addressof(ctypes.c_char.from_buffer(view))
    words = array.array("Q", [0] * 64)
    yield "array", words, words.buffer_info()[0]
    mapped = mmap.mmap(-1, 4096)
    yield "mmap", mapped, ctypes.addressof(ctypes.c_char.from_buffer(mapped))
    raw = (ctypes.c_uint8 * 512)()
    yield "ctypes", raw, ctypes.addressof(raw)
    held = np.zeros(64, np.float64)
    yield "__array_interface__", Only(held, "__array_interface__"), held.ctypes.data
    shared = np.zeros((8, 16), np.float32)
    yield "__dlpack__", Only(shared, "__dlpack__", "__dlpack_device__"), shared.ctypes.data
    for kind in ("M8[ns]", "m8[25s]", "U2", "S8", "?", [("O", "i4"), ("text", "S4")]):
        # Of these the buffer protocol knows some, and the interface all.
        odd = np.zeros(512 // np.dtype(kind).itemsize, kind)
        yield f"{kind}", odd, odd.ctypes.data
        yield f"interface {kind}", Only(odd, "__array_interface__"), odd.ctypes.data
    kept = np.zeros(512, np.uint8)
    yield "address", (kept.ctypes.data, 512, kept), kept.ctypes.data
    bare = np.zeros(512, np.uint8)
    bare_memory.append(bare)
    yield "address-without-owner", (bare.ctypes.data, 512), bare.ctypes.data


bare_memory = []


def test_where_it_is(endpoint):
    one = endpoint()
    for name, memory, address in objects():
        pool = one.register(LAYOUT, [memory], "both")
        assert pool.regions[0][0] == address, name
        said = name.encode()[:59]
        pool.copy_in(0, 3, 5, said)
        assert pool.copy_out(0, 3, 5, len(said)) == said
        assert ctypes.string_at(address + 3 * 64 + 5, len(said)) == said
        pool.close()


def test_read_only_memory_can_be_served(endpoint):
    one = endpoint()
    served = bytes(range(256)) * 2
    frozen = np.arange(512, dtype=np.uint8)
    frozen.flags.writeable = False
    for memory in (served, frozen, memoryview(served)):
        pool = one.register(LAYOUT, [memory], "serve")
        assert pool.copy_out(0, 1, 0, 64) == bytes(range(64, 128))
        pool.close()


def test_what_dlpack_gave_is_given_back(endpoint):
    one = endpoint()
    memory = np.zeros(512, np.uint8)
    gone = weakref.ref(memory)

    class Exporter:
        def __dlpack__(self):
            return memory_of[0].__dlpack__()

    memory_of = [memory]
    pool = one.register(LAYOUT, [Exporter()], "both")
    memory_of.clear()
    del memory
    collect()
    assert gone() is not None
    pool.copy_in(0, 7, 0, b"still there")
    pool.close()
    del pool

    def given_back():
        collect()
        one.peers()
        return gone() is None

    until(given_back, "the tensor is given back")


def test_dlpack_of_other_things(endpoint):
    class Liar:
        def __dlpack__(self):
            return "capsule"

    with pytest.raises(TypeError, match="no capsule"):
        endpoint().register(LAYOUT, [Liar()], "both")

    class Raises:
        def __dlpack__(self):
            raise BufferError("not today")

    with pytest.raises(BufferError, match="not today"):
        endpoint().register(LAYOUT, [Raises()], "both")


def test_more_memory_than_declared_is_fine(endpoint):
    pool = endpoint().register(LAYOUT, [np.zeros(4096, np.uint8)], "both")
    assert pool.regions[0][1] == 4096


def test_several_regions(pair):
    prefill, decode = pair
    geometry = kvxfer.Geometry.latent("u8", 1, 64)
    planes = [kvxfer.Plane(str(n), "latent", region=n) for n in range(3)]
    layout = kvxfer.Layout([kvxfer.Group("a", geometry, 4)], planes, regions={1: 300})
    assert layout.region_lengths == [256, 300, 256]
    sources = [np.full(n, 10 + i, np.uint8) for i, n in enumerate(layout.region_lengths)]
    destinations = [np.zeros(n, np.uint8) for n in layout.region_lengths]
    serve, receive = prefill.register(layout, sources, "serve"), decode.register(layout, destinations, "receive")
    claim = decode.claim("r", receive, [prefill.address])
    claim.fill((0, 4, [3, 2, 1, 0]))
    offer = prefill.offer("r", serve)
    offer.append((0, 4, range(4)))
    offer.finish(4)
    claim.wait(WAIT), offer.wait(WAIT)
    assert [set(memory[:256]) for memory in destinations] == [{10}, {11}, {12}]


def test_groups_of_unlike_planes(pair):
    """A hybrid model: attention, a sliding window and a state, each with its own block table."""
    prefill, decode = pair

    def declare():
        groups = [
            kvxfer.Group("full", kvxfer.Geometry.attention("f16", 4, 2, 8), 6),
            kvxfer.Group("window", kvxfer.Geometry.attention("f16", 4, 2, 8), 6, window=8),
            kvxfer.Group("state", kvxfer.Geometry.state(), 3),
        ]
        full, window = np.zeros((2, 2, 6, 4, 2, 8), np.float16)
        state = np.zeros((3, 100), np.float32)
        axes = ("kv", "block", "token", "head", "dim")
        layout, regions = kvxfer.layout_of(
            groups,
            [
                kvxfer.TensorPlane(full, axes, layer="0", group=0),
                kvxfer.TensorPlane(window, axes, layer="1", group=1),
                kvxfer.TensorPlane(state, ("block", "packed"), layer="2", group=2),
            ],
        )
        return layout, regions, full, window, state

    layout, regions, full, window, state = declare()
    full[:], window[:], state[:] = 1, 2, 3
    serve = prefill.register(layout, regions, "serve")
    layout, regions, full, window, state = declare()
    receive = decode.register(layout, regions, "receive")
    selection = kvxfer.Selection(groups=[(0, 12, [0, 1, 2]), (4, 12, [4, 5]), (0, 0, [1])])
    claim = decode.claim("r", receive, [prefill.address])
    claim.fill(selection)
    offer = prefill.offer("r", serve)
    offer.append(selection)
    offer.finish(12)
    claim.wait(WAIT), offer.wait(WAIT)
    assert (full[:, :3] == 1).all() and (full[:, 3:] == 0).all()
    assert (window[:, 4:] == 2).all() and (window[:, :4] == 0).all()
    assert (state[1] == 3).all() and (state[[0, 2]] == 0).all()
