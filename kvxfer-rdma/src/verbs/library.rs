//! The library itself: loaded at run time, kept while anything of it lives.

use std::ffi::{CStr, c_char};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use super::context::TransportKind;
use super::error::{VerbsError, last_errno};
use crate::sys;

/// What is loaded when no path is configured.
const DEFAULT_LIBRARY: &str = "libibverbs.so.1";

/// libibverbs, loaded. Cheap to clone; everything made through it keeps it.
#[derive(Clone)]
pub struct Library {
    inner: Arc<Inner>,
}

struct Inner {
    path: PathBuf,
    verbs: sys::Libibverbs,
}

/// What `fork` does to registered memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ForkStatus {
    /// A child's pages are copied by the kernel when it forks: nothing to do.
    Unneeded,
    /// `ibv_fork_init` was called: registered ranges are kept from children.
    Enabled,
    /// A fork moves registered pages of the parent away from under the device (copy on write): transfers after a
    /// fork may read or write the wrong memory.
    Disabled,
    /// The library cannot say.
    Unknown,
}

/// A device as the library lists it, without being opened.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DeviceListing {
    /// Its name: `mlx5_0`, `rxe0`.
    pub name: String,
    /// Its character device: `uverbs0`.
    pub character_device: String,
    /// Its directory below `/sys/class/infiniband`.
    pub sysfs_path: PathBuf,
    /// What it speaks.
    pub transport: TransportKind,
}

impl Library {
    /// Loads `path`, or `libibverbs.so.1` from where the dynamic loader looks.
    ///
    /// # Errors
    /// [`VerbsError::Load`] if the loader does not find or accept it, [`VerbsError::MissingSymbol`] if it lacks a
    /// function that kvxfer needs.
    pub fn load(path: Option<&Path>) -> Result<Library, VerbsError> {
        let path = path.unwrap_or(Path::new(DEFAULT_LIBRARY)).to_owned();
        let failed = |error: libloading::Error| {
            // The loader's words mostly start with the path, which the error names already.
            let words = error.to_string();
            let why = words.strip_prefix(&format!("{}: ", path.display())).unwrap_or(&words);
            VerbsError::Load {
                path: path.clone(),
                why: why.to_owned(),
            }
        };
        let flags = libc::RTLD_NOW | libc::RTLD_LOCAL | libc::RTLD_NODELETE;
        // SAFETY: loading runs the library's initialisers. The path is the system's libibverbs or one that the
        // operator configured; what initialisers do is theirs to vouch for. The library is never unmapped
        // (RTLD_NODELETE), so no thread or destructor of a provider can outlive its code.
        let library = unsafe { libloading::os::unix::Library::open(Some(&path), flags) }.map_err(failed)?;
        // SAFETY: symbols are looked up by the names that the generated table declares, whose signatures come from
        // rdma-core's headers; libibverbs keeps them stable by symbol version.
        let verbs = unsafe { sys::Libibverbs::from_library(library) }.map_err(failed)?;
        require_symbols(&verbs, &path)?;
        Ok(Library {
            inner: Arc::new(Inner { path, verbs }),
        })
    }

    /// What was loaded.
    pub fn path(&self) -> &Path {
        &self.inner.path
    }

    /// The names of the devices, in the library's order.
    ///
    /// # Errors
    /// [`VerbsError::Refused`] if the library cannot list them (`ENOSYS`: the kernel has no RDMA).
    pub fn device_names(&self) -> Result<Vec<String>, VerbsError> {
        Ok(self.devices()?.into_iter().map(|device| device.name).collect())
    }

    /// The devices as they are listed, in the library's order.
    ///
    /// # Errors
    /// As [`device_names`](Self::device_names).
    pub fn devices(&self) -> Result<Vec<DeviceListing>, VerbsError> {
        let list = DeviceList::get(self)?;
        Ok(list.iter().map(listing).collect())
    }

    /// What a fork does to registered memory.
    pub fn fork_status(&self) -> ForkStatus {
        let Ok(query) = &self.inner.verbs.ibv_is_fork_initialized else {
            return ForkStatus::Unknown;
        };
        // SAFETY: takes no argument, reads the library's and the kernel's state.
        match unsafe { query() } {
            sys::IBV_FORK_UNNEEDED => ForkStatus::Unneeded,
            sys::IBV_FORK_ENABLED => ForkStatus::Enabled,
            sys::IBV_FORK_DISABLED => ForkStatus::Disabled,
            _ => ForkStatus::Unknown,
        }
    }

    /// Whether regions can be registered from a dmabuf as far as the library is concerned (rdma-core 34 or later).
    pub fn knows_dmabuf(&self) -> bool {
        self.inner.verbs.ibv_reg_dmabuf_mr.is_ok()
    }

    pub(crate) fn verbs(&self) -> &sys::Libibverbs {
        &self.inner.verbs
    }
}

impl std::fmt::Debug for Library {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Library({})", self.path().display())
    }
}

/// The library's device list while it is held.
pub(super) struct DeviceList<'a> {
    library: &'a Library,
    list: *mut *mut sys::ibv_device,
    count: usize,
}

impl<'a> DeviceList<'a> {
    pub(super) fn get(library: &'a Library) -> Result<DeviceList<'a>, VerbsError> {
        let mut count = 0;
        // SAFETY: `count` lives across the call; the symbol's presence was checked when the library was loaded.
        let list = unsafe { library.verbs().ibv_get_device_list(&mut count) };
        if list.is_null() {
            let errno = last_errno();
            let error = VerbsError::refused("ibv_get_device_list", "(any)", errno);
            return Err(match errno {
                libc::ENOSYS => error
                    .because("the kernel has no RDMA subsystem")
                    .with_remedy("load ib_uverbs and the driver of the device"),
                _ => error,
            });
        }
        Ok(DeviceList {
            library,
            list,
            count: usize::try_from(count).unwrap_or(0),
        })
    }

    pub(super) fn iter(&self) -> impl Iterator<Item = &sys::ibv_device> {
        (0..self.count).filter_map(|index| {
            // SAFETY: the library returned an array of `count` pointers, which is ours until `drop` frees it; the
            // devices it points to live as long as the array does.
            unsafe { (*self.list.add(index)).as_ref() }
        })
    }
}

impl Drop for DeviceList<'_> {
    fn drop(&mut self) {
        // SAFETY: `list` came from `ibv_get_device_list` and is freed only here; borrows from `iter` end before.
        unsafe { self.library.verbs().ibv_free_device_list(self.list) }
    }
}

pub(super) fn listing(device: &sys::ibv_device) -> DeviceListing {
    DeviceListing {
        name: text(&device.name),
        character_device: text(&device.dev_name),
        sysfs_path: PathBuf::from(text(&device.ibdev_path)),
        transport: TransportKind::from_raw(device.transport_type, device.node_type),
    }
}

/// A C string in a fixed array, which need not be terminated.
pub(super) fn text(field: &[c_char]) -> String {
    let bytes: Vec<u8> = field.iter().map(|&byte| byte as u8).collect();
    match CStr::from_bytes_until_nul(&bytes) {
        Ok(text) => text.to_string_lossy().into_owned(),
        Err(_) => String::from_utf8_lossy(&bytes).into_owned(),
    }
}

/// Fails unless every function that is called without asking first is there. The optional ones are
/// `ibv_reg_dmabuf_mr` (rdma-core 34), `ibv_reg_mr_iova2` (28), `_ibv_query_gid_ex` (31) and
/// `ibv_is_fork_initialized` (35).
fn require_symbols(verbs: &sys::Libibverbs, path: &Path) -> Result<(), VerbsError> {
    macro_rules! require {
        ($($symbol:ident)*) => {
            $(if verbs.$symbol.is_err() {
                return Err(VerbsError::MissingSymbol { path: path.to_owned(), symbol: stringify!($symbol) });
            })*
        };
    }
    require! {
        ibv_get_device_list ibv_free_device_list ibv_open_device ibv_close_device
        ibv_get_async_event ibv_ack_async_event ibv_query_device ibv_query_port ibv_query_gid ibv_query_pkey
        ibv_alloc_pd ibv_dealloc_pd ibv_reg_mr ibv_dereg_mr
        ibv_create_comp_channel ibv_destroy_comp_channel ibv_get_cq_event ibv_ack_cq_events
        ibv_create_cq ibv_destroy_cq
        ibv_create_qp ibv_modify_qp ibv_query_qp ibv_destroy_qp
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_absent_library_is_a_typed_answer() {
        let error = Library::load(Some(Path::new("/nonexistent/libibverbs.so.1"))).unwrap_err();
        assert!(matches!(error, VerbsError::Load { .. }), "{error:?}");
        assert!(error.to_string().contains("/nonexistent/libibverbs.so.1"));
    }

    #[test]
    fn another_library_is_refused_by_the_first_symbol_it_lacks() {
        let error = Library::load(Some(Path::new("libc.so.6"))).unwrap_err();
        assert_eq!(
            error,
            VerbsError::MissingSymbol {
                path: "libc.so.6".into(),
                symbol: "ibv_get_device_list"
            }
        );
    }
}
