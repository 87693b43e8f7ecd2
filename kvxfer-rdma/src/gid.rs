//! Which address of a port to use towards a peer. Pure: tables in, a choice and the reasons out.
//!
//! On RoCE both ends must speak the same version and the same family, and each address must reach the other: a
//! link-local address reaches only link-local ones, everything else only what is not. Of the pairs that are left the best
//! kind wins: RoCEv2 IPv4, then global IPv6, unique local (ULA), link-local; RoCEv1 only if nothing else is left.
//! Between addresses of the same kind the one that shares the longest prefix with the peer's wins, then the lower
//! index. On InfiniBand the address matters only between subnets: the one with the peer's subnet prefix, or index 0.

use std::fmt;
use std::net::{Ipv4Addr, Ipv6Addr};

use crate::verbs::{GidEntry, GidKind, LinkLayer};

/// GID indices that verbs can name in a queue pair's address: one byte.
const INDEX_MAX: u32 = 255;

/// What kind of address a GID is; the better, the smaller.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum GidClass {
    /// InfiniBand.
    InfiniBand,
    /// RoCEv2 over IPv4.
    V2Ipv4,
    /// RoCEv2 over a global IPv6 address.
    V2Global,
    /// RoCEv2 over a unique local IPv6 address (fc00::/7).
    V2UniqueLocal,
    /// RoCEv2 over a link-local IPv6 address (fe80::/10) or an IPv4 one (169.254.0.0/16).
    V2LinkLocal,
    /// RoCEv1, made of an IPv4 or global IPv6 address.
    V1,
    /// RoCEv1, made of a link-local address.
    V1LinkLocal,
}

impl GidClass {
    /// The class of an address.
    pub fn of(gid: [u8; 16], kind: GidKind) -> GidClass {
        let link_local = scope(gid) == Scope::Link;
        match kind {
            GidKind::Ib => GidClass::InfiniBand,
            GidKind::RoceV1 if link_local => GidClass::V1LinkLocal,
            GidKind::RoceV1 => GidClass::V1,
            GidKind::RoceV2 if link_local => GidClass::V2LinkLocal,
            GidKind::RoceV2 if ipv4(gid).is_some() => GidClass::V2Ipv4,
            GidKind::RoceV2 if gid[0] & 0xfe == 0xfc => GidClass::V2UniqueLocal,
            GidKind::RoceV2 => GidClass::V2Global,
        }
    }

    /// In words.
    pub fn name(self) -> &'static str {
        match self {
            GidClass::InfiniBand => "InfiniBand",
            GidClass::V2Ipv4 => "RoCEv2 IPv4",
            GidClass::V2Global => "RoCEv2 global IPv6",
            GidClass::V2UniqueLocal => "RoCEv2 unique local IPv6",
            GidClass::V2LinkLocal => "RoCEv2 link-local",
            GidClass::V1 => "RoCEv1",
            GidClass::V1LinkLocal => "RoCEv1 link-local",
        }
    }
}

/// An address of the peer, as it told us.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PeerGid {
    /// The address.
    pub gid: [u8; 16],
    /// How it frames packets.
    pub kind: GidKind,
}

/// Why an entry was not chosen.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum Unchosen {
    /// Its place in the table is beyond what verbs can name.
    IndexTooLarge,
    /// Another index is configured.
    NotConfigured(u32),
    /// It is not of the port's link layer.
    OtherLinkLayer,
    /// The peer has no address of its RoCE version.
    PeerHasOtherVersion,
    /// The peer has no address of its family.
    PeerHasOtherFamily,
    /// It is link-local and the peer's addresses are not, or the other way round.
    OtherScope,
    /// It has another InfiniBand subnet prefix than the peer.
    OtherSubnet,
    /// The entry with this index is better.
    Behind(u32),
}

impl fmt::Display for Unchosen {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Unchosen::IndexTooLarge => write!(f, "its index is above {INDEX_MAX}"),
            Unchosen::NotConfigured(index) => write!(f, "index {index} is configured"),
            Unchosen::OtherLinkLayer => f.write_str("not of the port's link layer"),
            Unchosen::PeerHasOtherVersion => f.write_str("the peer has no address of this RoCE version"),
            Unchosen::PeerHasOtherFamily => f.write_str("the peer has no address of this family"),
            Unchosen::OtherScope => f.write_str("link-local addresses reach only each other"),
            Unchosen::OtherSubnet => f.write_str("the peer is in another subnet"),
            Unchosen::Behind(index) => write!(f, "index {index} is better"),
        }
    }
}

/// What was chosen and why.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Choice {
    /// Our address; `None`: none reaches the peer.
    pub local: Option<GidEntry>,
    /// The peer's address that it reaches, by its place in the list that was passed; `None` if the list was empty.
    pub peer: Option<usize>,
    /// Whether packets must carry the addresses: always on RoCE, on InfiniBand between subnets.
    pub routed: bool,
    /// Every other entry, with the reason.
    pub refused: Vec<(GidEntry, Unchosen)>,
}

impl Choice {
    /// The choice as lines of a table, for the log: each entry, what it is, and what became of it.
    pub fn table(&self) -> String {
        let mut rows: Vec<(GidEntry, String)> = self
            .refused
            .iter()
            .map(|(entry, reason)| (*entry, reason.to_string()))
            .collect();
        rows.extend(self.local.map(|entry| (entry, "chosen".to_owned())));
        rows.sort_by_key(|(entry, _)| entry.index);
        let lines: Vec<String> = rows
            .iter()
            .map(|(entry, verdict)| {
                format!(
                    "{:>3}  {:<39}  {:<24}  {verdict}",
                    entry.index,
                    show(entry.gid),
                    GidClass::of(entry.gid, entry.kind).name()
                )
            })
            .collect();
        lines.join("\n")
    }
}

/// A GID as people write it: as an IPv4 address if it is one, else as an IPv6 one.
pub fn show(gid: [u8; 16]) -> String {
    match ipv4(gid) {
        Some(address) => address.to_string(),
        None => Ipv6Addr::from(gid).to_string(),
    }
}

/// The IPv4 address that is mapped into a GID.
pub fn ipv4(gid: [u8; 16]) -> Option<Ipv4Addr> {
    Ipv6Addr::from(gid).to_ipv4_mapped()
}

/// Chooses the entry to use towards a peer with these addresses; with an empty list, the best of its kind.
///
/// `configured` is an index that the configuration names: then it is that one or none.
pub fn choose(entries: &[GidEntry], layer: LinkLayer, configured: Option<u32>, peer: &[PeerGid]) -> Choice {
    let mut refused = Vec::new();
    let mut usable = Vec::new();
    for entry in entries {
        match rank(entry, layer, configured, peer) {
            Ok(rank) => usable.push((rank, *entry)),
            Err(reason) => refused.push((*entry, reason)),
        }
    }
    usable.sort_by_key(|(rank, entry)| (rank.order(), entry.index));
    let best = usable.first().copied();
    if let Some((_, best)) = best {
        refused.extend(
            usable[1..]
                .iter()
                .map(|(_, entry)| (*entry, Unchosen::Behind(best.index))),
        );
    }
    Choice {
        local: best.map(|(_, entry)| entry),
        peer: best.and_then(|(rank, _)| rank.peer),
        routed: best.is_some_and(|(rank, _)| rank.routed),
        refused,
    }
}

/// How good an entry is, and for which of the peer's addresses.
#[derive(Debug, Clone, Copy)]
struct Rank {
    class: GidClass,
    /// Bits it shares with the peer's address, from the left.
    shared: u32,
    peer: Option<usize>,
    routed: bool,
}

impl Rank {
    /// The smaller, the better.
    fn order(&self) -> (bool, GidClass, u32) {
        // On InfiniBand, reaching the peer without routing comes first; on RoCE all are routed.
        (self.routed, self.class, 128 - self.shared)
    }
}

fn rank(entry: &GidEntry, layer: LinkLayer, configured: Option<u32>, peer: &[PeerGid]) -> Result<Rank, Unchosen> {
    if let Some(index) = configured.filter(|&index| index != entry.index) {
        return Err(Unchosen::NotConfigured(index));
    }
    if entry.index > INDEX_MAX {
        return Err(Unchosen::IndexTooLarge);
    }
    let class = GidClass::of(entry.gid, entry.kind);
    let ethernet = layer == LinkLayer::Ethernet;
    if ethernet == (entry.kind == GidKind::Ib) {
        return Err(Unchosen::OtherLinkLayer);
    }
    if peer.is_empty() {
        return Ok(Rank {
            class,
            shared: 0,
            peer: None,
            routed: ethernet,
        });
    }
    if !ethernet {
        return rank_infiniband(entry, class, peer);
    }
    // The nearest miss is the reason that is given.
    let mut reason = Unchosen::PeerHasOtherVersion;
    let mut best: Option<Rank> = None;
    for (index, other) in peer.iter().enumerate() {
        if other.kind != entry.kind {
            continue;
        }
        if ipv4(entry.gid).is_some() != ipv4(other.gid).is_some() {
            if reason == Unchosen::PeerHasOtherVersion {
                reason = Unchosen::PeerHasOtherFamily;
            }
            continue;
        }
        if scope(entry.gid) != scope(other.gid) {
            reason = Unchosen::OtherScope;
            continue;
        }
        let candidate = Rank {
            class,
            shared: shared_bits(entry.gid, other.gid),
            peer: Some(index),
            routed: true,
        };
        if best.is_none_or(|best| candidate.order() < best.order()) {
            best = Some(candidate);
        }
    }
    best.ok_or(reason)
}

fn rank_infiniband(entry: &GidEntry, class: GidClass, peer: &[PeerGid]) -> Result<Rank, Unchosen> {
    let same = peer
        .iter()
        .position(|other| other.kind == GidKind::Ib && other.gid[..8] == entry.gid[..8]);
    let any = peer.iter().position(|other| other.kind == GidKind::Ib);
    match (same, any) {
        (Some(index), _) => Ok(Rank {
            class,
            shared: 64,
            peer: Some(index),
            routed: false,
        }),
        // Through a router. Only the first entry is sure to be one that routers know.
        (None, Some(index)) if entry.index == 0 => Ok(Rank {
            class,
            shared: 0,
            peer: Some(index),
            routed: true,
        }),
        (None, Some(_)) => Err(Unchosen::OtherSubnet),
        (None, None) => Err(Unchosen::OtherLinkLayer),
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Scope {
    Link,
    Wide,
}

fn scope(gid: [u8; 16]) -> Scope {
    let link = match ipv4(gid) {
        Some(address) => address.is_link_local(),
        None => gid[0] == 0xfe && gid[1] & 0xc0 == 0x80,
    };
    if link { Scope::Link } else { Scope::Wide }
}

fn shared_bits(one: [u8; 16], other: [u8; 16]) -> u32 {
    (u128::from_be_bytes(one) ^ u128::from_be_bytes(other)).leading_zeros()
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn gid(text: &str) -> [u8; 16] {
        match text.parse::<Ipv4Addr>() {
            Ok(address) => address.to_ipv6_mapped().octets(),
            Err(_) => text.parse::<Ipv6Addr>().unwrap().octets(),
        }
    }

    fn entry(index: u32, text: &str, kind: GidKind) -> GidEntry {
        GidEntry {
            index,
            gid: gid(text),
            kind,
            interface_index: 0,
        }
    }

    fn peer(text: &str, kind: GidKind) -> PeerGid {
        PeerGid { gid: gid(text), kind }
    }

    use GidKind::{Ib, RoceV1, RoceV2};

    /// What mlx5 shows for an interface with one IPv4, one global and one ULA address.
    fn usual() -> Vec<GidEntry> {
        vec![
            entry(0, "fe80::1", RoceV1),
            entry(1, "fe80::1", RoceV2),
            entry(2, "10.1.2.3", RoceV1),
            entry(3, "10.1.2.3", RoceV2),
            entry(4, "2001:db8::1", RoceV1),
            entry(5, "2001:db8::1", RoceV2),
            entry(6, "fd00::1", RoceV2),
        ]
    }

    fn chosen(entries: &[GidEntry], peers: &[PeerGid]) -> Option<u32> {
        choose(entries, LinkLayer::Ethernet, None, peers)
            .local
            .map(|entry| entry.index)
    }

    #[test]
    fn without_a_peer_the_best_kind_wins() {
        assert_eq!(chosen(&usual(), &[]), Some(3));
        assert_eq!(chosen(&usual()[4..], &[]), Some(5));
        assert_eq!(
            chosen(&[entry(1, "fe80::1", RoceV2), entry(6, "fd00::1", RoceV2)], &[]),
            Some(6)
        );
        assert_eq!(chosen(&usual()[..3], &[]), Some(1), "RoCEv1 comes last");
        assert_eq!(
            chosen(&[entry(0, "fe80::1", RoceV1), entry(2, "10.1.2.3", RoceV1)], &[]),
            Some(2)
        );
        assert_eq!(chosen(&[], &[]), None);
    }

    #[test]
    fn the_peers_family_and_version_decide() {
        assert_eq!(chosen(&usual(), &[peer("10.9.9.9", RoceV2)]), Some(3));
        assert_eq!(chosen(&usual(), &[peer("2001:db8::9", RoceV2)]), Some(5));
        assert_eq!(
            chosen(&usual(), &[peer("fd00::9", RoceV2)]),
            Some(5),
            "global reaches unique local"
        );
        assert_eq!(chosen(&usual(), &[peer("10.9.9.9", RoceV1)]), Some(2));
        assert_eq!(
            chosen(&usual(), &[peer("2001:db8::9", RoceV2), peer("10.9.9.9", RoceV2)]),
            Some(3)
        );
    }

    #[test]
    fn link_local_is_used_only_towards_link_local() {
        assert_eq!(chosen(&usual(), &[peer("fe80::9", RoceV2)]), Some(1));
        assert_eq!(
            chosen(&usual(), &[peer("fe80::9", RoceV2), peer("2001:db8::9", RoceV2)]),
            Some(5)
        );
        let only = [entry(1, "fe80::1", RoceV2), entry(2, "169.254.3.4", RoceV2)];
        let choice = choose(
            &only,
            LinkLayer::Ethernet,
            None,
            &[peer("10.9.9.9", RoceV2), peer("2001:db8::9", RoceV2)],
        );
        assert_eq!(choice.local, None);
        assert_eq!(choice.refused.len(), 2);
        assert!(choice.refused.iter().all(|(_, reason)| *reason == Unchosen::OtherScope));
    }

    #[test]
    fn of_equals_the_one_nearest_to_the_peer_wins() {
        let entries = [
            entry(3, "10.1.2.3", RoceV2),
            entry(5, "192.168.7.3", RoceV2),
            entry(7, "192.168.7.4", RoceV2),
        ];
        assert_eq!(chosen(&entries, &[peer("192.168.7.200", RoceV2)]), Some(5));
        assert_eq!(chosen(&entries, &[peer("10.1.9.9", RoceV2)]), Some(3));
        let choice = choose(
            &entries,
            LinkLayer::Ethernet,
            None,
            &[peer("10.8.0.1", RoceV2), peer("192.168.7.200", RoceV2)],
        );
        assert_eq!((choice.local.unwrap().index, choice.peer), (5, Some(1)));
    }

    #[test]
    fn a_configured_index_is_that_one_or_none() {
        let pick = |index, peers: &[PeerGid]| choose(&usual(), LinkLayer::Ethernet, Some(index), peers);
        assert_eq!(pick(1, &[]).local.unwrap().index, 1);
        assert_eq!(pick(9, &[]).local, None);
        let wrong = pick(1, &[peer("10.9.9.9", RoceV2)]);
        assert_eq!(wrong.local, None);
        assert!(wrong.refused.contains(&(usual()[1], Unchosen::PeerHasOtherFamily)));
        assert!(wrong.refused.contains(&(usual()[3], Unchosen::NotConfigured(1))));
    }

    #[test]
    fn infiniband_uses_the_peers_subnet_or_index_0() {
        let entries = [
            entry(0, "fe80::2:c903:0:1", Ib),
            entry(1, "fec0:0:0:7::2:c903", Ib),
            entry(2, "10.1.2.3", RoceV2),
        ];
        let pick = |peers: &[PeerGid]| choose(&entries, LinkLayer::InfiniBand, None, peers);
        assert_eq!((pick(&[]).local.unwrap().index, pick(&[]).routed), (0, false));
        let same = pick(&[peer("fec0:0:0:7::99", Ib)]);
        assert_eq!((same.local.unwrap().index, same.routed), (1, false));
        let far = pick(&[peer("fec0:0:0:8::99", Ib)]);
        assert_eq!((far.local.unwrap().index, far.routed), (0, true));
        assert!(far.refused.contains(&(entries[1], Unchosen::OtherSubnet)));
        assert!(far.refused.contains(&(entries[2], Unchosen::OtherLinkLayer)));
    }

    #[test]
    fn indices_that_verbs_cannot_name_are_refused() {
        let choice = choose(&[entry(256, "10.1.2.3", RoceV2)], LinkLayer::Ethernet, None, &[]);
        assert_eq!(choice.local, None);
        assert_eq!(choice.refused[0].1, Unchosen::IndexTooLarge);
    }

    #[test]
    fn the_table_names_every_entry_and_its_fate() {
        let table = choose(&usual(), LinkLayer::Ethernet, None, &[peer("10.9.9.9", RoceV2)]).table();
        assert_eq!(table.lines().count(), 7);
        assert!(
            table.contains("  3  10.1.2.3                                 RoCEv2 IPv4               chosen"),
            "{table}"
        );
        assert!(
            table.contains("RoCEv1 link-local         the peer has no address of this RoCE version"),
            "{table}"
        );
        assert!(
            table.contains("RoCEv2 link-local         the peer has no address of this family"),
            "{table}"
        );
    }

    fn any_gid() -> impl Strategy<Value = [u8; 16]> {
        prop_oneof![
            any::<[u8; 4]>().prop_map(|octets| Ipv4Addr::from(octets).to_ipv6_mapped().octets()),
            any::<[u8; 2]>().prop_map(|[a, b]| [0xfe, 0x80, 0, 0, 0, 0, 0, 0, a, b, 0, 0, 0, 0, 0, 1]),
            any::<[u8; 2]>().prop_map(|[a, b]| [0xfd, a, b, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1]),
            any::<[u8; 16]>(),
        ]
    }

    fn any_kind() -> impl Strategy<Value = GidKind> {
        prop_oneof![Just(Ib), Just(RoceV1), Just(RoceV2)]
    }

    proptest! {
        /// Every entry is either chosen or refused with a reason; what is chosen reaches the peer's address that is named;
        /// and if anything reaches the peer, something is chosen, link-local only if nothing wider does.
        #[test]
        fn a_choice_is_complete_and_reaches_the_peer(
            entries in prop::collection::vec((any_gid(), any_kind()), 0..12),
            peers in prop::collection::vec((any_gid(), any_kind()), 1..5),
        ) {
            let entries: Vec<GidEntry> = entries.into_iter().enumerate()
                .map(|(index, (gid, kind))| GidEntry { index: index as u32, gid, kind, interface_index: 0 })
                .collect();
            let peers: Vec<PeerGid> = peers.into_iter().map(|(gid, kind)| PeerGid { gid, kind }).collect();
            let choice = choose(&entries, LinkLayer::Ethernet, None, &peers);
            prop_assert_eq!(choice.refused.len() + usize::from(choice.local.is_some()), entries.len());
            let reaches = |entry: &GidEntry, peer: &PeerGid| {
                entry.kind != Ib && entry.kind == peer.kind
                    && ipv4(entry.gid).is_some() == ipv4(peer.gid).is_some()
                    && scope(entry.gid) == scope(peer.gid)
            };
            let reaching: Vec<&GidEntry> = entries.iter().filter(|entry| peers.iter().any(|peer| reaches(entry, peer))).collect();
            prop_assert_eq!(choice.local.is_some(), !reaching.is_empty());
            if let (Some(local), Some(peer)) = (choice.local, choice.peer) {
                prop_assert!(reaches(&local, &peers[peer]));
                let class = GidClass::of(local.gid, local.kind);
                prop_assert!(reaching.iter().all(|entry| class <= GidClass::of(entry.gid, entry.kind)));
            }
        }
    }
}
