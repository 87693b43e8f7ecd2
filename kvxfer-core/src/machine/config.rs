//! Limits and deadlines.

use std::time::Duration;

/// Limits and deadlines. Every queue has one.
#[derive(Debug, Clone)]
pub struct MachineConfig {
    /// The endpoint's label.
    pub name: String,
    /// Silence after which a peer is lost (default 2.5 s, so that it is reported within 3 s).
    pub liveness: Duration,
    /// Time between heartbeats of an idle session (default 500 ms).
    pub heartbeat: Duration,
    /// Time a dial and handshake may take (default 1 s).
    pub connect_timeout: Duration,
    /// Longest back-off between dials (default 500 ms).
    pub backoff_max: Duration,
    /// How long an ended slot keeps its verdict without acknowledgement (default 30 s).
    pub verdict_retention: Duration,
    /// How long after its deadline a handle's fence may take before it is reported quarantined (default 1 s).
    pub fence_limit: Duration,
    /// Default deadline of an offer nobody claims, and of a claim nothing meets (default 120 s).
    pub unmatched_deadline: Duration,
    /// Longest life of an offer with an open claim (default 600 s).
    pub hold_max: Duration,
    /// How long ended keys are remembered (default 60 s).
    pub ended_keys_retention: Duration,
    /// How many ended keys are remembered.
    pub ended_keys_max: usize,
    /// Peers, at most.
    pub peers_max: usize,
    /// Offers plus claims plus grants plus transfers open at once, at most.
    pub handles_max: usize,
    /// Claims of peers that wait for their offer, at most.
    pub waiting_claims_max: usize,
    /// Grants active per peer, at most; the rest queue.
    pub grants_per_peer_max: usize,
    /// Messages kept for repetition per session, at most; `Busy` beyond.
    pub unacknowledged_max: usize,
    /// Parts of one offer, at most.
    pub parts_max: u32,
}

impl Default for MachineConfig {
    fn default() -> Self {
        MachineConfig {
            name: String::new(),
            liveness: Duration::from_millis(2500),
            heartbeat: Duration::from_millis(500),
            connect_timeout: Duration::from_secs(1),
            backoff_max: Duration::from_millis(500),
            verdict_retention: Duration::from_secs(30),
            fence_limit: Duration::from_secs(1),
            unmatched_deadline: Duration::from_secs(120),
            hold_max: Duration::from_secs(600),
            ended_keys_retention: Duration::from_secs(60),
            ended_keys_max: 65_536,
            peers_max: 1024,
            handles_max: 65_536,
            waiting_claims_max: 16_384,
            grants_per_peer_max: 256,
            unacknowledged_max: 65_536,
            parts_max: 65_536,
        }
    }
}

/// A key's bytes, at most.
pub const KEY_BYTES_MAX: usize = 256;
/// Source ranks a claim names, at most.
pub const SOURCES_MAX: usize = 256;
/// First back-off between dials; it doubles up to [`MachineConfig::backoff_max`].
pub(super) const BACKOFF_FIRST: Duration = Duration::from_millis(20);
/// Verdicts noted are acknowledged in batches of this many, or with the next heartbeat.
pub(super) const VERDICT_ACKS_MAX: usize = 64;
/// Messages received are acknowledged at least this often, even if there is nothing else to say.
pub(super) const ACKNOWLEDGE_EVERY: u64 = 64;
/// Connections in handshake, at most; more are closed at once.
pub(super) const HANDSHAKES_MAX: usize = 1024;
/// A sender binds a grant to its session (so that its owner hears of the sender's death) if it lasts this long.
pub(super) const BIND_AFTER: Duration = Duration::from_millis(200);
/// Pushes of so many bytes are planned at the next turn, not on the caller's thread: with cold caches the plan of 160
/// planes takes 20 µs and more, which the transfer (4 ms and more) does not notice and the model's thread does.
pub(super) const PLAN_LATER_BYTES: u64 = 8 << 20;
/// How often something that found no room (a slot, a place in a link) tries again.
pub(super) const RETRY_AFTER: Duration = Duration::from_millis(5);
/// How often fences that no event announces are looked at.
pub(super) const FENCE_POLL: Duration = Duration::from_millis(10);
/// Session protocol versions spoken, lowest and highest.
pub const VERSIONS: (u16, u16) = (1, 1);
