"""The little of vLLM that more than one module needs, or stand-ins where vLLM is not installed.

The stand-ins let the scheduler side, the worker side and the statistics be tested without an engine. A connector is
never built on them: `connector` imports vLLM itself.
"""

from __future__ import annotations

import logging
from typing import Any

try:
    from vllm.distributed.kv_transfer.kv_connector.v1.base import (
        KVConnectorHandshakeMetadata as HandshakeMetadata,
    )
    from vllm.distributed.kv_transfer.kv_connector.v1.base import (
        KVConnectorMetadata as StepMetadata,
    )
    from vllm.distributed.kv_transfer.kv_connector.v1.metrics import (
        KVConnectorPromMetrics as PromMetricsBase,
    )
    from vllm.distributed.kv_transfer.kv_connector.v1.metrics import (
        KVConnectorStats as StatsBase,
    )
    from vllm.logger import init_logger

    HAVE_VLLM = True

    def logger_of(name: str) -> logging.Logger:
        """A logger that vLLM's log configuration shows."""
        return init_logger(f"vllm.{name}")

except ImportError:
    from dataclasses import dataclass, field

    HAVE_VLLM = False

    class HandshakeMetadata:  # type: ignore[no-redef]
        """Stand-in."""

    class StepMetadata:  # type: ignore[no-redef]
        """Stand-in."""

    class PromMetricsBase:  # type: ignore[no-redef]
        """Stand-in."""

    @dataclass
    class StatsBase:  # type: ignore[no-redef]
        """Stand-in."""

        data: dict[str, Any] = field(default_factory=dict)

    def logger_of(name: str) -> logging.Logger:
        """A plain logger."""
        return logging.getLogger(f"vllm.{name}")


__all__ = ["HAVE_VLLM", "HandshakeMetadata", "PromMetricsBase", "StatsBase", "StepMetadata", "logger_of"]
