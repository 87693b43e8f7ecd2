//! The side that takes requests: checks, placement (now or late), receives, answers.

use std::collections::VecDeque;
use std::time::Instant;

use kvxfer_rdma::sys;

use crate::counters::add;
use crate::network::{Moved, Response, Stream};
use crate::packet::{FRAGMENT, Header, flag, kind, mtu_bytes, nak, psn_add, psn_distance};
use crate::queue_pair::QueuePair;
use crate::requester::BURST;
use crate::state::{Late, Report, State};

impl State {
    /// Takes a packet that has come through the network.
    pub(crate) fn take_packet(&mut self, header: &Header, payload: &[u8], now: Instant) {
        self.take_checked(header, payload, now, false);
    }

    /// Takes all packets from this context to itself.
    pub(crate) fn take_loopback(&mut self, now: Instant) -> bool {
        let mut any = false;
        loop {
            while let Some((header, payload)) = self.loopback.pop_front() {
                any = true;
                self.take_checked(&header, &payload, now, true);
            }
            self.acknowledge_all();
            if self.own_responses.is_empty() {
                return any;
            }
            while !self.own_responses.is_empty() {
                self.send_response(self.number, now);
            }
        }
    }

    fn take_checked(&mut self, header: &Header, payload: &[u8], now: Instant, looped: bool) {
        let fits = self.is_own(&header.destination) && !self.dead;
        let Some(mut qp) = self.take(header.queue_pair) else {
            add(&self.device.counters.packets_dropped, 1);
            return;
        };
        let known = qp.number == header.queue_pair && qp.route.destination == header.source;
        if fits && known {
            if matches!(header.kind, kind::WRITE | kind::READ) {
                self.take_request(&mut qp, header, payload, looped, now);
            } else {
                self.take_response(&mut qp, header, payload, now);
            }
        } else {
            add(&self.device.counters.packets_dropped, 1);
        }
        self.put(qp);
    }

    fn take_request(&mut self, qp: &mut QueuePair, header: &Header, payload: &[u8], looped: bool, now: Instant) {
        if !qp.receives_requests() {
            add(&self.device.counters.packets_dropped, 1);
            return;
        }
        let ahead = psn_distance(header.psn, qp.expected);
        if ahead > 0 {
            if !qp.gap_reported {
                qp.gap_reported = true;
                self.refuse(qp, qp.expected, kind::NAK, nak::SEQUENCE);
            }
            return;
        }
        if ahead < 0 {
            // Seen before: a WRITE is acknowledged again, not carried out; a READ is answered again.
            if header.kind == kind::READ {
                self.forget_answers(qp, header.psn);
                self.start_read(qp, header, looped, false);
            } else {
                self.owe(qp);
            }
            return;
        }
        qp.gap_reported = false;
        if !fits_mtu(qp, header) {
            self.acknowledge(qp);
            self.refuse(qp, header.psn, kind::NAK, nak::INVALID);
            self.fail_responder(qp);
            return;
        }
        if header.kind == kind::READ {
            self.take_read(qp, header, looped);
        } else {
            self.take_write(qp, header, payload, now);
        }
    }

    fn take_write(&mut self, qp: &mut QueuePair, header: &Header, payload: &[u8], now: Instant) {
        let right = sys::IBV_ACCESS_REMOTE_WRITE;
        // The first packet is checked for the whole request; a request without bytes names no memory.
        let length = if header.flags & flag::FIRST != 0 {
            header.total as usize
        } else {
            payload.len()
        };
        let mut memory = None;
        if length > 0 {
            memory = self
                .regions
                .remote(qp.pd, header.key, header.remote_address, length as u64, right);
            if memory.is_none() || qp.attributes.qp_access_flags & right == 0 {
                self.refuse_access(qp, header.psn);
                return;
            }
        }
        let immediate = header.flags & flag::IMMEDIATE != 0;
        if immediate && qp.receives.is_empty() {
            add(&self.device.counters.rnr_naks, 1);
            self.acknowledge(qp);
            self.refuse(qp, header.psn, kind::NOT_READY, qp.attributes.min_rnr_timer);
            return;
        }
        if let Some(memory) = memory {
            self.place(qp, memory, payload, now);
        }
        qp.expected = psn_add(qp.expected, 1);
        self.owe(qp);
        if immediate && let Some(wr_id) = qp.receives.pop_front() {
            // Everything of this queue pair before it is in memory when its receive completes.
            self.force_late(|late, _| std::ptr::eq(late.qp, qp.handle));
            add(&self.device.counters.immediates_received, 1);
            let report = Report {
                wr_id,
                status: sys::IBV_WC_SUCCESS,
                opcode: sys::IBV_WC_RECV_RDMA_WITH_IMM,
                length: header.total,
                immediate: Some(header.immediate),
                sends: 0,
                receives: 1,
            };
            self.complete(qp, &report);
        }
    }

    fn take_read(&mut self, qp: &mut QueuePair, header: &Header, looped: bool) {
        let right = sys::IBV_ACCESS_REMOTE_READ;
        let length = u64::from(header.total);
        if length > 0 {
            let memory = self
                .regions
                .remote(qp.pd, header.key, header.remote_address, length, right);
            if memory.is_none() || qp.attributes.qp_access_flags & right == 0 {
                self.refuse_access(qp, header.psn);
                return;
            }
        }
        if qp.reads_served >= u32::from(qp.attributes.max_dest_rd_atomic).max(1) {
            self.acknowledge(qp);
            self.refuse(qp, header.psn, kind::NAK, nak::INVALID);
            self.fail_responder(qp);
            return;
        }
        qp.expected = psn_add(qp.expected, crate::packet::packets(header.total as usize));
        self.start_read(qp, header, looped, true);
    }

    /// Begins to answer a READ. It sees everything that was accepted before it, so that is in memory first: on the
    /// same queue pair always, from this device to itself for everything the device has accepted.
    fn start_read(&mut self, qp: &mut QueuePair, header: &Header, looped: bool, counted: bool) {
        let only_region = self.settings.flush_region_only;
        let extents = if only_region && looped {
            self.regions.remote_extents(header.key)
        } else {
            Vec::new()
        };
        let flushed = self.force_late(|late, _| {
            let to = late.to.addr();
            let inside = extents.iter().any(|(first, length)| to.wrapping_sub(*first) < *length);
            std::ptr::eq(late.qp, qp.handle) || (looped && (!only_region || inside))
        });
        add(&self.device.counters.late_bytes_flushed, flushed);
        // Acknowledgements of what came before go first.
        self.acknowledge(qp);
        qp.reads_served += u32::from(counted);
        let next = Header {
            source: qp.route.source,
            destination: qp.route.destination,
            queue_pair: qp.attributes.dest_qp_num,
            kind: kind::READ_RESPONSE,
            ..*header
        };
        self.respond(
            qp.route.context,
            Response::Stream(Stream {
                queue_pair: qp.number,
                counted,
                next,
            }),
        );
    }

    fn refuse_access(&mut self, qp: &mut QueuePair, psn: u32) {
        add(&self.device.counters.access_errors, 1);
        self.acknowledge(qp);
        self.refuse(qp, psn, kind::NAK, nak::ACCESS);
        self.fail_responder(qp);
        self.raise_queue_pair(sys::IBV_EVENT_QP_ACCESS_ERR, qp);
    }

    fn fail_responder(&mut self, qp: &mut QueuePair) {
        qp.finishing = true;
        self.move_to_error(qp);
    }

    fn refuse(&mut self, qp: &QueuePair, psn: u32, kind: u8, code: u8) {
        let answer = answer(qp, psn, kind, code);
        self.respond(qp.route.context, Response::Packet(answer));
    }

    /// An acknowledgement is due, at the latest when the packets that are there now have been looked at.
    fn owe(&mut self, qp: &mut QueuePair) {
        if !qp.acknowledgement_due {
            qp.acknowledgement_due = true;
            self.owing.push(qp.number);
        }
    }

    fn acknowledge(&mut self, qp: &mut QueuePair) {
        if qp.acknowledgement_due {
            qp.acknowledgement_due = false;
            self.refuse(qp, psn_add(qp.expected, 0x00ff_ffff), kind::ACK, 0);
        }
    }

    /// Sends all acknowledgements that are due.
    pub(crate) fn acknowledge_all(&mut self) {
        while let Some(number) = self.owing.pop() {
            let Some(mut qp) = self.take(number) else { continue };
            if qp.number == number && qp.receives_requests() {
                self.acknowledge(&mut qp);
            }
            self.put(qp);
        }
    }

    /// Puts accepted bytes in memory, now or at the configured time.
    fn place(&mut self, qp: &QueuePair, memory: *mut u8, payload: &[u8], now: Instant) {
        if payload.is_empty() {
            return;
        }
        if self.settings.late.is_zero() {
            self.force_late(|late, _| std::ptr::eq(late.qp, qp.handle));
            // SAFETY: inside a registered region with the right to write, whose owner keeps the memory.
            unsafe { std::ptr::copy_nonoverlapping(payload.as_ptr(), memory, payload.len()) };
            add(&self.device.counters.bytes_written, payload.len() as u64);
        } else {
            self.late.push_back(Late {
                due: now + self.settings.late,
                qp: qp.handle,
                to: memory,
                bytes: payload.to_vec(),
            });
        }
    }

    /// Puts those late bytes in memory that `which` chooses; returns how many bytes.
    pub(crate) fn force_late(&mut self, which: impl Fn(&Late, &State) -> bool) -> u64 {
        if self.late.is_empty() {
            return 0;
        }
        let mut kept = VecDeque::with_capacity(self.late.len());
        let mut placed = 0;
        for late in std::mem::take(&mut self.late) {
            if which(&late, self) {
                placed += late.bytes.len() as u64;
                self.place_late(&late);
            } else {
                kept.push_back(late);
            }
        }
        self.late = kept;
        placed
    }

    fn place_late(&self, late: &Late) {
        let counters = &self.device.counters;
        let bytes = late.bytes.len() as u64;
        // SAFETY: inside a region that is still registered (deregistering places what is left), whose owner keeps
        // the memory.
        unsafe { std::ptr::copy_nonoverlapping(late.bytes.as_ptr(), late.to, late.bytes.len()) };
        add(&counters.bytes_written, bytes);
        if !late.qp.mark.is_live() {
            add(&counters.writes_after_destroy, 1);
            add(&counters.late_bytes_placed_after_error, bytes);
        } else if self.state_of(late.qp) == sys::IBV_QPS_ERR {
            add(&counters.late_bytes_placed_after_error, bytes);
        }
    }

    /// The state of a queue pair; ERR is also what is being worked on in ERR.
    fn state_of(&self, qp: &crate::objects::FakeQp) -> u32 {
        // SAFETY: the number is never written after the queue pair was made.
        let number = unsafe { (*qp.pointer()).qp_num };
        self.queue_pairs
            .get((number & crate::state::LOCAL_MASK) as usize)
            .and_then(Option::as_ref)
            .map_or(sys::IBV_QPS_UNKNOWN, |found| found.state)
    }

    /// The memory of a READ answer's next packet, if its region is still registered.
    fn read_piece(&self, queue_pair: u32, next: &Header) -> Option<libc::iovec> {
        let bytes = (next.total as usize).min(FRAGMENT);
        if bytes == 0 {
            return Some(libc::iovec {
                iov_base: std::ptr::null_mut(),
                iov_len: 0,
            });
        }
        let pd = self.domain_of(queue_pair)?;
        let right = sys::IBV_ACCESS_REMOTE_READ;
        let memory = self
            .regions
            .remote(pd, next.key, next.remote_address, bytes as u64, right)?;
        Some(libc::iovec {
            iov_base: memory.cast(),
            iov_len: bytes,
        })
    }

    fn domain_of(&self, queue_pair: u32) -> Option<&'static crate::objects::FakePd> {
        let place = (queue_pair & crate::state::LOCAL_MASK) as usize;
        match self.queue_pairs.get(place)? {
            Some(qp) if qp.number == queue_pair && (qp.receives_requests() || qp.finishing) => Some(qp.pd),
            _ => None,
        }
    }

    /// Sends answers until there are none or the sockets are full; true if any went.
    pub(crate) fn send_responses(&mut self, now: Instant) -> bool {
        let mut any = false;
        if self.settings.bandwidth > 0 && self.port_free > now + BURST {
            return false;
        }
        let waiting: Vec<u32> = self
            .links
            .iter()
            .filter(|(_, link)| !link.full && !link.responses.is_empty())
            .map(|(number, _)| *number)
            .collect();
        for context in waiting {
            for _ in 0..RESPONSES_AT_ONCE {
                match self.send_response(context, now) {
                    Moved::Bytes(_) => any = true,
                    _ => break,
                }
            }
        }
        any
    }

    fn send_response(&mut self, context: u32, now: Instant) -> Moved {
        let Some(response) = self.responses(context).and_then(VecDeque::pop_front) else {
            return Moved::WouldBlock;
        };
        let (moved, back) = match response {
            Response::Packet(header) => (self.transmit(context, &header, &[]), Some(response)),
            Response::Stream(stream) => self.send_piece(context, stream, now),
        };
        let left = match (response, moved) {
            (_, Moved::WouldBlock) => Some(response),
            (Response::Stream(_), Moved::Bytes(_)) => back,
            _ => None,
        };
        if let (Some(left), Some(responses)) = (left, self.responses(context)) {
            responses.push_front(left);
        }
        moved
    }

    /// Sends the next piece of a READ's answer; gives what is left of it.
    fn send_piece(&mut self, context: u32, mut stream: Stream, now: Instant) -> (Moved, Option<Response>) {
        let Some(piece) = self.read_piece(stream.queue_pair, &stream.next) else {
            self.read_served(&stream);
            return (Moved::Bytes(0), None);
        };
        let moved = self.transmit(context, &stream.next, &[piece]);
        if let Moved::Bytes(bytes) = moved {
            self.occupy_port(bytes, now);
            if advance(&mut stream.next, bytes) {
                self.read_served(&stream);
                return (moved, None);
            }
        }
        (moved, Some(Response::Stream(stream)))
    }

    /// The answers that wait for a context, which may be this one.
    fn responses(&mut self, context: u32) -> Option<&mut VecDeque<Response>> {
        if context == self.number {
            return Some(&mut self.own_responses);
        }
        self.links.get_mut(&context).map(|link| &mut link.responses)
    }

    /// A READ's answer has ended.
    fn read_served(&mut self, stream: &Stream) {
        if let Some(mut qp) = self.take(stream.queue_pair) {
            if qp.number == stream.queue_pair && stream.counted {
                qp.reads_served = qp.reads_served.saturating_sub(1);
            }
            self.put(qp);
        }
    }

    /// Forgets answers from `psn` on: who asks again for that asks for everything after it again too.
    fn forget_answers(&mut self, qp: &mut QueuePair, psn: u32) {
        let Some(responses) = self.responses(qp.route.context) else {
            return;
        };
        responses.retain(|response| match response {
            Response::Stream(stream) if stream.queue_pair == qp.number && psn_distance(stream.next.psn, psn) >= 0 => {
                qp.reads_served = qp.reads_served.saturating_sub(u32::from(stream.counted));
                false
            }
            _ => true,
        });
    }
}

/// How many answers a link sends before others have their turn.
const RESPONSES_AT_ONCE: u32 = 16;

/// Whether both ends cut a message into the same packets: they have the same path MTU, or one packet is enough for
/// either.
fn fits_mtu(qp: &QueuePair, header: &Header) -> bool {
    let (own, other) = (qp.attributes.path_mtu, u32::from(header.mtu));
    own == other || header.total <= mtu_bytes(own.min(other))
}

/// Moves a READ answer's header on to its next packet; true if there is none.
fn advance(next: &mut Header, bytes: usize) -> bool {
    next.psn = psn_add(next.psn, 1);
    next.remote_address = next.remote_address.wrapping_add(bytes as u64);
    next.total -= bytes as u32;
    next.total == 0
}

/// An answer without payload.
fn answer(qp: &QueuePair, psn: u32, kind: u8, code: u8) -> Header {
    Header {
        source: qp.route.source,
        destination: qp.route.destination,
        remote_address: 0,
        queue_pair: qp.attributes.dest_qp_num,
        psn,
        key: 0,
        total: 0,
        immediate: 0,
        kind,
        flags: 0,
        code,
        mtu: 0,
    }
}
