//! The driver of this process: its configuration, what every call goes through, and all objects.

use std::cell::Cell;
use std::ffi::{CStr, OsStr};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, OnceLock};

use cudarc::driver::sys::CUresult;
use parking_lot::{Mutex, RwLock};

use crate::checker::Checker;
use crate::config::{self, Defect, Failure, Line, Settings};
use crate::memory::opened::Opened;
use crate::shared::Generation;
use crate::world::World;

/// The variable that names the directory, for a library that does not lie in one.
pub(crate) const DIRECTORY_VARIABLE: &str = "KVXFER_FAKE_CUDA";
/// The variable that names a defect of the code under test, for tests that know nothing of it.
pub(crate) const DEFECT_VARIABLE: &str = "KVXFER_FAKE_CUDA_DEFECT";
/// The configuration file in the directory.
pub(crate) const CONFIG_FILE: &str = "cuda.conf";

/// What a driver call ends with, short of success.
pub(crate) type Answer<T = ()> = Result<T, CUresult>;

/// Handles are numbers that are never addresses of anything, so that whoever looks behind them crashes.
const FIRST_HANDLE: usize = 0x0fa4_0000_0000_0000;

/// Calls that may come before cuInit.
const EARLY: &[&str] = &[
    "cuInit",
    "cuDriverGetVersion",
    "cuGetErrorName",
    "cuGetErrorString",
    "cuGetProcAddress_v2",
];

/// Calls that only name things: they count, but neither fail on request nor vanish.
const NAMING: &[&str] = &["cuGetErrorName", "cuGetErrorString"];

thread_local! {
    /// Whether this thread plays the engine, whose calls are not those of the code under test.
    static ENGINE: Cell<bool> = const { Cell::new(false) };
    /// Whether this thread runs a host function of a stream, in which no call is allowed.
    static IN_HOST_FUNCTION: Cell<bool> = const { Cell::new(false) };
}

/// The driver of this process.
pub(crate) struct Driver {
    directory: Option<PathBuf>,
    defect: Defect,
    generation: Option<Generation>,
    seen: AtomicU64,
    config: RwLock<Config>,
    failures: Mutex<Vec<Failure>>,
    may_fail: AtomicBool,
    op_errors: Mutex<Vec<Option<Failure>>>,
    may_err: AtomicBool,
    initialised: AtomicBool,
    next_handle: AtomicUsize,
    /// Counts and notes.
    pub(crate) checker: Checker,
    /// What processes have of each other's memory.
    pub(crate) opened: Opened,
    /// All objects.
    pub(crate) world: Mutex<World>,
}

struct Config {
    overrides: Vec<Line>,
    devices: Vec<Arc<Settings>>,
    complaints: Vec<String>,
}

/// The one driver.
pub(crate) fn driver() -> &'static Driver {
    static DRIVER: OnceLock<Driver> = OnceLock::new();
    DRIVER.get_or_init(Driver::new)
}

/// What every exported function goes through.
pub(crate) fn call(name: &'static str, body: impl FnOnce(&'static Driver) -> Answer) -> CUresult {
    let driver = driver();
    driver.refresh();
    match driver.admit(name).and_then(|()| body(driver)) {
        Ok(()) => CUresult::CUDA_SUCCESS,
        Err(code) => code,
    }
}

/// Whether this thread plays the engine.
pub(crate) fn is_engine() -> bool {
    ENGINE.get()
}

/// From now on this thread plays the engine, or no longer; what it was before.
pub(crate) fn set_engine(engine: bool) -> bool {
    ENGINE.replace(engine)
}

/// Runs a host function of a stream.
pub(crate) fn host_function(run: impl FnOnce()) {
    IN_HOST_FUNCTION.set(true);
    run();
    IN_HOST_FUNCTION.set(false);
}

impl Driver {
    fn new() -> Driver {
        let directory = find_directory();
        let generation = directory
            .as_deref()
            .and_then(|directory| Generation::open(directory).ok());
        let driver = Driver {
            checker: Checker::new(directory.as_deref()),
            opened: Opened::new(directory.as_deref()),
            directory,
            defect: std::env::var(DEFECT_VARIABLE)
                .ok()
                .and_then(|name| Defect::named(&name))
                .unwrap_or(Defect::None),
            generation,
            seen: AtomicU64::new(u64::MAX),
            config: RwLock::new(Config {
                overrides: Vec::new(),
                devices: Vec::new(),
                complaints: Vec::new(),
            }),
            failures: Mutex::new(Vec::new()),
            may_fail: AtomicBool::new(false),
            op_errors: Mutex::new(Vec::new()),
            may_err: AtomicBool::new(false),
            initialised: AtomicBool::new(false),
            next_handle: AtomicUsize::new(FIRST_HANDLE),
            world: Mutex::new(World::default()),
        };
        driver.refresh();
        driver
    }

    /// Reads the configuration anew if it has changed.
    pub(crate) fn refresh(&self) {
        let now = self.generation.as_ref().map_or(0, Generation::now);
        if self.seen.load(Ordering::Acquire) != now {
            let mut config = self.config.write();
            self.reload(&mut config);
            self.seen.store(now, Ordering::Release);
        }
    }

    /// Sets a key in this process only, above what the file says. True if the value can be read.
    pub(crate) fn set_here(&self, device: &str, key: &str, value: &str) -> bool {
        if !config::is_valid(key, value) {
            return false;
        }
        let mut config = self.config.write();
        config
            .overrides
            .retain(|(other, known, _)| other != device || known != key);
        config
            .overrides
            .push((device.to_owned(), key.to_owned(), value.to_owned()));
        self.reload(&mut config);
        true
    }

    fn reload(&self, config: &mut Config) {
        let Some(directory) = &self.directory else {
            return;
        };
        // A directory that is gone leaves everything as it is.
        let Ok(text) = std::fs::read_to_string(directory.join(CONFIG_FILE)) else {
            return;
        };
        let (mut lines, mut complaints) = config::parse(&text);
        lines.extend(config.overrides.iter().cloned());
        let count = Settings::resolve(0, &lines).0.devices;
        let before = std::mem::take(&mut config.devices);
        for index in 0..count.max(1) {
            let (settings, more) = Settings::resolve(index, &lines);
            complaints.extend(more);
            config.devices.push(Arc::new(settings));
        }
        complaints.dedup();
        if complaints != config.complaints {
            for complaint in &complaints {
                eprintln!("fake-cuda: {CONFIG_FILE}: {complaint}");
            }
            config.complaints = complaints;
        }
        self.arm(&before, &config.devices);
    }

    /// Failures count from when they are set, so only a changed value starts anew.
    fn arm(&self, before: &[Arc<Settings>], now: &[Arc<Settings>]) {
        if before.first().map(|settings| &settings.fail) != Some(&now[0].fail) {
            let failures = config::parse_fail(&now[0].fail).unwrap_or_default();
            self.may_fail.store(!failures.is_empty(), Ordering::Release);
            *self.failures.lock() = failures;
        }
        let mut errors = self.op_errors.lock();
        errors.resize(now.len(), None);
        for (index, settings) in now.iter().enumerate() {
            if before.get(index).map(|settings| &settings.op_error) != Some(&settings.op_error) {
                errors[index] = config::parse_op_error(&settings.op_error).flatten();
            }
        }
        self.may_err
            .store(errors.iter().any(Option::is_some), Ordering::Release);
    }

    /// Counts a call, and says whether it may go on.
    fn admit(&self, name: &'static str) -> Answer {
        let engine = is_engine();
        if !engine {
            self.checker.called(name);
        }
        if IN_HOST_FUNCTION.get() {
            self.checker
                .violation(&format!("{name} was called in a host function of a stream"));
            return Err(CUresult::CUDA_ERROR_NOT_PERMITTED);
        }
        if NAMING.contains(&name) {
            return Ok(());
        }
        if let Some(code) = self.vanished() {
            return Err(code);
        }
        if !engine
            && self.may_fail.load(Ordering::Acquire)
            && let Some(code) = self.failure(name)
        {
            return Err(code);
        }
        if !EARLY.contains(&name) && !self.initialised.load(Ordering::Acquire) {
            return Err(CUresult::CUDA_ERROR_NOT_INITIALIZED);
        }
        Ok(())
    }

    fn failure(&self, name: &str) -> Option<CUresult> {
        let mut failures = self.failures.lock();
        let mut code = None;
        for failure in &mut *failures {
            if failure.call != name && failure.call != "*" {
                continue;
            }
            if failure.skip > 0 {
                failure.skip -= 1;
            } else if failure.left > 0 && code.is_none() {
                failure.left -= 1;
                code = Some(failure.code);
            }
        }
        code
    }

    /// What work on a device is to fail with now, if it is.
    pub(crate) fn op_error(&self, device: u32) -> Option<CUresult> {
        if !self.may_err.load(Ordering::Acquire) {
            return None;
        }
        let mut errors = self.op_errors.lock();
        let failure = errors.get_mut(device as usize)?.as_mut()?;
        if failure.skip > 0 {
            failure.skip -= 1;
            return None;
        }
        failure.left = failure.left.checked_sub(1)?;
        Some(failure.code)
    }

    /// What all calls fail with, since the driver is gone.
    pub(crate) fn vanished(&self) -> Option<CUresult> {
        self.config.read().devices.first().and_then(|settings| settings.vanish)
    }

    /// Whether this call of the code under test is to be as if it had that defect.
    pub(crate) fn has(&self, defect: Defect) -> bool {
        let own = self.config.read().devices.first().map(|settings| settings.defect);
        !is_engine() && (self.defect == defect || own == Some(defect))
    }

    /// cuInit.
    pub(crate) fn initialise(&self) -> Answer {
        if self.device_count() == 0 {
            return Err(CUresult::CUDA_ERROR_NO_DEVICE);
        }
        self.initialised.store(true, Ordering::Release);
        Ok(())
    }

    /// How many devices there are.
    pub(crate) fn device_count(&self) -> u32 {
        self.config
            .read()
            .devices
            .first()
            .map_or(0, |settings| settings.devices)
    }

    /// The settings of a device.
    pub(crate) fn settings(&self, device: u32) -> Answer<Arc<Settings>> {
        let config = self.config.read();
        let count = config.devices.first().map_or(0, |settings| settings.devices);
        match config.devices.get(device as usize) {
            Some(settings) if device < count => Ok(settings.clone()),
            _ => Err(CUresult::CUDA_ERROR_INVALID_DEVICE),
        }
    }

    /// The settings that are not a device's.
    pub(crate) fn general(&self) -> Option<Arc<Settings>> {
        self.config.read().devices.first().cloned()
    }

    /// A handle that never was one before.
    pub(crate) fn new_handle(&self) -> usize {
        self.next_handle.fetch_add(16, Ordering::Relaxed)
    }

    /// Whether the number was a handle once.
    pub(crate) fn was_handle(&self, handle: usize) -> bool {
        (FIRST_HANDLE..self.next_handle.load(Ordering::Relaxed)).contains(&handle)
    }

    /// A handle that stands for nothing: noted, if it stood for something before.
    pub(crate) fn bad_handle<T>(&self, what: &str, handle: usize) -> Answer<T> {
        if self.was_handle(handle) {
            self.checker.violation(&format!(
                "{what} {handle:#x} is used, but was destroyed (or is something else)"
            ));
        }
        Err(CUresult::CUDA_ERROR_INVALID_HANDLE)
    }
}

/// Where the configuration lies: beside this library, or where the environment says.
fn find_directory() -> Option<PathBuf> {
    let beside = own_path().and_then(|path| path.parent().map(Path::to_owned));
    let beside = beside.filter(|directory| directory.join(CONFIG_FILE).exists());
    beside.or_else(|| std::env::var_os(DIRECTORY_VARIABLE).map(PathBuf::from))
}

/// The file that this code was loaded from.
pub(crate) fn own_path() -> Option<PathBuf> {
    // SAFETY: all zero is a valid one.
    let mut info: libc::Dl_info = unsafe { std::mem::zeroed() };
    // SAFETY: an address of this library, and a structure to be filled.
    let found = unsafe {
        libc::dladdr(
            (driver as fn() -> &'static Driver) as *const libc::c_void,
            &raw mut info,
        )
    };
    if found == 0 || info.dli_fname.is_null() {
        return None;
    }
    // SAFETY: the loader's own text, which stays as long as the library.
    let name = unsafe { CStr::from_ptr(info.dli_fname) };
    Some(PathBuf::from(OsStr::from_bytes(name.to_bytes())))
}
