//! `kvxfer-bench gpu-check` as far as it can be had without a GPU: with no driver, and with a fake one. What it says of a
//! real device only that can show.
#![allow(clippy::unwrap_used, clippy::print_stdout, reason = "a test fails by panicking")]

use std::process::{Command, Output};

use kvxfer_fake_cuda::FakeCuda;

fn gpu_check(arguments: &[&str]) -> (Output, String) {
    let output = Command::new(env!("CARGO_BIN_EXE_kvxfer-bench"))
        .arg("gpu-check")
        .args(arguments)
        .output()
        .unwrap();
    let said = format!(
        "{}\n{}",
        String::from_utf8_lossy(&output.stdout),
        String::from_utf8_lossy(&output.stderr)
    );
    (output, said)
}

#[test]
fn without_a_driver_nothing_is_checked_and_it_says_so() {
    let (output, said) = gpu_check(&["--library", "/nonexistent/libcuda.so.1"]);
    assert!(output.status.success(), "{said}");
    assert!(
        said.contains("nothing could be checked") && said.contains("/nonexistent/libcuda.so.1"),
        "{said}"
    );
}

#[test]
fn the_whole_check_runs_on_a_fake_device() {
    let fake = FakeCuda::new().unwrap();
    let library = fake.library_path().display().to_string();
    let (output, said) = gpu_check(&["--library", &library, "--quick"]);
    assert!(output.status.success(), "{said}");
    for words in [
        "memory that was freed is noticed",
        "a held stream goes on when it is released",
        "kernel: 320 pieces of 8 KiB gathered and scattered 3 times, 0 wrong words",
        "each gated on an event: 0 torn",
        "without the events the check finds early data",
        "w5 staged",
        "w5 mapped",
        "0 calls that wait for the device",
    ] {
        assert!(said.contains(words), "{words:?} in {said}");
    }
    assert!(!said.contains("FAILED"), "{said}");
    // What a person sees: with --nocapture.
    println!("{said}");
}
