//! Where tests over RDMA run: on the devices that `KVXFER_TEST_DEVICES` names (`rxe0,rxe1` or `rxe0,rxe1,rxe2,rxe3`:
//! two ends of each wire), else on fakes. Each test has a fabric of fakes of its own.

use std::cell::RefCell;
use std::path::PathBuf;
use std::process::Command;
use std::rc::Rc;

use kvxfer::Config;
use kvxfer_fake_verbs::FakeFabric;

use crate::place;

/// Tells a child process which library its parent uses.
const LIBRARY: &str = "KVXTEST_LIBRARY";

/// Names the defect on purpose that the endpoints of this process have, in a build with the feature `mutants`.
pub const MUTANT: &str = "KVXTEST_MUTANT";

pub struct Site {
    /// The fakes, if they are, in the process that made them.
    pub fabric: Option<FakeFabric>,
    library: Option<PathBuf>,
    devices: Vec<String>,
}

/// Fakes on whose wires bytes stay for a while, arrive in any order, and are placed late.
pub const SLOW: &[(&str, &str, &str)] = &[
    ("*", "bandwidth_bytes_per_s", "600000000"),
    ("*", "latency_us", "300"),
    ("*", "order", "shuffled"),
    ("*", "late_placement_us", "2000"),
];

thread_local! {
    static SITE: RefCell<Option<Rc<Site>>> = const { RefCell::new(None) };
}

/// This test's.
pub fn site() -> Rc<Site> {
    site_with(&[])
}

/// This test's, made with these settings of the fakes. They count only at a test's first call.
pub fn site_with(settings: &[(&str, &str, &str)]) -> Rc<Site> {
    SITE.with_borrow_mut(|site| Rc::clone(site.get_or_insert_with(|| Rc::new(Site::open(settings)))))
}

/// The next test makes its own.
pub(crate) fn forget() {
    SITE.take();
}

impl Site {
    fn open(settings: &[(&str, &str, &str)]) -> Site {
        #[cfg(feature = "mutants")]
        {
            use kvxfer_core::mutants::{self, Mutant};
            let named = std::env::var(MUTANT).unwrap_or_default();
            // In this thread, and in the engines of the endpoints that are made in it.
            mutants::set(
                [Mutant::ALL, Mutant::RDMA]
                    .concat()
                    .into_iter()
                    .find(|mutant| mutant.name() == named),
            );
        }
        if let Ok(devices) = std::env::var("KVXFER_TEST_DEVICES") {
            return Site {
                fabric: None,
                library: None,
                devices: devices.split(',').map(str::to_owned).collect(),
            };
        }
        let devices = (0..4).map(|n| format!("fake{n}")).collect();
        if let Some(library) = std::env::var_os(LIBRARY) {
            return Site {
                fabric: None,
                library: Some(library.into()),
                devices,
            };
        }
        let dmabuf = if place().direct { "on" } else { "off" };
        let four = [("*", "devices", "4"), ("*", "dmabuf", dmabuf)];
        let fabric = FakeFabric::with(&[&four, settings].concat()).unwrap();
        Site {
            library: Some(fabric.library_path()),
            fabric: Some(fabric),
            devices,
        }
    }

    /// Whether the devices are real.
    pub fn is_real(&self) -> bool {
        self.library.is_none()
    }

    /// One number for fakes, another for real devices: software RDMA with one processor takes its time.
    pub fn count(&self, fakes: u32, real: u32) -> u32 {
        if self.is_real() { real } else { fakes }
    }

    pub fn configure(&self, config: &mut Config) {
        if let Some(library) = &self.library {
            config.rdma.library = library.to_str().unwrap().into();
        }
    }

    /// The device at this side of the first wire.
    pub fn device(&self, side: usize) -> String {
        self.devices[side].clone()
    }

    /// The devices at this side of two wires; none if there is only one.
    pub fn two_devices(&self, side: usize) -> Option<Vec<String>> {
        (self.devices.len() >= 4).then(|| vec![self.devices[side].clone(), self.devices[side + 2].clone()])
    }

    /// What child processes must know.
    pub fn variables(&self) -> Vec<(String, String)> {
        self.library
            .iter()
            .map(|library| (LIBRARY.to_owned(), library.to_str().unwrap().to_owned()))
            .collect()
    }

    /// Keeps bytes on the wires for a while. Fakes are slow from the start ([`SLOW`]).
    #[must_use]
    pub fn delay(&self, milliseconds: u32) -> Delay {
        if self.is_real() {
            soft_roce(&["netem", "all", &format!("delay {milliseconds}ms")]);
        }
        Delay(self.is_real())
    }

    /// Takes the device's port down until the guard is dropped.
    #[must_use]
    pub fn down(self: &Rc<Self>, device: &str) -> Down {
        self.port(device, false);
        Down {
            site: Rc::clone(self),
            device: device.to_owned(),
        }
    }

    /// Takes a device away under its users, for good in this process. Only fakes can: the kernel keeps a software
    /// device until its users have let go of it. False, and said, where the devices are real.
    #[must_use]
    pub fn unplug(&self, device: &str) -> bool {
        match &self.fabric {
            Some(fabric) => fabric.set_now(device, "event", "device_fatal").unwrap(),
            None => println!("skipped: only fake devices go away under their users"),
        }
        !self.is_real()
    }

    fn port(&self, device: &str, up: bool) {
        match &self.fabric {
            Some(fabric) => {
                let state = if up { "active" } else { "down" };
                // Here at once, elsewhere a moment later.
                fabric.set_now(device, "port_state", state).unwrap();
                fabric.set(device, "port_state", state).unwrap();
            }
            None if up => {
                // Both ends of a wire have lost what they knew of each other.
                let place = self.devices.iter().position(|other| other == device).unwrap();
                soft_roce(&["up", device, &self.devices[place ^ 1]]);
            }
            None => soft_roce(&["down", device]),
        }
    }
}

/// A port that is down.
pub struct Down {
    site: Rc<Site>,
    device: String,
}

impl Drop for Down {
    fn drop(&mut self) {
        self.site.port(&self.device, true);
    }
}

/// Undone when dropped.
pub struct Delay(bool);

impl Drop for Delay {
    fn drop(&mut self) {
        if self.0 {
            soft_roce(&["clear", "all"]);
        }
    }
}

/// The guest's command.
fn soft_roce(arguments: &[&str]) {
    let status = Command::new("soft-roce").args(arguments).status().unwrap();
    assert!(status.success(), "soft-roce {arguments:?}: {status}");
}
