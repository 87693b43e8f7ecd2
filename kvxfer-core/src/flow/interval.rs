//! Sets of integers as sorted intervals.

use std::ops::Range;

/// How much of a range a set holds.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Coverage {
    /// Nothing.
    None,
    /// Some of it.
    Partial,
    /// All of it.
    Full,
}

/// A set of `u64` as disjoint, non-adjacent, ascending intervals. Appending at the end, the common case, is O(1);
/// anything else finds its place in O(log n).
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct IntervalSet {
    // Starts and ends (exclusive). Neighbours never touch: they would be one interval.
    runs: Vec<(u64, u64)>,
    total: u64,
}

impl IntervalSet {
    /// An empty set; allocates nothing.
    pub const fn new() -> Self {
        IntervalSet {
            runs: Vec::new(),
            total: 0,
        }
    }

    /// Adds a range. Returns how many integers of it were not in the set before.
    pub fn insert(&mut self, range: Range<u64>) -> u64 {
        if range.start >= range.end {
            return 0;
        }
        // The intervals that overlap or touch the range become one.
        let first = self.first_ending_at_or_after(range.start);
        let mut past = first;
        let (mut start, mut end, mut held) = (range.start, range.end, 0);
        while let Some(&(from, to)) = self.runs.get(past).filter(|&&(from, _)| from <= range.end) {
            start = start.min(from);
            end = end.max(to);
            held += to - from;
            past += 1;
        }
        if past == first {
            self.runs.insert(first, (start, end));
        } else {
            self.runs[first] = (start, end);
            self.runs.drain(first + 1..past);
        }
        let added = (end - start) - held;
        self.total += added;
        added
    }

    /// How much of the range is in the set. Of an empty range, nothing.
    pub fn coverage(&self, range: Range<u64>) -> Coverage {
        if range.start >= range.end {
            return Coverage::None;
        }
        // A run that only touches the range's start does not overlap it.
        let index = self.runs.partition_point(|&(_, to)| to <= range.start);
        match self.runs.get(index) {
            Some(&(from, to)) if from <= range.start && range.end <= to => Coverage::Full,
            Some(&(from, _)) if from < range.end => Coverage::Partial,
            _ => Coverage::None,
        }
    }

    /// How many integers are in the set.
    pub fn total(&self) -> u64 {
        self.total
    }

    /// In how many intervals.
    pub fn runs(&self) -> usize {
        self.runs.len()
    }

    /// The intervals, ascending.
    pub fn iter(&self) -> impl Iterator<Item = Range<u64>> + '_ {
        self.runs.iter().map(|&(from, to)| from..to)
    }

    fn first_ending_at_or_after(&self, start: u64) -> usize {
        match self.runs.last() {
            // Streams grow at their end: look there first.
            Some(&(from, to)) if from <= start && start <= to => self.runs.len() - 1,
            Some(&(_, to)) if to < start => self.runs.len(),
            _ => self.runs.partition_point(|&(_, to)| to < start),
        }
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use std::collections::BTreeSet;

    use proptest::prelude::*;

    use super::*;

    #[test]
    fn neighbours_become_one() {
        let mut set = IntervalSet::new();
        assert_eq!(set.insert(10..20), 10);
        assert_eq!(set.insert(30..40), 10);
        assert_eq!(set.runs(), 2);
        assert_eq!(set.insert(20..30), 10);
        assert_eq!((set.runs(), set.iter().next()), (1, Some(10..40)));
        assert_eq!(set.insert(5..45), 10);
        assert_eq!(set.insert(5..45), 0);
        assert_eq!(set.insert(7..7), 0);
        assert_eq!(set.total(), 40);
    }

    #[test]
    fn the_edges_of_u64_fit() {
        let mut set = IntervalSet::new();
        assert_eq!(set.insert(u64::MAX - 1..u64::MAX), 1);
        assert_eq!(set.insert(0..1), 1);
        assert_eq!(set.insert(0..u64::MAX), u64::MAX - 2);
        assert_eq!(set.coverage(0..u64::MAX), Coverage::Full);
    }

    proptest! {
        #[test]
        fn agrees_with_a_set_of_integers(ranges in prop::collection::vec((0u64..64, 0u64..12), 1..40)) {
            let mut set = IntervalSet::new();
            let mut model = BTreeSet::new();
            for (start, length) in ranges {
                let range = start..start + length;
                let held = range.clone().filter(|n| model.contains(n)).count() as u64;
                let expected = match held {
                    0 => Coverage::None,
                    n if n == length => Coverage::Full,
                    _ => Coverage::Partial,
                };
                prop_assert_eq!(set.coverage(range.clone()), expected);
                prop_assert_eq!(set.insert(range.clone()), length - held);
                model.extend(range);
                prop_assert_eq!(set.total(), model.len() as u64);
                let listed: Vec<u64> = set.iter().flatten().collect();
                prop_assert_eq!(listed, model.iter().copied().collect::<Vec<_>>());
                let runs: Vec<_> = set.iter().collect();
                prop_assert!(runs.windows(2).all(|pair| pair[0].end < pair[1].start));
            }
        }
    }
}
