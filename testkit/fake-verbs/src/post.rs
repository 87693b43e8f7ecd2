//! post_send and post_recv.

use std::sync::atomic::Ordering;

use kvxfer_rdma::sys::{self, ibv_recv_wr, ibv_send_wr};
use parking_lot::MutexGuard;

use crate::config::Mode;
use crate::counters::add;
use crate::objects::FakeQp;
use crate::queue_pair::{QueuePair, Segment, Send};
use crate::state::{LOCAL_MASK, Report, State};

/// Why a request was not taken, and which.
pub(crate) struct Refused<T> {
    pub(crate) errno: i32,
    pub(crate) request: *mut T,
}

/// An immediate of a request that completed at once, on its way to a context of this process.
struct Immediate {
    queue_pair: u32,
    value: u32,
    length: u32,
}

/// Posts a list of send requests.
///
/// # Safety
/// `request` is null or a list as post_send takes it.
pub(crate) unsafe fn post_send(
    handle: &'static FakeQp,
    mut request: *mut ibv_send_wr,
) -> Result<(), Refused<ibv_send_wr>> {
    let context = &*handle.context;
    let counters = &context.device.counters;
    add(&counters.doorbells, 1);
    let mut state = context.state.lock();
    if let Some(errno) = refusal(&state, "post_send") {
        return Err(Refused { errno, request });
    }
    let mut immediates = Vec::new();
    let mut result = Ok(());
    // SAFETY: the caller's list.
    while let Some(wr) = unsafe { request.as_ref() } {
        let refused = state.device.failure("post_send.one");
        // SAFETY: as above.
        let posted = refused.map_or_else(|| unsafe { post_one(&mut state, handle, wr, &mut immediates) }, Err);
        if let Err(errno) = posted {
            result = Err(Refused { errno, request });
            break;
        }
        request = wr.next;
    }
    context.wake(&mut state);
    drop(state);
    for immediate in immediates {
        deliver(&immediate);
    }
    result
}

fn refusal(state: &State, verb: &str) -> Option<i32> {
    if state.dead {
        return Some(libc::EIO);
    }
    state.device.failure(verb)
}

/// # Safety
/// A request as post_send takes it.
unsafe fn post_one(
    state: &mut State,
    handle: &'static FakeQp,
    wr: &ibv_send_wr,
    immediates: &mut Vec<Immediate>,
) -> Result<(), i32> {
    // SAFETY: the number is never written after the queue pair was made.
    let place = unsafe { (*handle.pointer()).qp_num & LOCAL_MASK } as usize;
    let Some(qp) = state.queue_pairs[place].as_deref_mut() else {
        return Err(libc::EINVAL);
    };
    if !matches!(qp.state, sys::IBV_QPS_RTS | sys::IBV_QPS_ERR) {
        return Err(libc::EINVAL);
    }
    if handle.sends_used.load(Ordering::Acquire) >= qp.capacity.max_send_wr {
        add(&state.device.counters.queue_full, 1);
        return Err(libc::ENOMEM);
    }
    let segments = u32::try_from(wr.num_sge).map_err(|_| libc::EINVAL)?;
    let is_read = wr.opcode == sys::IBV_WR_RDMA_READ;
    let most = if is_read {
        state.settings.max_sge_rd.min(qp.capacity.max_send_sge)
    } else {
        qp.capacity.max_send_sge
    };
    let known = matches!(
        wr.opcode,
        sys::IBV_WR_RDMA_WRITE | sys::IBV_WR_RDMA_WRITE_WITH_IMM | sys::IBV_WR_RDMA_READ
    );
    if segments > most || !known || wr.send_flags & sys::IBV_SEND_INLINE != 0 {
        return Err(libc::EINVAL);
    }
    let list = if segments == 0 {
        &[]
    } else {
        // SAFETY: the caller's list has as many entries as it says.
        unsafe { std::slice::from_raw_parts(wr.sg_list, segments as usize) }
    };
    let length: u64 = list.iter().map(|segment| u64::from(segment.length)).sum();
    let length = u32::try_from(length)
        .ok()
        .filter(|length| *length <= state.settings.max_msg_sz)
        .ok_or(libc::EINVAL)?;
    let counters = &state.device.counters;
    add(
        if is_read {
            &counters.reads
        } else {
            &counters.writes_posted
        },
        1,
    );
    let has_immediate = wr.opcode == sys::IBV_WR_RDMA_WRITE_WITH_IMM;
    add(&counters.immediates, u64::from(has_immediate));
    handle.sends_used.fetch_add(1, Ordering::Relaxed);
    // SAFETY: an immediate is a plain number in every request; it has a meaning only in one with an immediate.
    let immediate = unsafe { wr.__bindgen_anon_1.imm_data };
    if state.settings.mode == Mode::Instant && qp.state == sys::IBV_QPS_RTS {
        if has_immediate {
            immediates.push(Immediate {
                queue_pair: qp.attributes.dest_qp_num,
                value: immediate,
                length,
            });
        }
        complete_at_once(state, place, wr, length);
        return Ok(());
    }
    // SAFETY: all known operations are one-sided, so this is the active member.
    let remote = unsafe { wr.wr.rdma };
    state.sequence += 1;
    qp.sends.push_back(Send {
        wr_id: wr.wr_id,
        opcode: wr.opcode,
        segments: list
            .iter()
            .map(|segment| Segment {
                address: segment.addr,
                length: segment.length,
                key: segment.lkey,
            })
            .collect(),
        length,
        remote_address: remote.remote_addr,
        key: remote.rkey,
        immediate,
        signalled: wr.send_flags & sys::IBV_SEND_SIGNALED != 0,
        fence: wr.send_flags & sys::IBV_SEND_FENCE != 0,
        sequence: state.sequence,
        started: false,
        first_psn: 0,
        packets: 0,
        received: 0,
        fault: None,
        misreport: None,
    });
    qp.flush_due |= qp.state == sys::IBV_QPS_ERR;
    Ok(())
}

/// Mode `instant`: the request is complete now, and nothing was copied.
fn complete_at_once(state: &mut State, place: usize, wr: &ibv_send_wr, length: u32) {
    let Some(mut qp) = state.queue_pairs[place].take() else {
        return;
    };
    qp.unreported += 1;
    if wr.send_flags & sys::IBV_SEND_SIGNALED != 0 || qp.signal_all {
        let is_read = wr.opcode == sys::IBV_WR_RDMA_READ;
        let report = Report {
            wr_id: wr.wr_id,
            status: sys::IBV_WC_SUCCESS,
            opcode: if is_read {
                sys::IBV_WC_RDMA_READ
            } else {
                sys::IBV_WC_RDMA_WRITE
            },
            length,
            immediate: None,
            sends: std::mem::take(&mut qp.unreported),
            receives: 0,
        };
        state.complete(&mut qp, &report);
    }
    state.queue_pairs[place] = Some(qp);
}

/// Mode `instant`: hands an immediate to its queue pair, if that is in this process and has a receive.
fn deliver(immediate: &Immediate) {
    let Some(context) = crate::context::numbered(immediate.queue_pair) else {
        return;
    };
    let mut state = context.state.lock();
    let Some(mut qp) = state.take(immediate.queue_pair) else {
        return;
    };
    if qp.number == immediate.queue_pair
        && qp.receives_requests()
        && let Some(wr_id) = qp.receives.pop_front()
    {
        add(&state.device.counters.immediates_received, 1);
        let report = Report {
            wr_id,
            status: sys::IBV_WC_SUCCESS,
            opcode: sys::IBV_WC_RECV_RDMA_WITH_IMM,
            length: immediate.length,
            immediate: Some(immediate.value),
            sends: 0,
            receives: 1,
        };
        state.complete(&mut qp, &report);
    }
    state.put(qp);
}

/// Posts a list of receives.
///
/// # Safety
/// `request` is null or a list as post_recv takes it.
pub(crate) unsafe fn post_receive(
    handle: &'static FakeQp,
    mut request: *mut ibv_recv_wr,
) -> Result<(), Refused<ibv_recv_wr>> {
    let context = &*handle.context;
    add(&context.device.counters.receive_doorbells, 1);
    let mut state = context.state.lock();
    if let Some(errno) = refusal(&state, "post_recv") {
        return Err(Refused { errno, request });
    }
    let mut result = Ok(());
    // SAFETY: the caller's list.
    while let Some(wr) = unsafe { request.as_ref() } {
        if let Err(errno) = post_one_receive(&mut state, handle, wr) {
            result = Err(Refused { errno, request });
            break;
        }
        request = wr.next;
    }
    wake_for_flush(&mut state, handle);
    result
}

fn wake_for_flush(state: &mut MutexGuard<'_, State>, handle: &FakeQp) {
    // SAFETY: the number is never written after the queue pair was made.
    let place = unsafe { (*handle.pointer()).qp_num & LOCAL_MASK } as usize;
    if state.queue_pairs[place].as_ref().is_some_and(|qp| qp.flush_due) {
        handle.context.wake(state);
    }
}

fn post_one_receive(state: &mut State, handle: &FakeQp, wr: &ibv_recv_wr) -> Result<(), i32> {
    // SAFETY: the number is never written after the queue pair was made.
    let place = unsafe { (*handle.pointer()).qp_num & LOCAL_MASK } as usize;
    let Some(qp) = state.queue_pairs[place].as_deref_mut() else {
        return Err(libc::EINVAL);
    };
    if qp.state == sys::IBV_QPS_RESET
        || u32::try_from(wr.num_sge).map_or(true, |count| count > qp.capacity.max_recv_sge)
    {
        return Err(libc::EINVAL);
    }
    if handle.receives_used.load(Ordering::Acquire) >= qp.capacity.max_recv_wr {
        add(&state.device.counters.queue_full, 1);
        return Err(libc::ENOMEM);
    }
    handle.receives_used.fetch_add(1, Ordering::Relaxed);
    qp.receives.push_back(wr.wr_id);
    qp.flush_due |= qp.state == sys::IBV_QPS_ERR;
    Ok(())
}

/// The queue pair that a handle stands for, taken out to be worked on.
pub(crate) fn take_by_handle(state: &mut State, handle: &FakeQp) -> Option<Box<QueuePair>> {
    // SAFETY: the number is never written after the queue pair was made.
    state.take(unsafe { (*handle.pointer()).qp_num })
}
