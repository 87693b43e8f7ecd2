//! What a seed's world looks like: its model, its endpoints, and how much goes wrong in it.

use std::time::Duration;

use kvxfer_core::Result;
use kvxfer_core::flow::LinkSenderConfig;
use kvxfer_core::layout::{DType, Geometry, InnerOrder, PlaneKind, PlaneSpec, PoolLayout, Sharding};
use kvxfer_core::machine::MachineConfig;

use crate::rng::Rng;

/// How much goes wrong.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Weather {
    /// Nothing: every hand-over must arrive.
    Clear,
    /// Applications cancel, retract, restart and expire; the network is sound.
    Applications,
    /// Lanes and session connections break; nothing else. Every hand-over must arrive.
    Network,
    /// Endpoints stall, crash and restart.
    Endpoints,
    /// Everything at once.
    Storm,
}

/// What a seed's world looks like.
#[derive(Debug, Clone)]
pub(crate) struct Profile {
    pub(crate) weather: Weather,
    pub(crate) model: Model,
    /// Tensor-parallel size of the sources, which are the first nodes.
    pub(crate) sources: usize,
    /// Tensor-parallel sizes of the groups of destinations, which follow.
    pub(crate) groups: Vec<usize>,
    pub(crate) requests: usize,
    pub(crate) raw_transfers: usize,
    /// Requests begin in this time.
    pub(crate) span: Duration,
    /// All handles have ended and all is quiet by then.
    pub(crate) horizon: Duration,
    pub(crate) lanes: u16,
    pub(crate) sender: LinkSenderConfig,
    pub(crate) chunk_bytes_max: u32,
    pub(crate) slots_max: u32,
    pub(crate) machine: MachineConfig,
    pub(crate) delay_us: (u64, u64),
    pub(crate) lane_skew_us: u64,
    pub(crate) lane_refusal_percent: u64,
    pub(crate) lane_loss_permille: u64,
    pub(crate) lane_life_us_max: u64,
    pub(crate) dial_failure_percent: u64,
    pub(crate) session_break_permille: u64,
    pub(crate) session_life_us_max: u64,
    /// Of each thousand messages: given again, and given again on a dead connection.
    pub(crate) repeat_permille: (u64, u64),
    /// Of ten thousand calls: so slow that fences run into their limit.
    pub(crate) stuck_permyriad: u64,
    pub(crate) corrupt_permyriad: u64,
    /// Of ten thousand chunks: followed by a forged one.
    pub(crate) forge_permyriad: u64,
    /// Of ten thousand reads: in the middle of which the application ends the source.
    pub(crate) midway_permyriad: u64,
    /// Of a hundred handles: ended early by their application.
    pub(crate) meddling_percent: u64,
    /// Of a hundred releases and pushes: those that wait for an event.
    pub(crate) gated_percent: u64,
    /// Of a thousand events: those that fail, and those that never happen.
    pub(crate) lost_event_permille: (u64, u64),
    pub(crate) stalls: usize,
    pub(crate) crashes: usize,
    pub(crate) shutdowns: usize,
    pub(crate) partitions: usize,
    pub(crate) pool_changes: usize,
    pub(crate) drains: usize,
    pub(crate) tight_limits: bool,
    pub(crate) short_deadlines: bool,
    /// Endpoints have a device that reaches others' memory, before the transport that does not.
    pub(crate) one_sided: bool,
    /// Of a hundred writes: those that land late.
    pub(crate) late_percent: u64,
    /// Devices that fail.
    pub(crate) device_failures: usize,
    /// Of a hundred links: those that cannot be made with the device.
    pub(crate) unusable_device_percent: u64,
}

impl Profile {
    pub(crate) fn new(rng: &mut Rng) -> Profile {
        let weather = match rng.below(100) {
            0..12 => Weather::Clear,
            12..32 => Weather::Applications,
            32..50 => Weather::Network,
            50..72 => Weather::Endpoints,
            _ => Weather::Storm,
        };
        let (sources, groups) = match rng.below(12) {
            0..3 => (1, vec![1]),
            3 => (2, vec![1]),
            4 => (1, vec![2]),
            5 => (1, vec![1, 1]),
            6 => (2, vec![2]),
            7 => (2, vec![1, 1]),
            8 => (1, vec![2, 1]),
            9 => (2, vec![1, 2]),
            10 => (1, vec![4]),
            _ => (4, vec![1]),
        };
        let network = matches!(weather, Weather::Network | Weather::Storm);
        let endpoints = matches!(weather, Weather::Endpoints | Weather::Storm);
        let applications = matches!(weather, Weather::Applications | Weather::Storm);
        let if_else = |condition: bool, yes: u64, no: u64| if condition { yes } else { no };
        let tight_limits = !matches!(weather, Weather::Clear | Weather::Network) && rng.percent(20);
        let lanes = 1 + rng.below(4) as u16;
        let chunk_bytes_max = *rng.pick(&[16u32, 24, 48, 96, 256]).unwrap_or(&48);
        let delay_low = rng.within(5..100);
        Profile {
            weather,
            model: Model::new(rng),
            sources,
            groups,
            requests: rng.within(4..14) as usize,
            raw_transfers: rng.within(2..10) as usize,
            span: Duration::from_millis(rng.within(20..2_500)),
            horizon: Duration::from_secs(16),
            lanes,
            sender: LinkSenderConfig {
                lanes,
                window_bytes_min: u64::from(chunk_bytes_max) * rng.within(1..6),
                window_bytes_max: u64::from(chunk_bytes_max) * rng.within(6..12),
                window_chunks_max: rng.within(2..12) as u32,
                transfers_active_max: 64,
                transfers_max: if tight_limits { 3 } else { 1024 },
            },
            chunk_bytes_max,
            slots_max: if tight_limits { 6 } else { 256 },
            machine: machine_config(tight_limits),
            delay_us: (delay_low, delay_low + rng.within(5..300)),
            lane_skew_us: *rng.pick(&[0, 50, 400, 2_000]).unwrap_or(&0),
            lane_refusal_percent: if_else(network, rng.below(30), 0),
            lane_loss_permille: if_else(network, rng.within(100..900), 0),
            lane_life_us_max: *rng.pick(&[2_000, 20_000, 300_000]).unwrap_or(&20_000),
            dial_failure_percent: if_else(network, rng.below(30), 0),
            session_break_permille: if_else(network, rng.within(100..900), 0),
            session_life_us_max: *rng.pick(&[5_000, 200_000, 1_500_000]).unwrap_or(&200_000),
            repeat_permille: if_else(rng.percent(50), 1, 0)
                .checked_mul(30)
                .map_or((0, 0), |rate| (rate, rate / 2)),
            stuck_permyriad: if_else(weather == Weather::Storm && rng.percent(40), 30, 0),
            corrupt_permyriad: if_else(applications && rng.percent(30), 100, 0),
            forge_permyriad: if_else(applications && rng.percent(30), 150, 0),
            midway_permyriad: if_else(applications, 100, 0),
            meddling_percent: if_else(applications, rng.within(10..60), 0),
            gated_percent: *rng.pick(&[0, 25, 90]).unwrap_or(&0),
            lost_event_permille: (if_else(applications, 30, 0), if_else(applications, 20, 0)),
            stalls: if_else(endpoints, rng.below(4), 0) as usize,
            crashes: if_else(endpoints, rng.below(3), 0) as usize,
            shutdowns: if_else(endpoints && rng.percent(20), 1, 0) as usize,
            partitions: if_else(weather == Weather::Storm, rng.below(2), 0) as usize,
            pool_changes: rng.below(3) as usize,
            drains: if_else(applications && rng.percent(15), 1, 0) as usize,
            tight_limits,
            short_deadlines: applications && rng.percent(40),
            one_sided: rng.percent(50),
            late_percent: *rng.pick(&[0, 5, 40]).unwrap_or(&5),
            device_failures: if_else(rng.percent(25), 1, 0) as usize,
            unusable_device_percent: if_else(rng.percent(15), 30, 0),
        }
    }

    /// Whether nothing happens that could end a hand-over badly.
    pub(crate) fn must_arrive(&self) -> bool {
        matches!(self.weather, Weather::Clear | Weather::Network)
    }

    /// How long a fence may take.
    pub(crate) fn fence_limit(&self) -> Duration {
        if self.one_sided {
            self.machine.fence_limit.max(self.machine.liveness)
        } else {
            self.machine.fence_limit
        }
    }

    pub(crate) fn nodes(&self) -> usize {
        self.sources + self.groups.iter().sum::<usize>()
    }

    /// A node's rank and the size of its tensor-parallel group.
    pub(crate) fn rank_of(&self, node: usize) -> (u16, u16) {
        if node < self.sources {
            return (node as u16, self.sources as u16);
        }
        let mut first = self.sources;
        for size in &self.groups {
            if node < first + size {
                return ((node - first) as u16, *size as u16);
            }
            first += size;
        }
        (0, 1)
    }
}

fn machine_config(tight_limits: bool) -> MachineConfig {
    MachineConfig {
        liveness: Duration::from_millis(2_500),
        heartbeat: Duration::from_millis(500),
        connect_timeout: Duration::from_secs(1),
        backoff_max: Duration::from_millis(500),
        verdict_retention: Duration::from_secs(3),
        fence_limit: Duration::from_secs(1),
        unmatched_deadline: Duration::from_secs(4),
        hold_max: Duration::from_secs(5),
        ended_keys_retention: Duration::from_secs(2),
        ended_keys_max: if tight_limits { 4 } else { 64 },
        peers_max: 16,
        handles_max: if tight_limits { 10 } else { 256 },
        waiting_claims_max: if tight_limits { 2 } else { 64 },
        grants_per_peer_max: if tight_limits { 2 } else { 64 },
        unacknowledged_max: 4_096,
        parts_max: 256,
        ..MachineConfig::default()
    }
}

/// The cache that all nodes hold parts of.
#[derive(Debug, Clone)]
pub(crate) struct Model {
    layers: u16,
    heads: u32,
    head_size: u32,
    latent: bool,
    state: bool,
}

impl Model {
    fn new(rng: &mut Rng) -> Model {
        Model {
            layers: rng.within(1..4) as u16,
            heads: 4,
            head_size: rng.within(2..9) as u32,
            latent: rng.percent(15),
            state: rng.percent(20),
        }
    }

    pub(crate) fn has_state(&self) -> bool {
        self.state
    }

    /// One node's pool: its own tokens per block and inner order, its rank's heads.
    pub(crate) fn layout(&self, rng: &mut Rng, rank: (u16, u16)) -> Result<PoolLayout> {
        let (rank, size) = rank;
        let per_block = *rng.pick(&[2u32, 4, 8]).unwrap_or(&4);
        let blocks = 48 / per_block;
        let mut builder = PoolLayout::builder();
        let regions = 1 + rng.below(2) as u32;
        let fused = rng.percent(30);
        let order = match (fused, rng.percent(50)) {
            (false, false) => InnerOrder::NHD,
            (false, true) => InnerOrder::HND,
            (true, false) => InnerOrder::KV_NHD,
            (true, true) => InnerOrder::KV_HND,
        };
        let geometry = if self.latent {
            Geometry::latent(
                DType::U8,
                per_block,
                self.head_size * 4,
                Sharding::Replicated { rank, size },
            )
        } else {
            Geometry::attention(
                DType::U8,
                per_block,
                self.heads,
                self.head_size,
                Sharding::Heads { rank, size },
            )
        };
        let group = builder.group("tokens", geometry, blocks);
        for layer in 0..self.layers {
            let region = u32::from(layer) % regions;
            let name = format!("layer.{layer}");
            if self.latent {
                builder.plane(PlaneSpec::new(group, name, PlaneKind::Latent).region(region));
            } else if fused {
                builder.plane(
                    PlaneSpec::new(group, name, PlaneKind::Fused)
                        .region(region)
                        .order(order),
                );
            } else {
                for kind in [PlaneKind::Key, PlaneKind::Value] {
                    builder.plane(PlaneSpec::new(group, name.as_str(), kind).region(region).order(order));
                }
            }
        }
        if self.state {
            let group = builder.group("state", Geometry::state(0, Sharding::Replicated { rank, size }), 10);
            builder.plane(PlaneSpec::new(group, "layer.state", PlaneKind::State).block_length(24));
        }
        builder.build()
    }
}
