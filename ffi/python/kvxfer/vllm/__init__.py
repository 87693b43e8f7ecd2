"""A KV connector for vLLM: one server's KV cache handed to another by kvxfer.

vLLM loads it out of tree::

    vllm serve MODEL --kv-transfer-config '{"kv_connector": "KvxferConnector",
        "kv_connector_module_path": "kvxfer.vllm", "kv_role": "kv_producer"}'

The modules, by role:

* `connector`: the class that vLLM builds twice, once in the scheduler and once in each worker;
* `scheduler`: what is decided per request, in the scheduler's process;
* `worker`: endpoint, pool, offers and claims, in each worker's process;
* `records`: what a worker remembers of them;
* `messages`: what the scheduler tells the workers, step by step;
* `params`: keys and addresses, as clients carry them in ``kv_transfer_params``;
* `specs`, `layout`, `order`: vLLM's cache configuration and tensors as groups and planes, and the order inside a block;
* `tables`: which blocks of a request are meant, pure functions;
* `settings`: the keys of ``kv_connector_extra_config``;
* `stats`: counters in vLLM's metrics and log;
* `engine`: the little of vLLM that several of them need, or stand-ins.

Only `connector` needs vLLM. The others can be imported and tested without it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .connector import KvxferConnector

__all__ = ["KvxferConnector"]


def __getattr__(name: str) -> object:
    # vLLM is imported when the connector is asked for, not before: the pure modules are used without it.
    if name == "KvxferConnector":
        from .connector import KvxferConnector

        return KvxferConnector
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
