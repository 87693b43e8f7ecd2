//! Settings.

use serde::{Deserialize, Serialize};

/// Settings of the CUDA driver's use.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct CudaConfig {
    /// The driver's library: a path, or a name that the dynamic loader finds; empty: `libcuda.so.1`.
    pub library: String,
    /// How many small pieces are copied.
    pub gather: Gather,
    /// Whether other endpoints on this host may map memory that they are to be sent from, and whether theirs is mapped here.
    pub share: bool,
}

impl Default for CudaConfig {
    fn default() -> CudaConfig {
        CudaConfig {
            library: String::new(),
            gather: Gather::default(),
            share: true,
        }
    }
}

/// How many small pieces of device memory are gathered and scattered. What the device or driver cannot do is not done.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
#[non_exhaustive]
pub enum Gather {
    /// By number and size.
    #[default]
    Auto,
    /// By a kernel, whenever there are several.
    Kernel,
    /// By the driver's copies, several in one call.
    Batch,
    /// By the driver's copies, one by one.
    Loop,
}
