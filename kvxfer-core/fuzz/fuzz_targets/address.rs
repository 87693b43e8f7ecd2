//! An endpoint address, as text and as bytes.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| {
    kvxfer_core::wire::fuzzing::address(bytes);
});
