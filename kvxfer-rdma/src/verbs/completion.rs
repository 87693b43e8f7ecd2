//! Completion channels and queues: how work requests report.

use std::os::fd::BorrowedFd;
use std::ptr::NonNull;
use std::sync::Arc;

use super::context::{Context, positive, set_non_blocking};
use super::error::{VerbsError, last_errno};
use crate::sys;

/// Wakes a thread when a completion queue that asked for it has something. Cheap to clone.
#[derive(Clone)]
pub struct CompletionChannel {
    inner: Arc<ChannelInner>,
}

struct ChannelInner {
    raw: NonNull<sys::ibv_comp_channel>,
    // After the channel, which `drop` destroys first.
    context: Context,
}

// SAFETY: verbs may be called on a completion channel from any thread.
unsafe impl Send for ChannelInner {}
// SAFETY: as above.
unsafe impl Sync for ChannelInner {}

/// Where completions of queue pairs arrive. Cheap to clone; queue pairs keep theirs.
#[derive(Clone)]
pub struct CompletionQueue {
    inner: Arc<QueueInner>,
}

struct QueueInner {
    raw: NonNull<sys::ibv_cq>,
    poll: PollFunction,
    request_notify: NotifyFunction,
    entries: u32,
    // After the queue, which `drop` destroys first.
    context: Context,
    _channel: Option<CompletionChannel>,
}

type PollFunction = unsafe extern "C" fn(*mut sys::ibv_cq, i32, *mut sys::ibv_wc) -> i32;
type NotifyFunction = unsafe extern "C" fn(*mut sys::ibv_cq, i32) -> i32;

// SAFETY: verbs may be called on a completion queue from any thread (the provider locks it).
unsafe impl Send for QueueInner {}
// SAFETY: as above.
unsafe impl Sync for QueueInner {}

/// Completions of one poll. Made once, filled again and again.
pub struct CompletionBuffer {
    entries: Vec<sys::ibv_wc>,
    filled: usize,
}

/// How one work request ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Completion {
    /// The work request's own number.
    pub wr_id: u64,
    /// How it ended.
    pub status: Status,
    /// The vendor's word on an error; 0 if ok.
    pub vendor_error: u32,
    /// The queue pair.
    pub qp_number: u32,
    /// The immediate that a peer's write carried, in host order; only of a receive that is ok.
    pub immediate: Option<u32>,
    /// Whether it was a receive. `None` on errors: verbs leave the kind of a failed work request undefined.
    pub is_receive: Option<bool>,
    /// Bytes received or read, if ok.
    pub byte_length: u32,
}

/// How a work request ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Status {
    /// Well.
    Success,
    /// A message does not fit its segments, or is larger than the port carries.
    LocalLength,
    /// A segment lies outside its registration, or the registration does not allow it.
    LocalProtection,
    /// The queue pair went to its error state before the work request was done.
    WorkRequestFlushed,
    /// The peer's key does not allow it, or does not cover the range.
    RemoteAccess,
    /// The peer's queue pair does not accept such an operation.
    RemoteInvalidRequest,
    /// The peer could not carry it out.
    RemoteOperation,
    /// No answer from the peer, however often it was tried.
    RetryExceeded,
    /// The peer had no receive posted, however often it was tried.
    ReceiverNotReadyExceeded,
    /// The queue pair itself is inconsistent.
    LocalQueuePairOperation,
    /// No answer in time.
    ResponseTimeout,
    /// Another `ibv_wc_status`.
    Other(u32),
}

/// Whom an error blames, which decides what it touches.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ErrorClass {
    /// None.
    Success,
    /// Ours: a defect. Touches no rail, or every one alike.
    LocalBug,
    /// A key or a right: the transfer fails, the rail is fine.
    RemoteAccess,
    /// The rail.
    Transport,
    /// None of its own: another work request's error, or our own doing.
    Flushed,
}

impl Status {
    /// Whether it ended well.
    #[inline]
    pub fn is_success(self) -> bool {
        self == Status::Success
    }

    /// Whom it blames.
    pub fn class(self) -> ErrorClass {
        match self {
            Status::Success => ErrorClass::Success,
            Status::LocalLength | Status::LocalProtection | Status::LocalQueuePairOperation => ErrorClass::LocalBug,
            Status::RemoteAccess | Status::RemoteInvalidRequest => ErrorClass::RemoteAccess,
            Status::WorkRequestFlushed => ErrorClass::Flushed,
            Status::RemoteOperation
            | Status::RetryExceeded
            | Status::ReceiverNotReadyExceeded
            | Status::ResponseTimeout
            | Status::Other(_) => ErrorClass::Transport,
        }
    }

    fn from_raw(raw: sys::ibv_wc_status) -> Status {
        match raw {
            sys::IBV_WC_SUCCESS => Status::Success,
            sys::IBV_WC_LOC_LEN_ERR => Status::LocalLength,
            sys::IBV_WC_LOC_QP_OP_ERR => Status::LocalQueuePairOperation,
            sys::IBV_WC_LOC_PROT_ERR => Status::LocalProtection,
            sys::IBV_WC_WR_FLUSH_ERR => Status::WorkRequestFlushed,
            sys::IBV_WC_REM_INV_REQ_ERR => Status::RemoteInvalidRequest,
            sys::IBV_WC_REM_ACCESS_ERR => Status::RemoteAccess,
            sys::IBV_WC_REM_OP_ERR => Status::RemoteOperation,
            sys::IBV_WC_RETRY_EXC_ERR => Status::RetryExceeded,
            sys::IBV_WC_RNR_RETRY_EXC_ERR => Status::ReceiverNotReadyExceeded,
            sys::IBV_WC_RESP_TIMEOUT_ERR => Status::ResponseTimeout,
            other => Status::Other(other),
        }
    }
}

impl std::fmt::Display for Status {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Status::Success => "success",
            Status::LocalLength => "local length error (LOC_LEN_ERR)",
            Status::LocalProtection => "local protection error (LOC_PROT_ERR)",
            Status::WorkRequestFlushed => "flushed (WR_FLUSH_ERR)",
            Status::RemoteAccess => "remote access error (REM_ACCESS_ERR)",
            Status::RemoteInvalidRequest => "remote invalid request (REM_INV_REQ_ERR)",
            Status::RemoteOperation => "remote operation error (REM_OP_ERR)",
            Status::RetryExceeded => "no answer from the peer (RETRY_EXC_ERR)",
            Status::ReceiverNotReadyExceeded => "the peer posted no receive (RNR_RETRY_EXC_ERR)",
            Status::LocalQueuePairOperation => "local queue pair error (LOC_QP_OP_ERR)",
            Status::ResponseTimeout => "no answer in time (RESP_TIMEOUT_ERR)",
            Status::Other(code) => return write!(f, "completion status {code}"),
        })
    }
}

impl CompletionChannel {
    /// A new channel, with a non-blocking descriptor.
    ///
    /// # Errors
    /// [`VerbsError::Refused`], `EMFILE` at the limit of open files.
    pub fn new(context: &Context) -> Result<CompletionChannel, VerbsError> {
        // SAFETY: the context is open while `context` lives, and the channel keeps a clone of it.
        let raw = unsafe { context.verbs().ibv_create_comp_channel(context.raw()) };
        let raw = NonNull::new(raw).ok_or_else(|| context.refused("ibv_create_comp_channel", last_errno()))?;
        let channel = CompletionChannel {
            inner: Arc::new(ChannelInner {
                raw,
                context: context.clone(),
            }),
        };
        set_non_blocking(channel.fd(), context.name())?;
        Ok(channel)
    }

    /// Becomes readable when a completion queue of this channel that asked for it has something.
    pub fn fd(&self) -> BorrowedFd<'_> {
        // SAFETY: the channel lives while `self` does, and its descriptor with it.
        unsafe { BorrowedFd::borrow_raw(self.inner.raw.as_ref().fd) }
    }

    /// Takes and acknowledges all wake-ups without blocking, and says how many. The queues must then ask again, and
    /// be polled once more after that: a completion between the last poll and the request wakes nobody.
    ///
    /// # Errors
    /// [`VerbsError::Refused`] if the channel's file fails (`EIO`, `ENODEV`: the device is gone).
    pub fn drain(&self) -> Result<usize, VerbsError> {
        let context = &self.inner.context;
        let mut events = 0;
        loop {
            let mut queue = std::ptr::null_mut();
            let mut tag = std::ptr::null_mut();
            // SAFETY: the channel is alive; the library writes two pointers.
            let code = unsafe {
                context
                    .verbs()
                    .ibv_get_cq_event(self.inner.raw.as_ptr(), &mut queue, &mut tag)
            };
            if code != 0 {
                match last_errno() {
                    libc::EAGAIN => return Ok(events),
                    libc::EINTR => continue,
                    errno => return Err(context.refused("ibv_get_cq_event", errno)),
                }
            }
            // SAFETY: the library just gave an event of this queue; the queue cannot be destroyed before the event is
            // acknowledged (`ibv_destroy_cq` waits for that), and it is acknowledged once.
            unsafe { context.verbs().ibv_ack_cq_events(queue, 1) };
            events += 1;
        }
    }
}

impl std::fmt::Debug for CompletionChannel {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "CompletionChannel({})", self.inner.context.name())
    }
}

impl Drop for ChannelInner {
    fn drop(&mut self) {
        // SAFETY: created in `CompletionChannel::new`, destroyed only here; the queues that use it hold a clone.
        let code = unsafe { self.context.verbs().ibv_destroy_comp_channel(self.raw.as_ptr()) };
        if code != 0 {
            tracing::warn!(device = self.context.name(), code, "ibv_destroy_comp_channel failed");
        }
    }
}

impl CompletionQueue {
    /// A queue of at least `entries` completions. Whoever sizes it sees to it that it cannot overflow: a queue that
    /// overflows is lost with all its queue pairs.
    ///
    /// # Errors
    /// [`VerbsError::Refused`]: `EINVAL` for more entries than the device allows, `ENOMEM`.
    pub fn new(
        context: &Context,
        entries: u32,
        channel: Option<&CompletionChannel>,
    ) -> Result<CompletionQueue, VerbsError> {
        let limit = context.attributes().max_cqe;
        let channel_raw = channel.map_or(std::ptr::null_mut(), |channel| channel.inner.raw.as_ptr());
        let wanted = i32::try_from(entries).unwrap_or(i32::MAX);
        // SAFETY: context and channel are alive, and the queue keeps a clone of each.
        let raw = unsafe {
            context
                .verbs()
                .ibv_create_cq(context.raw(), wanted, std::ptr::null_mut(), channel_raw, 0)
        };
        let Some(raw) = NonNull::new(raw) else {
            let error = context.refused("ibv_create_cq", last_errno());
            return Err(if entries > limit {
                error
                    .because(format!("{entries} entries were asked for, the device allows {limit}"))
                    .with_remedy("configure fewer queue pairs per peer or a smaller send depth")
            } else {
                error
            });
        };
        // SAFETY: the library just created it.
        let given = unsafe { raw.as_ref().cqe };
        // SAFETY: the context is open; its table of operations was filled when the device was opened. The function
        // pointers are copied after the queue exists: providers may choose them only then.
        let ops = unsafe { (*context.raw()).ops };
        let queue = |poll, request_notify| CompletionQueue {
            inner: Arc::new(QueueInner {
                raw,
                poll,
                request_notify,
                entries: u32::try_from(given).unwrap_or(entries),
                context: context.clone(),
                _channel: channel.cloned(),
            }),
        };
        match (ops.poll_cq, ops.req_notify_cq) {
            (Some(poll), Some(request_notify)) => Ok(queue(poll, request_notify)),
            _ => {
                // SAFETY: created above and not yet shared.
                unsafe { context.verbs().ibv_destroy_cq(raw.as_ptr()) };
                Err(context.unsupported("ibv_poll_cq", "the provider does not implement it"))
            }
        }
    }

    /// How many completions it holds, as the device granted.
    pub fn entries(&self) -> u32 {
        self.inner.entries
    }

    /// Asks for one wake-up of the channel at the next completion. Completions that are there already wake nobody:
    /// poll once more after asking.
    ///
    /// # Errors
    /// [`VerbsError::Refused`] if the device refuses.
    pub fn request_notify(&self) -> Result<(), VerbsError> {
        // SAFETY: the queue is alive, and the function comes from its own context.
        let code = unsafe { (self.inner.request_notify)(self.inner.raw.as_ptr(), 0) };
        if code != 0 {
            return Err(self.inner.context.refused("ibv_req_notify_cq", positive(code)));
        }
        Ok(())
    }

    /// Fills `out` with completions that are there, and says how many. What was in it is gone.
    ///
    /// # Errors
    /// [`VerbsError::Refused`]: the queue is broken (it overran, or the device failed), and its queue pairs with it.
    pub fn poll(&self, out: &mut CompletionBuffer) -> Result<usize, VerbsError> {
        out.filled = 0;
        let room = out.entries.len();
        // SAFETY: the queue is alive, the function comes from its own context, and the buffer has room for `room`
        // entries (the buffer's length fits in an i32 by its construction).
        let count = unsafe { (self.inner.poll)(self.inner.raw.as_ptr(), room as i32, out.entries.as_mut_ptr()) };
        match usize::try_from(count) {
            Ok(count) if count <= room => {
                out.filled = count;
                Ok(count)
            }
            // The number is the provider's own, no errno.
            _ => Err(self
                .inner
                .context
                .refused("ibv_poll_cq", libc::EIO)
                .because(format!("it returned {count}: the completion queue is broken"))),
        }
    }

    pub(super) fn raw(&self) -> *mut sys::ibv_cq {
        self.inner.raw.as_ptr()
    }
}

impl std::fmt::Debug for CompletionQueue {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "CompletionQueue({}, {})", self.inner.context.name(), self.entries())
    }
}

impl Drop for QueueInner {
    fn drop(&mut self) {
        // SAFETY: created in `CompletionQueue::new`, destroyed only here; queue pairs hold a clone of their queues,
        // so none is left. Events of it are always acknowledged at once (`drain`), so this does not wait for ever.
        let code = unsafe { self.context.verbs().ibv_destroy_cq(self.raw.as_ptr()) };
        if code != 0 {
            tracing::warn!(device = self.context.name(), code, "ibv_destroy_cq failed");
        }
    }
}

impl CompletionBuffer {
    /// Room for `count` completions (at least one, at most 65,536).
    pub fn new(count: usize) -> CompletionBuffer {
        // SAFETY: plain integers, for which zero is a value.
        let empty: sys::ibv_wc = unsafe { std::mem::zeroed() };
        CompletionBuffer {
            entries: vec![empty; count.clamp(1, 1 << 16)],
            filled: 0,
        }
    }

    /// Completions that fit.
    pub fn capacity(&self) -> usize {
        self.entries.len()
    }

    /// The completions of the last poll, in order.
    pub fn iter(&self) -> impl Iterator<Item = Completion> + '_ {
        self.entries[..self.filled].iter().map(completion)
    }
}

impl std::fmt::Debug for CompletionBuffer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_list().entries(self.iter()).finish()
    }
}

fn completion(entry: &sys::ibv_wc) -> Completion {
    let status = Status::from_raw(entry.status);
    let ok = status == Status::Success;
    // Opcode, flags and length are undefined unless the status is success.
    let is_receive = ok.then_some(entry.opcode & sys::IBV_WC_RECV != 0);
    let with_immediate = is_receive == Some(true) && entry.wc_flags & sys::IBV_WC_WITH_IMM != 0;
    Completion {
        wr_id: entry.wr_id,
        status,
        vendor_error: if ok { 0 } else { entry.vendor_err },
        qp_number: entry.qp_num,
        // SAFETY: the flag says that this member was written; every bit pattern is a number.
        immediate: with_immediate.then(|| u32::from_be(unsafe { entry.__bindgen_anon_1.imm_data })),
        is_receive,
        byte_length: if ok { entry.byte_len } else { 0 },
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn entry(status: u32, opcode: u32, flags: u32) -> sys::ibv_wc {
        // SAFETY: plain integers, for which zero is a value.
        let mut entry: sys::ibv_wc = unsafe { std::mem::zeroed() };
        (entry.status, entry.opcode, entry.wc_flags) = (status, opcode, flags);
        entry.__bindgen_anon_1.imm_data = 0x0102_0304u32.to_be();
        (entry.wr_id, entry.qp_num, entry.byte_len, entry.vendor_err) = (7, 9, 11, 13);
        entry
    }

    #[test]
    fn a_good_receive_carries_its_immediate() {
        let good = completion(&entry(
            sys::IBV_WC_SUCCESS,
            sys::IBV_WC_RECV_RDMA_WITH_IMM,
            sys::IBV_WC_WITH_IMM,
        ));
        assert_eq!((good.immediate, good.is_receive), (Some(0x0102_0304), Some(true)));
        assert_eq!((good.byte_length, good.vendor_error), (11, 0));
        let write = completion(&entry(
            sys::IBV_WC_SUCCESS,
            sys::IBV_WC_RDMA_WRITE,
            sys::IBV_WC_WITH_IMM,
        ));
        assert_eq!((write.immediate, write.is_receive), (None, Some(false)));
    }

    #[test]
    fn a_failed_completion_says_only_what_is_defined() {
        let failed = completion(&entry(
            sys::IBV_WC_WR_FLUSH_ERR,
            sys::IBV_WC_RECV_RDMA_WITH_IMM,
            sys::IBV_WC_WITH_IMM,
        ));
        assert_eq!(
            (failed.immediate, failed.is_receive, failed.byte_length),
            (None, None, 0)
        );
        assert_eq!((failed.wr_id, failed.qp_number, failed.vendor_error), (7, 9, 13));
    }

    #[test]
    fn only_transport_errors_blame_the_rail() {
        let classes: Vec<ErrorClass> = (0..24).map(|raw| Status::from_raw(raw).class()).collect();
        assert_eq!(classes[sys::IBV_WC_SUCCESS as usize], ErrorClass::Success);
        assert_eq!(classes[sys::IBV_WC_WR_FLUSH_ERR as usize], ErrorClass::Flushed);
        assert_eq!(classes[sys::IBV_WC_REM_ACCESS_ERR as usize], ErrorClass::RemoteAccess);
        assert_eq!(classes[sys::IBV_WC_LOC_PROT_ERR as usize], ErrorClass::LocalBug);
        assert_eq!(classes[sys::IBV_WC_RETRY_EXC_ERR as usize], ErrorClass::Transport);
        assert_eq!(classes.iter().filter(|class| **class == ErrorClass::Success).count(), 1);
    }
}
