//! A session frame.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| {
    kvxfer_core::wire::fuzzing::session_frame(bytes);
});
