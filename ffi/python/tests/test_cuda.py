"""GPU memory, events and streams, with a CUDA driver of the test kit's (`FAKE_CUDA_LIBRARY`: its library)."""

import ctypes
import os
import time

import pytest

import kvxfer

LIBRARY = os.environ.get("FAKE_CUDA_LIBRARY")
needs_driver = pytest.mark.skipif(not LIBRARY, reason="FAKE_CUDA_LIBRARY names no fake CUDA driver")

BLOCK, BLOCKS = 4096, 8
BYTES = BLOCK * BLOCKS
LAYOUT = kvxfer.Layout.opaque(BLOCK, BLOCKS)


def test_without_a_driver_device_memory_and_events_are_unsupported():
    with kvxfer.Endpoint("prefill", config={"cuda": {"library": "/nonexistent/libcuda.so.1"}}) as endpoint:
        with pytest.raises(kvxfer.Unsupported, match="/nonexistent/libcuda.so.1"):
            endpoint.register(LAYOUT, [kvxfer.MemoryRegion(4096, BYTES, None, False, "cuda")], "both")
        with pytest.raises(kvxfer.Unsupported, match="memory on tpu"):
            endpoint.register(LAYOUT, [kvxfer.MemoryRegion(4096, BYTES, None, False, "tpu")], "both")
        pool = endpoint.allocate(LAYOUT, "both")
        offer = endpoint.offer("r", pool)
        offer.append((0, 1, [0]))
        for after in (8, Torch(8), CuPy(8)):
            with pytest.raises(kvxfer.Unsupported):
                offer.ready(0, 1, after=after)
            with pytest.raises(kvxfer.Unsupported):
                offer.finish(1, after=after)
            with pytest.raises(kvxfer.Unsupported):
                endpoint.ready_many([(offer, 0, 1, None)], after=after)
        for after in ("event", 1.5, True, object(), -1):
            with pytest.raises(TypeError):
                offer.ready(0, 1, after=after)
        claim = endpoint.claim("r", pool, ["127.0.0.1:1"])
        with pytest.raises(kvxfer.Unsupported):
            claim.hold_stream(Torch(8))
        for stream in ("stream", None, True):
            with pytest.raises(TypeError):
                claim.hold_stream(stream)
        claim.cancel()
        # The offer is as it was.
        offer.ready(0, 1)
        offer.cancel()


class Torch:
    """As torch names them."""

    def __init__(self, address):
        self.cuda_event = self.cuda_stream = address


class CuPy:
    """As CuPy names them."""

    def __init__(self, address):
        self.ptr = address


class Driver:
    """What an engine does with the driver's own functions."""

    def __init__(self):
        self.cuda = ctypes.CDLL(LIBRARY)
        self.call("cuInit", 0)
        device, context = ctypes.c_int(), ctypes.c_void_p()
        self.call("cuDeviceGet", ctypes.byref(device), 0)
        self.call("cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
        self.call("cuCtxSetCurrent", context)
        self.stream = self.made("cuStreamCreate", 1)

    def call(self, name, *arguments):
        code = getattr(self.cuda, name)(*arguments)
        assert code == 0, f"{name}: {code}"

    def made(self, name, *arguments):
        handle = ctypes.c_void_p()
        self.call(name, ctypes.byref(handle), *arguments)
        return handle.value

    def allocate(self, length=BYTES):
        return self.made("cuMemAlloc_v2", ctypes.c_size_t(length))

    def fill(self, address, value, length):
        self.call(
            "cuMemsetD8Async",
            ctypes.c_uint64(address),
            ctypes.c_ubyte(value),
            ctypes.c_size_t(length),
            ctypes.c_void_p(self.stream),
        )

    def recorded(self):
        event = self.made("cuEventCreate", 2)
        self.call("cuEventRecord", ctypes.c_void_p(event), ctypes.c_void_p(self.stream))
        return event


class Array:
    """Device memory as arrays of most libraries show it."""

    def __init__(self, address):
        self.__cuda_array_interface__ = {"data": (address, False), "shape": (BLOCKS, BLOCK), "typestr": "|u1", "version": 3}


@pytest.fixture
def driver():
    return Driver()


def endpoint(name):
    return kvxfer.Endpoint(name, transports=["tcp"], config={"cuda": {"library": LIBRARY}})


@needs_driver
def test_a_request_between_two_pools_in_device_memory(driver):
    with endpoint("prefill") as prefill, endpoint("decode") as decode:
        source = driver.allocate()
        given = prefill.register(LAYOUT, [Array(source)], "both")
        taken = decode.register(LAYOUT, [kvxfer.MemoryRegion(driver.allocate(), BYTES, None, False, "cuda")], "both")
        claim = decode.claim("r", taken, [prefill.address])
        claim.fill((0, 3, [5, 6, 7]))
        claim.hold_stream(Torch(driver.made("cuStreamCreate", 1)))
        offer = prefill.offer("r", given)
        offer.append((0, 3, [1, 2, 3]))
        driver.fill(source + BLOCK, 0x5A, 3 * BLOCK)
        offer.ready(0, 1, after=Torch(driver.recorded()))
        prefill.ready_many([(offer, 1, 2, None)], after=CuPy(driver.recorded()))
        offer.finish(3, after=driver.recorded())
        assert claim.wait(20).bytes == 3 * BLOCK
        offer.wait(20)
        for block in (5, 6, 7):
            assert bytes(taken.copy_out(0, block, 0, BLOCK)) == b"\x5a" * BLOCK

        # A push after an event.
        grant = taken.grant((0, 1, [0]))
        driver.fill(source + 4 * BLOCK, 0x21, BLOCK)
        prefill.push(given, (0, 1, [4]), grant.grant, after=driver.recorded()).wait(20)
        assert bytes(taken.copy_out(0, 0, 0, 4)) == b"\x21" * 4


@needs_driver
def test_memory_is_what_it_is_declared_as(driver):
    with endpoint("prefill") as prefill:
        host = bytearray(BYTES)
        address = ctypes.addressof(ctypes.c_char.from_buffer(host))
        with pytest.raises(kvxfer.InvalidArgument):
            prefill.register(LAYOUT, [(address, BYTES, host, False, "cuda")], "both")
        device = driver.allocate()
        with pytest.raises(kvxfer.InvalidArgument, match="declared as host memory"):
            prefill.register(LAYOUT, [(device, BYTES)], "both")
        with pytest.raises(kvxfer.InvalidArgument, match="null CUDA event"):
            pool = prefill.register(LAYOUT, [Array(device)], "both")
            offer = prefill.offer("r", pool)
            offer.append((0, 1, [0]))
            offer.ready(0, 1, after=0)
        offer.cancel()


@needs_driver
def test_a_layout_of_device_arrays_has_device_regions(driver):
    class Cache:
        def __init__(self, address):
            self.__cuda_array_interface__ = {
                "data": (address, False),
                "shape": (BLOCKS, 16, 2, 8),
                "typestr": "<f4",
                "version": 3,
            }

    geometry = kvxfer.Geometry.attention("f32", 16, kv_heads=2, head_size=8)
    group = kvxfer.Group("attention", geometry, BLOCKS)
    planes = [
        kvxfer.TensorPlane(Cache(driver.allocate(BLOCKS * 16 * 2 * 8 * 4)), ("block", "token", "head", "dim"), layer="0", kind=kind)
        for kind in ("key", "value")
    ]
    layout, regions = kvxfer.layout_of([group], planes)
    assert {region.device for region in regions} == {"cuda"}
    with endpoint("prefill") as prefill:
        prefill.register(layout, regions, "both").close()
