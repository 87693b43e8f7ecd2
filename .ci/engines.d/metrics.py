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

# KvxferConnector's.
OFFERS = "vllm:kvxfer_offers_total"                  # ended ones; outcome: ok, or the error's kind
CLAIMS = "vllm:kvxfer_claims_total"
PARTS = "vllm:kvxfer_parts_total"
EARLY_PARTS = "vllm:kvxfer_early_parts_total"        # released before the request's finish
RECEIVED_TOKENS = "vllm:kvxfer_received_tokens_total"
SKIPPED_TOKENS = "vllm:kvxfer_skipped_tokens_total"  # not selected, because decode's prefix cache held them
RETRACTS = "vllm:kvxfer_retracts_total"
ABORTS_IN_FLIGHT = "vllm:kvxfer_aborts_in_flight_total"
FAILED_LOADS = "vllm:kvxfer_failed_loads_total"
DECLINES = "vllm:kvxfer_declines_total"
OPEN = ("vllm:kvxfer_open_offers", "vllm:kvxfer_open_claims")


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

    def outcomes(self, name, label="outcome"):
        """The values of a counter by one label, those that are not 0."""
        found = {}
        for have, value in self.values.get(name, []):
            if value:
                found[have.get(label, "")] = found.get(have.get(label, ""), 0) + int(value)
        return found


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

    def outcomes(self, name):
        before, now = self.start().outcomes(name), read(self.server).outcomes(name)
        return {label: count - before.get(label, 0) for label, count in now.items() if count != before.get(label, 0)}

    def wait(self, name, at_least, limit_s, **labels):
        """Waits until a counter has moved this far. Returns by how much it did in the end."""
        limit = time.monotonic() + limit_s
        while True:
            moved = self(name, **labels)
            if moved >= at_least or time.monotonic() > limit:
                return moved
            time.sleep(0.02)
