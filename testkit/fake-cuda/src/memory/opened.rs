//! Which process has which allocation of another's open: the owner may not free it meanwhile. A file for each, in the directory
//! that the processes share.

use std::path::{Path, PathBuf};

const DIRECTORY: &str = "opened";

/// What names an allocation: the process that it is of, and its file there.
pub(crate) type Key = (u32, u64);

/// The files of a directory; none without one.
#[derive(Debug)]
pub(crate) struct Opened(Option<PathBuf>);

impl Opened {
    pub(crate) fn new(directory: Option<&Path>) -> Opened {
        Opened(directory.map(|directory| directory.join(DIRECTORY)))
    }

    fn file(&self, (owner, inode): Key) -> Option<PathBuf> {
        let name = format!("{owner}-{inode}-{}", std::process::id());
        Some(self.0.as_ref()?.join(name))
    }

    /// This process has opened it.
    pub(crate) fn note(&self, key: Key) {
        if let (Some(directory), Some(file)) = (&self.0, self.file(key)) {
            // A directory that is gone is one whose test is over.
            let _ = std::fs::create_dir_all(directory).and_then(|()| std::fs::write(file, []));
        }
    }

    /// This process has closed it.
    pub(crate) fn forget(&self, key: Key) {
        if let Some(file) = self.file(key) {
            let _ = std::fs::remove_file(file);
        }
    }

    /// Processes that have it open. One that was killed has closed it.
    pub(crate) fn who(&self, (owner, inode): Key) -> Vec<u32> {
        let entries = self.0.as_ref().and_then(|directory| std::fs::read_dir(directory).ok());
        let prefix = format!("{owner}-{inode}-");
        let names = entries.into_iter().flatten().flatten().map(|entry| entry.file_name());
        let processes = names.filter_map(|name| name.to_str()?.strip_prefix(&prefix)?.parse().ok());
        processes.filter(|process| is_running(*process)).collect()
    }
}

fn is_running(process: u32) -> bool {
    let said = std::fs::read_to_string(format!("/proc/{process}/stat")).unwrap_or_default();
    // Behind the name, which may have anything in it.
    let state = said.rsplit_once(") ").and_then(|(_, rest)| rest.chars().next());
    state.is_some_and(|state| !"ZX".contains(state))
}
