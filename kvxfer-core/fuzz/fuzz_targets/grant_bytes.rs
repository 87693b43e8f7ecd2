//! A grant's bytes.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| {
    kvxfer_core::wire::fuzzing::grant_bytes(bytes);
});
