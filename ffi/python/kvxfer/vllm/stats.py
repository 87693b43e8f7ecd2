"""Counters of the hand-over, in vLLM's metrics (``vllm:kvxfer_*``) and in its log.

Each worker and the scheduler count for themselves; vLLM adds them up. A counter that concerns workers is therefore the
sum over the ranks.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from .engine import PromMetricsBase, StatsBase

#: Counters and what they mean. ``docs/vllm.md`` shows this table; a test compares the two.
COUNTERS: dict[str, str] = {
    "offers_opened": "Offers opened (prefill, per rank).",
    "offers_released": "Offers whose readers were all served (prefill, per rank).",
    "offers_failed": "Offers that ended otherwise: unclaimed, cancelled, retracted, peer lost (prefill, per rank).",
    "offers_unclaimed": "Of these, offers that waited unclaimed_seconds for a claim, or unserved_seconds for its end (prefill, per rank).",
    "offers_declined": "Offers released because their reader needed nothing (prefill, per rank).",
    "parts_released": "Parts released to readers (prefill, per rank).",
    "parts_before_finish": "Parts released before prefill had computed the last token (prefill, per rank).",
    "parts_overlapped": "Of these, parts released while a claim had met the offer (prefill, per rank).",
    "retracts": "Offers whose blocks were taken back because vLLM preempted the request (prefill, per rank).",
    "retracts_late": "Of these, waits that reached preemption_wait_ms (prefill, per rank).",
    "claims_opened": "Claims opened (decode, per rank): the sum of the next four, and of those still open.",
    "claims_arrived": "Claims whose bytes are all in place (decode, per rank).",
    "claims_failed": "Claims that failed after they had blocks; vLLM's policy applies (decode, per rank).",
    "claims_declined": "Claims that needed nothing, or whose request ended before it had blocks (decode, per rank).",
    "claims_aborted": "Claims cancelled because vLLM ended the request, after they had blocks (decode, per rank).",
    "claims_restarted": "Restarts of a hand-off seen by a claim, after a preemption at prefill (decode, per rank).",
    "claims_quarantined": "Claims whose blocks are kept: a write into them is not excluded (decode, per rank).",
    "aborts": "Offers and claims cancelled because vLLM ended the request (per rank).",
    "aborts_in_flight": "Of these, claims that had blocks and offers that a claim had met (per rank).",
    "bytes_received": "Bytes placed by claims that arrived (decode, per rank).",
    "duplicate_keys": "Prefill requests not offered because their transfer_id was in use.",
    "refused_params": "Requests whose kv_transfer_params could not be used.",
    "tokens_to_load": "Prompt tokens asked from prefill (decode).",
    "tokens_skipped": "Prompt tokens not asked for, since decode held them (decode).",
    "full_prefix_hits": "Requests that needed nothing from prefill (decode).",
}

#: Samples and what they mean, in seconds.
SECONDS: dict[str, str] = {
    "claim_seconds": "From the blocks of a decode request to its arrival (decode, per rank).",
    "offer_seconds": "From the first chunk of a prefill request to its release (prefill, per rank).",
    "retract_seconds": "Time a worker's engine thread waited for reads of preempted blocks (prefill, per rank).",
}

#: Bucket edges of the histograms, in seconds.
BUCKETS = [0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 30.0, 120.0]

#: Samples kept between two reports; beyond, only the counters go on.
SAMPLES_MAX = 4096


@dataclass
class KvxferStats(StatsBase):
    """What was counted in an interval: numbers, and lists of seconds."""

    def __post_init__(self) -> None:
        if not self.data:
            self.reset()

    def reset(self) -> None:
        """Counts nothing."""
        self.data: dict[str, Any] = {}

    def is_empty(self) -> bool:
        """Whether nothing was counted."""
        return not self.data

    def aggregate(self, other: StatsBase) -> KvxferStats:
        """Adds what another worker, or a later interval, counted."""
        for name, value in other.data.items():
            if isinstance(value, list):
                have = self.data.setdefault(name, [])
                have.extend(value[: max(0, SAMPLES_MAX - len(have))])
            else:
                self.data[name] = self.data.get(name, 0) + value
        return self

    def reduce(self) -> dict[str, int | float]:
        """One line for the log: what is not zero, and the middle and the slow end of the times."""
        out: dict[str, int | float] = {}
        for name in COUNTERS:
            if name in self.data:
                out[name] = self.data[name]
        for name in SECONDS:
            samples = sorted(self.data.get(name, ()))
            if samples:
                label = name.removesuffix("_seconds")
                out[f"{label}_p50_ms"] = round(samples[len(samples) // 2] * 1e3, 2)
                out[f"{label}_p90_ms"] = round(samples[min(len(samples) - 1, len(samples) * 9 // 10)] * 1e3, 2)
        return out


class Counters:
    """Counts up to the next report."""

    def __init__(self) -> None:
        self._stats = KvxferStats()

    def add(self, name: str, by: int = 1) -> None:
        """Counts."""
        if name not in COUNTERS:
            raise KeyError(name)
        data = self._stats.data
        data[name] = data.get(name, 0) + by

    def seconds(self, name: str, seconds: float) -> None:
        """Keeps a sample."""
        if name not in SECONDS:
            raise KeyError(name)
        samples = self._stats.data.setdefault(name, [])
        if len(samples) < SAMPLES_MAX:
            samples.append(seconds)

    def take(self) -> KvxferStats | None:
        """What was counted since the last call; `None` if nothing."""
        if self._stats.is_empty():
            return None
        stats, self._stats = self._stats, KvxferStats()
        return stats


class KvxferPromMetrics(PromMetricsBase):
    """The same numbers for Prometheus."""

    def __init__(
        self,
        vllm_config: Any,
        metric_types: dict[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ):
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        self._counters = {
            name: self._per_engine(
                self._counter_cls(name=f"vllm:kvxfer_{name}", documentation=text, labelnames=labelnames)
            )
            for name, text in COUNTERS.items()
        }
        self._seconds = {
            name: self._per_engine(
                self._histogram_cls(
                    name=f"vllm:kvxfer_{name}", documentation=text, buckets=BUCKETS, labelnames=labelnames
                )
            )
            for name, text in SECONDS.items()
        }

    def _per_engine(self, metric: Any) -> dict[int, Any]:
        return {engine: metric.labels(*values) for engine, values in self.per_engine_labelvalues.items()}

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        """Adds an interval."""
        for name, value in transfer_stats_data.items():
            if name in self._counters:
                self._counters[name][engine_idx].inc(value)
            elif name in self._seconds:
                for sample in value:
                    self._seconds[name][engine_idx].observe(sample)
