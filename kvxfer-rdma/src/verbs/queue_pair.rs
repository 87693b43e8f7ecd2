//! Queue pairs and their states.

use std::ptr::NonNull;

use super::completion::CompletionQueue;
use super::context::{Context, positive};
use super::error::{VerbsError, last_errno};
use super::explain::{explain_capacity, explain_modify};
use super::memory::ProtectionDomain;
use super::port::Mtu;
use crate::sys;

/// A reliable connected queue pair. Destroyed when dropped.
///
/// Changing its state takes `&self`; posting takes `&mut self`, so that it has one writer.
pub struct QueuePair {
    pub(super) raw: NonNull<sys::ibv_qp>,
    pub(super) post_send: PostSendFunction,
    pub(super) post_receive: PostReceiveFunction,
    number: u32,
    capacity: QueuePairCapacity,
    // After the queue pair, which `drop` destroys first.
    domain: ProtectionDomain,
    _send_queue: CompletionQueue,
    _receive_queue: CompletionQueue,
}

pub(super) type PostSendFunction =
    unsafe extern "C" fn(*mut sys::ibv_qp, *mut sys::ibv_send_wr, *mut *mut sys::ibv_send_wr) -> i32;
pub(super) type PostReceiveFunction =
    unsafe extern "C" fn(*mut sys::ibv_qp, *mut sys::ibv_recv_wr, *mut *mut sys::ibv_recv_wr) -> i32;

// SAFETY: verbs may be called on a queue pair from any thread.
unsafe impl Send for QueuePair {}
// SAFETY: what takes `&QueuePair` (number, state changes) is thread-safe in libibverbs; posting takes `&mut`.
unsafe impl Sync for QueuePair {}

/// What a queue pair's queues hold.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct QueuePairCapacity {
    /// Work requests outstanding on the send queue.
    pub send_requests: u32,
    /// Receives outstanding.
    pub receive_requests: u32,
    /// Segments of a send work request.
    pub send_segments: u32,
    /// Segments of a receive; ours have none.
    pub receive_segments: u32,
    /// Bytes that may travel in the work request itself.
    pub inline_bytes: u32,
}

/// A queue pair's state.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum QpState {
    /// New.
    Reset,
    /// Has a port; receives may be posted.
    Init,
    /// Knows its peer and answers it.
    ReadyToReceive,
    /// Sends too.
    ReadyToSend,
    /// Its send queue is being drained.
    SendQueueDrained,
    /// Its send queue failed.
    SendQueueError,
    /// Nothing is executed any more; what is posted is flushed.
    Error,
    /// Not one of these.
    Unknown,
}

/// What a queue pair needs to go from RESET to INIT.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct InitState {
    /// The port, from 1.
    pub port: u8,
    /// Place in the port's table of partition keys.
    pub pkey_index: u16,
    /// The peer may write our memory.
    pub remote_write: bool,
    /// The peer may read our memory.
    pub remote_read: bool,
}

/// What a queue pair needs to go from INIT to RTR.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ReceiveState {
    /// The peer's queue pair.
    pub peer_qp: u32,
    /// The peer's first packet number, 24 bits.
    pub peer_psn: u32,
    /// Packet size, the smaller of both ports'.
    pub mtu: Mtu,
    /// The way to the peer.
    pub address: PathAddress,
    /// Reads and atomics that the peer may have outstanding here.
    pub max_dest_rd_atomic: u8,
    /// How long the peer waits when no receive is posted, as a code of verbs (12: 0.64 ms); at most 31.
    pub min_rnr_timer: u8,
}

/// The way to a peer's port.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PathAddress {
    /// The peer's local identifier (InfiniBand; 0 on RoCE).
    pub lid: u16,
    /// The peer's GID: needed on RoCE and between InfiniBand subnets.
    pub gid: Option<[u8; 16]>,
    /// Our own GID, by its place in our port's table; at most 255.
    pub gid_index: u32,
    /// Service level, at most 15.
    pub service_level: u8,
    /// Traffic class (DSCP and ECN on RoCE version 2).
    pub traffic_class: u8,
    /// Hops, if the packet is routed.
    pub hop_limit: u8,
    /// Our port, from 1.
    pub port: u8,
    /// Flow label, 20 bits: spreads connections over a fabric's paths.
    pub flow_label: u32,
}

/// What a queue pair needs to go from RTR to RTS.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SendState {
    /// Our first packet number, 24 bits.
    pub psn: u32,
    /// How long an answer may take, as a code of verbs: 4.096 µs times 2 to this power; at most 31, 0 for ever.
    pub timeout: u8,
    /// How often a packet without an answer is sent again; at most 7.
    pub retry_count: u8,
    /// How often a peer without a receive is asked again; at most 6 (7 means for ever).
    pub rnr_retry: u8,
    /// Reads and atomics that we may have outstanding.
    pub max_rd_atomic: u8,
}

impl QueuePair {
    /// A queue pair in RESET. Completions appear only for work requests that ask for them, and for errors.
    ///
    /// # Errors
    /// [`VerbsError::Refused`]: `EINVAL` for more than the device allows (named), `ENOMEM`.
    pub fn new(
        domain: &ProtectionDomain,
        send_queue: &CompletionQueue,
        receive_queue: &CompletionQueue,
        capacity: QueuePairCapacity,
    ) -> Result<QueuePair, VerbsError> {
        let context = domain.context();
        let mut attributes = sys::ibv_qp_init_attr {
            qp_context: std::ptr::null_mut(),
            send_cq: send_queue.raw(),
            recv_cq: receive_queue.raw(),
            srq: std::ptr::null_mut(),
            cap: sys::ibv_qp_cap {
                max_send_wr: capacity.send_requests,
                max_recv_wr: capacity.receive_requests,
                max_send_sge: capacity.send_segments,
                max_recv_sge: capacity.receive_segments,
                max_inline_data: capacity.inline_bytes,
            },
            qp_type: sys::IBV_QPT_RC,
            sq_sig_all: 0,
        };
        // SAFETY: domain and queues are alive, and the queue pair keeps a clone of each; the library reads and writes
        // `attributes` during the call only.
        let raw = unsafe { context.verbs().ibv_create_qp(domain.raw(), &mut attributes) };
        let raw = NonNull::new(raw).ok_or_else(|| explain_capacity(context, last_errno(), &capacity))?;
        // SAFETY: the library just created it; its number does not change.
        let number = unsafe { raw.as_ref().qp_num };
        // SAFETY: the context is open; its table of operations was filled when the device was opened.
        let ops = unsafe { (*context.raw()).ops };
        let (Some(post_send), Some(post_receive)) = (ops.post_send, ops.post_recv) else {
            // SAFETY: created above and not yet shared.
            unsafe { context.verbs().ibv_destroy_qp(raw.as_ptr()) };
            return Err(context.unsupported("ibv_post_send", "the provider does not implement it"));
        };
        Ok(QueuePair {
            raw,
            post_send,
            post_receive,
            number,
            capacity: QueuePairCapacity {
                send_requests: attributes.cap.max_send_wr,
                receive_requests: attributes.cap.max_recv_wr,
                send_segments: attributes.cap.max_send_sge,
                receive_segments: attributes.cap.max_recv_sge,
                inline_bytes: attributes.cap.max_inline_data,
            },
            domain: domain.clone(),
            _send_queue: send_queue.clone(),
            _receive_queue: receive_queue.clone(),
        })
    }

    /// Its number, by which peers and completions name it; 24 bits.
    pub fn number(&self) -> u32 {
        self.number
    }

    /// What its queues hold, as the device granted: at least what was asked for.
    pub fn capacity(&self) -> QueuePairCapacity {
        self.capacity
    }

    /// RESET to INIT: bound to a port; receives may be posted.
    ///
    /// # Errors
    /// [`VerbsError::Refused`]; for `EINVAL` with the attribute at fault, as far as it can be told.
    pub fn to_init(&self, init: &InitState) -> Result<(), VerbsError> {
        let mut attributes = blank(sys::IBV_QPS_INIT);
        attributes.port_num = init.port;
        attributes.pkey_index = init.pkey_index;
        if init.remote_write {
            // Verbs demand local write with remote write, of queue pairs as of registrations.
            attributes.qp_access_flags |= sys::IBV_ACCESS_REMOTE_WRITE | sys::IBV_ACCESS_LOCAL_WRITE;
        }
        if init.remote_read {
            attributes.qp_access_flags |= sys::IBV_ACCESS_REMOTE_READ;
        }
        self.modify(
            attributes,
            sys::IBV_QP_STATE | sys::IBV_QP_PKEY_INDEX | sys::IBV_QP_PORT | sys::IBV_QP_ACCESS_FLAGS,
        )
    }

    /// INIT to RTR: knows its peer and answers it.
    ///
    /// # Errors
    /// [`VerbsError::Refused`]; for `EINVAL` with the attribute at fault, as far as it can be told; on RoCE also
    /// `ENETUNREACH`, `EHOSTUNREACH`, `ETIMEDOUT` if the peer's address cannot be resolved.
    pub fn to_receive(&self, receive: &ReceiveState) -> Result<(), VerbsError> {
        let address = &receive.address;
        let Ok(gid_index) = u8::try_from(address.gid_index) else {
            return Err(self.context().unsupported(
                "ibv_modify_qp",
                format!("GID index {} cannot be used: verbs know 256", address.gid_index),
            ));
        };
        let mut attributes = blank(sys::IBV_QPS_RTR);
        attributes.path_mtu = receive.mtu.raw();
        attributes.dest_qp_num = receive.peer_qp;
        attributes.rq_psn = receive.peer_psn;
        attributes.max_dest_rd_atomic = receive.max_dest_rd_atomic;
        attributes.min_rnr_timer = receive.min_rnr_timer;
        attributes.ah_attr.dlid = address.lid;
        attributes.ah_attr.sl = address.service_level;
        attributes.ah_attr.port_num = address.port;
        if let Some(gid) = address.gid {
            attributes.ah_attr.is_global = 1;
            attributes.ah_attr.grh = sys::ibv_global_route {
                dgid: sys::ibv_gid { raw: gid },
                flow_label: address.flow_label,
                sgid_index: gid_index,
                hop_limit: address.hop_limit,
                traffic_class: address.traffic_class,
            };
        }
        self.modify(
            attributes,
            sys::IBV_QP_STATE
                | sys::IBV_QP_AV
                | sys::IBV_QP_PATH_MTU
                | sys::IBV_QP_DEST_QPN
                | sys::IBV_QP_RQ_PSN
                | sys::IBV_QP_MAX_DEST_RD_ATOMIC
                | sys::IBV_QP_MIN_RNR_TIMER,
        )
    }

    /// RTR to RTS: sends too.
    ///
    /// # Errors
    /// [`VerbsError::Refused`]; for `EINVAL` with the attribute at fault, as far as it can be told.
    pub fn to_send(&self, send: &SendState) -> Result<(), VerbsError> {
        let mut attributes = blank(sys::IBV_QPS_RTS);
        attributes.sq_psn = send.psn;
        attributes.timeout = send.timeout;
        attributes.retry_cnt = send.retry_count;
        attributes.rnr_retry = send.rnr_retry;
        attributes.max_rd_atomic = send.max_rd_atomic;
        self.modify(
            attributes,
            sys::IBV_QP_STATE
                | sys::IBV_QP_SQ_PSN
                | sys::IBV_QP_TIMEOUT
                | sys::IBV_QP_RETRY_CNT
                | sys::IBV_QP_RNR_RETRY
                | sys::IBV_QP_MAX_QP_RD_ATOMIC,
        )
    }

    /// Any state to ERR: nothing is executed any more, and everything posted gets its completion, flushed. (RESET
    /// would lose the completions, and a number that is used again could match old packets.)
    ///
    /// # Errors
    /// [`VerbsError::Refused`]: the device does not answer.
    pub fn to_error(&self) -> Result<(), VerbsError> {
        self.modify(blank(sys::IBV_QPS_ERR), sys::IBV_QP_STATE)
    }

    /// To RESET, which loses completions and packets: a seeded defect for tests, never right.
    ///
    /// # Errors
    /// [`VerbsError::Refused`]: the device does not answer.
    #[doc(hidden)]
    pub fn to_reset(&self) -> Result<(), VerbsError> {
        self.modify(blank(sys::IBV_QPS_RESET), sys::IBV_QP_STATE)
    }

    /// Its state, as the device says.
    ///
    /// # Errors
    /// [`VerbsError::Refused`]: the device does not answer.
    pub fn state(&self) -> Result<QpState, VerbsError> {
        let mut attributes = blank(0);
        // SAFETY: integers and null pointers, for which zero is a value.
        let mut initial: sys::ibv_qp_init_attr = unsafe { std::mem::zeroed() };
        // SAFETY: the queue pair is alive; the library writes the two structs.
        let code = unsafe {
            self.context().verbs().ibv_query_qp(
                self.raw.as_ptr(),
                &mut attributes,
                sys::IBV_QP_STATE as i32,
                &mut initial,
            )
        };
        if code != 0 {
            return Err(self.context().refused("ibv_query_qp", positive(code)));
        }
        Ok(QpState::from_raw(attributes.qp_state))
    }

    /// Destroys it: when this has returned `Ok`, the device executes nothing more for it. Work requests whose
    /// completions were not polled are lost; bytes that the device had accepted from the peer may still be on their
    /// way to memory.
    ///
    /// # Errors
    /// [`VerbsError::Refused`]: the device does not let go of it. The queue pair then stays as it is (and is leaked,
    /// with what it holds): its memory must not be given back.
    pub fn destroy(self) -> Result<(), VerbsError> {
        let pair = std::mem::ManuallyDrop::new(self);
        // SAFETY: created in `new`, and destroyed either here (without running `drop`) or in `drop`.
        let code = unsafe { pair.context().verbs().ibv_destroy_qp(pair.raw.as_ptr()) };
        if code != 0 {
            return Err(pair.context().refused("ibv_destroy_qp", positive(code)));
        }
        // SAFETY: each field is read once, and `pair` is neither dropped nor used again.
        unsafe {
            drop(std::ptr::read(&pair._send_queue));
            drop(std::ptr::read(&pair._receive_queue));
            drop(std::ptr::read(&pair.domain));
        }
        Ok(())
    }

    pub(super) fn context(&self) -> &Context {
        self.domain.context()
    }

    fn modify(&self, mut attributes: sys::ibv_qp_attr, mask: u32) -> Result<(), VerbsError> {
        // SAFETY: the queue pair is alive; the library reads the attributes that the mask names, during the call only.
        let code = unsafe {
            self.context()
                .verbs()
                .ibv_modify_qp(self.raw.as_ptr(), &mut attributes, mask as i32)
        };
        if code != 0 {
            return Err(explain_modify(self, positive(code), &attributes));
        }
        Ok(())
    }
}

impl std::fmt::Debug for QueuePair {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "QueuePair({}, {:#x})", self.context().name(), self.number)
    }
}

impl Drop for QueuePair {
    fn drop(&mut self) {
        // SAFETY: created in `new`, and destroyed either here or in `destroy`, which does not run `drop`.
        let code = unsafe { self.context().verbs().ibv_destroy_qp(self.raw.as_ptr()) };
        if code != 0 {
            tracing::error!(
                device = self.context().name(),
                queue_pair = self.number,
                code,
                "ibv_destroy_qp failed: the device may still execute its work requests"
            );
        }
    }
}

impl QpState {
    pub(super) fn from_raw(raw: sys::ibv_qp_state) -> QpState {
        match raw {
            sys::IBV_QPS_RESET => QpState::Reset,
            sys::IBV_QPS_INIT => QpState::Init,
            sys::IBV_QPS_RTR => QpState::ReadyToReceive,
            sys::IBV_QPS_RTS => QpState::ReadyToSend,
            sys::IBV_QPS_SQD => QpState::SendQueueDrained,
            sys::IBV_QPS_SQE => QpState::SendQueueError,
            sys::IBV_QPS_ERR => QpState::Error,
            _ => QpState::Unknown,
        }
    }

    /// Its name in the specification.
    pub fn name(self) -> &'static str {
        match self {
            QpState::Reset => "RESET",
            QpState::Init => "INIT",
            QpState::ReadyToReceive => "RTR",
            QpState::ReadyToSend => "RTS",
            QpState::SendQueueDrained => "SQD",
            QpState::SendQueueError => "SQE",
            QpState::Error => "ERR",
            QpState::Unknown => "unknown",
        }
    }
}

fn blank(state: sys::ibv_qp_state) -> sys::ibv_qp_attr {
    // SAFETY: integers and byte arrays, for which zero is a value.
    let mut attributes: sys::ibv_qp_attr = unsafe { std::mem::zeroed() };
    attributes.qp_state = state;
    attributes
}
