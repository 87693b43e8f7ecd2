"""kvxfer.vllm: vLLM's layouts by geometry, checked with host arrays of their shapes.

Each array is filled so that a value says which layer, block, head, token and element it is; the planes are then read
byte by byte at the offsets they state."""

import itertools
from types import SimpleNamespace

import pytest

from kvxfer.vllm.device import device_of
from kvxfer.vllm.layout import CacheLayout, GroupSpec, LayoutError, layer_order, planes_of, view_of
from kvxfer.vllm.specs import check_drafts, check_parallel, groups_of, tables_of
from kvxfer.vllm.tables import GroupTokens

np = pytest.importorskip("numpy", reason="numpy is not installed: arrays are not tested")

LAYERS, BLOCKS, HEADS, TOKENS, DIM = 3, 5, 4, 8, 6
#: vLLM's kv_cache_layout.py: the physical order of the logical axes [L, B, H, N, C].
LAYOUTS = {
    "LBHNC": (0, 1, 2, 3, 4),
    "LBNHC": (0, 1, 3, 2, 4),
    "LHBNC": (0, 2, 1, 3, 4),
    "BLHNC": (1, 0, 2, 3, 4),
    "BLNHC": (1, 0, 3, 2, 4),
    "BHLNC": (1, 2, 0, 3, 4),
}


def spec(**changes):
    values = dict(
        name="attention-0",
        kind="attention",
        dtype="f32",
        block_size=TOKENS,
        kv_heads=HEADS,
        head_size=DIM,
        value_head_size=DIM,
        layers=tuple(f"model.layers.{layer}.attn" for layer in range(LAYERS)),
    )
    return GroupSpec(**{**values, **changes})


def cache(layout, heads=HEADS, content=2 * DIM, tokens=TOKENS, dtype=np.float32):
    """All layers in one allocation, as vLLM views them: [B, H, N, C] per layer."""
    order = LAYOUTS[layout]
    shape = (LAYERS, BLOCKS, heads, tokens, content)
    raw = np.zeros(tuple(shape[axis] for axis in order), dtype)
    logical = raw.transpose(np.argsort(order))
    logical[...] = np.arange(logical.size, dtype=dtype).reshape(shape)
    return {f"model.layers.{layer}.attn": logical[layer] for layer in range(LAYERS)}


def elements(plane, geometry_spec, view, block):
    """(head, token, kv, dim) -> value, read from the storage as the plane says."""
    size = view.itemsize
    low, high = plane.heads if plane.heads else (0, 1)
    sizes = {"head": high - low, "token": view.shape[2], "dim": geometry_spec.head_size}
    kv = {"fused": (0, 1), "key": (0,), "value": (1,), "latent": (0,)}[plane.kind]
    sizes["kv"] = len(kv)
    order = ("token", "dim") if plane.order == "rows" else plane.order
    storage = np.ctypeslib.as_array(
        (np.ctypeslib.ctypes.c_uint8 * view.storage_bytes).from_address(view.storage_address)
    )
    at = plane.base + block * plane.stride
    values = storage[at : at + plane.block_length].view(np.dtype(f"f{size}"))
    assert values.size == np.prod([sizes[axis] for axis in order])
    grid = values.reshape([sizes[axis] for axis in order])
    out = {}
    for position in itertools.product(*(range(sizes[axis]) for axis in order)):
        where = dict(zip(order, position))
        key = (low + where.get("head", 0), where["token"], kv[where.get("kv", 0)], where["dim"])
        out[key] = grid[position]
    return out


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("rank", [0, 1])
def test_planes_find_each_element_where_vllm_has_it(layout, rank):
    heads = HEADS // 2
    tensors = cache(layout, heads=heads)
    group = spec(tensor_rank=rank, tensor_size=2)
    views = {name: view_of(tensor) for name, tensor in tensors.items()}
    described = CacheLayout([group], views)
    assert len(described.regions()) == 1
    per_layer = 1 if layout in ("LBHNC", "LBNHC", "BLHNC", "BLNHC") else heads
    assert len(described.planes) == LAYERS * per_layer
    for name, tensor in tensors.items():
        for block in (0, 3, BLOCKS - 1):
            found = {}
            for plane in described.planes:
                if plane.layer == name:
                    found.update(elements(plane, group, views[name], block))
            wanted = {
                (rank * heads + head, token, kv, dim): tensor[block, head, token, kv * DIM + dim]
                for head, token, kv, dim in itertools.product(
                    range(heads), range(TOKENS), range(2), range(DIM)
                )
            }
            assert found == wanted


@pytest.mark.parametrize("layout", LAYOUTS)
def test_latent_rows(layout):
    tensors = cache(layout, heads=1, content=DIM)
    group = spec(kind="latent", kv_heads=0, value_head_size=0, tensor_rank=1, tensor_size=2)
    views = {name: view_of(tensor) for name, tensor in tensors.items()}
    described = CacheLayout([group], views)
    assert [plane.kind for plane in described.planes] == ["latent"] * LAYERS
    for plane in described.planes:
        found = elements(plane, group, views[plane.layer], 2)
        tensor = tensors[plane.layer]
        assert found == {(0, t, 0, d): tensor[2, 0, t, d] for t, d in itertools.product(range(TOKENS), range(DIM))}


def test_replicated_heads_name_the_head_that_the_rank_has():
    group = spec(kv_heads=2, tensor_rank=3, tensor_size=4)
    assert group.local_heads() == (1, 2)
    views = {name: view_of(tensor) for name, tensor in cache("LBHNC", heads=1).items()}
    assert {plane.heads for plane in CacheLayout([group], views).planes} == {(1, 2)}


def test_packed_planes_are_whole_blocks_with_their_heads():
    views = {name: view_of(tensor) for name, tensor in cache("LBHNC").items()}
    described = CacheLayout([spec()], views, "packed")
    (order,) = {plane.order for plane in described.planes}
    assert order == "packed"
    assert {plane.block_length for plane in described.planes} == {HEADS * TOKENS * 2 * DIM * 4}
    tokens_first = {name: view_of(tensor) for name, tensor in cache("LBNHC").items()}
    with pytest.raises(LayoutError, match="packed blocks must be dense"):
        CacheLayout([spec()], tokens_first, "packed")


def test_the_declared_cpu_order_is_one_k_and_one_v_plane_per_head():
    # As vLLM's CPU kernels write: per head K as (dim, token), then V as (token, dim).
    keys = np.arange(BLOCKS * HEADS * TOKENS * DIM, dtype=np.float32).reshape(BLOCKS, HEADS, TOKENS, DIM)
    values = keys + 10_000
    tensor = np.concatenate(
        [keys.transpose(0, 1, 3, 2).reshape(BLOCKS, HEADS, -1), values.reshape(BLOCKS, HEADS, -1)], axis=2
    ).reshape(BLOCKS, HEADS, TOKENS, 2 * DIM)
    view = view_of(tensor)
    group = spec(layers=("l",))
    planes = planes_of(view, group, "l", 0, 0, 0, "declared")
    assert [plane.kind for plane in planes] == ["key", "value"] * HEADS
    found = {}
    for plane in planes:
        found.update(elements(plane, group, view, 3))
    for (head, token, kv, dim), value in found.items():
        assert value == (keys, values)[kv][3, head, token, dim]
    assert len(found) == HEADS * TOKENS * 2 * DIM


def test_kernel_blocks_smaller_than_the_schedulers_are_expanded():
    views = {name: view_of(tensor) for name, tensor in cache("LBHNC").items()}
    described = CacheLayout([spec(block_size=4 * TOKENS)], views)
    assert described.ratios == [4]
    assert described.selection([GroupTokens(0, 40, [2, 0])]) == [(0, 40, [8, 9, 10, 11, 0])]
    assert described.selection([GroupTokens(16, 32, [3])]) == [(16, 32, [14, 15])]
    assert described.selection([GroupTokens(0, 0, [])]) == [(0, 0, [])]


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (dict(head_size=DIM + 1), "content"),
        (dict(kv_heads=HEADS * 2), "heads"),
        (dict(block_size=TOKENS + 1), "do not divide"),
        (dict(layers=("model.layers.9.attn",)), "no tensor"),
        (dict(kv_heads=3, tensor_size=2), "neither number divides"),
    ],
)
def test_what_does_not_fit_is_refused_with_the_reason(change, why):
    views = {name: view_of(tensor) for name, tensor in cache("LBHNC").items()}
    with pytest.raises(LayoutError, match=why):
        CacheLayout([spec(**change)], views)


def test_strides_that_are_no_layout_are_refused():
    tensor = np.zeros((BLOCKS, HEADS, TOKENS, 4 * DIM), np.float32)[..., ::2]
    with pytest.raises(LayoutError, match="one after another"):
        planes_of(view_of(tensor), spec(layers=("l",)), "l", 0, 0, 0, "plain")
    apart = np.zeros((BLOCKS, HEADS, 2 * TOKENS, 2 * DIM), np.float32)[:, :, ::2]
    with pytest.raises(LayoutError, match="tokens of a head"):
        planes_of(view_of(apart), spec(layers=("l",)), "l", 0, 0, 0, "plain")


def test_layers_are_ordered_as_they_are_numbered():
    names = [f"model.layers.{number}.attn" for number in (10, 9, 1, 0)]
    assert sorted(names, key=layer_order) == list(reversed(names))


# ------------------------------------------------------------------------------------ vLLM's own specs


class FullAttentionSpec(SimpleNamespace):
    pass


class SlidingWindowSpec(SimpleNamespace):
    pass


class MLAAttentionSpec(SimpleNamespace):
    pass


class MambaSpec(SimpleNamespace):
    pass


class UniformTypeKVCacheSpecs(SimpleNamespace):
    pass


def attention(kind=FullAttentionSpec, **changes):
    values = dict(
        block_size=16, num_kv_heads=2, head_size=64, head_size_v=64, dtype="torch.bfloat16", sliding_window=None,
        num_head_slots=None, state_content_bytes=None, tokens_per_state=1,
    )
    return kind(**{**values, **changes})


def config(*groups):
    return SimpleNamespace(
        kv_cache_groups=[
            SimpleNamespace(layer_names=list(layers), kv_cache_spec=one, enable_kv_transfer=True, host_resident=False)
            for layers, one in groups
        ]
    )


def test_specs_become_groups():
    one = config((["a", "b"], attention()), (["w"], attention(SlidingWindowSpec, sliding_window=100)))
    full, window = groups_of(one, 8, 1, 4)
    assert (full.dtype, full.kv_heads, full.local_heads(), full.window) == ("bf16", 8, (2, 4), None)
    assert (window.window, window.layers) == (100, ("w",))
    tables = tables_of(one)
    assert [group.window for group in tables.groups] == [None, 100] and not tables.streams


def test_latent_groups_are_replicated_and_packed_rows_are_bytes():
    plain = attention(MLAAttentionSpec, num_kv_heads=1, head_size=576, head_size_v=0)
    (group,) = groups_of(config((["a"], plain)), 1, 2, 4)
    assert (group.kind, group.head_size, group.content, group.dtype) == ("latent", 576, 576, "bf16")
    packed = attention(MLAAttentionSpec, num_kv_heads=1, head_size=576, head_size_v=0, dtype="torch.uint8",
                       state_content_bytes=656)
    (group,) = groups_of(config((["a"], packed)), 1, 0, 1)
    assert (group.dtype, group.head_size) == ("u8", 656)


def test_layers_of_different_shapes_under_one_block_table_are_groups_of_their_own():
    specs = {"a": attention(), "b": attention(head_size=32, head_size_v=32), "c": attention()}
    one = config((["a", "b", "c"], UniformTypeKVCacheSpecs(kv_cache_specs=specs, block_size=16)))
    first, second = groups_of(one, 2, 0, 1)
    assert (first.layers, second.layers) == (("a", "c"), ("b",))
    assert [group.index for group in tables_of(one).groups] == [0, 0]


@pytest.mark.parametrize(
    ("one", "why"),
    [
        (MambaSpec(block_size=16), "MambaSpec cannot be handed over"),
        (attention(tokens_per_state=4), "tokens per stored state"),
        (attention(state_content_bytes=80), "state_content_bytes"),
        (attention(num_head_slots=3), "num_head_slots"),
    ],
)
def test_what_is_not_supported_says_so(one, why):
    with pytest.raises(LayoutError, match=why):
        tables_of(config((["layer"], one)))


def test_an_element_type_without_a_name_is_refused():
    with pytest.raises(LayoutError, match="elements of type"):
        groups_of(config((["layer"], attention(dtype="torch.complex64"))), 2, 0, 1)


def test_drafters_that_look_ahead_are_refused():
    check_drafts(SimpleNamespace(num_prefill_lookahead_tokens=1))
    check_drafts(SimpleNamespace())
    with pytest.raises(LayoutError, match="3 tokens ahead"):
        check_drafts(SimpleNamespace(num_prefill_lookahead_tokens=3))


def test_context_parallelism_is_refused():
    check_parallel(SimpleNamespace(decode_context_parallel_size=1))
    with pytest.raises(LayoutError, match="decode_context_parallel_size = 2"):
        check_parallel(SimpleNamespace(decode_context_parallel_size=2))


class Tensor:
    def __init__(self, kind, index=0):
        self.device = type("device", (), {"type": kind, "__str__": lambda self: f"{kind}:{index}"})()


def test_a_cache_is_on_one_device_that_is_known():
    cpu = Tensor("cpu")
    assert device_of({"a": cpu, "b": cpu}) == (None, None)
    gpu = Tensor("cuda")
    kind, mark = device_of({"a": gpu, "b": gpu})
    assert kind == "cuda" and callable(mark)
    with pytest.raises(LayoutError, match="2 devices"):
        device_of({"a": gpu, "b": Tensor("cuda", 1)})
    with pytest.raises(LayoutError, match="xpu:0"):
        device_of({"a": Tensor("xpu")})
