//! Completion channels and completion queues.

use std::os::raw::{c_int, c_uint, c_void};
use std::sync::atomic::{AtomicU32, Ordering};

use kvxfer_rdma::sys::{ibv_comp_channel, ibv_context, ibv_cq, ibv_wc};

use super::{errno_of, refuse, set_errno};
use crate::completion::CompletionQueue;
use crate::counters::add;
use crate::event::Channel;
use crate::objects::{FakeChannel, FakeContext, FakeCq};

/// ibv_create_comp_channel.
///
/// # Safety
/// As the verb's.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ibv_create_comp_channel(pointer: *mut ibv_context) -> *mut ibv_comp_channel {
    // SAFETY: null, or a context.
    let Some(fake) = (unsafe { FakeContext::live(pointer) }) else {
        return refuse(libc::EINVAL);
    };
    if let Some(errno) = fake.context.device.failure("create_comp_channel") {
        return refuse(errno);
    }
    let channel = match Channel::new() {
        Ok(channel) => channel,
        Err(error) => return refuse(errno_of(&error)),
    };
    let raw = ibv_comp_channel {
        context: pointer,
        fd: channel.fd(),
        refcnt: 0,
    };
    FakeChannel::leak(raw, fake.context.clone(), channel, AtomicU32::new(0)).pointer()
}

/// ibv_destroy_comp_channel. EBUSY, and misuse, while completion queues use it.
///
/// # Safety
/// As the verb's.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ibv_destroy_comp_channel(pointer: *mut ibv_comp_channel) -> c_int {
    // SAFETY: null, or a channel.
    let Some(fake) = (unsafe { FakeChannel::live(pointer) }) else {
        return libc::EINVAL;
    };
    if fake.users.load(Ordering::Acquire) > 0 {
        fake.context
            .misuse("completion channel destroyed while completion queues use it");
        return libc::EBUSY;
    }
    fake.mark.destroy();
    fake.channel.close();
    0
}

/// ibv_create_cq.
///
/// # Safety
/// As the verb's.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ibv_create_cq(
    pointer: *mut ibv_context,
    entries: c_int,
    cq_context: *mut c_void,
    channel: *mut ibv_comp_channel,
    vector: c_int,
) -> *mut ibv_cq {
    // SAFETY: null, or a context.
    let Some(fake) = (unsafe { FakeContext::live(pointer) }) else {
        return refuse(libc::EINVAL);
    };
    if let Some(errno) = fake.context.device.failure("create_cq") {
        return refuse(errno);
    }
    let mut state = fake.context.state.lock();
    let capacity = match u32::try_from(entries) {
        Ok(entries) if entries > 0 && entries <= state.settings.max_cqe && vector == 0 => entries,
        _ => return refuse(libc::EINVAL),
    };
    // SAFETY: null, or a channel.
    let fake_channel = unsafe { FakeChannel::live(channel) };
    if fake_channel.is_none() && !channel.is_null() {
        return refuse(libc::EINVAL);
    }
    if let Some(channel) = fake_channel {
        channel.users.fetch_add(1, Ordering::AcqRel);
    }
    // SAFETY: all zero is a valid ibv_cq.
    let mut raw: ibv_cq = unsafe { std::mem::zeroed() };
    raw.context = pointer;
    raw.channel = channel;
    raw.cq_context = cq_context;
    raw.cqe = entries;
    let queue = CompletionQueue::new(capacity as usize);
    let fake = FakeCq::leak(raw, fake.context.clone(), fake_channel, queue, AtomicU32::new(0));
    state.completion_queues.push(fake);
    fake.pointer()
}

/// ibv_destroy_cq. EBUSY, and misuse, while queue pairs use it or events of it are not acknowledged (for which the
/// real one waits for ever, and this one a fifth of a second).
///
/// # Safety
/// As the verb's.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ibv_destroy_cq(pointer: *mut ibv_cq) -> c_int {
    // SAFETY: null, or a completion queue.
    let Some(fake) = (unsafe { FakeCq::live(pointer) }) else {
        return libc::EINVAL;
    };
    if let Some(errno) = fake.context.device.failure("destroy_cq") {
        return errno;
    }
    if fake.users.load(Ordering::Acquire) > 0 {
        fake.context
            .misuse("completion queue destroyed while queue pairs use it");
        return libc::EBUSY;
    }
    if let Some(channel) = fake.channel {
        channel.channel.forget(fake);
    }
    if !fake.queue.wait_acknowledged() {
        fake.context
            .misuse("completion queue destroyed with unacknowledged completion events");
        return libc::EBUSY;
    }
    if !fake.context.events.forget(pointer.addr()) {
        fake.context
            .misuse("completion queue destroyed with unacknowledged asynchronous events");
        return libc::EBUSY;
    }
    fake.mark.destroy();
    if let Some(channel) = fake.channel {
        channel.users.fetch_sub(1, Ordering::AcqRel);
    }
    fake.context
        .state
        .lock()
        .completion_queues
        .retain(|other| !std::ptr::eq(*other, fake));
    fake.queue.let_go();
    0
}

/// ibv_get_cq_event.
///
/// # Safety
/// As the verb's.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ibv_get_cq_event(
    pointer: *mut ibv_comp_channel,
    cq: *mut *mut ibv_cq,
    cq_context: *mut *mut c_void,
) -> c_int {
    // SAFETY: null, or a channel.
    let Some(fake) = (unsafe { FakeChannel::live(pointer) }) else {
        set_errno(libc::EINVAL);
        return -1;
    };
    match fake.channel.next() {
        Ok(queue) => {
            queue.queue.handed_out();
            // SAFETY: writable by the verb's contract; the completion queue's context is never written after it was
            // made.
            unsafe {
                cq.write(queue.pointer());
                cq_context.write((*queue.pointer()).cq_context);
            }
            0
        }
        Err(error) => {
            set_errno(errno_of(&error));
            -1
        }
    }
}

/// ibv_ack_cq_events.
///
/// # Safety
/// As the verb's.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ibv_ack_cq_events(pointer: *mut ibv_cq, count: c_uint) {
    // SAFETY: null, or a completion queue.
    if let Some(fake) = unsafe { FakeCq::live(pointer) }
        && !fake.queue.acknowledge(count)
    {
        fake.context
            .misuse("more completion events acknowledged than were handed out");
    }
}

/// What `ops.poll_cq` is.
///
/// # Safety
/// As the verb's.
pub(super) unsafe extern "C" fn poll_cq(pointer: *mut ibv_cq, limit: c_int, wc: *mut ibv_wc) -> c_int {
    // SAFETY: null, or a completion queue.
    let Some(fake) = (unsafe { FakeCq::live(pointer) }) else {
        return -libc::EINVAL;
    };
    if let Some(errno) = fake.context.device.failure("poll_cq") {
        return -errno;
    }
    let limit = usize::try_from(limit).unwrap_or(0);
    // SAFETY: there is room for `limit` completions, and fewer are written.
    let count = fake
        .queue
        .poll(limit, |index, completion| unsafe { wc.add(index).write(*completion) });
    if count > 0 {
        add(&fake.context.device.counters.completions_polled, count as u64);
    }
    count as c_int
}

/// What `ops.req_notify_cq` is.
///
/// # Safety
/// As the verb's.
pub(super) unsafe extern "C" fn req_notify_cq(pointer: *mut ibv_cq, _solicited_only: c_int) -> c_int {
    // SAFETY: null, or a completion queue.
    let Some(fake) = (unsafe { FakeCq::live(pointer) }) else {
        return libc::EINVAL;
    };
    if let Some(errno) = fake.context.device.failure("req_notify_cq") {
        return errno;
    }
    fake.queue.arm();
    0
}
