//! Keeps the library in the process once it is loaded, as its device threads and leaked handles need.

fn main() {
    println!("cargo:rerun-if-changed=build.rs");
    println!("cargo:rustc-cdylib-link-arg=-Wl,-z,nodelete");
    // Each fabric that a test makes has a copy of the library, which is mostly this.
    println!("cargo:rustc-cdylib-link-arg=-Wl,--strip-debug");
}
