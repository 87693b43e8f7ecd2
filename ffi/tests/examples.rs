//! The C examples compile without a warning, as C and as C++, and both processes do what they say.

#![allow(clippy::print_stdout)] // what is skipped

#[path = "support/c.rs"]
mod c;

use std::path::Path;

fn runs(name: &str, compiler: &str, flags: &[&str]) {
    if !c::has_compiler(compiler) {
        println!("skipped: there is no {compiler} here");
        return;
    }
    let directory = Path::new(env!("CARGO_TARGET_TMPDIR")).join(name);
    let (prefill, decode) = c::build(&directory, compiler, flags).run();
    assert!(prefill.ends_with("prefill: done\n"), "{prefill}");
    assert!(decode.ends_with("decode: done\n"), "{decode}");
    assert_eq!(decode.matches("every byte is right").count(), 2);
    assert!(decode.contains("request 2: Cancelled"), "{decode}");
    assert!(prefill.contains("request 4: its end is Declined"), "{prefill}");
}

#[test]
fn as_c11() {
    runs("c11", "cc", &["-std=c11"]);
}

#[test]
fn as_cpp17() {
    runs("cpp17", "c++", &["-x", "c++", "-std=c++17"]);
}
