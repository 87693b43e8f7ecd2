//! Subnets: which ports are on the same network.

use std::fmt;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use serde::{Deserialize, Serialize};

use crate::gid::show;
use crate::verbs::{GidEntry, GidKind};

/// A network: the leading bits that its addresses share. IPv4 networks are mapped into IPv6.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct Subnet {
    address: [u8; 16],
    bits: u8,
}

impl Subnet {
    /// The network of an address whose first `bits` (at most 128) name the network.
    pub fn new(address: [u8; 16], bits: u8) -> Subnet {
        let bits = bits.min(128);
        let mask = u128::MAX.checked_shl(128 - u32::from(bits)).unwrap_or(0);
        Subnet {
            address: (u128::from_be_bytes(address) & mask).to_be_bytes(),
            bits,
        }
    }

    /// Whether an address is in it.
    pub fn contains(&self, address: [u8; 16]) -> bool {
        Subnet::new(address, self.bits) == *self
    }
}

impl fmt::Display for Subnet {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let bits = match Ipv6Addr::from(self.address).to_ipv4_mapped() {
            Some(_) if self.bits >= 96 => self.bits - 96,
            _ => self.bits,
        };
        write!(f, "{}/{bits}", show(self.address))
    }
}

/// The subnet of a port's address: on InfiniBand the subnet prefix; on RoCE the network of the interface's address, if
/// the interface has it, else unknown. A link-local address names no network.
pub fn subnet_of(entry: &GidEntry, interfaces: &[Subnet]) -> Option<Subnet> {
    if entry.kind == GidKind::Ib {
        return Some(Subnet::new(entry.gid, 64));
    }
    let link_local = Subnet::new(Ipv6Addr::new(0xfe80, 0, 0, 0, 0, 0, 0, 0).octets(), 10);
    if link_local.contains(entry.gid) {
        return None;
    }
    interfaces
        .iter()
        .filter(|subnet| subnet.contains(entry.gid))
        .max_by_key(|subnet| subnet.bits)
        .copied()
}

/// The networks of this machine's interfaces. Empty if they cannot be listed.
pub fn interface_subnets() -> Vec<Subnet> {
    let mut list = std::ptr::null_mut();
    // SAFETY: the call writes one pointer, to a list that is ours until it is freed below.
    if unsafe { libc::getifaddrs(&mut list) } != 0 {
        return Vec::new();
    }
    let mut subnets = Vec::new();
    let mut next = list;
    // SAFETY: `next` is null or an element of the list, which is freed only after the loop.
    while let Some(interface) = unsafe { next.as_ref() } {
        // SAFETY: address and mask are null or point to socket addresses of the family that they name.
        let pair = unsafe {
            (
                socket_address(interface.ifa_addr),
                socket_address(interface.ifa_netmask),
            )
        };
        if let (Some(address), Some(mask)) = pair {
            subnets.push(network(address, mask));
        }
        next = interface.ifa_next;
    }
    // SAFETY: `list` came from `getifaddrs` and no reference into it is left.
    unsafe { libc::freeifaddrs(list) };
    subnets
}

fn network(address: IpAddr, mask: IpAddr) -> Subnet {
    let bits = match mask {
        IpAddr::V4(mask) => 96 + mask.to_bits().leading_ones(),
        IpAddr::V6(mask) => mask.to_bits().leading_ones(),
    };
    let address = match address {
        IpAddr::V4(address) => address.to_ipv6_mapped(),
        IpAddr::V6(address) => address,
    };
    Subnet::new(address.octets(), bits as u8)
}

/// # Safety
/// `address` is null or points to a socket address whose size is that of its family.
unsafe fn socket_address(address: *const libc::sockaddr) -> Option<IpAddr> {
    if address.is_null() {
        return None;
    }
    // SAFETY: every socket address starts with its family; no alignment is assumed.
    let family = unsafe { (&raw const (*address).sa_family).read_unaligned() };
    match i32::from(family) {
        libc::AF_INET => {
            // SAFETY: by its family it is a `sockaddr_in`.
            let inet = unsafe { address.cast::<libc::sockaddr_in>().read_unaligned() };
            Some(Ipv4Addr::from(inet.sin_addr.s_addr.to_ne_bytes()).into())
        }
        libc::AF_INET6 => {
            // SAFETY: by its family it is a `sockaddr_in6`.
            let inet = unsafe { address.cast::<libc::sockaddr_in6>().read_unaligned() };
            Some(Ipv6Addr::from(inet.sin6_addr.s6_addr).into())
        }
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn octets(text: &str) -> [u8; 16] {
        match text.parse().unwrap() {
            IpAddr::V4(address) => address.to_ipv6_mapped().octets(),
            IpAddr::V6(address) => address.octets(),
        }
    }

    fn entry(text: &str, kind: GidKind) -> GidEntry {
        GidEntry {
            index: 0,
            gid: octets(text),
            kind,
            interface_index: 0,
        }
    }

    #[test]
    fn networks_read_well_and_hold_their_addresses() {
        let network = network("10.77.3.1".parse().unwrap(), "255.255.0.0".parse().unwrap());
        assert_eq!(network.to_string(), "10.77.0.0/16");
        assert!(network.contains(octets("10.77.200.1")));
        assert!(!network.contains(octets("10.78.0.1")));
        assert_eq!(Subnet::new(octets("2001:db8::1"), 32).to_string(), "2001:db8::/32");
        assert!(Subnet::new([7; 16], 0).contains([9; 16]));
        assert_eq!(Subnet::new([7; 16], 200), Subnet::new([7; 16], 128));
    }

    #[test]
    fn a_ports_network_is_the_narrowest_of_its_interfaces() {
        let interfaces = [
            Subnet::new(octets("10.0.0.1"), 104),
            Subnet::new(octets("10.77.0.1"), 112),
            Subnet::new(octets("fe80::1"), 64),
        ];
        let of = |text, kind| subnet_of(&entry(text, kind), &interfaces);
        assert_eq!(of("10.77.0.9", GidKind::RoceV2), Some(interfaces[1]));
        assert_eq!(of("10.78.0.9", GidKind::RoceV2), Some(interfaces[0]));
        assert_eq!(of("192.168.1.1", GidKind::RoceV2), None);
        assert_eq!(of("fe80::9", GidKind::RoceV2), None);
        assert_eq!(of("fe80::9", GidKind::Ib), Some(Subnet::new(octets("fe80::"), 64)));
    }

    #[test]
    fn this_machine_has_a_loopback_network() {
        let loopback = octets("127.0.0.1");
        let found = interface_subnets();
        assert!(
            found.is_empty() || found.iter().any(|subnet| subnet.contains(loopback)),
            "{found:?}"
        );
    }
}
