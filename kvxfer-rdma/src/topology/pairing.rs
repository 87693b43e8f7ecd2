//! Which of our ports goes with which of the peer's: a *rail pair*.
//!
//! A port is in at most one pair: two pairs on one port would share its rate. The side that dials decides; the pairs are
//! probed before they are used.

use std::fmt;

use super::Subnet;

/// A port, as either side names it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RailPort {
    /// Device and port: `mlx5_0:1`.
    pub name: String,
    /// The network it is on, if that is known.
    pub subnet: Option<Subnet>,
}

/// How ports are paired.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub enum Pairing {
    /// By network; ports whose network is not known, or that have no counterpart on theirs, by index.
    #[default]
    Auto,
    /// The first with the first, and so on.
    ByIndex,
    /// Ports on the same network, in order.
    BySubnet,
    /// These (ours, the peer's), by name: a device alone (`mlx5_0`) means its port 1.
    Explicit(Vec<(String, String)>),
}

/// One of our ports with one of the peer's, by their places in the lists.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Pair {
    /// Ours.
    pub local: usize,
    /// The peer's.
    pub remote: usize,
    /// The network that joined them, if one did.
    pub subnet: Option<Subnet>,
}

/// Why something is not in a pair.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum Unpaired {
    /// The peer has no port left for it.
    NoneLeft {
        /// Our port.
        local: String,
    },
    /// No port of the peer is on its network.
    NoneOnSubnet {
        /// Our port.
        local: String,
        /// Its network.
        subnet: Subnet,
    },
    /// Its network is not known.
    SubnetUnknown {
        /// Our port.
        local: String,
    },
    /// No configured pair names it.
    NotConfigured {
        /// Our port.
        local: String,
    },
    /// A configured pair names a port that is not there or not usable.
    NoSuchPort {
        /// The name.
        name: String,
        /// Whether the peer was to have it.
        remote: bool,
    },
    /// A configured pair names a port that an earlier pair has.
    Twice {
        /// The name.
        name: String,
    },
}

impl fmt::Display for Unpaired {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Unpaired::NoneLeft { local } => write!(f, "{local}: the peer has no port left for it"),
            Unpaired::NoneOnSubnet { local, subnet } => write!(f, "{local}: the peer has no port in {subnet} for it"),
            Unpaired::SubnetUnknown { local } => write!(f, "{local}: its network is not known"),
            Unpaired::NotConfigured { local } => write!(f, "{local}: no configured pair names it"),
            Unpaired::NoSuchPort { name, remote: true } => write!(f, "{name}: the peer has no such usable port"),
            Unpaired::NoSuchPort { name, remote: false } => write!(f, "{name}: there is no such usable port"),
            Unpaired::Twice { name } => write!(f, "{name}: two pairs name it, the first has it"),
        }
    }
}

/// The pairs, in the order of our ports (of the configuration, where it names them), and what is in none.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Pairs {
    /// The pairs.
    pub pairs: Vec<Pair>,
    /// What is in none, and why.
    pub unpaired: Vec<Unpaired>,
}

/// Pairs our ports with the peer's.
pub fn pair(local: &[RailPort], remote: &[RailPort], how: &Pairing) -> Pairs {
    match how {
        Pairing::Explicit(names) => explicit(local, remote, names),
        Pairing::ByIndex => {
            let mut pairs = Builder::new(local, remote);
            pairs.by_index();
            pairs.finish(|port| Unpaired::NoneLeft {
                local: port.name.clone(),
            })
        }
        Pairing::BySubnet => {
            let mut pairs = Builder::new(local, remote);
            pairs.by_subnet();
            pairs.finish(|port| match port.subnet {
                Some(subnet) => Unpaired::NoneOnSubnet {
                    local: port.name.clone(),
                    subnet,
                },
                None => Unpaired::SubnetUnknown {
                    local: port.name.clone(),
                },
            })
        }
        Pairing::Auto => {
            let mut pairs = Builder::new(local, remote);
            pairs.by_subnet();
            pairs.by_index();
            pairs.finish(|port| Unpaired::NoneLeft {
                local: port.name.clone(),
            })
        }
    }
}

struct Builder<'a> {
    local: &'a [RailPort],
    remote: &'a [RailPort],
    pairs: Vec<Pair>,
    taken: Vec<bool>,
}

impl<'a> Builder<'a> {
    fn new(local: &'a [RailPort], remote: &'a [RailPort]) -> Builder<'a> {
        Builder {
            local,
            remote,
            pairs: Vec::new(),
            taken: vec![false; remote.len()],
        }
    }

    fn by_subnet(&mut self) {
        for (index, port) in self.local.iter().enumerate() {
            let Some(subnet) = port.subnet else {
                continue;
            };
            let same = |(other, port): (usize, &RailPort)| !self.taken[other] && port.subnet == Some(subnet);
            if let Some(other) = self.remote.iter().enumerate().position(same) {
                self.add(index, other, Some(subnet));
            }
        }
    }

    /// Joins the ports that are left, in order.
    fn by_index(&mut self) {
        for index in 0..self.local.len() {
            if self.pairs.iter().any(|pair| pair.local == index) {
                continue;
            }
            let Some(other) = self.taken.iter().position(|taken| !taken) else {
                break;
            };
            self.add(index, other, None);
        }
        self.pairs.sort_by_key(|pair| pair.local);
    }

    fn add(&mut self, local: usize, remote: usize, subnet: Option<Subnet>) {
        self.taken[remote] = true;
        self.pairs.push(Pair { local, remote, subnet });
    }

    fn finish(self, reason: impl Fn(&RailPort) -> Unpaired) -> Pairs {
        let alone = |index: &usize| !self.pairs.iter().any(|pair| pair.local == *index);
        let unpaired = (0..self.local.len())
            .filter(alone)
            .map(|index| reason(&self.local[index]))
            .collect();
        Pairs {
            pairs: self.pairs,
            unpaired,
        }
    }
}

fn explicit(local: &[RailPort], remote: &[RailPort], names: &[(String, String)]) -> Pairs {
    let mut pairs = Builder::new(local, remote);
    let mut unpaired = Vec::new();
    for (ours, theirs) in names {
        let (index, other) = (find(local, ours), find(remote, theirs));
        for (name, found, remote) in [(ours, index, false), (theirs, other, true)] {
            if found.is_none() {
                unpaired.push(Unpaired::NoSuchPort {
                    name: name.clone(),
                    remote,
                });
            }
        }
        let (Some(index), Some(other)) = (index, other) else {
            continue;
        };
        if pairs.pairs.iter().any(|pair| pair.local == index) {
            unpaired.push(Unpaired::Twice { name: ours.clone() });
        } else if pairs.taken[other] {
            unpaired.push(Unpaired::Twice { name: theirs.clone() });
        } else {
            pairs.add(index, other, None);
        }
    }
    let mut pairs = pairs.finish(|port| Unpaired::NotConfigured {
        local: port.name.clone(),
    });
    unpaired.append(&mut pairs.unpaired);
    Pairs { unpaired, ..pairs }
}

fn find(ports: &[RailPort], name: &str) -> Option<usize> {
    let matches = |port: &RailPort| port.name == name || port.name.strip_suffix(":1") == Some(name);
    ports.iter().position(matches)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn ports(list: &[(&str, Option<u8>)]) -> Vec<RailPort> {
        list.iter()
            .map(|&(name, subnet)| RailPort {
                name: name.to_owned(),
                subnet: subnet
                    .map(|third| Subnet::new([0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0xff, 0xff, 10, 0, third, 0], 120)),
            })
            .collect()
    }

    fn joined(pairs: &Pairs) -> Vec<(usize, usize)> {
        pairs.pairs.iter().map(|pair| (pair.local, pair.remote)).collect()
    }

    #[test]
    fn by_index_pairs_in_order_and_says_what_is_left() {
        let pairs = pair(
            &ports(&[("a:1", None), ("b:1", None), ("c:1", None)]),
            &ports(&[("x:1", None), ("y:1", None)]),
            &Pairing::ByIndex,
        );
        assert_eq!(joined(&pairs), [(0, 0), (1, 1)]);
        assert_eq!(pairs.unpaired, [Unpaired::NoneLeft { local: "c:1".into() }]);
    }

    #[test]
    fn by_subnet_crosses_the_order_where_the_networks_do() {
        let local = ports(&[("a:1", Some(1)), ("b:1", Some(2)), ("c:1", Some(3)), ("d:1", None)]);
        let remote = ports(&[("x:1", Some(2)), ("y:1", Some(1)), ("z:1", Some(1)), ("w:1", None)]);
        let pairs = pair(&local, &remote, &Pairing::BySubnet);
        assert_eq!(joined(&pairs), [(0, 1), (1, 0)]);
        assert_eq!(pairs.pairs[0].subnet.unwrap().to_string(), "10.0.1.0/24");
        let reasons: Vec<String> = pairs.unpaired.iter().map(Unpaired::to_string).collect();
        assert_eq!(
            reasons,
            [
                "c:1: the peer has no port in 10.0.3.0/24 for it",
                "d:1: its network is not known"
            ]
        );
        // Automatic: the rest by index.
        assert_eq!(
            joined(&pair(&local, &remote, &Pairing::Auto)),
            [(0, 1), (1, 0), (2, 2), (3, 3)]
        );
    }

    #[test]
    fn explicit_pairs_are_those_and_no_others() {
        let local = ports(&[("a:1", None), ("b:2", None)]);
        let remote = ports(&[("x:1", None), ("y:1", None)]);
        let name = |ours: &str, theirs: &str| (ours.to_owned(), theirs.to_owned());
        let how = Pairing::Explicit(vec![
            name("b:2", "x"),
            name("b:2", "y:1"),
            name("q", "y:1"),
            name("a", "x:1"),
        ]);
        let pairs = pair(&local, &remote, &how);
        assert_eq!(joined(&pairs), [(1, 0)]);
        let reasons: Vec<String> = pairs.unpaired.iter().map(Unpaired::to_string).collect();
        assert_eq!(
            reasons,
            [
                "b:2: two pairs name it, the first has it",
                "q: there is no such usable port",
                "x:1: two pairs name it, the first has it",
                "a:1: no configured pair names it"
            ]
        );
    }

    proptest! {
        /// No port is in two pairs; each of ours is in a pair or has a reason; by network, both ends are on it.
        #[test]
        fn pairs_are_disjoint_and_complete(
            local in prop::collection::vec(prop::option::of(0u8..3), 0..6),
            remote in prop::collection::vec(prop::option::of(0u8..3), 0..6),
        ) {
            let named = |list: &[Option<u8>], prefix: &str| -> Vec<RailPort> {
                let mut made = ports(&list.iter().map(|subnet| ("", *subnet)).collect::<Vec<_>>());
                for (index, port) in made.iter_mut().enumerate() {
                    port.name = format!("{prefix}{index}:1");
                }
                made
            };
            let (local, remote) = (named(&local, "l"), named(&remote, "r"));
            for how in [Pairing::Auto, Pairing::ByIndex, Pairing::BySubnet] {
                let pairs = pair(&local, &remote, &how);
                for (index, one) in pairs.pairs.iter().enumerate() {
                    for other in &pairs.pairs[index + 1..] {
                        prop_assert!(one.local != other.local && one.remote != other.remote);
                    }
                    if let Some(subnet) = one.subnet {
                        prop_assert_eq!(local[one.local].subnet, Some(subnet));
                        prop_assert_eq!(remote[one.remote].subnet, Some(subnet));
                    }
                }
                prop_assert_eq!(pairs.pairs.len() + pairs.unpaired.len(), local.len());
                if how != Pairing::BySubnet {
                    prop_assert_eq!(pairs.pairs.len(), local.len().min(remote.len()));
                }
            }
        }
    }
}
