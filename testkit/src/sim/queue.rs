//! Virtual time: an ordered queue of events, and pipes that keep order and add delay.

use std::cmp::Ordering;
use std::collections::{BinaryHeap, VecDeque};

use kvxfer_core::Time;

/// Events by time; equal times in the order of their scheduling.
#[derive(Debug)]
pub(crate) struct Queue<E> {
    heap: BinaryHeap<Entry<E>>,
    scheduled: u64,
}

#[derive(Debug)]
struct Entry<E> {
    at: Time,
    order: u64,
    event: E,
}

impl<E> Queue<E> {
    pub(crate) fn new() -> Self {
        Queue {
            heap: BinaryHeap::new(),
            scheduled: 0,
        }
    }

    pub(crate) fn push(&mut self, at: Time, event: E) {
        self.scheduled += 1;
        self.heap.push(Entry {
            at,
            order: self.scheduled,
            event,
        });
    }

    pub(crate) fn pop(&mut self) -> Option<(Time, E)> {
        self.heap.pop().map(|entry| (entry.at, entry.event))
    }
}

impl<E> PartialEq for Entry<E> {
    fn eq(&self, other: &Self) -> bool {
        self.order == other.order
    }
}

impl<E> Eq for Entry<E> {}

impl<E> PartialOrd for Entry<E> {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

impl<E> Ord for Entry<E> {
    // Reversed: the heap gives its greatest, and the earliest shall come first.
    fn cmp(&self, other: &Self) -> Ordering {
        (other.at, other.order).cmp(&(self.at, self.order))
    }
}

/// One direction of a connection: what goes in comes out in order, each item not before its time.
#[derive(Debug)]
pub(crate) struct Pipe<T> {
    items: VecDeque<(Time, T)>,
    last: Time,
    cut: bool,
}

impl<T> Pipe<T> {
    pub(crate) fn new() -> Self {
        Pipe {
            items: VecDeque::new(),
            last: Time::ZERO,
            cut: false,
        }
    }

    /// Puts an item in; says when it can be taken out, or `None` if the pipe is cut and the item lost.
    pub(crate) fn put(&mut self, ready: Time, item: T) -> Option<Time> {
        if self.cut {
            return None;
        }
        self.last = self.last.max(ready);
        self.items.push_back((self.last, item));
        Some(self.last)
    }

    /// The next item, if its time has come.
    pub(crate) fn take(&mut self, now: Time) -> Option<T> {
        if self.items.front().is_some_and(|(ready, _)| *ready <= now) {
            return self.items.pop_front().map(|(_, item)| item);
        }
        None
    }

    /// Gives back the rest of an item that was taken.
    pub(crate) fn put_back(&mut self, now: Time, item: T) {
        self.items.push_front((now, item));
    }

    pub(crate) fn iter(&self) -> impl Iterator<Item = &T> {
        self.items.iter().map(|(_, item)| item)
    }

    /// When the next item can be taken out.
    pub(crate) fn next_ready(&self) -> Option<Time> {
        self.items.front().map(|(ready, _)| *ready)
    }

    /// Loses what is under way beyond the first `survivors` items; nothing more goes in.
    pub(crate) fn cut(&mut self, survivors: usize) -> usize {
        self.cut = true;
        let lost = self.items.len().saturating_sub(survivors);
        self.items.truncate(survivors);
        lost
    }

    /// Nothing more goes in; what is under way still comes out. Says when the last of it does.
    pub(crate) fn finish(&mut self, now: Time) -> Time {
        self.cut = true;
        self.last.max(now)
    }

    pub(crate) fn len(&self) -> usize {
        self.items.len()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn equal_times_keep_their_order() {
        let mut queue = Queue::new();
        for (at, name) in [(2, 'c'), (1, 'a'), (2, 'd'), (1, 'b')] {
            queue.push(Time::from_nanos(at), name);
        }
        let order: String = std::iter::from_fn(|| queue.pop().map(|(_, name)| name)).collect();
        assert_eq!(order, "abcd");
    }

    #[test]
    fn a_pipe_never_reorders_and_loses_only_its_tail() {
        let at = Time::from_nanos;
        let mut pipe = Pipe::new();
        assert_eq!(pipe.put(at(9), 'a'), Some(at(9)));
        assert_eq!(pipe.put(at(3), 'b'), Some(at(9)), "b was faster, but must wait for a");
        assert_eq!(pipe.take(at(8)), None);
        assert_eq!(pipe.take(at(9)), Some('a'));
        assert_eq!(pipe.put(at(10), 'c'), Some(at(10)));
        assert_eq!(pipe.cut(1), 1);
        assert_eq!(pipe.put(at(11), 'd'), None);
        assert_eq!((pipe.take(at(99)), pipe.take(at(99))), (Some('b'), None));
    }
}
