//! The C interface of kvxfer: `libkvxfer.so`, `libkvxfer.a` and `kvxfer.h`.
//!
//! Every function here does four things and nothing else: it reads its arguments, finds the objects behind its
//! handles, calls the Rust interface, and writes the results. `include/kvxfer.h` is generated from this crate and says
//! what each function does; `docs/c.md` is the guide.
//!
//! | module | what it is for |
//! | --- | --- |
//! | `table` | handles: numbers with a kind, a generation and a place, looked up on every call |
//! | `call` | the border: panics are caught, errors kept per thread, forked children turned away |
//! | `input`, `output` | pointers, lengths, texts and structs of the caller's |
//! | the others | the functions, by subject |
//!
//! # Safety
//! One contract for all functions: a pointer is null (where the header allows it) or points to what the header says,
//! for as long as the call lasts. Handles need no contract: any number may be passed.
// The names are C's. The contract above stands for a section per function.
#![allow(non_camel_case_types, clippy::missing_safety_doc)]

mod call;
mod fork;
mod input;
mod output;
mod table;

pub mod address;
pub mod config;
pub mod endpoint;
pub mod events;
pub mod grant;
pub mod handle;
pub mod handoff;
pub mod layout;
pub mod pool;
pub mod selection;
pub mod status;

pub use address::*;
pub use config::*;
pub use endpoint::*;
pub use events::*;
pub use grant::*;
pub use handle::*;
pub use handoff::*;
pub use layout::*;
pub use pool::*;
pub use selection::*;
pub use status::*;
