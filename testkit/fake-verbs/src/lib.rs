//! fake
mod completion;
mod config;
mod context;
mod counters;
mod device;
mod event;
mod exports;
mod fabric;
mod memory;
mod network;
mod objects;
mod packet;
mod post;
mod queue_pair;
mod requester;
mod responder;
mod state;
mod thread;

pub use fabric::FakeFabric;
