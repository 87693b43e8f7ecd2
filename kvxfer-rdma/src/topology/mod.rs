//! How far memory is from network ports, which ports to use for it, and which port of ours goes with which of the
//! peer's. Pure: what sysfs says comes in as values ([`sysfs`] reads them), and "unknown" is one of them.

pub mod sysfs;

mod pairing;
mod subnet;

use std::fmt;

pub use pairing::{Pair, Pairing, Pairs, RailPort, Unpaired, pair};
pub use subnet::{Subnet, interface_subnets, subnet_of};

/// A PCI function: `0000:17:00.0`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct PciAddress {
    /// Domain.
    pub domain: u32,
    /// Bus.
    pub bus: u8,
    /// Device on the bus.
    pub device: u8,
    /// Function of the device.
    pub function: u8,
}

impl PciAddress {
    /// Reads `0000:17:00.0`, or `17:00.0` of domain 0; letters of either case.
    pub fn parse(text: &str) -> Option<PciAddress> {
        let hex = |text: &str, digits: usize| {
            let plain = (1..=digits).contains(&text.len()) && text.bytes().all(|byte| byte.is_ascii_hexdigit());
            plain.then(|| u32::from_str_radix(text, 16).ok()).flatten()
        };
        let (rest, function) = text.rsplit_once('.')?;
        let mut parts = rest.rsplit(':');
        let (device, bus, domain) = (parts.next()?, parts.next()?, parts.next());
        if parts.next().is_some() {
            return None;
        }
        Some(PciAddress {
            domain: domain.map_or(Some(0), |domain| hex(domain, 8))?,
            bus: hex(bus, 2)? as u8,
            device: hex(device, 2).filter(|&device| device < 32)? as u8,
            function: hex(function, 1).filter(|&function| function < 8)? as u8,
        })
    }
}

impl fmt::Display for PciAddress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "{:04x}:{:02x}:{:02x}.{:x}",
            self.domain, self.bus, self.device, self.function
        )
    }
}

/// Where a device hangs in the PCI tree: the host bridge, and the functions from the root port down to the device.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct PciPath {
    /// The host bridge, `pci0000:16`.
    pub root: String,
    /// From the root port to the device itself, which is the last.
    pub functions: Vec<PciAddress>,
}

impl PciPath {
    /// From the target of a sysfs link: `/sys/devices/pci0000:16/0000:16:01.0/0000:17:00.0`. `None` if the path is
    /// not that of a PCI device (a virtual one, for example). What hangs below the PCI function is left out.
    pub fn parse(path: &str) -> Option<PciPath> {
        let mut parts = path.split('/').skip_while(|part| !part.starts_with("pci"));
        let root = parts.next()?.to_owned();
        let functions: Vec<PciAddress> = parts.map_while(PciAddress::parse).collect();
        (!functions.is_empty()).then_some(PciPath { root, functions })
    }
}

/// Where a network device is. What is not known is `None`.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct NicPlace {
    /// Its NUMA node.
    pub node: Option<u32>,
    /// Its place in the PCI tree.
    pub pci: Option<PciPath>,
}

/// Where memory is. What is not known is `None`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum MemoryPlace {
    /// Host memory of a NUMA node.
    Host {
        /// The node.
        node: Option<u32>,
    },
    /// Memory of a device on PCI.
    Device {
        /// The NUMA node that the device hangs on.
        node: Option<u32>,
        /// The device's place in the PCI tree.
        pci: Option<PciPath>,
    },
}

/// How far a network device is from memory; the nearer, the smaller.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Distance {
    /// Device memory behind the same PCI switch, or the same device: bytes do not pass the processor.
    SameSwitch,
    /// Device memory below the same host bridge.
    SameBridge,
    /// The same NUMA node.
    SameNode,
    /// Not known.
    Unknown,
    /// Another NUMA node: bytes pass the link between sockets.
    OtherNode,
}

impl Distance {
    /// In words.
    pub fn name(self) -> &'static str {
        match self {
            Distance::SameSwitch => "same PCI switch",
            Distance::SameBridge => "same host bridge",
            Distance::SameNode => "same NUMA node",
            Distance::Unknown => "unknown distance",
            Distance::OtherNode => "other NUMA node",
        }
    }
}

/// How far `nic` is from `memory`.
pub fn distance(memory: &MemoryPlace, nic: &NicPlace) -> Distance {
    let (node, pci) = match memory {
        MemoryPlace::Host { node } => (*node, None),
        MemoryPlace::Device { node, pci } => (*node, pci.as_ref()),
    };
    if let (Some(memory), Some(nic)) = (pci, nic.pci.as_ref())
        && memory.root == nic.root
    {
        // The first function on the way is the root port: below the same one, they share a switch.
        return match memory.functions[0] == nic.functions[0] {
            true => Distance::SameSwitch,
            false => Distance::SameBridge,
        };
    }
    match (node, nic.node) {
        (Some(memory), Some(nic)) if memory == nic => Distance::SameNode,
        (Some(_), Some(_)) => Distance::OtherNode,
        _ => Distance::Unknown,
    }
}

/// A port that could carry a pool's bytes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Candidate {
    /// Where its device is.
    pub place: NicPlace,
    /// Its rate in Mbit/s; 0 if not known.
    pub rate_mbps: u64,
}

/// Which of the usable ports carry a pool's bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Spread {
    /// Only those that are nearest to the memory. Ports whose distance is not known count as near.
    #[default]
    Nearest,
    /// All.
    All,
}

/// A port's rank for a set of regions.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Ranked {
    /// Its place in the list of candidates.
    pub port: usize,
    /// How far it is from most of the bytes.
    pub distance: Distance,
    /// Whether it is used.
    pub used: bool,
}

/// Ranks ports for regions of so many bytes at such places: the nearest to most bytes first, then the faster, then in
/// the order given. At most `ports_max` are used.
pub fn rank(regions: &[(MemoryPlace, u64)], ports: &[Candidate], spread: Spread, ports_max: usize) -> Vec<Ranked> {
    let mut ranked: Vec<(u128, Ranked)> = ports
        .iter()
        .enumerate()
        .map(|(port, candidate)| {
            let (cost, distance) = cost(regions, &candidate.place);
            let used = false;
            (cost, Ranked { port, distance, used })
        })
        .collect();
    ranked.sort_by_key(|(cost, rank)| (*cost, std::cmp::Reverse(ports[rank.port].rate_mbps), rank.port));
    let nearest = ranked.first().map(|(_, rank)| rank.distance);
    let near = |distance: Distance| {
        Some(distance) == nearest || distance == Distance::Unknown || nearest == Some(Distance::Unknown)
    };
    let mut used = 0;
    ranked
        .into_iter()
        .map(|(_, mut rank)| {
            rank.used = used < ports_max && (spread == Spread::All || near(rank.distance));
            used += usize::from(rank.used);
            rank
        })
        .collect()
}

/// The distance of each byte, summed, and the distance that most bytes have (of two, the nearer).
fn cost(regions: &[(MemoryPlace, u64)], nic: &NicPlace) -> (u128, Distance) {
    let mut total = 0u128;
    let mut bytes_at = [(Distance::Unknown, 0u128); 5];
    for (memory, bytes) in regions {
        let distance = distance(memory, nic);
        total += distance as u128 * u128::from(*bytes);
        let slot = &mut bytes_at[distance as usize];
        *slot = (distance, slot.1 + u128::from(*bytes));
    }
    let most = bytes_at
        .into_iter()
        .max_by_key(|&(distance, bytes)| (bytes, std::cmp::Reverse(distance)))
        .filter(|&(_, bytes)| bytes > 0);
    (total, most.map_or(Distance::Unknown, |(distance, _)| distance))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// Two sockets; on each a host bridge with two root ports; a GPU and a NIC share the first root port's switch.
    fn path(socket: u32, port: u8, leaf: u8) -> PciPath {
        let root = format!("pci{socket:04x}:00");
        let functions = vec![
            PciAddress {
                domain: socket,
                bus: 0,
                device: port,
                function: 0,
            },
            PciAddress {
                domain: socket,
                bus: 1 + port,
                device: 0,
                function: 0,
            },
            PciAddress {
                domain: socket,
                bus: 0x10 + leaf,
                device: 0,
                function: 0,
            },
        ];
        PciPath { root, functions }
    }

    fn nic(socket: u32, port: u8) -> NicPlace {
        NicPlace {
            node: Some(socket),
            pci: Some(path(socket, port, 1)),
        }
    }

    fn gpu(socket: u32, port: u8) -> MemoryPlace {
        MemoryPlace::Device {
            node: Some(socket),
            pci: Some(path(socket, port, 2)),
        }
    }

    fn host(node: u32) -> MemoryPlace {
        MemoryPlace::Host { node: Some(node) }
    }

    fn candidate(place: NicPlace, rate_mbps: u64) -> Candidate {
        Candidate { place, rate_mbps }
    }

    #[test]
    fn pci_addresses_and_paths_are_read() {
        let address = PciAddress::parse("0000:17:1f.7").unwrap();
        assert_eq!((address.bus, address.device, address.function), (0x17, 0x1f, 7));
        assert_eq!(address.to_string(), "0000:17:1f.7");
        assert_eq!(PciAddress::parse("17:1F.7"), Some(address));
        for bad in [
            "",
            "17",
            "17:20.0",
            "17:00.8",
            "0:0:17:00.0",
            "+7:00.0",
            "x:17:00.0",
            "177:00.0",
        ] {
            assert_eq!(PciAddress::parse(bad), None, "{bad}");
        }
        let path = PciPath::parse("/sys/devices/pci0000:16/0000:16:01.0/0000:17:00.0/infiniband/mlx5_0").unwrap();
        assert_eq!((path.root.as_str(), path.functions.len()), ("pci0000:16", 2));
        assert_eq!(PciPath::parse("/sys/devices/virtual/net/lo"), None);
        assert_eq!(PciPath::parse("/sys/devices/pci0000:16"), None);
    }

    #[test]
    fn distances_of_a_two_socket_machine() {
        assert_eq!(distance(&gpu(0, 1), &nic(0, 1)), Distance::SameSwitch);
        assert_eq!(distance(&gpu(0, 2), &nic(0, 1)), Distance::SameBridge);
        assert_eq!(distance(&gpu(1, 1), &nic(0, 1)), Distance::OtherNode);
        assert_eq!(distance(&host(0), &nic(0, 1)), Distance::SameNode);
        assert_eq!(distance(&host(1), &nic(0, 1)), Distance::OtherNode);
        let other_bridge = NicPlace {
            node: Some(0),
            pci: PciPath::parse("pci0000:80/0000:80:01.0/0000:81:00.0"),
        };
        assert_eq!(distance(&gpu(0, 1), &other_bridge), Distance::SameNode);
    }

    #[test]
    fn what_is_not_known_is_unknown() {
        let unknown = NicPlace::default();
        assert_eq!(distance(&host(0), &unknown), Distance::Unknown);
        assert_eq!(distance(&gpu(0, 1), &unknown), Distance::Unknown);
        assert_eq!(
            distance(&MemoryPlace::Host { node: None }, &nic(0, 1)),
            Distance::Unknown
        );
        let no_node = NicPlace {
            node: None,
            ..nic(0, 1)
        };
        assert_eq!(
            distance(&gpu(0, 1), &no_node),
            Distance::SameSwitch,
            "the PCI tree is enough"
        );
    }

    #[test]
    fn ports_near_most_bytes_come_first_and_far_ones_are_left_out() {
        let ports = [
            candidate(nic(1, 1), 400_000),
            candidate(nic(0, 1), 100_000),
            candidate(nic(0, 2), 400_000),
        ];
        let ranked = rank(&[(host(0), 100), (host(1), 10)], &ports, Spread::Nearest, 8);
        let order: Vec<_> = ranked
            .iter()
            .map(|rank| (rank.port, rank.distance, rank.used))
            .collect();
        assert_eq!(
            order,
            [
                (2, Distance::SameNode, true),
                (1, Distance::SameNode, true),
                (0, Distance::OtherNode, false)
            ]
        );
        let all = rank(&[(host(0), 100)], &ports, Spread::All, 2);
        assert_eq!(
            all.iter().map(|rank| rank.used).collect::<Vec<_>>(),
            [true, true, false]
        );
        let gpu_first = rank(&[(gpu(0, 2), 100)], &ports, Spread::Nearest, 8);
        assert_eq!((gpu_first[0].port, gpu_first[0].distance), (2, Distance::SameSwitch));
        assert_eq!(gpu_first.iter().filter(|rank| rank.used).count(), 1);
    }

    #[test]
    fn on_a_machine_without_topology_every_port_is_used() {
        let ports = [candidate(NicPlace::default(), 0), candidate(NicPlace::default(), 0)];
        let ranked = rank(&[(MemoryPlace::Host { node: None }, 1)], &ports, Spread::Nearest, 8);
        assert!(ranked.iter().all(|rank| rank.used));
        assert_eq!(ranked.iter().map(|rank| rank.port).collect::<Vec<_>>(), [0, 1]);
        assert!(
            rank(&[], &ports, Spread::Nearest, 8).iter().all(|rank| rank.used),
            "no region"
        );
    }

    proptest! {
        #[test]
        fn pci_addresses_round_trip(domain in 0u32..0x1_0000, bus: u8, device in 0u8..32, function in 0u8..8) {
            let address = PciAddress { domain, bus, device, function };
            prop_assert_eq!(PciAddress::parse(&address.to_string()), Some(address));
        }

        /// Every port is ranked once; a port that is left out is not strictly nearer than one that is used; at least one
        /// port is used if there is one.
        #[test]
        fn a_ranking_is_complete(
            regions in prop::collection::vec((0u32..2, 1u64..1000), 1..5),
            nodes in prop::collection::vec((prop::option::of(0u32..2), 0u64..3), 1..6),
            most in 1usize..6,
        ) {
            let regions: Vec<_> = regions.into_iter().map(|(node, bytes)| (host(node), bytes)).collect();
            let ports: Vec<_> = nodes.into_iter()
                .map(|(node, rate)| candidate(NicPlace { node, pci: None }, rate)).collect();
            let ranked = rank(&regions, &ports, Spread::Nearest, most);
            let mut seen: Vec<usize> = ranked.iter().map(|rank| rank.port).collect();
            seen.sort_unstable();
            prop_assert_eq!(seen, (0..ports.len()).collect::<Vec<_>>());
            let used = ranked.iter().filter(|rank| rank.used).count();
            prop_assert!((1..=most).contains(&used));
            prop_assert!(ranked[0].used);
        }
    }
}
