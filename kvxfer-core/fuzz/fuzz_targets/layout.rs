//! A pool layout's wire form.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| {
    kvxfer_core::wire::fuzzing::layout(bytes);
});
