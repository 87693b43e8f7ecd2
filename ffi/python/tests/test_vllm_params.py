"""kvxfer.vllm: keys, addresses and settings."""

import pytest

from kvxfer.vllm import params
from kvxfer.vllm.settings import Settings, SettingsError


def test_prefill_makes_its_own_key_or_takes_the_routers():
    assert params.prefill_params(None, "r") is None
    assert params.prefill_params({"do_remote_prefill": True}, "r") is None
    assert params.prefill_params({"do_remote_decode": True}, "cmpl-1").key == "cmpl-1"
    given = params.prefill_params({"do_remote_decode": True, "transfer_id": "t-1", "readers": 3}, "cmpl-1")
    assert (given.key, given.readers) == ("t-1", 3)


def test_a_long_request_id_still_makes_a_key():
    key = params.prefill_params({"do_remote_decode": True}, "x" * 5000).key
    assert len(key.encode()) <= params.KEY_BYTES_MAX
    assert key != params.prefill_params({"do_remote_decode": True}, "x" * 5001).key


@pytest.mark.parametrize("bad", ["", "x" * 257, 7, ["a"], "\ud800"])
def test_a_bad_transfer_id_is_refused(bad):
    with pytest.raises(params.ParamsError, match="transfer_id"):
        params.prefill_params({"do_remote_decode": True, "transfer_id": bad}, "r")
    with pytest.raises(params.ParamsError, match="transfer_id"):
        params.decode_params({"do_remote_prefill": True, "transfer_id": bad, "remote_addresses": ["a"]})


@pytest.mark.parametrize("bad", [0, -1, True, "2", 65_536])
def test_bad_readers_are_refused(bad):
    with pytest.raises(params.ParamsError, match="readers"):
        params.prefill_params({"do_remote_decode": True, "readers": bad}, "r")


def test_what_prefill_answers_is_what_decode_takes():
    answer = params.answer("t-1", ["kvx1:a", "kvx1:b"], "engine", 40)
    decode = params.decode_params(answer)
    assert (decode.key, decode.addresses) == ("t-1", ("kvx1:a", "kvx1:b"))
    assert params.prefill_params(answer, "r") is None


@pytest.mark.parametrize("addresses", [None, [], {}, [1], [""], 5])
def test_decode_needs_addresses(addresses):
    with pytest.raises(params.ParamsError, match="remote_addresses"):
        params.decode_params({"do_remote_prefill": True, "transfer_id": "t", "remote_addresses": addresses})
    with pytest.raises(params.ParamsError, match="transfer_id is missing"):
        params.decode_params({"do_remote_prefill": True, "remote_addresses": ["a"]})


def test_claim_sets_are_the_same_on_each_rank_and_differ_by_request():
    one = params.claim_set("e", "r-1")
    assert one == params.claim_set("e", "r-1") and 0 <= one < 1 << 128
    assert len({one, params.claim_set("e", "r-2"), params.claim_set("e2", "r-1"), params.claim_set("er-", "1")}) == 4


def test_settings_are_typed_and_unknown_keys_refused():
    settings = Settings.parse(
        {"listen": "127.0.0.1:7000", "transports": "rdma,tcp", "layerwise": True, "config": {"tcp": {"lanes": 4}}}
    )
    assert settings.transports == ["rdma", "tcp"] and settings.layerwise
    assert settings.listen_of(3) == ["127.0.0.1:7003"]
    assert Settings.parse({"listen": ["[::1]:0"]}).listen_of(3) == ["[::1]:0"]
    assert Settings.parse({}).listen_of(0) is None
    with pytest.raises(SettingsError, match="did you mean 'layerwise'"):
        Settings.parse({"layerwize": True})


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("listen", 5),
        ("listen", "nowhere"),
        ("listen", []),
        ("transports", []),
        ("transports", [1]),
        ("config", 7),
        ("layerwise", "yes"),
        ("checksum", 1),
        ("preemption", "hope"),
        ("preemption_wait_ms", 0),
        ("preemption_wait_ms", True),
        ("block_order", "NHD"),
        ("name", ""),
        ("address_file", 3),
    ],
)
def test_wrong_values_name_their_key(key, value):
    with pytest.raises(SettingsError, match=key):
        Settings.parse({key: value})
