//! What a run really exercised: a check of a path that was never taken is no check.

macro_rules! points {
    ($($(#[$doc:meta])* $name:ident = $words:literal,)*) => {
        /// A fault or path that runs must have exercised.
        #[derive(Debug, Clone, Copy, PartialEq, Eq)]
        #[repr(usize)]
        pub enum Point {
            $($(#[$doc])* $name,)*
        }

        impl Point {
            /// All points.
            pub const ALL: &'static [Point] = &[$(Point::$name,)*];

            /// The point in words.
            pub const fn words(self) -> &'static str {
                match self { $(Point::$name => $words,)* }
            }
        }
    };
}

points! {
    /// A claim arrived.
    ClaimArrived = "claims arrived (push)",
    /// A claim arrived by pull.
    ClaimPulled = "claims arrived (pull, validated)",
    /// A claim came before its offer.
    ClaimEarly = "claims before their offer",
    /// A claim came after its offer.
    ClaimLate = "claims after their offer",
    /// A claim with several source ranks arrived.
    SeveralSources = "claims from several source ranks arrived",
    /// An offer served several members of a set.
    SeveralMembers = "offers with several members released",
    /// An offer served several readers.
    SeveralReaders = "offers with several readers released",
    /// A claim held part of the tokens already.
    HeldPrefix = "claims with a held prefix arrived",
    /// A raw push arrived.
    PushArrived = "raw pushes arrived",
    /// A user message was delivered.
    MessageDelivered = "user messages delivered",
    /// A raw pull arrived.
    PullArrived = "raw pulls arrived (validated)",
    /// A pull was refused by its owner, or its validation said no.
    PullRefused = "pulls refused or not live",
    /// A claim was declined.
    Declined = "claims declined",
    /// A claim or grant was cancelled with bytes on their way.
    CancelInFlight = "destinations cancelled with bytes in flight",
    /// An offer or push was cancelled with bytes on their way.
    SourceCancelInFlight = "sources cancelled with bytes in flight",
    /// An offer was retracted with bytes on their way.
    RetractInFlight = "offers retracted with bytes in flight",
    /// A retract had to wait for its gate.
    RetractWaited = "retracts that waited for their gate",
    /// An offer was restarted.
    Restarted = "offers restarted",
    /// A claim arrived after a restart.
    ArrivedAfterRestart = "claims arrived after a restart",
    /// A handle ended at its deadline.
    Expired = "handles ended by their deadline",
    /// A key was used again.
    KeyReused = "keys used again",
    /// A duplicate key was refused.
    DuplicateKey = "duplicate keys refused",
    /// More claim sets than readers.
    AlreadyClaimed = "claims beyond the readers refused",
    /// A claim for an ended key was refused.
    NotOffered = "claims of ended keys refused",
    /// Freed blocks were given to the next request at once.
    BlocksReused = "blocks reused by another handle",
    /// A closed gate had a thread inside.
    GateHeld = "gates held by a thread when closed",
    /// A chunk was cut short because its source's gate closed.
    ChunkInvalid = "chunks sent with an invalid trailer",
    /// A placement was cut short because the slot's gate closed.
    PlacementCut = "placements cut short by a closed slot",
    /// A chunk went to scrap.
    ChunkScrapped = "chunks read into scrap",
    /// A lane was lost.
    LaneLost = "lanes lost",
    /// A lane was lost with chunks in doubt.
    LaneInDoubt = "lanes lost with bytes in doubt",
    /// An acknowledgement was lost with its lane.
    AckLost = "acknowledgements lost",
    /// A chunk in doubt turned out to be applied.
    InDoubtApplied = "chunks in doubt found applied",
    /// A chunk in doubt was sent again.
    InDoubtResent = "chunks in doubt sent again",
    /// A session was resumed.
    SessionResumed = "sessions resumed",
    /// A session connection broke.
    SessionBroken = "session connections broken",
    /// One side only noticed a broken connection.
    HalfOpen = "half-open connections",
    /// A dial failed.
    DialFailed = "dials failed",
    /// Both sides dialed at once.
    SimultaneousOpen = "simultaneous opens",
    /// A message was given to a machine twice.
    DuplicateFrame = "duplicate frames injected",
    /// A frame of a dead connection was given to a machine.
    StaleFrame = "stale frames injected",
    /// An endpoint was stopped and continued.
    Stalled = "endpoints stalled",
    /// An endpoint was stopped for longer than the liveness limit.
    StalledLong = "endpoints stalled beyond liveness",
    /// An endpoint crashed.
    Crashed = "endpoints crashed",
    /// An endpoint came back under the same name and address.
    RestartedEndpoint = "endpoints restarted",
    /// Something was asked of an earlier incarnation.
    StaleAddress = "uses of an earlier incarnation refused",
    /// A peer was reported lost.
    PeerLost = "peers reported lost",
    /// An outcome was unknown.
    Unknown = "outcomes reported Unknown",
    /// A handle ended quarantined.
    Quarantined = "handles quarantined",
    /// A pool was added to a live session.
    PoolAdded = "pools added to live sessions",
    /// A pool was removed.
    PoolRemoved = "pools removed",
    /// A pool in use was not removed.
    PoolBusy = "removals of pools in use refused",
    /// An endpoint drained.
    Drained = "endpoints drained",
    /// An endpoint was shut down.
    Shutdown = "endpoints shut down",
    /// A limit answered `Busy`.
    Busy = "limits that answered Busy",
    /// A grant was used twice.
    GrantUsedTwice = "grants used twice refused",
    /// A small transfer shared a link with a large one.
    SmallBesideLarge = "small transfers beside large ones",
    /// A payload checksum was sent.
    Checksummed = "checksummed chunks",
    /// Corrupted bytes were planted and noticed.
    Corrupted = "corruptions noticed by checksum",
    /// A chunk that overlaps another part was refused.
    Forged = "forged chunks refused",
    /// A source was ended in the middle of a chunk.
    EndedMidway = "sources ended in the middle of a chunk",
    /// A state block was handed over.
    StateBlock = "state blocks handed over",
    /// A part was released that waits for an event.
    Withheld = "parts withheld for an event",
    /// Several offers waited for one event.
    EventShared = "events that several offers waited for",
    /// A claim arrived all of whose sources had withheld parts.
    ArrivedAfterEvents = "claims arrived after events",
    /// An event happened when what waited for it had been restarted or had ended.
    EventLate = "events of what had ended or restarted",
    /// An event failed.
    EventFailed = "events that failed",
    /// An event never happened.
    EventNever = "events that never happened",
    /// A push waited for an event.
    PushHeld = "pushes held for an event",
    /// A push was ended while it waited for its event.
    PushEndedHeld = "pushes ended while they were held",
    /// A lane between two devices came up.
    DirectLane = "one-sided lanes made",
    /// A slot was admitted to its writer's device.
    Admitted = "slots admitted to a device",
    /// An immediate overtook the message that says what it closes.
    ImmediateFirst = "immediates before their message",
    /// A writer was told to stop.
    Revoked = "slots revoked",
    /// A writer was told to stop with writes outstanding.
    RevokedInFlight = "slots revoked with writes outstanding",
    /// When a writer said that it had stopped, bytes were on their way to memory.
    RevokedFlushed = "revocations that waited for memory",
    /// A writer did not say that it had stopped.
    RevokeUnanswered = "revocations without an answer",
    /// Slots were quiet because all lanes to their writer were fenced.
    RevokeFenced = "slots fenced by their lanes",
    /// A device dropped what came for a queue pair that had failed.
    WriteDropped = "writes dropped by a fenced lane",
    /// Bytes landed after their queue pair had failed.
    LandedLate = "bytes landed late",
    /// A device read a chunk into this endpoint's memory.
    DirectRead = "chunks read by a device",
    /// A read was outstanding when its lane was lost.
    DirectReadLost = "reads outstanding on a lost lane",
    /// A device read blocks that were somebody else's by then.
    ReadTooLate = "reads of blocks taken back",
    /// A lane between two devices was lost.
    DirectLaneLost = "one-sided lanes lost",
    /// A written chunk in doubt turned out to be applied.
    DirectInDoubtApplied = "written chunks in doubt found applied",
    /// A written chunk in doubt was written again.
    DirectInDoubtResent = "written chunks in doubt written again",
    /// A device failed.
    DeviceFailed = "devices failed",
    /// A device failed with work outstanding.
    DeviceFailedInFlight = "devices failed with work outstanding",
    /// A link could not be made with a device.
    DeviceUnusable = "devices that could not be used",
    /// A link fell back to another transport.
    FellBack = "links fallen back to another transport",
}

/// Which points a run reached.
#[derive(Debug, Clone)]
pub struct Coverage {
    counts: [u64; Point::ALL.len()],
}

impl Coverage {
    /// Nothing reached.
    pub fn new() -> Coverage {
        Coverage {
            counts: [0; Point::ALL.len()],
        }
    }

    /// A point was reached.
    pub fn reach(&mut self, point: Point) {
        self.counts[point as usize] += 1;
    }

    /// Whether a point was reached.
    pub fn reached(&self, point: Point) -> bool {
        self.counts[point as usize] > 0
    }

    /// Counts one run: each point that it reached, once.
    pub fn add_run(&mut self, run: &Coverage) {
        for (count, of_run) in self.counts.iter_mut().zip(run.counts) {
            *count += u64::from(of_run > 0);
        }
    }

    /// Adds the counts of another sum.
    pub fn add(&mut self, other: &Coverage) {
        for (count, more) in self.counts.iter_mut().zip(other.counts) {
            *count += more;
        }
    }

    /// Points with their counts.
    pub fn iter(&self) -> impl Iterator<Item = (Point, u64)> + '_ {
        Point::ALL.iter().map(|point| (*point, self.counts[*point as usize]))
    }
}

impl Default for Coverage {
    fn default() -> Self {
        Coverage::new()
    }
}
