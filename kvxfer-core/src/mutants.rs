//! Seeded defects: deliberate mistakes in this crate, one of which can be switched on for the current thread when the
//! crate is built with the feature `mutants`. A test that claims to hold a promise must fail under the mutants that
//! break it. Without the feature [`is`] is a constant `false` and every hook vanishes.

macro_rules! mutants {
    (
        simulator: { $($(#[$doc:meta])* $name:ident,)* }
        rdma: { $($(#[$rdma_doc:meta])* $rdma:ident,)* }
        tcp: { $($(#[$tcp_doc:meta])* $tcp:ident,)* }
    ) => {
        /// A deliberate mistake.
        #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
        #[non_exhaustive]
        pub enum Mutant {
            $($(#[$doc])* $name,)*
            $($(#[$rdma_doc])* $rdma,)*
            $($(#[$tcp_doc])* $tcp,)*
        }

        impl Mutant {
            /// All that the simulator must catch: mistakes of this crate.
            pub const ALL: &'static [Mutant] = &[$(Mutant::$name,)*];

            /// All that the RDMA transport's suites must catch: mistakes of its engine.
            pub const RDMA: &'static [Mutant] = &[$(Mutant::$rdma,)*];

            /// All that the TCP transport's suites must catch: mistakes with references.
            pub const TCP: &'static [Mutant] = &[$(Mutant::$tcp,)*];

            /// Its name, as printed by tests.
            pub const fn name(self) -> &'static str {
                match self {
                    $(Mutant::$name => stringify!($name),)*
                    $(Mutant::$rdma => stringify!($rdma),)*
                    $(Mutant::$tcp => stringify!($tcp),)*
                }
            }
        }
    };
}

mutants! {
    simulator: {
        // ---- data plane
        /// A gate says that it is fenced while somebody is inside.
        SkipFence,
        /// A slot takes chunks of another of its generations.
        IgnoreGeneration,
        /// A chunk counts when its header is read, not when its bytes are placed.
        AckEarly,
        /// A chunk that is already in place is counted again.
        CountTwice,
        /// A slot's generation does not grow when it is given to another grant.
        ReuseSlotEarly,
        /// A slot takes chunks from a peer that it is not open for.
        IgnoreWriter,
        /// Overlapping parts of a slot are not noticed.
        LoseOverlapCheck,
        /// A chunk whose trailer says invalid is counted.
        AcceptInvalidTrailer,
        /// Closing a slot that has arrived undoes the arrival.
        CancelWinsOverArrived,
        /// Chunks of a lost lane are sent again before the receiver has fenced it.
        ResendWithoutFence,
        /// Chunks of a lost lane are taken for applied.
        DropInDoubt,
        /// A slot arrives without its user message.
        ForgetMessage,
        /// Transfers of a link are served first come, first served.
        StarveSmall,
        /// A lane's window never closes.
        UnboundedWindow,
        /// A stopped transfer is said to be quiet while chunks of it are being sent.
        QuietEarly,
        /// A slot that is admitted to a peer's device does not hold its gate.
        AdmitWithoutGate,
        /// Chunks that were being read on a lost lane are taken for applied.
        TakeLostReads,
        // ---- control plane
        /// A handshake with another incarnation than the expected one goes on.
        AcceptOtherIncarnation,
        /// A slot is given back before its verdict was acknowledged.
        ReleaseSlotBeforeAck,
        /// The end of a claim, grant or pull is reported without waiting for its fence.
        ReportCancelBeforeFence,
        /// A pull arrives without asking the source whether its blocks were still what was meant.
        SkipValidate,
        /// A message that came before is taken again.
        ReplayDuplicateMessage,
        /// Messages without acknowledgement are not repeated after a reconnect.
        LoseUnacknowledged,
        /// A sender that cannot know the outcome says that the peer was lost and nothing arrived.
        SayLostForUnknown,
        /// A restarted offer's earlier slot stays open and is used further.
        KeepOldAttempt,
        /// An offer serves any number of claim sets.
        IgnoreReaders,
        /// A sender takes its bytes for arrived when they are acknowledged, without the owner's verdict.
        SourceDecidesArrival,
        /// A retracted offer's gate stays open.
        RetractWithoutGate,
        /// What waits for an event is sent at once.
        IgnoreEvent,
        /// Silence of a peer is not noticed.
        NeverLost,
        /// An offer is released while one of its members is open.
        ReleaseOfferEarly,
        /// A handle ends twice.
        DoubleComplete,
        /// A slot is closed without its writer's device being told to stop.
        ForgetRevoke,
        /// A transport that failed is taken again.
        FallBackToTheFailed,
        /// What this endpoint's device has read counts without the source's word that it was still what was meant.
        SkipValidateOfReads,
        /// A close of a one-sided lane counts when it is announced, before its immediate has come.
        CountBeforeImmediate,
    }
    rdma: {
        /// A queue pair that is fenced is reset instead of put into the error state: completions are lost.
        ResetInsteadOfError,
        /// A fence does not wait until accepted writes are in memory.
        SkipFlush,
        /// Closes are counted instead of kept as a set.
        CountCloses,
        /// The sender closes with immediates without asking whether the receiver has receives for them.
        IgnoreReceiveCredit,
        /// The sender writes into a slot before the receiver has admitted it.
        AdmitLate,
        /// The sender says that it has stopped while its writes are outstanding.
        RevokedEarly,
        /// What comes from an earlier queue pair of a lane is taken for its present one's.
        IgnoreLinkEpoch,
        /// A read places bytes without being inside its slot's gate.
        ReadWithoutGate,
        /// What devices have written counts before the memory's own device shows it.
        SkipSettle,
        /// Memory is used without a look whether it still is what it was.
        SkipVerify,
        /// A chunk is sent from a staging buffer before its copy into it has ended.
        SendBeforeGathered,
        /// A chunk counts before its copy out of a staging buffer has ended.
        CountBeforeScattered,
        /// What devices have written is settled when it arrives, but not when its blocks are given back instead.
        SkipSettleOfFence,
        /// A landing that its writer gave back is used again before the device was flushed.
        ReuseLandingUnflushed,
        /// A copy that has not ended counts as ended once its rail was given up.
        ForgetHungCopies,
    }
    tcp: {
        /// What was copied out of a peer's memory counts without the peer's word that it was still what was meant.
        CountUnasked,
        /// A source that was taken back still says that what was copied of it counts.
        CountTakenBack,
        /// A copy out of a peer's memory is made outside its slot's gate.
        ImportWithoutGate,
        /// What was copied over a lane that is lost counts, though nobody could be asked.
        CountAfterLoss,
    }
}

#[cfg(feature = "mutants")]
mod active {
    use std::cell::Cell;

    use super::Mutant;

    std::thread_local! {
        static ACTIVE: Cell<Option<Mutant>> = const { Cell::new(None) };
    }

    /// Switches one mutant on for this thread, or all off.
    pub fn set(mutant: Option<Mutant>) {
        ACTIVE.with(|active| active.set(mutant));
    }

    /// The mutant that is on in this thread.
    pub fn get() -> Option<Mutant> {
        ACTIVE.with(Cell::get)
    }

    /// Whether this mutant is on in this thread.
    pub fn is(mutant: Mutant) -> bool {
        get() == Some(mutant)
    }
}

#[cfg(feature = "mutants")]
pub use active::{get, is, set};

/// Whether this mutant is on: never, in a build without the feature `mutants`.
#[cfg(not(feature = "mutants"))]
#[inline(always)]
pub const fn is(_mutant: Mutant) -> bool {
    false
}
