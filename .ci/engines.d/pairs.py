"""The pairs of servers that scenarios run on. Scenarios with the same flags share one, to save its start of a minute."""
import server
from server import Pair, Server

BLOCK = 32
# Of a pair with one rank on each side, and of each rank more.
MEMORY_GIB = 7
RANK_GIB = 2


def make(name, logs):
    flags = ["--block-size", BLOCK]
    chunked = ["--max-num-batched-tokens", 256]
    long = ["--max-model-len", 4096]
    whole, cached = ["--no-enable-prefix-caching"], ["--enable-prefix-caching"]
    if name == "whole":
        return pair(logs, server.kvxfer("fail"), flags + long + whole)
    if name == "cached":
        return pair(logs, server.kvxfer("recompute"), flags + long + cached)
    if name == "chunked":
        return pair(logs, server.kvxfer("recompute"), flags + whole + chunked + ["--max-model-len", 8192])
    if name == "layered":
        return pair(logs, server.kvxfer("recompute", layerwise=True), flags + whole + chunked + ["--max-model-len", 4096])
    if name == "small":
        # Room for 1,504 tokens, of requests of up to 1,024. Each prefill advances by 64 tokens a step, so that several are under way at
        # once: each fits when it is admitted, and not all of them do when they have grown.
        tight = ["--max-model-len", 1024, "--num-gpu-blocks-override", 48, "--max-num-batched-tokens", 256, "--long-prefill-token-threshold", 64]
        # With both requests at once these caches wait for each other now and then: that ends soon.
        return pair(logs, server.kvxfer("recompute", unserved_seconds=5), flags + whole + tight)
    tensor = {"tp-2-1": (2, 1), "tp-1-2": (1, 2)}[name]
    return pair(logs, server.kvxfer("fail"), flags + long + whole, tensor)


def pair(logs, connector, flags, tensor=(1, 1)):
    # A port of its own, so that its next life is found where its last one was.
    fixed = server.with_listen(connector, f"127.0.0.1:{server.free_port()}")
    prefill = Server("prefill", "kv_producer", fixed, flags + ["--tensor-parallel-size", tensor[0]], logs)
    decode = Server("decode", "kv_consumer", connector, flags + ["--tensor-parallel-size", tensor[1]], logs)
    return Pair(prefill, decode)
