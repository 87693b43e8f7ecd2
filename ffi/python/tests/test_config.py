"""Ways to configure an endpoint."""

import pathlib

import pytest

import kvxfer


def test_a_dict_a_text_a_file_and_the_environment_say_the_same(endpoint, tmp_path, monkeypatch):
    text = 'name = "n"\nlisten = ["127.0.0.1:0"]\ntransports = ["tcp"]\n[limits]\nhandles_max = 1\n'
    path = tmp_path / "kvxfer.toml"
    path.write_text(text)
    nested = {"name": "n", "listen": "127.0.0.1:0", "transports": ["tcp"], "limits": {"handles_max": 1}}
    monkeypatch.setenv("KVXFER_NAME", "n")
    monkeypatch.setenv("KVXFER_LIMITS_HANDLES_MAX", "1")
    for config in (text, pathlib.Path(path), nested, None):
        one = endpoint(None, config=config)
        assert one.name == "n"
        pool = one.allocate(kvxfer.Layout.opaque(16, 4), "both")
        kept = pool.grant((0, 1, [0]))
        with pytest.raises(kvxfer.Busy) as caught:
            pool.grant((0, 1, [1]))
        assert caught.value.retryable
        kept.cancel()


def test_arguments_go_over_the_configuration(endpoint):
    one = endpoint("argument", config='name = "configuration"')
    assert one.name == "argument"


def test_off_loopback_only_when_it_is_said(endpoint):
    one = endpoint(listen="0.0.0.0:0", security={"mode": "none", "off_loopback": "insecure-allowed"})
    assert one.address.sockets


def test_an_unknown_variable_is_refused(monkeypatch):
    monkeypatch.setenv("KVXFER_NAMES", "n")
    with pytest.raises(kvxfer.InvalidArgument, match="KVXFER_NAME"):
        kvxfer.Endpoint()


def test_the_reference_names_every_setting():
    reference = kvxfer.config_reference()
    for key in ("listen", "limits.slots_max", "deadlines.liveness_ms", "security.off_loopback"):
        assert f"`{key}`" in reference
