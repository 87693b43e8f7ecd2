"""vLLM's cache configuration as group specs: what is supported, and why the rest is not. Reads vLLM's objects by their
attributes and class names, so that it is tested without vLLM.

Supported: full attention and multi-head latent attention, alone or with sliding-window groups beside them. Refused:
states (Mamba), chunked local and cross attention, circular buffers, quantisation that keeps scales in the block,
several stored states per token or tokens per state, context parallelism, and groups that vLLM keeps on the host.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from .layout import DTYPES, GroupSpec, LayoutError
from .tables import GroupTable, Tables

_ATTENTION = {"FullAttentionSpec", "SlidingWindowSpec"}
_LATENT = {"MLAAttentionSpec"}
_UNIFORM = "UniformTypeKVCacheSpecs"


def tables_of(kv_cache_config: Any) -> Tables:
    """How the scheduler's block tables count.

    Raises `LayoutError` for a model that is not supported.
    """
    groups = []
    for index, group in _transferred(kv_cache_config):
        for spec in _distinct(group):
            _check(spec, group)
            groups.append(GroupTable(index, spec.block_size, _window(spec)))
    if not groups:
        raise LayoutError("the model has no cache group that can be transferred")
    return Tables(tuple(groups))


def groups_of(kv_cache_config: Any, total_kv_heads: int, tensor_rank: int, tensor_size: int) -> list[GroupSpec]:
    """The groups in the same order as `tables_of`, with what a worker knows of them.

    Raises `LayoutError` for a model that is not supported.
    """
    out: list[GroupSpec] = []
    for index, group in _transferred(kv_cache_config):
        distinct = _distinct(group)
        if len(distinct) > 1 and len(list(_transferred(kv_cache_config))) > 1:
            raise LayoutError("layers of different shapes in one of several cache groups")
        for spec in distinct:
            _check(spec, group)
            latent = type(spec).__name__ in _LATENT
            row_bytes = getattr(spec, "state_content_bytes", None)
            dtype = DTYPES.get(_dtype_name(spec.dtype))
            if dtype is None:
                raise LayoutError(f"cache group {index}: elements of type {spec.dtype}")
            heads = 0 if latent else _total_heads(spec.num_kv_heads, total_kv_heads, tensor_size)
            head_size = spec.head_size
            if latent and row_bytes is not None:
                # A packed row (quantised latents with their scales): moved as bytes.
                dtype, head_size = "u8", row_bytes
            out.append(
                GroupSpec(
                    name=f"{_words(spec)}-{len(out)}",
                    kind="latent" if latent else "attention",
                    dtype=dtype,
                    block_size=spec.block_size,
                    kv_heads=heads,
                    head_size=head_size,
                    value_head_size=0 if latent else spec.head_size_v,
                    layers=tuple(_layers(group, spec)),
                    tensor_rank=tensor_rank,
                    tensor_size=tensor_size,
                    window=_window(spec),
                )
            )
    return out


def check_parallel(parallel_config: Any) -> None:
    """Raises `LayoutError` for context parallelism: its ranks hold tokens, not heads."""
    for name in ("prefill_context_parallel_size", "decode_context_parallel_size"):
        size = getattr(parallel_config, name, 1)
        if size > 1:
            raise LayoutError(f"{name} = {size}: caches sharded by tokens are not supported; shard by heads")


def check_drafts(vllm_config: Any) -> None:
    """Raises `LayoutError` for drafters that embed tokens ahead of the prompt's end: what they wrote at prefill would
    have to be computed anew."""
    ahead = getattr(vllm_config, "num_prefill_lookahead_tokens", 0)
    if isinstance(ahead, int) and ahead > 1:
        raise LayoutError(f"a drafter that looks {ahead} tokens ahead at prefill cannot be handed over")


def _total_heads(local: int, total: int, tensor_size: int) -> int:
    # A layer may have fewer or more heads than the model says. Replicated heads are told by the model's number alone.
    if total >= tensor_size or local > 1:
        return local * tensor_size
    return total


def _transferred(kv_cache_config: Any) -> list[tuple[int, Any]]:
    return [
        (index, group)
        for index, group in enumerate(kv_cache_config.kv_cache_groups)
        if getattr(group, "enable_kv_transfer", True)
    ]


def _distinct(group: Any) -> Sequence[Any]:
    """The specs of a group: one, unless vLLM put layers of different shapes under one block table."""
    spec = group.kv_cache_spec
    if type(spec).__name__ != _UNIFORM:
        return [spec]
    distinct: list[Any] = []
    for layer in group.layer_names:
        one = spec.kv_cache_specs[layer]
        if one not in distinct:
            distinct.append(one)
    return distinct


def _layers(group: Any, spec: Any) -> list[str]:
    if type(group.kv_cache_spec).__name__ != _UNIFORM:
        return list(group.layer_names)
    return [name for name in group.layer_names if group.kv_cache_spec.kv_cache_specs[name] == spec]


def _check(spec: Any, group: Any) -> None:
    kind = type(spec).__name__
    layer = group.layer_names[0] if group.layer_names else "?"
    if kind not in _ATTENTION | _LATENT:
        raise LayoutError(
            f"layer {layer}: {kind} cannot be handed over; supported: {', '.join(sorted(_ATTENTION | _LATENT))}"
        )
    if getattr(group, "host_resident", False):
        raise LayoutError(f"layer {layer}: its cache lies on the host beside the device's")
    if getattr(spec, "tokens_per_state", 1) != 1:
        raise LayoutError(f"layer {layer}: {spec.tokens_per_state} tokens per stored state; supported: 1")
    if kind in _ATTENTION:
        for name in ("num_head_slots", "state_content_bytes"):
            if getattr(spec, name, None) is not None:
                raise LayoutError(f"layer {layer}: {name} is set: its blocks hold more than K and V (scales)")


def _window(spec: Any) -> int | None:
    # A full-attention spec may carry a window too: then blocks are kept for all tokens.
    return spec.sliding_window if type(spec).__name__ == "SlidingWindowSpec" else None


def _words(spec: Any) -> str:
    return {"MLAAttentionSpec": "latent", "SlidingWindowSpec": "window"}.get(type(spec).__name__, "attention")


def _dtype_name(dtype: Any) -> str:
    return str(dtype).rsplit(".", 1)[-1]
