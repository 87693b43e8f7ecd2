"""kvxfer.vllm: the class as vLLM loads it, with vLLM installed."""

import inspect

import pytest

pytest.importorskip("vllm", reason="needs vLLM")
factory = pytest.importorskip("vllm.distributed.kv_transfer.kv_connector.factory", reason="needs vLLM")

from vllm.config import KVTransferConfig  # noqa: E402
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, supports_hma  # noqa: E402

from kvxfer.vllm.stats import KvxferStats  # noqa: E402


@pytest.fixture
def connector():
    config = KVTransferConfig(
        kv_connector="KvxferConnector", kv_connector_module_path="kvxfer.vllm", kv_role="kv_producer"
    )
    return factory.KVConnectorFactory.get_connector_class(config)


def test_vllm_finds_the_class_out_of_tree(connector):
    assert connector.__name__ == "KvxferConnector" and issubclass(connector, KVConnectorBase_V1)
    assert supports_hma(connector) and not inspect.isabstract(connector)


def test_each_hook_takes_what_vllm_gives(connector):
    for name, ours in vars(connector).items():
        theirs = getattr(KVConnectorBase_V1, name, None)
        if name.startswith("_") or not callable(theirs):
            continue
        ours = getattr(connector, name)
        assert list(inspect.signature(ours).parameters) == list(inspect.signature(theirs).parameters), name


def test_the_hooks_that_the_design_needs_are_there(connector):
    for name in (
        "handle_preemptions",
        "on_new_request",
        "get_loaded_kv_cache_group_ids",
        "has_pending_push_work",
        "get_transfer_results",
        "get_handshake_metadata",
        "set_xfer_handshake_metadata_pp_aware",
        "request_finished_all_groups",
    ):
        assert name in vars(connector), name
    # Failures go by request: vLLM refuses block ids with several cache groups.
    assert "get_block_ids_with_load_errors" not in vars(connector)


def test_layer_by_layer_asks_for_piecewise_graphs(connector):
    assert connector.requires_piecewise_for_cudagraph({"layerwise": True})
    assert not connector.requires_piecewise_for_cudagraph({})


def test_statistics_survive_vllms_loggers(connector):
    payload = {"claims_arrived": 1, "claim_seconds": [0.1]}
    first = connector.build_kv_connector_stats(payload)
    first.aggregate(connector.build_kv_connector_stats(payload))
    assert payload == {"claims_arrived": 1, "claim_seconds": [0.1]}
    assert first.data == {"claims_arrived": 2, "claim_seconds": [0.1, 0.1]}
    assert isinstance(connector.build_kv_connector_stats(None), KvxferStats)
