//! How a handle ends: one sticky [`Completion`], looked at by polling, by waiting, by `.await`, or through an event.

use std::fmt;
use std::future::{Future, IntoFuture};
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{Context, Poll, Waker};
use std::time::{Duration, Instant};

use parking_lot::{Condvar, Mutex};

use kvxfer_core::error::Destination;
use kvxfer_core::{Error, ErrorKind, Result};

use crate::control::Reports;

/// The end of a handle, as soon as it is known. Sticky: once there, it stays, for every view of it.
///
/// [`poll`](Self::poll), [`wait`](Self::wait) and `.await` are views of the same thing and can be mixed. Nothing
/// here needs an async runtime: the future registers a plain [`std::task::Waker`].
pub struct Completion<T> {
    cell: Arc<Cell<T>>,
}

impl<T: Clone> Completion<T> {
    /// The result, if the handle has ended.
    pub fn poll(&self) -> Option<Result<T>> {
        if !self.is_done() {
            if let Some(reports) = &self.cell.reports {
                reports.nudge();
            }
            return None;
        }
        self.cell.inner.lock().result.clone()
    }

    /// Whether the handle has ended.
    pub fn is_done(&self) -> bool {
        self.ended()
    }

    /// Blocks until the handle ends, at most for `timeout`.
    ///
    /// # Errors
    /// The handle's own error; or, when the time is over first, `DeadlineExceeded` with
    /// [`Destination::Quarantined`]: the handle is still open, nothing may be concluded about its blocks, and waiting
    /// again is right. [`wait_timeout`](Self::wait_timeout) tells the two apart by type.
    pub fn wait(&self, timeout: Duration) -> Result<T> {
        self.wait_timeout(timeout).unwrap_or_else(|| {
            Err(
                Error::new(ErrorKind::DeadlineExceeded, format!("a wait of {timeout:?}"))
                    .because("the handle is still open")
                    .remedy("wait again, or cancel the handle and wait for its end before reusing its blocks")
                    .destination_is(Destination::Quarantined),
            )
        })
    }

    /// Blocks until the handle ends; `None` if it is still open after `timeout`.
    pub fn wait_timeout(&self, timeout: Duration) -> Option<Result<T>> {
        // A timeout too long for the clock is "for ever", which no caller lives to see.
        let deadline = Instant::now().checked_add(timeout);
        let mut inner = self.cell.inner.lock();
        let mut waiting = None;
        loop {
            if let Some(result) = &inner.result {
                return Some(result.clone());
            }
            if waiting.is_none() {
                waiting = self.cell.reports.as_ref().map(Waiting::new);
            }
            inner.blocked += 1;
            let timed_out = match deadline {
                Some(deadline) => self.cell.ended.wait_until(&mut inner, deadline).timed_out(),
                None => {
                    self.cell.ended.wait(&mut inner);
                    false
                }
            };
            inner.blocked -= 1;
            if timed_out {
                return inner.result.clone();
            }
        }
    }

    /// A future of the result. Any number may exist; dropping one does not touch the handle.
    pub fn future(&self) -> CompletionFuture<T> {
        CompletionFuture {
            cell: Arc::clone(&self.cell),
            key: None,
            waiting: None,
        }
    }
}

impl<T> Completion<T> {
    /// Whether the handle has ended.
    pub(crate) fn ended(&self) -> bool {
        self.cell.done.load(Ordering::Acquire)
    }

    /// An open completion and the side that ends it.
    /// With `reports`, waiting for it hurries the control plane along.
    pub(crate) fn new(reports: Option<Arc<Reports>>) -> (Completion<T>, Completer<T>) {
        let cell = Arc::new(Cell {
            reports,
            done: AtomicBool::new(false),
            inner: Mutex::new(Inner {
                result: None,
                wakers: Vec::new(),
                next_key: 0,
                blocked: 0,
            }),
            ended: Condvar::new(),
        });
        let completer = Completer {
            cell: Arc::clone(&cell),
        };
        (Completion { cell }, completer)
    }
}

impl<T> Clone for Completion<T> {
    fn clone(&self) -> Self {
        Completion {
            cell: Arc::clone(&self.cell),
        }
    }
}

impl<T> fmt::Debug for Completion<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let done = self.cell.done.load(Ordering::Acquire);
        f.write_str(if done { "Completion(ended)" } else { "Completion(open)" })
    }
}

impl<T: Clone> IntoFuture for Completion<T> {
    type Output = Result<T>;
    type IntoFuture = CompletionFuture<T>;
    fn into_future(self) -> CompletionFuture<T> {
        self.future()
    }
}

impl<T: Clone> IntoFuture for &Completion<T> {
    type Output = Result<T>;
    type IntoFuture = CompletionFuture<T>;
    fn into_future(self) -> CompletionFuture<T> {
        self.future()
    }
}

/// The future of a [`Completion`].
pub struct CompletionFuture<T> {
    cell: Arc<Cell<T>>,
    /// This future's place among the wakers, once it has been polled.
    key: Option<u64>,
    waiting: Option<Waiting>,
}

/// Somebody waits for a transfer, as long as this lives.
pub(crate) struct Waiting(Arc<Reports>);

impl Waiting {
    pub(crate) fn new(reports: &Arc<Reports>) -> Waiting {
        reports.waits();
        Waiting(Arc::clone(reports))
    }
}

impl Drop for Waiting {
    fn drop(&mut self) {
        self.0.waits_no_more();
    }
}

impl<T: Clone> Future for CompletionFuture<T> {
    type Output = Result<T>;

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Result<T>> {
        let cell = Arc::clone(&self.cell);
        let mut inner = cell.inner.lock();
        if let Some(result) = &inner.result {
            self.waiting = None;
            return Poll::Ready(result.clone());
        }
        if self.waiting.is_none() {
            self.waiting = cell.reports.as_ref().map(Waiting::new);
        }
        let key = match self.key {
            Some(key) => key,
            None => {
                inner.next_key += 1;
                let key = inner.next_key;
                self.key = Some(key);
                key
            }
        };
        match inner.wakers.iter_mut().find(|(other, _)| *other == key) {
            Some((_, waker)) => waker.clone_from(context.waker()),
            None => inner.wakers.push((key, context.waker().clone())),
        }
        Poll::Pending
    }
}

impl<T> Drop for CompletionFuture<T> {
    fn drop(&mut self) {
        if let Some(key) = self.key {
            self.cell.inner.lock().wakers.retain(|(other, _)| *other != key);
        }
    }
}

impl<T> fmt::Debug for CompletionFuture<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("CompletionFuture")
    }
}

/// The side that ends a [`Completion`].
pub(crate) struct Completer<T> {
    cell: Arc<Cell<T>>,
}

impl<T> Completer<T> {
    /// Ends it, unless it has ended. Who waits is given back for the caller to wake once it holds no lock: wakers of
    /// futures run foreign code, and a thread that goes on at once would run into the lock. `None` if it had ended
    /// before.
    #[must_use]
    pub(crate) fn complete(&self, result: Result<T>) -> Option<Wakers>
    where
        T: Send + 'static,
    {
        let mut inner = self.cell.inner.lock();
        if inner.result.is_some() {
            return None;
        }
        inner.result = Some(result);
        self.cell.done.store(true, Ordering::Release);
        let wakers = std::mem::take(&mut inner.wakers);
        let blocked = inner.blocked > 0;
        drop(inner);
        Some(Wakers {
            wakers,
            blocked: blocked.then(|| Arc::clone(&self.cell) as Arc<dyn Blocked>),
        })
    }
}

impl<T> Clone for Completer<T> {
    fn clone(&self) -> Self {
        Completer {
            cell: Arc::clone(&self.cell),
        }
    }
}

/// Who waits for a completion that has ended.
#[must_use]
pub(crate) struct Wakers {
    wakers: Vec<(u64, Waker)>,
    blocked: Option<Arc<dyn Blocked>>,
}

/// A completion that threads are blocked on.
trait Blocked: Send + Sync {
    fn release(&self);
}

impl<T: Send> Blocked for Cell<T> {
    fn release(&self) {
        self.ended.notify_all();
    }
}

impl Wakers {
    /// Has blocked threads go on, before anything that takes time.
    pub(crate) fn release(&mut self) {
        if let Some(blocked) = self.blocked.take() {
            blocked.release();
        }
    }

    /// Wakes them all. Call without locks held: a waker may call back into the endpoint.
    pub(crate) fn wake(mut self) {
        self.release();
        for (_, waker) in self.wakers {
            waker.wake();
        }
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.wakers.is_empty() && self.blocked.is_none()
    }
}

struct Cell<T> {
    reports: Option<Arc<Reports>>,
    done: AtomicBool,
    inner: Mutex<Inner<T>>,
    ended: Condvar,
}

struct Inner<T> {
    result: Option<Result<T>>,
    wakers: Vec<(u64, Waker)>,
    next_key: u64,
    /// Threads inside a wait.
    blocked: usize,
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::AtomicUsize;
    use std::task::Wake;

    use super::*;

    struct Count(AtomicUsize);
    impl Wake for Count {
        fn wake(self: Arc<Self>) {
            self.0.fetch_add(1, Ordering::SeqCst);
        }
    }

    #[test]
    fn ends_once_and_stays() {
        let (completion, completer) = Completion::new(None);
        assert!(completion.poll().is_none());
        completer.complete(Ok(7)).expect("was open").wake();
        assert!(completer.complete(Ok(8)).is_none());
        assert_eq!(completion.poll(), Some(Ok(7)));
        assert_eq!(completion.wait(Duration::ZERO), Ok(7));
    }

    #[test]
    fn a_wait_that_times_out_says_that_the_blocks_are_not_free() {
        let (completion, _completer) = Completion::<u32>::new(None);
        let error = completion.wait(Duration::from_millis(5)).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::DeadlineExceeded);
        assert_eq!(error.destination(), Destination::Quarantined);
        assert!(completion.wait_timeout(Duration::from_millis(1)).is_none());
    }

    #[test]
    fn every_future_is_woken_once_and_dropped_ones_are_forgotten() {
        let (completion, completer) = Completion::new(None);
        let count = Arc::new(Count(AtomicUsize::new(0)));
        let waker = Waker::from(Arc::clone(&count));
        let mut context = Context::from_waker(&waker);
        let mut kept = Box::pin(completion.future());
        let mut dropped = Box::pin(completion.future());
        for _ in 0..3 {
            assert!(kept.as_mut().poll(&mut context).is_pending());
            assert!(dropped.as_mut().poll(&mut context).is_pending());
        }
        drop(dropped);
        completer.complete(Ok(1)).expect("was open").wake();
        assert_eq!(count.0.load(Ordering::SeqCst), 1);
        assert_eq!(kept.as_mut().poll(&mut context), Poll::Ready(Ok(1)));
    }

    #[test]
    fn a_blocked_thread_is_released() {
        let (completion, completer) = Completion::new(None);
        let waiting = std::thread::spawn(move || completion.wait(Duration::from_secs(20)));
        std::thread::sleep(Duration::from_millis(10));
        completer.complete(Ok(3)).expect("was open").wake();
        assert_eq!(waiting.join().unwrap(), Ok(3));
    }
}
