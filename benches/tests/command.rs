//! The command as a user meets it: exit codes and words.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::process::{Command, Output};

fn bench(arguments: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_kvxfer-bench"))
        .args(arguments)
        .output()
        .unwrap()
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

/// Fails with `code`, and says all of these words on standard error.
fn refused(arguments: &[&str], code: i32, words: &[&str]) {
    let output = bench(arguments);
    let said = text(&output.stderr);
    assert_eq!(output.status.code(), Some(code), "{arguments:?}: {said}");
    for word in words {
        assert!(said.contains(word), "{arguments:?} should say {word:?}, says: {said}");
    }
}

/// Succeeds; gives what it printed.
fn done(arguments: &[&str]) -> String {
    let output = bench(arguments);
    let (said, complained) = (text(&output.stdout), text(&output.stderr));
    assert!(output.status.success(), "{arguments:?}:\n{said}\n{complained}");
    said
}

fn data(name: &str) -> String {
    format!("{}/tests/data/{name}", env!("CARGO_MANIFEST_DIR"))
}

fn field<'a>(value: &'a serde_json::Value, name: &str) -> &'a serde_json::Value {
    value.get(name).unwrap_or_else(|| panic!("{name} in {value}"))
}

#[test]
fn wrong_flags_are_refused_with_what_to_do() {
    refused(&["run", "--workload", "w9"], 2, &["w9", "w1", "w5"]);
    refused(
        &["run", "--block-bytes", "64X", "--blocks", "4"],
        2,
        &["64X", "expected"],
    );
    refused(&["run", "--block-bytes", "64K"], 2, &["--blocks"]);
    refused(&["run", "--blocks", "4"], 2, &["--block-bytes"]);
    refused(
        &["run", "--workload", "w2", "--model", "llama-3.1-8b", "--tokens", "5"],
        2,
        &["cannot be used"],
    );
    refused(&["run", "--model", "llama-3.1-8b"], 2, &["--tokens"]);
    refused(&["run", "--reps", "0"], 2, &["--reps"]);
    refused(&["replay", "t.csv", "--speed=-3"], 2, &["--speed", "positive"]);
    refused(&["replay", "t.csv", "--speed", "0"], 2, &["positive"]);
    refused(&["nonsense"], 2, &["nonsense"]);
    refused(&["serve", "localhost"], 2, &["localhost"]);
}

#[test]
fn impossible_work_is_refused_with_what_where_why_and_what_to_do() {
    refused(
        &["run", "--model", "gpt-9", "--tokens", "5"],
        1,
        &["InvalidArgument", "gpt-9", "llama-3.1-70b"],
    );
    refused(
        &["run", "--model", "llama-3.1-8b", "--tp", "3", "--tokens", "5"],
        1,
        &["InvalidArgument", "3"],
    );
    refused(
        &["run", "--block-bytes", "1M", "--blocks", "100", "--pool-bytes", "8M"],
        1,
        &["8388608", "--pool-bytes"],
    );
    refused(&["run", "--block-bytes", "12", "--blocks", "1"], 1, &["multiple of 8"]);
    refused(
        &["run", "--workload", "w4", "--direction", "pull"],
        1,
        &["w4", "--direction"],
    );
    refused(
        &["run", "--transport", "pigeon", "--pool-bytes", "16M"],
        1,
        &["pigeon", "tcp"],
    );
    refused(
        &["run", "--against", "ib", "--pool-bytes", "16M"],
        1,
        &["--against ib", "--device rxe0=rxe1"],
    );
    refused(
        &["run", "--against", "ib", "--workload", "w4", "--device", "rxe0"],
        1,
        &["--against ib", "w4"],
    );
    refused(
        &["run", "--device", "a=b=c", "--pool-bytes", "16M"],
        1,
        &["--device a=b=c", "rxe0=rxe1"],
    );
    refused(&["serve", "192.0.2.1:1"], 1, &["192.0.2.1:1", "--insecure-network"]);
    refused(&["connect", "192.0.2.1:1"], 1, &["--insecure-network"]);
    // A port that was free a moment ago, and on which nobody listens.
    let free = std::net::TcpListener::bind("127.0.0.1:0")
        .unwrap()
        .local_addr()
        .unwrap();
    refused(
        &["connect", &free.to_string(), "--pool-bytes", "16M"],
        1,
        &["Unreachable", "kvxfer-bench serve"],
    );
}

#[test]
fn bad_traces_are_refused_with_file_and_line() {
    refused(
        &["replay", "/nonexistent.jsonl"],
        1,
        &["/nonexistent.jsonl", "No such file"],
    );
    let bad = std::env::temp_dir().join(format!("kvxfer-bench-bad-{}.jsonl", std::process::id()));
    std::fs::write(&bad, "{\"timestamp\": 1, \"input_length\": 5}\n{\"timestamp\": 2}\n").unwrap();
    let path = bad.to_str().unwrap();
    refused(&["replay", path], 1, &[path, "line 2", "input_length", "expected"]);
    std::fs::remove_file(&bad).unwrap();
    refused(
        &["replay", &data("sample.jsonl"), "--pool-bytes", "64K"],
        1,
        &["sample.jsonl, line", "--pool-bytes"],
    );
    refused(
        &["replay", &data("sample.jsonl"), "--kv-bytes-per-token", "100"],
        1,
        &["multiple of 512"],
    );
}

#[test]
fn run_moves_verifies_and_compares() {
    let said = done(&[
        "run",
        "--workload",
        "w1,w2,w3,w5",
        "--pool-bytes",
        "32M",
        "--reps",
        "2",
        "--warm",
        "1",
        "--verify",
        "--against",
        "raw",
        "--patience",
        "0",
        "--json",
    ]);
    let rows: Vec<serde_json::Value> = said.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    assert_eq!(rows.len(), 8, "{said}");
    for row in &rows {
        assert_eq!(field(row, "verified"), true, "{row}");
        for name in [
            "gbps",
            "descs_per_s",
            "p50_us",
            "p99_us",
            "cpu_s_per_gb_initiator",
            "cpu_s_per_gb_target",
        ] {
            assert!(field(row, name).as_f64().unwrap() > 0.0, "{name} in {row}");
        }
        assert_eq!(field(row, "direction"), "write");
        assert_eq!(field(row, "late_reps"), 0);
    }
    assert_eq!(field(&rows[0], "peer"), "kvxfer");
    assert!(field(&rows[0], "ratio_to_raw").as_f64().unwrap() > 0.0);
    assert_eq!(field(&rows[1], "peer"), "raw");
}

#[test]
fn run_pulls() {
    let said = done(&[
        "run",
        "--model",
        "llama-3.1-8b",
        "--tp",
        "8",
        "--tokens",
        "100",
        "--direction",
        "pull",
        "--pool-bytes",
        "16M",
        "--reps",
        "2",
        "--warm",
        "0",
        "--verify",
        "--against",
        "raw",
        "--patience",
        "0",
    ]);
    assert!(
        said.contains("llama-3.1-8b_tp8_100") && said.contains("yes") && !said.contains(" NO "),
        "{said}"
    );
    assert!(said.contains("tcp"), "the path is named: {said}");
}

#[test]
fn run_plays_ping_pong() {
    let said = done(&[
        "run",
        "--workload",
        "w4",
        "--pool-bytes",
        "8M",
        "--reps",
        "2",
        "--against",
        "raw",
        "--patience",
        "0",
        "--json",
    ]);
    let row: serde_json::Value = serde_json::from_str(said.lines().next().unwrap()).unwrap();
    assert_eq!(field(&row, "verified"), true);
    assert_eq!(field(&row, "reps"), 2048);
    assert!(field(&row, "p50_us").as_f64().unwrap() > 1.0);
}

#[test]
fn serve_and_connect_measure_between_two_commands() {
    let free = std::net::TcpListener::bind("127.0.0.1:0")
        .unwrap()
        .local_addr()
        .unwrap();
    let mut serve = Command::new(env!("CARGO_BIN_EXE_kvxfer-bench"))
        .args(["serve", &free.to_string()])
        .stdout(std::process::Stdio::piped())
        .spawn()
        .unwrap();
    // It says when it listens.
    let mut said = String::new();
    let mut reader = std::io::BufReader::new(serve.stdout.take().unwrap());
    std::io::BufRead::read_line(&mut reader, &mut said).unwrap();
    assert!(said.contains("connect"), "{said}");
    let said = done(&[
        "connect",
        &free.to_string(),
        "--block-bytes",
        "8K",
        "--blocks",
        "50",
        "--pool-bytes",
        "4M",
        "--reps",
        "1",
        "--warm",
        "0",
        "--verify",
        "--patience",
        "0",
    ]);
    assert!(said.contains("yes"), "{said}");
    assert!(serve.wait().unwrap().success());
}

#[test]
fn the_demonstration_succeeds_and_catches_what_it_plants() {
    let said = done(&["demo", "--small"]);
    for words in [
        "everything was as promised",
        "was cancelled with",
        "caught: Corrupt",
        "StalePeer",
        "Two prefill ranks",
        "bytes are right",
    ] {
        assert!(said.contains(words), "{words:?} in:\n{said}");
    }
    assert!(
        !said.contains("FAILED") && !said.contains('\u{1b}'),
        "plain and fine: {said}"
    );
}

#[test]
fn replays_verify_every_arrival() {
    for (trace, more) in [
        ("sample.jsonl", ["--held-prefixes", "8"]),
        ("sample.csv", ["--speed", "4"]),
    ] {
        let mut arguments = vec!["replay".to_owned(), data(trace)];
        arguments.extend(more.map(str::to_owned));
        let always = ["--pool-bytes", "6M", "--kv-bytes-per-token", "1024", "--json"];
        arguments.extend(always.map(str::to_owned));
        let said = done(&arguments.iter().map(String::as_str).collect::<Vec<_>>());
        let row: serde_json::Value = serde_json::from_str(said.trim()).unwrap();
        assert_eq!(field(&row, "failures"), 0, "{row}");
        assert_eq!(field(&row, "verified_bytes"), field(&row, "bytes"), "{row}");
        assert!(
            field(&row, "times_through_the_pool").as_f64().unwrap() > 1.0,
            "blocks are reused: {row}"
        );
        assert!(field(&row, "open_grants_peak").as_u64().unwrap() >= 1);
        if trace == "sample.jsonl" {
            assert!(field(&row, "tokens_held").as_u64().unwrap() > 0, "{row}");
        }
    }
}

#[test]
fn doctor_names_checks_and_remedies() {
    let said = done(&["doctor"]);
    for check in [
        "kernel",
        "cores",
        "tcp over ipv4",
        "tcp over ipv6",
        "socket buffers",
        "locked memory",
        "open files",
        "huge pages",
        "transparent huge pages",
        "rdma",
        "gpu",
        "process namespace",
        "listening",
    ] {
        assert!(said.contains(check), "{check} in {said}");
    }
    for line in done(&["doctor", "--json"]).lines() {
        let row: serde_json::Value = serde_json::from_str(line).unwrap();
        let status = field(&row, "status").as_str().unwrap();
        assert!(["ok", "warn", "info"].contains(&status), "{row}");
        assert!(
            status == "ok" || row.get("remedy").is_some() || row.get("found").is_some(),
            "{row}"
        );
    }
}

#[test]
fn a_child_that_dies_is_reported() {
    // The hidden child role ends at once on a closed line, without an error.
    let output = Command::new(env!("CARGO_BIN_EXE_kvxfer-bench"))
        .args(["peer", "target"])
        .stdin(std::process::Stdio::null())
        .output()
        .unwrap();
    assert!(output.status.success());
    // And says what it does not understand.
    let mut child = Command::new(env!("CARGO_BIN_EXE_kvxfer-bench"))
        .args(["peer", "node"])
        .stdin(std::process::Stdio::piped())
        .stderr(std::process::Stdio::piped())
        .spawn()
        .unwrap();
    std::io::Write::write_all(&mut child.stdin.take().unwrap(), b"rubbish\n").unwrap();
    let output = child.wait_with_output().unwrap();
    assert_eq!(output.status.code(), Some(1));
    assert!(text(&output.stderr).contains("rubbish"), "{}", text(&output.stderr));
}

/// What doctor says with this CUDA driver.
fn doctor_with(library: &std::path::Path) -> String {
    let output = Command::new(env!("CARGO_BIN_EXE_kvxfer-bench"))
        .arg("doctor")
        .env("KVXFER_CUDA_LIBRARY", library)
        .output()
        .unwrap();
    assert!(output.status.success());
    text(&output.stdout)
}

#[test]
fn doctor_says_what_gpus_can_and_why_there_are_none() {
    let said = doctor_with("/nonexistent/libcuda.so.1".as_ref());
    for words in [
        "/nonexistent/libcuda.so.1",
        "-> install",
        "not usable: pools are in host memory",
    ] {
        assert!(said.contains(words), "{words:?} in {said}");
    }
    let fake = kvxfer_fake_cuda::FakeCuda::with(&[("gpu1", "dmabuf", "off")]).unwrap();
    let said = doctor_with(&fake.library_path());
    for words in [
        "for CUDA 12.8",
        "device 0: Fake GPU 0, PCI 0000:17:00.0",
        "device 1: Fake GPU 1",
        "no dmabufs",
        "over rdma its blocks are copied through host memory",
    ] {
        assert!(said.contains(words), "{words:?} in {said}");
    }
    assert_eq!(fake.count("contexts_created"), 0);
    fake.set("*", "driver_version", "9000").unwrap();
    let said = doctor_with(&fake.library_path());
    assert!(said.contains("9.0") && said.contains("not usable"), "{said}");
    fake.set("*", "driver_version", "12080").unwrap();
    fake.set("*", "devices", "0").unwrap();
    assert!(doctor_with(&fake.library_path()).contains("no device"));
}
