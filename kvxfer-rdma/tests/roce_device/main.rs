//! The verbs layer and the registry on devices: the fake ones, or real ones in a soft-RoCE guest or where
//! `KVXFER_TEST_DEVICES` names them. What only fake devices can be made to do is in `faults`.
#![allow(clippy::print_stdout, clippy::unwrap_used)]

mod ends;
mod faults;
mod registry;
mod transfers;
