use super::schema::{KEYS, variable};
use super::*;
use kvxfer_core::ErrorKind;

fn refused(result: Result<Config>, parts: &[&str]) {
    let error = result.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::InvalidArgument);
    let text = error.to_string();
    for part in parts {
        assert!(text.contains(part), "{text:?} does not say {part:?}");
    }
}

const NONE: [(&str, &str); 0] = [];

#[test]
fn the_schema_and_the_types_have_the_same_keys() {
    fn leaves(prefix: &str, table: &toml::Table, out: &mut Vec<String>) {
        for (name, value) in table {
            let path = if prefix.is_empty() {
                name.clone()
            } else {
                format!("{prefix}.{name}")
            };
            match value {
                toml::Value::Table(inner) => leaves(&path, inner, out),
                _ => out.push(path),
            }
        }
    }
    let mut of_types = Vec::new();
    leaves("", &toml::Table::try_from(Config::default()).unwrap(), &mut of_types);
    let mut of_schema: Vec<String> = KEYS.iter().map(|key| key.path.to_owned()).collect();
    of_types.sort();
    of_schema.sort();
    assert_eq!(of_types, of_schema);
    Config::default().validate().unwrap();
}

#[test]
fn layers_go_over_each_other() {
    let text = "name = \"file\"\nlisten = \"127.0.0.1:1\"\n[limits]\nslots_max = 7\nhandles_max = 8";
    let mut config =
        Config::from_layers(text, [("KVXFER_LIMITS_SLOTS_MAX", "9"), ("KVXFER_TRANSPORTS", "tcp")]).unwrap();
    assert_eq!(config.name, "file");
    assert_eq!(config.listen, ["127.0.0.1:1".parse().unwrap()]);
    assert_eq!((config.limits.slots_max, config.limits.handles_max), (9, 8));
    assert_eq!(config.transports, ["tcp"]);
    config.limits.slots_max = 10;
    config.validate().unwrap();
    assert_eq!(config.limits.slots_max, 10);
}

#[test]
fn lists_are_written_either_way() {
    let list = Config::from_toml_str("transports = [\"rdma\", \"tcp\"]").unwrap();
    let text = Config::from_layers("", [("KVXFER_TRANSPORTS", "rdma, tcp")]).unwrap();
    assert_eq!(list.transports, text.transports);
    let both = Config::from_toml_str("listen = [\"127.0.0.1:0\", \"[::1]:0\"]").unwrap();
    assert_eq!(both.listen.len(), 2);
}

#[test]
fn unknown_names_get_the_nearest_known_one() {
    refused(
        Config::from_toml_str("[limit]\nslots_max = 1"),
        &["unknown setting limit", "text", "did you mean limits?"],
    );
    refused(
        Config::from_toml_str("[tcp]\nlane = 1"),
        &["tcp.lane", "did you mean tcp.lanes?"],
    );
    refused(
        Config::from_layers("", [("KVXFER_LIMITS_SLOT_MAX", "1")]),
        &["KVXFER_LIMITS_SLOT_MAX", "environment", "KVXFER_LIMITS_SLOTS_MAX?"],
    );
    Config::from_layers("", [("KVXFERX", "1"), ("OTHER", "2")]).unwrap();
}

#[test]
fn values_out_of_range_name_key_value_and_source() {
    refused(
        Config::from_toml_str("[limits]\nslots_max = 0"),
        &["limits.slots_max = 0", "text", "1 to 65536"],
    );
    refused(
        Config::from_layers("", [("KVXFER_TCP_LANES", "1000")]),
        &["tcp.lanes = 1000", "KVXFER_TCP_LANES", "1 to 64"],
    );
    refused(
        Config::from_layers("", [("KVXFER_TCP_LANES", "two")]),
        &["tcp.lanes = \"two\"", "not a whole number"],
    );
    refused(Config::from_toml_str("name = 3"), &["name = 3", "integer"]);
    refused(
        Config::from_toml_str("listen = \"localhost\""),
        &["listen", "\"localhost\""],
    );
    refused(
        Config::from_toml_str("transports = [\"rmda\"]"),
        &["rmda", "did you mean \"rdma\"?"],
    );
    refused(Config::from_toml_str("name = "), &["not TOML"]);
    let mut config = Config::from_toml_str("[limits]\nslots_max = 7").unwrap();
    config.limits.slots_max = 0;
    refused(config.validate().map(|()| config), &["limits.slots_max = 0", "(code)"]);
}

#[test]
fn numbers_may_be_left_to_the_transport() {
    let config = Config::from_toml_str("[rdma]\ngid_index = 3\nmtu = \"auto\"\npartition_key = 0x8001").unwrap();
    assert_eq!(
        (config.rdma.gid_index, config.rdma.mtu, config.rdma.partition_key),
        (Some(3), None, Some(0x8001))
    );
    let variables = [
        ("KVXFER_RDMA_GID_INDEX", "auto"),
        ("KVXFER_RDMA_MTU", "1024"),
        ("KVXFER_RDMA_PARTITION_KEY", "0x8002"),
    ];
    let config = Config::from_layers("[rdma]\ngid_index = 3", variables).unwrap();
    assert_eq!(
        (config.rdma.gid_index, config.rdma.mtu, config.rdma.partition_key),
        (None, Some(1024), Some(0x8002))
    );
    refused(
        Config::from_toml_str("[rdma]\nmtu = 1500"),
        &["rdma.mtu = 1500", "no power of two", "`auto`, or 256 to 4096"],
    );
    refused(Config::from_toml_str("[rdma]\nmtu = 8192"), &["out of range"]);
    refused(
        Config::from_layers("", [("KVXFER_RDMA_GID_INDEX", "first")]),
        &["KVXFER_RDMA_GID_INDEX", "neither a number nor the word auto"],
    );
    let mut config = Config::default();
    config.rdma.mtu = Some(1000);
    refused(config.validate().map(|()| config), &["rdma.mtu = 1000", "(code)"]);
}

#[test]
fn settings_that_would_hang_or_overflow_are_refused() {
    refused(
        Config::from_toml_str("[rdma]\nrnr_retry = 7"),
        &["rdma.rnr_retry = 7", "0 to 6"],
    );
    refused(Config::from_toml_str("[rdma]\nreceive_depth = 128"), &["2 to 127"]);
    refused(Config::from_toml_str("[rdma]\ntimeout = 0"), &["1 to 31"]);
}

#[test]
fn rail_pairs_are_words_or_pairs() {
    for good in [
        "auto",
        "index",
        "subnet",
        "rxe0=rxe1",
        "mlx5_0:1=mlx5_2:1, mlx5_1=mlx5_3",
    ] {
        Config::from_layers("", [("KVXFER_RDMA_RAIL_PAIRS", good)]).unwrap();
    }
    for bad in [
        "index,subnet",
        "rxe0",
        "rxe0=",
        "a=b=c",
        "auto,rxe0=rxe1",
        "rxe0:rxe1",
        ",",
    ] {
        refused(
            Config::from_layers("", [("KVXFER_RDMA_RAIL_PAIRS", bad)]),
            &["rdma.rail_pairs", "rxe0=rxe1"],
        );
    }
}

#[test]
fn contradictions_are_refused() {
    refused(
        Config::from_toml_str("[rdma]\nwindow_bytes_min = 8388608\nwindow_bytes_max = 4194304"),
        &["rdma.window_bytes_min = 8388608", "rdma.window_bytes_max = 4194304"],
    );
    refused(
        Config::from_toml_str("[rdma]\nrevoke_ms = 3000"),
        &["rdma.revoke_ms = 3000", "liveness_ms = 2500"],
    );
    refused(
        Config::from_toml_str("[deadlines]\nheartbeat_ms = 2000"),
        &["heartbeat_ms = 2000", "liveness_ms = 2500"],
    );
    refused(Config::from_toml_str("transports = \"auto,tcp\""), &["auto", "alone"]);
    refused(
        Config::from_toml_str("[security]\noff_loopback = \"yes\""),
        &["security.off_loopback", "insecure-allowed"],
    );
    refused(Config::from_layers("transports = []", NONE), &["transports"]);
}

#[test]
fn every_key_can_be_set_from_a_variable() {
    let defaults = toml::Table::try_from(Config::default()).unwrap();
    for key in KEYS {
        let value = super::layers::lookup(&defaults, key.path).unwrap();
        let text = match value {
            toml::Value::Array(items) => items
                .iter()
                .map(|item| item.as_str().unwrap())
                .collect::<Vec<_>>()
                .join(","),
            toml::Value::String(text) => text.clone(),
            other => other.to_string(),
        };
        let config = Config::from_layers("", [(variable(key.path), text)]).unwrap();
        assert_eq!(config, Config::default(), "{}", key.path);
    }
}

#[test]
fn the_page_shows_the_reference() {
    let page = include_str!("../../../docs/configuration.md");
    assert!(
        page.contains(&Config::reference()),
        "docs/configuration.md is out of date; its table must be:\n{}",
        Config::reference()
    );
}

#[test]
fn one_key_is_set_from_text() {
    let mut config = Config::from_toml_str("[limits]\nslots_max = 512").unwrap();
    config.set("deadlines.liveness_ms", "600").unwrap();
    config.set("transports", "rdma, tcp").unwrap();
    config.set("name", "decode-0").unwrap();
    assert_eq!(config.deadlines.liveness_ms, 600);
    assert_eq!(config.transports, ["rdma", "tcp"]);
    assert_eq!((config.name.as_str(), config.limits.slots_max), ("decode-0", 512));
    // The heartbeat is too long for it, which is for `validate` to say: the next call may change that.
    assert!(config.validate().is_err());
    config.set("deadlines.heartbeat_ms", "200").unwrap();
    config.validate().unwrap();
    for (key, value, said) in [
        ("limits.slot_max", "1", "limits.slots_max"),
        ("limits.slots_max", "many", "not a whole number"),
        ("limits.slots_max", "0", "limits.slots_max"),
        ("security.mode", "maybe", "security.mode"),
        ("limits", "1", "limits"),
    ] {
        let error = config.set(key, value).unwrap_err().to_string();
        assert!(error.contains(said), "{error}");
    }
    assert_eq!(config.limits.slots_max, 512);
}

#[test]
fn a_file_without_an_end_is_refused() {
    let error = Config::from_toml_file("/dev/zero").unwrap_err();
    assert_eq!(error.kind(), ErrorKind::InvalidArgument);
    assert!(error.to_string().contains("longer than 1 MiB"), "{error}");
}
