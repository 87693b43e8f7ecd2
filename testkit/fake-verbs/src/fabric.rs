//! What tests use: a fabric in a directory of its own, with a copy of the library in it.

use std::ffi::{CString, c_char, c_int};
use std::io;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use libloading::{Library, Symbol};
use parking_lot::Mutex;

use crate::config;
use crate::device::CONFIG_FILE;
use crate::seen;

const SEEN_LIMIT: Duration = Duration::from_secs(5);
const PREFIX: &str = "kvxfer-fake-";
const BUILT: &str = "libkvxfer_fake_verbs.so";
const INSTALLED: &str = "libibverbs.so.1";
/// Names the built library, where it does not lie beside the test's executable.
const LIBRARY_VARIABLE: &str = "KVXFER_FAKE_VERBS_LIBRARY";

/// What the configuration file says.
#[derive(Debug, Default)]
struct File {
    lines: Vec<config::Line>,
    generation: u64,
}

/// A set of fake devices, shared by all processes that load its [library](FakeFabric::library_path). The one who made
/// it removes its directory when it is dropped.
#[derive(Debug)]
pub struct FakeFabric {
    directory: PathBuf,
    owned: bool,
    file: Mutex<File>,
    /// The same instance that the code under test loads in this process.
    library: Library,
}

impl FakeFabric {
    /// A fabric of two devices, `fake0` and `fake1`, each with one active RoCE port.
    ///
    /// # Errors
    /// The library was not built (it is, wherever this package is a dependency), or the system's.
    pub fn new() -> io::Result<FakeFabric> {
        FakeFabric::with(&[])
    }

    /// As [`FakeFabric::new`], with these `(device, key, value)` from the start; the crate's page lists the keys.
    ///
    /// # Errors
    /// As [`FakeFabric::new`]; an unknown key or a value that cannot be read.
    pub fn with(settings: &[(&str, &str, &str)]) -> io::Result<FakeFabric> {
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
        // A copy, not a link: the loader gives each file its own instance, so that fabrics share nothing.
        std::fs::copy(&built, directory.join(INSTALLED))?;
        let mut file = File::default();
        for (device, key, value) in settings {
            put(&mut file.lines, device, key, value)?;
        }
        write(&directory, &mut file)?;
        FakeFabric::open(directory, true, file)
    }

    /// The fabric in a directory that another process made and keeps.
    ///
    /// # Errors
    /// Its library cannot be loaded.
    pub fn attach(directory: &Path) -> io::Result<FakeFabric> {
        let text = std::fs::read_to_string(directory.join(CONFIG_FILE))?;
        let file = File {
            lines: config::parse(&text).0,
            generation: config::generation(&text),
        };
        FakeFabric::open(directory.to_owned(), false, file)
    }

    fn open(directory: PathBuf, owned: bool, file: File) -> io::Result<FakeFabric> {
        // SAFETY: the library is this crate; it runs nothing when it is loaded.
        let library = unsafe { Library::new(directory.join(INSTALLED)) }.map_err(io::Error::other)?;
        Ok(FakeFabric {
            directory,
            owned,
            file: Mutex::new(file),
            library,
        })
    }

    /// The `libibverbs.so.1` to be loaded; the same in all processes.
    pub fn library_path(&self) -> PathBuf {
        self.directory.join(INSTALLED)
    }

    /// A library of the same fabric that lacks these symbols, as an older one does.
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
            .join(format!("libibverbs-without-{}.so.1", symbols.join("-")));
        std::fs::write(&path, bytes)?;
        Ok(path)
    }

    /// Says where a device sits, as sysfs does: its NUMA node (-1: unknown), and its path among the PCI devices, like
    /// `pci0000:16/0000:16:01.0/0000:17:00.0`. Without this nothing is known of it.
    ///
    /// # Errors
    /// It was said before, or the system's.
    pub fn place(&self, device: &str, node: i32, pci_path: &str) -> io::Result<()> {
        let real = self.directory.join("devices").join(pci_path);
        std::fs::create_dir_all(&real)?;
        std::fs::write(real.join("numa_node"), format!("{node}\n"))?;
        let listed = self.directory.join(device);
        std::fs::create_dir_all(&listed)?;
        std::os::unix::fs::symlink(real, listed.join("device"))
    }

    /// The fabric's directory, by which another process can [attach](FakeFabric::attach).
    pub fn directory(&self) -> &Path {
        &self.directory
    }

    /// Changes a key for all processes. It is in effect a moment later: their device threads are told by the system.
    /// Let only one process do this: two undo each other's changes.
    ///
    /// # Errors
    /// An unknown key, a value that cannot be read, or the file cannot be written.
    pub fn set(&self, device: &str, key: &str, value: &str) -> io::Result<()> {
        let mut file = self.file.lock();
        put(&mut file.lines, device, key, value)?;
        write(&self.directory, &mut file)
    }

    /// As [`FakeFabric::set`], and waits until every open device of every process goes by it.
    ///
    /// # Errors
    /// As [`FakeFabric::set`]; `TimedOut` after 5 s, as with a process that is stopped.
    pub fn set_everywhere(&self, device: &str, key: &str, value: &str) -> io::Result<()> {
        self.set(device, key, value)?;
        let generation = self.file.lock().generation;
        let limit = Instant::now() + SEEN_LIMIT;
        while !seen::by_all(&self.directory, generation)? {
            if Instant::now() > limit {
                let what = format!("fake-verbs: {device}.{key} = {value} is not in effect everywhere");
                return Err(io::Error::new(io::ErrorKind::TimedOut, what));
            }
            std::thread::sleep(Duration::from_millis(1));
        }
        Ok(())
    }

    /// Changes a key in this process only, above what the file says; in effect when it returns.
    ///
    /// # Errors
    /// An unknown device or key, or a value that cannot be read.
    pub fn set_now(&self, device: &str, key: &str, value: &str) -> io::Result<()> {
        type Set = unsafe extern "C" fn(*const c_char, *const c_char, *const c_char) -> c_int;
        let texts = [CString::new(device)?, CString::new(key)?, CString::new(value)?];
        // SAFETY: the symbol has this type.
        let set: Symbol<'_, Set> = unsafe { self.library.get(b"kvx_fake_set\0") }.map_err(io::Error::other)?;
        // SAFETY: three C strings that outlive the call.
        match unsafe { set(texts[0].as_ptr(), texts[1].as_ptr(), texts[2].as_ptr()) } {
            0 => Ok(()),
            errno => {
                let why = io::Error::from_raw_os_error(errno);
                Err(io::Error::new(why.kind(), format!("{device}.{key} = {value}: {why}")))
            }
        }
    }

    /// A counter of a device (`*`: the sum over all) in this process.
    ///
    /// # Panics
    /// There is no such counter or device: the test is wrong.
    pub fn counter(&self, device: &str, name: &str) -> u64 {
        type Get = unsafe extern "C" fn(*const c_char, *const c_char) -> u64;
        let texts = [device, name].map(|text| CString::new(text).unwrap_or_default());
        // SAFETY: the symbol has this type.
        let get = unsafe { self.library.get::<Get>(b"kvx_fake_counter\0") };
        // SAFETY: two C strings that outlive the call.
        let value = get
            .map(|get| unsafe { get(texts[0].as_ptr(), texts[1].as_ptr()) })
            .unwrap_or(u64::MAX);
        assert_ne!(value, u64::MAX, "no counter {name:?} of device {device:?}");
        value
    }
}

impl Drop for FakeFabric {
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

fn put(lines: &mut Vec<config::Line>, device: &str, key: &str, value: &str) -> io::Result<()> {
    if !config::is_valid(key, value) {
        let what = format!("fake-verbs: no key {key:?} with a value {value:?}");
        return Err(io::Error::new(io::ErrorKind::InvalidInput, what));
    }
    lines.retain(|(other, known, _)| other != device || known != key);
    lines.push((device.to_owned(), key.to_owned(), value.to_owned()));
    Ok(())
}

/// Writes the configuration so that readers see the old one or the new one.
fn write(directory: &Path, file: &mut File) -> io::Result<()> {
    file.generation += 1;
    let new = directory.join("fabric.new");
    std::fs::write(&new, config::write(&file.lines, file.generation))?;
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
            "fake-verbs: no {BUILT} in {places:?}: make kvxfer-fake-verbs a (dev-)dependency of the package that is \
             tested, or name the library in {LIBRARY_VARIABLE}"
        );
        io::Error::new(io::ErrorKind::NotFound, what)
    })
}
