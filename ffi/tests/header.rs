//! The committed header is what the sources say. `KVXFER_BLESS=1` writes it.

use std::path::Path;

/// In the order in which a reader wants them.
const SOURCES: [&str; 11] = [
    "status",
    "address",
    "config",
    "endpoint",
    "layout",
    "pool",
    "selection",
    "handle",
    "handoff",
    "grant",
    "events",
];

#[test]
fn the_header_is_what_the_sources_say() {
    let here = Path::new(env!("CARGO_MANIFEST_DIR"));
    let config = cbindgen::Config::from_file(here.join("cbindgen.toml")).unwrap();
    let mut builder = cbindgen::Builder::new().with_config(config);
    for name in SOURCES {
        builder = builder.with_src(here.join(format!("src/{name}.rs")));
    }
    let mut made = Vec::new();
    builder.generate().unwrap().write(&mut made);
    let made = String::from_utf8(made).unwrap();
    let path = here.join("include/kvxfer.h");
    if std::env::var_os("KVXFER_BLESS").is_some() {
        std::fs::write(&path, &made).unwrap();
    }
    let committed = std::fs::read_to_string(&path).unwrap_or_default();
    let differs = made.lines().zip(committed.lines()).find(|(new, old)| new != old);
    assert!(
        made == committed,
        "include/kvxfer.h is not what the sources say; first difference: {differs:?}; KVXFER_BLESS=1 writes it"
    );
}

/// Every function is exported by every source file, and none by accident: the header and the list of symbols agree.
#[test]
fn the_header_declares_exactly_the_exported_functions() {
    let here = Path::new(env!("CARGO_MANIFEST_DIR"));
    let header = std::fs::read_to_string(here.join("include/kvxfer.h")).unwrap();
    let symbols = std::fs::read_to_string(here.join("symbols.txt")).unwrap();
    let mut declared: Vec<&str> = Vec::new();
    for (start, _) in header.match_indices(" kvx_").chain(header.match_indices("*kvx_")) {
        let rest = &header[start + 1..];
        let name = rest
            .split(|c: char| !c.is_ascii_alphanumeric() && c != '_')
            .next()
            .unwrap();
        let line_start = header[..start].rfind('\n').map_or(0, |at| at + 1);
        let in_comment = header[line_start..start].trim_start().starts_with('*');
        if rest[name.len()..].starts_with('(') && !in_comment {
            declared.push(name);
        }
    }
    declared.sort_unstable();
    declared.dedup();
    let listed: Vec<&str> = symbols.lines().collect();
    assert_eq!(declared, listed);
}
