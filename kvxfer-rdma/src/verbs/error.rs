//! What verbs refuse, and what the reader can do about it.

use std::path::PathBuf;

use kvxfer_core::{Error, ErrorKind};

/// A verb that failed: which, on which device, with which errno, and why as far as it can be told.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum VerbsError {
    /// The library could not be loaded.
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
    /// A device with this name is not there (any more).
    #[error("no device {device}")]
    NoSuchDevice {
        /// The name asked for.
        device: String,
        /// The names that are there.
        present: Vec<String>,
    },
    /// The verb ran and said no.
    #[error("{verb} on {device}: {}{}{why}", describe(*errno), if why.is_empty() { "" } else { "; " })]
    Refused {
        /// The verb.
        verb: &'static str,
        /// The device.
        device: String,
        /// What the verb left in errno or returned, as a positive number.
        errno: i32,
        /// The cause as far as kvxfer can tell; may be empty.
        why: String,
        /// What to do; may be empty.
        remedy: String,
    },
    /// The device, its driver or the library cannot do this at all, or not with these values.
    #[error("{verb} on {device}: {why}")]
    Unsupported {
        /// The verb.
        verb: &'static str,
        /// The device.
        device: String,
        /// Why.
        why: String,
    },
}

impl VerbsError {
    /// A refusal whose cause is told by its errno alone.
    pub(crate) fn refused(verb: &'static str, device: &str, errno: i32) -> VerbsError {
        VerbsError::Refused {
            verb,
            device: device.to_owned(),
            errno,
            why: String::new(),
            remedy: default_remedy(errno).to_owned(),
        }
    }

    /// The same with a cause; the default remedy of the errno stays.
    pub(crate) fn because(mut self, cause: impl Into<String>) -> VerbsError {
        if let VerbsError::Refused { why, .. } | VerbsError::Unsupported { why, .. } = &mut self {
            *why = cause.into();
        }
        self
    }

    /// The same with another remedy.
    pub(crate) fn with_remedy(mut self, what: impl Into<String>) -> VerbsError {
        if let VerbsError::Refused { remedy, .. } = &mut self {
            *remedy = what.into();
        }
        self
    }

    /// The verb, or what stands for it.
    pub fn verb(&self) -> &'static str {
        match self {
            VerbsError::Load { .. } => "dlopen",
            VerbsError::MissingSymbol { symbol, .. } => symbol,
            VerbsError::NoSuchDevice { .. } => "ibv_open_device",
            VerbsError::Refused { verb, .. } | VerbsError::Unsupported { verb, .. } => verb,
        }
    }

    /// The device, if one was involved.
    pub fn device(&self) -> Option<&str> {
        match self {
            VerbsError::Load { .. } | VerbsError::MissingSymbol { .. } => None,
            VerbsError::NoSuchDevice { device, .. }
            | VerbsError::Refused { device, .. }
            | VerbsError::Unsupported { device, .. } => Some(device),
        }
    }

    /// The errno, if the verb ran.
    pub fn errno(&self) -> Option<i32> {
        match self {
            VerbsError::Refused { errno, .. } => Some(*errno),
            _ => None,
        }
    }

    /// What kind of error this is for users.
    pub fn kind(&self) -> ErrorKind {
        match self {
            VerbsError::Load { .. } | VerbsError::MissingSymbol { .. } | VerbsError::Unsupported { .. } => {
                ErrorKind::Unsupported
            }
            VerbsError::NoSuchDevice { .. } => ErrorKind::Transport,
            // The kernel says so of a process that may lock no memory at all.
            VerbsError::Refused { verb, errno, .. } if *errno == libc::EPERM && verb.starts_with("ibv_reg_") => {
                ErrorKind::ResourceExhausted
            }
            VerbsError::Refused { errno, .. } => kind_of(*errno),
        }
    }

    /// What to do about it; empty if there is nothing to say.
    pub fn remedy(&self) -> String {
        match self {
            VerbsError::Load { .. } => {
                "install rdma-core (libibverbs1, ibverbs-providers), or set rdma.library to the path of libibverbs.so.1"
                    .to_owned()
            }
            VerbsError::MissingSymbol { .. } => "use the libibverbs of rdma-core 20 or later".to_owned(),
            VerbsError::NoSuchDevice { present, .. } if present.is_empty() => {
                "no RDMA device is visible: check `rdma link`, the driver, and that the container was given /dev/infiniband"
                    .to_owned()
            }
            VerbsError::NoSuchDevice { present, .. } => format!("the devices here are {}", present.join(", ")),
            VerbsError::Refused { remedy, .. } => remedy.clone(),
            VerbsError::Unsupported { .. } => String::new(),
        }
    }
}

impl From<VerbsError> for Error {
    fn from(error: VerbsError) -> Error {
        error.in_place("")
    }
}

impl VerbsError {
    /// The error for users, with the place where it happened beside the device.
    pub(crate) fn in_place(self, place: &str) -> Error {
        let error = self;
        let (what, why) = match &error {
            VerbsError::Load { why, .. } => ("the verbs library cannot be loaded".to_owned(), why.clone()),
            VerbsError::MissingSymbol { symbol, .. } => {
                (format!("the verbs library has no {symbol}"), "it is too old".to_owned())
            }
            VerbsError::NoSuchDevice { device, .. } => (format!("no RDMA device {device}"), String::new()),
            VerbsError::Refused { verb, errno, why, .. } => {
                let separator = if why.is_empty() { "" } else { "; " };
                (
                    format!("{verb} failed"),
                    format!("{}{separator}{why}", describe(*errno)),
                )
            }
            VerbsError::Unsupported { verb, why, .. } => (format!("{verb} cannot be used"), why.clone()),
        };
        let device = match &error {
            VerbsError::Load { path, .. } | VerbsError::MissingSymbol { path, .. } => path.display().to_string(),
            other => format!("device {}", other.device().unwrap_or_default()),
        };
        let separator = if place.is_empty() { "" } else { ", " };
        Error::new(error.kind(), what)
            .at(format!("{device}{separator}{place}"))
            .because(why)
            .remedy(error.remedy())
    }
}

fn kind_of(errno: i32) -> ErrorKind {
    match errno {
        libc::EINVAL | libc::EFAULT | libc::EMSGSIZE | libc::E2BIG => ErrorKind::InvalidArgument,
        libc::EOPNOTSUPP | libc::ENOSYS | libc::EPROTONOSUPPORT | libc::EPERM | libc::EACCES => ErrorKind::Unsupported,
        libc::ENOMEM | libc::EAGAIN | libc::ENOSPC | libc::EMFILE | libc::ENFILE | libc::EDQUOT => {
            ErrorKind::ResourceExhausted
        }
        libc::EBUSY => ErrorKind::Busy,
        _ => ErrorKind::Transport,
    }
}

fn default_remedy(errno: i32) -> &'static str {
    match errno {
        libc::EPERM | libc::EACCES => {
            "let this user read and write /dev/infiniband/uverbs* (group rdma; in a container, pass the devices)"
        }
        libc::ENOMEM | libc::ENOSPC => "free memory or device objects; `rdma resource` shows who holds them",
        libc::EMFILE | libc::ENFILE => "raise the limit of open files (ulimit -n)",
        libc::ENODEV | libc::ENXIO | libc::EIO => {
            "the device has gone or stopped answering: see `dmesg` and `rdma link`; its rails are left until it is back"
        }
        libc::EOPNOTSUPP | libc::ENOSYS | libc::EPROTONOSUPPORT => "use another device or a newer driver",
        libc::ENETUNREACH | libc::EHOSTUNREACH | libc::ETIMEDOUT | libc::EADDRNOTAVAIL => {
            "check that the interface behind the device has an address and a route to the peer (`ip route get`)"
        }
        _ => "",
    }
}

/// `Cannot allocate memory (ENOMEM, 12)`.
pub(crate) fn describe(errno: i32) -> String {
    let text = std::io::Error::from_raw_os_error(errno).to_string();
    // The standard library ends the text with " (os error 12)".
    let text = text.split(" (os error").next().unwrap_or_default().to_owned();
    match name_of(errno) {
        Some(name) => format!("{text} ({name}, {errno})"),
        None => format!("{text} (errno {errno})"),
    }
}

fn name_of(errno: i32) -> Option<&'static str> {
    Some(match errno {
        libc::EPERM => "EPERM",
        libc::ENOENT => "ENOENT",
        libc::EINTR => "EINTR",
        libc::EIO => "EIO",
        libc::ENXIO => "ENXIO",
        libc::EBADF => "EBADF",
        libc::EAGAIN => "EAGAIN",
        libc::ENOMEM => "ENOMEM",
        libc::EACCES => "EACCES",
        libc::EFAULT => "EFAULT",
        libc::EBUSY => "EBUSY",
        libc::ENODEV => "ENODEV",
        libc::EINVAL => "EINVAL",
        libc::ENFILE => "ENFILE",
        libc::EMFILE => "EMFILE",
        libc::ENOSPC => "ENOSPC",
        libc::ENOSYS => "ENOSYS",
        libc::EMSGSIZE => "EMSGSIZE",
        libc::EPROTONOSUPPORT => "EPROTONOSUPPORT",
        libc::EOPNOTSUPP => "EOPNOTSUPP",
        libc::EADDRNOTAVAIL => "EADDRNOTAVAIL",
        libc::ENETUNREACH => "ENETUNREACH",
        libc::EHOSTUNREACH => "EHOSTUNREACH",
        libc::ETIMEDOUT => "ETIMEDOUT",
        _ => return None,
    })
}

/// What the last failed call of this thread left behind; never 0.
pub(crate) fn last_errno() -> i32 {
    match std::io::Error::last_os_error().raw_os_error() {
        Some(errno) if errno != 0 => errno,
        // A provider that fails without saying why.
        _ => libc::EIO,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_error_names_verb_device_errno_cause_and_remedy() {
        let error = VerbsError::refused("ibv_open_device", "mlx5_3", libc::EACCES);
        assert_eq!(error.errno(), Some(libc::EACCES));
        assert_eq!(
            error.to_string(),
            "ibv_open_device on mlx5_3: Permission denied (EACCES, 13)"
        );
        let shown = Error::from(error);
        assert_eq!(shown.kind(), ErrorKind::Unsupported);
        let text = shown.to_string();
        assert!(text.contains("ibv_open_device failed (device mlx5_3)"), "{text}");
        assert!(text.contains("/dev/infiniband/uverbs*"), "{text}");
    }

    #[test]
    fn a_process_that_may_lock_no_memory_lacks_a_resource() {
        let kind = |verb| VerbsError::refused(verb, "d", libc::EPERM).kind();
        assert_eq!(kind("ibv_reg_mr"), ErrorKind::ResourceExhausted);
        assert_eq!(kind("ibv_open_device"), ErrorKind::Unsupported);
    }

    #[test]
    fn every_errno_has_a_kind_and_the_usual_ones_have_remedies() {
        for errno in 1..134 {
            let error = Error::from(VerbsError::refused("ibv_x", "d", errno).because("y"));
            assert!(error.to_string().contains("; y"), "{error}");
        }
        for errno in [
            libc::EPERM,
            libc::ENOMEM,
            libc::ENODEV,
            libc::EOPNOTSUPP,
            libc::EHOSTUNREACH,
        ] {
            assert!(!default_remedy(errno).is_empty());
        }
    }
}
