//! Posting: batches of linked work requests, one doorbell each, nothing allocated.

use std::ptr::NonNull;

use super::context::positive;
use super::error::VerbsError;
use super::queue_pair::QueuePair;
use crate::sys;

/// A piece of local memory that a work request gathers from or scatters into.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Sge {
    /// First byte, in the address space of the registration.
    pub address: u64,
    /// Bytes.
    pub length: u32,
    /// The registration's local key.
    pub lkey: u32,
}

/// What a work request does.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Operation {
    /// Writes the segments to the peer's memory.
    Write,
    /// The same, and then consumes one of the peer's receives and hands it this number.
    WriteWithImmediate(u32),
    /// Reads the peer's memory into the segments.
    Read,
}

/// A work request, but for its segments.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Request {
    /// Its number, which comes back in its completion.
    pub wr_id: u64,
    /// What it does.
    pub operation: Operation,
    /// First byte on the peer.
    pub remote_address: u64,
    /// The peer's key.
    pub rkey: u32,
    /// Whether it reports when it ends well. (It always does when it does not.)
    pub signalled: bool,
    /// Whether it starts only when the reads before it are done.
    pub fence: bool,
}

/// A batch that was not posted whole.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{source} (after {posted} work requests)")]
pub struct PostError {
    /// How many work requests, from the first, the device may have taken: each of them may run, and reports as if
    /// nothing had failed. The rest was not taken.
    pub posted: usize,
    /// Why it stopped.
    pub source: VerbsError,
}

impl From<PostError> for VerbsError {
    fn from(error: PostError) -> VerbsError {
        error.source
    }
}

impl From<PostError> for kvxfer_core::Error {
    fn from(error: PostError) -> kvxfer_core::Error {
        error.source.into()
    }
}

/// Work requests to be posted together. Made once: filling and posting it allocates nothing.
pub struct SendBatch {
    // Both arrays are owned; all access goes through these pointers, because the library follows the pointers inside.
    requests: NonNull<sys::ibv_send_wr>,
    segments: NonNull<sys::ibv_sge>,
    requests_max: usize,
    segments_max: usize,
    request_count: usize,
    segment_count: usize,
}

// SAFETY: the batch owns its arrays, and the pointers inside lead only into them.
unsafe impl Send for SendBatch {}

impl SendBatch {
    /// Room for so many work requests, with so many segments in all. At least one of each.
    pub fn new(requests: usize, segments: usize) -> SendBatch {
        let (requests_max, segments_max) = (requests.max(1), segments.max(1));
        // SAFETY: integers, null pointers and unions of those, for which zero is a value.
        let blank: sys::ibv_send_wr = unsafe { std::mem::zeroed() };
        let empty = sys::ibv_sge {
            addr: 0,
            length: 0,
            lkey: 0,
        };
        let requests = leak(vec![blank; requests_max]);
        let segments = leak(vec![empty; segments_max]);
        for index in 1..requests_max {
            // SAFETY: both indices are inside the array, which nothing else refers to.
            unsafe { (*requests.as_ptr().add(index - 1)).next = requests.as_ptr().add(index) };
        }
        SendBatch {
            requests,
            segments,
            requests_max,
            segments_max,
            request_count: 0,
            segment_count: 0,
        }
    }

    /// Forgets all work requests.
    pub fn clear(&mut self) {
        self.request_count = 0;
        self.segment_count = 0;
    }

    /// Work requests in it.
    pub fn len(&self) -> usize {
        self.request_count
    }

    /// Whether it holds none.
    pub fn is_empty(&self) -> bool {
        self.request_count == 0
    }

    /// Whether no further work request fits, however few its segments.
    pub fn is_full(&self) -> bool {
        self.request_count == self.requests_max
    }

    /// Has the last work request report when it ends well.
    pub fn signal_last(&mut self) {
        if let Some(last) = self.request_count.checked_sub(1) {
            // SAFETY: the index is inside the array, of which `&mut self` makes us the only user.
            unsafe { (*self.requests.as_ptr().add(last)).send_flags |= sys::IBV_SEND_SIGNALED };
        }
    }

    /// How many more segments fit.
    pub fn segments_left(&self) -> usize {
        self.segments_max - self.segment_count
    }

    /// Adds a work request; `false`, and nothing is changed, if it or its segments do not fit.
    #[inline]
    pub fn push(&mut self, request: Request, segments: &[Sge]) -> bool {
        if self.is_full() || segments.len() > self.segments_left() {
            return false;
        }
        // SAFETY: there is room for `segments.len()` more segments (checked above), in an array of our own.
        let first = unsafe { self.segments.as_ptr().add(self.segment_count) };
        for (index, segment) in segments.iter().enumerate() {
            let raw = sys::ibv_sge {
                addr: segment.address,
                length: segment.length,
                lkey: segment.lkey,
            };
            // SAFETY: as above.
            unsafe { first.add(index).write(raw) };
        }
        let (opcode, immediate) = match request.operation {
            Operation::Write => (sys::IBV_WR_RDMA_WRITE, 0),
            Operation::WriteWithImmediate(immediate) => (sys::IBV_WR_RDMA_WRITE_WITH_IMM, immediate.to_be()),
            Operation::Read => (sys::IBV_WR_RDMA_READ, 0),
        };
        let mut flags = 0;
        if request.signalled {
            flags |= sys::IBV_SEND_SIGNALED;
        }
        if request.fence {
            flags |= sys::IBV_SEND_FENCE;
        }
        // SAFETY: the index is inside the array (checked above); nothing else refers to the array. The link to the
        // next work request was set when the batch was made and stays.
        let raw = unsafe { &mut *self.requests.as_ptr().add(self.request_count) };
        raw.wr_id = request.wr_id;
        raw.sg_list = first;
        raw.num_sge = segments.len() as i32;
        raw.opcode = opcode;
        raw.send_flags = flags;
        raw.__bindgen_anon_1.imm_data = immediate;
        raw.wr.rdma = sys::ibv_send_wr__bindgen_ty_2__bindgen_ty_1 {
            remote_addr: request.remote_address,
            rkey: request.rkey,
        };
        self.request_count += 1;
        self.segment_count += segments.len();
        true
    }
}

impl std::fmt::Debug for SendBatch {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("SendBatch")
            .field("requests", &self.request_count)
            .field("segments", &self.segment_count)
            .finish()
    }
}

impl Drop for SendBatch {
    fn drop(&mut self) {
        // SAFETY: the arrays were leaked in `new` with these lengths, and are taken back once.
        unsafe {
            take_back(self.requests, self.requests_max);
            take_back(self.segments, self.segments_max);
        }
    }
}

impl QueuePair {
    /// Posts the batch with one doorbell. Whatever happens, the batch is empty afterwards.
    ///
    /// Safe, because a device reaches only memory that is registered: what a registration allows was vouched for when it
    /// was made, and a key that is wrong or given back is refused with an error completion. Whoever posts still holds
    /// the registrations until the last completion, so that this does not happen.
    ///
    /// # Errors
    /// [`PostError`] if the device did not take all of it (`ENOMEM`: the send queue is full, which credits prevent).
    #[inline]
    pub fn post_send(&mut self, batch: &mut SendBatch) -> Result<(), PostError> {
        let count = batch.request_count;
        let Some(last) = count.checked_sub(1) else {
            return Ok(());
        };
        let first = batch.requests.as_ptr();
        let mut refused = std::ptr::null_mut();
        // SAFETY: `last` is inside the batch's array; the first `count` work requests are linked and the link of the
        // last is cut during the call. The library reads them and their segments during the call only. The queue
        // pair is alive, and `&mut self` makes us its only poster.
        let code = unsafe {
            let last = &raw mut (*first.add(last)).next;
            let link = last.replace(std::ptr::null_mut());
            let code = (self.post_send)(self.raw.as_ptr(), first, &mut refused);
            last.write(link);
            code
        };
        batch.clear();
        if code == 0 {
            return Ok(());
        }
        Err(self.post_failed(code, count, first.addr(), refused.addr()))
    }

    /// Posts `count` receives without segments, for immediates: each takes one.
    ///
    /// # Errors
    /// [`VerbsError::Refused`] if the device did not take all of them (`ENOMEM`: the receive queue is full). Some may
    /// be posted.
    pub fn post_receives(&mut self, wr_id: u64, count: u32) -> Result<(), VerbsError> {
        const AT_ONCE: usize = 32;
        let blank = sys::ibv_recv_wr {
            wr_id,
            next: std::ptr::null_mut(),
            sg_list: std::ptr::null_mut(),
            num_sge: 0,
        };
        let mut requests = [blank; AT_ONCE];
        let first = requests.as_mut_ptr();
        let mut left = count as usize;
        while left > 0 {
            let now = left.min(AT_ONCE);
            let mut refused = std::ptr::null_mut();
            // SAFETY: all indices are inside the array, which lives across the call and which nothing else refers
            // to; the library reads it during the call only. The queue pair is alive, and `&mut self` makes us its
            // only poster.
            let code = unsafe {
                for index in 0..now {
                    let next = if index + 1 < now {
                        first.add(index + 1)
                    } else {
                        std::ptr::null_mut()
                    };
                    (*first.add(index)).next = next;
                }
                (self.post_receive)(self.raw.as_ptr(), first, &mut refused)
            };
            if code != 0 {
                return Err(self
                    .context()
                    .refused("ibv_post_recv", positive(code))
                    .because(format!("queue pair {:#x}, {count} receives", self.number())));
            }
            left -= now;
        }
        Ok(())
    }

    #[cold]
    fn post_failed(&self, code: i32, count: usize, first: usize, refused: usize) -> PostError {
        let posted = taken(count, first, refused);
        // siw returns the errno negative, others positive.
        let errno = positive(code);
        let error = self.context().refused("ibv_post_send", errno);
        let place = format!("queue pair {:#x}, work request {posted} of {count}", self.number());
        PostError {
            posted,
            source: match errno {
                libc::ENOMEM => error
                    .because(format!("{place}: the send queue is full"))
                    .with_remedy("report this: credits should have prevented it"),
                _ => error.because(place),
            },
        }
    }
}

/// How many of `count` work requests from address `first` on were taken before the one at `refused`. A provider that
/// names none (soft-RoCE does not when its doorbell fails) may have taken all.
fn taken(count: usize, first: usize, refused: usize) -> usize {
    let size = size_of::<sys::ibv_send_wr>();
    match refused.checked_sub(first) {
        Some(distance) if distance % size == 0 && distance / size < count => distance / size,
        _ => count,
    }
}

fn leak<T>(items: Vec<T>) -> NonNull<T> {
    NonNull::from(Box::leak(items.into_boxed_slice())).cast()
}

/// # Safety
/// `items` came from [`leak`] of a vector of `count` items, and is not used again.
unsafe fn take_back<T>(items: NonNull<T>, count: usize) {
    let slice = std::ptr::slice_from_raw_parts_mut(items.as_ptr(), count);
    // SAFETY: a boxed slice of `count` items was leaked to this very pointer, and is taken back once.
    drop(unsafe { Box::from_raw(slice) });
}

#[cfg(test)]
mod tests {
    use super::*;

    const REQUEST: Request = Request {
        wr_id: 1,
        operation: Operation::Write,
        remote_address: 4096,
        rkey: 7,
        signalled: false,
        fence: false,
    };
    const SEGMENT: Sge = Sge {
        address: 8,
        length: 16,
        lkey: 3,
    };

    #[test]
    fn a_batch_takes_what_fits_and_nothing_else() {
        let mut batch = SendBatch::new(3, 4);
        assert!(batch.is_empty());
        assert!(batch.push(REQUEST, &[SEGMENT; 3]));
        assert!(!batch.push(REQUEST, &[SEGMENT; 2]), "one segment is left");
        assert_eq!((batch.len(), batch.segments_left()), (1, 1));
        assert!(batch.push(REQUEST, &[SEGMENT]));
        assert!(batch.push(REQUEST, &[]));
        assert!(batch.is_full());
        assert!(!batch.push(REQUEST, &[]));
        batch.clear();
        assert!(batch.push(REQUEST, &[SEGMENT; 4]));
    }

    #[test]
    fn requests_are_linked_and_carry_what_was_pushed() {
        let mut batch = SendBatch::new(2, 2);
        assert!(batch.push(REQUEST, &[SEGMENT]));
        let last = Request {
            operation: Operation::WriteWithImmediate(0x0102_0304),
            signalled: true,
            fence: true,
            ..REQUEST
        };
        assert!(batch.push(last, &[]));
        // SAFETY: two work requests were pushed; the batch is alive and not changed meanwhile.
        unsafe {
            let first = &*batch.requests.as_ptr();
            let second = &*first.next;
            assert_eq!(
                (first.opcode, first.num_sge, first.send_flags),
                (sys::IBV_WR_RDMA_WRITE, 1, 0)
            );
            assert_eq!(((*first.sg_list).addr, (*first.sg_list).length), (8, 16));
            assert_eq!((first.wr.rdma.remote_addr, first.wr.rdma.rkey), (4096, 7));
            assert_eq!(second.opcode, sys::IBV_WR_RDMA_WRITE_WITH_IMM);
            assert_eq!(second.__bindgen_anon_1.imm_data, 0x0102_0304u32.to_be());
            assert_eq!(second.send_flags, sys::IBV_SEND_SIGNALED | sys::IBV_SEND_FENCE);
            assert!(second.next.is_null());
        }
    }

    #[test]
    fn what_a_failed_post_took_is_never_understated() {
        let size = size_of::<sys::ibv_send_wr>();
        assert_eq!(taken(4, 1000, 1000), 0);
        assert_eq!(taken(4, 1000, 1000 + 2 * size), 2);
        assert_eq!(taken(4, 1000, 0), 4, "no work request named");
        assert_eq!(taken(4, 1000, 1000 + 4 * size), 4, "not one of ours");
        assert_eq!(taken(4, 1000, 1001), 4, "not at a work request's start");
    }
}
