//! The library's soname: programs that link libkvxfer.so ask for this name at run time. Its number changes when the C
//! interface breaks.

const SONAME: &str = "libkvxfer.so.0";

fn main() {
    println!("cargo:rerun-if-changed=build.rs");
    if std::env::var("CARGO_CFG_TARGET_OS").as_deref() == Ok("linux") {
        println!("cargo:rustc-cdylib-link-arg=-Wl,-soname,{SONAME}");
        // Dependencies have C functions of their own (crc_fast_*), which rustc would export with ours.
        println!("cargo:rustc-cdylib-link-arg=-Wl,--exclude-libs,ALL");
    }
}
