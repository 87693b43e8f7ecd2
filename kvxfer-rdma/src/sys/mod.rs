//! libibverbs as it is: types and functions generated from rdma-core's headers (`generate.sh`), found at run time.
//!
//! Everything above goes through [`crate::verbs`]; this module is public for tools and tests that need the raw form.
//! Several verbs (`ibv_post_send`, `ibv_post_recv`, `ibv_poll_cq`, `ibv_req_notify_cq`) are inline functions in C that
//! call through the device context's `ops`; they have no symbol.

#[allow(
    missing_docs,
    non_camel_case_types,
    non_snake_case,
    non_upper_case_globals,
    unreachable_pub,
    unsafe_op_in_unsafe_fn,
    rustdoc::all,
    clippy::all,
    clippy::undocumented_unsafe_blocks
)]
#[rustfmt::skip]
mod verbs;

pub use verbs::*;
