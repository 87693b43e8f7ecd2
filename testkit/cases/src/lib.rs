//! What endpoints promise, as functions: compiled once, and run by test binaries over each transport and with pools in each
//! kind of memory. A binary makes tests of all of a suite, or of some, in a module of its own:
//!
//! ```ignore
//! mod handover {
//!     kvxfer_cases::handover!(kvxfer_cases::TCP);
//! }
//! ```
//!
//! or of several suites at once for a place, with [`tests_at`].

#![allow(missing_docs, clippy::unwrap_used, clippy::print_stdout)]

use std::cell::Cell;

pub mod common;

/// Of a suite's private functions, makes `all`, by which binaries call them, and a macro of the module's name that makes
/// tests of them. Whoever is forgotten in the list is dead code, which the linter refuses.
macro_rules! suite {
    ($dollar:tt $module:ident: $($(#[$attribute:meta])* $name:ident),* $(,)?) => {
        pub mod all {
            $( pub fn $name() { super::$name() } )*
        }

        #[macro_export]
        macro_rules! $module {
            ($dollar place:expr) => {
                $(
                    #[test]
                    $(#[$attribute])*
                    fn $name() {
                        $crate::at($dollar place, module_path!(), $crate::$module::all::$name)
                    }
                )*
            };
            // Only these.
            ($dollar place:expr, $dollar($dollar only:ident),+ $dollar(,)?) => {
                $dollar(
                    #[test]
                    fn $dollar only() {
                        $crate::at($dollar place, module_path!(), $crate::$module::all::$dollar only)
                    }
                )+
            };
        }
    };
}

/// A module of tests for a place: suites of cases, or of some of a suite's.
///
/// ```ignore
/// kvxfer_cases::tests_at! {
///     /// Over TCP, between GPUs' memories.
///     cuda_both, TCP.on_gpus("both") => handover, grants, reuse(blocks_retracted_while_they_are_read_never_arrive);
/// }
/// ```
#[macro_export]
macro_rules! tests_at {
    ($($(#[$doc:meta])* $module:ident, $place:expr => $($suite:ident $(($($only:ident),+))?),+;)+) => {
        $(
            $(#[$doc])*
            mod $module {
                #[allow(unused_imports)]
                use $crate::{RDMA, TCP};

                const HERE: $crate::Place = $place;

                $(
                    mod $suite {
                        $crate::$suite!(super::HERE $(, $($only),+)?);
                    }
                )+
            }
        )+
    };
}

pub mod faults;
pub mod grants;
pub mod handover;
pub mod rails;
pub mod reuse;
pub mod soak;

/// Where a test runs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Place {
    /// What bytes go over: `tcp` or `rdma`.
    pub over: &'static str,
    /// Whose pools are in a fake GPU's memory: `host` (nobody's), `source` (of those who give), `destination` (of those
    /// who take), `both`.
    pub pools: &'static str,
    /// RDMA devices reach that memory, and what they write is seen after a flush; else it goes through staging.
    pub direct: bool,
    /// Sides map each other's GPU memory and copy out of it by themselves; else it goes through staging.
    pub mapped: bool,
}

impl Place {
    /// The same, reached by devices.
    #[must_use]
    pub const fn directly(self) -> Place {
        Place { direct: true, ..self }
    }

    /// The same, mapped by the other side.
    #[must_use]
    pub const fn mapped(self) -> Place {
        Place { mapped: true, ..self }
    }

    /// The same, with these pools in GPUs' memory.
    #[must_use]
    pub const fn on_gpus(self, pools: &'static str) -> Place {
        Place { pools, ..self }
    }
}

/// Over TCP, in the host's memory.
pub const TCP: Place = Place {
    over: "tcp",
    pools: "host",
    direct: false,
    mapped: false,
};

/// Over RDMA, in the host's memory.
pub const RDMA: Place = Place {
    over: "rdma",
    pools: "host",
    direct: false,
    mapped: false,
};

thread_local! {
    static HERE: Cell<Option<(Place, &'static str)>> = const { Cell::new(None) };
}

/// Runs a case as a test of this module.
pub fn at(place: Place, module: &'static str, case: fn()) {
    // One thread may run several.
    common::forget();
    HERE.set(Some((place, module)));
    case();
}

/// Where this thread's test runs. Tests that are no cases of this crate go over what their binary is named after.
pub fn place() -> Place {
    let of_binary = || {
        let path = std::env::current_exe().unwrap();
        match path.file_name().unwrap().to_str().unwrap().starts_with("roce_") {
            true => RDMA,
            false => TCP,
        }
    };
    HERE.get().map_or_else(of_binary, |(place, _)| place)
}

/// The name, as on a test binary's command line, of another case in the module of the one that this thread runs.
pub fn sibling(case: &str) -> String {
    let (_, module) = HERE.get().unwrap();
    format!("{}::{case}", in_binary(module))
}

/// Without the name of the binary.
fn in_binary(path: &str) -> &str {
    path.split_once("::").map_or("", |(_, inner)| inner)
}

/// Whether a test of this binary (its path, with the binary's name) fails if calls of the CUDA driver are as if the library
/// had this defect. It passes without.
pub fn fails_under(test: &str, defect: &str) -> bool {
    common::gpus::fails_under(in_binary(test), defect)
}
