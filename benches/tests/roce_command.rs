//! The command on RDMA devices: on the kernel's own inside `testkit/soft-roce/run`, on fakes elsewhere.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::process::Command;

use kvxfer_fake_verbs::FakeFabric;

/// Devices that the command shall use.
struct Site(Option<FakeFabric>);

impl Site {
    fn open() -> Site {
        let real = std::env::var_os("SOFT_ROCE").is_some();
        Site((!real).then(|| FakeFabric::with(&[("*", "devices", "2")]).unwrap()))
    }

    fn is_real(&self) -> bool {
        self.0.is_none()
    }

    /// A device by its number.
    fn device(&self, number: u32) -> String {
        format!("{}{number}", if self.is_real() { "rxe" } else { "fake" })
    }

    /// Takes a port down, or up again.
    fn port(&self, number: u32, up: bool) {
        match &self.0 {
            Some(fabric) => {
                let state = if up { "active" } else { "down" };
                fabric.set(&self.device(number), "port_state", state).unwrap();
            }
            None => {
                let verb = if up { "up" } else { "down" };
                let arguments = [verb, &self.device(number)];
                assert!(Command::new("soft-roce").args(arguments).status().unwrap().success());
            }
        }
    }

    /// Succeeds; gives what it printed.
    fn done(&self, arguments: &[&str]) -> String {
        let mut command = Command::new(env!("CARGO_BIN_EXE_kvxfer-bench"));
        // Where tests find their devices is no setting of endpoints, which would refuse it.
        command.args(arguments).env_remove("KVXFER_TEST_DEVICES");
        if let Some(fabric) = &self.0 {
            command.env("KVXFER_RDMA_LIBRARY", fabric.library_path());
        }
        done(command)
    }
}

fn done(mut command: Command) -> String {
    let output = command.output().unwrap();
    let (said, complained) = (
        String::from_utf8_lossy(&output.stdout).into_owned(),
        String::from_utf8_lossy(&output.stderr).into_owned(),
    );
    assert!(output.status.success(), "{command:?}:\n{said}\n{complained}");
    said
}

fn rows(said: &str) -> Vec<serde_json::Value> {
    said.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
}

#[test]
fn doctor_lists_the_devices_and_what_is_wrong_with_them() {
    let site = Site::open();
    let usable = format!("{}:1: usable", site.device(0));
    let said = site.done(&["doctor"]);
    assert!(said.contains(&usable) && said.contains("GID 1: "), "{said}");
    site.port(0, false);
    let said = site.done(&["doctor"]);
    site.port(0, true);
    let down = format!("{}:1: the port is down", site.device(0));
    assert!(said.contains(&down), "{said}");
    assert!(site.done(&["doctor"]).contains(&usable));
}

/// Both ways, every byte checked; on real devices interleaved with perftest in the same place.
#[test]
fn run_takes_rdma_and_compares_with_perftest() {
    let site = Site::open();
    let device = format!("{}={}", site.device(0), site.device(1));
    for (direction, way, program) in [("push", "write", "ib_write_bw"), ("pull", "read", "ib_read_bw")] {
        let mut arguments = vec!["run", "--transport", "rdma", "--device", &device, "--rails", "1"];
        arguments.extend(["--workload", "w2,w5", "--direction", direction, "--pool-bytes", "32M"]);
        arguments.extend(["--reps", "2", "--patience", "0", "--verify", "--json"]);
        if site.is_real() {
            arguments.extend(["--against", "ib"]);
        }
        let said = site.done(&arguments);
        let rows = rows(&said);
        let per_workload = if site.is_real() { 2 } else { 1 };
        assert_eq!(rows.len(), 2 * per_workload, "{said}");
        for results in rows.chunks(per_workload) {
            let own = &results[0];
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
            if let Some(baseline) = results.get(1) {
                assert!(own["ratio_to_ib"].as_f64().unwrap() > 0.0, "{own}");
                assert_eq!(baseline["transport"], program, "{baseline}");
                assert_eq!(baseline["bytes"], own["bytes"], "{baseline}");
                assert!(baseline["gbps"].as_f64().unwrap() > 0.0, "{baseline}");
                assert!(own.get("ratio_to_raw").is_none() && baseline.get("ratio_to_ib").is_none());
            }
        }
    }
}

#[test]
fn auto_takes_rdma_where_there_is_a_device() {
    let site = Site::open();
    let mut arguments = vec!["run", "--block-bytes", "64K", "--blocks", "50", "--pool-bytes", "8M"];
    arguments.extend(["--reps", "1", "--warm", "0", "--patience", "0", "--verify", "--json"]);
    let said = site.done(&arguments);
    assert_eq!(rows(&said)[0]["transport"], "rdma", "{said}");
    assert_eq!(rows(&said)[0]["verified"], true, "{said}");
}
