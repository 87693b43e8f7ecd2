"""kvxfer.vllm: statistics, in vLLM's forms and on the page that documents them."""

import pathlib
import re

import pytest

from kvxfer.vllm.settings import Settings
from kvxfer.vllm.stats import COUNTERS, SAMPLES_MAX, SECONDS, Counters, KvxferStats

PAGE = pathlib.Path(__file__).parents[3] / "docs" / "vllm.md"


def test_intervals_add_up_over_workers_and_time():
    one, two = Counters(), Counters()
    one.add("claims_arrived", 2)
    one.seconds("claim_seconds", 0.002)
    two.add("claims_arrived")
    two.add("aborts")
    two.seconds("claim_seconds", 0.004)
    together = one.take().aggregate(two.take())
    assert together.data == {"claims_arrived": 3, "aborts": 1, "claim_seconds": [0.002, 0.004]}
    assert one.take() is None
    line = together.reduce()
    assert line["claims_arrived"] == 3 and line["claim_p50_ms"] == 4.0 and "offers_opened" not in line


def test_samples_are_bounded():
    counters = Counters()
    for _ in range(SAMPLES_MAX + 5):
        counters.seconds("claim_seconds", 0.1)
    one = counters.take()
    assert len(one.data["claim_seconds"]) == SAMPLES_MAX
    assert len(one.aggregate(KvxferStats(data={"claim_seconds": [1.0]})).data["claim_seconds"]) == SAMPLES_MAX


def test_what_has_no_description_is_not_counted():
    with pytest.raises(KeyError):
        Counters().add("misspelt")
    with pytest.raises(KeyError):
        Counters().seconds("misspelt", 1.0)


@pytest.mark.skipif(not PAGE.exists(), reason="needs a checkout")
def test_the_page_has_all_counters_and_settings():
    rows = dict(re.findall(r"^\| `(\w+)` \| (.*?) \|", PAGE.read_text(), re.MULTILINE))
    for name, text in {**COUNTERS, **SECONDS}.items():
        assert rows.get(name) == text
    for name in Settings.__dataclass_fields__:
        assert name in rows


def test_prometheus_gets_each_interval_once():
    prometheus = pytest.importorskip("prometheus_client", reason="needs prometheus_client, which comes with vLLM")
    pytest.importorskip("vllm", reason="needs vLLM's base class")
    from types import SimpleNamespace

    from kvxfer.vllm.stats import KvxferPromMetrics

    types = {kind: kind for kind in (prometheus.Counter, prometheus.Gauge, prometheus.Histogram)}
    metrics = KvxferPromMetrics(SimpleNamespace(kv_transfer_config=None), types, ["engine"], {0: ["0"]})
    metrics.observe({"retracts": 2, "claim_seconds": [0.001, 0.3]})
    metrics.observe({"retracts": 1})
    value = prometheus.REGISTRY.get_sample_value
    assert value("vllm:kvxfer_retracts_total", {"engine": "0"}) == 3
    assert value("vllm:kvxfer_claim_seconds_count", {"engine": "0"}) == 2
    assert value("vllm:kvxfer_aborts_total", {"engine": "0"}) == 0
