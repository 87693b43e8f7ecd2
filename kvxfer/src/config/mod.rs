//! Configuration: one typed schema, filled from code, a TOML file and `KVXFER_*` variables with the same keys.
//!
//! Precedence, highest first: code, environment, file, default. Unknown keys and variables are refused with the
//! nearest known name; values out of range are refused with the key, the value and where it came from.
//!
//! ```
//! use kvxfer::Config;
//!
//! let mut config = Config::from_toml_str("transports = [\"tcp\"]\n[limits]\nslots_max = 512")?;
//! config.deadlines.liveness_ms = 5_000; // code goes over the file
//! config.validate()?;
//! assert!(Config::from_toml_str("[limits]\nslot_max = 1").unwrap_err().to_string().contains("limits.slots_max"));
//! # Ok::<(), kvxfer::Error>(())
//! ```

mod layers;
mod rdma;
mod schema;

use std::net::{Ipv4Addr, SocketAddr};
use std::path::Path;
use std::time::Duration;

use serde::{Deserialize, Serialize};

use kvxfer_core::Result;
use kvxfer_core::machine::MachineConfig;
use kvxfer_cuda::CudaConfig;

use layers::Sources;
pub use rdma::Rdma;
pub(crate) use rdma::split_pair;

/// An endpoint's settings. Fields are the keys of the file and, in upper case with `KVXFER_` before them and `_` for
/// `.`, the environment variables. [`Config::reference`] lists them with defaults and ranges.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Config {
    /// Label of this endpoint in logs and in peers' messages. Not an identity.
    pub name: String,
    /// Where to listen; port 0 takes a free one. A wildcard address publishes the interfaces' addresses.
    pub listen: Vec<SocketAddr>,
    /// Ways of moving bytes, in order of preference. What is named and missing is an error; `auto` takes what there is.
    pub transports: Vec<String>,
    /// Interfaces whose addresses may be published when listening on a wildcard address. Empty: all.
    pub interfaces: Vec<String>,
    /// Devices that transports with devices may use. Empty: all.
    pub devices: Vec<String>,
    /// The TCP transport.
    pub tcp: Tcp,
    /// The RDMA transport.
    pub rdma: Rdma,
    /// GPU memory.
    pub cuda: CudaConfig,
    /// What may be open at once.
    pub limits: Limits,
    /// How long things may take.
    pub deadlines: Deadlines,
    /// Who may talk to this endpoint.
    pub security: Security,
    #[serde(skip)]
    sources: Sources,
}

/// Settings of the TCP transport.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Tcp {
    /// Connections per peer that carry KV bytes.
    pub lanes: u16,
    /// Threads that serve all lanes of all peers. 0: half the cores, at least 1, at most 8.
    pub data_threads: u16,
    /// Time a data thread looks for more work before it sleeps, in microseconds. Only where there are more cores
    /// than data threads plus 2.
    pub spin_us: u32,
    /// Send buffer of a lane's socket in bytes. 0: the system's choice.
    pub send_buffer_bytes: u32,
    /// Receive buffer of a lane's socket in bytes. 0: the system's choice.
    pub receive_buffer_bytes: u32,
    /// Least bytes in flight per lane.
    pub window_bytes_min: u64,
    /// Most bytes in flight per lane.
    pub window_bytes_max: u64,
}

/// What may be open at once. At a limit callers get `Busy`, and peers back-pressure.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Limits {
    /// Peers with a session.
    pub peers_max: u32,
    /// Offers, claims, grants and transfers open.
    pub handles_max: u32,
    /// Grants that peers may be writing to, with those whose verdict is kept.
    pub slots_max: u32,
    /// Peers' claims that wait for their offer.
    pub waiting_claims_max: u32,
    /// Grants a sender works on per peer; the rest queue.
    pub grants_per_peer_max: u32,
    /// Session messages kept for repetition per peer.
    pub unacknowledged_max: u32,
    /// Parts of one offer.
    pub parts_max: u32,
    /// Ended keys remembered.
    pub ended_keys_max: u32,
    /// Accepted connections that have not finished their handshake.
    pub handshakes_max: u32,
}

/// How long things may take, in milliseconds.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Deadlines {
    /// Silence after which a peer is lost.
    pub liveness_ms: u64,
    /// Time between heartbeats of an idle session.
    pub heartbeat_ms: u64,
    /// Time a dial and its handshake may take.
    pub connect_ms: u64,
    /// Longest pause between two dials of a broken session.
    pub backoff_max_ms: u64,
    /// Time an ended grant keeps its verdict for a peer that does not ask.
    pub verdict_retention_ms: u64,
    /// Time a fence may take after a deadline before the end is reported as quarantined.
    pub fence_limit_ms: u64,
    /// Deadline of offers and claims that nothing meets and that set none of their own.
    pub unmatched_ms: u64,
    /// Longest life of an offer that an open claim holds.
    pub hold_max_ms: u64,
    /// Time ended keys are remembered.
    pub ended_keys_retention_ms: u64,
    /// Longest wait inside `Offer::retract`.
    pub retract_ms_max: u64,
}

/// Who may talk to this endpoint.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Security {
    /// `none`: no authentication, no encryption.
    pub mode: String,
    /// What `none` does off the loopback interface: `refused`, or `insecure-allowed`.
    pub off_loopback: String,
}

impl Default for Config {
    fn default() -> Self {
        Config {
            name: String::new(),
            listen: vec![SocketAddr::from((Ipv4Addr::LOCALHOST, 0))],
            transports: vec!["auto".into()],
            interfaces: Vec::new(),
            devices: Vec::new(),
            tcp: Tcp::default(),
            rdma: Rdma::default(),
            cuda: CudaConfig::default(),
            limits: Limits::default(),
            deadlines: Deadlines::default(),
            security: Security::default(),
            sources: Sources::default(),
        }
    }
}

impl Default for Tcp {
    fn default() -> Self {
        Tcp {
            lanes: 2,
            data_threads: 0,
            spin_us: 20,
            send_buffer_bytes: 4 << 20,
            receive_buffer_bytes: 4 << 20,
            window_bytes_min: 2 << 20,
            window_bytes_max: 64 << 20,
        }
    }
}

impl Default for Limits {
    fn default() -> Self {
        Limits {
            peers_max: 256,
            handles_max: 16_384,
            slots_max: 4_096,
            waiting_claims_max: 4_096,
            grants_per_peer_max: 64,
            unacknowledged_max: 16_384,
            parts_max: 16_384,
            ended_keys_max: 16_384,
            handshakes_max: 256,
        }
    }
}

impl Default for Deadlines {
    fn default() -> Self {
        Deadlines {
            liveness_ms: 2_500,
            heartbeat_ms: 500,
            connect_ms: 1_000,
            backoff_max_ms: 500,
            verdict_retention_ms: 30_000,
            fence_limit_ms: 1_000,
            unmatched_ms: 120_000,
            hold_max_ms: 600_000,
            ended_keys_retention_ms: 60_000,
            retract_ms_max: 100,
        }
    }
}

impl Default for Security {
    fn default() -> Self {
        Security {
            mode: "none".into(),
            off_loopback: "refused".into(),
        }
    }
}

impl Config {
    /// The settings in this TOML text, over the defaults. The environment is not read.
    ///
    /// # Errors
    /// `InvalidArgument` for text that is no TOML, unknown keys, wrong types and values out of range.
    pub fn from_toml_str(text: &str) -> Result<Config> {
        layers::Layers::new().file_text(text, "text")?.finish()
    }

    /// The settings in this TOML file, over the defaults. The environment is not read.
    ///
    /// # Errors
    /// As [`from_toml_str`](Self::from_toml_str), and `InvalidArgument` for a file that cannot be read.
    pub fn from_toml_file(path: impl AsRef<Path>) -> Result<Config> {
        layers::Layers::new().file(path.as_ref())?.finish()
    }

    /// The settings of the `KVXFER_*` variables, over the defaults.
    ///
    /// # Errors
    /// As [`from_toml_str`](Self::from_toml_str); a variable that begins with `KVXFER_` and is none of ours is unknown.
    pub fn from_env() -> Result<Config> {
        layers::Layers::new().variables(std::env::vars_os())?.finish()
    }

    /// The `KVXFER_*` variables over a file over the defaults.
    ///
    /// # Errors
    /// As [`from_toml_file`](Self::from_toml_file) and [`from_env`](Self::from_env).
    pub fn load(path: impl AsRef<Path>) -> Result<Config> {
        layers::Layers::new()
            .file(path.as_ref())?
            .variables(std::env::vars_os())?
            .finish()
    }

    /// The `KVXFER_*` variables of this list over a file's text over the defaults: what [`load`](Self::load) does,
    /// without touching the process.
    ///
    /// # Errors
    /// As [`load`](Self::load).
    pub fn from_layers<K, V>(text: &str, variables: impl IntoIterator<Item = (K, V)>) -> Result<Config>
    where
        K: Into<std::ffi::OsString>,
        V: Into<std::ffi::OsString>,
    {
        let variables = variables.into_iter().map(|(key, value)| (key.into(), value.into()));
        layers::Layers::new()
            .file_text(text, "text")?
            .variables(variables)?
            .finish()
    }

    /// Sets one key from text, as its variable would: `limits.slots_max` to `512`, lists with commas.
    ///
    /// # Errors
    /// `InvalidArgument` for an unknown key, a wrong type and a value out of range. What only shows between several
    /// keys is left to [`validate`](Self::validate).
    pub fn set(&mut self, key: &str, value: &str) -> Result<()> {
        layers::set(self, key, value)
    }

    /// Checks every value, as building an endpoint does.
    ///
    /// # Errors
    /// `InvalidArgument` naming the key, the value, where it came from and the range.
    pub fn validate(&self) -> Result<()> {
        layers::validate(self)
    }

    /// Every key with its variable, default, range and meaning, as a Markdown table.
    pub fn reference() -> String {
        schema::reference()
    }

    pub(crate) fn machine(&self, name: &str) -> MachineConfig {
        let milliseconds = Duration::from_millis;
        MachineConfig {
            name: name.to_owned(),
            liveness: milliseconds(self.deadlines.liveness_ms),
            heartbeat: milliseconds(self.deadlines.heartbeat_ms),
            connect_timeout: milliseconds(self.deadlines.connect_ms),
            backoff_max: milliseconds(self.deadlines.backoff_max_ms),
            verdict_retention: milliseconds(self.deadlines.verdict_retention_ms),
            fence_limit: milliseconds(self.deadlines.fence_limit_ms),
            unmatched_deadline: milliseconds(self.deadlines.unmatched_ms),
            hold_max: milliseconds(self.deadlines.hold_max_ms),
            ended_keys_retention: milliseconds(self.deadlines.ended_keys_retention_ms),
            ended_keys_max: self.limits.ended_keys_max as usize,
            peers_max: self.limits.peers_max as usize,
            handles_max: self.limits.handles_max as usize,
            waiting_claims_max: self.limits.waiting_claims_max as usize,
            grants_per_peer_max: self.limits.grants_per_peer_max as usize,
            unacknowledged_max: self.limits.unacknowledged_max as usize,
            parts_max: self.limits.parts_max,
        }
    }
}

#[cfg(test)]
mod tests;
