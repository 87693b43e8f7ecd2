//! Building an endpoint.

use std::net::SocketAddr;
use std::sync::Arc;
use std::thread;

use parking_lot::{Condvar, Mutex};
use tokio::runtime::Handle as RuntimeHandle;

use kvxfer_core::flow::SlotTable;
use kvxfer_core::machine::{Machine, MachineSetup};
use kvxfer_core::wire::{EndpointAddress, RankCoordinates};
use kvxfer_core::{Error, ErrorKind, Incarnation, Result};

use crate::config::{Config, Security};
use crate::control::{Parts, Shared, bind};
use crate::random;
use crate::transports::Transports;

use super::{Closing, Endpoint};

/// Virtual; what is not touched costs nothing.
const CONTROL_STACK_BYTES: usize = 1 << 20;

/// Settings of an endpoint to be built. Setters go over [`config`](Self::config), in any order.
#[derive(Debug, Default)]
pub struct Builder {
    config: Option<Config>,
    name: Option<String>,
    listen: Option<Vec<SocketAddr>>,
    transports: Option<Vec<String>>,
    security: Option<Security>,
    rank: RankCoordinates,
    runtime: Option<RuntimeHandle>,
}

impl Builder {
    /// The settings to start from. Without this call they are the defaults with the `KVXFER_*` variables over them.
    #[must_use]
    pub fn config(mut self, config: Config) -> Self {
        self.config = Some(config);
        self
    }

    /// Label of the endpoint: `name`.
    #[must_use]
    pub fn name(mut self, name: impl Into<String>) -> Self {
        self.name = Some(name.into());
        self
    }

    /// Where to listen: `listen`. Call it twice for an IPv4 and an IPv6 address.
    #[must_use]
    pub fn listen(mut self, address: SocketAddr) -> Self {
        self.listen.get_or_insert_default().push(address);
        self
    }

    /// Transports in order of preference: `transports`.
    #[must_use]
    pub fn transports<T: Into<String>>(mut self, names: impl IntoIterator<Item = T>) -> Self {
        self.transports = Some(names.into_iter().map(Into::into).collect());
        self
    }

    /// Who may talk to the endpoint: `security`.
    #[must_use]
    pub fn security(mut self, security: Security) -> Self {
        self.security = Some(security);
        self
    }

    /// Where the endpoint stands in its engine.
    #[must_use]
    pub fn rank(mut self, rank: RankCoordinates) -> Self {
        self.rank = rank;
        self
    }

    /// Runs the control plane on this tokio runtime (with its I/O and time drivers enabled) instead of a thread of
    /// its own. A runtime that is blocked for long loses its sessions.
    #[must_use]
    pub fn runtime(mut self, runtime: RuntimeHandle) -> Self {
        self.runtime = Some(runtime);
        self
    }

    /// Builds it: opens the transports and the listener and starts the control thread.
    ///
    /// # Errors
    /// `InvalidArgument` for settings, `Unsupported` for a transport that is named and missing, `Unauthenticated` for
    /// listening off loopback without saying that this is wanted, `ResourceExhausted` for a port in use or when
    /// the system refuses something.
    pub fn build(self) -> Result<Endpoint> {
        let config = self.settings()?;
        let name = match config.name.is_empty() {
            true => format!("kvxfer-{}", std::process::id()),
            false => config.name.clone(),
        };
        let (listeners, sockets) = bind(&config)?;
        let slots = SlotTable::new(config.limits.slots_max);
        let transports = Transports::build(&config, &slots)?;
        let incarnation = Incarnation::from_bits(random::bits()?);
        let address = EndpointAddress {
            sockets,
            incarnation: Some(incarnation),
            rank: self.rank,
        };
        let machine = Machine::new(MachineSetup {
            config: config.machine(&name),
            incarnation,
            address: address.clone(),
            transports: transports.offers(),
            slots,
            seed: random::bits()?,
        });
        // Built here so that its errors are told here; it runs on its thread.
        let own_runtime = match &self.runtime {
            Some(_) => None,
            None => Some(own_runtime()?),
        };
        let handle = match (&self.runtime, &own_runtime) {
            (Some(handle), _) => handle.clone(),
            (None, Some(runtime)) => runtime.handle().clone(),
            (None, None) => return Err(Error::new(ErrorKind::Internal, "no runtime")),
        };
        let shared = Shared::new(Parts {
            name,
            incarnation,
            address,
            config,
            transports,
            machine,
            runtime: handle.clone(),
        })?;
        let life = Arc::clone(&shared).control(listeners);
        let control = match own_runtime {
            Some(runtime) => {
                let spawned = thread::Builder::new()
                    .name("kvx-control".into())
                    .stack_size(CONTROL_STACK_BYTES)
                    .spawn(move || runtime.block_on(life));
                Some(spawned.map_err(|error| {
                    shared.transports.shutdown();
                    Error::new(ErrorKind::ResourceExhausted, "starting thread kvx-control")
                        .because(error.to_string())
                        .remedy("raise the limit of processes (ulimit -u)")
                })?)
            }
            None => {
                handle.spawn(life);
                None
            }
        };
        tracing::info!(endpoint = shared.name, incarnation = %shared.incarnation, sockets = ?shared.address.sockets, "endpoint built");
        Ok(Endpoint {
            shared,
            control: Mutex::new(control),
            closing: Mutex::new(Closing::Open),
            has_closed: Condvar::new(),
        })
    }

    fn settings(&self) -> Result<Config> {
        let mut config = match &self.config {
            Some(config) => config.clone(),
            None => Config::from_env()?,
        };
        if let Some(name) = &self.name {
            config.name.clone_from(name);
        }
        if let Some(listen) = &self.listen {
            config.listen.clone_from(listen);
        }
        if let Some(transports) = &self.transports {
            config.transports.clone_from(transports);
        }
        if let Some(security) = &self.security {
            config.security = security.clone();
        }
        config.validate()?;
        Ok(config)
    }
}

fn own_runtime() -> Result<tokio::runtime::Runtime> {
    tokio::runtime::Builder::new_current_thread()
        .enable_io()
        .enable_time()
        .build()
        .map_err(|error| {
            Error::new(ErrorKind::ResourceExhausted, "the control runtime")
                .because(error.to_string())
                .remedy("raise the limit of open files (ulimit -n)")
        })
}
