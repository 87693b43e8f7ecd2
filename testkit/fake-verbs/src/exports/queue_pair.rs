//! Queue pairs.

use std::os::raw::c_int;
use std::sync::atomic::{AtomicU32, Ordering};

use kvxfer_rdma::sys::{
    self, ibv_pd, ibv_qp, ibv_qp_attr, ibv_qp_init_attr, ibv_recv_wr, ibv_send_wr, pthread_mutex_t,
};

use super::refuse;
use crate::counters::add;
use crate::network::LOCAL_BITS;
use crate::objects::{FakeCq, FakePd, FakeQp};
use crate::post::{self, take_by_handle};
use crate::queue_pair::{self, QueuePair, Route};
use crate::state::{LOCAL_MASK, State};

/// ibv_create_qp: reliable connections without shared receive queues.
///
/// # Safety
/// As the verb's.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ibv_create_qp(pd: *mut ibv_pd, init: *mut ibv_qp_init_attr) -> *mut ibv_qp {
    // SAFETY: null, or a protection domain and attributes.
    let (Some(domain), Some(init)) = (unsafe { FakePd::live(pd) }, unsafe { init.as_mut() }) else {
        return refuse(libc::EINVAL);
    };
    let context = &domain.context;
    if let Some(errno) = context.device.failure("create_qp") {
        return refuse(errno);
    }
    // SAFETY: null, or completion queues.
    let queues = unsafe { (FakeCq::live(init.send_cq), FakeCq::live(init.recv_cq)) };
    let (Some(send_cq), Some(receive_cq)) = queues else {
        return refuse(libc::EINVAL);
    };
    if init.qp_type != sys::IBV_QPT_RC || !init.srq.is_null() {
        return refuse(libc::EOPNOTSUPP);
    }
    let mut state = context.state.lock();
    if state.dead {
        return refuse(libc::EIO);
    }
    let cap = init.cap;
    let most = &state.settings;
    if cap.max_send_wr > most.max_qp_wr
        || cap.max_recv_wr > most.max_qp_wr
        || cap.max_send_sge > most.max_sge
        || cap.max_recv_sge > most.max_sge
        || cap.max_inline_data > 0
    {
        return refuse(libc::EINVAL);
    }
    let Some(local) = free_place(&mut state) else {
        return refuse(libc::ENOMEM);
    };
    let number = state.number << LOCAL_BITS | local;
    // SAFETY: all zero is a valid ibv_qp.
    let mut raw: ibv_qp = unsafe { std::mem::zeroed() };
    // SAFETY: the domain lives.
    raw.context = unsafe { (*pd).context };
    raw.qp_context = init.qp_context;
    raw.pd = pd;
    raw.send_cq = init.send_cq;
    raw.recv_cq = init.recv_cq;
    raw.qp_num = number;
    raw.handle = local;
    raw.state = sys::IBV_QPS_RESET;
    raw.qp_type = init.qp_type;
    raw.mutex = pthread_mutex_t { __size: [0; 40] };
    for users in [&domain.users, &send_cq.users, &receive_cq.users] {
        users.fetch_add(1, Ordering::AcqRel);
    }
    let handle = FakeQp::leak(
        raw,
        context.clone(),
        domain,
        send_cq,
        receive_cq,
        AtomicU32::new(0),
        AtomicU32::new(0),
    );
    let qp = new_queue_pair(handle, number, cap, init.sq_sig_all != 0);
    state.put(Box::new(qp));
    state.live.push(local);
    add(&context.device.counters.qps_created, 1);
    handle.pointer()
}

/// A place that no queue pair has, going round so that numbers are not used again soon.
fn free_place(state: &mut State) -> Option<u32> {
    if state.live.len() >= state.settings.max_qp as usize {
        return None;
    }
    for _ in 0..=LOCAL_MASK {
        state.last_local = (state.last_local + 1) & LOCAL_MASK;
        if state.last_local != 0 && state.queue_pairs[state.last_local as usize].is_none() {
            return Some(state.last_local);
        }
    }
    None
}

fn new_queue_pair(handle: &'static FakeQp, number: u32, capacity: sys::ibv_qp_cap, signal_all: bool) -> QueuePair {
    QueuePair {
        handle,
        pd: handle.pd,
        send_cq: handle.send_cq,
        receive_cq: handle.receive_cq,
        number,
        capacity,
        signal_all,
        state: sys::IBV_QPS_RESET,
        // SAFETY: all zero is a valid ibv_qp_attr.
        attributes: unsafe { std::mem::zeroed() },
        route: Route::default(),
        sends: Default::default(),
        cursor: 0,
        packet: 0,
        next_psn: 0,
        unacknowledged: 0,
        reads: 0,
        unreported: 0,
        timer: None,
        retries: 0,
        not_ready_retries: 0,
        paused_until: None,
        receives: Default::default(),
        expected: 0,
        gap_reported: false,
        acknowledgement_due: false,
        reads_served: 0,
        finishing: false,
        flush_due: false,
    }
}

/// ibv_modify_qp.
///
/// # Safety
/// As the verb's.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ibv_modify_qp(pointer: *mut ibv_qp, attributes: *mut ibv_qp_attr, mask: c_int) -> c_int {
    // SAFETY: null, or a queue pair and attributes.
    let (Some(fake), Some(attributes)) = (unsafe { FakeQp::live(pointer) }, unsafe { attributes.as_ref() }) else {
        return libc::EINVAL;
    };
    let mut state = fake.context.state.lock();
    let Some(mut qp) = take_by_handle(&mut state, fake) else {
        return libc::EINVAL;
    };
    let result = queue_pair::modify(&mut state, &mut qp, attributes, mask as u32);
    state.put(qp);
    fake.context.wake(&mut state);
    result.err().unwrap_or(0)
}

/// ibv_query_qp.
///
/// # Safety
/// As the verb's.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ibv_query_qp(
    pointer: *mut ibv_qp,
    attributes: *mut ibv_qp_attr,
    _mask: c_int,
    init: *mut ibv_qp_init_attr,
) -> c_int {
    // SAFETY: null, or a queue pair.
    let Some(fake) = (unsafe { FakeQp::live(pointer) }) else {
        return libc::EINVAL;
    };
    if let Some(errno) = fake.context.device.failure("query_qp") {
        return errno;
    }
    let mut state = fake.context.state.lock();
    let Some(qp) = take_by_handle(&mut state, fake) else {
        return libc::EINVAL;
    };
    let mut answer = qp.attributes;
    answer.qp_state = qp.state;
    answer.cur_qp_state = qp.state;
    answer.cap = qp.capacity;
    // SAFETY: writable by the verb's contract; the queue pair lives, so its fields are readable.
    unsafe {
        attributes.write(answer);
        init.write(ibv_qp_init_attr {
            qp_context: (*pointer).qp_context,
            send_cq: (*pointer).send_cq,
            recv_cq: (*pointer).recv_cq,
            srq: std::ptr::null_mut(),
            cap: qp.capacity,
            qp_type: sys::IBV_QPT_RC,
            sq_sig_all: c_int::from(qp.signal_all),
        });
    }
    state.put(qp);
    0
}

/// ibv_destroy_qp. Work may be outstanding; its completions do not come, and those that were not polled are lost.
///
/// # Safety
/// As the verb's.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ibv_destroy_qp(pointer: *mut ibv_qp) -> c_int {
    // SAFETY: null, or a queue pair.
    let Some(fake) = (unsafe { FakeQp::live(pointer) }) else {
        return libc::EINVAL;
    };
    let context = &fake.context;
    if let Some(errno) = context.device.failure("destroy_qp") {
        return errno;
    }
    if !context.events.forget(pointer.addr()) {
        context.misuse("queue pair destroyed with unacknowledged asynchronous events");
        return libc::EBUSY;
    }
    let mut state = context.state.lock();
    let Some(qp) = take_by_handle(&mut state, fake) else {
        return libc::EINVAL;
    };
    let counters = &context.device.counters;
    if !qp.sends.is_empty() || !qp.receives.is_empty() {
        add(&counters.destroys_with_outstanding, 1);
    }
    let lost = fake.send_cq.queue.forget(fake) + fake.receive_cq.queue.forget(fake);
    add(&counters.completions_lost, lost as u64);
    let local = qp.number & LOCAL_MASK;
    state.live.retain(|live| *live != local);
    fake.mark.destroy();
    drop(state);
    for users in [&fake.pd.users, &fake.send_cq.users, &fake.receive_cq.users] {
        users.fetch_sub(1, Ordering::AcqRel);
    }
    add(&counters.qps_destroyed, 1);
    0
}

/// What `ops.post_send` is.
///
/// # Safety
/// As the verb's.
pub(super) unsafe extern "C" fn post_send(
    pointer: *mut ibv_qp,
    request: *mut ibv_send_wr,
    bad: *mut *mut ibv_send_wr,
) -> c_int {
    // SAFETY: null, or a queue pair.
    let Some(fake) = (unsafe { FakeQp::live(pointer) }) else {
        // SAFETY: writable by the verb's contract.
        unsafe { bad.write(request) };
        return libc::EINVAL;
    };
    // SAFETY: a list by the verb's contract.
    match unsafe { post::post_send(fake, request) } {
        Ok(()) => 0,
        Err(refused) => {
            // SAFETY: writable by the verb's contract.
            unsafe { bad.write(refused.request) };
            refused.errno
        }
    }
}

/// What `ops.post_recv` is.
///
/// # Safety
/// As the verb's.
pub(super) unsafe extern "C" fn post_recv(
    pointer: *mut ibv_qp,
    request: *mut ibv_recv_wr,
    bad: *mut *mut ibv_recv_wr,
) -> c_int {
    // SAFETY: null, or a queue pair.
    let Some(fake) = (unsafe { FakeQp::live(pointer) }) else {
        // SAFETY: writable by the verb's contract.
        unsafe { bad.write(request) };
        return libc::EINVAL;
    };
    // SAFETY: a list by the verb's contract.
    match unsafe { post::post_receive(fake, request) } {
        Ok(()) => 0,
        Err(refused) => {
            // SAFETY: writable by the verb's contract.
            unsafe { bad.write(refused.request) };
            refused.errno
        }
    }
}
