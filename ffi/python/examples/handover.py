"""A hand-over between two processes: `python handover.py`.

The parent is the prefill worker, the child (another Python, started by `spawn`) the decode worker. The prefill worker
"computes" a request's KV block by block and releases it part by part; the decode worker receives it into blocks of its
own choice and looks at what came.
"""

import multiprocessing
from typing import Any

import numpy as np

import kvxfer

LAYERS, BLOCKS, TOKENS, HEADS, DIM = 4, 32, 16, 8, 64
REQUEST_TOKENS = 100  # seven blocks, the last one not full


def cache() -> Any:
    """A cache as an engine has it: per layer K and V, each an array of blocks."""
    return np.zeros((LAYERS, 2, BLOCKS, TOKENS, HEADS, DIM), np.float32)


def register(endpoint: kvxfer.Endpoint, memory: Any, role: Any) -> kvxfer.Pool:
    geometry = kvxfer.Geometry.attention("f32", tokens_per_block=TOKENS, kv_heads=HEADS, head_size=DIM)
    group = kvxfer.Group("attention", geometry, BLOCKS)
    axes = ("kv", "block", "token", "head", "dim")
    tensors = [kvxfer.TensorPlane(memory[layer], axes, layer=str(layer)) for layer in range(LAYERS)]
    layout, regions = kvxfer.layout_of([group], tensors)
    return endpoint.register(layout, regions, role)


def decode(prefill_address: str, done: Any) -> None:
    """The decode worker: claims the request, says where it goes, waits until it is there."""
    memory = cache()
    with kvxfer.Endpoint("decode-0", listen="127.0.0.1:0", transports=["tcp"]) as endpoint:
        pool = register(endpoint, memory, "receive")
        claim = endpoint.claim("request-17", pool, [prefill_address])
        blocks = [30, 2, 7, 19, 4, 11, 23]
        claim.fill((0, REQUEST_TOKENS, blocks))
        arrival = claim.wait(timeout=30)
        print(f"decode: {arrival.bytes} bytes arrived")
        tokens = memory[:, :, blocks].reshape(LAYERS, 2, -1, HEADS, DIM)[:, :, :REQUEST_TOKENS]
        expected = np.arange(REQUEST_TOKENS, dtype=np.float32)
        right = bool((tokens == expected[:, None, None]).all())
        print(f"decode: every token is {'right' if right else 'WRONG'}", flush=True)
        # Stays until prefill has the verdict.
        done.wait(30)


def main() -> None:
    memory = cache()
    with kvxfer.Endpoint("prefill-0", listen="127.0.0.1:0", transports=["tcp"]) as endpoint:
        pool = register(endpoint, memory, "serve")
        context = multiprocessing.get_context("spawn")
        done = context.Event()
        worker = context.Process(target=decode, args=(str(endpoint.address), done))
        worker.start()

        offer = endpoint.offer("request-17", pool)
        blocks = [5, 6, 9, 1, 0, 14, 8]
        for number, block in enumerate(blocks):
            first, end = number * TOKENS, min((number + 1) * TOKENS, REQUEST_TOKENS)
            for token in range(first, end):  # the model's work
                memory[:, :, block, token - first] = token
            offer.append((first, end, [block]))
            offer.ready(first, end)
        offer.finish(REQUEST_TOKENS)
        release = offer.wait(timeout=30)
        print(f"prefill: released, {release.members[0].verdict}; the blocks may be reused", flush=True)
        done.set()
        worker.join()


if __name__ == "__main__":
    main()
