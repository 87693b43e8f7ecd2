"""From tensors to layouts: what is read, what is refused, and that values arrive where they belong."""

import itertools
import random

import numpy as np
import pytest
from conftest import WAIT

import kvxfer
from kvxfer import Geometry, Group, Sharding, TensorPlane, layout_of

HEADS, DIM, LAYERS = 4, 8, 3


def planes_of(layout):
    return [layout.plane(number) for number in range(layout.planes)]


def one(array, axes, geometry=None, blocks=6, **more):
    geometry = geometry or Geometry.attention("f32", 4, HEADS, DIM)
    return layout_of([Group("a", geometry, blocks)], [TensorPlane(array, axes, **more)])


def test_kv_outside_the_blocks_makes_two_planes():
    array = np.zeros((2, 6, 4, HEADS, DIM), np.float32)
    layout, regions = one(array, ("kv", "block", "token", "head", "dim"))
    key, value = planes_of(layout)
    block = 4 * HEADS * DIM * 4
    assert (key["kind"], value["kind"]) == ("key", "value")
    assert (key["base"], value["base"]) == (0, 6 * block)
    assert key["stride"] == key["block_length"] == block and key["order"] == "token,head,dim"
    (region,) = regions
    assert (region.address, region.length) == (array.ctypes.data, array.nbytes)


def test_kv_inside_the_blocks_is_fused():
    array = np.zeros((6, 2, 4, HEADS, DIM), np.float32)
    layout, _ = one(array, ("block", "kv", "token", "head", "dim"))
    (fused,) = planes_of(layout)
    assert fused["kind"] == "fused" and fused["order"] == "kv,token,head,dim"
    array = np.zeros((6, 4, 2, HEADS, DIM), np.float32)
    (fused,) = planes_of(one(array, ("block", "token", "kv", "head", "dim"))[0])
    assert fused["order"] == "token,kv,head,dim"


def test_a_permuted_view_is_what_it_is_in_memory():
    memory = np.zeros((2, 6, HEADS, 4, DIM), np.float32)
    view = memory.transpose(0, 1, 3, 2, 4)
    layout, regions = one(view, ("kv", "block", "token", "head", "dim"), order="HND")
    assert all(plane["order"] == "head,token,dim" for plane in planes_of(layout))
    assert regions[0].address == memory.ctypes.data
    with pytest.raises(kvxfer.InvalidArgument, match="strides say"):
        one(view, ("kv", "block", "token", "head", "dim"), order="NHD")


def test_layers_in_one_tensor_are_block_major():
    array = np.zeros((6, LAYERS, 2, 4, HEADS, DIM), np.float32)
    layout, regions = one(array, ("block", "layer", "kv", "token", "head", "dim"), layer=["x", "y", "z"])
    assert layout.layers == ["x", "y", "z"] and len(regions) == 1
    assert {plane["stride"] for plane in planes_of(layout)} == {array.strides[0]}
    assert [plane["base"] for plane in planes_of(layout)] == [0, array.strides[1], 2 * array.strides[1]]


def test_heads_outside_the_blocks_are_planes_of_their_own():
    array = np.zeros((HEADS, 6, 4, DIM), np.float32)
    layout, _ = layout_of(
        [Group("a", Geometry.attention("f32", 4, HEADS, DIM), 6)],
        [TensorPlane(array, ("head", "block", "token", "dim"), kind=kind) for kind in ("key",)],
    )
    assert [plane["heads"] for plane in planes_of(layout)] == [(head, head + 1) for head in range(HEADS)]


def test_tensors_of_one_allocation_share_a_region():
    cache = np.zeros((LAYERS, 2, 6, 4, HEADS, DIM), np.float32)
    apart = np.zeros((2, 6, 4, HEADS, DIM), np.float32)
    group = Group("a", Geometry.attention("f32", 4, HEADS, DIM), 6)
    axes = ("block", "token", "head", "dim")
    tensors = []
    for layer in range(1, LAYERS):
        tensors.append(TensorPlane(cache[layer, 0], axes, str(layer), kind="key"))
        tensors.append(TensorPlane(cache[layer, 1], axes, str(layer), kind="value"))
    tensors.append(TensorPlane(apart, ("kv", *axes), "9"))
    layout, regions = layout_of([group], tensors)
    assert len(regions) == 2 and sum(region.length for region in regions) == cache[1:].nbytes + apart.nbytes
    assert len(layout.layers) == LAYERS


def test_other_kinds():
    latent = np.zeros((6, 4, 576), np.float16)
    layout, _ = one(latent, ("block", "token", "dim"), Geometry.latent("bf16", 4, 576))
    assert planes_of(layout)[0]["kind"] == "latent"
    state = np.zeros((6, HEADS, 5, 7), np.float32)
    layout, _ = one(state, ("block", "head", "packed"), Geometry.state(HEADS))
    assert planes_of(layout)[0]["block_length"] == HEADS * 5 * 7 * 4
    packed = np.zeros((2, 6, HEADS, DIM, 4), np.float32)
    layout, _ = one(packed, ("kv", "block", "head", "packed"))
    assert [plane["order"] for plane in planes_of(layout)] == ["packed", "packed"]
    values = np.zeros((6, 4, HEADS, 4), np.float32)
    geometry = Geometry.attention("f32", 4, HEADS, DIM, value_head_size=4)
    layout, _ = one(values, ("block", "token", "head", "dim"), geometry, kind="value")
    assert planes_of(layout)[0]["block_length"] == values.nbytes // 6
    half, _ = one(
        np.zeros((2, 6, 4, 1, DIM), np.float32),
        ("kv", "block", "token", "head", "dim"),
        Geometry.attention("f32", 4, 2, DIM, sharding=Sharding.heads(3, 4)),
    )
    assert planes_of(half)[0]["heads"] == (1, 2)


NHD = ("block", "token", "head", "dim")
ARRAY = np.zeros((6, 4, HEADS, DIM), np.float32)
REFUSED = [
    (ARRAY, NHD, {}, "'key' or 'value'"),
    (ARRAY, NHD, {"kind": "latent"}, "'key' or 'value'"),
    (ARRAY, NHD[:3], {"kind": "key"}, "name each axis"),
    (ARRAY, ("block", "token", "head", "head"), {"kind": "key"}, "twice"),
    (ARRAY, ("block", "token", "head", "leg"), {"kind": "key"}, "leg"),
    (ARRAY, ("kv", "token", "head", "dim"), {}, "'block'"),
    (ARRAY, ("block", "packed", "head", "dim"), {"kind": "key"}, "put it last"),
    (ARRAY, ("block", "head", "token", "dim"), {"kind": "key", "group": 1}, "cache group 1"),
    (np.zeros((6, 5, HEADS, DIM), np.float32), NHD, {"kind": "key"}, "'token' of size 5"),
    (np.zeros((6, 4, 3, DIM), np.float32), NHD, {"kind": "key"}, "'head' of size 3"),
    (np.zeros((6, 4, HEADS, 9), np.float32), NHD, {"kind": "key"}, "'dim' of size 9"),
    (np.zeros((7, 4, HEADS, DIM), np.float32), NHD, {"kind": "key"}, "'block' of size 7"),
    (np.zeros((6, 4, HEADS, DIM), np.float16), NHD, {"kind": "key"}, "f32"),
    (np.zeros((3, 6, 4, HEADS, DIM), np.float32), ("kv", *NHD), {}, "'kv' of size 3"),
    (np.zeros((6, HEADS, DIM), np.float32), ("block", "head", "dim"), {"kind": "key"}, "4 along 'token'"),
    (np.zeros((6, 4, HEADS, 2 * DIM), np.float32)[..., ::2], NHD, {"kind": "key"}, "gaps"),
    (np.zeros((6, 4, HEADS, 2 * DIM), np.float32)[..., :DIM], NHD, {"kind": "key"}, "gaps"),
    (np.zeros((6, 8, HEADS, DIM), np.float32)[:, ::2], NHD, {"kind": "key"}, "gaps"),
    (ARRAY[:, ::-1], NHD, {"kind": "key"}, "backwards"),
    (np.broadcast_to(np.zeros((6, 1, HEADS, DIM), np.float32), ARRAY.shape), NHD, {"kind": "key"}, "overlap"),
    (
        np.lib.stride_tricks.as_strided(np.zeros(4096, np.float32), ARRAY.shape, (64, 128, 32, 4)),
        NHD,
        {"kind": "key"},
        "overlap",
    ),
    (ARRAY, NHD, {"kind": "key", "layer": ["0", "1"]}, "no axis 'layer'"),
    (np.zeros((3, 6, 4, HEADS, DIM), np.float32), ("layer", *NHD), {"kind": "key"}, "one layer id"),
    (np.zeros((3, 6, 4, HEADS, DIM), np.float32), ("layer", *NHD), {"kind": "key", "layer": ["0"]}, "size 3"),
    (np.zeros((2, 6, 4, HEADS, DIM), np.float32), ("kv", *NHD), {"kind": "key"}, "axis 'kv'"),
    (np.zeros((2, 6, 4, HEADS, DIM), np.float32), ("kv", *NHD), {"kind": "fused"}, "one piece"),
    (ARRAY.transpose(0, 2, 1, 3), ("block", "head", "packed"), {"kind": "key"}, "not permuted"),
    (np.zeros((6, 4, 0, DIM), np.float32), NHD, {"kind": "key"}, "no bytes"),
    (ARRAY, NHD, {"kind": "key", "order": "DNH"}, "DNH"),
]


@pytest.mark.parametrize("array, axes, more, words", REFUSED, ids=[case[3] for case in REFUSED])
def test_what_does_not_fit_is_refused_with_the_reason(array, axes, more, words):
    with pytest.raises(kvxfer.InvalidArgument, match=words):
        one(array, axes, **more)


def test_wrong_types():
    with pytest.raises(TypeError, match="TensorPlane"):
        layout_of([Group("a", Geometry.attention("f32", 4, HEADS, DIM), 6)], [ARRAY])
    with pytest.raises(TypeError, match="memory is"):
        one("text", NHD, kind="key")
    with pytest.raises(TypeError, match="axes are a tuple"):
        one(ARRAY, "NHD", kind="key")


def test_read_only_tensors_can_be_served_only(endpoint):
    array = ARRAY.copy()
    array.flags.writeable = False
    layout, regions = one(array, NHD, kind="key")
    here = endpoint()
    with pytest.raises(kvxfer.InvalidArgument, match="read-only"):
        here.register(layout, regions, "receive")
    here.register(layout, regions, "serve").close()


class Cache:
    """A cache of one rank in some arrangement, whose values are known."""

    def __init__(self, chance, rank, size, tokens_per_block, blocks):
        self.rank, self.size, self.tokens_per_block, self.blocks = rank, size, tokens_per_block, blocks
        self.local = HEADS // size
        geometry = Geometry.attention("f32", tokens_per_block, HEADS, DIM, sharding=Sharding.heads(rank, size))
        sizes = {"kv": 2, "layer": LAYERS, "block": blocks, "token": tokens_per_block, "head": self.local, "dim": DIM}
        layers = [str(layer) for layer in range(LAYERS)]
        together = chance.random() < 0.5
        outer = ["block", "kv"] + (["layer"] if together else [])
        inner = ["token", "head"]
        chance.shuffle(outer)
        chance.shuffle(inner)
        # In memory: what may lie apart, then the block. Now and then heads or dims where few expect them.
        if chance.random() < 0.2:
            self.order = [*outer, "dim", *inner]
        elif chance.random() < 0.3:
            at = outer.index("block")
            self.order = [*outer[:at], "head", *outer[at:], "token", "dim"]
        else:
            self.order = [*outer, *inner, "dim"]
        # As it is shown: permuted.
        shown = list(self.order)
        if chance.random() < 0.5:
            chance.shuffle(shown)
        self.arrays = []  # as (layer, kv, block, token, head, dim)
        tensors = []
        for number in [None] if together else range(LAYERS):
            # Room between the blocks, now and then.
            extra = chance.choice([0, 0, 1])
            memory = np.full([sizes[axis] + (extra if axis == self.order[0] else 0) for axis in self.order], -1, "f4")
            memory = memory[: sizes[self.order[0]]]
            view = memory.transpose([self.order.index(axis) for axis in shown])
            layer = layers if together else layers[number]
            tensors.append(TensorPlane(view, tuple(shown), layer))
            known = [axis for axis in ("layer", "kv", "block", "token", "head", "dim") if axis in self.order]
            self.arrays.append(memory.transpose([self.order.index(axis) for axis in known]))
        self.values = self.arrays if not together else list(self.arrays[0])
        self.layout, self.regions = layout_of([Group("a", geometry, blocks)], tensors)

    def tokens(self, blocks, count):
        """Values by (layer, kv, token, head, dim)."""
        held = np.stack(self.values)[:, :, blocks]
        return held.reshape(LAYERS, 2, -1, self.local, DIM)[:, :, :count]

    def write(self, blocks, truth):
        count = truth.shape[2]
        heads = truth[..., self.rank * self.local : (self.rank + 1) * self.local, :]
        for layer, array in enumerate(self.values):
            for token in range(count):
                block, slot = divmod(token, self.tokens_per_block)
                array[:, blocks[block], slot] = heads[layer, :, token]


@pytest.mark.parametrize("seed", range(24))
def test_values_arrive_between_any_two_arrangements(endpoint, seed):
    chance = random.Random(seed)
    source_size, destination_size = chance.choice([(1, 1), (1, 2), (2, 1), (2, 4), (4, 2), (4, 1)])
    token_count = chance.randrange(1, 24)
    truth = np.random.default_rng(seed).random((LAYERS, 2, token_count, HEADS, DIM), np.float32)
    sides = []
    for size in (source_size, destination_size):
        tokens_per_block = chance.choice([2, 4, 8])
        needed = -(-token_count // tokens_per_block)
        blocks = needed + chance.randrange(1, 4)
        chosen = chance.sample(range(blocks), needed)
        sides.append([(Cache(chance, rank, size, tokens_per_block, blocks), chosen) for rank in range(size)])
    sources, destinations = sides
    offers = []
    pools = []
    addresses = []
    for rank, (cache, chosen) in enumerate(sources):
        cache.write(chosen, truth)
        one = endpoint(f"prefill-{rank}", rank=kvxfer.Rank(tensor=(rank, source_size)))
        pool = one.register(cache.layout, cache.regions, "serve")
        offers.append((one.offer("r", pool), chosen))
        pools.append(pool)
        addresses.append(one.address)
    claims = []
    for rank, (cache, chosen) in enumerate(destinations):
        one = endpoint(f"decode-{rank}", rank=kvxfer.Rank(tensor=(rank, destination_size)))
        pool = one.register(cache.layout, cache.regions, "receive")
        claim = one.claim("r", pool, addresses, set=seed, member=rank, members=destination_size)
        claim.fill((0, token_count, chosen))
        claims.append(claim)
        pools.append(pool)
    for offer, chosen in offers:
        offer.append((0, token_count, chosen))
        offer.finish(token_count)
    for claim in claims:
        claim.wait(WAIT)
    for offer, _ in offers:
        offer.wait(WAIT)
    for rank, (cache, chosen) in enumerate(destinations):
        local = HEADS // destination_size
        expected = truth[:, :, :, rank * local : (rank + 1) * local]
        assert (cache.tokens(chosen, token_count) == expected).all(), (cache.order, sources[0][0].order)
        untouched = [block for block in range(cache.blocks) if block not in chosen]
        assert (np.stack(cache.values)[:, :, untouched] == -1).all()


def test_a_wrong_value_would_be_seen(endpoint):
    """The comparison above can fail: two layouts that disagree about K and V give other values."""
    prefill, decode = endpoint("prefill"), endpoint("decode")
    source = np.random.default_rng(0).random((2, 6, 4, HEADS, DIM), np.float32)
    destination = np.zeros_like(source)
    layout, regions = one(source, ("kv", "block", "token", "head", "dim"))
    group = Group("a", Geometry.attention("f32", 4, HEADS, DIM), 6)
    swapped, memory = layout_of(
        [group], [TensorPlane(destination[1], NHD, kind="key"), TensorPlane(destination[0], NHD, kind="value")]
    )
    serve, receive = prefill.register(layout, regions, "serve"), decode.register(swapped, memory, "receive")
    claim = decode.claim("r", receive, [prefill.address])
    claim.fill((0, 4, [0]))
    offer = prefill.offer("r", serve)
    offer.append((0, 4, [0]))
    offer.finish(4)
    claim.wait(WAIT), offer.wait(WAIT)
    assert (destination[:, 0] != source[:, 0]).any()
    assert (destination[::-1, 0] == source[:, 0]).all()


def test_every_order_of_inner_axes():
    for order in itertools.permutations(("token", "head", "dim")):
        sizes = {"token": 4, "head": HEADS, "dim": DIM}
        memory = np.zeros([6, *(sizes[axis] for axis in order)], np.float32)
        view = memory.transpose(0, *(1 + order.index(axis) for axis in ("token", "head", "dim")))
        layout, _ = one(view, NHD, kind="key", order=order)
        assert layout.plane(0)["order"] == ",".join(order)
