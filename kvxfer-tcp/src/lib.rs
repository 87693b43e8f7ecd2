//! The TCP transport: striped lanes on a fixed pool of data threads.
//!
//! # How it moves bytes
//! A link to a peer has a few *lanes*, each a TCP connection that carries chunks and acknowledgements both ways. A
//! chunk is gathered from the source's planes by one vectored `sendmsg` and scattered into the destination's planes
//! by one vectored `recvmsg`; host memory is never copied in between. What to send next, what may be placed and what
//! is fenced is decided in [`kvxfer_core::flow`]; this crate does the input and output around it.
//!
//! # Threads
//! Each lane is owned by one data thread (`kvx-data-N`), which alone reads from it. Threads wait in `epoll`, all
//! sockets are non-blocking, readiness is edge-triggered (so that a lane costs one `epoll_ctl` in its life), and an idle
//! endpoint wakes up for nothing. A caller that submits a small transfer to an idle lane writes it to the socket
//! itself, without blocking, which saves one thread wake-up.
//!
//! # Fences
//! Each call that names blocks is non-blocking, moves at most 1 MiB and runs inside the gate of the source or of the slot. A
//! gate that is closed and empty therefore means that no byte moves any more. A copy into or out of memory
//! without a host view holds its gate from start to end.
//!
//! # References
//! A peer on the same host may map this endpoint's device memory ([`MemoryDomain::export`]). Once it has, chunks are sent to it
//! as lists of runs of that memory in place of their bytes, and it copies by itself, inside its slot's gate. Then it asks
//! whether the copy counts; the answer is whether the source's gate is still open, and only a yes makes the chunk applied. What
//! cannot be referred to (host memory, checksummed chunks, an export that the peer could not map) is sent as bytes.
//!
//! [`MemoryDomain::export`]: kvxfer_core::memory::MemoryDomain::export
//!
//! # The look-ahead
//! Headers and trailers are read into a small buffer per lane. Where the lane waits for a header it cannot know
//! what follows, so that up to 8 KiB of payload may come along and are copied from there
//! into place, inside the gate. A small transfer is so received with one system call. While a chunk's payload is
//! being received, exactly its trailer and the next header are read with it, and nothing is copied.

mod config;
mod connect;
mod counters;
mod error;
mod exports;
mod host;
mod imports;
mod lane;
mod link;
mod look_ahead;
mod out_chunk;
mod placed;
mod receive;
mod send;
mod staging;
mod sys;
mod transport;
mod worker;

pub use config::TcpConfig;
pub use error::TcpError;
pub use transport::TcpTransport;
