//! What is asked of the driver and told by it. Defects on purpose: the driver takes calls of this crate as if it had made a
//! mistake, and the tests of what that breaks must fail.
#![allow(clippy::unwrap_used, clippy::print_stdout)]

mod classify;
#[path = "../common/mod.rs"]
mod common;
mod copies;
mod events;
mod network;

use std::process::Command;

/// Which test must fail under which defect.
const CAUGHT: &[(&str, &str)] = &[
    (
        "no_event_wait",
        "events::an_event_that_has_not_happened_is_waited_for_and_one_that_has_is_not",
    ),
    ("no_flush", "network::a_flush_makes_a_network_devices_write_visible"),
    (
        "host_taken_for_device",
        "classify::what_is_not_device_memory_is_refused_with_the_reason",
    ),
    ("wrong_context", "copies::many_threads_copy_at_once"),
    ("no_completion", "copies::a_copy_is_not_done_before_it_is"),
    (
        "no_buffer_id",
        "classify::memory_that_was_freed_and_allocated_anew_is_noticed",
    ),
];

/// Runs one test of this binary in a process of its own. Whether it passes.
fn passes(test: &str, defect: &str) -> bool {
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.args(["--exact", test, "--test-threads=1"]);
    command
        .env("KVXFER_FAKE_CUDA_DEFECT", defect)
        .env("RUST_BACKTRACE", "0");
    let output = command.output().unwrap();
    let said = String::from_utf8_lossy(&output.stdout);
    // A process that died, or ran nothing, has not caught anything.
    assert!(
        said.contains("1 passed") || said.contains("1 failed"),
        "{test} under {defect}: {}\n{said}",
        output.status
    );
    output.status.success()
}

#[test]
fn each_is_caught() {
    let mut wrong = Vec::new();
    for (defect, test) in CAUGHT {
        let caught = !passes(test, defect);
        println!("{defect}: {test}: {}", if caught { "caught" } else { "not caught" });
        if !caught || !passes(test, "off") {
            wrong.push((defect, test));
        }
    }
    assert!(wrong.is_empty(), "{wrong:?}");
}
