"""Tensors of torch, where it is installed."""

import gc
import weakref

import pytest
from conftest import WAIT, until

import kvxfer

torch = pytest.importorskip("torch", reason="torch is not installed: its tensors are not tested")


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_an_engines_cache_in_two_orders(pair, dtype):
    """HND in memory, shown as NHD, as vLLM does; on the other side NHD, other block sizes, K and V fused."""
    prefill, decode = pair
    name = {"bfloat16": "bf16", "float16": "f16", "float32": "f32"}[dtype]
    dtype = getattr(torch, dtype)
    heads, dim, layers = 4, 8, 3
    memory = torch.randn(layers, 2, 10, heads, 16, dim).to(dtype)
    shown = memory.permute(0, 1, 2, 4, 3, 5)
    axes = ("kv", "block", "token", "head", "dim")
    group = kvxfer.Group("attention", kvxfer.Geometry.attention(name, 16, heads, dim), 10)
    layout, regions = kvxfer.layout_of(
        [group], [kvxfer.TensorPlane(shown[n], axes, layer=f"model.layers.{n}", order="HND") for n in range(layers)]
    )
    assert len(regions) == 1 and regions[0].length == memory.numel() * memory.element_size()
    assert layout.plane(0)["order"] == "head,token,dim"
    serve = prefill.register(layout, regions, "serve")

    received = [torch.zeros(12, 2, 8, heads, dim, dtype=dtype) for _ in range(layers)]
    group = kvxfer.Group("attention", kvxfer.Geometry.attention(name, 8, heads, dim), 12)
    layout, regions = kvxfer.layout_of(
        [group],
        [
            kvxfer.TensorPlane(tensor, ("block", "kv", "token", "head", "dim"), layer=f"model.layers.{n}")
            for n, tensor in enumerate(received)
        ],
    )
    assert len(regions) == layers and layout.plane(0)["kind"] == "fused"
    receive = decode.register(layout, regions, "receive")
    claim = decode.claim("r", receive, [prefill.address])
    claim.fill((0, 40, torch.tensor([11, 3, 0, 5, 7])))
    offer = prefill.offer("r", serve)
    offer.append((0, 40, torch.tensor([4, 2, 9], dtype=torch.int32)))
    offer.finish(40)
    claim.wait(WAIT), offer.wait(WAIT)
    for layer in range(layers):
        there = shown[layer][:, [4, 2, 9]].reshape(2, 48, heads, dim)[:, :40]
        here = received[layer][[11, 3, 0, 5, 7]].permute(1, 0, 2, 3, 4).reshape(2, 40, heads, dim)
        assert torch.equal(there, here)


def test_the_storage_is_kept(pair):
    prefill, _ = pair
    tensor = torch.zeros(8, 64, dtype=torch.uint8)
    gone = weakref.ref(tensor)
    pool = prefill.register(kvxfer.Layout.opaque(64, 8), [tensor], "both")
    del tensor
    gc.collect()
    pool.copy_in(0, 1, 0, b"kept")
    assert gone() is not None and bytes(gone()[1, :4].tolist()) == b"kept"
    pool.close()
    del pool

    def let_go():
        gc.collect()
        prefill.peers()
        return gone() is None

    until(let_go, "the tensor is let go")


def test_what_is_refused(pair):
    prefill, _ = pair
    layout = kvxfer.Layout.opaque(64, 8)
    with pytest.raises(kvxfer.InvalidArgument, match="one piece"):
        prefill.register(layout, [torch.zeros(64, 8, dtype=torch.uint8).T], "both")
    with pytest.raises((kvxfer.Error, TypeError, RuntimeError)):
        prefill.register(layout, [torch.zeros(8, 64, dtype=torch.uint8, device="meta")], "both")
    with pytest.raises(kvxfer.InvalidArgument):
        prefill.register(layout, [torch.zeros(0)], "both")
    pool = prefill.register(layout, [torch.zeros(8, 64, dtype=torch.uint8)], "both")
    with pytest.raises(TypeError, match="float"):
        pool.grant((0, 1, torch.tensor([1.0])))
