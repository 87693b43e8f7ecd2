//! Devices: their configuration, counters and contexts in this process, and the fabric they belong to.

use std::collections::HashMap;
use std::ffi::{CStr, OsStr};
use std::os::raw::{c_char, c_void};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Weak};

use kvxfer_rdma::sys;
use parking_lot::Mutex;

use crate::config::{self, Failure, Line, Settings};
use crate::context::Context;
use crate::counters::Counters;
use crate::objects::FakeDevice;

/// The variable that names the fabric's directory, for a library that does not lie in one.
pub(crate) const FABRIC_VARIABLE: &str = "KVXFER_FAKE_VERBS";
/// The configuration file in the fabric's directory.
pub(crate) const CONFIG_FILE: &str = "fabric.conf";
const DEFAULT_DEVICES: u32 = 2;

/// A device as this process sees it.
pub(crate) struct Device {
    /// `fake0`, `fake1`, …
    pub(crate) name: String,
    /// Its place in the list.
    pub(crate) index: u32,
    /// The fabric's directory.
    pub(crate) fabric: PathBuf,
    /// What it has done in this process.
    pub(crate) counters: Counters,
    /// Held while settings are read and handed to the contexts, so that an older reading never follows a newer one.
    config: Mutex<Config>,
    failures: Mutex<Vec<Failure>>,
    may_fail: AtomicBool,
    contexts: Mutex<Vec<Weak<Context>>>,
}

struct Config {
    overrides: Vec<Line>,
    settings: Arc<Settings>,
    complaints: Vec<String>,
    /// Of the file as it was last read.
    generation: u64,
}

impl Device {
    fn new(name: String, index: u32, fabric: PathBuf) -> Device {
        let device = Device {
            config: Mutex::new(Config {
                overrides: Vec::new(),
                settings: Arc::new(Settings::resolve(&name, index, &[]).0),
                complaints: Vec::new(),
                generation: 0,
            }),
            name,
            index,
            fabric,
            counters: Counters::default(),
            failures: Mutex::new(Vec::new()),
            may_fail: AtomicBool::new(false),
            contexts: Mutex::new(Vec::new()),
        };
        device.refresh();
        device
    }

    /// The settings of now.
    pub(crate) fn settings(&self) -> Arc<Settings> {
        self.config.lock().settings.clone()
    }

    /// Adds a context, which hears of changed settings from now on; its first ones, and their generation, are
    /// handed to `start`.
    pub(crate) fn add_context<T>(
        &self,
        start: impl FnOnce(Arc<Settings>, u64) -> std::io::Result<(Weak<Context>, T)>,
    ) -> std::io::Result<T> {
        let config = self.config.lock();
        let (context, result) = start(config.settings.clone(), config.generation)?;
        let mut contexts = self.contexts.lock();
        contexts.retain(|context| context.strong_count() > 0);
        contexts.push(context);
        Ok(result)
    }

    /// Reads the configuration anew and hands it to the contexts of this process.
    pub(crate) fn refresh(&self) {
        self.reload(&mut self.config.lock());
    }

    /// Sets a key in this process only, above what the file says. True if the value can be read.
    pub(crate) fn set_here(&self, key: &str, value: &str) -> bool {
        if !config::is_valid(key, value) {
            return false;
        }
        let mut config = self.config.lock();
        config.overrides.retain(|(_, known, _)| known != key);
        config
            .overrides
            .push((self.name.clone(), key.to_owned(), value.to_owned()));
        self.reload(&mut config);
        true
    }

    fn reload(&self, config: &mut Config) {
        let text = read(&self.fabric);
        let (mut lines, mut complaints) = config::parse(&text);
        config.generation = config::generation(&text);
        lines.extend(config.overrides.iter().cloned());
        let (settings, more) = Settings::resolve(&self.name, self.index, &lines);
        complaints.extend(more);
        if complaints != config.complaints {
            for complaint in &complaints {
                eprintln!("fake-verbs: {CONFIG_FILE}: {complaint}");
            }
            config.complaints = complaints;
        }
        if settings.fail != config.settings.fail {
            let plain = settings.fail.split('#').next().unwrap_or_default().trim();
            *self.failures.lock() = config::parse_fail(plain).unwrap_or_default();
            self.may_fail.store(!plain.is_empty(), Ordering::Release);
        }
        config.settings = Arc::new(settings);
        let contexts: Vec<_> = self.contexts.lock().iter().filter_map(Weak::upgrade).collect();
        for context in contexts {
            context.apply(config.settings.clone(), config.generation);
        }
    }

    /// The errno with which `verb` is to fail now, if it is.
    pub(crate) fn failure(&self, verb: &str) -> Option<i32> {
        if !self.may_fail.load(Ordering::Acquire) {
            return None;
        }
        let mut failures = self.failures.lock();
        let failure = failures
            .iter_mut()
            .find(|failure| failure.verb == verb && failure.left > 0)?;
        if failure.skip > 0 {
            failure.skip -= 1;
            return None;
        }
        failure.left -= 1;
        Some(failure.errno)
    }
}

/// The configuration file. A fabric without one has the defaults.
fn read(fabric: &Path) -> String {
    std::fs::read_to_string(fabric.join(CONFIG_FILE)).unwrap_or_default()
}

static DEVICES: Mutex<Option<HashMap<String, &'static FakeDevice>>> = Mutex::new(None);

/// The devices of the fabric, in order. None without a fabric.
pub(crate) fn list() -> Vec<&'static FakeDevice> {
    let Some(fabric) = fabric() else { return Vec::new() };
    let count = config::parse(&read(&fabric))
        .0
        .iter()
        .rev()
        .find(|(_, key, _)| key == "devices")
        .and_then(|(_, _, value)| value.parse().ok())
        .unwrap_or(DEFAULT_DEVICES);
    (0..count).map(|index| intern(&fabric, index)).collect()
}

/// The device of that name, if it was listed before or is now.
pub(crate) fn named(name: &str) -> Vec<&'static FakeDevice> {
    let listed = list();
    let devices = DEVICES.lock();
    let mut known: Vec<_> = devices.iter().flatten().map(|(_, device)| *device).collect();
    drop(devices);
    known.extend(
        listed
            .iter()
            .filter(|device| !known.iter().any(|other| std::ptr::eq(*other, **device)))
            .copied()
            .collect::<Vec<_>>(),
    );
    known.retain(|device| name == "*" || device.device.name == name);
    known
}

fn intern(fabric: &Path, index: u32) -> &'static FakeDevice {
    let name = format!("fake{index}");
    let mut devices = DEVICES.lock();
    let devices = devices.get_or_insert_default();
    if let Some(device) = devices.get(&name) {
        return device;
    }
    let device = Device::new(name.clone(), index, fabric.to_owned());
    let raw = describe(&device);
    let device = FakeDevice::leak(raw, device);
    devices.insert(name, device);
    device
}

fn describe(device: &Device) -> sys::ibv_device {
    let settings = device.settings();
    let (node_type, transport_type) = if settings.iwarp {
        (sys::IBV_NODE_RNIC, sys::IBV_TRANSPORT_IWARP)
    } else {
        (sys::IBV_NODE_CA, sys::IBV_TRANSPORT_IB)
    };
    let mut raw = sys::ibv_device {
        _ops: sys::_ibv_device_ops {
            _dummy1: None,
            _dummy2: None,
        },
        node_type,
        transport_type,
        name: [0; 64],
        dev_name: [0; 64],
        dev_path: [0; 256],
        ibdev_path: [0; 256],
    };
    copy_text(&mut raw.name, device.name.as_bytes());
    copy_text(&mut raw.dev_name, format!("uverbs{}", device.index).as_bytes());
    let default = device.fabric.join(&device.name);
    let path = if settings.pci_path.is_empty() {
        default.as_os_str().as_bytes()
    } else {
        settings.pci_path.as_bytes()
    };
    copy_text(&mut raw.dev_path, path);
    copy_text(&mut raw.ibdev_path, path);
    raw
}

/// Copies text into a C string field, cut to fit, its last byte zero.
pub(crate) fn copy_text(field: &mut [c_char], text: &[u8]) {
    let room = field.len().saturating_sub(1);
    for (to, from) in field.iter_mut().take(room).zip(text) {
        *to = *from as c_char;
    }
}

/// The fabric's directory: where this library lies, if there is a configuration beside it; else what the environment
/// names, if it is a directory.
fn fabric() -> Option<PathBuf> {
    let beside = own_path().and_then(|path| path.parent().map(Path::to_owned));
    if let Some(directory) = beside.filter(|directory| directory.join(CONFIG_FILE).exists()) {
        return Some(directory);
    }
    std::env::var_os(FABRIC_VARIABLE)
        .map(PathBuf::from)
        .filter(|directory| directory.is_dir())
}

/// The file that this code was loaded from.
fn own_path() -> Option<PathBuf> {
    static ANCHOR: u8 = 0;
    // SAFETY: a zeroed Dl_info is a valid one to be filled.
    let mut info: libc::Dl_info = unsafe { std::mem::zeroed() };
    let anchor: *const c_void = std::ptr::from_ref(&ANCHOR).cast();
    // SAFETY: `info` is writable; any address may be asked about.
    let found = unsafe { libc::dladdr(anchor, &raw mut info) } != 0;
    if !found || info.dli_fname.is_null() {
        return None;
    }
    // SAFETY: dladdr gave a C string that lives as long as the object stays loaded, which is for ever.
    let path = unsafe { CStr::from_ptr(info.dli_fname) };
    Some(PathBuf::from(OsStr::from_bytes(path.to_bytes())))
}
