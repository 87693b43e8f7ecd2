//! Queue pairs: their state, and the state machine with the checks of attribute masks.

use std::collections::VecDeque;
use std::sync::atomic::Ordering;
use std::time::Instant;

use kvxfer_rdma::sys::{self, ibv_qp_attr};

use crate::config::link_layer;
use crate::counters::add;
use crate::network::LOCAL_BITS;
use crate::objects::{FakeCq, FakePd, FakeQp};
use crate::packet::{Address, lid_address, psn_distance};
use crate::state::State;

/// A piece of local memory in a send request.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Segment {
    pub(crate) address: u64,
    pub(crate) length: u32,
    pub(crate) key: u32,
}

/// A send request that was posted.
pub(crate) struct Send {
    pub(crate) wr_id: u64,
    pub(crate) opcode: u32,
    pub(crate) segments: Vec<Segment>,
    pub(crate) length: u32,
    pub(crate) remote_address: u64,
    pub(crate) key: u32,
    /// In the byte order that the caller gave.
    pub(crate) immediate: u32,
    pub(crate) signalled: bool,
    /// Waits for the READs before it.
    pub(crate) fence: bool,
    /// Its place among everything posted to the device.
    pub(crate) sequence: u64,
    /// What follows is known once its first packet is due.
    pub(crate) started: bool,
    pub(crate) first_psn: u32,
    pub(crate) packets: u32,
    /// Pieces of a READ's answer that have come.
    pub(crate) received: u32,
    /// The status that it fails with once everything before it is done.
    pub(crate) fault: Option<u32>,
    /// The status that it is reported with although it was carried out.
    pub(crate) misreport: Option<u32>,
}

impl Send {
    /// Whether it is a READ.
    pub(crate) fn is_read(&self) -> bool {
        self.opcode == sys::IBV_WR_RDMA_READ
    }

    /// The number of its last packet.
    pub(crate) fn last_psn(&self) -> u32 {
        crate::packet::psn_add(self.first_psn, self.packets - 1)
    }
}

/// Where a connected queue pair's packets go.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Route {
    /// The peer's context, from its queue pair number.
    pub(crate) context: u32,
    pub(crate) source: Address,
    pub(crate) destination: Address,
}

/// A queue pair.
pub(crate) struct QueuePair {
    pub(crate) handle: &'static FakeQp,
    pub(crate) pd: &'static FakePd,
    pub(crate) send_cq: &'static FakeCq,
    pub(crate) receive_cq: &'static FakeCq,
    pub(crate) number: u32,
    pub(crate) capacity: sys::ibv_qp_cap,
    pub(crate) signal_all: bool,
    pub(crate) state: u32,
    /// All attributes set so far.
    pub(crate) attributes: ibv_qp_attr,
    pub(crate) route: Route,
    /// Posted and not completed, oldest first.
    pub(crate) sends: VecDeque<Send>,
    /// Which of `sends` is being sent, and how many of its packets have been.
    pub(crate) cursor: usize,
    pub(crate) packet: u32,
    /// The number that the next new packet gets.
    pub(crate) next_psn: u32,
    /// The oldest packet that is not acknowledged.
    pub(crate) unacknowledged: u32,
    /// READs before the cursor that are not complete.
    pub(crate) reads: u32,
    /// Completed requests that no completion has told of.
    pub(crate) unreported: u32,
    /// When the peer's silence counts as a loss.
    pub(crate) timer: Option<Instant>,
    pub(crate) retries: u32,
    pub(crate) not_ready_retries: u32,
    /// Sends nothing before.
    pub(crate) paused_until: Option<Instant>,
    /// Identifiers of posted receives, oldest first.
    pub(crate) receives: VecDeque<u64>,
    /// The packet that the responder accepts next.
    pub(crate) expected: u32,
    pub(crate) gap_reported: bool,
    pub(crate) acknowledgement_due: bool,
    /// READs being answered.
    pub(crate) reads_served: u32,
    /// Refused a request: it is in ERR, and answers that had begun still go out, before the refusal.
    pub(crate) finishing: bool,
    /// In ERR, with requests that the device has yet to flush.
    pub(crate) flush_due: bool,
}

/// No more packets than this are unacknowledged at once.
pub(crate) const WINDOW: i32 = 256;

impl QueuePair {
    /// Forgets all traffic, as a move to RESET does.
    pub(crate) fn clear(&mut self) {
        self.sends.clear();
        self.receives.clear();
        self.cursor = 0;
        self.packet = 0;
        self.reads = 0;
        self.unreported = 0;
        self.timer = None;
        self.retries = 0;
        self.not_ready_retries = 0;
        self.paused_until = None;
        self.gap_reported = false;
        self.acknowledgement_due = false;
        self.reads_served = 0;
        self.finishing = false;
        self.flush_due = false;
    }

    /// Whether the responder takes requests.
    pub(crate) fn receives_requests(&self) -> bool {
        matches!(self.state, sys::IBV_QPS_RTR | sys::IBV_QPS_RTS)
    }

    /// Whether something is sent and not acknowledged.
    pub(crate) fn is_waiting(&self) -> bool {
        self.cursor > 0 || self.packet > 0
    }

    /// The number of the packet to be sent next, if its request has begun.
    pub(crate) fn current_psn(&self) -> u32 {
        match self.sends.get(self.cursor) {
            Some(send) if send.started => crate::packet::psn_add(send.first_psn, self.packet),
            _ => self.next_psn,
        }
    }

    /// Whether the window has room for one more packet.
    pub(crate) fn window_open(&self) -> bool {
        psn_distance(self.current_psn(), self.unacknowledged) < WINDOW
    }
}

/// Attributes that a transition needs, and those it also takes.
fn masks(from: u32, to: u32) -> Option<(u32, u32)> {
    use sys::*;
    let state = IBV_QP_STATE;
    let always = IBV_QP_CUR_STATE;
    Some(match (from, to) {
        (_, IBV_QPS_RESET | IBV_QPS_ERR) => (state, always),
        (IBV_QPS_RESET, IBV_QPS_INIT) => (state | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS, always),
        (IBV_QPS_INIT, IBV_QPS_INIT) => (
            0,
            state | always | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS,
        ),
        (IBV_QPS_INIT, IBV_QPS_RTR) => (
            state
                | IBV_QP_AV
                | IBV_QP_PATH_MTU
                | IBV_QP_DEST_QPN
                | IBV_QP_RQ_PSN
                | IBV_QP_MAX_DEST_RD_ATOMIC
                | IBV_QP_MIN_RNR_TIMER,
            always | IBV_QP_ACCESS_FLAGS | IBV_QP_PKEY_INDEX,
        ),
        (IBV_QPS_RTR, IBV_QPS_RTS) => (
            state | IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT | IBV_QP_RNR_RETRY | IBV_QP_SQ_PSN | IBV_QP_MAX_QP_RD_ATOMIC,
            always | IBV_QP_ACCESS_FLAGS | IBV_QP_MIN_RNR_TIMER | IBV_QP_PATH_MIG_STATE,
        ),
        (IBV_QPS_RTS, IBV_QPS_RTS) => (
            0,
            state | always | IBV_QP_ACCESS_FLAGS | IBV_QP_MIN_RNR_TIMER | IBV_QP_PATH_MIG_STATE,
        ),
        _ => return None,
    })
}

/// Carries out modify_qp; the errno if it is refused.
pub(crate) fn modify(state: &mut State, qp: &mut QueuePair, attr: &ibv_qp_attr, mask: u32) -> Result<(), i32> {
    let to = if mask & sys::IBV_QP_STATE != 0 {
        attr.qp_state
    } else {
        qp.state
    };
    if mask & sys::IBV_QP_CUR_STATE != 0 && attr.cur_qp_state != qp.state {
        return Err(libc::EINVAL);
    }
    let (needed, optional) = masks(qp.state, to).ok_or(libc::EINVAL)?;
    if mask & needed != needed || mask & !(needed | optional) != 0 {
        return Err(libc::EINVAL);
    }
    if let Some(errno) = state
        .device
        .failure(verb_of(qp.state, to))
        .or_else(|| state.device.failure("modify_qp"))
    {
        return Err(errno);
    }
    check(state, attr, mask)?;
    take_attributes(qp, attr, mask);
    match to {
        sys::IBV_QPS_RESET => reset(state, qp),
        sys::IBV_QPS_ERR => state.move_to_error(qp),
        sys::IBV_QPS_RTR if qp.state == sys::IBV_QPS_INIT => {
            qp.route = route(state, &qp.attributes)?;
            qp.expected = qp.attributes.rq_psn & 0x00ff_ffff;
            qp.state = to;
        }
        sys::IBV_QPS_RTS if qp.state == sys::IBV_QPS_RTR => {
            qp.next_psn = qp.attributes.sq_psn & 0x00ff_ffff;
            qp.unacknowledged = qp.next_psn;
            qp.state = to;
        }
        _ => qp.state = to,
    }
    // SAFETY: the context's lock is held; the C library's own modify_qp writes this field in the same way.
    unsafe { (*qp.handle.pointer()).state = qp.state };
    Ok(())
}

/// The name under which the configuration can make this transition fail.
fn verb_of(from: u32, to: u32) -> &'static str {
    match (from, to) {
        (_, sys::IBV_QPS_RESET) => "modify_qp.reset",
        (_, sys::IBV_QPS_INIT) => "modify_qp.init",
        (_, sys::IBV_QPS_RTR) => "modify_qp.rtr",
        (_, sys::IBV_QPS_RTS) => "modify_qp.rts",
        _ => "modify_qp.err",
    }
}

fn check(state: &State, attr: &ibv_qp_attr, mask: u32) -> Result<(), i32> {
    let settings = &state.settings;
    let depth = settings.max_qp_rd_atom;
    let refused = [
        (sys::IBV_QP_PORT, attr.port_num != 1),
        (sys::IBV_QP_PKEY_INDEX, attr.pkey_index != 0),
        (
            sys::IBV_QP_PATH_MTU,
            !(sys::IBV_MTU_256..=settings.active_mtu).contains(&attr.path_mtu),
        ),
        (sys::IBV_QP_MAX_QP_RD_ATOMIC, u32::from(attr.max_rd_atomic) > depth),
        (
            sys::IBV_QP_MAX_DEST_RD_ATOMIC,
            u32::from(attr.max_dest_rd_atomic) > depth,
        ),
        (sys::IBV_QP_DEST_QPN, attr.dest_qp_num > 0x00ff_ffff),
        (sys::IBV_QP_RQ_PSN, attr.rq_psn > 0x00ff_ffff),
        (sys::IBV_QP_SQ_PSN, attr.sq_psn > 0x00ff_ffff),
        (sys::IBV_QP_TIMEOUT, attr.timeout > 31),
        (sys::IBV_QP_RETRY_CNT, attr.retry_cnt > 7),
        (sys::IBV_QP_RNR_RETRY, attr.rnr_retry > 7),
        (sys::IBV_QP_MIN_RNR_TIMER, attr.min_rnr_timer > 31),
        (sys::IBV_QP_AV, attr.ah_attr.port_num != 1),
    ];
    if refused.iter().any(|(bit, wrong)| mask & bit != 0 && *wrong) {
        return Err(libc::EINVAL);
    }
    if mask & sys::IBV_QP_AV != 0 {
        route(state, attr)?;
    }
    Ok(())
}

/// Where packets go by the address in the attributes.
fn route(state: &State, attr: &ibv_qp_attr) -> Result<Route, i32> {
    let settings = &state.settings;
    let context = attr.dest_qp_num >> LOCAL_BITS;
    if settings.link_layer == link_layer::INFINIBAND {
        if attr.ah_attr.dlid == 0 {
            return Err(libc::EINVAL);
        }
        return Ok(Route {
            context,
            source: lid_address(settings.lid),
            destination: lid_address(attr.ah_attr.dlid),
        });
    }
    let own = settings
        .gids
        .get(usize::from(attr.ah_attr.grh.sgid_index))
        .ok_or(libc::EINVAL)?;
    // SAFETY: every bit pattern is a valid GID.
    let destination = unsafe { attr.ah_attr.grh.dgid.raw };
    if attr.ah_attr.is_global == 0 || own.raw == [0; 16] || destination == [0; 16] || attr.ah_attr.grh.hop_limit == 0 {
        return Err(libc::EINVAL);
    }
    Ok(Route {
        context,
        source: own.raw,
        destination,
    })
}

fn take_attributes(qp: &mut QueuePair, attr: &ibv_qp_attr, mask: u32) {
    let kept = &mut qp.attributes;
    macro_rules! take {
        ($($bit:ident => $($field:ident),+;)*) => {
            $(if mask & sys::$bit != 0 { $(kept.$field = attr.$field;)+ })*
        };
    }
    take! {
        IBV_QP_ACCESS_FLAGS => qp_access_flags;
        IBV_QP_PKEY_INDEX => pkey_index;
        IBV_QP_PORT => port_num;
        IBV_QP_AV => ah_attr;
        IBV_QP_PATH_MTU => path_mtu;
        IBV_QP_TIMEOUT => timeout;
        IBV_QP_RETRY_CNT => retry_cnt;
        IBV_QP_RNR_RETRY => rnr_retry;
        IBV_QP_RQ_PSN => rq_psn;
        IBV_QP_SQ_PSN => sq_psn;
        IBV_QP_MAX_QP_RD_ATOMIC => max_rd_atomic;
        IBV_QP_MAX_DEST_RD_ATOMIC => max_dest_rd_atomic;
        IBV_QP_MIN_RNR_TIMER => min_rnr_timer;
        IBV_QP_DEST_QPN => dest_qp_num;
        IBV_QP_PATH_MIG_STATE => path_mig_state;
    }
}

/// RESET loses what was posted and what had completed and was not polled. What is on its way to this number, or
/// accepted and not yet placed, is not stopped.
fn reset(state: &State, qp: &mut QueuePair) {
    let counters = &state.device.counters;
    if !qp.sends.is_empty() || !qp.receives.is_empty() {
        add(&counters.resets_with_outstanding, 1);
    }
    let lost = qp.send_cq.queue.forget(qp.handle) + qp.receive_cq.queue.forget(qp.handle);
    add(&counters.completions_lost, lost as u64);
    qp.clear();
    qp.handle.sends_used.store(0, Ordering::Release);
    qp.handle.receives_used.store(0, Ordering::Release);
    qp.state = sys::IBV_QPS_RESET;
}
