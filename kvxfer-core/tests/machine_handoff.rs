//! Hand-offs between machines in memory: matching, streaming, and every way they end.

mod machine_world;

use kvxfer_core::ErrorKind;
use kvxfer_core::machine::*;
use kvxfer_core::wire::Verdict;
use machine_world::*;

fn paint(world: &World, node: usize, colours: &[(u32, u8)]) {
    for &(block, colour) in colours {
        world.nodes[node].paint(block, colour);
    }
}

fn members(outcome: Outcome) -> Vec<MemberVerdict> {
    match outcome {
        Outcome::Released { members } => members,
        other => panic!("{other:?}"),
    }
}

#[test]
fn an_offer_meets_a_claim() {
    let mut world = World::new(2);
    paint(&world, 0, &[(3, 30), (5, 50)]);
    let offer = world.full_offer(0, "r", blocks([3, 5]));
    let claim = world.claim(1, "r", &[0]);
    world.fill(1, claim, blocks([9, 2]));
    world.run_ms(20);
    assert!(matches!(world.ok(1, claim), Outcome::Arrived { bytes: 256 }));
    assert_eq!(world.nodes[1].colour(9), Some(30));
    assert_eq!(world.nodes[1].colour(2), Some(50));
    let members = members(world.ok(0, offer));
    assert_eq!((members.len(), &members[0].verdict), (1, &Verdict::Arrived));
    world.assert_clean();
}
