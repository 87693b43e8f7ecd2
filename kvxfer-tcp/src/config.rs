//! Settings, with their defaults and bounds.

use std::time::Duration;

use kvxfer_core::flow::LinkSenderConfig;
use kvxfer_core::{Error, ErrorKind, Result};

/// Most data threads that a transport may have.
pub(crate) const DATA_THREADS_MAX: usize = 64;
/// Most lanes that a link may have.
pub(crate) const LANES_MAX: u16 = 64;

/// Settings of a [`TcpTransport`](crate::TcpTransport). Lengths are in bytes.
#[derive(Debug, Clone)]
pub struct TcpConfig {
    /// Data threads, 1 to 64. Default: half the cores, at least 1 and at most 8.
    pub data_threads: usize,
    /// Lanes per peer, 1 to 64. The smaller number of the two sides counts.
    pub lanes: u16,
    /// How long a data thread polls before it sleeps. Zero turns it off.
    pub spin: Duration,
    /// `SO_SNDBUF` of a lane; 0 leaves it to the system.
    pub send_buffer_bytes: usize,
    /// `SO_RCVBUF` of a lane; 0 leaves it to the system.
    pub receive_buffer_bytes: usize,
    /// Time for a lane to connect and to exchange hellos.
    pub connect_timeout: Duration,
    /// Pause before a lost lane is dialed again; doubles with each failure.
    pub backoff_min: Duration,
    /// Longest such pause.
    pub backoff_max: Duration,
    /// Links at once; `Busy` beyond.
    pub links_max: usize,
    /// Largest transfer that the submitting thread may write to an idle lane itself; 0 turns it off.
    pub inline_bytes_max: u64,
    /// Staging buffers (of 1 MiB, allocated at need) of each data thread, at least 2.
    pub staging_buffers_max: usize,
    /// Payload bytes of one system call, 4 KiB to 1 MiB.
    pub call_bytes_max: u32,
    /// Outstanding bytes per lane, at least.
    pub window_bytes_min: u64,
    /// Outstanding bytes per lane, at most.
    pub window_bytes_max: u64,
    /// Outstanding chunks per lane.
    pub window_chunks_max: u32,
    /// Transfers that share a link at once; the rest queue.
    pub transfers_active_max: u32,
    /// Transfers known to a link; `Busy` beyond.
    pub transfers_max: u32,
    /// Time for running copies to end at shutdown. Staging that a device still holds after it is leaked, never freed.
    pub shutdown_timeout: Duration,
}

impl Default for TcpConfig {
    fn default() -> Self {
        let cores = cores();
        let data_threads = (cores / 2).clamp(1, 8);
        // Polling steals the core that the application or the peer needs unless there are cores to spare.
        let spin = if cores > data_threads + 2 {
            Duration::from_micros(20)
        } else {
            Duration::ZERO
        };
        TcpConfig {
            data_threads,
            lanes: 2,
            spin,
            send_buffer_bytes: 4 << 20,
            receive_buffer_bytes: 4 << 20,
            connect_timeout: Duration::from_secs(2),
            backoff_min: Duration::from_millis(20),
            backoff_max: Duration::from_secs(1),
            links_max: 1024,
            inline_bytes_max: 32 << 10,
            staging_buffers_max: 16,
            call_bytes_max: 1 << 20,
            window_bytes_min: 2 << 20,
            window_bytes_max: 64 << 20,
            window_chunks_max: 1024,
            transfers_active_max: 64,
            transfers_max: 65_536,
            shutdown_timeout: Duration::from_secs(1),
        }
    }
}

impl TcpConfig {
    /// Checks that the settings can be used together.
    ///
    /// # Errors
    /// `InvalidArgument` naming the setting and its bounds.
    pub fn check(&self) -> Result<()> {
        let bad = |setting: &str, why: String| {
            Err(Error::new(
                ErrorKind::InvalidArgument,
                format!("setting `{setting}` of the tcp transport"),
            )
            .because(why)
            .remedy("choose a value inside the bounds"))
        };
        if !(1..=DATA_THREADS_MAX).contains(&self.data_threads) {
            return bad(
                "data_threads",
                format!("{} is not in 1..={DATA_THREADS_MAX}", self.data_threads),
            );
        }
        if !(1..=LANES_MAX).contains(&self.lanes) {
            return bad("lanes", format!("{} is not in 1..={LANES_MAX}", self.lanes));
        }
        if !(4096..=1 << 20).contains(&self.call_bytes_max) {
            return bad(
                "call_bytes_max",
                format!("{} is not in 4096..=1048576", self.call_bytes_max),
            );
        }
        if self.staging_buffers_max < 2 {
            return bad(
                "staging_buffers_max",
                format!("{} is less than 2", self.staging_buffers_max),
            );
        }
        if self.connect_timeout.is_zero() {
            return bad("connect_timeout", "it is zero".into());
        }
        if self.backoff_min.is_zero() || self.backoff_min > self.backoff_max {
            return bad(
                "backoff_min",
                format!(
                    "{:?} is zero or above backoff_max ({:?})",
                    self.backoff_min, self.backoff_max
                ),
            );
        }
        if self.window_bytes_min < 1 << 20 || self.window_bytes_min > self.window_bytes_max {
            return bad(
                "window_bytes_min",
                format!(
                    "{} is below one chunk (1048576) or above window_bytes_max ({})",
                    self.window_bytes_min, self.window_bytes_max
                ),
            );
        }
        for (setting, value) in [
            ("links_max", self.links_max as u64),
            ("window_chunks_max", u64::from(self.window_chunks_max)),
            ("transfers_active_max", u64::from(self.transfers_active_max)),
            ("transfers_max", u64::from(self.transfers_max)),
        ] {
            if value == 0 {
                return bad(setting, "it is zero".into());
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

fn cores() -> usize {
    std::thread::available_parallelism().map_or(1, |cores| cores.get())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn defaults_are_valid_and_nonsense_is_named() {
        TcpConfig::default().check().unwrap();
        let config = TcpConfig {
            lanes: 0,
            ..TcpConfig::default()
        };
        let error = config.check().unwrap_err();
        assert_eq!(error.kind(), ErrorKind::InvalidArgument);
        assert!(error.to_string().contains("lanes"), "{error}");
        let config = TcpConfig {
            window_bytes_min: 4096,
            ..TcpConfig::default()
        };
        assert!(config.check().unwrap_err().to_string().contains("window_bytes_min"));
    }
}
