"""The class that vLLM loads. It forwards: `Scheduler` and `Worker` do the work, each in its process."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorTransferResults,
    SupportsHMA,
)
from vllm.v1.metrics.cache_hit_source import CacheHitSource

from .engine import logger_of
from .device import device_of
from .layout import CacheLayout, view_of
from .messages import Handshake, StepMessages
from .order import inner_order
from .records import Place
from .scheduler import Scheduler
from .settings import Settings
from .specs import check_drafts, check_parallel, groups_of, tables_of
from .stats import KvxferPromMetrics, KvxferStats
from .worker import Worker

if TYPE_CHECKING:
    import torch
    from vllm.config import VllmConfig
    from vllm.forward_context import ForwardContext
    from vllm.v1.attention.backend import AttentionMetadata
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

logger = logger_of("kvxfer")

_POOL_ROLES = {"kv_producer": "serve", "kv_consumer": "receive", "kv_both": "both"}


class KvxferConnector(KVConnectorBase_V1, SupportsHMA):
    """Hands the KV cache of finished prefills to decode servers: prefill pushes, part by part, into decode's blocks."""

    _cache_hit_source = CacheHitSource.P2P

    def __init__(self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig):
        """Raises for settings that cannot be used and for models that cannot be handed over."""
        super().__init__(vllm_config, role, kv_cache_config)
        transfer = vllm_config.kv_transfer_config
        assert transfer is not None
        self._settings = Settings.parse(transfer.kv_connector_extra_config)
        self._engine_id = transfer.engine_id or "vllm"
        self._scheduler: Scheduler | None = None
        self._worker: Worker | None = None
        check_parallel(vllm_config.parallel_config)
        check_drafts(vllm_config)
        if role == KVConnectorRole.SCHEDULER:
            self._scheduler = Scheduler(
                self._settings, tables_of(kv_cache_config), self._engine_id, offers=transfer.is_kv_producer
            )
            logger.info(
                "kvxfer: %s, kv_load_failure_policy %s, layerwise %s, preemption %s",
                transfer.kv_role,
                transfer.kv_load_failure_policy,
                self._settings.layerwise,
                self._settings.preemption,
            )
        else:
            parallel = vllm_config.parallel_config
            from vllm.distributed.parallel_state import get_pp_group, get_tp_group

            place = Place(
                tensor_rank=get_tp_group().rank_in_group,
                tensor_size=parallel.tensor_parallel_size,
                pipeline_rank=get_pp_group().rank_in_group,
                pipeline_size=parallel.pipeline_parallel_size,
            )
            self._worker = Worker(self._settings, place, _POOL_ROLES[transfer.kv_role], self._engine_id)

    # ---------------------------------------------------------------------------------------------- both sides

    def shutdown(self) -> None:
        """Ends the endpoint, in bounded time."""
        if self._worker is not None:
            self._worker.close()

    def get_kv_connector_stats(self) -> KvxferStats | None:
        """What was counted since the last call."""
        side = self._worker or self._scheduler
        assert side is not None
        return side.take_stats()

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> KvxferStats:
        """Statistics from what a worker or the scheduler sent."""
        # Copied: vLLM's loggers add to what they get, and share one payload.
        return KvxferStats(data=copy.deepcopy(data)) if data else KvxferStats()

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: VllmConfig,
        metric_types: dict[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> KvxferPromMetrics:
        """The counters in vLLM's ``/metrics``."""
        return KvxferPromMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)

    @classmethod
    def get_required_kvcache_layout(cls, vllm_config: VllmConfig) -> str | None:
        """Any layout will do: planes are described by their strides."""
        return None

    @classmethod
    def requires_piecewise_for_cudagraph(cls, extra_config: dict[str, Any]) -> bool:
        """Layer by layer needs Python between the layers."""
        return bool(extra_config.get("layerwise", False))

    # --------------------------------------------------------------------------------------------- worker side

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """Opens the endpoint and registers the cache."""
        assert self._worker is not None
        place = self._worker.place
        model = self._vllm_config.model_config
        specs = groups_of(
            self._kv_cache_config, model.get_total_num_kv_heads(), place.tensor_rank, place.tensor_size
        )
        views = {name: view_of(tensor) for name, tensor in kv_caches.items()}
        inner, tag = inner_order(self._settings.block_order, specs, kv_caches, self._vllm_config)
        self._worker.register(CacheLayout(specs, views, inner, tag), *device_of(kv_caches))

    def get_handshake_metadata(self) -> KVConnectorHandshakeMetadata | None:
        """This worker's address, for the scheduler."""
        assert self._worker is not None
        return self._worker.handshake()

    def handle_preemptions(self, kv_connector_metadata: KVConnectorMetadata) -> None:
        """Takes back blocks that are about to be overwritten. The only call that may wait, and boundedly."""
        assert self._worker is not None and isinstance(kv_connector_metadata, StepMessages)
        preempted, kv_connector_metadata.preempted = kv_connector_metadata.preempted, []
        if preempted:
            self._worker.take_back(preempted)

    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
        """A step begins: what the scheduler said is done before the forward."""
        super().bind_connector_metadata(connector_metadata)
        assert self._worker is not None and isinstance(connector_metadata, StepMessages)
        self.handle_preemptions(connector_metadata)
        self._worker.begin_step(connector_metadata)

    def start_load_kv(self, forward_context: ForwardContext, **kwargs: Any) -> None:
        """Nothing: loads began with the step."""

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Nothing: a request runs only when its load has arrived."""

    def save_kv_layer(
        self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: AttentionMetadata, **kwargs: Any
    ) -> None:
        """Releases this layer's part of the step, if that was asked for."""
        if self._settings.layerwise:
            assert self._worker is not None and isinstance(self._connector_metadata, StepMessages)
            self._worker.layer_done(self._connector_metadata, layer_name)

    def wait_for_save(self) -> None:
        """The forward is done: releases what it computed. Does not wait."""
        assert self._worker is not None
        if isinstance(self._connector_metadata, StepMessages):
            self._worker.end_step(self._connector_metadata)

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        """What has been sent, received, or not received, each id once."""
        assert self._worker is not None
        reports = self._worker.results()
        return KVConnectorTransferResults(
            finished_sending=reports.sent, finished_recving=reports.received, failed_recving=reports.failed
        )

    # ------------------------------------------------------------------------------------------ scheduler side

    def set_xfer_handshake_metadata(self, metadata: dict[int, KVConnectorHandshakeMetadata]) -> None:
        """The workers' addresses, by tensor rank."""
        self.set_xfer_handshake_metadata_pp_aware({(0, rank): one for rank, one in metadata.items()})

    def set_xfer_handshake_metadata_pp_aware(
        self, metadata: dict[tuple[int, int], KVConnectorHandshakeMetadata]
    ) -> None:
        """The workers' addresses, by pipeline and tensor rank."""
        assert self._scheduler is not None
        self._scheduler.set_addresses(
            {rank: one for rank, one in metadata.items() if isinstance(one, Handshake)}
        )

    def on_new_request(self, request: Request) -> None:
        """A request became known: decode claims, prefill notes."""
        assert self._scheduler is not None
        self._scheduler.on_new_request(request)

    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> tuple[int | None, bool]:
        """How many tokens come from prefill."""
        assert self._scheduler is not None
        return self._scheduler.tokens_to_load(request, num_computed_tokens)

    def get_loaded_kv_cache_group_ids(self, request: Request) -> tuple[int, ...]:
        """All that can be transferred: the request's own blocks are filled."""
        return self._kv_cache_config.transfer_group_ids

    def update_state_after_alloc(self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int) -> None:
        """A request has blocks: its claim is filled, or declined."""
        assert self._scheduler is not None
        self._scheduler.allocated(request, blocks.get_block_ids(), num_external_tokens)

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> KVConnectorMetadata:
        """What the workers are told with this step."""
        assert self._scheduler is not None
        return self._scheduler.step(scheduler_output)

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        """What all workers have reported."""
        assert self._scheduler is not None
        self._scheduler.reported(
            set(connector_output.finished_sending or ()), set(connector_output.finished_recving or ())
        )

    def request_finished(self, request: Request, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        """A request ended."""
        return self.request_finished_all_groups(request, (block_ids,))

    def request_finished_all_groups(
        self, request: Request, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """A request ended: whether its blocks are kept until it is reported, and what the client gets."""
        assert self._scheduler is not None
        return self._scheduler.finished(request)

    def has_pending_push_work(self) -> bool:
        """Whether the engine must go on stepping: blocks wait for their reader."""
        assert self._scheduler is not None
        return self._scheduler.has_work()

    def take_events(self) -> Iterable[Any]:
        """None: no cache of its own."""
        return ()
