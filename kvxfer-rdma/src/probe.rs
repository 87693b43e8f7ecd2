//! What this machine has: the library, its devices and ports, each usable or refused with the reason and the remedy.
//!
//! The report decides what the transport uses, and is what `doctor` and `explain` print.

use std::fmt;
use std::path::PathBuf;

use crate::gid::{GidClass, show};
use crate::topology::NicPlace;
use crate::topology::sysfs::{nic_place, place_of};
use crate::verbs::{
    Context, DeviceAttributes, DeviceListing, DmabufSupport, ForkStatus, GidEntry, GidKind, Library, LinkLayer,
    PortAttributes, PortState, ProtectionDomain, TransportKind, VerbsError,
};

/// What to look at.
#[derive(Debug, Clone, Default)]
pub struct ProbeOptions {
    /// The library; `libibverbs.so.1` if not set.
    pub library: Option<PathBuf>,
    /// The devices (`mlx5_0`) and ports (`mlx5_0:1`) that may be used; empty: all.
    pub devices: Vec<String>,
    /// The only GID index to use, on every port.
    pub gid_index: Option<u32>,
}

/// What there is.
#[derive(Debug)]
#[non_exhaustive]
pub enum Availability {
    /// The library cannot be loaded.
    NoLibrary {
        /// Why.
        why: VerbsError,
    },
    /// The library is there, but no device.
    NoDevices {
        /// The library.
        library: Library,
        /// What the library said, if it could not even list them.
        why: Option<VerbsError>,
    },
    /// There are devices, usable or not.
    Devices {
        /// The library.
        library: Library,
        /// All devices, in the library's order.
        devices: Vec<DeviceReport>,
        /// Names of the allow-list that match no device or port.
        unmatched: Vec<String>,
    },
}

/// A device, and what may be done with it.
#[derive(Debug)]
pub struct DeviceReport {
    /// How the library lists it.
    pub listing: DeviceListing,
    /// Where it is.
    pub place: NicPlace,
    /// What was found when it was opened, or why it is not used.
    pub state: Result<DeviceFacts, Refusal>,
}

/// What an opened device said.
#[derive(Debug)]
pub struct DeviceFacts {
    /// The device, open.
    pub context: Context,
    /// Whether regions can be registered from dmabufs.
    pub dmabuf: DmabufSupport,
    /// Its ports.
    pub ports: Vec<PortReport>,
}

/// A port, and whether it can be used.
#[derive(Debug, Clone)]
pub struct PortReport {
    /// Its number, from 1.
    pub number: u8,
    /// What it said; `None` if it could not be asked.
    pub attributes: Option<PortAttributes>,
    /// Its addresses.
    pub gids: Vec<GidEntry>,
    /// Why it is not used; `None`: it is usable.
    pub refusal: Option<Refusal>,
}

/// Why a device or port is not used.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum Refusal {
    /// The allow-list does not name it.
    NotAllowed,
    /// It is an iWARP device.
    Iwarp,
    /// It speaks neither InfiniBand nor RoCE.
    OtherTransport,
    /// It cannot be opened or asked.
    Verbs(VerbsError),
    /// The port is not active.
    PortNotActive(PortState),
    /// The port is active, but has no address (Ethernet).
    NoGid,
    /// The port has addresses, but not at the configured index.
    NoGidAtIndex(u32),
    /// The port is active, but has no local identifier (InfiniBand).
    NoLid,
    /// None of its ports can be used.
    NoPorts,
}

impl Refusal {
    /// What to do about it; empty if nothing can be done.
    pub fn remedy(&self) -> String {
        match self {
            Refusal::NotAllowed => "add it to rdma.devices to use it".to_owned(),
            Refusal::Iwarp | Refusal::OtherTransport => {
                "use an InfiniBand or RoCE device, or the tcp transport".to_owned()
            }
            Refusal::Verbs(error) => error.remedy(),
            Refusal::PortNotActive(PortState::Down) => {
                "bring its link up (`rdma link`, `ip link set … up`), check cable and switch".to_owned()
            }
            Refusal::PortNotActive(_) => "wait for or start the subnet manager".to_owned(),
            Refusal::NoGid => "give the interface behind it an IP address (`rdma link` names it)".to_owned(),
            Refusal::NoGidAtIndex(_) => "unset rdma.gid_index, or set it to one that `doctor` lists".to_owned(),
            Refusal::NoLid => "start the subnet manager (opensm)".to_owned(),
            Refusal::NoPorts => String::new(),
        }
    }
}

impl fmt::Display for Refusal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Refusal::NotAllowed => f.write_str("not in the allow-list"),
            Refusal::Iwarp => f.write_str(
                "unsupported: iWARP has no writes with immediates and no connections but through the RDMA connection manager",
            ),
            Refusal::OtherTransport => f.write_str("unsupported: neither InfiniBand nor RoCE"),
            Refusal::Verbs(error) => error.fmt(f),
            Refusal::PortNotActive(PortState::Down) => f.write_str("the port is down"),
            Refusal::PortNotActive(state) => write!(f, "the port is not active ({state:?})"),
            Refusal::NoGid => f.write_str("active, but no GID: the interface has no address"),
            Refusal::NoGidAtIndex(index) => write!(f, "active, but no usable GID at the configured index {index}"),
            Refusal::NoLid => f.write_str("active, but no LID: no subnet manager has configured it"),
            Refusal::NoPorts => f.write_str("none of its ports can be used"),
        }
    }
}

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

/// Looks at the machine. Opens every device that may be used, and keeps those that can be open.
pub fn probe(options: &ProbeOptions) -> Availability {
    let library = match Library::load(options.library.as_deref()) {
        Ok(library) => library,
        Err(why) => return Availability::NoLibrary { why },
    };
    let listed = match library.devices() {
        Ok(listed) if listed.is_empty() => return Availability::NoDevices { library, why: None },
        Ok(listed) => listed,
        Err(why) => {
            return Availability::NoDevices {
                library,
                why: Some(why),
            };
        }
    };
    let devices: Vec<DeviceReport> = listed
        .into_iter()
        .map(|listing| look_at(&library, listing, options))
        .collect();
    let unmatched = options
        .devices
        .iter()
        .filter(|name| !devices.iter().any(|device| names(name, device)))
        .cloned()
        .collect();
    Availability::Devices {
        library,
        devices,
        unmatched,
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
        use kvxfer_core::{Error, ErrorKind};
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

fn look_at(library: &Library, listing: DeviceListing, options: &ProbeOptions) -> DeviceReport {
    let place = place_of(&listing.sysfs_path.join("device"));
    let state = open(library, &listing, options);
    DeviceReport {
        place: match &state {
            Ok(facts) => nic_place(&facts.context),
            Err(_) => place,
        },
        listing,
        state,
    }
}

fn open(library: &Library, listing: &DeviceListing, options: &ProbeOptions) -> Result<DeviceFacts, Refusal> {
    let name = &listing.name;
    if !options.devices.is_empty() && !options.devices.iter().any(|allowed| device_part(allowed) == name) {
        return Err(Refusal::NotAllowed);
    }
    match listing.transport {
        TransportKind::InfiniBand => {}
        TransportKind::Iwarp => return Err(Refusal::Iwarp),
        TransportKind::Unknown => return Err(Refusal::OtherTransport),
    }
    let context = Context::open(library, name).map_err(Refusal::Verbs)?;
    let ports: Vec<PortReport> = (1..=context.attributes().ports)
        .map(|number| port(&context, number, options))
        .collect();
    if ports.is_empty() {
        return Err(Refusal::NoPorts);
    }
    let dmabuf = match ProtectionDomain::new(&context) {
        Ok(domain) => domain.dmabuf_support(),
        Err(error) => DmabufSupport::Unknown(error.to_string()),
    };
    Ok(DeviceFacts { context, dmabuf, ports })
}

fn port(context: &Context, number: u8, options: &ProbeOptions) -> PortReport {
    let asked = context
        .port(number)
        .and_then(|attributes| Ok((attributes, context.gids(number)?)));
    match asked {
        Ok((attributes, gids)) => PortReport {
            number,
            refusal: judge(context.name(), number, &attributes, &gids, options),
            attributes: Some(attributes),
            gids,
        },
        Err(error) => PortReport {
            number,
            attributes: None,
            gids: Vec::new(),
            refusal: Some(Refusal::Verbs(error)),
        },
    }
}

/// Why a port cannot be used, if so.
fn judge(
    device: &str,
    number: u8,
    attributes: &PortAttributes,
    gids: &[GidEntry],
    options: &ProbeOptions,
) -> Option<Refusal> {
    let named = |allowed: &String| allowed == device || *allowed == format!("{device}:{number}");
    if !options.devices.is_empty() && !options.devices.iter().any(named) {
        return Some(Refusal::NotAllowed);
    }
    if attributes.state != PortState::Active {
        return Some(Refusal::PortNotActive(attributes.state));
    }
    let ethernet = attributes.link_layer == LinkLayer::Ethernet;
    let usable = |entry: &&GidEntry| ethernet != (entry.kind == GidKind::Ib);
    match (ethernet, options.gid_index) {
        (_, Some(index)) if !gids.iter().filter(usable).any(|entry| entry.index == index) => {
            Some(Refusal::NoGidAtIndex(index))
        }
        (true, None) if gids.iter().filter(usable).count() == 0 => Some(Refusal::NoGid),
        (false, _) if attributes.lid == 0 => Some(Refusal::NoLid),
        _ => None,
    }
}

fn device_part(name: &str) -> &str {
    name.split_once(':').map_or(name, |(device, _)| device)
}

/// Whether a name of the allow-list means this device, or one of its ports.
fn names(name: &str, device: &DeviceReport) -> bool {
    let Some((wanted, port)) = name.split_once(':') else {
        return name == device.listing.name;
    };
    let ports = device.state.as_ref().map_or(&[][..], |facts| facts.ports.as_slice());
    wanted == device.listing.name
        && (device.state.is_err() || ports.iter().any(|report| report.number.to_string() == port))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::verbs::Mtu;

    fn attributes(layer: LinkLayer, state: PortState, lid: u16) -> PortAttributes {
        PortAttributes {
            state,
            link_layer: layer,
            active_mtu: Mtu::Bytes4096,
            max_mtu: Mtu::Bytes4096,
            max_message_bytes: 1 << 30,
            lid,
            gid_table_length: 8,
            pkey_table_length: 1,
            rate_mbps: 100_000,
        }
    }

    fn gid(index: u32, kind: GidKind) -> GidEntry {
        GidEntry {
            index,
            gid: [1; 16],
            kind,
            interface_index: 0,
        }
    }

    fn judged(
        attributes: &PortAttributes,
        gids: &[GidEntry],
        devices: &[&str],
        gid_index: Option<u32>,
    ) -> Option<Refusal> {
        let options = ProbeOptions {
            devices: devices.iter().map(|name| (*name).to_owned()).collect(),
            gid_index,
            ..ProbeOptions::default()
        };
        judge("mlx5_0", 2, attributes, gids, &options)
    }

    #[test]
    fn a_port_is_usable_or_refused_with_the_reason() {
        let roce = attributes(LinkLayer::Ethernet, PortState::Active, 0);
        let ib = attributes(LinkLayer::InfiniBand, PortState::Active, 5);
        let (v2, ib_gid) = (gid(1, GidKind::RoceV2), gid(0, GidKind::Ib));
        assert_eq!(judged(&roce, &[v2], &[], None), None);
        assert_eq!(judged(&roce, &[], &[], None), Some(Refusal::NoGid));
        assert_eq!(judged(&roce, &[ib_gid], &[], None), Some(Refusal::NoGid));
        assert_eq!(judged(&roce, &[v2], &[], Some(1)), None);
        assert_eq!(judged(&roce, &[v2], &[], Some(3)), Some(Refusal::NoGidAtIndex(3)));
        assert_eq!(judged(&ib, &[ib_gid], &[], None), None);
        let no_lid = attributes(LinkLayer::InfiniBand, PortState::Active, 0);
        assert_eq!(judged(&no_lid, &[ib_gid], &[], None), Some(Refusal::NoLid));
        let down = attributes(LinkLayer::Ethernet, PortState::Down, 0);
        assert_eq!(
            judged(&down, &[v2], &[], None),
            Some(Refusal::PortNotActive(PortState::Down))
        );
    }

    #[test]
    fn the_allow_list_names_devices_and_ports() {
        let roce = attributes(LinkLayer::Ethernet, PortState::Active, 0);
        let gids = [gid(1, GidKind::RoceV2)];
        assert_eq!(judged(&roce, &gids, &["mlx5_0"], None), None);
        assert_eq!(judged(&roce, &gids, &["mlx5_1", "mlx5_0:2"], None), None);
        assert_eq!(judged(&roce, &gids, &["mlx5_0:1"], None), Some(Refusal::NotAllowed));
    }

    #[test]
    fn every_refusal_says_what_to_do() {
        let refusals = [
            Refusal::NotAllowed,
            Refusal::Iwarp,
            Refusal::OtherTransport,
            Refusal::PortNotActive(PortState::Down),
            Refusal::PortNotActive(PortState::Initialising),
            Refusal::NoGid,
            Refusal::NoGidAtIndex(3),
            Refusal::NoLid,
        ];
        for refusal in refusals {
            assert!(
                !refusal.to_string().is_empty() && !refusal.remedy().is_empty(),
                "{refusal:?}"
            );
        }
    }

    #[test]
    fn an_absent_library_is_one_line_with_a_remedy() {
        let options = ProbeOptions {
            library: Some("/nonexistent/libibverbs.so.1".into()),
            ..ProbeOptions::default()
        };
        let found = probe(&options);
        assert!(matches!(found, Availability::NoLibrary { .. }));
        let lines = found.lines();
        assert_eq!(lines.len(), 1);
        assert!(lines[0].remedy.contains("rdma-core"), "{found}");
        let error = found.refusal().unwrap();
        assert_eq!(error.kind(), kvxfer_core::ErrorKind::Unsupported);
    }
}
