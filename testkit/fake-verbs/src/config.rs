//! Reading `fabric.conf`: which keys there are, what they mean by default, and what a device makes of them.

use std::net::Ipv6Addr;
use std::time::Duration;

use kvxfer_rdma::sys;

/// Every key, so that a misspelt one is refused where it is set.
pub(crate) const KEYS: &[&str] = &[
    "devices",
    "mode",
    "link_layer",
    "transport",
    "port_state",
    "gids",
    "ifindex",
    "active_mtu",
    "lid",
    "max_qp",
    "max_qp_wr",
    "max_sge",
    "max_sge_rd",
    "max_cqe",
    "max_mr_size",
    "max_qp_rd_atom",
    "max_msg_sz",
    "bandwidth_bytes_per_s",
    "latency_us",
    "order",
    "completions",
    "completion_delay_us",
    "late_placement_us",
    "flush_scope",
    "network_hold",
    "drop_percent",
    "fail",
    "complete_with",
    "event",
    "dmabuf",
    "peer_memory",
    "memlock_bytes",
    "retry_exceeded",
    "min_timeout_us",
    "pci_path",
];

/// One line of `fabric.conf`: device name or `*`, key, value.
pub(crate) type Line = (String, String, String);

/// Reads the text of `fabric.conf`. Lines that are no assignments are given back as complaints.
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

const GENERATION: &str = "# generation ";

/// The configuration file for these lines. The generation lets writers see who has read it.
pub(crate) fn write(lines: &[Line], generation: u64) -> String {
    let head = format!("{GENERATION}{generation}\n");
    lines.iter().fold(head, |text, (device, key, value)| {
        text + &format!("{device}.{key} = {value}\n")
    })
}

/// The generation of a configuration file; 0 if it says none.
pub(crate) fn generation(text: &str) -> u64 {
    text.lines()
        .find_map(|line| line.strip_prefix(GENERATION)?.trim().parse().ok())
        .unwrap_or(0)
}

/// Whether there is such a key, and it can have such a value.
pub(crate) fn is_valid(key: &str, value: &str) -> bool {
    KEYS.contains(&key) && Settings::default_of(0).set(key, value)
}

/// How post_send behaves.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Mode {
    /// The device thread moves the bytes.
    Normal,
    /// Everything completes inside post_send and nothing is copied.
    Instant,
}

/// One GID table entry.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Gid {
    pub(crate) raw: [u8; 16],
    pub(crate) kind: u32,
}

/// What a device makes of the configuration.
#[derive(Clone, Debug)]
pub(crate) struct Settings {
    pub(crate) mode: Mode,
    pub(crate) link_layer: u8,
    pub(crate) iwarp: bool,
    pub(crate) port_state: u32,
    pub(crate) gids: Vec<Gid>,
    pub(crate) ifindex: u32,
    pub(crate) active_mtu: u32,
    pub(crate) lid: u16,
    pub(crate) max_qp: u32,
    pub(crate) max_qp_wr: u32,
    pub(crate) max_sge: u32,
    pub(crate) max_sge_rd: u32,
    pub(crate) max_cqe: u32,
    pub(crate) max_mr_size: u64,
    pub(crate) max_qp_rd_atom: u32,
    pub(crate) max_msg_sz: u32,
    pub(crate) bandwidth: u64,
    pub(crate) latency: Duration,
    pub(crate) shuffled: bool,
    pub(crate) withhold: bool,
    pub(crate) completion_delay: Duration,
    pub(crate) late: Duration,
    pub(crate) flush_region_only: bool,
    pub(crate) hold: bool,
    pub(crate) drop_percent: u32,
    pub(crate) fail: String,
    pub(crate) complete_with: String,
    pub(crate) event: String,
    pub(crate) dmabuf: bool,
    pub(crate) peer_memory: bool,
    pub(crate) memlock: u64,
    pub(crate) retry_exceeded: bool,
    pub(crate) min_timeout: Duration,
    pub(crate) pci_path: String,
}

impl Settings {
    /// The settings of device `name`, the `index`th. Later lines win over earlier ones; values that cannot be read
    /// are complaints and leave the default.
    pub(crate) fn resolve(name: &str, index: u32, lines: &[Line]) -> (Settings, Vec<String>) {
        let mut settings = Settings::default_of(index);
        let mut complaints = Vec::new();
        // `*` first, so that a line for the device wins wherever it stands.
        for own in [false, true] {
            for (device, key, value) in lines {
                let applies = if own { device == name } else { device == "*" };
                if applies && !settings.set(key, value) {
                    complaints.push(format!("{device}.{key}: cannot read {value:?}"));
                }
            }
        }
        (settings, complaints)
    }

    fn default_of(index: u32) -> Settings {
        let number = u8::try_from(index + 1).unwrap_or(u8::MAX);
        Settings {
            mode: Mode::Normal,
            link_layer: link_layer::ETHERNET,
            iwarp: false,
            port_state: sys::IBV_PORT_ACTIVE,
            // As an Ethernet device has them: link-local first, then the IPv4 address, RoCE version 2.
            gids: vec![
                Gid {
                    raw: [0xfe, 0x80, 0, 0, 0, 0, 0, 0, 2, 0, 0, 0xff, 0xfe, 0, 0, number],
                    kind: sys::IBV_GID_TYPE_ROCE_V2,
                },
                Gid {
                    raw: [0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0xff, 0xff, 10, 99, 0, number],
                    kind: sys::IBV_GID_TYPE_ROCE_V2,
                },
            ],
            ifindex: 0,
            active_mtu: sys::IBV_MTU_4096,
            lid: 0,
            max_qp: 4096,
            max_qp_wr: 16_384,
            max_sge: 32,
            max_sge_rd: 32,
            max_cqe: 4_194_303,
            max_mr_size: u64::MAX,
            max_qp_rd_atom: 16,
            max_msg_sz: 1 << 30,
            bandwidth: 0,
            latency: Duration::ZERO,
            shuffled: false,
            withhold: false,
            completion_delay: Duration::ZERO,
            late: Duration::ZERO,
            flush_region_only: false,
            hold: false,
            drop_percent: 0,
            fail: String::new(),
            complete_with: String::new(),
            event: String::new(),
            dmabuf: false,
            peer_memory: false,
            memlock: u64::MAX,
            retry_exceeded: true,
            min_timeout: Duration::from_millis(50),
            pci_path: String::new(),
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
            "devices" => drop(plain.parse::<u32>().ok()?),
            "mode" => self.mode = choose(plain, &[("normal", Mode::Normal), ("instant", Mode::Instant)])?,
            "link_layer" => {
                self.link_layer = choose(
                    plain,
                    &[
                        ("ethernet", link_layer::ETHERNET),
                        ("infiniband", link_layer::INFINIBAND),
                    ],
                )?;
            }
            "transport" => self.iwarp = choose(plain, &[("ib", false), ("iwarp", true)])?,
            "port_state" => {
                self.port_state = choose(
                    plain,
                    &[
                        ("active", sys::IBV_PORT_ACTIVE),
                        ("down", sys::IBV_PORT_DOWN),
                        ("init", sys::IBV_PORT_INIT),
                        ("armed", sys::IBV_PORT_ARMED),
                    ],
                )?;
            }
            "gids" => self.gids = parse_gids(plain)?,
            "ifindex" => self.ifindex = plain.parse().ok()?,
            "active_mtu" => {
                self.active_mtu = choose(
                    plain,
                    &[
                        ("256", sys::IBV_MTU_256),
                        ("512", sys::IBV_MTU_512),
                        ("1024", sys::IBV_MTU_1024),
                        ("2048", sys::IBV_MTU_2048),
                        ("4096", sys::IBV_MTU_4096),
                    ],
                )?;
            }
            "lid" => self.lid = plain.parse().ok()?,
            "max_qp" => self.max_qp = plain.parse().ok()?,
            "max_qp_wr" => self.max_qp_wr = plain.parse().ok()?,
            "max_sge" => self.max_sge = plain.parse().ok()?,
            "max_sge_rd" => self.max_sge_rd = plain.parse().ok()?,
            "max_cqe" => self.max_cqe = plain.parse().ok()?,
            "max_mr_size" => self.max_mr_size = plain.parse().ok()?,
            "max_qp_rd_atom" => self.max_qp_rd_atom = plain.parse().ok()?,
            "max_msg_sz" => self.max_msg_sz = plain.parse().ok()?,
            "bandwidth_bytes_per_s" => self.bandwidth = plain.parse().ok()?,
            "latency_us" => self.latency = micros(plain)?,
            "order" => self.shuffled = choose(plain, &[("in", false), ("shuffled", true)])?,
            "completions" => self.withhold = choose(plain, &[("deliver", false), ("withhold", true)])?,
            "completion_delay_us" => self.completion_delay = micros(plain)?,
            "late_placement_us" => self.late = micros(plain)?,
            "flush_scope" => self.flush_region_only = choose(plain, &[("device", false), ("region", true)])?,
            "network_hold" => self.hold = switch(plain)?,
            "drop_percent" => self.drop_percent = plain.parse().ok().filter(|percent| *percent <= 100)?,
            "fail" => {
                parse_fail(plain)?;
                self.fail = value.to_owned();
            }
            "complete_with" => {
                parse_complete_with(plain)?;
                self.complete_with = value.to_owned();
            }
            "event" => {
                parse_event(plain)?;
                self.event = value.to_owned();
            }
            "dmabuf" => self.dmabuf = switch(plain)?,
            "peer_memory" => self.peer_memory = switch(plain)?,
            "memlock_bytes" => self.memlock = plain.parse().ok()?,
            "retry_exceeded" => self.retry_exceeded = switch(plain)?,
            "min_timeout_us" => self.min_timeout = micros(plain)?,
            "pci_path" => self.pci_path = plain.to_owned(),
            _ => return None,
        }
        Some(())
    }
}

/// Link layers in the type that the port attributes use.
pub(crate) mod link_layer {
    /// InfiniBand.
    pub(crate) const INFINIBAND: u8 = kvxfer_rdma::sys::IBV_LINK_LAYER_INFINIBAND as u8;
    /// Ethernet: RoCE.
    pub(crate) const ETHERNET: u8 = kvxfer_rdma::sys::IBV_LINK_LAYER_ETHERNET as u8;
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

/// `none`, or entries like `fe80::1/v2, ::ffff:10.0.0.1/v1, empty, fe80::2/ib`, by index.
fn parse_gids(value: &str) -> Option<Vec<Gid>> {
    if value == "none" || value.is_empty() {
        return Some(Vec::new());
    }
    value
        .split(',')
        .map(|entry| {
            let entry = entry.trim();
            if entry == "empty" {
                return Some(Gid {
                    raw: [0; 16],
                    kind: sys::IBV_GID_TYPE_ROCE_V2,
                });
            }
            let (address, kind) = entry.split_once('/').unwrap_or((entry, "v2"));
            Some(Gid {
                raw: address.parse::<Ipv6Addr>().ok()?.octets(),
                kind: choose(
                    kind,
                    &[
                        ("v2", sys::IBV_GID_TYPE_ROCE_V2),
                        ("v1", sys::IBV_GID_TYPE_ROCE_V1),
                        ("ib", sys::IBV_GID_TYPE_IB),
                    ],
                )?,
            })
        })
        .collect()
}

/// A verb that is to fail.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Failure {
    pub(crate) verb: String,
    pub(crate) errno: i32,
    /// How many calls go well before.
    pub(crate) skip: u64,
    /// How often yet.
    pub(crate) left: u64,
}

/// `verb:errno[:count[:skip]]`, several separated by commas; errno as a name or a number.
pub(crate) fn parse_fail(value: &str) -> Option<Vec<Failure>> {
    if value.is_empty() {
        return Some(Vec::new());
    }
    value
        .split(',')
        .map(|entry| {
            let mut fields = entry.trim().split(':');
            let verb = fields.next().filter(|verb| !verb.is_empty())?.to_owned();
            let errno = parse_errno(fields.next()?)?;
            let left = fields.next().map_or(Some(u64::MAX), |count| count.parse().ok())?;
            let skip = fields.next().map_or(Some(0), |count| count.parse().ok())?;
            Some(Failure {
                verb,
                errno,
                skip,
                left,
            })
        })
        .collect()
}

fn parse_errno(value: &str) -> Option<i32> {
    value.parse().ok().or_else(|| {
        choose(
            value,
            &[
                ("EPERM", libc::EPERM),
                ("ENOENT", libc::ENOENT),
                ("EIO", libc::EIO),
                ("EAGAIN", libc::EAGAIN),
                ("ENOMEM", libc::ENOMEM),
                ("EACCES", libc::EACCES),
                ("EFAULT", libc::EFAULT),
                ("EBUSY", libc::EBUSY),
                ("ENODEV", libc::ENODEV),
                ("EINVAL", libc::EINVAL),
                ("ENOSPC", libc::ENOSPC),
                ("ENOSYS", libc::ENOSYS),
                ("EOPNOTSUPP", libc::EOPNOTSUPP),
                ("ETIMEDOUT", libc::ETIMEDOUT),
                ("ENETUNREACH", libc::ENETUNREACH),
            ],
        )
    })
}

/// Sends that are to complete with an error.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct WrongCompletion {
    pub(crate) status: u32,
    /// How often yet.
    pub(crate) left: u64,
    /// The request is carried out at the peer and only then reported as failed.
    pub(crate) carried_out: bool,
}

/// `status[:count[:after]]`, the status as in `IBV_WC_...` or a number.
pub(crate) fn parse_complete_with(value: &str) -> Option<Option<WrongCompletion>> {
    if value.is_empty() || value == "off" {
        return Some(None);
    }
    let mut fields = value.split(':').map(str::trim);
    let status = fields.next()?;
    let status = status.parse().ok().or_else(|| choose(status, STATUSES))?;
    let left = fields.next().map_or(Some(u64::MAX), |count| count.parse().ok())?;
    let carried_out = match fields.next() {
        None => false,
        Some("after") => true,
        Some(_) => return None,
    };
    Some(Some(WrongCompletion {
        status,
        left,
        carried_out,
    }))
}

const STATUSES: &[(&str, u32)] = &[
    ("LOC_LEN_ERR", sys::IBV_WC_LOC_LEN_ERR),
    ("LOC_QP_OP_ERR", sys::IBV_WC_LOC_QP_OP_ERR),
    ("LOC_PROT_ERR", sys::IBV_WC_LOC_PROT_ERR),
    ("WR_FLUSH_ERR", sys::IBV_WC_WR_FLUSH_ERR),
    ("BAD_RESP_ERR", sys::IBV_WC_BAD_RESP_ERR),
    ("REM_INV_REQ_ERR", sys::IBV_WC_REM_INV_REQ_ERR),
    ("REM_ACCESS_ERR", sys::IBV_WC_REM_ACCESS_ERR),
    ("REM_OP_ERR", sys::IBV_WC_REM_OP_ERR),
    ("RETRY_EXC_ERR", sys::IBV_WC_RETRY_EXC_ERR),
    ("RNR_RETRY_EXC_ERR", sys::IBV_WC_RNR_RETRY_EXC_ERR),
    ("FATAL_ERR", sys::IBV_WC_FATAL_ERR),
    ("RESP_TIMEOUT_ERR", sys::IBV_WC_RESP_TIMEOUT_ERR),
    ("GENERAL_ERR", sys::IBV_WC_GENERAL_ERR),
];

/// An event to raise: its type, and the port or queue pair number it names.
pub(crate) fn parse_event(value: &str) -> Option<Option<(u32, u32)>> {
    if value.is_empty() || value == "off" {
        return Some(None);
    }
    let (name, argument) = value.split_once(':').unwrap_or((value, "1"));
    let kind = choose(
        name,
        &[
            ("port_down", sys::IBV_EVENT_PORT_ERR),
            ("port_active", sys::IBV_EVENT_PORT_ACTIVE),
            ("gid_change", sys::IBV_EVENT_GID_CHANGE),
            ("lid_change", sys::IBV_EVENT_LID_CHANGE),
            ("pkey_change", sys::IBV_EVENT_PKEY_CHANGE),
            ("sm_change", sys::IBV_EVENT_SM_CHANGE),
            ("client_reregister", sys::IBV_EVENT_CLIENT_REREGISTER),
            ("device_fatal", sys::IBV_EVENT_DEVICE_FATAL),
            ("qp_fatal", sys::IBV_EVENT_QP_FATAL),
        ],
    )?;
    Some(Some((kind, argument.parse().ok()?)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_are_read_and_what_is_wrong_is_said() {
        let (lines, complaints) =
            parse("devices = 2\nfake0.latency_us = 50 # slow\n\n# comment\nfake0.speed = 1\nnonsense");
        assert_eq!(lines.len(), 2);
        assert_eq!(lines[1], ("fake0".into(), "latency_us".into(), "50".into()));
        assert_eq!(complaints.len(), 2, "{complaints:?}");
    }

    #[test]
    fn a_line_for_the_device_wins_over_one_for_all() {
        let line = |device: &str, value: &str| (device.to_owned(), "lid".to_owned(), value.to_owned());
        let (settings, _) = Settings::resolve("fake1", 1, &[line("fake1", "7"), line("*", "3"), line("fake0", "9")]);
        assert_eq!(settings.lid, 7);
    }

    #[test]
    fn values_are_read() {
        assert_eq!(parse_gids("none").unwrap(), vec![]);
        let gids = parse_gids("fe80::1/v1, empty, ::ffff:10.0.0.1").unwrap();
        assert_eq!(
            (gids[0].kind, gids[2].kind),
            (sys::IBV_GID_TYPE_ROCE_V1, sys::IBV_GID_TYPE_ROCE_V2)
        );
        assert_eq!(gids[1].raw, [0; 16]);
        assert_eq!(
            parse_gids("10.0.0.1"),
            None,
            "an IPv4 address is written as a mapped one"
        );
        let failures = parse_fail("reg_mr:ENOMEM:2, open_device:13").unwrap();
        assert_eq!((failures[0].errno, failures[0].left), (libc::ENOMEM, 2));
        assert_eq!((failures[1].errno, failures[1].left), (13, u64::MAX));
        assert_eq!(parse_event("port_down:1").unwrap(), Some((sys::IBV_EVENT_PORT_ERR, 1)));
        assert_eq!(parse_event("explode"), None);
        let wrong = parse_complete_with("RETRY_EXC_ERR:1:after").unwrap().unwrap();
        assert_eq!(
            (wrong.status, wrong.left, wrong.carried_out),
            (sys::IBV_WC_RETRY_EXC_ERR, 1, true)
        );
    }

    #[test]
    fn every_key_can_be_set() {
        let mut settings = Settings::default_of(0);
        for key in KEYS {
            let good = [
                "1", "on", "in", "normal", "ethernet", "ib", "active", "1024", "deliver", "device", "none", "",
            ];
            assert!(good.iter().any(|value| settings.set(key, value)), "{key}");
        }
    }
}
