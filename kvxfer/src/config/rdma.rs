//! Settings of the RDMA transport.

use serde::{Deserialize, Serialize};

use kvxfer_core::{Error, ErrorKind, Result};

/// Settings of the RDMA transport. Which devices it may use says [`Config::devices`](super::Config::devices).
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Rdma {
    /// The verbs library: a path or a name that the dynamic loader finds. Empty: `libibverbs.so.1`.
    pub library: String,
    /// Ports used towards one peer; those nearest to the memory first.
    pub rails_max: u16,
    /// How ports are paired with a peer's: `auto`, `index`, `subnet`, or pairs of names, ours first (`rxe0=rxe1`,
    /// `mlx5_0:1=mlx5_2:1`).
    pub rail_pairs: Vec<String>,
    /// Index in a port's GID table; `None` (`auto`) chooses by rank.
    #[serde(with = "auto")]
    pub gid_index: Option<u32>,
    /// Partition key, which the port must have; `None` (`auto`): the port's first.
    #[serde(with = "auto")]
    pub partition_key: Option<u16>,
    /// Service level.
    pub service_level: u8,
    /// Traffic class of the global route header.
    pub traffic_class: u8,
    /// Hop limit of the global route header.
    pub hop_limit: u8,
    /// Path MTU in bytes: 256, 512, 1024, 2048 or 4096; `None` (`auto`): the lesser of both ports'.
    #[serde(with = "auto")]
    pub mtu: Option<u32>,
    /// Time until a packet is sent again, as the exponent n of 4.096 us * 2^n.
    pub timeout: u8,
    /// How often a packet is sent again before the queue pair fails.
    pub retry_count: u8,
    /// How often a receiver that is not ready is tried again before the queue pair fails.
    pub rnr_retry: u8,
    /// Work requests that one queue pair holds.
    pub queue_depth: u32,
    /// Receives posted per queue pair, which is how many batches may end before the receiver looks.
    pub receive_depth: u32,
    /// Least bytes in flight per rail.
    pub window_bytes_min: u64,
    /// Most bytes in flight per rail.
    pub window_bytes_max: u64,
    /// Time without progress of the oldest batch after which its queue pair is given up, in milliseconds.
    pub progress_ms: u64,
    /// Time a sender has to confirm that it stopped before the receiver fences its queue pairs, in milliseconds.
    pub revoke_ms: u64,
    /// Time a link may be without any rail before it is given up for the next transport named, in milliseconds.
    pub outage_ms: u64,
    /// Registrations of memory at once.
    pub registration_threads: u16,
    /// Most bytes of one registration; larger regions are registered in several. `None` (`auto`): what the device can.
    #[serde(with = "auto")]
    pub registration_bytes_max: Option<u64>,
    /// Most bytes of staging buffers per device, for memory that devices cannot be given.
    pub staging_bytes_max: u64,
    /// Time a device's thread looks for more work before it sleeps, in microseconds.
    pub spin_us: u32,
}

impl Default for Rdma {
    fn default() -> Self {
        Rdma {
            library: String::new(),
            rails_max: 8,
            rail_pairs: vec!["auto".into()],
            gid_index: None,
            partition_key: None,
            service_level: 0,
            traffic_class: 0,
            hop_limit: 64,
            mtu: None,
            timeout: 14,
            retry_count: 7,
            rnr_retry: 6,
            queue_depth: 1024,
            receive_depth: 64,
            window_bytes_min: 8 << 20,
            window_bytes_max: 64 << 20,
            progress_ms: 1_000,
            revoke_ms: 400,
            outage_ms: 5_000,
            registration_threads: 4,
            registration_bytes_max: None,
            staging_bytes_max: 64 << 20,
            spin_us: 0,
        }
    }
}

impl Rdma {
    /// What no single value shows.
    pub(super) fn check_together(&self) -> Result<()> {
        if self.window_bytes_min > self.window_bytes_max {
            return Err(Error::new(
                ErrorKind::InvalidArgument,
                format!(
                    "rdma.window_bytes_min = {} with rdma.window_bytes_max = {}",
                    self.window_bytes_min, self.window_bytes_max
                ),
            )
            .remedy("make the least window at most the greatest"));
        }
        let refused = |why: String| {
            Err(Error::new(
                ErrorKind::InvalidArgument,
                format!("rdma.rail_pairs = {:?}", self.rail_pairs),
            )
            .because(why)
            .remedy("give \"auto\", \"index\", \"subnet\", or pairs such as [\"rxe0=rxe1\", \"mlx5_0:1=mlx5_2:1\"], ours first"))
        };
        match self.rail_pairs.as_slice() {
            [] => refused("the list is empty".into()),
            [word] if matches!(word.as_str(), "auto" | "index" | "subnet") => Ok(()),
            pairs => match pairs.iter().find(|pair| split_pair(pair).is_none()) {
                Some(bad) => refused(format!("{bad:?} is not two names with an equals sign between them")),
                None => Ok(()),
            },
        }
    }
}

/// Our device or port and the peer's of a pair such as `rxe0=rxe1`.
pub(crate) fn split_pair(pair: &str) -> Option<(&str, &str)> {
    let (ours, theirs) = pair.split_once('=')?;
    let is_name = |name: &str| !name.is_empty() && !name.contains(['=', ' ']);
    (is_name(ours) && is_name(theirs)).then_some((ours, theirs))
}

/// A number, or the word `auto` for `None`.
mod auto {
    use serde::{Deserialize, Deserializer, Serialize, Serializer};

    #[derive(Serialize, Deserialize)]
    #[serde(untagged)]
    enum Value<N> {
        Number(N),
        Word(Word),
    }

    #[derive(Serialize, Deserialize)]
    enum Word {
        #[serde(rename = "auto")]
        Auto,
    }

    pub(super) fn serialize<N, S>(value: &Option<N>, serializer: S) -> Result<S::Ok, S::Error>
    where
        N: Copy + Serialize,
        S: Serializer,
    {
        match value {
            Some(number) => Value::Number(*number),
            None => Value::Word(Word::Auto),
        }
        .serialize(serializer)
    }

    pub(super) fn deserialize<'de, N, D>(deserializer: D) -> Result<Option<N>, D::Error>
    where
        N: Deserialize<'de>,
        D: Deserializer<'de>,
    {
        Ok(match Value::deserialize(deserializer)? {
            Value::Number(number) => Some(number),
            Value::Word(Word::Auto) => None,
        })
    }
}
