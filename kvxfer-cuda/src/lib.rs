//! GPU memory: the CUDA driver behind one seam, the memory domain of its devices, and ordering against kernels.
//!
//! # Layers
//! * [`driver`] is the driver's library, loaded at run time: a table of typed functions, each counted, each named when it
//!   fails. Nothing else of the crate knows how a function is found.
//! * [`probe()`] says what a machine has and why not more, without making anything on a device.
//! * [`Cuda`] is the driver in use. It classifies addresses by asking, makes regions of device memory (whose domain moves
//!   their bytes to and from staging, exports them as dmabufs and to other endpoints on the host, and knows whether they are
//!   still what they were), captures events, and lets streams wait.
//!
//! # With and without CUDA
//! Nothing is linked. Without the library, with one that is too old, and without devices the answer is an
//! [`Availability`], never a panic:
//!
//! ```
//! use kvxfer_cuda::{CudaConfig, probe};
//! let found = probe(&CudaConfig::default());
//! match found.refusal() {
//!     None => println!("{} devices", found.devices().len()),
//!     Some(error) => println!("{error}"),
//! }
//! ```
//!
//! # Contexts
//! Everything happens in the primary context of the device that the caller's memory is on, which is retained while
//! something of ours is there; no other device gets a context. On threads that are not ours it is current only during a
//! call. Around each call the thread's capture mode is relaxed, so that a graph which the engine is capturing meanwhile is
//! not voided.
//!
//! # Never waiting in the driver
//! No call on a transfer's way waits for a stream, an event or a device. Copies end with a word that the device writes
//! into page-locked memory; events are asked for by one thread; and a thread per device hands copies over, so that a
//! driver call that is held up (by the engine's, which hold its locks) holds up no other device and no other memory.

mod config;
mod context;
mod cuda;
mod domain;
pub mod driver;
mod error;
mod event;
mod hold;
mod kernels;
mod pointer;
mod probe;
mod share;

pub use config::{CudaConfig, Gather};
pub use cuda::Cuda;
pub use error::CudaError;
pub use event::CapturedEvent;
pub use hold::StreamHold;
pub use pointer::{Extent, Mapping, Pointer, PointerKind};
pub use probe::{Availability, DeviceFacts, Facts, WriteOrdering, probe};
