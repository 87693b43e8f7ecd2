//! A lane's hello, header and trailer.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| {
    kvxfer_core::wire::fuzzing::lane_bytes(bytes);
});
