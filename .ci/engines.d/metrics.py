"""What a server says about itself in /metrics: vLLM's own numbers, and those that the connector puts there."""
import re
import time

import client

LINE = re.compile(r"^([A-Za-z_:][\w:]*)(?:\{(.*)\})? (\S+)$")
LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')

# vLLM's own.
PREEMPTIONS = "vllm:num_preemptions_total"
RUNNING = "vllm:num_requests_running"
WAITING = "vllm:num_requests_waiting"
USAGE = "vllm:kv_cache_usage_perc"
PREFIX_HITS = "vllm:prefix_cache_hits_total"
BY_SOURCE = "vllm:prompt_tokens_by_source_total"   # source: local_compute, local_cache_hit, external_kv_transfer

# KvxferConnector's; docs/vllm.md says what they mean.
OFFERS_OPENED, OFFERS_RELEASED = "vllm:kvxfer_offers_opened_total", "vllm:kvxfer_offers_released_total"
OFFERS_FAILED, OFFERS_DECLINED = "vllm:kvxfer_offers_failed_total", "vllm:kvxfer_offers_declined_total"
PARTS, EARLY_PARTS = "vllm:kvxfer_parts_released_total", "vllm:kvxfer_parts_before_finish_total"
OVERLAPPED_PARTS = "vllm:kvxfer_parts_overlapped_total"   # before finish, and while a claim had met the offer
RETRACTS, RETRACTS_LATE = "vllm:kvxfer_retracts_total", "vllm:kvxfer_retracts_late_total"
CLAIMS_OPENED, CLAIMS_ARRIVED = "vllm:kvxfer_claims_opened_total", "vllm:kvxfer_claims_arrived_total"
CLAIMS_FAILED, CLAIMS_DECLINED = "vllm:kvxfer_claims_failed_total", "vllm:kvxfer_claims_declined_total"
CLAIMS_ABORTED = "vllm:kvxfer_claims_aborted_total"
CLAIMS_RESTARTED, QUARANTINED = "vllm:kvxfer_claims_restarted_total", "vllm:kvxfer_claims_quarantined_total"
ABORTS, ABORTS_IN_FLIGHT = "vllm:kvxfer_aborts_total", "vllm:kvxfer_aborts_in_flight_total"
BYTES_RECEIVED = "vllm:kvxfer_bytes_received_total"
TOKENS_LOADED, TOKENS_SKIPPED = "vllm:kvxfer_tokens_to_load_total", "vllm:kvxfer_tokens_skipped_total"
OFFERS_ENDED = (OFFERS_RELEASED, OFFERS_FAILED, OFFERS_DECLINED)
CLAIMS_ENDED = (CLAIMS_ARRIVED, CLAIMS_FAILED, CLAIMS_DECLINED, CLAIMS_ABORTED)
FULL_HITS = "vllm:kvxfer_full_prefix_hits_total"


class Snapshot:
    def __init__(self, text):
        self.values = {}
        for line in text.splitlines():
            match = LINE.match(line)
            if match:
                name, labels, value = match.groups()
                self.values.setdefault(name, []).append((dict(LABEL.findall(labels or "")), float(value)))

    def sum(self, name, **labels):
        """The sum of a metric over all its labels, or where some have these values. 0 if there is none yet."""
        found = self.values.get(name, [])
        return sum(value for have, value in found if all(have.get(key) == wanted for key, wanted in labels.items()))


NOTHING = Snapshot("")


def read(server):
    return Snapshot(client.get(server.port, "/metrics"))


class Since:
    """How far a server's counters have moved since this was made, or since the server was started again."""

    def __init__(self, server):
        self.server, self.starts, self.before = server, server.starts, read(server)

    def start(self):
        return self.before if self.server.starts == self.starts else NOTHING

    def __call__(self, name, **labels):
        return int(read(self.server).sum(name, **labels) - self.start().sum(name, **labels))

    def wait(self, name, at_least, limit_s, **labels):
        """Waits until a counter has moved this far. Returns by how much it did in the end."""
        limit = time.monotonic() + limit_s
        while True:
            moved = self(name, **labels)
            if moved >= at_least or time.monotonic() > limit:
                return moved
            time.sleep(0.02)
