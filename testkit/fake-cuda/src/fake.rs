//! What tests use: a driver in a directory of its own, with a copy of the library in it.

use std::ffi::{CString, c_char, c_int};
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use cudarc::driver::sys::CUresult;
use libloading::{Library, Symbol};
use parking_lot::Mutex;

use crate::checker::VIOLATIONS_FILE;
use crate::config::{self, Line};
use crate::driver::CONFIG_FILE;
use crate::engine::Engine;
use crate::shared::Generation;

const PREFIX: &str = "kvxfer-cuda-";
const BUILT: &str = "libkvxfer_fake_cuda.so";
const INSTALLED: &str = "libcuda.so.1";
/// Names the built library, where it does not lie beside the test's executable.
const LIBRARY_VARIABLE: &str = "KVXFER_FAKE_CUDA_LIBRARY";

/// A set of fake GPUs, shared by all processes that load its [library](FakeCuda::library_path). The one who made it
/// removes its directory when it is dropped.
#[derive(Debug)]
pub struct FakeCuda {
    directory: PathBuf,
    owned: bool,
    lines: Mutex<Vec<Line>>,
    generation: Generation,
    /// The same instance that the code under test loads in this process.
    library: Arc<Library>,
}

impl FakeCuda {
    /// A driver with two devices.
    ///
    /// # Errors
    /// The library was not built (it is, wherever this package is a dependency), or the system's.
    pub fn new() -> io::Result<FakeCuda> {
        FakeCuda::with(&[])
    }

    /// As [`FakeCuda::new`], with these `(device, key, value)` from the start; the crate's page lists the keys.
    ///
    /// # Errors
    /// As [`FakeCuda::new`]; an unknown key or a value that cannot be read.
    pub fn with(settings: &[(&str, &str, &str)]) -> io::Result<FakeCuda> {
        static COUNT: AtomicU64 = AtomicU64::new(0);
        let built = find_library()?;
        remove_abandoned();
        let count = COUNT.fetch_add(1, Ordering::Relaxed);
        let directory = std::env::temp_dir().join(format!("{PREFIX}{}-{count}", std::process::id()));
        // One that an earlier process with the same number left behind.
        if directory.exists() {
            std::fs::remove_dir_all(&directory)?;
        }
        std::fs::create_dir(&directory)?;
        // A copy, not a link: the loader gives each file its own instance, so that drivers share nothing.
        std::fs::copy(&built, directory.join(INSTALLED))?;
        let mut lines = Vec::new();
        for (device, key, value) in settings {
            put(&mut lines, device, key, value)?;
        }
        write(&directory, &lines)?;
        let generation = Generation::create(&directory)?;
        FakeCuda::open(directory, true, lines, generation)
    }

    /// The driver in a directory that another process made and keeps.
    ///
    /// # Errors
    /// Its library cannot be loaded.
    pub fn attach(directory: &Path) -> io::Result<FakeCuda> {
        let text = std::fs::read_to_string(directory.join(CONFIG_FILE))?;
        let generation = Generation::open(directory)?;
        FakeCuda::open(directory.to_owned(), false, config::parse(&text).0, generation)
    }

    fn open(directory: PathBuf, owned: bool, lines: Vec<Line>, generation: Generation) -> io::Result<FakeCuda> {
        // SAFETY: the library is this crate; it runs nothing when it is loaded.
        let library = unsafe { Library::new(directory.join(INSTALLED)) }.map_err(io::Error::other)?;
        Ok(FakeCuda {
            directory,
            owned,
            lines: Mutex::new(lines),
            generation,
            library: Arc::new(library),
        })
    }

    /// The `libcuda.so.1` to be loaded; the same in all processes.
    pub fn library_path(&self) -> PathBuf {
        self.directory.join(INSTALLED)
    }

    /// A library of the same directory that lacks these symbols, as an older one does; an instance of its own. Symbols
    /// have the names of the library's symbol table, like `cuMemAlloc_v2`.
    ///
    /// # Errors
    /// There is no such symbol, or the system's.
    pub fn library_without(&self, symbols: &[&str]) -> io::Result<PathBuf> {
        let mut bytes = std::fs::read(self.library_path())?;
        for symbol in symbols {
            // In the table of names: with another first letter, nobody finds it.
            let name = format!("\0{symbol}\0").into_bytes();
            let place = bytes.windows(name.len()).position(|window| window == name);
            let place = place.ok_or_else(|| io::Error::new(io::ErrorKind::NotFound, format!("no symbol {symbol}")))?;
            bytes[place + 1] = b'-';
        }
        let path = self
            .directory
            .join(format!("libcuda-without-{}.so.1", symbols.join("-")));
        std::fs::write(&path, bytes)?;
        Ok(path)
    }

    /// The directory, by which another process can [attach](FakeCuda::attach).
    pub fn directory(&self) -> &Path {
        &self.directory
    }

    /// Changes a key for all processes: in effect from the next call and the next piece of work on. Let only one process
    /// do this: two undo each other's changes.
    ///
    /// # Errors
    /// An unknown key, a value that cannot be read, or the file cannot be written.
    pub fn set(&self, device: &str, key: &str, value: &str) -> io::Result<()> {
        let mut lines = self.lines.lock();
        put(&mut lines, device, key, value)?;
        write(&self.directory, &lines)?;
        self.generation.advance();
        Ok(())
    }

    /// Changes a key in this process only, above what the file says.
    ///
    /// # Errors
    /// An unknown key, or a value that cannot be read.
    pub fn set_now(&self, device: &str, key: &str, value: &str) -> io::Result<()> {
        type Set = unsafe extern "C" fn(*const c_char, *const c_char, *const c_char) -> c_int;
        let texts = [CString::new(device)?, CString::new(key)?, CString::new(value)?];
        // SAFETY: the symbol has this type.
        let set: Symbol<'_, Set> = unsafe { self.library.get(b"kvx_fake_cuda_set\0") }.map_err(io::Error::other)?;
        // SAFETY: three C strings that outlive the call.
        match unsafe { set(texts[0].as_ptr(), texts[1].as_ptr(), texts[2].as_ptr()) } {
            0 => Ok(()),
            errno => {
                let why = io::Error::from_raw_os_error(errno);
                Err(io::Error::new(why.kind(), format!("{device}.{key} = {value}: {why}")))
            }
        }
    }

    /// How often the code under test has called a function in this process, by its symbol's name, or what else is
    /// counted: the crate's page lists it. Calls of the [engine](FakeCuda::engine) do not count.
    pub fn count(&self, name: &str) -> u64 {
        type Count = unsafe extern "C" fn(*const c_char) -> u64;
        let text = CString::new(name).unwrap_or_default();
        // SAFETY: the symbol has this type.
        let count = unsafe { self.library.get::<Count>(b"kvx_fake_cuda_count\0") };
        // SAFETY: a C string that outlives the call.
        count.map(|count| unsafe { count(text.as_ptr()) }).unwrap_or(0)
    }

    /// All calls of the code under test in this process by name, with how often.
    pub fn calls(&self) -> Vec<(String, u64)> {
        let parts = |line: String| {
            let (name, count) = line.split_once(' ')?;
            Some((name.to_owned(), count.parse().ok()?))
        };
        self.text(c"calls").into_iter().filter_map(parts).collect()
    }

    /// The rules that were broken, in this process and all others of the directory.
    pub fn violations(&self) -> Vec<String> {
        let text = std::fs::read_to_string(self.directory.join(VIOLATIONS_FILE)).unwrap_or_default();
        text.lines().map(str::to_owned).collect()
    }

    /// Fails if a rule was broken.
    ///
    /// # Panics
    /// Then.
    pub fn assert_clean(&self) {
        let violations = self.violations();
        assert!(violations.is_empty(), "{violations:#?}");
    }

    /// What the code under test holds in this process: contexts, streams, events, memory, registrations, modules.
    pub fn leaks(&self) -> Vec<String> {
        self.text(c"leaks")
    }

    /// Reads device memory as nobody's work: at once, and whatever is queued.
    ///
    /// # Errors
    /// There is no such memory.
    pub fn read(&self, address: u64, length: usize) -> io::Result<Vec<u8>> {
        let mut bytes = vec![0; length];
        self.read_into(address, &mut bytes)?;
        Ok(bytes)
    }

    /// The same, into memory that is there.
    ///
    /// # Errors
    /// There is no such memory.
    pub fn read_into(&self, address: u64, bytes: &mut [u8]) -> io::Result<()> {
        self.access(address, bytes.as_mut_ptr(), bytes.len(), false)
    }

    /// Writes device memory as nobody's work: at once.
    ///
    /// # Errors
    /// There is no such memory.
    pub fn write(&self, address: u64, bytes: &[u8]) -> io::Result<()> {
        self.access(address, bytes.as_ptr().cast_mut(), bytes.len(), true)
    }

    fn access(&self, address: u64, memory: *mut u8, length: usize, write: bool) -> io::Result<()> {
        type Bytes = unsafe extern "C" fn(u64, *mut u8, usize, bool) -> CUresult;
        // SAFETY: the symbol has this type.
        let bytes: Symbol<'_, Bytes> =
            unsafe { self.library.get(b"kvx_fake_cuda_bytes\0") }.map_err(io::Error::other)?;
        // SAFETY: callers give memory of that length; it is only read if it is to be written to the device.
        match unsafe { bytes(address, memory, length, write) } {
            CUresult::CUDA_SUCCESS => Ok(()),
            code => Err(io::Error::other(format!("{length} bytes at {address:#x}: {code:?}"))),
        }
    }

    /// Who computes on a device beside the code under test: its calls do not count, and what it makes is no leak.
    ///
    /// # Errors
    /// There is no such device, or its context cannot be made.
    pub fn engine(&self, device: u32) -> io::Result<Engine> {
        Engine::new(self.library.clone(), device)
    }

    fn text(&self, kind: &std::ffi::CStr) -> Vec<String> {
        type Text = unsafe extern "C" fn(*const c_char, *mut u8, usize) -> usize;
        // SAFETY: the symbol has this type.
        let Ok(text) = (unsafe { self.library.get::<Text>(b"kvx_fake_cuda_text\0") }) else {
            return Vec::new();
        };
        let mut buffer = vec![0u8; 1 << 20];
        // SAFETY: a C string, and a buffer of that length.
        let length = unsafe { text(kind.as_ptr(), buffer.as_mut_ptr(), buffer.len()) };
        buffer.truncate(length);
        String::from_utf8_lossy(&buffer).lines().map(str::to_owned).collect()
    }
}

impl Drop for FakeCuda {
    fn drop(&mut self) {
        if self.owned {
            // A directory left behind is untidy, not wrong.
            let _ = std::fs::remove_dir_all(&self.directory);
        }
    }
}

/// Removes the directories of processes that were killed before they could.
fn remove_abandoned() {
    let Ok(entries) = std::fs::read_dir(std::env::temp_dir()) else {
        return;
    };
    for entry in entries.flatten() {
        let name = entry.file_name();
        let process = name
            .to_str()
            .and_then(|name| name.strip_prefix(PREFIX)?.split('-').next()?.parse::<u32>().ok());
        if process.is_some_and(|process| !Path::new(&format!("/proc/{process}")).exists()) {
            // Somebody else may be doing the same, or it may be another user's.
            let _ = std::fs::remove_dir_all(entry.path());
        }
    }
}

fn put(lines: &mut Vec<Line>, device: &str, key: &str, value: &str) -> io::Result<()> {
    if !config::is_valid(key, value) {
        let what = format!("fake-cuda: no key {key:?} with a value {value:?}");
        return Err(io::Error::new(io::ErrorKind::InvalidInput, what));
    }
    lines.retain(|(other, known, _)| other != device || known != key);
    lines.push((device.to_owned(), key.to_owned(), value.to_owned()));
    Ok(())
}

/// Writes the configuration so that readers see the old one or the new one.
fn write(directory: &Path, lines: &[Line]) -> io::Result<()> {
    let new = directory.join("cuda.new");
    std::fs::write(&new, config::write(lines))?;
    std::fs::rename(new, directory.join(CONFIG_FILE))
}

/// Finds the library that cargo built: beside the executable of a test, or one level up or down for binaries and
/// examples.
fn find_library() -> io::Result<PathBuf> {
    if let Some(path) = std::env::var_os(LIBRARY_VARIABLE) {
        return Ok(path.into());
    }
    let executable = std::env::current_exe()?;
    let own = executable.parent().unwrap_or(Path::new("."));
    let above = own.parent().unwrap_or(own);
    // `deps` first: what lies beside a binary may be older than what was built as a dependency.
    let places = [own.join("deps"), own.to_owned(), above.join("deps"), above.to_owned()];
    let found = places.iter().map(|place| place.join(BUILT)).find(|path| path.exists());
    found.ok_or_else(|| {
        let what = format!(
            "fake-cuda: no {BUILT} in {places:?}: make kvxfer-fake-cuda a (dev-)dependency of the package that is \
             tested, or name the library in {LIBRARY_VARIABLE}"
        );
        io::Error::new(io::ErrorKind::NotFound, what)
    })
}
