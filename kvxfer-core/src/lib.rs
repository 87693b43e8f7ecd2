//! The words, layouts, plans, wire format and state machines of kvxfer.
//!
//! This crate decides everything and touches nothing: no sockets, no threads, no clock. Time comes in as an
//! argument ([`Time`]), input as method calls, output as values to be carried out by whoever drives it. That is
//! what lets the simulator in `kvxfer-testkit` run several endpoints through any schedule of loss, delay and death.
//!
//! `unsafe` is denied here except in [`memory`], the module that defines [`memory::Region`].
#![deny(unsafe_code)]

pub mod error;
pub mod flow;
pub mod id;
pub mod layout;
pub mod machine;
#[allow(unsafe_code)]
pub mod memory;
pub mod mutants;
pub mod plan;
pub mod time;
pub mod transport;
pub mod wire;

pub use error::{Error, ErrorKind, Result};
pub use id::{Generation, GrantName, Incarnation, PoolId, SlotId};
pub use time::Time;
