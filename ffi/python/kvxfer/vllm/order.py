"""The order inside a block: plain where strides say it, packed where vLLM's kernels permute, or declared and checked.

What packed bytes mean depends on the kernel (with AMX, K is interleaved once more). The kernel's name therefore goes
into the layers' ids: servers whose kernels differ find no common layer, which is an error, and never exchange bytes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from .layout import GroupSpec, LayoutError


def inner_order(
    block_order: str, specs: Sequence[GroupSpec], kv_caches: Mapping[str, Any], vllm_config: Any
) -> tuple[str, str]:
    """``plain``, ``packed`` or ``declared`` for these tensors, and what is appended to the layers' ids.

    Raises `LayoutError` if an order was declared and the bytes are not in it, or cannot be.
    """
    on_cpu = all(tensor.device.type == "cpu" for tensor in kv_caches.values())
    attention = [spec for spec in specs if spec.kind == "attention"]
    if block_order == "declared":
        if not on_cpu or not attention:
            raise LayoutError('block_order = "declared" is for attention on CPU; elsewhere the strides say the order')
        for spec in attention:
            check_cpu_order(spec, kv_caches[spec.layers[0]], vllm_config)
        return "declared", ""
    if block_order == "auto" and not (on_cpu and attention):
        return "plain", ""
    if not on_cpu:
        return "packed", "@packed"
    kernels = {cpu_kernel(spec, kv_caches[spec.layers[0]], vllm_config) for spec in attention}
    return "packed", "@cpu-" + "-".join(sorted(kernels))


def cpu_kernel(spec: GroupSpec, tensor: Any, vllm_config: Any) -> str:
    """The name of the kernel that vLLM uses for these blocks."""
    from vllm.v1.attention.backends.cpu_attn import _get_attn_isa

    model, cache = vllm_config.model_config, vllm_config.cache_config
    return str(_get_attn_isa(model.dtype, tensor.shape[2], spec.head_size, cache.cache_dtype))


def check_cpu_order(spec: GroupSpec, tensor: Any, vllm_config: Any) -> None:
    """Has vLLM's own kernel write two blocks with known values, and compares them byte by byte with the declared order.

    Raises `LayoutError` naming the first difference.
    """
    import torch
    from vllm import _custom_ops as ops

    blocks, (_, heads, tokens, _) = 2, tensor.shape
    key_size, value_size = spec.head_size, spec.value_head_size
    if key_size != value_size:
        raise LayoutError(f"cache group {spec.name}: K and V of different sizes: their order cannot be declared")
    count = blocks * tokens
    # Small whole numbers: exact in every type, and no two neighbours alike.
    values = torch.arange(count * heads * key_size * 2, dtype=torch.int64) * 7919 % 251 - 125
    values = values.to(tensor.dtype).reshape(2, count, heads, key_size)
    key, value = values[0].contiguous(), values[1].contiguous()
    cache = torch.zeros((blocks, heads, tokens, 2 * key_size), dtype=tensor.dtype)
    halves = cache.view(blocks, heads, 2 * tokens, key_size).chunk(2, dim=2)
    isa = cpu_kernel(spec, tensor, vllm_config)
    slots = torch.arange(count, dtype=torch.int64)
    ops.cpu_attn_reshape_and_cache(key, value, halves[0], halves[1], slots, isa)
    shape = (blocks, tokens, heads, key_size)
    declared = declared_block(key.reshape(shape), value.reshape(shape))
    written = cache.reshape(blocks, heads, 2, tokens * key_size)
    for name, part in (("K", 0), ("V", 1)):
        same = written[:, :, part] == declared[:, :, part]
        if not bool(same.all()):
            where = (~same).nonzero()[0].tolist()
            raise LayoutError(
                f"cache group {spec.name}: vLLM's kernel ({isa}) does not write {name} in the declared order "
                f"(block, head, element {where}); use block_order = \"packed\" with equal block sizes on both sides"
            )


def declared_block(key: Any, value: Any) -> Any:
    """Blocks as declared: ``[blocks, heads, 2, tokens * dim]``, K as (dim, token), V as (token, dim), from tensors
    ``[blocks, tokens, heads, dim]``."""
    import torch

    blocks, tokens, heads, dim = key.shape
    keys = key.permute(0, 2, 3, 1).reshape(blocks, heads, tokens * dim)
    values = value.permute(0, 2, 1, 3).reshape(blocks, heads, tokens * dim)
    return torch.stack((keys, values), dim=2)
