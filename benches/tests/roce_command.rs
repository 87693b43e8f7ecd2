//! The command on the kernel's own soft-RoCE devices. Ignored elsewhere: `testkit/soft-roce/run` has the devices.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::process::Command;

/// Succeeds; gives what it printed.
fn done(arguments: &[&str]) -> String {
    let output = Command::new(env!("CARGO_BIN_EXE_kvxfer-bench"))
        .args(arguments)
        .output()
        .unwrap();
    let (said, complained) = (
        String::from_utf8_lossy(&output.stdout).into_owned(),
        String::from_utf8_lossy(&output.stderr).into_owned(),
    );
    assert!(output.status.success(), "{arguments:?}:\n{said}\n{complained}");
    said
}

fn rows(said: &str) -> Vec<serde_json::Value> {
    said.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
}

#[test]
#[ignore = "needs soft-RoCE devices: testkit/soft-roce/run"]
fn doctor_lists_the_devices_and_what_is_wrong_with_them() {
    let said = done(&["doctor"]);
    for words in ["rxe0:1: usable", "rxe1:1: usable", "10.77.0.1", "fork: safe"] {
        assert!(said.contains(words), "{words:?} in:\n{said}");
    }
    let soft_roce = |arguments: &[&str]| {
        assert!(Command::new("soft-roce").args(arguments).status().unwrap().success());
    };
    soft_roce(&["down", "veth0"]);
    let said = done(&["doctor"]);
    soft_roce(&["up", "veth0", "veth1"]);
    assert!(said.contains("rxe0:1: the port is down"), "{said}");
    assert!(done(&["doctor"]).contains("rxe0:1: usable"));
}

/// Both ways, every byte checked, interleaved with perftest in the same place.
#[test]
#[ignore = "needs soft-RoCE devices: testkit/soft-roce/run"]
fn run_takes_rdma_and_compares_with_perftest() {
    for (direction, way, program) in [("push", "write", "ib_write_bw"), ("pull", "read", "ib_read_bw")] {
        let said = done(&[
            "run",
            "--transport",
            "rdma",
            "--device",
            "rxe0=rxe1",
            "--rails",
            "1",
            "--against",
            "ib",
            "--workload",
            "w2,w5",
            "--direction",
            direction,
            "--pool-bytes",
            "32M",
            "--reps",
            "2",
            "--verify",
            "--json",
        ]);
        let rows = rows(&said);
        assert_eq!(rows.len(), 4, "{said}");
        for pair in rows.chunks(2) {
            let (own, baseline) = (&pair[0], &pair[1]);
            assert_eq!(
                (&own["peer"], &own["transport"]),
                (&"kvxfer".into(), &"rdma".into()),
                "{own}"
            );
            assert_eq!(
                (&own["direction"], &own["verified"]),
                (&way.into(), &true.into()),
                "{own}"
            );
            assert!(own["ratio_to_ib"].as_f64().unwrap() > 0.0, "{own}");
            assert_eq!(baseline["transport"], program, "{baseline}");
            assert_eq!(baseline["bytes"], own["bytes"], "{baseline}");
            assert!(baseline["gbps"].as_f64().unwrap() > 0.0, "{baseline}");
            assert!(own.get("ratio_to_raw").is_none() && baseline.get("ratio_to_ib").is_none());
        }
    }
}

#[test]
#[ignore = "needs soft-RoCE devices: testkit/soft-roce/run"]
fn auto_takes_rdma_where_there_is_a_device() {
    let said = done(&[
        "run",
        "--block-bytes",
        "64K",
        "--blocks",
        "50",
        "--pool-bytes",
        "8M",
        "--reps",
        "1",
        "--warm",
        "0",
        "--patience",
        "0",
        "--verify",
        "--json",
    ]);
    assert_eq!(rows(&said)[0]["transport"], "rdma", "{said}");
}
