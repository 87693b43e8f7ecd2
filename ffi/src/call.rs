//! The border: what every function of the interface goes through.

use std::any::Any;
use std::cell::{Cell, RefCell};
use std::panic::{AssertUnwindSafe, catch_unwind};

use kvxfer::{Error, ErrorKind, Result};

use crate::fork;
use crate::status::{KVX_OK, code, kvx_status};

thread_local! {
    static LAST: RefCell<Option<Error>> = const { RefCell::new(None) };
    /// Whether this thread is inside a release callback of the application's.
    static RELEASING: Cell<bool> = const { Cell::new(false) };
}

/// What a function gives back.
pub(crate) trait Answer {
    /// In C.
    type Code;
    fn told(self) -> Self::Code;
    fn refused(status: kvx_status) -> Self::Code;
}

impl Answer for () {
    type Code = kvx_status;
    fn told(self) -> kvx_status {
        KVX_OK
    }
    fn refused(status: kvx_status) -> kvx_status {
        status
    }
}

/// A status that is no error, such as `KVX_PENDING`; or one that is, with the error kept already.
pub(crate) struct Status(pub(crate) kvx_status);

impl Answer for Status {
    type Code = kvx_status;
    fn told(self) -> kvx_status {
        self.0
    }
    fn refused(status: kvx_status) -> kvx_status {
        status
    }
}

/// A length, for functions that write a text or bytes.
pub(crate) struct Length(pub(crate) usize);

impl Answer for Length {
    type Code = i64;
    fn told(self) -> i64 {
        // No text of ours comes near.
        i64::try_from(self.0).unwrap_or(i64::MAX)
    }
    fn refused(status: kvx_status) -> i64 {
        i64::from(status)
    }
}

/// Runs a function's body: turns forked children away, keeps its error for `kvx_last_error`, and makes a panic one.
pub(crate) fn call<A: Answer>(body: impl FnOnce() -> Result<A>) -> A::Code {
    // What a panic leaves half done is behind locks that do not poison, and in objects that the caller can free.
    let result = match catch_unwind(AssertUnwindSafe(|| {
        admitted()?;
        body()
    })) {
        Ok(result) => result,
        Err(payload) => Err(panicked(payload)),
    };
    match result {
        Ok(answer) => answer.told(),
        Err(error) => A::refused(keep(error)),
    }
}

/// Keeps an error as this thread's last, and gives its status.
pub(crate) fn keep(error: Error) -> kvx_status {
    let status = code(error.kind());
    // A thread that is ending has no place for it any more.
    let _ = LAST.try_with(|last| last.replace(Some(error)));
    status
}

/// This thread's last error.
pub(crate) fn last() -> Option<Error> {
    LAST.try_with(|last| last.borrow().clone()).ok().flatten()
}

/// Forgets it.
pub(crate) fn forget() {
    let _ = LAST.try_with(|last| last.replace(None));
}

/// Runs a release callback. It may run under a lock of the library's: calls from inside it are refused, not deadlocked.
pub(crate) fn releasing(callback: impl FnOnce()) {
    if fork::is_child() {
        return;
    }
    let before = RELEASING.try_with(|releasing| releasing.replace(true));
    callback();
    if let Ok(before) = before {
        let _ = RELEASING.try_with(|releasing| releasing.set(before));
    }
}

fn admitted() -> Result<()> {
    if fork::is_child() {
        return Err(Error::new(ErrorKind::Unsupported, "a call in a forked child")
            .because("its endpoints, threads and memory belong to the parent; nothing was touched")
            .remedy("use the library first in the child, or start the child with exec"));
    }
    if RELEASING.try_with(Cell::get).unwrap_or(false) {
        return Err(
            Error::new(ErrorKind::Unsupported, "a call from inside a release callback")
                .because("the callback may run while the library holds a lock")
                .remedy("only free or unmap the memory in it"),
        );
    }
    Ok(())
}

fn panicked(payload: Box<dyn Any + Send>) -> Error {
    let message = match (payload.downcast_ref::<&str>(), payload.downcast_ref::<String>()) {
        (Some(text), _) => (*text).to_owned(),
        (None, Some(text)) => text.clone(),
        (None, None) => "a panic without a message".to_owned(),
    };
    // Dropping it may run code that panics again.
    std::mem::forget(payload);
    Error::new(ErrorKind::Internal, "a defect of kvxfer")
        .because(message)
        .remedy("please report this, with the line that the program wrote to its standard error")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::status::{KVX_ERR_INTERNAL, KVX_ERR_UNSUPPORTED, kvx_last_error_message};

    extern "C" fn panics(formatted: bool) -> kvx_status {
        call(|| -> Result<()> {
            if formatted {
                panic!("number {}", 7);
            }
            panic!("plain");
        })
    }

    extern "C" fn panics_in_a_length() -> i64 {
        call(|| -> Result<Length> { std::panic::panic_any(7u8) })
    }

    #[test]
    fn a_panic_is_an_internal_error_with_its_message() {
        for (formatted, wanted) in [(true, "number 7"), (false, "plain")] {
            assert_eq!(panics(formatted), KVX_ERR_INTERNAL);
            let mut text = [0u8; 256];
            // SAFETY: a buffer of this length.
            let length = unsafe { kvx_last_error_message(text.as_mut_ptr().cast(), text.len()) };
            let text = std::str::from_utf8(&text[..usize::try_from(length).unwrap()]).unwrap();
            assert!(text.starts_with("Internal: a defect of kvxfer: "), "{text}");
            assert!(text.contains(wanted), "{text}");
        }
        assert_eq!(panics_in_a_length(), i64::from(KVX_ERR_INTERNAL));
    }

    #[test]
    fn a_release_callback_is_turned_away() {
        let mut status = KVX_OK;
        releasing(|| status = call(|| Ok(())));
        assert_eq!(status, KVX_ERR_UNSUPPORTED);
        assert_eq!(call(|| Ok(())), KVX_OK);
    }
}
