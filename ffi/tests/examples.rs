//! The C examples compile without a warning, as C and as C++, and both processes do what they say.

#![allow(clippy::print_stdout, clippy::unwrap_used)] // what is skipped

#[path = "support/c.rs"]
mod c;

use std::fmt::Write as _;
use std::path::Path;
use std::process::Command;

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

/// What a C compiler makes of the header's structs is what Rust has.
#[test]
fn structs_have_the_same_sizes_in_c() {
    if !c::has_compiler("cc") {
        println!("skipped: there is no cc here");
        return;
    }
    let mut source = String::from("#include <assert.h>\n#include <kvxfer.h>\n");
    macro_rules! sizes {
        ($($name:ident)*) => {
            $(writeln!(
                source,
                "static_assert(sizeof({0}) == {1}, \"{0}\");",
                stringify!($name),
                size_of::<kvxfer_ffi::$name>()
            )
            .unwrap();)*
        };
    }
    sizes!(kvx_error kvx_id128 kvx_address_info kvx_peer kvx_group_spec kvx_plane_spec kvx_layout_spec kvx_preset_spec
        kvx_layout_info kvx_plane_info kvx_region_spec kvx_region_info kvx_group_selection kvx_descriptor kvx_head_range
        kvx_target kvx_result kvx_member kvx_offer_options kvx_claim_options kvx_part kvx_grant_options
        kvx_transfer_options kvx_grant_info kvx_path_info kvx_event);
    let header = std::fs::read_to_string(Path::new(env!("CARGO_MANIFEST_DIR")).join("include/kvxfer.h")).unwrap();
    assert_eq!(
        source.matches("static_assert").count(),
        header.matches("typedef struct {").count()
    );
    let path = Path::new(env!("CARGO_TARGET_TMPDIR")).join("sizes.c");
    std::fs::write(&path, source).unwrap();
    let include = concat!("-I", env!("CARGO_MANIFEST_DIR"), "/include");
    let compiled = Command::new("cc")
        .args(["-std=c11", "-fsyntax-only", include])
        .arg(&path)
        .output()
        .unwrap();
    assert!(
        compiled.status.success(),
        "{}",
        String::from_utf8_lossy(&compiled.stderr)
    );
}
