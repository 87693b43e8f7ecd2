//! Owning types over libibverbs: what is made is destroyed, in order, and every refusal names its verb and device.
//!
//! # Ownership
//! Each object holds what it was made from by `Arc`, so that objects go in the one order that verbs allow, whatever
//! the order in which their owners drop them: a queue pair before its completion queues, these before their channel,
//! memory regions and queue pairs before their protection domain, everything before the device's context, and the
//! context before the library. The library stays mapped for the life of the process once it was loaded (a provider
//! may have threads and thread-local destructors); nothing else is global.
//!
//! # Threads
//! Verbs are thread-safe, and so are these types, with one exception that the compiler enforces: posting needs
//! `&mut QueuePair`, so that a queue pair's send queue has one writer, whose credits can therefore be exact.
//!
//! ```compile_fail,E0596
//! use kvxfer_rdma::verbs::{PostError, QueuePair, SendBatch};
//! fn two_writers(pair: &QueuePair, batch: &mut SendBatch) -> Result<(), PostError> {
//!     pair.post_send(batch) // needs `&mut QueuePair`
//! }
//! ```
//!
//! ```
//! use kvxfer_rdma::verbs::{PostError, QueuePair, SendBatch};
//! fn one_writer(pair: &mut QueuePair, batch: &mut SendBatch) -> Result<(), PostError> {
//!     pair.post_send(batch)
//! }
//! ```

mod completion;
mod context;
mod error;
mod event;
mod explain;
mod library;
mod limits;
mod memory;
mod port;
mod post;
mod queue_pair;

pub use completion::{Completion, CompletionBuffer, CompletionChannel, CompletionQueue, ErrorClass, Status};
pub use context::{Context, DeviceAttributes, TransportKind};
pub use error::VerbsError;
pub use event::{AsyncEvent, AsyncEventKind};
pub use library::{DeviceListing, ForkStatus, Library};
pub use memory::{Access, DmabufSupport, MemoryRegion, ProtectionDomain};
pub use port::{GidEntry, GidKind, LinkLayer, Mtu, PortAttributes, PortState};
pub use post::{Operation, PostError, Request, SendBatch, Sge};
pub use queue_pair::{InitState, PathAddress, QpState, QueuePair, QueuePairCapacity, ReceiveState, SendState};

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn objects_may_move_between_threads() {
        fn sent<T: Send>() {}
        fn shared<T: Sync>() {}
        sent::<SendBatch>();
        sent::<QueuePair>();
        shared::<QueuePair>();
        shared::<CompletionQueue>();
        shared::<CompletionChannel>();
        shared::<MemoryRegion>();
        shared::<ProtectionDomain>();
        shared::<Context>();
        shared::<Library>();
        sent::<VerbsError>();
    }
}
