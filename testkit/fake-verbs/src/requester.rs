//! The side that sends requests: packets, acknowledgements, retries, completions.

use std::time::{Duration, Instant};

use kvxfer_rdma::sys;

use crate::counters::add;
use crate::network::{MOST_PIECES, Moved, send};
use crate::packet::{FRAGMENT, Header, flag, kind, nak, packets, psn_add, psn_distance};
use crate::queue_pair::{QueuePair, Segment, Send};
use crate::state::{Report, State};

impl State {
    /// Sends up to `budget` packets; returns how many.
    pub(crate) fn send_requests(&mut self, budget: u32, now: Instant) -> u32 {
        for sent in 0..budget {
            if self.settings.bandwidth > 0 && self.port_free > now + BURST {
                return sent;
            }
            let Some(local) = self.pick(now) else { return sent };
            if let Some(mut qp) = self.take(local) {
                self.send_next(&mut qp, now);
                self.put(qp);
            }
        }
        budget
    }

    /// The queue pair whose turn it is.
    fn pick(&mut self, now: Instant) -> Option<u32> {
        let mut first: Option<(u64, u32)> = None;
        let mut ready = 0;
        let shuffled = self.settings.shuffled;
        let mut chosen = None;
        for place in 0..self.live.len() {
            let local = self.live[place];
            let Some(qp) = self.queue_pairs[local as usize].as_deref() else {
                continue;
            };
            if !self.can_send(qp, now) {
                continue;
            }
            let sequence = qp.sends[qp.cursor].sequence;
            ready += 1;
            // Each of the ready ones with the same chance.
            if shuffled && self.random(ready) == 0 {
                chosen = Some(local);
            }
            if first.is_none_or(|(oldest, _)| sequence < oldest) {
                first = Some((sequence, local));
            }
        }
        if shuffled {
            chosen
        } else {
            first.map(|(_, local)| local)
        }
    }

    fn can_send(&self, qp: &QueuePair, now: Instant) -> bool {
        if qp.state != sys::IBV_QPS_RTS || qp.paused_until.is_some_and(|until| until > now) {
            return false;
        }
        let Some(next) = qp.sends.get(qp.cursor) else {
            return false;
        };
        if next.fault.is_some() || !qp.window_open() {
            return false;
        }
        let depth = u32::from(qp.attributes.max_rd_atomic).max(1);
        if (next.is_read() && qp.reads >= depth) || (next.fence && qp.reads > 0) {
            return false;
        }
        self.links.get(&qp.route.context).is_none_or(|link| !link.full)
    }

    fn send_next(&mut self, qp: &mut QueuePair, now: Instant) {
        if !qp.sends[qp.cursor].started {
            self.start(qp);
            if qp.sends.get(qp.cursor).is_none_or(|next| next.fault.is_some()) {
                self.fail_head_if_faulty(qp);
                return;
            }
        }
        let request = &qp.sends[qp.cursor];
        let offset = qp.packet as usize * FRAGMENT;
        let (header, bytes) = request_packet(qp, request, qp.packet);
        let mut pieces = [EMPTY; MOST_PIECES];
        let count = if request.is_read() {
            0
        } else {
            match self.gather(qp, request, offset, bytes, &mut pieces) {
                Some(count) => count,
                None => {
                    qp.sends[qp.cursor].fault = Some(sys::IBV_WC_LOC_PROT_ERR);
                    self.fail_head_if_faulty(qp);
                    return;
                }
            }
        };
        match self.transmit(qp.route.context, &header, &pieces[..count]) {
            Moved::Bytes(_) | Moved::Gone => self.sent(qp, bytes, now),
            Moved::Fault => {
                qp.sends[qp.cursor].fault = Some(sys::IBV_WC_LOC_PROT_ERR);
                self.fail_head_if_faulty(qp);
            }
            // The link is marked as full and this is tried again when it is not.
            Moved::WouldBlock => {}
        }
    }

    /// A request's first packet is due: it gets its numbers, and its local keys are checked.
    fn start(&mut self, qp: &mut QueuePair) {
        let access = sys::IBV_ACCESS_LOCAL_WRITE;
        let next = &mut qp.sends[qp.cursor];
        next.started = true;
        next.first_psn = qp.next_psn;
        next.packets = packets(next.length as usize);
        qp.next_psn = psn_add(qp.next_psn, next.packets);
        let access = if next.is_read() { access } else { 0 };
        let all_good = next.segments.iter().all(|segment| {
            segment.length == 0
                || self
                    .regions
                    .local(qp.pd, segment.key, segment.address, u64::from(segment.length), access)
                    .is_some()
        });
        if !all_good {
            next.fault = Some(sys::IBV_WC_LOC_PROT_ERR);
        }
        if let Some(wrong) = self.wrong.as_mut().filter(|wrong| wrong.left > 0) {
            wrong.left -= 1;
            if wrong.carried_out {
                next.misreport = Some(wrong.status);
            } else {
                next.fault = Some(wrong.status);
            }
        }
    }

    /// The memory of `bytes` bytes of a request from `offset` on.
    fn gather(
        &self,
        qp: &QueuePair,
        request: &Send,
        mut offset: usize,
        mut bytes: usize,
        pieces: &mut [libc::iovec; MOST_PIECES],
    ) -> Option<usize> {
        let mut count = 0;
        for segment in &request.segments {
            let length = segment.length as usize;
            if offset >= length {
                offset -= length;
                continue;
            }
            if bytes == 0 {
                break;
            }
            let part = bytes.min(length - offset);
            let address = segment.address + offset as u64;
            let memory = self.regions.local(qp.pd, segment.key, address, part as u64, 0)?;
            *pieces.get_mut(count)? = libc::iovec {
                iov_base: memory.cast(),
                iov_len: part,
            };
            count += 1;
            bytes -= part;
            offset = 0;
        }
        Some(count)
    }

    /// Hands a packet to the network: to this context itself, or to the peer's socket.
    pub(crate) fn transmit(&mut self, context: u32, header: &Header, pieces: &[libc::iovec]) -> Moved {
        if context == self.number {
            let payload = copy_out(pieces);
            let bytes = payload.len();
            self.loopback.push_back((*header, payload));
            return Moved::Bytes(bytes);
        }
        if !self.port_is_up() {
            add(&self.device.counters.packets_dropped, 1);
            return Moved::Gone;
        }
        let link = self.links.entry(context).or_default();
        // Nobody there, or a stopped process that takes no more connections: the packet is lost.
        let Some(fd) = link.socket(&self.directory, context) else {
            return Moved::Gone;
        };
        let moved = send(fd, header, pieces);
        match moved {
            Moved::WouldBlock => link.full = true,
            Moved::Gone => link.close(),
            Moved::Bytes(_) | Moved::Fault => {}
        }
        moved
    }

    /// A packet is on its way: the cursor moves on.
    fn sent(&mut self, qp: &mut QueuePair, bytes: usize, now: Instant) {
        self.occupy_port(bytes, now);
        let request = &qp.sends[qp.cursor];
        if request.is_read() {
            qp.packet = request.packets;
            qp.reads += 1;
        } else {
            qp.packet += 1;
        }
        if qp.packet >= request.packets {
            qp.cursor += 1;
            qp.packet = 0;
        }
        if qp.timer.is_none() {
            qp.timer = self.deadline(qp, now);
        }
        // Across queue pairs: now and then one falls behind the others.
        if self.settings.shuffled && self.random(8) == 0 {
            let pause = Duration::from_micros(self.random(1000));
            qp.paused_until = Some(now + pause);
        }
    }

    /// Counts what the port sends against the configured bandwidth.
    pub(crate) fn occupy_port(&mut self, bytes: usize, now: Instant) {
        if let Some(time) = (bytes as u64 * 1_000_000_000).checked_div(self.settings.bandwidth) {
            self.port_free = self.port_free.max(now) + Duration::from_nanos(time);
        }
    }

    fn deadline(&self, qp: &QueuePair, now: Instant) -> Option<Instant> {
        let code = u32::from(qp.attributes.timeout);
        if code == 0 {
            return None;
        }
        let stated = Duration::from_nanos(4096u64 << code);
        Some(now + stated.max(self.settings.min_timeout) + self.settings.latency * 4)
    }

    /// The peer accepted everything before `psn`.
    fn accepted_before(&mut self, qp: &mut QueuePair, psn: u32, now: Instant) {
        if psn_distance(psn, qp.unacknowledged) <= 0 || psn_distance(psn, qp.next_psn) > 0 {
            return;
        }
        qp.unacknowledged = psn;
        self.progress(qp, now);
        while let Some(head) = qp.sends.front() {
            if !head.started || psn_distance(psn, head.last_psn()) <= 0 {
                break;
            }
            if head.is_read() && head.received < head.packets {
                // Its answer was lost on the way.
                let missing = psn_add(head.first_psn, head.received);
                qp.unacknowledged = missing;
                self.rewind(qp, missing);
                return;
            }
            self.retire_head(qp);
            if qp.state != sys::IBV_QPS_RTS {
                return;
            }
        }
        // A cursor left behind by a rewind is moved on to what is not accepted.
        if psn_distance(psn, qp.current_psn()) > 0 {
            self.rewind(qp, psn);
        }
        self.fail_head_if_faulty(qp);
    }

    fn progress(&self, qp: &mut QueuePair, now: Instant) {
        qp.retries = 0;
        qp.not_ready_retries = 0;
        qp.timer = self.deadline(qp, now);
    }

    /// The oldest request is done.
    fn retire_head(&mut self, qp: &mut QueuePair) {
        let Some(done) = qp.sends.pop_front() else { return };
        if qp.cursor > 0 {
            qp.cursor -= 1;
            if done.is_read() {
                qp.reads -= 1;
            }
        } else {
            qp.packet = 0;
        }
        if !qp.is_waiting() {
            qp.timer = None;
        }
        qp.unreported += 1;
        if let Some(status) = done.misreport {
            self.complete_failed(qp, done.wr_id, status);
            return;
        }
        if done.signalled || qp.signal_all {
            let sends = std::mem::take(&mut qp.unreported);
            let opcode = if done.is_read() {
                sys::IBV_WC_RDMA_READ
            } else {
                sys::IBV_WC_RDMA_WRITE
            };
            let report = Report {
                wr_id: done.wr_id,
                status: sys::IBV_WC_SUCCESS,
                opcode,
                length: done.length,
                immediate: None,
                sends,
                receives: 0,
            };
            self.complete(qp, &report);
        }
    }

    fn complete_failed(&mut self, qp: &mut QueuePair, wr_id: u64, status: u32) {
        let sends = std::mem::take(&mut qp.unreported).max(1);
        let report = Report {
            wr_id,
            status,
            opcode: 0,
            length: 0,
            immediate: None,
            sends,
            receives: 0,
        };
        self.complete(qp, &report);
        self.move_to_error(qp);
    }

    /// The oldest request fails, and with it the queue pair.
    pub(crate) fn fail_head(&mut self, qp: &mut QueuePair, status: u32) {
        if let Some(failed) = qp.sends.pop_front() {
            qp.unreported += 1;
            self.complete_failed(qp, failed.wr_id, status);
        }
    }

    /// A request that cannot be carried out fails once it is the oldest.
    fn fail_head_if_faulty(&mut self, qp: &mut QueuePair) {
        if qp.state == sys::IBV_QPS_RTS
            && let Some(status) = qp.sends.front().and_then(|head| head.fault)
        {
            self.fail_head(qp, status);
        }
    }

    /// Sends again from `psn` on.
    fn rewind(&mut self, qp: &mut QueuePair, psn: u32) {
        let found = qp.sends.iter().position(|send| {
            send.started && psn_distance(psn, send.first_psn) >= 0 && psn_distance(psn, send.last_psn()) <= 0
        });
        // Nothing that was started holds it: then it is the next new one.
        let cursor = found.unwrap_or_else(|| qp.sends.iter().take_while(|send| send.started).count());
        let again = psn_distance(qp.current_psn(), psn).max(0);
        add(&self.device.counters.retransmissions, u64::from(again.unsigned_abs()));
        qp.cursor = cursor;
        qp.packet = match qp.sends.get(cursor) {
            Some(send) if send.started && send.is_read() => send.received,
            Some(send) if send.started => psn_distance(psn, send.first_psn).unsigned_abs(),
            _ => 0,
        };
        let open = |send: &&Send| send.is_read() && send.received < send.packets;
        qp.reads = u32::try_from(qp.sends.iter().take(cursor).filter(open).count()).unwrap_or(u32::MAX);
    }

    /// Takes an answer from the peer.
    pub(crate) fn take_response(&mut self, qp: &mut QueuePair, header: &Header, payload: &[u8], now: Instant) {
        if qp.state != sys::IBV_QPS_RTS {
            add(&self.device.counters.packets_dropped, 1);
            return;
        }
        match header.kind {
            kind::ACK => self.accepted_before(qp, psn_add(header.psn, 1), now),
            kind::READ_RESPONSE => self.take_read_response(qp, header.psn, payload, now),
            kind::NOT_READY => self.take_not_ready(qp, header, now),
            _ => self.take_nak(qp, header, now),
        }
    }

    fn take_not_ready(&mut self, qp: &mut QueuePair, header: &Header, now: Instant) {
        let retries = qp.not_ready_retries;
        self.accepted_before(qp, header.psn, now);
        if !self.names_head(qp, header.psn) {
            return;
        }
        let limit = u32::from(qp.attributes.rnr_retry);
        qp.not_ready_retries = retries + 1;
        if limit < 7 && qp.not_ready_retries > limit {
            self.fail_head(qp, sys::IBV_WC_RNR_RETRY_EXC_ERR);
            return;
        }
        self.rewind(qp, header.psn);
        qp.paused_until = Some(now + not_ready_time(header.code));
        qp.timer = None;
    }

    fn take_nak(&mut self, qp: &mut QueuePair, header: &Header, now: Instant) {
        self.accepted_before(qp, header.psn, now);
        if qp.state != sys::IBV_QPS_RTS {
            return;
        }
        match header.code {
            nak::SEQUENCE if header.psn == qp.unacknowledged && qp.is_waiting() => self.rewind(qp, header.psn),
            nak::ACCESS if self.names_head(qp, header.psn) => self.fail_head(qp, sys::IBV_WC_REM_ACCESS_ERR),
            nak::INVALID if self.names_head(qp, header.psn) => self.fail_head(qp, sys::IBV_WC_REM_INV_REQ_ERR),
            _ => {}
        }
    }

    /// Whether `psn` is of the oldest request, as an answer that refuses it must be.
    fn names_head(&self, qp: &QueuePair, psn: u32) -> bool {
        qp.state == sys::IBV_QPS_RTS
            && qp.sends.front().is_some_and(|head| {
                head.started && psn_distance(psn, head.first_psn) >= 0 && psn_distance(psn, head.last_psn()) <= 0
            })
    }

    fn take_read_response(&mut self, qp: &mut QueuePair, psn: u32, payload: &[u8], now: Instant) {
        let open = qp
            .sends
            .iter()
            .position(|send| send.started && send.is_read() && send.received < send.packets);
        let Some(place) = open else { return };
        let read = &qp.sends[place];
        let wanted = psn_add(read.first_psn, read.received);
        if psn_distance(psn, wanted) != 0 {
            if psn_distance(psn, wanted) > 0 && psn_distance(psn, qp.next_psn) < 0 {
                self.accepted_before(qp, read.first_psn, now);
                self.rewind(qp, wanted);
            }
            return;
        }
        if !self.scatter(qp, place, payload) {
            qp.sends[place].fault = Some(sys::IBV_WC_LOC_PROT_ERR);
        } else {
            qp.sends[place].received += 1;
        }
        // What comes before a READ whose answer has come was accepted; so was the READ itself.
        self.accepted_before(qp, wanted, now);
        self.accepted_before(qp, psn_add(wanted, 1), now);
        self.fail_head_if_faulty(qp);
    }

    /// Puts a piece of a READ's answer where the request says; false if that is not possible any more.
    fn scatter(&self, qp: &QueuePair, place: usize, payload: &[u8]) -> bool {
        let read = &qp.sends[place];
        let mut offset = read.received as usize * FRAGMENT;
        if payload.len() != (read.length as usize).saturating_sub(offset).min(FRAGMENT) {
            return false;
        }
        let mut left = payload;
        for Segment { address, length, key } in &read.segments {
            let length = *length as usize;
            if offset >= length {
                offset -= length;
                continue;
            }
            let (part, rest) = left.split_at(left.len().min(length - offset));
            let at = address + offset as u64;
            let access = sys::IBV_ACCESS_LOCAL_WRITE;
            let Some(memory) = self.regions.local(qp.pd, *key, at, part.len() as u64, access) else {
                return false;
            };
            // SAFETY: inside a registered region with the right to write, whose owner keeps the memory.
            unsafe { std::ptr::copy_nonoverlapping(part.as_ptr(), memory, part.len()) };
            left = rest;
            offset = 0;
            if left.is_empty() {
                break;
            }
        }
        add(&self.device.counters.bytes_read, payload.len() as u64);
        true
    }

    /// Looks after a queue pair whose peer is silent.
    pub(crate) fn check_timer(&mut self, qp: &mut QueuePair, now: Instant) {
        if qp.state != sys::IBV_QPS_RTS || qp.sends.is_empty() {
            return;
        }
        let link_full = self.links.get(&qp.route.context).is_some_and(|link| link.full);
        let paused = qp.paused_until.is_some_and(|until| until > now);
        if paused || (!qp.is_waiting() && !link_full) {
            return;
        }
        let Some(timer) = qp.timer else {
            qp.timer = self.deadline(qp, now);
            return;
        };
        if timer > now {
            return;
        }
        qp.timer = self.deadline(qp, now);
        qp.retries += 1;
        if qp.retries > u32::from(qp.attributes.retry_cnt) && self.settings.retry_exceeded {
            self.fail_head(qp, sys::IBV_WC_RETRY_EXC_ERR);
            return;
        }
        let again = qp.unacknowledged;
        self.rewind(qp, again);
    }
}

/// Sending may run ahead of the configured bandwidth by this much, so that it need not wake for each packet.
pub(crate) const BURST: Duration = Duration::from_micros(500);

const EMPTY: libc::iovec = libc::iovec {
    iov_base: std::ptr::null_mut(),
    iov_len: 0,
};

/// The header of a request's packet `index`, and how many bytes of payload go with it.
fn request_packet(qp: &QueuePair, request: &Send, index: u32) -> (Header, usize) {
    let offset = index as usize * FRAGMENT;
    let left = request.length as usize - offset.min(request.length as usize);
    let mut header = Header {
        source: qp.route.source,
        destination: qp.route.destination,
        remote_address: request.remote_address.wrapping_add(offset as u64),
        queue_pair: qp.attributes.dest_qp_num,
        psn: psn_add(request.first_psn, index),
        key: request.key,
        total: request.length,
        immediate: request.immediate,
        kind: kind::WRITE,
        flags: 0,
        code: 0,
        mtu: qp.attributes.path_mtu as u8,
    };
    if request.is_read() {
        header.kind = kind::READ;
        header.total = u32::try_from(left).unwrap_or(u32::MAX);
        return (header, 0);
    }
    if index == 0 {
        header.flags |= flag::FIRST;
    }
    if index + 1 == request.packets {
        header.flags |= flag::LAST;
        if request.opcode == sys::IBV_WR_RDMA_WRITE_WITH_IMM {
            header.flags |= flag::IMMEDIATE;
        }
    }
    (header, left.min(FRAGMENT))
}

/// Copies registered memory out, as the device does for packets that stay inside it.
fn copy_out(pieces: &[libc::iovec]) -> Vec<u8> {
    let mut bytes: Vec<u8> = Vec::with_capacity(pieces.iter().map(|piece| piece.iov_len).sum());
    for piece in pieces {
        let old = bytes.len();
        bytes.reserve(piece.iov_len);
        // SAFETY: the piece lies in a registered region, whose owner keeps the memory; the vector has the room.
        unsafe {
            std::ptr::copy_nonoverlapping(piece.iov_base.cast(), bytes.as_mut_ptr().add(old), piece.iov_len);
            bytes.set_len(old + piece.iov_len);
        }
    }
    bytes
}

/// How long "receiver not ready" asks to wait, by its 5-bit code.
fn not_ready_time(code: u8) -> Duration {
    const TENS_OF_MICROSECONDS: [u32; 32] = [
        65536, 1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048, 3072,
        4096, 6144, 8192, 12288, 16384, 24576, 32768, 49152,
    ];
    Duration::from_micros(u64::from(TENS_OF_MICROSECONDS[usize::from(code & 31)]) * 10)
}
