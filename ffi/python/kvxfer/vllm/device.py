"""What a cache in a GPU's memory needs: its kind of memory, and events that say when kernels have written it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from .layout import LayoutError

#: Kinds of devices whose memory kvxfer takes, as torch names them.
DEVICES = ("cuda",)


def device_of(kv_caches: Mapping[str, Any]) -> tuple[str | None, Callable[[], Any] | None]:
    """The kind of device that the tensors are on, and what records an event there; both ``None`` for the host.

    The event comes behind everything that the calling thread's current stream has been given: vLLM launches a step's
    kernels there, and returns before they have run.

    Raises `LayoutError` for tensors on several devices and on others than kvxfer knows.
    """
    devices = {tensor.device for tensor in kv_caches.values()}
    if len(devices) != 1:
        raise LayoutError(f"the cache is on {len(devices)} devices: {sorted(map(str, devices))}; a worker has one")
    (device,) = devices
    if device.type == "cpu":
        return None, None
    if device.type not in DEVICES:
        raise LayoutError(f"the cache is on {device}: kvxfer takes memory of the host and of {', '.join(DEVICES)}")

    def mark() -> Any:
        import torch

        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(device))
        return event

    return device.type, mark
