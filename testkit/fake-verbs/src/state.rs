//! What a context's device consists of, behind one lock: callers and the device thread change it in turns.

use std::collections::{HashMap, VecDeque};
use std::sync::Arc;
use std::time::Instant;

use kvxfer_rdma::sys::{self, ibv_async_event, ibv_async_event__bindgen_ty_1, ibv_wc, ibv_wc__bindgen_ty_1};

use crate::completion::{Completion, Pushed, Visible};
use crate::config::{Settings, WrongCompletion, link_layer};
use crate::counters::add;
use crate::device::Device;
use crate::event::EventQueue;
use crate::memory::Regions;
use crate::network::{Directory, LOCAL_BITS, Link, Response};
use crate::objects::{FakeCq, FakeQp};
use crate::packet::{Address, Header, lid_address};
use crate::queue_pair::QueuePair;
use crate::seen::Seen;

/// The lower bits of queue pair numbers.
pub(crate) const LOCAL_MASK: u32 = (1 << LOCAL_BITS) - 1;

/// A packet with its payload.
pub(crate) type Packet = (Header, Vec<u8>);

/// Bytes that were accepted and acknowledged and are not in memory yet.
pub(crate) struct Late {
    pub(crate) due: Instant,
    pub(crate) qp: &'static FakeQp,
    pub(crate) to: *mut u8,
    pub(crate) bytes: Vec<u8>,
}

// SAFETY: the address is used only as a device would use it, under the promise of the registration.
unsafe impl Send for Late {}

/// The device of one context.
pub(crate) struct State {
    pub(crate) device: &'static Device,
    pub(crate) settings: Arc<Settings>,
    pub(crate) events: Arc<EventQueue>,
    /// This context's number.
    pub(crate) number: u32,
    pub(crate) directory: Directory,
    pub(crate) regions: Regions,
    /// By the lower bits of their numbers.
    pub(crate) queue_pairs: Vec<Option<Box<QueuePair>>>,
    /// Which of them exist.
    pub(crate) live: Vec<u32>,
    pub(crate) last_local: u32,
    pub(crate) completion_queues: Vec<&'static FakeCq>,
    pub(crate) links: HashMap<u32, Link>,
    /// From this context to itself.
    pub(crate) loopback: VecDeque<Packet>,
    /// Answers of this context to itself.
    pub(crate) own_responses: VecDeque<Response>,
    /// Arrived, but still in the network as far as anyone can tell.
    pub(crate) network: VecDeque<(Instant, Packet)>,
    pub(crate) late: VecDeque<Late>,
    /// When the next delayed completion is to be seen.
    pub(crate) release_at: Option<Instant>,
    /// Queue pairs (lower bits) that owe acknowledgements.
    pub(crate) owing: Vec<u32>,
    /// When the port has sent everything so far, at the configured bandwidth.
    pub(crate) port_free: Instant,
    pub(crate) random: u64,
    /// Counts send requests.
    pub(crate) sequence: u64,
    pub(crate) wrong: Option<WrongCompletion>,
    /// After a fatal error: no traffic, verbs fail.
    pub(crate) dead: bool,
    /// Where others can see which configuration this context goes by.
    pub(crate) seen: Seen,
    /// The device thread is waiting, or about to.
    pub(crate) sleeping: bool,
    pub(crate) stop: bool,
}

/// What a completion says.
pub(crate) struct Report {
    pub(crate) wr_id: u64,
    pub(crate) status: u32,
    pub(crate) opcode: u32,
    pub(crate) length: u32,
    /// In the byte order it was given in.
    pub(crate) immediate: Option<u32>,
    /// How many requests of the send queue, and of the receive queue, it gives back.
    pub(crate) sends: u32,
    pub(crate) receives: u32,
}

/// What stands in the fields of a failed completion that have no meaning.
const GARBAGE: u32 = 0x5a5a_0000;

impl State {
    /// Frees what a closed device holds; the rest of it stays, for what may still point to it.
    pub(crate) fn let_go(&mut self) {
        self.queue_pairs = Vec::new();
        self.links.clear();
        self.loopback.clear();
        self.network.clear();
        self.late.clear();
        self.directory.close();
        self.seen.close();
    }

    /// A number from 0 to `below`, not included.
    pub(crate) fn random(&mut self, below: u64) -> u64 {
        // xorshift64: enough to shuffle.
        self.random ^= self.random << 13;
        self.random ^= self.random >> 7;
        self.random ^= self.random << 17;
        self.random % below.max(1)
    }

    /// Takes a queue pair out of its place, to work on it; [`State::put`] puts it back.
    pub(crate) fn take(&mut self, number: u32) -> Option<Box<QueuePair>> {
        self.queue_pairs.get_mut((number & LOCAL_MASK) as usize)?.take()
    }

    /// Puts a queue pair back.
    pub(crate) fn put(&mut self, qp: Box<QueuePair>) {
        let place = (qp.number & LOCAL_MASK) as usize;
        self.queue_pairs[place] = Some(qp);
    }

    /// Whether an address is this port's.
    pub(crate) fn is_own(&self, address: &Address) -> bool {
        if self.settings.link_layer == link_layer::INFINIBAND {
            return *address == lid_address(self.settings.lid);
        }
        self.settings.gids.iter().any(|gid| gid.raw == *address)
    }

    /// Whether packets come and go.
    pub(crate) fn port_is_up(&self) -> bool {
        self.settings.port_state == sys::IBV_PORT_ACTIVE
    }

    /// Makes a completion in the send or the receive queue's completion queue.
    pub(crate) fn complete(&mut self, qp: &mut QueuePair, report: &Report) {
        let good = report.status == sys::IBV_WC_SUCCESS;
        let garbage = GARBAGE | u32::from(report.status as u16);
        let mut flags = 0;
        if report.immediate.is_some() {
            flags |= sys::IBV_WC_WITH_IMM;
        }
        let wc = ibv_wc {
            wr_id: report.wr_id,
            status: report.status,
            opcode: if good { report.opcode } else { garbage },
            vendor_err: if good { 0 } else { 0xfa00 | report.status },
            byte_len: if good { report.length } else { garbage },
            __bindgen_anon_1: ibv_wc__bindgen_ty_1 {
                imm_data: if good { report.immediate.unwrap_or(0) } else { garbage },
            },
            qp_num: qp.number,
            src_qp: garbage,
            wc_flags: if good { flags } else { garbage },
            pkey_index: 0,
            slid: 0,
            sl: 0,
            dlid_path_bits: 0,
        };
        let queue = if report.receives > 0 { qp.receive_cq } else { qp.send_cq };
        let completion = Completion {
            wc,
            qp: qp.handle,
            sends: report.sends,
            receives: report.receives,
        };
        let visible = self.visible();
        if queue.push(completion, visible) == Pushed::Overrun {
            add(&self.device.counters.cq_overruns, 1);
            let element = ibv_async_event__bindgen_ty_1 { cq: queue.pointer() };
            self.raise(sys::IBV_EVENT_CQ_ERR, element, queue.pointer().addr());
            self.move_to_error(qp);
        }
    }

    /// When a completion of now can be seen.
    fn visible(&mut self) -> Visible {
        if self.settings.withhold {
            Visible::Withheld
        } else if self.settings.completion_delay.is_zero() {
            Visible::Now
        } else {
            let due = Instant::now() + self.settings.completion_delay;
            self.release_at = Some(self.release_at.map_or(due, |release| release.min(due)));
            Visible::At(due)
        }
    }

    /// Lets delayed completions go whose time has come.
    pub(crate) fn release_completions(&mut self, now: Instant) {
        if self.release_at.is_some_and(|due| due <= now) {
            self.release_at = self
                .completion_queues
                .iter()
                .filter_map(|queue| queue.release_due(now))
                .min();
        }
    }

    /// Raises an asynchronous event about the object at address `object` (0: a port or the device).
    pub(crate) fn raise(&self, event_type: u32, element: ibv_async_event__bindgen_ty_1, object: usize) {
        add(&self.device.counters.events, 1);
        self.events.raise(ibv_async_event { element, event_type }, object);
    }

    /// Raises an event about the port (or the device).
    pub(crate) fn raise_port(&self, event_type: u32, port: i32) {
        self.raise(event_type, ibv_async_event__bindgen_ty_1 { port_num: port }, 0);
    }

    /// Raises an event about a queue pair.
    pub(crate) fn raise_queue_pair(&self, event_type: u32, qp: &QueuePair) {
        let pointer = qp.handle.pointer();
        self.raise(
            event_type,
            ibv_async_event__bindgen_ty_1 { qp: pointer },
            pointer.addr(),
        );
    }

    /// Moves a queue pair to ERR. The device thread flushes its requests afterwards.
    pub(crate) fn move_to_error(&mut self, qp: &mut QueuePair) {
        if qp.state != sys::IBV_QPS_ERR {
            add(&self.device.counters.qps_to_error, 1);
            qp.state = sys::IBV_QPS_ERR;
        }
        qp.flush_due = true;
        qp.timer = None;
    }

    /// Completes everything that was posted to a queue pair in ERR, in order, as flushed.
    pub(crate) fn flush(&mut self, qp: &mut QueuePair) {
        qp.flush_due = false;
        qp.cursor = 0;
        qp.packet = 0;
        qp.reads = 0;
        while let Some(send) = qp.sends.pop_front() {
            let sends = std::mem::take(&mut qp.unreported) + 1;
            self.complete(qp, &Report::flushed(send.wr_id, sends, 0));
        }
        while let Some(wr_id) = qp.receives.pop_front() {
            self.complete(qp, &Report::flushed(wr_id, 0, 1));
        }
        // Completing may have found a full completion queue, which asks for a flush; there is nothing left to flush.
        qp.flush_due = false;
    }

    /// Sends an answer to the peer of a queue pair.
    pub(crate) fn respond(&mut self, context: u32, response: Response) {
        if context == self.number {
            self.own_responses.push_back(response);
        } else {
            let link = self.links.entry(context).or_default();
            if !link.gone {
                link.responses.push_back(response);
            }
        }
    }
}

impl Report {
    /// Of a request that was flushed.
    pub(crate) fn flushed(wr_id: u64, sends: u32, receives: u32) -> Report {
        Report {
            wr_id,
            status: sys::IBV_WC_WR_FLUSH_ERR,
            opcode: 0,
            length: 0,
            immediate: None,
            sends,
            receives,
        }
    }
}
