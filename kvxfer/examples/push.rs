//! The layer below offers and claims: a grant, and a push into it with a message.
#![allow(clippy::print_stdout)]

use std::time::Duration;

use kvxfer::{Endpoint, Grant, GrantOptions, PoolLayout, PushOptions, Result, Role, Selection};

const WAIT: Duration = Duration::from_secs(10);

fn main() -> Result<()> {
    let build = |name: &str| {
        Endpoint::builder()
            .name(name)
            .listen("127.0.0.1:0".parse().expect("an address"))
            .transports(["tcp"])
            .build()
    };
    let (sender, receiver) = (build("sender")?, build("receiver")?);
    // Blocks of raw bytes: 256 of 64 KiB.
    let source = sender.allocate(PoolLayout::opaque(64 << 10, 256)?, Role::Serve)?;
    let destination = receiver.allocate(PoolLayout::opaque(64 << 10, 256)?, Role::Receive)?;
    for block in 0..32 {
        source.copy_in(0, block, 0, &vec![block as u8 + 1; 64 << 10])?;
    }

    // The receiver permits these blocks to be written, once. The grant is bytes: send it as you like.
    let granted = destination.grant(
        Selection::whole_blocks(1, (100..132).collect()),
        GrantOptions::default(),
    )?;
    let travels = granted.grant().to_bytes()?;

    // The sender writes them.
    let grant = Grant::from_bytes(&travels)?;
    let options = PushOptions {
        message: Some(Vec::from("these are blocks 0 to 31").into()),
        ..PushOptions::default()
    };
    let transfer = sender.push(&source, Selection::whole_blocks(1, (0..32).collect()), &grant, options)?;

    let arrival = granted.arrived().wait(WAIT)?;
    let message = arrival.message.as_deref().map(String::from_utf8_lossy);
    println!("received {} bytes with the message {message:?}", arrival.bytes);
    let delivery = transfer.done().wait(WAIT)?;
    for block in 0..32 {
        let mut bytes = vec![0; 64 << 10];
        destination.copy_out(0, 100 + block, 0, &mut bytes)?;
        assert!(bytes.iter().all(|&byte| byte == block as u8 + 1));
    }
    println!(
        "{} bytes delivered and verified by {:?}",
        delivery.bytes,
        transfer.path()
    );
    Ok(())
}
