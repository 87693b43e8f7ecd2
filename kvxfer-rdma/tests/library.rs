//! The system's libibverbs, with or without devices, where it is installed.
#![allow(clippy::print_stdout)]

use kvxfer_rdma::probe::{Availability, Level, ProbeOptions, fork_safety, probe};
use kvxfer_rdma::verbs::{Context, Library, VerbsError};

/// The system's library, or `None` (and a line that says so) if there is none.
fn system_library() -> Option<Library> {
    match Library::load(None) {
        Ok(library) => Some(library),
        Err(error @ VerbsError::Load { .. }) => {
            println!("skipped: {error}");
            None
        }
        Err(error) => panic!("the system's library is not usable: {error}"),
    }
}

#[test]
fn the_systems_library_loads_and_lists() {
    let Some(library) = system_library() else {
        return;
    };
    match library.device_names() {
        Ok(names) => println!("{} devices", names.len()),
        // A kernel without RDMA.
        Err(error) => assert_eq!(error.errno(), Some(libc::ENOSYS), "{error}"),
    }
    let line = fork_safety(&library);
    assert!(line.text.starts_with("fork: "));
    assert_eq!(line.level != Level::Good, !line.remedy.is_empty(), "{line}");
}

#[test]
fn a_device_that_is_not_there_is_a_typed_answer() {
    let Some(library) = system_library() else {
        return;
    };
    let error = Context::open(&library, "no such device").unwrap_err();
    match error {
        VerbsError::NoSuchDevice { device, .. } => assert_eq!(device, "no such device"),
        VerbsError::Refused { errno, .. } => assert_eq!(errno, libc::ENOSYS),
        other => panic!("{other}"),
    }
}

#[test]
fn the_probe_says_which_it_is() {
    let found = probe(&ProbeOptions::default());
    let lines = found.lines();
    assert!(!lines.is_empty());
    println!("{found}");
    match &found {
        Availability::NoLibrary { .. } => assert_eq!(lines[0].level, Level::Refused),
        Availability::NoDevices { .. } => assert!(found.refusal().is_some()),
        Availability::Devices { devices, .. } => assert!(!devices.is_empty()),
        other => panic!("{other:?}"),
    }
    assert_eq!(found.refusal().is_none(), found.usable().next().is_some());
    let named = ProbeOptions {
        devices: vec!["no such device".to_owned()],
        ..ProbeOptions::default()
    };
    assert!(
        probe(&named).refusal().is_some(),
        "a device that is named must be there"
    );
}
