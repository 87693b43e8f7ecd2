//! Prints what this machine has for RDMA: `cargo run -p kvxfer-rdma --example devices [library]`.
#![allow(clippy::print_stdout)]

use kvxfer_rdma::probe::{Availability, Level, ProbeOptions, probe};

fn main() {
    let options = ProbeOptions {
        library: std::env::args_os().nth(1).map(Into::into),
        ..ProbeOptions::default()
    };
    let found = probe(&options);
    for line in found.lines() {
        let mark = match line.level {
            Level::Good => "ok  ",
            Level::Note => "    ",
            Level::Warning => "warn",
            Level::Refused => "no  ",
        };
        println!("{mark} {line}");
    }
    match &found {
        Availability::Devices { devices, .. } => {
            println!("{} usable ports on {} devices", found.usable().count(), devices.len());
        }
        _ => println!("the rdma transport cannot be used here"),
    }
}
