//! Compiles the C examples against the library that cargo has just built, and runs the pair.
#![allow(dead_code, unreachable_pub, clippy::unwrap_used)]

use std::io::{BufRead, BufReader, Read};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

const NAMES: [&str; 2] = ["prefill", "decode"];

/// The two executables, and where the library is that they need.
pub struct Examples {
    directory: PathBuf,
}

/// A compiler of this language, if there is one.
pub fn has_compiler(compiler: &str) -> bool {
    let mut asked = Command::new(compiler);
    asked.arg("--version").stdout(Stdio::null()).stderr(Stdio::null());
    asked.status().is_ok_and(|status| status.success())
}

/// The library, beside the executable that is running.
fn library() -> PathBuf {
    let running = std::env::current_exe().unwrap();
    let directories = running.ancestors().skip(1).take(3);
    let found = directories.flat_map(|directory| {
        [
            directory.join("libkvxfer_ffi.so"),
            directory.join("deps/libkvxfer_ffi.so"),
        ]
    });
    found
        .into_iter()
        .find(|path| path.exists())
        .expect("cargo built the library")
}

/// Compiles both, with these flags.
///
/// # Panics
/// If they do not compile without a warning.
pub fn build(directory: &Path, compiler: &str, flags: &[&str]) -> Examples {
    std::fs::create_dir_all(directory).unwrap();
    let crate_directory = Path::new(env!("CARGO_MANIFEST_DIR"));
    // Under its names: the one that programs are linked with, and the one that they ask for.
    for name in ["libkvxfer.so", "libkvxfer.so.0"] {
        let link = directory.join(name);
        let _ = std::fs::remove_file(&link);
        std::os::unix::fs::symlink(library(), &link).unwrap();
    }
    for name in NAMES {
        let compiled = Command::new(compiler)
            .args(flags)
            .args(["-O1", "-Wall", "-Wextra", "-Werror", "-pedantic"])
            .arg("-I")
            .arg(crate_directory.join("include"))
            .arg(crate_directory.join(format!("examples/c/{name}.c")))
            .arg("-o")
            .arg(directory.join(name))
            .arg("-L")
            .arg(directory)
            .arg("-lkvxfer")
            .output()
            .unwrap();
        assert!(
            compiled.status.success(),
            "{}",
            String::from_utf8_lossy(&compiled.stderr)
        );
    }
    Examples {
        directory: directory.to_owned(),
    }
}

impl Examples {
    fn start(&self, name: &str, arguments: &[&str]) -> Child {
        Command::new(self.directory.join(name))
            .args(arguments)
            .env("LD_LIBRARY_PATH", &self.directory)
            .stdout(Stdio::piped())
            .spawn()
            .unwrap()
    }

    /// Runs both processes, and gives what each wrote.
    ///
    /// # Panics
    /// If one fails. They end by themselves: every wait in them has a limit.
    pub fn run(&self) -> (String, String) {
        let mut prefill = self.start("prefill", &[]);
        let mut lines = BufReader::new(prefill.stdout.take().unwrap());
        let mut wrote = String::new();
        while !wrote.contains("address: ") {
            assert_ne!(lines.read_line(&mut wrote).unwrap(), 0, "prefill ended: {wrote}");
        }
        let address = wrote.trim().rsplit(' ').next().unwrap().to_owned();
        let decode = self.start("decode", &[&address]).wait_with_output().unwrap();
        lines.read_to_string(&mut wrote).unwrap();
        let status = prefill.wait().unwrap();
        let decoded = String::from_utf8_lossy(&decode.stdout).into_owned();
        assert!(
            status.success() && decode.status.success(),
            "prefill:\n{wrote}\ndecode:\n{decoded}"
        );
        (wrote, decoded)
    }
}
