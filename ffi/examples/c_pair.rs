//! Compiles the examples in `examples/c` and runs them: a prefill and a decode worker, two processes.
#![allow(clippy::print_stdout)]

#[path = "../tests/support/c.rs"]
mod c;

fn main() {
    if !c::has_compiler("cc") {
        println!("skipped: there is no C compiler here");
        return;
    }
    let directory = std::env::temp_dir().join(format!("kvxfer-pair-{}", std::process::id()));
    let (prefill, decode) = c::build(&directory, "cc", &["-std=c11"]).run();
    print!("--- prefill\n{prefill}--- decode\n{decode}");
    // What is left in the temporary directory of the system does no harm.
    let _ = std::fs::remove_dir_all(&directory);
}
