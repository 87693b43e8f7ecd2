"""kvxfer.vllm: the declared order of vLLM's CPU cache against the bytes that its kernel writes."""

from types import SimpleNamespace

import pytest

from kvxfer.vllm.layout import GroupSpec, LayoutError
from kvxfer.vllm.order import check_cpu_order, cpu_kernel, inner_order

torch = pytest.importorskip("torch", reason="needs torch")
pytest.importorskip("vllm", reason="needs vLLM: its kernel writes the bytes")
pytest.importorskip("vllm.v1.attention.backends.cpu_attn", reason="needs vLLM for CPU")


def config(dtype):
    return SimpleNamespace(
        model_config=SimpleNamespace(dtype=dtype), cache_config=SimpleNamespace(cache_dtype="auto")
    )


def spec(tokens, dtype="f32"):
    return GroupSpec("attention-0", "attention", dtype, tokens, 4, 64, 64, ("l",))


@pytest.mark.parametrize("tokens", [32, 64, 128])
def test_single_precision_is_written_in_the_declared_order(tokens):
    tensor = torch.zeros((2, 4, tokens, 128), dtype=torch.float32)
    check_cpu_order(spec(tokens), tensor, config(torch.float32))
    assert inner_order("declared", [spec(tokens)], {"l": tensor}, config(torch.float32)) == ("declared", "")


def test_another_order_is_found_out():
    tensor = torch.zeros((2, 4, 32, 128), dtype=torch.bfloat16)
    if cpu_kernel(spec(32, "bf16"), tensor, config(torch.bfloat16)) != "amx":
        pytest.skip("needs a CPU with AMX, whose kernel interleaves K once more")
    with pytest.raises(LayoutError, match="does not write K in the declared order"):
        check_cpu_order(spec(32, "bf16"), tensor, config(torch.bfloat16))


def test_packed_layers_carry_the_name_of_their_kernel():
    tensor = torch.zeros((2, 4, 32, 128), dtype=torch.float32)
    inner, tag = inner_order("auto", [spec(32)], {"l": tensor}, config(torch.float32))
    assert inner == "packed" and tag == "@cpu-" + cpu_kernel(spec(32), tensor, config(torch.float32))
