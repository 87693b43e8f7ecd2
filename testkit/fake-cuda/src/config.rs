//! Reading `cuda.conf`: which keys there are, what they mean by default, and what a device makes of them.

use std::time::Duration;

use cudarc::driver::sys::CUresult;

use crate::names;

/// Every key, so that a misspelt one is refused where it is set.
pub(crate) const KEYS: &[&str] = &[
    "devices",
    "driver_version",
    "name",
    "pci",
    "memory_bytes",
    "compute",
    "attributes",
    "gpudirect",
    "dmabuf",
    "flush_options",
    "writes_ordering",
    "vmm",
    "peer",
    "ipc",
    "sync_memops",
    "alloc_offset",
    "reuse_addresses",
    "op_delay_us",
    "op_jitter_us",
    "engine_delay_us",
    "stall",
    "shuffle",
    "poison",
    "tear_us",
    "op_error",
    "fail",
    "vanish",
    "defect",
];

/// One line of `cuda.conf`: device (`gpu0`, … or `*`), key, value.
pub(crate) type Line = (String, String, String);

/// Reads the text of `cuda.conf`. Lines that are no assignments are given back as complaints.
pub(crate) fn parse(text: &str) -> (Vec<Line>, Vec<String>) {
    let mut lines = Vec::new();
    let mut complaints = Vec::new();
    for (number, line) in text.lines().enumerate() {
        let line = line.split_once(" #").map_or(line, |(before, _)| before).trim();
        if line.is_empty() || line.starts_with('#') {
            continue;
        }
        let Some((name, value)) = line.split_once('=') else {
            complaints.push(format!("line {}: no '=' in {line:?}", number + 1));
            continue;
        };
        let (device, key) = name.trim().split_once('.').unwrap_or(("*", name.trim()));
        if KEYS.contains(&key) {
            lines.push((device.to_owned(), key.to_owned(), value.trim().to_owned()));
        } else {
            complaints.push(format!("line {}: no key {key:?}", number + 1));
        }
    }
    (lines, complaints)
}

/// The configuration file for these lines.
pub(crate) fn write(lines: &[Line]) -> String {
    lines.iter().fold(String::new(), |text, (device, key, value)| {
        text + &format!("{device}.{key} = {value}\n")
    })
}

/// Whether there is such a key, and it can have such a value.
pub(crate) fn is_valid(key: &str, value: &str) -> bool {
    KEYS.contains(&key) && Settings::default_of(0).set(key, value)
}

/// Whose work is stalled.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Stall {
    /// Nobody's.
    Off,
    /// Everybody's.
    All,
    /// That on streams which the test's engine made.
    Engine,
    /// That on streams which the code under test made.
    Own,
    /// Copies and gathering kernels, wherever they are.
    Copies,
}

/// A mistake that the code under test seems to have made: as if it had not made a call, or another.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Defect {
    None,
    /// It does not let its streams wait for events.
    NoEventWait,
    /// It does not flush what network devices have written.
    NoFlush,
    /// It takes page-locked memory for a device's.
    HostTakenForDevice,
    /// It makes the context of the next device current.
    WrongContext,
    /// It takes copies for done when they are asked for.
    NoCompletion,
    /// It takes memory for what it was by its address alone.
    NoBufferId,
}

impl Defect {
    /// By its name.
    pub(crate) fn named(name: &str) -> Option<Defect> {
        choose(
            name,
            &[
                ("off", Defect::None),
                ("no_event_wait", Defect::NoEventWait),
                ("no_flush", Defect::NoFlush),
                ("host_taken_for_device", Defect::HostTakenForDevice),
                ("wrong_context", Defect::WrongContext),
                ("no_completion", Defect::NoCompletion),
                ("no_buffer_id", Defect::NoBufferId),
            ],
        )
    }
}

/// A driver whose calls fail.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Failure {
    /// A call's name, or `*` for any.
    pub(crate) call: String,
    pub(crate) code: CUresult,
    /// How many calls go well before.
    pub(crate) skip: u64,
    /// How often yet.
    pub(crate) left: u64,
}

/// What a device makes of the configuration.
#[derive(Clone, Debug)]
pub(crate) struct Settings {
    pub(crate) devices: u32,
    pub(crate) driver_version: i32,
    pub(crate) name: String,
    /// Domain, bus, device.
    pub(crate) pci: (u32, u32, u32),
    pub(crate) memory_bytes: u64,
    pub(crate) compute: (i32, i32),
    pub(crate) attributes: Vec<(u32, i32)>,
    pub(crate) gpudirect: bool,
    pub(crate) dmabuf: bool,
    pub(crate) flush_options: i32,
    pub(crate) writes_ordering: i32,
    pub(crate) vmm: bool,
    pub(crate) peer: bool,
    pub(crate) ipc: bool,
    pub(crate) sync_memops: bool,
    pub(crate) alloc_offset: u64,
    pub(crate) reuse_addresses: bool,
    pub(crate) op_delay: Duration,
    pub(crate) op_jitter: Duration,
    pub(crate) engine_delay: Duration,
    pub(crate) stall: Stall,
    pub(crate) shuffle: bool,
    pub(crate) poison: bool,
    pub(crate) tear: Duration,
    pub(crate) op_error: String,
    pub(crate) fail: String,
    pub(crate) vanish: Option<CUresult>,
    pub(crate) defect: Defect,
}

impl Settings {
    /// The settings of the `index`th device. Later lines win over earlier ones; values that cannot be read are
    /// complaints and leave the default.
    pub(crate) fn resolve(index: u32, lines: &[Line]) -> (Settings, Vec<String>) {
        let name = format!("gpu{index}");
        let mut settings = Settings::default_of(index);
        let mut complaints = Vec::new();
        // `*` first, so that a line for the device wins wherever it stands.
        for own in [false, true] {
            for (device, key, value) in lines {
                let applies = if own { *device == name } else { device == "*" };
                if applies && !settings.set(key, value) {
                    complaints.push(format!("{device}.{key}: cannot read {value:?}"));
                }
            }
        }
        (settings, complaints)
    }

    fn default_of(index: u32) -> Settings {
        Settings {
            devices: 2,
            driver_version: 12_080,
            name: format!("Fake GPU {index}"),
            pci: (0, 0x17 + 0x11 * index, 0),
            memory_bytes: 80 << 30,
            compute: (9, 0),
            attributes: Vec::new(),
            gpudirect: true,
            dmabuf: true,
            flush_options: 1,
            writes_ordering: 200,
            vmm: true,
            peer: true,
            ipc: true,
            sync_memops: true,
            alloc_offset: 0,
            reuse_addresses: true,
            op_delay: Duration::ZERO,
            op_jitter: Duration::ZERO,
            engine_delay: Duration::ZERO,
            stall: Stall::Off,
            shuffle: true,
            poison: true,
            tear: Duration::ZERO,
            op_error: String::new(),
            fail: String::new(),
            vanish: None,
            defect: Defect::None,
        }
    }

    /// Sets one key; false if the value cannot be read.
    pub(crate) fn set(&mut self, key: &str, value: &str) -> bool {
        self.try_set(key, value).is_some()
    }

    fn try_set(&mut self, key: &str, value: &str) -> Option<()> {
        // What follows a `#` only makes the value new, so that what fires at a change fires again.
        let plain = value.split('#').next().unwrap_or(value).trim();
        match key {
            "devices" => self.devices = plain.parse().ok().filter(|count| *count <= 16)?,
            "driver_version" => self.driver_version = plain.parse().ok()?,
            "name" => self.name = plain.to_owned(),
            "pci" => self.pci = parse_pci(plain)?,
            "memory_bytes" => self.memory_bytes = plain.parse().ok()?,
            "compute" => {
                let (major, minor) = plain.split_once('.')?;
                self.compute = (major.parse().ok()?, minor.parse().ok()?);
            }
            "attributes" => self.attributes = parse_attributes(plain)?,
            "gpudirect" => self.gpudirect = switch(plain)?,
            "dmabuf" => self.dmabuf = switch(plain)?,
            "flush_options" => {
                self.flush_options = choose(plain, &[("none", 0), ("host", 1), ("memops", 2), ("both", 3)])?;
            }
            "writes_ordering" => {
                self.writes_ordering = choose(plain, &[("none", 0), ("owner", 100), ("all", 200)])?;
            }
            "vmm" => self.vmm = switch(plain)?,
            "peer" => self.peer = switch(plain)?,
            "ipc" => self.ipc = switch(plain)?,
            "sync_memops" => self.sync_memops = switch(plain)?,
            "alloc_offset" => self.alloc_offset = plain.parse().ok().filter(|offset| *offset < 1 << 20)?,
            "reuse_addresses" => self.reuse_addresses = switch(plain)?,
            "op_delay_us" => self.op_delay = micros(plain)?,
            "op_jitter_us" => self.op_jitter = micros(plain)?,
            "engine_delay_us" => self.engine_delay = micros(plain)?,
            "stall" => {
                self.stall = choose(
                    plain,
                    &[
                        ("off", Stall::Off),
                        ("on", Stall::All),
                        ("engine", Stall::Engine),
                        ("own", Stall::Own),
                        ("copies", Stall::Copies),
                    ],
                )?;
            }
            "shuffle" => self.shuffle = switch(plain)?,
            "poison" => self.poison = switch(plain)?,
            "tear_us" => self.tear = micros(plain)?,
            "op_error" => {
                parse_op_error(plain)?;
                self.op_error = value.to_owned();
            }
            "fail" => {
                parse_fail(plain)?;
                self.fail = value.to_owned();
            }
            "vanish" => {
                self.vanish = match plain {
                    "off" | "" => None,
                    "on" => Some(CUresult::CUDA_ERROR_UNKNOWN),
                    code => Some(names::code(code)?),
                };
            }
            "defect" => self.defect = Defect::named(plain)?,
            _ => return None,
        }
        Some(())
    }
}

fn choose<T: Copy>(value: &str, choices: &[(&str, T)]) -> Option<T> {
    choices
        .iter()
        .find(|(name, _)| *name == value)
        .map(|(_, choice)| *choice)
}

fn switch(value: &str) -> Option<bool> {
    choose(value, &[("on", true), ("off", false)])
}

fn micros(value: &str) -> Option<Duration> {
    value.parse().ok().map(Duration::from_micros)
}

/// `0000:17:00` or `0000:17:00.0`.
fn parse_pci(value: &str) -> Option<(u32, u32, u32)> {
    let mut fields = value.split([':', '.']).map(|field| u32::from_str_radix(field, 16).ok());
    Some((fields.next()??, fields.next()??, fields.next()??))
}

/// `number:value` with commas.
fn parse_attributes(value: &str) -> Option<Vec<(u32, i32)>> {
    let entry = |entry: &str| {
        let (number, value) = entry.trim().split_once(':')?;
        Some((number.parse().ok()?, value.parse().ok()?))
    };
    value.split(',').filter(|part| !part.is_empty()).map(entry).collect()
}

/// `call:code[:count[:skip]]`, several separated by commas; the code as a name without `CUDA_ERROR_`, or a number.
pub(crate) fn parse_fail(value: &str) -> Option<Vec<Failure>> {
    let entry = |entry: &str| {
        let mut fields = entry.trim().split(':');
        let call = fields.next().filter(|call| !call.is_empty())?.to_owned();
        let code = names::code(fields.next()?)?;
        let left = fields.next().map_or(Some(u64::MAX), |count| count.parse().ok())?;
        let skip = fields.next().map_or(Some(0), |count| count.parse().ok())?;
        Some(Failure { call, code, skip, left })
    };
    let value = value.split('#').next().unwrap_or(value).trim();
    value.split(',').filter(|part| !part.is_empty()).map(entry).collect()
}

/// `code[:count[:skip]]`: work that fails on the device.
pub(crate) fn parse_op_error(value: &str) -> Option<Option<Failure>> {
    let value = value.split('#').next().unwrap_or(value).trim();
    if value.is_empty() || value == "off" {
        return Some(None);
    }
    let mut all = parse_fail(&format!("op:{value}"))?;
    Some(all.pop())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_are_read_and_what_is_wrong_is_said() {
        let (lines, complaints) =
            parse("devices = 2\ngpu0.op_delay_us = 50 # slow\n\n# comment\ngpu0.speed = 1\nnonsense");
        assert_eq!(lines.len(), 2);
        assert_eq!(lines[1], ("gpu0".into(), "op_delay_us".into(), "50".into()));
        assert_eq!(complaints.len(), 2, "{complaints:?}");
    }

    #[test]
    fn a_line_for_the_device_wins_over_one_for_all() {
        let line = |device: &str, value: &str| (device.to_owned(), "compute".to_owned(), value.to_owned());
        let (settings, _) = Settings::resolve(1, &[line("gpu1", "7.5"), line("*", "8.0"), line("gpu0", "9.0")]);
        assert_eq!(settings.compute, (7, 5));
    }

    #[test]
    fn values_are_read() {
        let failures = parse_fail("cuMemAlloc_v2:OUT_OF_MEMORY:2:7, *:700").unwrap();
        assert_eq!((failures[0].left, failures[0].skip), (2, 7));
        assert_eq!(failures[0].code, CUresult::CUDA_ERROR_OUT_OF_MEMORY);
        assert_eq!(failures[1].code, CUresult::CUDA_ERROR_ILLEGAL_ADDRESS);
        assert_eq!(parse_fail("cuInit:NONSENSE"), None);
        assert_eq!(parse_pci("0001:8a:00.0"), Some((1, 0x8a, 0)));
        assert_eq!(parse_attributes("116:0,124:1"), Some(vec![(116, 0), (124, 1)]));
        assert_eq!(parse_op_error("off"), Some(None));
        assert_eq!(parse_op_error("ILLEGAL_ADDRESS:1").unwrap().unwrap().left, 1);
    }

    #[test]
    fn every_key_can_be_set() {
        let mut settings = Settings::default_of(0);
        for key in KEYS {
            let good = ["1", "on", "none", "0000:17:00.0", "9.0", "off", ""];
            assert!(good.iter().any(|value| settings.set(key, value)), "{key}");
        }
    }
}
