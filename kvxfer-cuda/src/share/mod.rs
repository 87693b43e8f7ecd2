//! Memory that endpoints on one host map of each other, so that bytes are copied from device to device without staging.
//!
//! # What is said
//! A region that is exported has a *description*: the name of its owner's socket and a secret, both random. Whoever has it
//! connects and says the secret; the owner answers with what the driver hands allocations over by (a handle of legacy IPC, or a
//! descriptor for each mapping of virtual memory management), or with the bare address if both are one process. The importer maps
//! it for the device that will copy.
//!
//! # Who may free what
//! The connection stays as long as anything is mapped. The owner asks for a region back by a message; the importer starts no more
//! copies, waits for those under way, unmaps, and says so. A process that ends closes its connection, and counts as having let
//! go when it is gone. One that is stopped still has it: the owner waits. The owner keeps the region until then.
//!
//! # Threads
//! `kvx-share` answers importers and `kvx-import` asks owners. Both start with their first work, poll, and never wait for one
//! peer. Driver calls are made on them, so that callers wait for none (but [`Share::export`], which is called when a pool
//! is registered).

mod channel;
mod client;
mod exporter;
mod handles;
mod importer;
mod server;
mod wire;

use std::sync::Arc;

use kvxfer_core::memory::{Exported, Imported, Region};
use kvxfer_core::transport::Counter;
use kvxfer_core::{Error, ErrorKind, Result};

use crate::context::Primary;
use crate::error::CudaError;
use crate::pointer::Mapping;
use crate::probe::DeviceFacts;
use exporter::{Exporter, Source};
use importer::{Destination, Import, Importer};

pub(crate) use importer::Use;

/// Both sides, of one driver.
#[derive(Debug)]
pub(crate) struct Share {
    exporter: Arc<Exporter>,
    importer: Importer,
}

impl Share {
    pub(crate) fn new(devices: &[DeviceFacts]) -> Arc<Share> {
        Arc::new(Share {
            exporter: Exporter::new(),
            importer: Importer::new(devices.to_vec()),
        })
    }

    /// Lets others map a region of a device, whose mappings these are.
    ///
    /// # Errors
    /// `Unsupported` for memory that the driver hands to no other process.
    pub(crate) fn export(
        &self,
        region: &Arc<Region>,
        primary: &Arc<Primary>,
        device: &DeviceFacts,
        mappings: &[Mapping],
    ) -> std::result::Result<Arc<dyn Exported>, CudaError> {
        let place = (region.address(), region.length());
        let source = Source::of(primary, &device.pci, place, mappings)?;
        Ok(self.exporter.export(region, source)?)
    }

    /// Begins to map what is described, for a device.
    pub(crate) fn import(&self, primary: &Arc<Primary>, device: &DeviceFacts, description: &[u8]) -> Arc<dyn Imported> {
        let destination = Destination {
            primary: Arc::clone(primary),
            ordinal: device.ordinal,
            pci: device.pci.clone(),
        };
        self.importer.import(destination, description)
    }

    /// Keeps an import mapped for a copy by the device with this number.
    ///
    /// # Errors
    /// That of an import that is gone; `Internal` for one of another domain.
    pub(crate) fn begin(&self, import: &Arc<dyn Imported>, ordinal: i32) -> Result<Use> {
        let import: &dyn std::any::Any = &**import;
        let ours = import.downcast_ref::<Import>().ok_or_else(|| {
            Error::new(ErrorKind::Internal, "a copy of imported memory").because("it was not imported by a CUDA domain")
        })?;
        ours.begin(&self.importer, ordinal)
    }

    /// Gives nothing to others any more, and waits a while until they have let go.
    pub(crate) fn close(&self) {
        self.exporter.close();
    }

    /// Why something was not imported, a line for each.
    pub(crate) fn notes(&self) -> Vec<String> {
        self.importer.notes()
    }

    /// What is shared and imported now.
    pub(crate) fn report(&self, out: &mut Vec<Counter>) {
        let (exports, importers) = self.exporter.counts();
        let now = [
            ("cuda_exports", exports),
            ("cuda_export_importers", importers),
            ("cuda_imports", self.importer.count()),
        ];
        out.extend(now.map(|(name, value)| Counter {
            name,
            labels: Vec::new(),
            value: value as f64,
        }));
    }
}
