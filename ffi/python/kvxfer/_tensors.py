"""From tensors with declared axes to a layout and the regions that hold them."""

from dataclasses import dataclass
from typing import Any, Dict, List, NamedTuple, Optional, Sequence, Tuple, Union

from ._declare import Geometry, Group, Order, Plane, PlaneKind
from ._errors import InvalidArgument
from ._kvxfer import Layout, _dtype_bytes, _local_heads, _view

_AXES = ("kv", "layer", "block", "token", "head", "dim", "packed")
_NAMED_ORDERS = {
    "NHD": ("token", "head", "dim"),
    "HND": ("head", "token", "dim"),
    "KV_NHD": ("kv", "token", "head", "dim"),
    "KV_HND": ("kv", "head", "token", "dim"),
    "rows": ("token", "dim"),
}


@dataclass(frozen=True)
class TensorPlane:
    """A tensor of a cache, and what its axes are.

    `tensor` is a numpy array, a torch tensor, or anything with the buffer protocol, `__array_interface__` or
    `__dlpack__`. Its strides are read: a permuted view is what it is in memory.
    """

    tensor: Any
    """The memory."""
    axes: Tuple[str, ...]
    """What each axis of the tensor is: "block" always; "token", "head" and "dim" as far as there are any; "kv" (0 is K,
    1 is V); "layer", when one tensor holds several layers. A last "packed" stands for all axes from there on: bytes
    whose order is not known, moved whole."""
    layer: Union[str, Sequence[str]] = "0"
    """The layer's id; with an axis "layer" the ids of all of them."""
    group: int = 0
    """The cache group."""
    kind: Optional[PlaneKind] = None
    """What it holds, where the axes do not say: "key" or "value" without an axis "kv"."""
    order: Optional[Order] = None
    """The order inside a block, if it is to be checked against the strides."""
    heads: Optional[Tuple[int, int]] = None
    """The heads it holds, if they are not all of the rank's."""


class MemoryRegion(NamedTuple):
    """Memory by address, as `Endpoint.register` takes it."""

    address: int
    """The first byte."""
    length: int
    """Bytes."""
    owner: Any
    """What keeps it there."""
    read_only: bool = False
    """Whether peers must not write to it."""
    device: str = "cpu"
    """`"cpu"`, or `"cuda"` for memory that the CUDA driver knows: a device's, page-locked or managed."""


class _Axis(NamedTuple):
    name: str
    size: int
    stride: int


class _Piece(NamedTuple):
    """A plane before its region is known."""

    layer: str
    group: int
    kind: PlaneKind
    address: int
    stride: int
    length: int
    heads: Optional[Tuple[int, int]]
    order: Order


class _Span(NamedTuple):
    start: int
    end: int
    storage: Optional[Tuple[int, int]]
    owner: Any
    read_only: bool
    device: str


def layout_of(
    groups: Sequence[Group], tensors: Sequence[TensorPlane], shared_blocks: bool = False
) -> Tuple[Layout, List[MemoryRegion]]:
    """Describes tensors as a layout, and finds the regions they lie in: what `Endpoint.register` takes.

    Each tensor's sizes are checked against its group's geometry, and its strides are read: blocks may lie apart, inner
    axes may be permuted, K and V or heads may lie outside the blocks, and layers may share one tensor. Bytes inside a
    block that belong to no axis, and axes that overlap, are refused. Tensors that lie in one allocation share a region.
    """
    pieces: List[_Piece] = []
    spans: List[_Span] = []
    for index, tensor in enumerate(tensors):
        if not isinstance(tensor, TensorPlane):
            raise TypeError(f"tensor {index}: a kvxfer.TensorPlane, not {type(tensor).__name__}")
        found, span = _Reader(groups, tensor, f"tensor {index}").read()
        pieces.extend(found)
        spans.append(span)
    regions = _regions(spans)
    planes = []
    for piece in pieces:
        number = next(
            number
            for number, region in enumerate(regions)
            if region.address <= piece.address < region.address + region.length
        )
        planes.append(
            Plane(
                layer=piece.layer,
                kind=piece.kind,
                group=piece.group,
                region=number,
                base=piece.address - regions[number].address,
                stride=piece.stride,
                block_length=piece.length,
                heads=piece.heads,
                order=piece.order,
            )
        )
    lengths = {number: region.length for number, region in enumerate(regions)}
    return Layout(groups, planes, lengths, shared_blocks), regions


def _regions(spans: Sequence[_Span]) -> List[MemoryRegion]:
    """Merges spans that overlap or lie in one allocation. Only what tensors cover is registered, not all of it."""
    by_storage: Dict[Tuple[int, int], List[_Span]] = {}
    merged: List[List[_Span]] = []
    for span in spans:
        if span.storage is None:
            merged.append([span])
        else:
            by_storage.setdefault(span.storage, []).append(span)
    merged.extend(by_storage.values())
    merged.sort(key=lambda group: min(span.start for span in group))
    regions: List[MemoryRegion] = []
    for group in merged:
        start = min(span.start for span in group)
        end = max(span.end for span in group)
        owners = tuple(span.owner for span in group)
        read_only = any(span.read_only for span in group)
        # One allocation is of one kind, and so are addresses that overlap.
        device = group[0].device
        if regions and start < regions[-1].address + regions[-1].length:
            last = regions.pop()
            end = max(end, last.address + last.length)
            owners = last.owner + owners
            read_only = read_only or last.read_only
            start = last.address
        regions.append(MemoryRegion(start, end - start, owners, read_only, device))
    return regions


class _Reader:
    """Reads one tensor."""

    def __init__(self, groups: Sequence[Group], tensor: TensorPlane, place: str) -> None:
        self.tensor = tensor
        self.place = place
        if not 0 <= tensor.group < len(groups):
            self.refuse(f"cache group {tensor.group}", f"there are {len(groups)}", "number the groups from 0")
        self.group = groups[tensor.group]
        self.geometry: Geometry = self.group.geometry

    def refuse(self, what: str, why: str, remedy: str) -> None:
        raise InvalidArgument(f"{what} ({self.place}): {why}; {remedy}")

    def read(self) -> Tuple[List[_Piece], _Span]:
        address, item_size, shape, strides, read_only, storage, span, owner, device = _view(self.tensor.tensor)
        if span is None or span[1] == 0:
            self.refuse(f"shape {tuple(shape)}", "it has no bytes", "give the memory of the cache")
        assert span is not None
        axes, packed = self.name_axes(shape, strides, item_size)
        self.check_sizes(axes, item_size, packed)
        pieces = self.split(address, axes, packed)
        if storage is not None and not (
            storage[0] <= span[0] and span[0] + span[1] <= storage[0] + storage[1]
        ):
            storage = None
        return pieces, _Span(span[0], span[0] + span[1], storage, owner, read_only, device)

    def name_axes(
        self, shape: Sequence[int], strides: Sequence[int], item_size: int
    ) -> Tuple[Dict[str, _Axis], Optional[int]]:
        """The axes by name, and the bytes of a packed end, whose own axes are swallowed."""
        names = tuple(self.tensor.axes)
        if isinstance(self.tensor.axes, str) or not all(isinstance(name, str) for name in names):
            raise TypeError(f"{self.place}: axes are a tuple of names, such as ('block', 'token', 'head', 'dim')")
        for name in names:
            if name not in _AXES:
                self.refuse(f"axis {name!r}", f"it is none of {', '.join(_AXES)}", "use these names")
            if names.count(name) > 1:
                self.refuse(f"axis {name!r}", "it is named twice", "name each axis once")
        if "block" not in names:
            self.refuse(f"axes {names}", "there is no axis 'block'", "name the axis that block ids count")
        packed = None
        if "packed" in names:
            if names[-1] != "packed" or "token" in names or "dim" in names:
                self.refuse(
                    f"axes {names}",
                    "'packed' stands for the tokens and all that is below them",
                    "put it last, without 'token' and 'dim'",
                )
            names = names[:-1]
            if len(shape) <= len(names):
                self.refuse(f"{len(shape)} axes", f"{len(names)} are named before 'packed'", "name the axes it has")
            packed = item_size
            for size, stride in zip(reversed(shape[len(names) :]), reversed(strides[len(names) :])):
                if size > 1 and stride != packed:
                    self.refuse(
                        f"strides {tuple(strides)} of shape {tuple(shape)}",
                        "what is packed must lie in one piece, in order",
                        "pass the tensor as it is in memory, not permuted",
                    )
                packed *= size
        elif len(names) != len(shape):
            self.refuse(f"{len(names)} names of axes", f"the tensor has {len(shape)}: {tuple(shape)}", "name each axis")
        axes = {name: _Axis(name, size, stride) for name, size, stride in zip(names, shape, strides)}
        for axis in axes.values():
            if axis.size > 1 and axis.stride <= 0:
                why = "elements overlap" if axis.stride == 0 else "it runs backwards in memory"
                self.refuse(f"axis {axis.name!r} with a stride of {axis.stride} bytes", why, "pass memory as it lies")
        return axes, packed

    def check_sizes(self, axes: Dict[str, _Axis], item_size: int, packed: Optional[int]) -> None:
        geometry = self.geometry
        state = geometry.tokens_per_block == 0
        element = _dtype_bytes(geometry.dtype)
        if state and packed is None:
            self.refuse(f"axes {self.tensor.axes}", "states have no tokens", "end the axes with 'packed'")
        if not state and item_size != element and packed is None:
            self.refuse(
                f"elements of {item_size} bytes", f"the geometry says {geometry.dtype}, {element}", "make them agree"
            )
        expected: Dict[str, int] = {"block": self.group.blocks}
        heads = self.heads()
        if "kv" in axes:
            expected["kv"] = 2
            if geometry.kv_heads == 0:
                self.refuse("an axis 'kv'", f"cache group {self.group.name} has no heads", "leave it out")
            if geometry.head_size != geometry.value_head_size and packed is None:
                self.refuse(
                    "an axis 'kv'",
                    f"K has {geometry.head_size} elements per head and V {geometry.value_head_size}",
                    "give K and V as tensors of their own",
                )
        if "layer" in axes:
            if isinstance(self.tensor.layer, str):
                self.refuse("an axis 'layer'", "one layer id is given", "give the ids of all layers on that axis")
            expected["layer"] = len(self.tensor.layer)
        elif not isinstance(self.tensor.layer, str):
            self.refuse(f"{len(self.tensor.layer)} layer ids", "there is no axis 'layer'", "give one id")
        expected["head"] = 1 if heads is None else heads[1] - heads[0]
        if packed is None:
            expected["token"] = geometry.tokens_per_block
            expected["dim"] = geometry.value_head_size if self.kind(axes) == "value" else geometry.head_size
        for name, size in expected.items():
            if name in axes and axes[name].size != size:
                self.refuse(f"axis {name!r} of size {axes[name].size}", f"the declaration says {size}", "make them agree")
            if name not in axes and name in ("head", "token", "dim") and size != 1:
                self.refuse(f"axes {self.tensor.axes}", f"there are {size} along {name!r}", f"name the axis {name!r}")
        if heads is None and "head" in axes:
            self.refuse("an axis 'head'", f"cache group {self.group.name} has no heads", "leave it out")

    def heads(self) -> Optional[Tuple[int, int]]:
        if self.geometry.kv_heads == 0:
            return None
        if self.tensor.heads is not None:
            return self.tensor.heads
        return _local_heads(self.geometry.sharding, self.geometry.kv_heads)

    def kind(self, axes: Dict[str, _Axis]) -> Optional[PlaneKind]:
        """The kind, as far as it does not depend on where the axis kv is."""
        if self.geometry.tokens_per_block == 0:
            return "state"
        if self.geometry.kv_heads == 0:
            return "latent"
        if "kv" in axes:
            if self.tensor.kind not in (None, "fused"):
                self.refuse(f"kind {self.tensor.kind!r}", "there is an axis 'kv'", "leave the kind out")
            return None
        if self.tensor.kind not in ("key", "value"):
            self.refuse(
                f"kind {self.tensor.kind!r}", "without an axis 'kv' it does not follow", "say 'key' or 'value'"
            )
        return self.tensor.kind

    def split(self, address: int, axes: Dict[str, _Axis], packed: Optional[int]) -> List[_Piece]:
        """Fixes what lies outside the blocks: layers, K and V, heads."""
        layers: List[Tuple[str, int]] = []
        if "layer" in axes:
            stride = axes["layer"].stride
            layers = [(layer, address + stride * index) for index, layer in enumerate(self.tensor.layer)]
        else:
            assert isinstance(self.tensor.layer, str)
            layers = [(self.tensor.layer, address)]
        inner = [axes[name] for name in ("kv", "token", "head", "dim") if name in axes]
        element = _dtype_bytes(self.geometry.dtype)
        kind = self.kind(axes)
        if kind is None and packed is None and self.dense(inner, element) is not None:
            length = element
            for axis in inner:
                length *= axis.size
            # K and V far apart are planes of their own, also when there is but one block between them.
            if self.group.blocks > 1 and axes["block"].stride >= length:
                return [piece for layer, at in layers for piece in self.planes(layer, at, "fused", inner, axes, packed)]
        if self.tensor.kind == "fused":
            self.refuse("kind 'fused'", "K and V of a block do not lie in one piece", "leave the kind out")
        kinds: List[Tuple[PlaneKind, int]] = [(kind, 0)] if kind is not None else [("key", 0), ("value", axes["kv"].stride)]
        inner = [axis for axis in inner if axis.name != "kv"]
        return [
            piece
            for layer, at in layers
            for which, offset in kinds
            for piece in self.planes(layer, at + offset, which, inner, axes, packed)
        ]

    def planes(
        self,
        layer: str,
        address: int,
        kind: PlaneKind,
        inner: Sequence[_Axis],
        axes: Dict[str, _Axis],
        packed: Optional[int],
    ) -> List[_Piece]:
        """The planes of one layer and kind: one, or one per head if heads lie outside the blocks."""
        element = _dtype_bytes(self.geometry.dtype) if packed is None else packed
        heads = self.heads()
        order = self.dense(inner, element)
        if order is not None:
            return [self.piece(layer, address, kind, inner, axes, heads, order, packed, element)]
        rest = [axis for axis in inner if axis.name != "head"]
        order = self.dense(rest, element)
        if order is None or heads is None or "head" not in axes:
            shown = ", ".join(f"{axis.name}: {axis.size} at {axis.stride} bytes" for axis in inner)
            self.refuse(
                f"inner axes {shown}",
                f"there are gaps or overlaps between elements of {element} bytes inside a block",
                "blocks, K and V, layers and heads may lie apart; tokens and dims may not",
            )
        assert order is not None and heads is not None
        stride = axes["head"].stride
        return [
            self.piece(layer, address + stride * index, kind, rest, axes, (head, head + 1), order, packed, element)
            for index, head in enumerate(range(*heads))
        ]

    def piece(
        self,
        layer: str,
        address: int,
        kind: PlaneKind,
        inner: Sequence[_Axis],
        axes: Dict[str, _Axis],
        heads: Optional[Tuple[int, int]],
        order: Tuple[str, ...],
        packed: Optional[int],
        element: int,
    ) -> _Piece:
        length = element
        for axis in inner:
            length *= axis.size
        stride = axes["block"].stride if self.group.blocks > 1 else length
        found: Order = "packed" if packed is not None else self.full_order(kind, order)
        self.check_order(found)
        return _Piece(layer, self.tensor.group, kind, address, stride, length, heads, found)

    def dense(self, inner: Sequence[_Axis], element: int) -> Optional[Tuple[str, ...]]:
        """The axes in the order they lie in memory, outermost first, if nothing lies between them."""
        # Axes of one element lie anywhere: outermost, where they change nothing.
        ones = [axis.name for axis in inner if axis.size == 1]
        many = sorted((axis for axis in inner if axis.size > 1), key=lambda axis: axis.stride, reverse=True)
        expected = element
        for axis in reversed(many):
            if axis.stride != expected:
                return None
            expected *= axis.size
        return (*ones, *(axis.name for axis in many))

    def full_order(self, kind: PlaneKind, order: Tuple[str, ...]) -> Tuple[str, ...]:
        """With the axes that the tensor leaves out, because they have one element."""
        needed = {"latent": ("token", "dim"), "fused": ("kv", "token", "head", "dim")}.get(
            kind, ("token", "head", "dim")
        )
        return (*(name for name in needed if name not in order), *order)

    def check_order(self, found: Order) -> None:
        declared = self.tensor.order
        if declared is None or declared == found:
            return
        axes = _NAMED_ORDERS.get(declared) if isinstance(declared, str) else tuple(declared)
        sizes = {"token": self.geometry.tokens_per_block, "kv": 2}
        heads = self.heads()
        sizes["head"] = 1 if heads is None else heads[1] - heads[0]
        sizes["dim"] = self.geometry.head_size

        def visible(order: Order) -> Tuple[str, ...]:
            return tuple(name for name in order if sizes.get(name, 2) > 1)

        if axes is None or isinstance(found, str) or visible(axes) != visible(found):
            self.refuse(f"order {declared!r}", f"the strides say {found!r}", "correct the order or the axes")
