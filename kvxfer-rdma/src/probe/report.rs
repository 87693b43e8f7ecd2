//! The report of a probe, line by line: what `doctor` and `explain` print.

use std::fmt;

use kvxfer_core::{Error, ErrorKind};

use super::{Availability, DeviceFacts, DeviceReport, PortReport};
use crate::gid::{GidClass, show};
use crate::topology::NicPlace;
use crate::verbs::{DeviceAttributes, ForkStatus, Library, LinkLayer, PortAttributes};

/// How a line of the report is to be read.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Level {
    /// As it should be.
    Good,
    /// For information.
    Note,
    /// Works, but something is to be said.
    Warning,
    /// Not used.
    Refused,
}

/// A line of the report.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Line {
    /// How it is to be read.
    pub level: Level,
    /// How far it is indented: 0 for the library, 1 for devices, 2 for ports, 3 for addresses.
    pub depth: usize,
    /// What was found.
    pub text: String,
    /// What to do; empty if nothing.
    pub remedy: String,
}

impl Line {
    fn new(level: Level, depth: usize, text: impl Into<String>) -> Line {
        Line {
            level,
            depth,
            text: text.into(),
            remedy: String::new(),
        }
    }

    fn remedy(mut self, remedy: impl Into<String>) -> Line {
        self.remedy = remedy.into();
        self
    }
}

impl fmt::Display for Line {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:indent$}{}", "", self.text, indent = self.depth * 2)?;
        if !self.remedy.is_empty() {
            write!(f, "; {}", self.remedy)?;
        }
        Ok(())
    }
}

/// What a fork does to registered memory, as a line of `doctor`.
pub fn fork_safety(library: &Library) -> Line {
    match library.fork_status() {
        ForkStatus::Unneeded => Line::new(
            Level::Good,
            0,
            "fork: safe, the kernel copies registered pages for children",
        ),
        ForkStatus::Enabled => Line::new(
            Level::Good,
            0,
            "fork: safe, ibv_fork_init was called (children do not see registered memory)",
        ),
        ForkStatus::Disabled => Line::new(
            Level::Warning,
            0,
            "fork: not safe, a fork while memory is registered can corrupt transfers",
        )
        .remedy("use kernel 5.12 or later, set RDMAV_FORK_SAFE=1 before the process starts, or do not fork"),
        ForkStatus::Unknown => Line::new(Level::Note, 0, "fork: the library does not say whether it is safe")
            .remedy("do not fork while memory is registered, or use rdma-core 35 or later"),
    }
}

impl Availability {
    /// Usable ports with their devices, in order.
    pub fn usable(&self) -> impl Iterator<Item = (&DeviceReport, &DeviceFacts, &PortReport)> {
        let devices = match self {
            Availability::Devices { devices, .. } => devices.as_slice(),
            _ => &[],
        };
        devices.iter().flat_map(|device| {
            let facts = device.state.as_ref().ok();
            facts.into_iter().flat_map(move |facts| {
                let usable = facts.ports.iter().filter(|port| port.refusal.is_none());
                usable.map(move |port| (device, facts, port))
            })
        })
    }

    /// Why nothing can be used, as an error for whoever named this transport; `None` if something can.
    pub fn refusal(&self) -> Option<kvxfer_core::Error> {
        match self {
            Availability::NoLibrary { why } => Some(why.clone().into()),
            Availability::NoDevices { why: Some(why), .. } => Some(why.clone().into()),
            Availability::NoDevices { why: None, .. } => Some(
                Error::new(ErrorKind::Unsupported, "no RDMA device")
                    .because("the verbs library lists none")
                    .remedy(NO_DEVICE_REMEDY),
            ),
            Availability::Devices { .. } if self.usable().next().is_some() => None,
            Availability::Devices { .. } => {
                let bad = self.lines().into_iter().filter(|line| line.level == Level::Refused);
                let reasons: Vec<String> = bad.map(|line| line.to_string().trim().to_owned()).collect();
                Some(
                    Error::new(ErrorKind::Unsupported, "no usable RDMA port")
                        .because(reasons.join(" | "))
                        .remedy("see `kvxfer-bench doctor`"),
                )
            }
        }
    }

    /// The report, line by line.
    pub fn lines(&self) -> Vec<Line> {
        match self {
            Availability::NoLibrary { why } => {
                vec![Line::new(Level::Refused, 0, format!("library: {why}")).remedy(why.remedy())]
            }
            Availability::NoDevices { library, why } => {
                let line = match why {
                    Some(why) => Line::new(Level::Refused, 0, why.to_string()).remedy(why.remedy()),
                    None => Line::new(Level::Refused, 0, "no RDMA device").remedy(NO_DEVICE_REMEDY),
                };
                vec![library_line(library), line]
            }
            Availability::Devices {
                library,
                devices,
                unmatched,
            } => {
                let mut lines = vec![library_line(library), fork_safety(library)];
                lines.extend(devices.iter().flat_map(DeviceReport::lines));
                lines.extend(unmatched.iter().map(|name| {
                    Line::new(
                        Level::Refused,
                        0,
                        format!("{name}: in rdma.devices, but there is no such device or port"),
                    )
                    .remedy("correct the name, or make the device visible")
                }));
                lines
            }
        }
    }
}

impl fmt::Display for Availability {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.lines().iter().try_for_each(|line| writeln!(f, "{line}"))
    }
}

const NO_DEVICE_REMEDY: &str =
    "load the device's driver (`rdma link` lists devices); in a container, pass /dev/infiniband";

fn library_line(library: &Library) -> Line {
    let dmabuf = match library.knows_dmabuf() {
        true => "",
        false => " (does not know dmabufs)",
    };
    Line::new(Level::Good, 0, format!("library: {}{dmabuf}", library.path().display()))
}

impl DeviceReport {
    fn lines(&self) -> Vec<Line> {
        let name = &self.listing.name;
        let facts = match &self.state {
            Ok(facts) => facts,
            Err(refusal) => {
                return vec![Line::new(Level::Refused, 1, format!("{name}: {refusal}")).remedy(refusal.remedy())];
            }
        };
        let mut lines = vec![Line::new(
            Level::Good,
            1,
            format!(
                "{name}: {}, {}, {}",
                describe_device(facts.context.attributes()),
                describe_place(&self.place),
                facts.dmabuf
            ),
        )];
        lines.extend(facts.ports.iter().flat_map(|port| port.lines(name)));
        lines
    }
}

impl PortReport {
    fn lines(&self, device: &str) -> Vec<Line> {
        let number = self.number;
        let what = self.attributes.as_ref().map(describe_port).unwrap_or_default();
        let head = match &self.refusal {
            None => Line::new(Level::Good, 2, format!("{device}:{number}: usable{what}")),
            Some(refusal) => {
                Line::new(Level::Refused, 2, format!("{device}:{number}: {refusal}{what}")).remedy(refusal.remedy())
            }
        };
        let mut lines = vec![head];
        lines.extend(self.gids.iter().map(|entry| {
            let class = GidClass::of(entry.gid, entry.kind).name();
            Line::new(
                Level::Note,
                3,
                format!("GID {}: {} ({class})", entry.index, show(entry.gid)),
            )
        }));
        lines
    }
}

fn describe_device(attributes: &DeviceAttributes) -> String {
    let firmware = match attributes.firmware.as_str() {
        "" => "no firmware version".to_owned(),
        version => format!("firmware {version}"),
    };
    format!(
        "{firmware}, registrations up to {}, {} work requests, {} segments ({} of a read), {} reads outstanding",
        crate::text::bytes(attributes.max_mr_size),
        attributes.max_qp_wr,
        attributes.max_sge,
        attributes.max_sge_rd,
        attributes.max_qp_rd_atom.min(attributes.max_qp_init_rd_atom)
    )
}

fn describe_place(place: &NicPlace) -> String {
    let node = place
        .node
        .map_or("NUMA node unknown".to_owned(), |node| format!("NUMA node {node}"));
    match place.pci.as_ref().and_then(|path| path.functions.last()) {
        Some(address) => format!("PCI {address}, {node}"),
        None => format!("not on PCI, {node}"),
    }
}

fn describe_port(attributes: &PortAttributes) -> String {
    let layer = match attributes.link_layer {
        LinkLayer::Ethernet => "RoCE".to_owned(),
        LinkLayer::InfiniBand | LinkLayer::Unspecified => format!("InfiniBand, LID {}", attributes.lid),
    };
    let rate = match attributes.rate_mbps {
        0 => String::new(),
        rate => format!(", {} Gbit/s", rate as f64 / 1000.0),
    };
    format!(" ({layer}, MTU {}{rate})", attributes.active_mtu)
}
