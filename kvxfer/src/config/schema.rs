//! The table of keys: what each means and which values it takes. The types in the parent module hold the defaults.

use std::fmt::Write as _;

use super::Config;

/// One setting.
pub(crate) struct Key {
    /// Its path in the file: `limits.slots_max`.
    pub(crate) path: &'static str,
    /// What values it takes.
    pub(crate) kind: Kind,
    /// What it means, in one line.
    pub(crate) meaning: &'static str,
}

/// What values a setting takes.
#[derive(Clone, Copy)]
pub(crate) enum Kind {
    /// Text of at most this many bytes.
    Text { bytes_max: usize },
    /// Socket addresses: how many.
    Addresses { min: usize, max: usize },
    /// Names, at most this many; each one of `known` if it is not empty.
    Names { max: usize, known: &'static [&'static str] },
    /// A whole number, both ends included.
    Integer { min: u64, max: u64 },
    /// A whole number, both ends included, or the word `auto`.
    AutoOr { min: u64, max: u64, steps: Steps },
    /// One of these words.
    Choice(&'static [&'static str]),
    /// `true` or `false`.
    Flag,
}

/// Which numbers of a range are values.
#[derive(Clone, Copy)]
pub(crate) enum Steps {
    All,
    PowersOfTwo,
}

impl Kind {
    /// The range, for people.
    pub(crate) fn describe(self) -> String {
        match self {
            Kind::Text { bytes_max } => format!("text of at most {bytes_max} bytes"),
            Kind::Addresses { min, max } => format!("{min} to {max} of `address:port`"),
            Kind::Names { max, known: [] } => format!("at most {max} names"),
            Kind::Names { known, .. } => format!("a list of {}", quoted(known)),
            Kind::Integer { min, max } => format!("{min} to {max}"),
            Kind::AutoOr { min, max, steps } => {
                let steps = match steps {
                    Steps::All => "",
                    Steps::PowersOfTwo => ", a power of two",
                };
                format!("`auto`, or {min} to {max}{steps}")
            }
            Kind::Choice(words) => quoted(words),
            Kind::Flag => "`true`, `false`".to_owned(),
        }
    }
}

const fn integer(path: &'static str, min: u64, max: u64, meaning: &'static str) -> Key {
    Key {
        path,
        kind: Kind::Integer { min, max },
        meaning,
    }
}

/// Transports that the configuration knows by name, built in or not.
pub(crate) const TRANSPORTS: &[&str] = &["auto", "tcp", "rdma"];

/// A day: longer than any deadline makes sense.
const DAY_MS: u64 = 86_400_000;

pub(crate) const KEYS: &[Key] = &[
    Key {
        path: "name",
        kind: Kind::Text { bytes_max: 64 },
        meaning: "Label of this endpoint in logs and in peers' messages. Not an identity.",
    },
    Key {
        path: "listen",
        kind: Kind::Addresses { min: 1, max: 2 },
        meaning: "Where to listen. Port 0 takes a free port, and the real one is published. A wildcard address publishes the interfaces' addresses.",
    },
    Key {
        path: "transports",
        kind: Kind::Names {
            max: 8,
            known: TRANSPORTS,
        },
        meaning: "Ways of moving bytes, in order of preference. What is named and missing is an error; `auto` takes what there is and says so.",
    },
    Key {
        path: "interfaces",
        kind: Kind::Names { max: 64, known: &[] },
        meaning: "Interfaces whose addresses may be published when listening on a wildcard address. Empty: all that are up.",
    },
    Key {
        path: "devices",
        kind: Kind::Names { max: 64, known: &[] },
        meaning: "Devices (`mlx5_0`) or ports (`mlx5_0:1`) that transports with devices may use. Empty: all. The tcp transport has none.",
    },
    integer("tcp.lanes", 1, 64, "Connections per peer that carry KV bytes."),
    integer(
        "tcp.data_threads",
        0,
        64,
        "Threads that serve all lanes of all peers. 0: half the cores, at least 1, at most 8.",
    ),
    integer(
        "tcp.spin_us",
        0,
        10_000,
        "Microseconds a data thread looks for more work before it sleeps; only where there are more cores than data threads plus 2.",
    ),
    integer(
        "tcp.send_buffer_bytes",
        0,
        1 << 30,
        "Send buffer of a lane's socket. 0: the system's choice.",
    ),
    integer(
        "tcp.receive_buffer_bytes",
        0,
        1 << 30,
        "Receive buffer of a lane's socket. 0: the system's choice.",
    ),
    integer(
        "tcp.window_bytes_min",
        1 << 20,
        1 << 30,
        "Least bytes in flight per lane.",
    ),
    integer(
        "tcp.window_bytes_max",
        1 << 20,
        1 << 32,
        "Most bytes in flight per lane.",
    ),
    Key {
        path: "rdma.library",
        kind: Kind::Text { bytes_max: 4096 },
        meaning: "The verbs library: a path, or a name that the dynamic loader finds. Empty: `libibverbs.so.1`.",
    },
    integer(
        "rdma.rails_max",
        1,
        16,
        "Ports used towards one peer; those nearest to the memory first.",
    ),
    Key {
        path: "rdma.rail_pairs",
        kind: Kind::Names { max: 64, known: &[] },
        meaning: "How ports are paired with a peer's: `auto`, `index`, `subnet`, or pairs of names, ours first (`rxe0=rxe1`, `mlx5_0:1=mlx5_2:1`). A pair is probed before it is used.",
    },
    Key {
        path: "rdma.gid_index",
        kind: Kind::AutoOr {
            min: 0,
            max: 65_535,
            steps: Steps::All,
        },
        meaning: "Index in a port's GID table. `auto`: RoCE v2 with an address that reaches the peer before all others, link-local last.",
    },
    Key {
        path: "rdma.partition_key",
        kind: Kind::AutoOr {
            min: 1,
            max: 65_535,
            steps: Steps::All,
        },
        meaning: "Partition key, which the port must have. `auto`: the port's first.",
    },
    integer("rdma.service_level", 0, 15, "Service level."),
    integer(
        "rdma.traffic_class",
        0,
        255,
        "Traffic class of the global route header (RoCE: DSCP and ECN).",
    ),
    integer("rdma.hop_limit", 1, 255, "Hop limit of the global route header."),
    Key {
        path: "rdma.mtu",
        kind: Kind::AutoOr {
            min: 256,
            max: 4096,
            steps: Steps::PowersOfTwo,
        },
        meaning: "Path MTU in bytes. `auto`: the lesser of both ports' active MTU.",
    },
    integer(
        "rdma.timeout",
        1,
        31,
        "Time until a packet is sent again, as n of 4.096 us * 2^n (14: 67 ms).",
    ),
    integer(
        "rdma.retry_count",
        0,
        7,
        "How often a packet is sent again before the queue pair fails.",
    ),
    integer(
        "rdma.rnr_retry",
        0,
        6,
        "How often a receiver that is not ready is tried again before the queue pair fails. 7, for ever, would hang.",
    ),
    integer(
        "rdma.queue_depth",
        16,
        16_384,
        "Work requests that one queue pair holds; cut to what the device can.",
    ),
    integer(
        "rdma.receive_depth",
        2,
        127,
        "Receives posted per queue pair: batches that may end before the receiver looks.",
    ),
    integer(
        "rdma.window_bytes_min",
        1 << 20,
        1 << 30,
        "Least bytes in flight per rail.",
    ),
    integer(
        "rdma.window_bytes_max",
        1 << 20,
        1 << 32,
        "Most bytes in flight per rail.",
    ),
    integer(
        "rdma.progress_ms",
        10,
        60_000,
        "Time without progress of the oldest batch after which its queue pair is given up and the rest goes elsewhere.",
    ),
    integer(
        "rdma.revoke_ms",
        10,
        60_000,
        "Time a sender has to confirm that it stopped; then the receiver fences its queue pairs. At most `deadlines.liveness_ms`.",
    ),
    integer(
        "rdma.outage_ms",
        10,
        86_400_000,
        "Time a link that had a rail may be without any; then it is given up for the next transport named.",
    ),
    integer("rdma.registration_threads", 1, 64, "Registrations of memory at once."),
    Key {
        path: "rdma.registration_bytes_max",
        kind: Kind::AutoOr {
            min: 4096,
            max: 1 << 40,
            steps: Steps::All,
        },
        meaning: "Most bytes of one registration; larger regions are registered in several. `auto`: what the device can.",
    },
    integer(
        "rdma.staging_bytes_max",
        4 << 20,
        1 << 40,
        "Most bytes of staging buffers per device: half for peers to write, a quarter to send from, a quarter for peers to read. Only for memory that devices cannot be given; made at need.",
    ),
    integer(
        "rdma.spin_us",
        0,
        10_000,
        "Microseconds a device's thread looks for more work before it sleeps.",
    ),
    Key {
        path: "cuda.library",
        kind: Kind::Text { bytes_max: 4096 },
        meaning: "The CUDA driver: a path, or a name that the dynamic loader finds. Empty: `libcuda.so.1`. Loaded when GPU memory, an event or a stream is first named.",
    },
    Key {
        path: "cuda.gather",
        kind: Kind::Choice(&["auto", "kernel", "batch", "loop"]),
        meaning: "How many small pieces of device memory are copied: by a kernel, by batched copies, by one copy each. `auto`: by their number and size.",
    },
    Key {
        path: "cuda.share",
        kind: Kind::Flag,
        meaning: "Whether endpoints on this host map each other's GPU memory and copy from device to device. `false`: neither is ours mapped, nor theirs here; the bytes go through staging.",
    },
    integer("limits.peers_max", 1, 65_536, "Peers with a session."),
    integer(
        "limits.handles_max",
        1,
        1 << 20,
        "Offers, claims, grants and transfers open. `Busy` beyond.",
    ),
    integer(
        "limits.slots_max",
        1,
        65_536,
        "Grants that peers may be writing to, with those whose verdict is kept. `Busy` beyond.",
    ),
    integer(
        "limits.waiting_claims_max",
        1,
        1 << 20,
        "Peers' claims that wait for their offer. Claims beyond are refused with `Busy`.",
    ),
    integer(
        "limits.grants_per_peer_max",
        1,
        65_536,
        "Grants a sender works on per peer; the rest queue.",
    ),
    integer(
        "limits.unacknowledged_max",
        64,
        1 << 20,
        "Session messages kept for repetition per peer. `Busy` beyond.",
    ),
    integer("limits.parts_max", 1, 1 << 20, "Parts of one offer."),
    integer(
        "limits.ended_keys_max",
        1,
        1 << 20,
        "Ended keys remembered; the oldest goes first.",
    ),
    integer(
        "limits.handshakes_max",
        1,
        65_536,
        "Accepted connections that have not finished their handshake; more are closed at once.",
    ),
    integer(
        "deadlines.liveness_ms",
        100,
        DAY_MS,
        "Silence after which a peer is lost.",
    ),
    integer(
        "deadlines.heartbeat_ms",
        10,
        DAY_MS,
        "Time between heartbeats of an idle session; at most a third of `deadlines.liveness_ms`.",
    ),
    integer(
        "deadlines.connect_ms",
        10,
        DAY_MS,
        "Time a dial and its handshake may take.",
    ),
    integer(
        "deadlines.backoff_max_ms",
        20,
        DAY_MS,
        "Longest pause between two dials of a broken session.",
    ),
    integer(
        "deadlines.verdict_retention_ms",
        100,
        DAY_MS,
        "Time an ended grant keeps its verdict for a peer that does not ask for it.",
    ),
    integer(
        "deadlines.fence_limit_ms",
        1,
        DAY_MS,
        "Time a fence may take after a deadline; then the end is reported as quarantined.",
    ),
    integer(
        "deadlines.unmatched_ms",
        1,
        7 * DAY_MS,
        "Deadline of offers and claims that nothing meets and that set none of their own.",
    ),
    integer(
        "deadlines.hold_max_ms",
        1,
        7 * DAY_MS,
        "Longest life of an offer that an open claim holds.",
    ),
    integer(
        "deadlines.ended_keys_retention_ms",
        1,
        DAY_MS,
        "Time ended keys are remembered.",
    ),
    integer(
        "deadlines.retract_ms_max",
        1,
        60_000,
        "Longest wait inside `Offer::retract`.",
    ),
    Key {
        path: "security.mode",
        kind: Kind::Choice(&["none"]),
        meaning: "`none`: peers are not authenticated and nothing is encrypted.",
    },
    Key {
        path: "security.off_loopback",
        kind: Kind::Choice(&["refused", "insecure-allowed"]),
        meaning: "What `none` does off the loopback interface. `insecure-allowed`: anybody who reaches the port may read and write what is offered and granted.",
    },
];

/// The environment variable of a key.
pub(crate) fn variable(path: &str) -> String {
    format!("KVXFER_{}", path.replace('.', "_").to_uppercase())
}

/// The candidate that looks most like `name`.
pub(crate) fn nearest<'a>(name: &str, candidates: impl Iterator<Item = &'a str>) -> Option<&'a str> {
    // What has little in common with what was typed is no help.
    let near = |(edits, candidate): &(usize, &str)| *edits <= 2.max(candidate.len() / 3);
    let nearest = candidates.map(|candidate| (edits(name, candidate), candidate)).min();
    nearest.filter(near).map(|(_, candidate)| candidate)
}

pub(crate) fn reference() -> String {
    let defaults = toml::Table::try_from(Config::default()).unwrap_or_default();
    let mut text = String::from("| key | variable | default | values | meaning |\n| --- | --- | --- | --- | --- |\n");
    for key in KEYS {
        let default = super::layers::lookup(&defaults, key.path).map_or_else(String::new, ToString::to_string);
        // Writing to a String cannot fail.
        let _ = writeln!(
            text,
            "| `{}` | `{}` | `{}` | {} | {} |",
            key.path,
            variable(key.path),
            default,
            key.kind.describe(),
            key.meaning
        );
    }
    text
}

fn quoted(words: &[&str]) -> String {
    let quoted: Vec<String> = words.iter().map(|word| format!("`{word}`")).collect();
    quoted.join(", ")
}

/// Levenshtein distance, for suggestions.
fn edits(from: &str, to: &str) -> usize {
    let to: Vec<char> = to.chars().collect();
    let mut row: Vec<usize> = (0..=to.len()).collect();
    for (index, wanted) in from.chars().enumerate() {
        let mut diagonal = row[0];
        row[0] = index + 1;
        for column in 0..to.len() {
            let replaced = diagonal + usize::from(to[column] != wanted);
            diagonal = row[column + 1];
            row[column + 1] = replaced.min(diagonal + 1).min(row[column] + 1);
        }
    }
    row[to.len()]
}
