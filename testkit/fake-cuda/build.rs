//! Names the library as the driver's is, and keeps it in the process once it is loaded, as its stream threads need.

fn main() {
    println!("cargo:rerun-if-changed=build.rs");
    println!("cargo:rustc-cdylib-link-arg=-Wl,-soname,libcuda.so.1");
    println!("cargo:rustc-cdylib-link-arg=-Wl,-z,nodelete");
    // Each driver that a test makes is a copy of the library, which is mostly this.
    println!("cargo:rustc-cdylib-link-arg=-Wl,--strip-debug");
}
