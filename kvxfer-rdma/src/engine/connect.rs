//! Making a rail: both sides' queue pairs are joined over the session, then each side writes to the other once before the
//! rail is used.
//!
//! ```text
//! dialer                     acceptor
//!   Connect  ------------------>   its queue pair is made and ready to receive and send
//!            <------------------ Accept
//!   ready to receive and send; writes once
//!   Ready    ------------------>   writes once
//!            <------------------ Ready
//! ```

use std::collections::{BTreeMap, VecDeque};

use kvxfer_core::Error;
use kvxfer_core::flow::LaneName;
use kvxfer_core::mutants::{self, Mutant};

use crate::error::RdmaError;
use crate::gid::PeerGid;
use crate::message::{LinkMessage, RailHello, reason};
use crate::random;
use crate::verbs::{
    CompletionQueue, InitState, Mtu, Operation, PathAddress, QueuePair, QueuePairCapacity, ReceiveState, Request,
    SendState, Sge,
};

use super::QUEUE_SLACK as SLACK;
use super::Turn;
use super::complete::RECEIVE;
use super::lane::{Lane, Pair, Received, Stage};
use super::work::{Marker, StandsFor};

/// The shortest receiver-not-ready timer that matters here: 12 is 0.64 ms.
const RNR_TIMER: u8 = 12;

impl Lane {
    /// Dialer: makes a queue pair and tells the peer.
    pub(super) fn dial(&mut self, turn: &mut Turn<'_>) {
        self.retry_at = None;
        self.epoch = self.epoch.max(self.epoch_floor) + 1;
        self.kicked = true;
        let made = self.make_pair(turn).and_then(|sequence| self.hello(turn, sequence));
        match made {
            Ok(hello) => {
                self.link.tell(LinkMessage::Connect(hello));
                self.stage = Stage::Connecting {
                    limit: turn.now + self.link.config.connect_timeout,
                };
            }
            Err(error) => {
                self.link.rail_failed(self.name(), &error);
                self.abandon_pair();
                self.back_off(turn);
            }
        }
    }

    /// Acceptor: the dialer has made a queue pair.
    pub(super) fn connect_asked(&mut self, turn: &mut Turn<'_>, hello: RailHello) {
        let lane = hello.lane;
        if lane.epoch <= self.epoch_floor || (lane.epoch <= self.epoch && self.pair.is_some()) {
            self.link.tell(LinkMessage::Reject {
                lane,
                why: "its epoch is over".into(),
            });
            return;
        }
        if self.pair.is_some() || !matches!(self.stage, Stage::Idle) {
            self.next_hello = Some(hello);
            self.fail(
                RdmaError::Lost {
                    place: self.text(),
                    why: "the peer made a newer queue pair".into(),
                }
                .into(),
            );
            return;
        }
        self.accept(turn, hello);
    }

    fn accept(&mut self, turn: &mut Turn<'_>, hello: RailHello) {
        self.epoch = hello.lane.epoch;
        self.place.peer_port = hello.own_port;
        let joined = self.make_pair(turn).and_then(|sequence| {
            self.join(turn, &hello, sequence)?;
            self.hello(turn, sequence)
        });
        match joined {
            Ok(own) => {
                self.link.tell(LinkMessage::Accept(own));
                self.stage = Stage::Probing {
                    limit: turn.now + self.link.config.connect_timeout,
                };
            }
            Err(error) => {
                self.link.rail_failed(self.name(), &error);
                self.link.tell(LinkMessage::Reject {
                    lane: self.name(),
                    why: reason(error.to_string()),
                });
                self.abandon_pair();
                self.epoch_floor = self.epoch;
            }
        }
    }

    /// Dialer: the acceptor's queue pair is there.
    pub(super) fn accepted(&mut self, turn: &mut Turn<'_>, hello: RailHello) {
        if hello.lane != self.name() || !matches!(self.stage, Stage::Connecting { .. }) {
            return;
        }
        let limit = match self.stage {
            Stage::Connecting { limit } => limit,
            _ => turn.now,
        };
        // The packet sequence that we told: kept in the pair until now.
        let sequence = self.pair.as_ref().map_or(0, |pair| pair.next as u32);
        if let Some(pair) = &mut self.pair {
            pair.next = 0;
        }
        match self.join(turn, &hello, sequence) {
            Ok(()) => {
                self.stage = Stage::Probing { limit };
                self.probe(turn);
            }
            Err(error) => self.fail(error),
        }
    }

    /// The other side has found that the rail works.
    pub(super) fn peer_ready(&mut self, turn: &mut Turn<'_>, lane: LaneName) {
        if lane != self.name() || !matches!(self.stage, Stage::Probing { .. }) {
            return;
        }
        let dials = self.link.peer.dials;
        let Some(pair) = &mut self.pair else { return };
        pair.works_there = true;
        if dials {
            self.look_whether_up(turn);
        } else {
            // The dialer's write came through: now ours.
            self.probe(turn);
        }
    }

    /// Our write has come through.
    pub(super) fn probed(&mut self, turn: &mut Turn<'_>) {
        if !matches!(self.stage, Stage::Probing { .. }) {
            return;
        }
        let lane = self.name();
        let Some(pair) = &mut self.pair else { return };
        pair.works_here = true;
        self.link.tell(LinkMessage::Ready { lane });
        self.look_whether_up(turn);
    }

    fn look_whether_up(&mut self, turn: &Turn<'_>) {
        let Some(pair) = &mut self.pair else { return };
        if !(pair.works_here && pair.works_there) {
            return;
        }
        let link = self.link.clone();
        self.stage = Stage::Up;
        pair.last_progress = turn.now;
        self.attempts = 0;
        self.kicked = true;
        let name = format!(
            "{} -> {}",
            turn.device.port_text(self.place.own_port),
            link.peer_advert.port_text(self.place.peer_port)
        );
        tracing::info!(peer = %link.peer.incarnation, rail = name, epoch = self.epoch, "rail up");
        link.sender.lock().lane_up(self.name());
        self.shown(Some(name));
    }

    /// After a queue pair is gone: the dialer tries again, the acceptor takes what came meanwhile.
    pub(super) fn after_loss(&mut self, turn: &mut Turn<'_>) {
        self.kicked = true;
        if self.link.peer.dials {
            self.back_off(turn);
        } else if let Some(hello) = self.next_hello.take() {
            self.connect_asked(turn, hello);
        }
    }

    fn back_off(&mut self, turn: &Turn<'_>) {
        let config = &self.link.config;
        let pause = (config.backoff_min * (1 << self.attempts.min(10))).min(config.backoff_max);
        self.attempts += 1;
        self.retry_at = Some(turn.now + pause);
    }

    /// A queue pair in the initial state, with its receives posted. The packet sequence number it will send with.
    fn make_pair(&mut self, turn: &Turn<'_>) -> Result<u32, Error> {
        let device = turn.device;
        let config = &self.link.config;
        let port = device.port(self.place.own_port)?;
        let verbs = |error| Error::from(RdmaError::Verbs(error));
        let receives = device.receive_depth;
        let entries = device.queue_depth + SLACK + receives;
        let completions = CompletionQueue::new(&device.context, entries, Some(turn.channel)).map_err(verbs)?;
        let capacity = QueuePairCapacity {
            send_requests: device.queue_depth + SLACK,
            receive_requests: receives,
            send_segments: device.send_segments.max(device.read_segments),
            receive_segments: 1,
            inline_bytes: 0,
        };
        let mut queue_pair = QueuePair::new(&device.domain, &completions, &completions, capacity).map_err(verbs)?;
        let partition_index = device.partition_index(port.number, config.partition_key)?;
        queue_pair
            .to_init(&InitState {
                port: port.number,
                pkey_index: partition_index,
                remote_write: true,
                remote_read: true,
            })
            .map_err(verbs)?;
        // Before the peer is told of them.
        queue_pair.post_receives(RECEIVE, receives).map_err(verbs)?;
        let sequence = random::bits24();
        self.pair = Some(Pair {
            queue_pair: Some(queue_pair),
            completions,
            mtu: Mtu::Bytes256,
            armed: false,
            peer: None,
            room: i64::from(device.queue_depth),
            next: u64::from(sequence),
            unsignalled: 0,
            markers: VecDeque::new(),
            torn: false,
            receives,
            owed: 0,
            credits: 0,
            next_close: 0,
            received: Received::default(),
            current: None,
            staged: VecDeque::new(),
            landings_asked: 0,
            landings_wanted: 0,
            next_landing: 0,
            exposures: BTreeMap::new(),
            next_exposure: 0,
            open: Vec::new(),
            last_progress: turn.now,
            works_here: false,
            works_there: false,
            failure: None,
            refused_request: None,
            immediates: Vec::new(),
            completed: Vec::new(),
            flushed: Vec::new(),
        });
        self.link.lane_born(self.name());
        Ok(sequence)
    }

    /// Joins our queue pair to the peer's: ready to receive, then to send.
    fn join(&mut self, turn: &Turn<'_>, hello: &RailHello, sequence: u32) -> Result<(), Error> {
        let device = turn.device;
        let config = self.link.config.clone();
        let port = device.port(self.place.own_port)?;
        let Some(pair) = &mut self.pair else {
            return Err(RdmaError::peer(&self.link, "it answers for a queue pair that is gone".into()).into());
        };
        // Which of its addresses the peer uses, it has said.
        let peer: Vec<PeerGid> = self
            .link
            .peer_advert
            .gids_of(hello.own_port)
            .into_iter()
            .filter(|gid| Some(gid.gid) == hello.gid)
            .collect();
        let way = device.gid_for(&port, &peer)?;
        let bytes = port
            .mtu
            .bytes()
            .min(hello.mtu_bytes)
            .min(config.mtu.unwrap_or(u32::MAX));
        let Some(mtu) = Mtu::from_bytes(bytes) else {
            return Err(RdmaError::peer(&self.link, format!("its path MTU of {bytes} bytes is none")).into());
        };
        let state = ReceiveState {
            peer_qp: hello.queue_pair,
            peer_psn: hello.packet_sequence,
            mtu,
            address: PathAddress {
                lid: hello.lid,
                gid: hello.gid.filter(|_| way.routed),
                gid_index: way.own.index,
                service_level: config.service_level,
                traffic_class: config.traffic_class,
                hop_limit: config.hop_limit,
                port: port.number,
                flow_label: 0,
            },
            max_dest_rd_atomic: device.reads_served,
            min_rnr_timer: RNR_TIMER,
        };
        let verbs = |error| Error::from(RdmaError::Verbs(error));
        let Some(queue_pair) = &pair.queue_pair else {
            return Ok(());
        };
        queue_pair.to_receive(&state).map_err(verbs)?;
        queue_pair
            .to_send(&SendState {
                psn: sequence,
                timeout: config.timeout,
                retry_count: config.retry_count,
                rnr_retry: config.rnr_retry,
                max_rd_atomic: device.reads_started.min(hello.reads_served),
            })
            .map_err(verbs)?;
        pair.mtu = mtu;
        pair.next = 0;
        pair.credits = hello.receives;
        pair.peer = Some(hello.clone());
        tracing::debug!(
            rail = self.link.lane_place(hello.lane),
            mtu = bytes,
            gid = crate::gid::show(way.own.gid),
            gid_index = way.own.index,
            peer_qp = hello.queue_pair,
            service_level = config.service_level,
            traffic_class = config.traffic_class,
            timeout = config.timeout,
            retries = config.retry_count,
            reads = device.reads_started.min(hello.reads_served),
            "queue pair joined"
        );
        Ok(())
    }

    /// What the peer needs to know of our end.
    fn hello(&self, turn: &Turn<'_>, sequence: u32) -> Result<RailHello, Error> {
        let device = turn.device;
        let port = device.port(self.place.own_port)?;
        let peer = self.link.peer_advert.gids_of(self.place.peer_port);
        let way = device.gid_for(&port, &peer)?;
        Ok(RailHello {
            lane: self.name(),
            own_port: self.place.own_port,
            peer_port: self.place.peer_port,
            queue_pair: self.queue_pair().unwrap_or(0),
            packet_sequence: sequence,
            lid: port.lid,
            gid: Some(way.own.gid),
            mtu_bytes: port.mtu.bytes(),
            reads_served: device.reads_served,
            reads_started: device.reads_started,
            receives: match mutants::is(Mutant::IgnoreReceiveCredit) {
                true => 2,
                false => device.receive_depth,
            },
            probe_address: device.probe_address(),
            probe_key: device.probe_key(),
        })
    }

    /// Writes one path MTU's worth of bytes: a smaller write would not notice a path that carries less.
    fn probe(&mut self, turn: &mut Turn<'_>) {
        let device = turn.device;
        let Some(pair) = &mut self.pair else { return };
        let Some(peer) = &pair.peer else { return };
        let request = Request {
            wr_id: pair.next,
            operation: Operation::Write,
            remote_address: peer.probe_address,
            rkey: peer.probe_key,
            signalled: true,
            fence: false,
        };
        let (address, _, lkey) = device.probe_source();
        let length = pair.mtu.bytes();
        turn.batch.clear();
        turn.batch.push(request, &[Sge { address, length, lkey }]);
        pair.markers.push_back(Marker {
            number: pair.next,
            requests: 1,
            stands_for: StandsFor::Probe,
        });
        pair.next += 1;
        pair.room -= 1;
        self.post(turn);
    }

    /// A queue pair that was never told of.
    fn abandon_pair(&mut self) {
        if let Some(mut pair) = self.pair.take() {
            pair.destroy(&self.text());
            self.link.lane_gone(self.name(), true);
        }
        self.stage = Stage::Idle;
    }
}
