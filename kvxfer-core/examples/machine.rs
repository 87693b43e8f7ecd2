//! Two control planes in one process, driven by hand: what a driver does with a [`Machine`], without any I/O.
//!
//! `cargo run -p kvxfer-core --example machine` prints each frame of a handshake and of a claim that waits for its offer,
//! is matched, and is declined.
#![allow(clippy::print_stdout)]

use std::collections::VecDeque;
use std::error::Error;
use std::sync::Arc;
use std::time::Duration;

use kvxfer_core::flow::SlotTable;
use kvxfer_core::layout::PoolLayout;
use kvxfer_core::machine::*;
use kvxfer_core::memory::Region;
use kvxfer_core::wire::{EndpointAddress, Frame};
use kvxfer_core::{Incarnation, PoolId, Time};

const POOL: PoolId = PoolId(1);
const NAMES: [&str; 2] = ["prefill", "decode"];

/// What crosses the imaginary network.
struct Delivery {
    to: usize,
    connection: ConnectionId,
    frame: Frame,
}

fn endpoint(index: usize, now: Time) -> Result<Machine, kvxfer_core::Error> {
    let incarnation = Incarnation::from_bits(0xabcd << 112 | index as u128);
    let mut machine = Machine::new(MachineSetup {
        config: MachineConfig {
            name: NAMES[index].to_string(),
            ..MachineConfig::default()
        },
        incarnation,
        address: address(index),
        transports: vec![TransportOffer {
            name: "none".to_string(),
            advert: Vec::new(),
            one_sided: false,
        }],
        slots: SlotTable::new(16),
        seed: 1 + index as u128,
    });
    let layout = PoolLayout::opaque(4096, 8)?;
    let regions = layout
        .region_lengths()
        .iter()
        .map(|length| Region::allocate(*length))
        .collect::<Result<Vec<_>, _>>()?;
    machine.add_pool(
        now,
        POOL,
        PoolSetup {
            layout: Arc::new(layout),
            regions: regions.into(),
            serves: true,
            receives: true,
            keys: Vec::new(),
        },
    )?;
    Ok(machine)
}

fn address(index: usize) -> EndpointAddress {
    EndpointAddress {
        sockets: vec![([127, 0, 0, 1], 7700 + index as u16).into()],
        incarnation: Some(Incarnation::from_bits(0xabcd << 112 | index as u128)),
        rank: Default::default(),
    }
}

/// Carries out everything that both want, until neither wants anything.
fn run(machines: &mut [Machine; 2], now: Time) {
    // One connection: dialed by the one side, number 1 of those accepted at the other.
    let other_end = |connection: ConnectionId, dialed: ConnectionId| {
        if connection == dialed { ConnectionId(1) } else { dialed }
    };
    let mut dialed = ConnectionId(1 << 63);
    let mut network: VecDeque<Delivery> = VecDeque::new();
    loop {
        for index in 0..2 {
            while let Some(action) = machines[index].poll_action() {
                match action {
                    Action::Dial { connection, .. } => {
                        dialed = connection;
                        machines[1 - index].accepted(now, ConnectionId(1), ([127, 0, 0, 1], 50_000).into());
                        machines[index].dialed(now, connection);
                    }
                    Action::Send { connection, frame } => network.push_back(Delivery {
                        to: 1 - index,
                        connection: other_end(connection, dialed),
                        frame,
                    }),
                    Action::Complete { handle, result } => {
                        println!("{}: handle {} ends: {result:?}", NAMES[index], handle.0);
                    }
                    Action::Notice { handle, notice } => {
                        println!("{}: handle {}: {notice:?}", NAMES[index], handle.0);
                    }
                    // There is no data plane here.
                    _ => {}
                }
            }
        }
        let Some(Delivery { to, connection, frame }) = network.pop_front() else {
            return;
        };
        match &frame {
            Frame::Hello(hello) => println!("{} -> {}: Hello from {}", NAMES[1 - to], NAMES[to], hello.name),
            frame => println!("{} -> {}: {frame:?}", NAMES[1 - to], NAMES[to]),
        }
        machines[to].frame(now, connection, frame);
    }
}

fn main() -> Result<(), Box<dyn Error>> {
    let mut now = Time::from_nanos(1_000_000);
    let mut machines = [endpoint(0, now)?, endpoint(1, now)?];
    let options = ClaimOptions {
        set: 1,
        member: 0,
        members: 1,
        deadline: None,
        pull: false,
    };
    let claim = machines[1].claim(now, b"request-17", POOL, &[address(0)], options)?;
    run(&mut machines, now);
    println!(
        "decode waits for: {:?}",
        machines[1].waiting_on(claim).map(|waiting| waiting.what)
    );

    now = now + Duration::from_millis(3);
    let options = OfferOptions {
        readers: 1,
        deadline: None,
        priority: 0,
        checksum: false,
    };
    machines[0].offer(now, b"request-17", POOL, options)?;
    run(&mut machines, now);

    machines[1].decline(now, claim)?;
    run(&mut machines, now);
    Ok(())
}
