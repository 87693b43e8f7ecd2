//! Settings, with their defaults and bounds.

use std::path::PathBuf;
use std::time::Duration;

use kvxfer_core::flow::LinkSenderConfig;
use kvxfer_core::{Error, ErrorKind, Result};

use crate::topology::Pairing;

/// Most rails that a link may have.
pub const RAILS_MAX: u16 = 16;
/// Most receives per queue pair: unmatched closes are told apart by 8 bits, so there must be less than 256 of them.
pub const RECEIVE_DEPTH_MAX: u32 = 127;

/// Settings of an [`RdmaTransport`](crate::RdmaTransport). Lengths are in bytes.
#[derive(Debug, Clone)]
pub struct RdmaConfig {
    /// The verbs library; `None` finds `libibverbs.so.1` as the system's loader does.
    pub library: Option<PathBuf>,
    /// Devices that may be used, by name; empty: all.
    pub devices: Vec<String>,
    /// Rails per peer, 1 to 16; fewer if one side has fewer ports.
    pub rails_max: u16,
    /// Which ports of the two sides are joined; the side that dials decides.
    pub rail_pairs: Pairing,
    /// GID to use on RoCE ports, by index; `None` chooses by rank.
    pub gid_index: Option<u32>,
    /// Partition key; `None` uses the port's first one.
    pub partition_key: Option<u16>,
    /// InfiniBand service level, or RoCE priority, 0 to 15.
    pub service_level: u8,
    /// Traffic class of RoCE packets: the IP header's DSCP and ECN bits.
    pub traffic_class: u8,
    /// Hop limit of RoCE packets.
    pub hop_limit: u8,
    /// Path MTU in bytes: 256, 512, 1024, 2048 or 4096; `None` takes the smaller active one of both ports.
    pub mtu: Option<u32>,
    /// Acknowledgement timeout as an exponent, 1 to 31: 4.096 µs times 2 to this power.
    pub timeout: u8,
    /// Retries after that timeout, 0 to 7.
    pub retry_count: u8,
    /// Retries when the peer has no receive posted, 0 to 6. (7 would be for ever.)
    pub rnr_retry: u8,
    /// Work requests outstanding per queue pair, 16 to 16,384; less if the device has less.
    pub queue_depth: u32,
    /// Receives posted per queue pair, 2 to 127: immediates on their way at once.
    pub receive_depth: u32,
    /// Outstanding bytes per rail, at least.
    pub window_bytes_min: u64,
    /// Outstanding bytes per rail, at most.
    pub window_bytes_max: u64,
    /// Outstanding chunks per rail.
    pub window_chunks_max: u32,
    /// Transfers that share a link at once; the rest queue.
    pub transfers_active_max: u32,
    /// Transfers known to a link; `Busy` beyond.
    pub transfers_max: u32,
    /// A rail on which nothing is completed for this long while something is outstanding is given up.
    pub progress: Duration,
    /// A peer that has not confirmed within this time that it stopped writing has its queue pairs fenced.
    pub revoke: Duration,
    /// Limit for draining a queue pair and for flushing a device during a fence.
    pub fence_limit: Duration,
    /// Time for a rail to come up.
    pub connect_timeout: Duration,
    /// A link without any rail for this long after it was begun has failed.
    pub setup_limit: Duration,
    /// A link that has had no rail for this long, after it had one, has failed.
    pub outage_limit: Duration,
    /// Pause before a lost rail is tried again; doubles with each failure.
    pub backoff_min: Duration,
    /// Longest such pause.
    pub backoff_max: Duration,
    /// Links at once; `Busy` beyond.
    pub links_max: usize,
    /// Regions registered at the same time.
    pub registration_threads: usize,
    /// One registration's length, at most; `None`: what the device allows.
    pub registration_bytes_max: Option<u64>,
    /// Bytes of staging buffers per device, at most, at least 4 MiB: for memory that devices cannot be given. Half of
    /// them is for peers to write, a quarter to send from, a quarter for peers to read. Made at need.
    pub staging_bytes_max: u64,
    /// How long a device's thread polls before it sleeps. Zero turns it off.
    pub spin: Duration,
}

impl Default for RdmaConfig {
    fn default() -> Self {
        RdmaConfig {
            library: None,
            devices: Vec::new(),
            rails_max: 8,
            rail_pairs: Pairing::Auto,
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
            window_chunks_max: 1024,
            transfers_active_max: 64,
            transfers_max: 65_536,
            progress: Duration::from_secs(1),
            revoke: Duration::from_millis(400),
            fence_limit: Duration::from_millis(800),
            connect_timeout: Duration::from_secs(2),
            setup_limit: Duration::from_secs(3),
            outage_limit: Duration::from_secs(5),
            backoff_min: Duration::from_millis(20),
            backoff_max: Duration::from_secs(1),
            links_max: 1024,
            registration_threads: 4,
            registration_bytes_max: None,
            staging_bytes_max: 64 << 20,
            spin: Duration::ZERO,
        }
    }
}

impl RdmaConfig {
    /// Checks that the settings can be used together.
    ///
    /// # Errors
    /// `InvalidArgument` naming the setting and its bounds.
    pub fn check(&self) -> Result<()> {
        let range = |setting: &str, value: u64, min: u64, max: u64| {
            if (min..=max).contains(&value) {
                return Ok(());
            }
            Err(bad(setting, format!("{value} is not in {min} to {max}")))
        };
        range("rails_max", self.rails_max.into(), 1, RAILS_MAX.into())?;
        range("service_level", self.service_level.into(), 0, 15)?;
        range("hop_limit", self.hop_limit.into(), 1, 255)?;
        range("timeout", self.timeout.into(), 1, 31)?;
        range("retry_count", self.retry_count.into(), 0, 7)?;
        range("rnr_retry", self.rnr_retry.into(), 0, 6)?;
        range("queue_depth", self.queue_depth.into(), 16, 16_384)?;
        range("receive_depth", self.receive_depth.into(), 2, RECEIVE_DEPTH_MAX.into())?;
        range(
            "window_bytes_min",
            self.window_bytes_min,
            1 << 20,
            self.window_bytes_max,
        )?;
        range("window_chunks_max", self.window_chunks_max.into(), 1, 4096)?;
        range(
            "transfers_active_max",
            self.transfers_active_max.into(),
            1,
            u32::MAX.into(),
        )?;
        range("transfers_max", self.transfers_max.into(), 1, u32::MAX.into())?;
        range("staging_bytes_max", self.staging_bytes_max, 4 << 20, 1 << 40)?;
        range("links_max", self.links_max as u64, 1, 1 << 20)?;
        range("registration_threads", self.registration_threads as u64, 1, 64)?;
        if let Some(mtu) = self.mtu
            && ![256, 512, 1024, 2048, 4096].contains(&mtu)
        {
            return Err(bad("mtu", format!("{mtu} is none of 256, 512, 1024, 2048, 4096")));
        }
        if self.registration_bytes_max.is_some_and(|bytes| bytes < 4096) {
            return Err(bad("registration_bytes_max", "it is below one page of 4096".into()));
        }
        if self.backoff_min.is_zero() || self.backoff_min > self.backoff_max {
            return Err(bad("backoff_min", "it is zero or above backoff_max".into()));
        }
        for (setting, value) in [
            ("progress", self.progress),
            ("revoke", self.revoke),
            ("fence_limit", self.fence_limit),
            ("connect_timeout", self.connect_timeout),
            ("setup_limit", self.setup_limit),
            ("outage_limit", self.outage_limit),
        ] {
            if value.is_zero() {
                return Err(bad(setting, "it is zero".into()));
            }
        }
        Ok(())
    }

    pub(crate) fn sender(&self, lanes: u16) -> LinkSenderConfig {
        LinkSenderConfig {
            lanes,
            window_bytes_min: self.window_bytes_min,
            window_bytes_max: self.window_bytes_max,
            window_chunks_max: self.window_chunks_max,
            transfers_active_max: self.transfers_active_max,
            transfers_max: self.transfers_max,
        }
    }
}

fn bad(setting: &str, why: String) -> Error {
    Error::new(
        ErrorKind::InvalidArgument,
        format!("setting `{setting}` of the rdma transport"),
    )
    .because(why)
    .remedy("choose a value inside the bounds")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn defaults_are_sound_and_bounds_are_named() {
        RdmaConfig::default().check().unwrap();
        let wrong = RdmaConfig {
            rnr_retry: 7,
            ..RdmaConfig::default()
        };
        let error = wrong.check().unwrap_err();
        assert!(error.to_string().contains("rnr_retry") && error.to_string().contains("0 to 6"));
        let wrong = RdmaConfig {
            mtu: Some(1500),
            ..RdmaConfig::default()
        };
        assert!(wrong.check().unwrap_err().to_string().contains("1500"));
    }
}
