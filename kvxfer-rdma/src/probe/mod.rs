//! What this machine has: the library, its devices and ports, each usable or refused with the reason and the remedy.
//!
//! The report decides what the transport uses, and is what `doctor` and `explain` print.

mod report;

use std::fmt;
use std::path::PathBuf;

pub use report::{Level, Line, fork_safety};

use crate::topology::NicPlace;
use crate::topology::sysfs::{nic_place, place_of};
use crate::verbs::{
    Context, DeviceListing, DmabufSupport, GidEntry, GidKind, Library, LinkLayer, PortAttributes, PortState,
    ProtectionDomain, TransportKind, VerbsError,
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
