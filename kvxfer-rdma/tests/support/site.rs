//! Where tests run: fakes, or what the kernel has; and how that place is changed under them.

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use kvxfer_fake_verbs::FakeFabric;
use kvxfer_rdma::RdmaConfig;

use super::{Node, Pair, ms, node};

/// Where a test runs: on the devices that `KVXFER_TEST_DEVICES` names (`rxe0,rxe1`), on all of the place that
/// `testkit/soft-roce/run` made, or on a fabric of fakes. Devices 2n and 2n + 1 are joined.
pub struct Site {
    pub fabric: Option<FakeFabric>,
    devices: Vec<String>,
    // Whether the place is not as it was.
    changed: AtomicBool,
}

impl Site {
    pub fn open() -> Site {
        Site::with(&[])
    }

    /// With these settings of the fakes; four devices unless they say otherwise.
    pub fn with(settings: &[(&str, &str, &str)]) -> Site {
        let named = std::env::var("KVXFER_TEST_DEVICES").ok();
        let named = named.or_else(|| std::env::var("SOFT_ROCE").ok().map(|_| found().join(",")));
        match named {
            Some(devices) => Site {
                fabric: None,
                devices: devices.split(',').map(str::to_owned).collect(),
                changed: AtomicBool::new(false),
            },
            None => {
                let mut all = vec![("*", "devices", "4")];
                all.extend_from_slice(settings);
                Site {
                    fabric: Some(FakeFabric::with(&all).unwrap()),
                    devices: (0..4).map(|index| format!("fake{index}")).collect(),
                    changed: AtomicBool::new(false),
                }
            }
        }
    }

    /// Whether the devices are real.
    pub fn is_real(&self) -> bool {
        self.fabric.is_none()
    }

    /// The fakes, for tests that only they make possible. Says so where there are none.
    pub fn fakes(&self) -> Option<&FakeFabric> {
        if self.fabric.is_none() {
            println!("skipped: this needs what only fake devices do");
        }
        self.fabric.as_ref()
    }

    /// One number on the fakes, another on real devices, of which this machine has one processor.
    pub fn choose<T>(&self, fakes: T, real: T) -> T {
        if self.is_real() { real } else { fakes }
    }

    /// Pairs of devices that there are.
    pub fn rails(&self) -> usize {
        self.devices.len() / 2
    }

    /// Settings for one device of the site.
    pub fn config(&self, device: usize) -> RdmaConfig {
        self.config_of(&[device])
    }

    pub fn config_of(&self, devices: &[usize]) -> RdmaConfig {
        RdmaConfig {
            library: self.fabric.as_ref().map(FakeFabric::library_path),
            devices: devices.iter().map(|device| self.devices[*device].clone()).collect(),
            ..RdmaConfig::default()
        }
    }

    /// Two nodes, one on each device, and their link.
    pub fn pair(&self) -> Pair {
        self.pair_with(|_| {})
    }

    pub fn pair_with(&self, change: impl Fn(&mut RdmaConfig)) -> Pair {
        let (left, right) = self.nodes(1, change);
        Pair::new(left, right).up()
    }

    /// Two nodes that have so many devices each.
    pub fn nodes(&self, rails: usize, change: impl Fn(&mut RdmaConfig)) -> (Node, Node) {
        let on = |bits, first: usize| {
            let devices: Vec<usize> = (0..rails).map(|rail| 2 * rail + first).collect();
            let mut config = self.config_of(&devices);
            change(&mut config);
            node(bits, config)
        };
        (on(1, 0), on(2, 1))
    }

    /// What leaves a device takes so long to reach the other: bytes are in flight.
    pub fn delay(&self, time: Duration) {
        let micros = time.as_micros();
        match &self.fabric {
            Some(fabric) => fabric.set_now("*", "latency_us", &micros.to_string()).unwrap(),
            None => self.netem(&["delay", &format!("{micros}us")]),
        }
    }

    /// Nothing reaches any device any more, silently.
    pub fn lose_everything(&self) {
        match &self.fabric {
            Some(fabric) => fabric.set_now("*", "drop_percent", "100").unwrap(),
            None => self.netem(&["loss", "100%"]),
        }
    }

    /// A device's link goes down.
    pub fn down(&self, device: usize) {
        match &self.fabric {
            Some(fabric) => fabric.set_now(&self.devices[device], "port_state", "down").unwrap(),
            None => {
                self.changed.store(true, Ordering::SeqCst);
                command("ip", &["link", "set", &self.interface(device), "down"]);
            }
        }
    }

    /// And comes back.
    pub fn up(&self, device: usize) {
        match &self.fabric {
            Some(fabric) => fabric.set_now(&self.devices[device], "port_state", "active").unwrap(),
            None => {
                // Both ends of the link lost what they knew of each other.
                let (first, second) = (device & !1, device | 1);
                self.soft_roce(&["up", &self.devices[first], &self.devices[second]]);
            }
        }
    }

    /// Undoes delays and losses.
    pub fn clear(&self) {
        match &self.fabric {
            Some(fabric) => {
                fabric.set_now("*", "latency_us", "0").unwrap();
                fabric.set_now("*", "drop_percent", "0").unwrap();
            }
            None => self.netem(&["delay", "0us"]),
        }
    }

    // `soft-roce netem`, `clear` and `down` do the same, but as scripts, which take a second there.
    fn netem(&self, how: &[&str]) {
        self.changed.store(true, Ordering::SeqCst);
        for device in 0..self.devices.len() {
            let mut arguments = vec!["qdisc", "replace", "dev"];
            let interface = self.interface(device);
            arguments.extend([interface.as_str(), "root", "netem"]);
            arguments.extend_from_slice(how);
            arguments.extend(["limit", "100000"]);
            command("tc", &arguments);
        }
    }

    fn interface(&self, device: usize) -> String {
        self.devices[device].replace("rxe", "veth")
    }

    /// Changes the place that `testkit/soft-roce/run` made.
    fn soft_roce(&self, arguments: &[&str]) {
        self.changed.store(true, Ordering::SeqCst);
        command("soft-roce", arguments);
    }
}

/// Settings for a place where packets are only late, or lost for a while: they give nothing up too early.
pub fn slow_to_give_up(config: &mut RdmaConfig) {
    config.revoke = ms(100);
    // 0.54 s each: packets that are only late are not lost.
    config.timeout = 17;
    config.progress = Duration::from_secs(3);
}

impl Drop for Site {
    fn drop(&mut self) {
        // The next test finds the place as this one did.
        if self.is_real() && self.changed.load(Ordering::SeqCst) {
            self.soft_roce(&["clear", "all"]);
            self.soft_roce(&["up", "all"]);
        }
    }
}

fn found() -> Vec<String> {
    let devices = std::fs::read_dir("/sys/class/infiniband").unwrap();
    let mut names: Vec<String> = devices
        .map(|device| device.unwrap().file_name().to_string_lossy().into_owned())
        .filter(|name| name.starts_with("rxe"))
        .collect();
    names.sort();
    names
}

fn command(name: &str, arguments: &[&str]) {
    let status = std::process::Command::new(name).args(arguments).status().unwrap();
    assert!(
        status.success() || std::thread::panicking(),
        "{name} {arguments:?}: {status}"
    );
}
