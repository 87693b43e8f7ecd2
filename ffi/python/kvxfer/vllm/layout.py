"""vLLM's cache tensors as planes: geometry is declared from vLLM's own specs and checked against the strides.

vLLM views each layer as ``[B, H, N, C]``: blocks, kv heads, tokens in a block, content. In standard attention the
content of a token and head is its K followed by its V; in multi-head latent attention it is one latent row, and H is 1.
Where the axes lie in memory is the layout (vLLM's ``kv_cache_layout.py``, with L for the layer):

==========  =====================================================================================================
``LBHNC``   one plane per layer, blocks dense, inside a block head, token, kv, dim
``LBNHC``   one plane per layer, blocks dense, inside a block token, head, kv, dim
``BLHNC``   the same inside, but a block holds all layers: the plane's stride is the whole block
``BLNHC``   likewise, token before head
``LHBNC``   heads outside the blocks: one plane per layer and head
``BHLNC``   heads outside the layers: one plane per layer and head, its stride the whole block
==========  =====================================================================================================

None of these names is read here: the strides decide, so a layout that a later vLLM adds is described too, or refused
with its strides.

vLLM's CPU kernels permute inside a head's part of a block: first K as (dim, token), then V as (token, dim). Such planes
are *packed*: moved whole, split by head only, with equal tokens per block on both sides. With
``block_order = "declared"`` that order is stated, as one K and one V plane per head, after the bytes that vLLM's own
kernel writes have been compared with it; then the block sizes may differ.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from .tables import GroupTokens

#: torch's names of element types, and kvxfer's.
DTYPES = {
    "float32": "f32",
    "float16": "f16",
    "bfloat16": "bf16",
    "float8_e4m3fn": "f8e4m3",
    "float8_e5m2": "f8e5m2",
    "uint8": "u8",
    "int8": "i8",
}


class LayoutError(ValueError):
    """A cache that cannot be described; the message says which tensor and why."""


@dataclass(frozen=True)
class TensorView:
    """A layer's cache tensor: where it lies, without the tensor. Strides and sizes in bytes."""

    address: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    itemsize: int
    storage_address: int
    storage_bytes: int
    #: Kept alive as long as the pool.
    owner: Any = field(default=None, compare=False, repr=False)


def view_of(tensor: Any) -> TensorView:
    """The view of a torch tensor, or of a numpy array."""
    if hasattr(tensor, "untyped_storage"):
        storage = tensor.untyped_storage()
        size = tensor.element_size()
        return TensorView(
            address=tensor.data_ptr(),
            shape=tuple(tensor.shape),
            strides=tuple(stride * size for stride in tensor.stride()),
            itemsize=size,
            storage_address=storage.data_ptr(),
            storage_bytes=storage.nbytes(),
            owner=tensor,
        )
    root = tensor
    while getattr(root, "base", None) is not None and hasattr(root.base, "__array_interface__"):
        root = root.base
    return TensorView(
        address=tensor.__array_interface__["data"][0],
        shape=tuple(tensor.shape),
        strides=tuple(tensor.strides),
        itemsize=tensor.itemsize,
        storage_address=root.__array_interface__["data"][0],
        storage_bytes=root.nbytes,
        owner=tensor,
    )


@dataclass(frozen=True)
class GroupSpec:
    """What the blocks of one cache group mean, from vLLM's spec."""

    name: str
    #: ``attention`` or ``latent``.
    kind: str
    dtype: str
    #: Tokens in one of the scheduler's blocks.
    block_size: int
    #: Kv heads of the whole model; 0 for latent rows.
    kv_heads: int
    #: Elements of K per token and head, or of a latent row.
    head_size: int
    #: The same of V; 0 for latent rows.
    value_head_size: int
    layers: tuple[str, ...]
    tensor_rank: int = 0
    tensor_size: int = 1
    window: int | None = None

    @property
    def content(self) -> int:
        """Elements per token and head."""
        return self.head_size + self.value_head_size

    def local_heads(self) -> tuple[int, int]:
        """The heads of this rank, counted over the model."""
        if self.kind == "latent":
            return 0, 1
        if self.kv_heads % self.tensor_size == 0:
            count = self.kv_heads // self.tensor_size
            return self.tensor_rank * count, (self.tensor_rank + 1) * count
        if self.tensor_size % self.kv_heads == 0:
            head = self.tensor_rank // (self.tensor_size // self.kv_heads)
            return head, head + 1
        raise LayoutError(
            f"cache group {self.name}: {self.kv_heads} kv heads over {self.tensor_size} tensor-parallel ranks: "
            "neither number divides the other"
        )


@dataclass(frozen=True)
class PlaneSpec:
    """One plane, in kvxfer's words. Offsets, strides and lengths in bytes."""

    layer: str
    kind: str
    group: int
    region: int
    base: int
    stride: int
    block_length: int
    heads: tuple[int, int] | None
    order: str | tuple[str, ...]


def layer_order(name: str) -> tuple[Any, ...]:
    """A sort key that counts: ``layers.10`` comes after ``layers.9``."""
    return tuple(int(part) if part.isdigit() else part for part in re.split(r"(\d+)", name))


def planes_of(
    view: TensorView, spec: GroupSpec, layer: str, group: int, region: int, base: int, inner: str
) -> list[PlaneSpec]:
    """The planes of one layer. `inner` is ``plain`` (by axes), ``packed`` or ``declared`` (see the module).

    Raises `LayoutError` where sizes do not match the spec or strides are none of the known ones.
    """
    _check_sizes(view, spec, layer)
    heads = spec.local_heads()
    _, count, tokens, content = view.shape
    stride, by_head, by_token, by_element = view.strides
    cell = content * view.itemsize
    row = tokens * cell

    def plane(kind: str, at: int, length: int, of: tuple[int, int] | None, order: Any) -> PlaneSpec:
        return PlaneSpec(layer, kind, group, region, base + at, stride, length, of, order)

    def refuse(why: str) -> LayoutError:
        return LayoutError(
            f"layer {layer}: shape {view.shape}, strides {view.strides} bytes, {view.itemsize} bytes per element: {why}"
        )

    if by_element != view.itemsize:
        raise refuse("the elements of a token do not lie one after another")
    dense_heads = by_token == cell and (count == 1 or by_head == row)
    dense_tokens = by_head == cell and (tokens == 1 or by_token == count * cell)
    if spec.kind == "latent":
        if by_token != cell:
            raise refuse("latent rows do not lie one after another")
        return [plane("latent", 0, row, None, "rows")]
    if inner != "plain":
        if not dense_heads:
            raise refuse("packed blocks must be dense, head by head")
        if inner == "packed":
            return [plane("fused", 0, count * row, heads, "packed")]
        return _declared(plane, view, spec, heads, row)
    if dense_heads:
        return [plane("fused", 0, count * row, heads, ("head", "token", "kv", "dim"))]
    if dense_tokens:
        return [plane("fused", 0, count * row, heads, ("token", "head", "kv", "dim"))]
    if by_token == cell:
        order = ("head", "token", "kv", "dim")
        return [
            plane("fused", index * by_head, row, (heads[0] + index, heads[0] + index + 1), order)
            for index in range(count)
        ]
    raise refuse("the tokens of a head do not lie one after another, nor the heads of a token")


def _declared(
    plane: Any, view: TensorView, spec: GroupSpec, heads: tuple[int, int], row: int
) -> list[PlaneSpec]:
    """The CPU order: per head K as (dim, token), then V as (token, dim)."""
    tokens = view.shape[2]
    key_bytes = tokens * spec.head_size * view.itemsize
    planes = []
    for index in range(view.shape[1]):
        of = (heads[0] + index, heads[0] + index + 1)
        planes.append(plane("key", index * row, key_bytes, of, ("head", "dim", "token")))
        planes.append(plane("value", index * row + key_bytes, row - key_bytes, of, ("head", "token", "dim")))
    return planes


def _check_sizes(view: TensorView, spec: GroupSpec, layer: str) -> None:
    if len(view.shape) != 4:
        raise LayoutError(f"layer {layer}: shape {view.shape} is not [blocks, heads, tokens, content]")
    low, high = spec.local_heads()
    wanted = {"heads": (view.shape[1], high - low), "content": (view.shape[3], spec.content)}
    for what, (have, want) in wanted.items():
        if have != want:
            raise LayoutError(f"layer {layer}: {have} {what} in shape {view.shape}; its cache group has {want}")
    if spec.block_size % view.shape[2]:
        raise LayoutError(
            f"layer {layer}: {view.shape[2]} tokens per block in shape {view.shape} do not divide the scheduler's "
            f"{spec.block_size}"
        )


class CacheLayout:
    """A worker's whole cache: groups, planes and regions."""

    def __init__(
        self, specs: Sequence[GroupSpec], views: Mapping[str, TensorView], inner: str = "plain", tag: str = ""
    ):
        """`tag` is appended to the layers' ids.

        Raises `LayoutError`, naming the layer and what does not fit.
        """
        self.specs = list(specs)
        self.tag = tag
        self.inner = inner
        self.planes: list[PlaneSpec] = []
        #: Pieces of a scheduler's block: kernels may see one as several smaller ones.
        self.ratios: list[int] = []
        self.blocks: list[int] = []
        self._regions: dict[int, tuple[int, int, Any]] = {}
        numbers: dict[int, int] = {}
        for number, spec in enumerate(self.specs):
            missing = [layer for layer in spec.layers if layer not in views]
            if missing or not spec.layers:
                raise LayoutError(f"cache group {spec.name}: no tensor for layers {missing or 'at all'}")
            self._measure(spec, views)
            for layer in sorted(spec.layers, key=layer_order):
                view = views[layer]
                region = numbers.setdefault(view.storage_address, len(numbers))
                self._regions[region] = (view.storage_address, view.storage_bytes, view.owner)
                base = view.address - view.storage_address
                self.planes += planes_of(view, spec, layer, number, region, base, inner)
        self.planes.sort(key=lambda plane: layer_order(plane.layer))

    def _measure(self, spec: GroupSpec, views: Mapping[str, TensorView]) -> None:
        shapes = {(views[layer].shape[0], views[layer].shape[2]) for layer in spec.layers}
        if len(shapes) != 1:
            raise LayoutError(f"cache group {spec.name}: its layers have different (blocks, tokens): {sorted(shapes)}")
        blocks, tokens = shapes.pop()
        self.blocks.append(blocks)
        self.ratios.append(spec.block_size // tokens)

    def build(self, kvxfer: Any) -> Any:
        """The layout, in kvxfer's own type."""
        groups = []
        for spec, blocks, ratio in zip(self.specs, self.blocks, self.ratios):
            tokens = spec.block_size // ratio
            if spec.kind == "latent":
                sharding = kvxfer.Sharding.replicated(spec.tensor_rank, spec.tensor_size)
                geometry = kvxfer.Geometry.latent(spec.dtype, tokens, spec.head_size, sharding)
            else:
                geometry = kvxfer.Geometry.attention(
                    spec.dtype,
                    tokens_per_block=tokens,
                    kv_heads=spec.kv_heads,
                    head_size=spec.head_size,
                    value_head_size=spec.value_head_size,
                    sharding=kvxfer.Sharding.heads(spec.tensor_rank, spec.tensor_size),
                )
            groups.append(kvxfer.Group(spec.name, geometry, blocks=blocks, window=spec.window))
        planes = [
            kvxfer.Plane(
                layer=plane.layer + self.tag,
                kind=plane.kind,
                group=plane.group,
                region=plane.region,
                base=plane.base,
                stride=plane.stride,
                block_length=plane.block_length,
                heads=plane.heads,
                order=plane.order,
            )
            for plane in self.planes
        ]
        lengths = {number: length for number, (_, length, _) in self._regions.items()}
        # vLLM overlays the groups of a hybrid model: a block id is owned by one of them at a time.
        return kvxfer.Layout(groups=groups, planes=planes, regions=lengths, shared_blocks=len(groups) > 1)

    def regions(self) -> list[tuple[int, int, Any]]:
        """Address, length and owner of each region."""
        return [self._regions[number] for number in sorted(self._regions)]

    def selection(self, groups: Sequence[GroupTokens]) -> list[tuple[int, int, list[int]]]:
        """A selection in the pool's own blocks."""
        out = []
        for (first, end, blocks), ratio, spec in zip(groups, self.ratios, self.specs):
            if ratio > 1 and blocks:
                tokens = spec.block_size // ratio
                skip, keep = first // tokens % ratio, -(-end // tokens) - first // tokens
                pieces = [block * ratio + piece for block in blocks for piece in range(ratio)]
                blocks = pieces[skip : skip + keep]
            out.append((first, end, blocks))
        return out

    def __str__(self) -> str:
        words = []
        for number, (spec, blocks, ratio) in enumerate(zip(self.specs, self.blocks, self.ratios)):
            mine = [plane for plane in self.planes if plane.group == number]
            order = mine[0].order + self.tag if isinstance(mine[0].order, str) else ",".join(mine[0].order)
            heads = "" if spec.kind == "latent" else f" heads {spec.local_heads()} of {spec.kv_heads},"
            words.append(
                f"{spec.name}: {len(spec.layers)} layers, {blocks} blocks of {spec.block_size // ratio} tokens, "
                f"{spec.dtype},{heads} {mine[0].kind} planes ({order}), {len(mine)} of them, "
                f"{mine[0].block_length} bytes per block"
            )
        total = sum(length for _, length, _ in self._regions.values())
        return f"{'; '.join(words)}; {len(self._regions)} regions of {total} bytes together"
