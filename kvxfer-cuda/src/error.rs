//! What can fail, with the driver's call, its `CUresult`, and the device or address.

use std::path::PathBuf;

use kvxfer_core::error::Destination;
use kvxfer_core::{Error, ErrorKind};

use crate::driver::{Code, Refused};

/// What fails in this crate.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum CudaError {
    /// The driver's library could not be loaded.
    #[error("load {}: {why}", path.display())]
    Load {
        /// What was asked of the dynamic loader.
        path: PathBuf,
        /// Its words.
        why: String,
    },
    /// The library lacks a function that kvxfer cannot do without.
    #[error("{} has no {symbol}", path.display())]
    MissingSymbol {
        /// The library.
        path: PathBuf,
        /// The function.
        symbol: &'static str,
    },
    /// The driver is too old.
    #[error("{} is a driver for CUDA {}, and {} is needed", path.display(), version(*have), version(*need))]
    TooOld {
        /// The library.
        path: PathBuf,
        /// Its version: 12080 is 12.8.
        have: i32,
        /// The oldest that is used.
        need: i32,
    },
    /// The driver is there, but sees no device.
    #[error("the driver sees no device")]
    NoDevice,
    /// A call failed.
    #[error("{call}{}: {code}{}", place_of(place), because(why))]
    Call {
        /// The driver's function.
        call: &'static str,
        /// What it returned.
        code: Code,
        /// The device or address; may be empty.
        place: String,
        /// The cause as far as kvxfer can tell; may be empty.
        why: String,
    },
    /// Memory, an event or a stream is not what it was taken for.
    #[error("{what}: {why}")]
    Unfit {
        /// What kind of error it is for users.
        kind: ErrorKind,
        /// What was given.
        what: String,
        /// Why it cannot be used.
        why: String,
        /// What to do.
        remedy: &'static str,
    },
    /// A limit of this crate is reached.
    #[error("{limit} {what} are in use")]
    Limit {
        /// What is limited.
        what: &'static str,
        /// The limit.
        limit: usize,
    },
    /// The device does not answer, or its context is broken: nothing is started on it any more.
    #[error("{device} is lost: {why}")]
    Lost {
        /// The device.
        device: String,
        /// The first error.
        why: String,
    },
    /// A copy was not finished in time.
    #[error("a copy on {device} did not finish within {limit_ms} ms")]
    Late {
        /// The device.
        device: String,
        /// The limit in milliseconds.
        limit_ms: u64,
    },
    /// A thread could not be started.
    #[error("the thread {name} cannot be started: {why}")]
    Thread {
        /// Its name.
        name: String,
        /// The system's words.
        why: String,
    },
    /// The driver's last user has gone.
    #[error("the CUDA driver's last user here has gone")]
    Closed,
}

fn place_of(place: &str) -> String {
    if place.is_empty() {
        String::new()
    } else {
        format!(" ({place})")
    }
}

fn because(why: &str) -> String {
    if why.is_empty() {
        String::new()
    } else {
        format!("; {why}")
    }
}

/// `12.8`.
pub(crate) fn version(number: i32) -> String {
    format!("{}.{}", number / 1000, number % 1000 / 10)
}

impl CudaError {
    /// A call that failed at `place` (a device, an address).
    pub(crate) fn call(refused: Refused, place: impl Into<String>) -> CudaError {
        CudaError::Call {
            call: refused.call,
            code: refused.code,
            place: place.into(),
            why: String::new(),
        }
    }

    /// The same with a cause.
    pub(crate) fn because(mut self, cause: impl Into<String>) -> CudaError {
        if let CudaError::Call { why, .. } = &mut self {
            *why = cause.into();
        }
        self
    }

    /// What kind of error this is for users.
    pub fn kind(&self) -> ErrorKind {
        match self {
            CudaError::Load { .. }
            | CudaError::MissingSymbol { .. }
            | CudaError::TooOld { .. }
            | CudaError::NoDevice => ErrorKind::Unsupported,
            CudaError::Call { code, .. } => kind_of(*code),
            CudaError::Unfit { kind, .. } => *kind,
            CudaError::Limit { .. } => ErrorKind::Busy,
            CudaError::Lost { .. } => ErrorKind::Transport,
            CudaError::Late { .. } => ErrorKind::DeadlineExceeded,
            CudaError::Thread { .. } => ErrorKind::ResourceExhausted,
            CudaError::Closed => ErrorKind::Closed,
        }
    }

    /// What to do about it; empty if there is nothing to say.
    pub fn remedy(&self) -> &'static str {
        match self {
            CudaError::Load { .. } => {
                "install the NVIDIA driver (in a container, run it with GPUs), or set cuda.library to the path of libcuda.so.1"
            }
            CudaError::MissingSymbol { .. } | CudaError::TooOld { .. } => "update the NVIDIA driver",
            CudaError::NoDevice => "check `nvidia-smi` and CUDA_VISIBLE_DEVICES; in a container, give it the devices",
            CudaError::Call { code, .. } => remedy_of(*code),
            CudaError::Unfit { remedy, .. } => remedy,
            CudaError::Limit { .. } => "let some of them end",
            CudaError::Lost { .. } => {
                "see `dmesg` and `nvidia-smi`; a process whose CUDA context is broken must be started anew"
            }
            CudaError::Late { .. } => "look for what keeps the device busy; try again",
            CudaError::Thread { .. } => "raise the limit of threads (ulimit -u, pids.max)",
            CudaError::Closed => "",
        }
    }
}

impl From<CudaError> for Error {
    fn from(error: CudaError) -> Error {
        let (what, place, why) = match &error {
            CudaError::Load { path, why } => (
                "the CUDA driver cannot be loaded".to_owned(),
                path.display().to_string(),
                why.clone(),
            ),
            CudaError::MissingSymbol { path, symbol } => (
                format!("the CUDA driver has no {symbol}"),
                path.display().to_string(),
                "it is too old, or not a CUDA driver".to_owned(),
            ),
            CudaError::TooOld { path, have, need } => (
                "the CUDA driver is too old".to_owned(),
                path.display().to_string(),
                format!("it is for CUDA {}, and {} is needed", version(*have), version(*need)),
            ),
            CudaError::NoDevice => ("no CUDA device".to_owned(), String::new(), error.to_string()),
            CudaError::Call { call, code, place, why } => (
                format!("{call} failed"),
                place.clone(),
                format!("{code}{}", because(why)),
            ),
            CudaError::Unfit { what, why, .. } => (what.clone(), String::new(), why.clone()),
            CudaError::Limit { what, limit } => {
                (format!("too many {what}"), String::new(), format!("{limit} are in use"))
            }
            CudaError::Lost { device, why } => ("a CUDA device is lost".to_owned(), device.clone(), why.clone()),
            CudaError::Late { device, limit_ms } => (
                "a copy".to_owned(),
                device.clone(),
                format!("it did not finish within {limit_ms} ms"),
            ),
            CudaError::Thread { name, why } => (format!("the thread {name}"), String::new(), why.clone()),
            CudaError::Closed => ("CUDA work".to_owned(), String::new(), error.to_string()),
        };
        let shown = Error::new(error.kind(), what)
            .at(place)
            .because(why)
            .remedy(error.remedy());
        match error {
            // The device may still write.
            CudaError::Late { .. } => shown.destination_is(Destination::Quarantined),
            _ => shown,
        }
    }
}

fn kind_of(code: Code) -> ErrorKind {
    match code.0 {
        // Wrong values, handles, contexts; what a graph capture forbids.
        1 | 101 | 201 | 400 | 401 | 500 | 712 | 713 | 900..=908 => ErrorKind::InvalidArgument,
        2 | 47 | 701 | 711 | 808 | 809 => ErrorKind::ResourceExhausted,
        34..=36
        | 100
        | 102
        | 200
        | 209
        | 217
        | 218
        | 221..=225
        | 227
        | 300..=303
        | 800
        | 801
        | 803
        | 804
        | u32::MAX => ErrorKind::Unsupported,
        _ => ErrorKind::Transport,
    }
}

fn remedy_of(code: Code) -> &'static str {
    match code.0 {
        2 => "free device memory, or locked host memory (`ulimit -l`)",
        34 => "install the real NVIDIA driver: this is the stub that programs are linked with",
        35 | 36 | 803 | 804 | u32::MAX => "update the NVIDIA driver",
        100 | 101 => "check `nvidia-smi` and CUDA_VISIBLE_DEVICES",
        712 => "register the memory once only, and let staging buffers share no page",
        802 => "start the fabric manager (nvidia-fabricmanager) and wait for it",
        805..=810 => "check the MPS server",
        900..=908 => "call it outside of a stream capture: what is captured has not happened yet",
        _ if code.breaks_context() => {
            "see `dmesg` and `nvidia-smi`; a process whose CUDA context is broken must be started anew"
        }
        _ => "",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_error_names_the_call_the_result_the_place_and_what_to_do() {
        let refused = Refused {
            call: "cuMemHostRegister_v2",
            code: Code::OUT_OF_MEMORY,
        };
        let error = CudaError::call(refused, "cuda:0000:17:00.0");
        assert_eq!(
            error.to_string(),
            "cuMemHostRegister_v2 (cuda:0000:17:00.0): CUDA_ERROR_OUT_OF_MEMORY (2)"
        );
        let shown = Error::from(error.because("4 MiB"));
        assert_eq!(shown.kind(), ErrorKind::ResourceExhausted);
        let text = shown.to_string();
        assert!(
            text.contains("cuMemHostRegister_v2 failed (cuda:0000:17:00.0)"),
            "{text}"
        );
        assert!(text.contains("4 MiB") && text.contains("ulimit -l"), "{text}");
    }

    #[test]
    fn a_copy_that_may_still_write_quarantines_where_it_writes() {
        let device = || "cuda:0000:17:00.0".to_owned();
        let late = CudaError::Late {
            device: device(),
            limit_ms: 10_000,
        };
        assert_eq!(Error::from(late).destination(), Destination::Quarantined);
        let lost = CudaError::Lost {
            device: device(),
            why: "its context is broken".into(),
        };
        assert_eq!(Error::from(lost).destination(), Destination::Untouched);
    }
}
