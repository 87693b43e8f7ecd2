"""The words a layout is declared in. `Layout` validates them."""

from dataclasses import dataclass, replace
from typing import ClassVar, Literal, NamedTuple, Optional, Tuple, Union

DType = Literal["u8", "i8", "f8e4m3", "f8e5m2", "f16", "bf16", "f32"]
PlaneKind = Literal["key", "value", "fused", "latent", "state"]
Order = Union[Literal["NHD", "HND", "KV_NHD", "KV_HND", "rows", "packed"], Tuple[str, ...]]


class BlockDescriptor(NamedTuple):
    """Bytes of one block of one plane: the explicit form of a target, for callers who address other than whole blocks."""

    plane: int
    """Index of the plane in the layout."""
    block: int
    """The block."""
    offset: int
    """First byte inside the block."""
    length: int
    """Bytes."""


@dataclass(frozen=True)
class Sharding:
    """How a cache group is divided among the ranks of its engine."""

    by: Literal["heads", "replicated", "tokens"]
    """By kv heads, or not at all; by tokens is reserved and refused."""
    rank: int
    """This rank."""
    size: int
    """Of how many."""

    NONE: ClassVar["Sharding"]
    """One rank that holds everything."""

    @staticmethod
    def heads(rank: int, size: int) -> "Sharding":
        """By kv heads. With more ranks than heads, neighbouring ranks hold the same head."""
        return Sharding("heads", rank, size)

    @staticmethod
    def replicated(rank: int, size: int) -> "Sharding":
        """Every rank holds everything."""
        return Sharding("replicated", rank, size)


Sharding.NONE = Sharding("replicated", 0, 1)


@dataclass(frozen=True)
class Geometry:
    """What the blocks of one cache group mean. Declared and compared with the peer's, never inferred from shapes."""

    dtype: DType
    """Element type."""
    tokens_per_block: int
    """Tokens in one block; 0 in state groups."""
    kv_heads: int
    """Kv heads of the whole model, over all ranks; 0 for head-less caches."""
    head_size: int
    """Elements of one head of one token of K; of the whole row in head-less caches."""
    value_head_size: int
    """The same of V."""
    sharding: Sharding
    """How it is divided among ranks."""

    @staticmethod
    def attention(
        dtype: DType,
        tokens_per_block: int,
        kv_heads: int,
        head_size: int,
        value_head_size: Optional[int] = None,
        sharding: Sharding = Sharding.NONE,
    ) -> "Geometry":
        """Keys and values with heads. `kv_heads` counts over all ranks."""
        value = head_size if value_head_size is None else value_head_size
        return Geometry(dtype, tokens_per_block, kv_heads, head_size, value, sharding)

    @staticmethod
    def latent(dtype: DType, tokens_per_block: int, row_size: int, sharding: Sharding = Sharding.NONE) -> "Geometry":
        """Head-less rows of `row_size` elements per token, as in multi-head latent attention."""
        return Geometry(dtype, tokens_per_block, 0, row_size, row_size, sharding)

    @staticmethod
    def state(heads: int = 0, sharding: Sharding = Sharding.NONE) -> "Geometry":
        """Recurrent states: one block per request, no positions. `heads` is 0 if the state cannot be divided."""
        return Geometry("u8", 0, heads, 0, 0, sharding)

    def with_sharding(self, sharding: Sharding) -> "Geometry":
        """The same for another rank."""
        return replace(self, sharding=sharding)


@dataclass(frozen=True)
class Group:
    """A cache group: planes that share a block table."""

    name: str
    """A label for messages."""
    geometry: Geometry
    """What its blocks mean."""
    blocks: int
    """Blocks in each of its planes."""
    window: Optional[int] = None
    """Tokens that its attention looks back, if it is a sliding window."""


@dataclass(frozen=True)
class Plane:
    """An array of blocks at a constant stride inside a region. What is `None` follows from the group: it begins where
    the last plane of its region ended, its blocks lie one after another, it holds all of the rank's heads."""

    layer: str
    """The layer's id; pools match layers by it."""
    kind: PlaneKind
    """What its blocks hold."""
    group: int = 0
    """The cache group."""
    region: int = 0
    """The region it lies in."""
    base: Optional[int] = None
    """Offset of block 0 in the region, in bytes."""
    stride: Optional[int] = None
    """Bytes from one block to the next."""
    block_length: Optional[int] = None
    """Bytes of one block. Needed for states only."""
    heads: Optional[Tuple[int, int]] = None
    """The heads it holds, `(start, end)` counted over the whole model."""
    order: Optional[Order] = None
    """The order inside its blocks: a name, or the axes ("kv", "head", "token", "dim"), outermost first."""
