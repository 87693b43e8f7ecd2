//! Keeps the library in the process once it is loaded, as its device threads and leaked handles need.

fn main() {
    println!("cargo:rerun-if-changed=build.rs");
    println!("cargo:rustc-cdylib-link-arg=-Wl,-z,nodelete");
}
