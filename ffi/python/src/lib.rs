//! The extension module of the Python package `kvxfer`.
//!
//! Thin: every class wraps its Rust namesake. What is decided here is what Python adds: how arguments are read, whose
//! memory is kept alive (`memory`), how waiting and the interpreter's lock go together (`exit`, `wake`), what happens
//! in a forked child (`fork`), and which exception an error is (`error`).

// The text of these docs is what Python's help() shows.
#![allow(rustdoc::broken_intra_doc_links)]

use pyo3::prelude::*;

mod address;
mod arguments;
mod cuda;
mod dlpack;
mod endpoint;
mod error;
mod events;
mod exit;
mod fork;
mod handle;
mod layout;
mod memory;
mod pool;
mod selection;
mod settings;
mod wake;
mod warn;

#[pymodule]
fn _kvxfer(module: &Bound<'_, PyModule>) -> PyResult<()> {
    memory::check_buffers(module.py())?;
    fork::watch();
    module.add("__version__", env!("CARGO_PKG_VERSION"))?;
    module.add_class::<address::EndpointAddress>()?;
    module.add_class::<address::Grant>()?;
    module.add_class::<address::Rank>()?;
    module.add_class::<endpoint::Endpoint>()?;
    module.add_class::<endpoint::PeerInfo>()?;
    module.add_class::<events::Event>()?;
    module.add_class::<events::Events>()?;
    module.add_class::<handle::Arrival>()?;
    module.add_class::<handle::Claim>()?;
    module.add_class::<handle::Delivery>()?;
    module.add_class::<handle::GrantHandle>()?;
    module.add_class::<handle::Handle>()?;
    module.add_class::<handle::Member>()?;
    module.add_class::<handle::Offer>()?;
    module.add_class::<handle::Path>()?;
    module.add_class::<handle::Release>()?;
    module.add_class::<handle::Transfer>()?;
    module.add_class::<layout::Layout>()?;
    module.add_class::<pool::Pool>()?;
    module.add_class::<selection::PyTarget>()?;
    module.add_class::<selection::Selection>()?;
    module.add_class::<wake::Wakes>()?;
    module.add_function(wrap_pyfunction!(settings::config_reference, module)?)?;
    module.add_function(wrap_pyfunction!(error::_kinds, module)?)?;
    module.add_function(wrap_pyfunction!(exit::_close_all, module)?)?;
    module.add_function(wrap_pyfunction!(layout::_dtype_bytes, module)?)?;
    module.add_function(wrap_pyfunction!(layout::_local_heads, module)?)?;
    module.add_function(wrap_pyfunction!(memory::_view, module)?)?;
    Ok(())
}
