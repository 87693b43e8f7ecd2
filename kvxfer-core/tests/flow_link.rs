//! The sending side joined to the receiving side by lanes that lose, stall and reorder; and who goes first.

#[path = "flow_models/fair.rs"]
mod fair;
mod flow_common;
#[path = "flow_models/link.rs"]
mod link;
#[path = "flow_models/one_sided.rs"]
mod one_sided;

use std::sync::Arc;

use fair::Link;
use kvxfer_core::flow::{Gate, LinkSender, LinkSenderConfig, MESSAGE_BYTES_MAX, SendEvent, SendSpec, TransferId};
use kvxfer_core::{ErrorKind, Generation, SlotId, Time};
use proptest::prelude::*;

proptest! {
    #![proptest_config(ProptestConfig::with_cases(512))]
    #[test]
    fn everything_arrives_exactly_once(seed in any::<u64>()) {
        link::run(seed)?;
    }
}

#[test]
fn a_small_transfer_does_not_wait_for_a_large_one() {
    fair::small_behind_large().unwrap();
}

#[test]
fn transfers_share_a_link_equally() {
    fair::equal_shares().unwrap();
}

#[test]
fn a_higher_priority_goes_first() {
    let mut link = Link::new(LinkSenderConfig::default());
    link.submit(1, 64 << 20, 1, 1, None);
    link.run(None, 4);
    link.submit(2, 8 << 20, 1, 9, None);
    let before = link.order.len();
    link.run(Some(TransferId(2)), usize::MAX);
    let order = &link.order[before..];
    assert!(order[..8].iter().all(|id| *id == TransferId(2)), "{order:?}");
}

#[test]
fn the_earliest_deadline_goes_first_in_a_round() {
    let mut link = Link::new(LinkSenderConfig::default());
    let soon = |nanos| Some(Time::from_nanos(nanos));
    link.submit(1, 8 << 20, 1, 0, None);
    link.submit(2, 8 << 20, 1, 0, soon(900_000_000_000));
    link.submit(3, 8 << 20, 1, 0, soon(800_000_000_000));
    link.run(None, 9);
    let round = [3, 2, 1].map(TransferId);
    assert_eq!(link.order[..9], [round, round, round].concat());
}

#[test]
fn a_link_has_so_many_places_and_no_more() {
    let mut link = Link::new(LinkSenderConfig {
        transfers_active_max: 2,
        transfers_max: 4,
        ..LinkSenderConfig::default()
    });
    for id in 1..=3 {
        link.submit(id, 16 << 20, 1, 0, None);
    }
    link.run(None, 20);
    assert!(!link.sent.contains_key(&TransferId(3)), "the third waits");
    link.run(Some(TransferId(1)), usize::MAX);
    link.run(Some(TransferId(2)), usize::MAX);
    link.run(Some(TransferId(3)), usize::MAX);
    assert_eq!(link.sent[&TransferId(3)], 16 << 20);
}

#[test]
fn a_limit_is_busy_and_nonsense_is_an_error() {
    let mut sender = LinkSender::new(LinkSenderConfig {
        transfers_max: 1,
        ..LinkSenderConfig::default()
    });
    let spec = |id, message: usize| SendSpec {
        id: TransferId(id),
        slot: SlotId(0),
        generation: Generation(1),
        gate: Gate::new(),
        regions: Arc::new([]),
        message: Some(vec![0; message].into()),
        priority: 0,
        deadline: None,
        checksum: false,
        remote: None,
    };
    let long = sender.submit(spec(1, MESSAGE_BYTES_MAX + 1)).unwrap_err();
    assert_eq!(long.kind(), ErrorKind::InvalidArgument);
    sender.submit(spec(1, 3)).unwrap();
    assert_eq!(sender.submit(spec(2, 3)).unwrap_err().kind(), ErrorKind::Busy);
    assert!(!sender.has_work(0), "no lane is up");
    // A stop of what is not known is answered all the same.
    sender.stop(TransferId(9));
    assert!(matches!(sender.poll_event(), Some(SendEvent::Quiet(TransferId(9)))));
    sender.stop(TransferId(1));
    assert!(matches!(sender.poll_event(), Some(SendEvent::Quiet(TransferId(1)))));
    assert_eq!(sender.transfers(), 0);
}

#[test]
fn one_sided_transfers_end_with_their_slots() {
    one_sided::all().unwrap();
}
