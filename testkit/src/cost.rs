//! What code costs in instructions, which a loaded machine does not change: a test of the running program, run by itself under
//! valgrind.

use std::collections::HashMap;
use std::path::Path;
use std::process::Command;

/// Why instructions cannot be counted here; `None` if they can.
pub fn cannot_count() -> Option<&'static str> {
    match Command::new("valgrind").arg("--version").output() {
        Ok(_) => None,
        Err(_) => Some("valgrind, which counts instructions, is not installed"),
    }
}

/// Instructions that the ignored test `test` of this program executes with a variable set, outside the libraries that `left_out`
/// names, at least one of which must have run.
///
/// # Panics
/// The test fails, or nothing ran in those libraries: it was not what it should measure.
pub fn instructions(test: &str, (name, value): (&str, &str), left_out: impl Fn(&str) -> bool) -> u64 {
    let out = std::env::temp_dir().join(format!("kvxfer-cost-{}-{value}", std::process::id()));
    let program = std::env::current_exe().expect("a program knows where it is");
    let run = Command::new("valgrind")
        .args(["--tool=callgrind", "--quiet"])
        .arg(format!("--callgrind-out-file={}", out.display()))
        .arg(program)
        .args([test, "--exact", "--include-ignored", "--test-threads=1"])
        .env(name, value)
        .output()
        .expect("valgrind starts");
    let said = String::from_utf8_lossy(&run.stderr);
    assert!(run.status.success(), "{said}");
    let costs = costs_by_object(&out);
    // It is looked at once.
    let _ = std::fs::remove_file(&out);
    assert!(costs.keys().any(|object| left_out(object)), "{:?}", costs.keys());
    costs
        .into_iter()
        .filter(|(object, _)| !left_out(object))
        .map(|(_, cost)| cost)
        .sum()
}

/// Instructions executed in each program or library, from callgrind's file.
fn costs_by_object(file: &Path) -> HashMap<String, u64> {
    let text = std::fs::read_to_string(file).expect("valgrind has written its file");
    let mut names: HashMap<&str, &str> = HashMap::new();
    let mut costs: HashMap<String, u64> = HashMap::new();
    let mut object = "";
    let mut of_a_call = false;
    for line in text.lines() {
        if let Some(named) = line.strip_prefix("ob=") {
            // `(number) name` where it is first named, `(number)` after that.
            let (number, name) = named.split_once(' ').unwrap_or((named, ""));
            if !name.is_empty() {
                names.insert(number, name);
            }
            object = names.get(number).copied().unwrap_or("");
        } else if let Some(named) = line.strip_prefix("cob=") {
            if let Some((number, name)) = named.split_once(' ') {
                names.insert(number, name);
            }
        } else if line.starts_with("calls=") {
            // The next line has what the call cost inside.
            of_a_call = true;
        } else if line.starts_with(|first: char| first.is_ascii_digit() || "+-*".contains(first))
            && !std::mem::take(&mut of_a_call)
            && let Some(cost) = line.split(' ').nth(1).and_then(|cost| cost.parse::<u64>().ok())
        {
            *costs.entry(object.to_owned()).or_default() += cost;
        }
    }
    costs
}
